"""Text to shards: exact tokens, the same bytes for any workers and any interruption, and clear refusals."""

import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from megatoken.base.errors import ExitCode, MegatokenError, PeerError, StorageError
from megatoken.data.dataset import load_dataset
from megatoken.data.shard_format import read_manifest
from megatoken.text import prepare as preparation
from megatoken.text.corpus_reader import ReadPosition
from megatoken.text.documents import SEPARATOR, PrepareOptions
from megatoken.text.encode_workers import encode_corpus
from megatoken.text.prepare import PrepareResult
from megatoken.text.sources import find_source
from megatoken.text.tokenizer import Tokenizer
from tests.data.small_dataset import stop_after
from tests.processes import children, wait_for_group
from tests.soak import prepare_soak
from tests.text.test_documents import write, write_rows

EOT = 256  # of the tokenizer "bytes"
COUNTS = "empty replaced skipped binary_files seams val_from_tail_tokens"


def make_corpus(folder: Path) -> Path:
    """About 80 kB: small files, a long one, rows in several forms, some of it broken."""
    draw = random.Random(0)
    word_list = "the,cat,sat,naïve,中文,x1,(y),don't,\n,  "
    words = word_list.split(",")

    def text(length):
        return " ".join(draw.choices(words, k=length))

    files = {f"small{n:02d}.txt": f"{n} {text(100)}" for n in range(20)}
    files["long.txt"] = text(7_000)
    files["many.txt"] = "<|endoftext|>".join(text(50) for _ in range(40))
    files["rows.jsonl"] = "".join(json.dumps({"text": text(60)}) + "\n" for _ in range(50))
    files |= {"broken.txt": b"bad \xff byte", "binary.txt": b"\0\1\2", "empty.txt": " \n"}
    for name, content in files.items():
        write(folder / name, content)
    rows = [{"text": text(30), "id": number} for number in range(30)]
    for name, form in {"t.parquet": "parquet", "t.csv": ",", "t.jsonl.gz": "lines"}.items():
        write_rows(folder / name, form, rows)
    return folder


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks, and several processes for a corpus of 60 kB."""
    monkeypatch.setattr(preparation, "PrepareOptions", partial(PrepareOptions, chunk_bytes=5000))
    monkeypatch.setattr(preparation, "WORKER_BYTES", 1)


def read_split(folder: Path, split: str) -> list[int]:
    """All ids of a split, every header, size and hash in the manifest checked on the way."""
    tokens = getattr(load_dataset(folder), split)
    return tokens.read(0, len(tokens)).tolist()


def read_folder(folder: Path) -> dict[Path, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}


def prepare(source: Path | str, out: Path, **settings: Any) -> PrepareResult:
    """Prepare bytes in one process, unless settings say otherwise."""
    return preparation.prepare(source, out, **{"tokenizer": "bytes", "workers": 1} | settings)


def refuse(source: Path | str, out: Path, code: int = ExitCode.DATA, **settings: Any) -> str:
    with pytest.raises(MegatokenError) as caught:
        prepare(source, out, **settings)
    assert caught.value.code == code
    return str(caught.value)


# --- what is written ------------------------------------------------------------------------------


CHANGES = {  # normalizer, pre-tokenizer, decoder
    "spaces": (normalizers.Replace("  ", " "), pre_tokenizers.Metaspace(), decoders.Metaspace()),
    "words": (None, pre_tokenizers.Whitespace(), None),
    "NFKC": (normalizers.NFKC(), pre_tokenizers.ByteLevel(), decoders.ByteLevel()),
}


def count_bytes(*texts: str) -> int:
    return sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("kind", ["bpe:300", *CHANGES])
def test_bytes_of_text_are_compared_with_what_shards_decode_to(
    tmp_path: Path, small_chunks: None, kind: str
):
    draw, source, out, tokenizer = random.Random(kind), tmp_path / "in", tmp_path / "out", kind
    texts = {"train": [], "val": []}
    for split, own in texts.items():
        for _ in range(30):
            own.append("".join(draw.choices("abc  \n\ufb01\u00e9\u5927", k=500)) + "a")
        write(source / f"{split}.txt", SEPARATOR.decode().join(own))
    if kind in CHANGES:
        tokenizer = f"{tmp_path}/tokenizer.json"
        inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
        inner.normalizer, inner.pre_tokenizer, inner.decoder = CHANGES[kind]
        trainer = BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"])
        inner.train_from_iterator(texts["train"][:1], trainer)
        inner.save(tokenizer)
    result = prepare(source, out, tokenizer=tokenizer)
    inner = tokenizers.Tokenizer.from_file(f"{out}/tokenizer/tokenizer.json")
    expected = {}
    for split, own in texts.items():
        ids = np.array(read_split(out, split))
        cuts = np.flatnonzero(ids == read_manifest(out).tokenizer["eot"])
        decoded = [inner.decode(document.tolist()) for document in np.split(ids, cuts)]
        pairs = zip(own, decoded, strict=True)
        lost = sum(count_bytes(*(Counter(text) - Counter(back)).elements()) for text, back in pairs)
        assert (lost > 0) == (kind in CHANGES)
        sizes = {"text": count_bytes(*own), "decoded": count_bytes(*decoded), "lost": lost}
        expected[split] = sizes
    assert result.bytes == read_manifest(out).bytes == expected


def test_a_tokenizer_that_drops_much_of_the_text_is_refused(tmp_path: Path):
    letters = {letter: id for id, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({**letters, "</s>": 27}, []))
    inner.add_special_tokens(["</s>"])
    inner.save(f"{tmp_path}/letters.json")
    settings = {"tokenizer": f"{tmp_path}/letters.json", "val_fraction": 0}
    few = write(tmp_path / "few.txt", "größe und käse " * 9 + "a" * 500)
    assert prepare(few, tmp_path / "few", **settings).bytes["train"]["lost"] == 9 * 3 * 2
    refuse(write(tmp_path / "much.txt", "привет "), tmp_path / "much", **settings)


@pytest.mark.fault(37)
def test_counts_are_exact_and_in_the_manifest(tmp_path: Path):
    source, out = make_corpus(tmp_path / "corpus"), tmp_path / "out"
    zero = dict.fromkeys(COUNTS.split(), 0)
    kept = prepare(source, out, val_fraction=0.1)
    assert kept.counts == zero | {"empty": 1, "replaced": 1, "binary_files": 1}
    assert kept.documents == 20 + 1 + 40 + 50 + 1 + 3 * 30
    manifest = read_manifest(out)
    assert manifest.source["counts"] == kept.counts
    assert sum(manifest.documents.values()) == kept.documents
    skipped = prepare(str(source), tmp_path / "b", val_fraction=0.1, invalid="skip")
    assert skipped.counts == zero | {"empty": 1, "skipped": 1, "binary_files": 1}
    assert skipped.documents == kept.documents - 1
    refused = refuse(source, tmp_path / "c", invalid="fail")
    assert f"{source / 'broken.txt'}:1" in refused


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path):
    vocabulary = {f"w{number}": number for number in range(70_000)} | {"</s>": 70_000}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(f"{tmp_path}/tokenizer.json")
    source = write(tmp_path / "rows.jsonl", '{"text": "w69999 w5"}\n{"text": "w65536"}')
    out = tmp_path / "out"
    prepare(source, out, tokenizer=f"{tmp_path}/tokenizer.json", val_fraction=0)
    assert read_manifest(out).dtype == "uint32"
    assert read_split(out, "train") == [69_999, 5, 70_000, 65_536]


# --- train and val --------------------------------------------------------------------------------


# Length, fraction of val, tokens of a shard, and of val. The third row has shards of several blocks;
# the document of the last falls to val: all moves to train, then the end to val.
SPLITS = """\
100_000 0.05 30_000 5000
100_000 0.5 9_999 50_000
600_000 0.05 300_000 30_000
5000 0.01 1000 1025
100 0.01 1000 50
2 0.01 1000 1
1 0.01 1000 0
5000 0.0 1000 0
5000 0.999 1000 4995
"""


@pytest.mark.fault(38)
@pytest.mark.parametrize("row", SPLITS.splitlines())
def test_val_is_cut_from_the_end_when_hashing_gives_none(tmp_path: Path, row: str):
    length, fraction, shard_tokens, expected = map(float, row.split())
    text = "".join(random.Random(1).choices("abcdefgh ", k=int(length) - 1)) + "z"
    source, out = write(tmp_path / "a.md", text), tmp_path / "out"
    result = prepare(source, out, val_fraction=fraction, shard_tokens=int(shard_tokens))
    train, val = read_split(out, "train"), read_split(out, "val")
    assert bytes(train + val).decode() == text
    assert len(val) == result.counts["val_from_tail_tokens"] == expected
    manifest = read_manifest(out)
    assert manifest.documents == {"train": 1, "val": 0}
    for split, ids in (("train", train), ("val", val)):
        assert manifest.bytes[split] == {"text": len(ids), "decoded": len(ids), "lost": 0}


# --- the same bytes -------------------------------------------------------------------------------


@pytest.mark.fault(36)
@pytest.mark.parametrize("corpus", ["many", "one"])
@pytest.mark.usefixtures("small_chunks")
def test_a_full_disk_at_any_moment_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: str
):
    source, settings = make_corpus(tmp_path / "corpus"), {"val_fraction": 0.1}
    if corpus == "one":  # falls to val, so tokens move between the splits at the end
        source, settings = source / "long.txt", {"val_fraction": 0.999}
    settings["shard_tokens"] = 30_000
    prepare(source, tmp_path / "whole", **settings)
    expected = read_folder(tmp_path / "whole")
    out, failed = tmp_path / "out", Counter()
    for number in itertools.count():
        calls = []
        with monkeypatch.context() as patch:
            for name in ("fsync", "replace", "unlink"):
                patch.setattr(os, name, partial(fail_once, getattr(os, name), calls, number))
            error = None
            try:
                prepare(str(source), out, **settings)
            except StorageError as caught:
                error = caught
        assert error is None or "No space left" in str(error)
        if len(calls) <= number:
            break  # it was through before the call that was to fail
        failed[calls[number]] += 1
        prepare(source, out, **settings)
        assert read_folder(out) == expected
        shutil.rmtree(out)
    assert failed >= Counter(fsync=12, replace=3, unlink=1)


def fail_once(real: Any, calls: list[str], number: int, *arguments: Any, **options: Any) -> Any:
    """Call `real`, unless it is call number `number` of all: that one finds the disk full."""
    calls.append(real.__name__)
    if len(calls) == number + 1:
        raise OSError(errno.ENOSPC, "No space left on device")
    return real(*arguments, **options)


WAITING = """
import sys, time
from functools import partial
from pathlib import Path
from megatoken.text import prepare as preparation
preparation.PrepareOptions = partial(preparation.PrepareOptions, chunk_bytes=5000)
preparation.WORKER_BYTES = 1
def wait(progress):
    if "wait" in sys.argv and progress.tokens > 2_000:
        print("written", flush=True)
        time.sleep(1000)
preparation.prepare(
    sys.argv[1], Path(sys.argv[2]), tokenizer="bpe:300", workers=2, shard_tokens=20_000, val_fraction=0.1,
    on_progress=wait,
)
assert "torch" not in sys.modules
"""


@pytest.mark.long
@pytest.mark.fault(35)
@pytest.mark.usefixtures("small_chunks")
def test_kills_and_workers_change_no_byte_and_leave_no_process(tmp_path: Path):
    source = make_corpus(tmp_path / "corpus")
    settings = {"tokenizer": "bpe:300", "shard_tokens": 20_000, "val_fraction": 0.1}
    prepare(source, tmp_path / "whole", **settings)
    command = [sys.executable, "-W", "error", "-c", WAITING, source, f"{tmp_path}/out"]
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        child = subprocess.Popen(
            [*command, "wait"],
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A shell starts what runs in its background with SIGINT ignored, and that is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert child.stdout.readline() == b"written\n"
        kill = os.kill if number == signal.SIGKILL else os.killpg  # with its workers, or not
        kill(child.pid, number)
        child.communicate()
        assert child.returncode in (-number, 1)
        assert not wait_for_group(child.pid)
    subprocess.run(command, check=True)
    assert read_folder(tmp_path / "out") == read_folder(tmp_path / "whole")


@pytest.mark.long
@pytest.mark.fault(35, 36)
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_kill_or_an_error_at_a_system_call(tmp_path: Path):
    """One of the points of the soak."""
    result = prepare_soak.run_calls(tmp_path, Namespace(sample=1, jobs=1, seed=3))
    assert (result["tried"], result["failures"]) == (1, [])
    assert result["points"] > 600


def test_a_kill_within_an_atomic_write_leaves_no_file(tmp_path: Path):
    source, out = write(tmp_path / "a.txt", "text"), tmp_path / "out"
    for name in (".progress.json.17.tmp", "tokenizer/.tokenizer.json.17.tmp"):
        write(out / name, "half")
    state = {"recipe": {}, "listing": "", "position": [0, 0, ""], "counts": {}}
    write(out / "progress.json", json.dumps(state))
    prepare(source, out)
    assert not list(out.rglob("*.tmp"))


# --- what is in the way ---------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["**/*", ""])
def test_datasets_and_runs_are_no_text(tmp_path: Path, pattern: str):
    """A pattern or folder that reaches what was written before means the same text as at first."""
    write(tmp_path / "a.txt", "some text")
    write(tmp_path / "run/metrics.jsonl", "{}")
    write(tmp_path / "run/tokenizer/megatoken_tokenizer.json", "{}")
    for name in ("one", "one", "two", "one"):
        result = prepare(f"{tmp_path}/{pattern}", tmp_path / name, val_fraction=0)
        assert bytes(read_split(tmp_path / name, "train")) == b"some text"
    assert result.unchanged


def test_a_finished_dataset_may_be_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, out = write(tmp_path / "a.txt", "some text " * 100), tmp_path / "out"
    first = prepare(source, out, tokenizer="bpe:300")
    before = read_folder(out)

    def fail(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(filelock, "FileLock", fail)
    monkeypatch.setattr(Path, "mkdir", fail)
    again = prepare(source, out, tokenizer="bpe:300", workers=2)
    assert again == replace(first, unchanged=True, seconds=again.seconds)
    assert (first.unchanged, read_folder(out)) == (False, before)


def test_one_writer_a_folder(tmp_path: Path):
    source, out = write(tmp_path / "a.txt", "text"), tmp_path / "out"
    out.mkdir()
    with filelock.FileLock(out / ".lock"):
        refuse(source, out, ExitCode.STORAGE)
    prepare(source, out)


def list_workers() -> set[int]:
    """Return this process's children, without the resource tracker of multiprocessing."""
    resource_tracker.ensure_running()
    return {*children(os.getpid())} - {resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]


@pytest.mark.fault(34)
@pytest.mark.usefixtures("small_chunks")
def test_a_dead_worker_or_one_that_fails_is_one_error(tmp_path: Path):
    source, out = make_corpus(tmp_path / "corpus"), tmp_path / "out"
    threads, others = threading.active_count(), list_workers()

    def kill_workers(progress):
        for child in list_workers() - others:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    refuse(source, out, ExitCode.PEER, workers=2, on_progress=kill_workers)
    prepare(source, out)
    bad = write(source / "zz.jsonl", '{"text": "fine"}\n{"txt": "not"}\n')
    assert f"{bad}:2" in refuse(source, tmp_path / "other", workers=2)
    assert (threading.active_count(), list_workers()) == (threads, others)
    assert subprocess.run(["printenv", "PYTHONSAFEPATH"], check=False).returncode == 1


@pytest.mark.parametrize("finished", [True, False])
def test_two_datasets_are_never_mixed(tmp_path: Path, small_chunks: None, finished: bool):
    source, out = make_corpus(tmp_path / "corpus"), tmp_path / "out"
    settings = {"val_fraction": 0.1, "shard_tokens": 7000}
    if finished:
        prepare(source, out, **settings)
    else:
        with pytest.raises(KeyboardInterrupt):
            prepare(str(source), out, on_progress=stop_after(5), **settings)
    expected = read_folder(out)
    changes = {"tokenizer": "bpe:300", "val_fraction": 0.2, "shard_tokens": 5000}
    for name, value in (changes | {"invalid": "skip", "text_key": "body"}).items():
        assert name in refuse(source, out, **settings | {name: value})
    small = source / "small00.txt"
    write(small, small.read_bytes().replace(b"cat", b"dog"))  # same size
    os.utime(small, ns=(10**18, 10**18))
    refuse(source, out, **settings)
    write(source / "new.txt", "new")
    refuse(source, out, **settings)
    assert read_folder(out) == expected


def test_an_unusable_output_folder_is_refused_and_unchanged(tmp_path: Path):
    source, out = write(tmp_path / "a.txt", "some text " * 100), tmp_path / "out"
    refuse(tmp_path, tmp_path)  # the folder of the text
    strange = write(tmp_path / "other/fineweb_000001.bin", b"precious")
    refuse(source, strange.parent)
    assert strange.read_bytes() == b"precious"
    for content in ('{"cursor": ', "[" * 100_000, "[]", '{"recipe": {}}'):
        path = write(out / "progress.json", content)
        assert str(path) in refuse(source, out)
    for place in (source, source / "out", Path("/proc/nowhere")):
        refuse(source, place, ExitCode.STORAGE)
    prepare(source, tmp_path / "cut")
    shard = tmp_path / "cut/train_000000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert str(shard) in refuse(source, tmp_path / "cut")


@pytest.mark.fault(38)
def test_a_corpus_without_text_is_refused_until_it_has_some(tmp_path: Path):
    source, out = tmp_path / "in", tmp_path / "out"
    write(source / "a.txt", "")
    write(source / "b.txt", b"\0")
    refuse(source, out, tokenizer="bpe:300")
    write(source / "a.txt", "something")
    assert prepare(source, out, tokenizer="bpe:300").documents == 1


def test_settings_out_of_range_are_refused_before_any_work(tmp_path: Path):
    source, out = write(tmp_path / "a.txt", "text"), tmp_path / "out"
    refused = {
        "workers": [-1],
        "shard_tokens": [0],
        "invalid": ["ignore"],
        "val_fraction": [1.0, float("nan")],
        "tokenizer": ["bpe:100", "bpe:999999999"],
    }
    for name, value in ((name, value) for name, values in refused.items() for value in values):
        refuse(source, out, ExitCode.CONFIG, **{name: value})
    assert not out.exists()


def test_a_worker_that_dies_while_it_starts_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A tokenizer larger than a pipe's buffer must not block the parent."""
    words = {f"word{number}": number for number in range(5000)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    resource_tracker.ensure_running()  # a Python process as well, and it must not die
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    source, words = (
        find_source(str(write(tmp_path / "a.txt", "text"))),
        Tokenizer(inner, "words", 0),
    )
    with pytest.raises(PeerError):
        list(encode_corpus(source, PrepareOptions(), ReadPosition(), words, workers=2))
