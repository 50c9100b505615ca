"""Text to shards: exact tokens, the same bytes for any workers and any interruption, and clear refusals."""

import errno
import gzip
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import numpy as np
import pytest
import tokenizers

from megatoken.data import corpus_reader as reader
from megatoken.data import documents, encode_workers
from megatoken.data import prepare as preparation
from megatoken.data.gpt2_vocab import TIKTOKEN_VOCAB
from megatoken.data.prepare import PrepareResult, Progress, prepare
from megatoken.data.shard_format import (
    BLOCK_BYTES,
    HEADER_BYTES,
    hash_block,
    hash_blocks,
    read_header,
    read_manifest,
)
from megatoken.data.tokenizer import load_saved_tokenizer
from megatoken.errors import ExitCode, MegatokenError
from tests.processes import children, wait_for_group
from tests.soak import prepare_soak

DATA = Path(__file__).parents[2].parent / "shared" / "data"
EOT = 256  # of the tokenizer "bytes"


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def make_corpus(folder: Path, seed: int = 0) -> Path:
    """About 60 kB: small files, a long one, jsonl, some of it broken."""
    draw = random.Random(seed)
    words = ["the", "cat", "sat", "naïve", "中文", "x1", "(y)", "don't", "\n", "  "]

    def text(length: int) -> str:
        return " ".join(draw.choice(words) for _ in range(length))

    for number in range(20):
        write(folder / f"small{number:02d}.txt", f"{number} {text(100)}")
    write(folder / "long.txt", text(7_000))
    write(folder / "many.txt", "<|endoftext|>".join(text(50) for _ in range(40)))
    write(folder / "rows.jsonl", "".join(json.dumps({"text": text(60)}) + "\n" for _ in range(50)))
    write(folder / "broken.txt", b"bad \xff byte")
    write(folder / "binary.txt", b"\0\1\2")
    write(folder / "empty.txt", " \n")
    return folder


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks, and several processes for a corpus of 60 kB."""
    monkeypatch.setattr(reader, "CHUNK_BYTES", 5000)
    monkeypatch.setattr(documents, "CHUNK_BYTES", 5000)
    monkeypatch.setattr(preparation, "WORKER_BYTES", 1)


def read_split(folder: Path, split: str) -> list[int]:
    """All ids of a split, every header, size and hash in the manifest checked on the way."""
    manifest = read_manifest(folder)
    ids: list[int] = []
    for shard in manifest.shards:
        raw = (folder / shard.file).read_bytes()
        header, body = raw[:HEADER_BYTES], raw[HEADER_BYTES:]
        expected = read_header(header, shard.file)
        assert (expected.dtype, expected.tokens) == (manifest.dtype, shard.tokens)
        assert expected.fingerprint == manifest.tokenizer["fingerprint"]
        assert hash_block(header) == shard.header
        assert tuple(hash_blocks(body)) == shard.blocks
        if shard.split == split:
            ids += np.frombuffer(
                body, dtype="<u2" if manifest.dtype == "uint16" else "<u4"
            ).tolist()
    assert manifest.tokens(split) == len(ids)
    return ids


def read_folder(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def refuse(code: ExitCode, source: Path | str, out: Path, **settings: Any) -> str:
    with pytest.raises(MegatokenError) as caught:
        prepare(str(source), out, **{"tokenizer": "bytes", "workers": 1} | settings)
    assert caught.value.code == code
    return str(caught.value)


# --- what is written ------------------------------------------------------------------------------


def test_documents_are_joined_by_end_of_text(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "one<|endoftext|>two<|endoftext|>é")
    result = prepare(str(source), tmp_path / "out", tokenizer="bytes", val_fraction=0)
    assert read_split(tmp_path / "out", "train") == [*b"one", EOT, *b"two", EOT, *"é".encode()]
    assert (result.tokens, result.documents, result.shards, result.val_tokens) == (10, 3, 1, 0)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "inputs.xxh3",
        "manifest.json",
        "tokenizer",
        "train_000000.bin",
    ]


def test_shards_hold_the_stream_in_pieces(tmp_path: Path) -> None:
    source = make_corpus(tmp_path / "corpus")
    whole = prepare(str(source), tmp_path / "a", tokenizer="bytes", val_fraction=0)
    parts = prepare(
        str(source), tmp_path / "b", tokenizer="bytes", val_fraction=0, shard_tokens=9999
    )
    assert read_split(tmp_path / "a", "train") == read_split(tmp_path / "b", "train")
    manifest = read_manifest(tmp_path / "b")
    assert [shard.tokens for shard in manifest.shards[:-1]] == [9999] * (parts.shards - 1)
    assert (parts.tokens, parts.shards) == (whole.tokens, -(-whole.tokens // 9999))


@pytest.mark.fault(38)
def test_a_document_longer_than_a_shard_and_hashes_of_many_blocks(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(BLOCK_BYTES).hex()
    result = prepare(
        str(write(tmp_path / "a.md", data)),
        tmp_path / "out",
        tokenizer="bytes",
        val_fraction=0,
        shard_tokens=300_000,
    )
    assert (result.tokens, result.documents, result.shards) == (len(data), 1, 2)
    assert bytes(read_split(tmp_path / "out", "train")).decode() == data
    assert [len(shard.blocks) for shard in read_manifest(tmp_path / "out").shards] == [3, 2]


@pytest.mark.skipif(
    not (DATA / "tiktoken" / TIKTOKEN_VOCAB).exists(), reason="needs ../shared/data"
)
def test_tiny_shakespeare_has_the_published_number_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(DATA / "tiktoken"))
    result = prepare(str(DATA / "tinyshakespeare.txt"), tmp_path, tokenizer="gpt2")
    assert (result.tokens, result.train_tokens, result.val_tokens) == (338_025, 334_645, 3_380)
    ids = read_split(tmp_path, "train") + read_split(tmp_path, "val")
    assert (
        load_saved_tokenizer(tmp_path / "tokenizer").decode(ids)
        == (DATA / "tinyshakespeare.txt").read_text()
    )


@pytest.mark.fault(37)
def test_counts_are_exact_and_in_the_manifest(tmp_path: Path) -> None:
    source = make_corpus(tmp_path / "corpus")
    zero = {
        "empty": 0,
        "replaced": 0,
        "skipped": 0,
        "binary_files": 0,
        "seams": 0,
        "val_from_tail_tokens": 0,
    }
    kept = prepare(str(source), tmp_path / "a", tokenizer="bytes", val_fraction=0.1)
    assert kept.counts == zero | {"empty": 1, "replaced": 1, "binary_files": 1}
    assert kept.documents == 20 + 1 + 40 + 50 + 1
    skipped = prepare(
        str(source), tmp_path / "b", tokenizer="bytes", val_fraction=0.1, invalid="skip"
    )
    assert skipped.counts == zero | {"empty": 1, "skipped": 1, "binary_files": 1}
    assert skipped.documents == kept.documents - 1
    manifest = read_manifest(tmp_path / "a")
    assert manifest.source["counts"] == kept.counts
    assert sum(manifest.documents.values()) == kept.documents
    assert f"{source / 'broken.txt'}:1" in refuse(
        ExitCode.DATA, source, tmp_path / "c", invalid="fail"
    )


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path) -> None:
    vocabulary = {f"w{number}": number for number in range(70_000)} | {"</s>": 70_000}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    source = write(tmp_path / "rows.jsonl", '{"text": "w69999 w5"}\n{"text": "w65536"}')
    out = tmp_path / "out"
    prepare(str(source), out, tokenizer=str(tmp_path / "tokenizer.json"), val_fraction=0)
    assert read_manifest(out).dtype == "uint32"
    assert read_split(out, "train") == [69_999, 5, 70_000, 65_536]


def test_progress_reaches_the_end(tmp_path: Path, small_chunks: None) -> None:
    seen: list[Progress] = []
    result = prepare(
        str(make_corpus(tmp_path / "corpus")),
        tmp_path / "out",
        tokenizer="bpe:300",
        val_fraction=0,
        on_progress=seen.append,
    )
    stages = [step.stage for step in seen]
    assert stages[0] == "vocabulary"
    assert stages == sorted(stages, reverse=True)
    seen = seen[stages.index("tokens") :]
    assert seen[-1].done_bytes == seen[-1].total_bytes
    assert (seen[-1].tokens, seen[-1].documents) == (result.tokens, result.documents)
    assert [step.done_bytes for step in seen] == sorted(step.done_bytes for step in seen)


# --- train and val --------------------------------------------------------------------------------


def test_duplicates_land_on_the_same_side(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {number} {'x' * 30}"}) for number in range(300)]
    prepare(
        str(write(tmp_path / "a.jsonl", "\n".join(lines * 2))),
        tmp_path / "out",
        tokenizer="bytes",
        val_fraction=0.2,
    )
    sides = [
        bytes(id for id in read_split(tmp_path / "out", split) if id != EOT)
        for split in ("train", "val")
    ]
    assert read_manifest(tmp_path / "out").documents["val"] > 40
    for number in range(300):
        assert sorted(side.count(f"document {number} x".encode()) for side in sides) == [0, 2]


@pytest.mark.fault(38)
@pytest.mark.parametrize(
    ("length", "fraction", "shard_tokens", "expected"),
    [
        (100_000, 0.05, 10**6, 5000),
        (100_000, 0.05, 30_000, 5000),
        (100_000, 0.5, 9_999, 50_000),
        (5000, 0.01, 1000, 1025),
        (100, 0.01, 1000, 50),
        (2, 0.01, 1000, 1),
        (1, 0.01, 1000, 0),
        (5000, 0.0, 1000, 0),
        (
            5000,
            0.999,
            1000,
            4995,
        ),  # the one document falls to val: all moves to train, then the end to val
    ],
)
def test_val_is_cut_from_the_end_when_hashing_gives_none(
    tmp_path: Path, length: int, fraction: float, shard_tokens: int, expected: int
) -> None:
    text = "".join(random.Random(1).choices("abcdefgh ", k=length - 1)) + "z"
    out = tmp_path / "out"
    result = prepare(
        str(write(tmp_path / "a.md", text)),
        out,
        tokenizer="bytes",
        val_fraction=fraction,
        shard_tokens=shard_tokens,
    )
    train, val = read_split(out, "train"), read_split(out, "val")
    assert (len(train), len(val)) == (length - expected, expected)
    assert bytes(train + val).decode() == text
    assert result.counts["val_from_tail_tokens"] == expected
    assert read_manifest(out).documents == {"train": 1, "val": 0}


# --- the same bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:320"])
def test_workers_change_no_byte(tmp_path: Path, small_chunks: None, tokenizer: str) -> None:
    source = str(make_corpus(tmp_path / "corpus"))
    for workers in (1, 3):
        out = tmp_path / str(workers)
        prepare(
            source, out, tokenizer=tokenizer, workers=workers, shard_tokens=30_000, val_fraction=0.1
        )
    assert read_folder(tmp_path / "1") == read_folder(tmp_path / "3")


def test_a_stop_after_any_block_changes_no_byte(tmp_path: Path, small_chunks: None) -> None:
    source = str(make_corpus(tmp_path / "corpus"))
    settings: dict[str, Any] = {
        "tokenizer": "bytes",
        "workers": 1,
        "shard_tokens": 7000,
        "val_fraction": 0.1,
    }
    steps: list[Progress] = []
    prepare(source, tmp_path / "whole", on_progress=steps.append, **settings)
    expected = read_folder(tmp_path / "whole")
    assert len(steps) > 8
    for stop in range(1, len(steps) + 1):
        out = tmp_path / "out"
        with pytest.raises(KeyboardInterrupt):
            prepare(source, out, on_progress=stop_after(stop), **settings)
        assert prepare(source, out, **settings).resumed
        assert read_folder(out) == expected
        shutil.rmtree(out)


def stop_after(number: int) -> Callable[[Progress], None]:
    """A callback that is like Ctrl-C after so many blocks."""
    chunks_done = itertools.count(1)

    def interrupt(progress: Progress) -> None:
        if next(chunks_done) == number:
            raise KeyboardInterrupt

    return interrupt


@pytest.mark.fault(36)
@pytest.mark.parametrize("name", ["fsync", "replace", "unlink"])
@pytest.mark.parametrize("documents_in_corpus", ["many", "one"])
def test_a_full_disk_at_any_moment_loses_nothing(
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    documents_in_corpus: str,
) -> None:
    source = make_corpus(tmp_path / "corpus")
    if (
        documents_in_corpus == "one"
    ):  # all documents fall to val, so tokens move between the splits at the end
        source /= "long.txt"
    settings: dict[str, Any] = {
        "tokenizer": "bytes",
        "shard_tokens": 30_000,
        "val_fraction": 0.1 if documents_in_corpus == "many" else 0.999,
    }
    prepare(str(source), tmp_path / "whole", **settings, workers=1)
    expected = read_folder(tmp_path / "whole")
    out, points = tmp_path / "out", 0
    while True:
        with monkeypatch.context() as patch:
            calls = fail_once(patch, name, points)
            error = catch_error(str(source), out, **settings, workers=1)
        if next(calls) <= points:
            break  # it was through before the call that was to fail
        assert error is None or (
            error.code == ExitCode.STORAGE and "No space left on device" in str(error)
        )
        prepare(str(source), out, **settings, workers=1)
        assert read_folder(out) == expected
        shutil.rmtree(out)
        points += 1
    assert points >= {"fsync": 12, "replace": 3, "unlink": 1}[name]


def fail_once(patch: pytest.MonkeyPatch, name: str, fatal: int) -> "itertools.count[int]":
    """Lets call number `fatal` of os.`name` find the disk full; gives the counter of calls."""
    real, calls = getattr(os, name), itertools.count()

    def fail(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == fatal:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **keywords)

    patch.setattr(os, name, fail)
    return calls


def catch_error(*arguments: Any, **settings: Any) -> MegatokenError | None:
    try:
        prepare(*arguments, **settings)
    except MegatokenError as error:
        return error
    return None


KILLED = """
import sys, time
from pathlib import Path
from megatoken.data import documents, corpus_reader as reader
from megatoken.data import prepare as preparation
reader.CHUNK_BYTES = documents.CHUNK_BYTES = 5000
preparation.WORKER_BYTES = 1
def wait(progress):
    if "wait" in sys.argv and progress.tokens > 2_000:
        print("written", flush=True)
        time.sleep(1000)
preparation.prepare(
    sys.argv[1], Path(sys.argv[2]), tokenizer="bpe:300", workers=2, shard_tokens=20_000, val_fraction=0.1,
    on_progress=wait,
)
assert "torch" not in sys.modules and "multiprocessing" not in sys.modules
"""


@pytest.mark.fault(35)
def test_kills_change_no_byte_and_leave_no_process(tmp_path: Path, small_chunks: None) -> None:
    source = str(make_corpus(tmp_path / "corpus"))
    settings: dict[str, Any] = {"tokenizer": "bpe:300", "shard_tokens": 20_000, "val_fraction": 0.1}
    prepare(source, tmp_path / "whole", workers=1, **settings)
    command = [sys.executable, "-W", "error", "-c", KILLED, source, str(tmp_path / "out")]
    for seconds in (0.4, 0.7, 1.0):
        child = subprocess.Popen(command, start_new_session=True)
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()
        child.wait()
        assert not wait_for_group(child.pid)
    subprocess.run(command, check=True)
    assert read_folder(tmp_path / "out") == read_folder(tmp_path / "whole")


@pytest.mark.fault(35, 36)
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_kill_or_an_error_at_a_system_call(tmp_path: Path) -> None:
    """Two of the points of the soak."""
    result = prepare_soak.run_calls(tmp_path, Namespace(sample=2, jobs=1, seed=3))
    assert (result["tried"], result["failures"]) == (2, [])
    assert result["points"] > 600


def test_a_kill_within_an_atomic_write_leaves_no_file(tmp_path: Path) -> None:
    source, out = write(tmp_path / "a.txt", "text"), tmp_path / "out"
    for name in (".progress.json.17.tmp", "tokenizer/.tokenizer.json.17.tmp"):
        write(out / name, "half")
    state = {"recipe": {}, "listing": "", "position": [0, 0, 1, ""], "counts": {}}
    write(out / "progress.json", json.dumps(state))
    prepare(str(source), out, tokenizer="bytes")
    assert not list(out.rglob("*.tmp"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_the_whole_group_leave_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    source = make_corpus(tmp_path / "corpus")
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(source), str(tmp_path / "out"), "wait"],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell starts what runs in its background with SIGINT ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"written\n"
    os.killpg(child.pid, number)
    child.communicate()
    assert child.returncode in (-number, 1)
    assert not wait_for_group(child.pid)


@pytest.mark.fault(34)
def test_a_stopped_process_is_told_to_go_on(
    tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_workers, "WAKE_SECONDS", 0.05)
    source, stopped = make_corpus(tmp_path / "corpus"), []

    def stop_children(progress: Progress) -> None:
        if not stopped:
            stopped.extend(children(os.getpid()))
            for child in stopped:
                os.kill(child, signal.SIGSTOP)

    prepare(str(source), tmp_path / "whole", tokenizer="bytes", workers=1)
    prepare(str(source), tmp_path / "out", tokenizer="bytes", workers=2, on_progress=stop_children)
    assert len(stopped) == 2
    assert read_folder(tmp_path / "out") == read_folder(tmp_path / "whole")


@pytest.mark.fault(34)
def test_a_lost_process_is_one_error(tmp_path: Path, small_chunks: None) -> None:
    source = make_corpus(tmp_path / "corpus")
    threads, others = threading.active_count(), set(children(os.getpid()))  # of other tests

    def kill_children(progress: Progress) -> None:
        for child in set(children(os.getpid())) - others:
            with suppress(ProcessLookupError):  # it was killed before and reaped since
                os.kill(child, signal.SIGKILL)

    message = refuse(ExitCode.PEER, source, tmp_path / "out", workers=2, on_progress=kill_children)
    assert "ended (signal 9)" in message
    assert set(children(os.getpid())) == others
    assert threading.active_count() == threads
    prepare(str(source), tmp_path / "out", tokenizer="bytes", workers=1)


def test_errors_cross_from_the_processes(tmp_path: Path, small_chunks: None) -> None:
    source = make_corpus(tmp_path / "corpus")
    bad = write(source / "zz.jsonl", '{"text": "fine"}\n{"txt": "not"}\n')
    others = set(children(os.getpid()))
    message = refuse(ExitCode.DATA, source, tmp_path / "out", workers=2)
    assert f"{bad}:2" in message
    assert set(children(os.getpid())) == others


# --- what is in the way ---------------------------------------------------------------------------


def test_preparing_again_returns_at_once(tmp_path: Path) -> None:
    source, out = write(tmp_path / "a.txt", "some text " * 100), tmp_path / "out"
    first = prepare(str(source), out, tokenizer="bpe:300")
    before = read_folder(out)
    again = prepare(str(source), out, tokenizer="bpe:300", workers=2)
    assert (again.unchanged, first.unchanged) == (True, False)
    assert [
        getattr(again, name) for name in ("tokens", "documents", "shards", "tokenizer", "counts")
    ] == [getattr(first, name) for name in ("tokens", "documents", "shards", "tokenizer", "counts")]
    assert read_folder(out) == before


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer": "bpe:300"}, "tokenizer differs from when this folder was prepared: bytes"),
        (
            {"val_fraction": 0.2},
            "val_fraction differs from when this folder was prepared: 0.1 then, 0.2 now",
        ),
        ({"shard_tokens": 5000}, "shard_tokens differs from when this folder was prepared"),
        ({"invalid": "skip"}, "invalid differs from when this folder was prepared"),
        ({"text_key": "body"}, "text_key differs from when this folder was prepared"),
        ({}, "files differs from when this folder was prepared: 26 then, 27 now"),
    ],
)
def test_two_datasets_are_never_mixed(
    tmp_path: Path, small_chunks: None, finished: bool, change: dict[str, Any], named: str
) -> None:
    source, out = make_corpus(tmp_path / "corpus"), tmp_path / "out"
    settings: dict[str, Any] = {
        "tokenizer": "bytes",
        "val_fraction": 0.1,
        "workers": 1,
        "shard_tokens": 7000,
    }

    def stop(progress: Progress) -> None:
        if progress.tokens > 20_000 and not finished:
            raise KeyboardInterrupt

    try:
        prepare(str(source), out, on_progress=stop, **settings)
    except KeyboardInterrupt:
        assert not finished
    if not change:
        write(source / "new.txt", "new")
    before = read_folder(out)
    message = refuse(ExitCode.DATA, source, out, **settings | change)
    assert named in message
    assert "choose another --out or delete" in message
    assert {name: data for name, data in read_folder(out).items() if name != ".lock"} == before


@pytest.mark.fault(39)
def test_an_input_edited_in_place_is_noticed(tmp_path: Path, small_chunks: None) -> None:
    source = make_corpus(tmp_path / "corpus")
    prepare(str(source), tmp_path / "out", tokenizer="bytes")
    write(source / "small00.txt", (source / "small00.txt").read_bytes().replace(b"cat", b"dog"))
    later = time.time_ns() + 10**9
    os.utime(source / "small00.txt", ns=(later, later))
    assert "small00.txt" in refuse(ExitCode.DATA, source, tmp_path / "out", workers=0)


@pytest.mark.parametrize("pattern", ["**/*", ""])
def test_datasets_and_runs_are_no_text(tmp_path: Path, pattern: str) -> None:
    """A pattern or folder that reaches what was written before means the same text as at first."""
    source, text = tmp_path / "corpus", f"{tmp_path / 'corpus'}/{pattern}"
    write(source / "a.txt", "some text")
    write(source / "run" / "metrics.jsonl", "{}")
    write(source / "run" / "tokenizer" / "megatoken_tokenizer.json", "{}")
    for name in ("one", "one", "two", "one"):
        result = prepare(text, source / name, tokenizer="bytes", val_fraction=0)
        assert bytes(read_split(source / name, "train")) == b"some text"
    assert result.unchanged


def test_a_pattern_that_matches_its_own_output(tmp_path: Path) -> None:
    """`prepare 'corpus/*' --out corpus`, twice: what was written the first time is no text."""
    write(tmp_path / "a.txt", "some text")
    for pattern in ("*", "**/*"):
        result = prepare(f"{tmp_path}/{pattern}", tmp_path, tokenizer="bytes", val_fraction=0)
        assert bytes(read_split(tmp_path, "train")) == b"some text"
        assert prepare(
            f"{tmp_path}/{pattern}", tmp_path, tokenizer="bytes", val_fraction=0
        ).unchanged
        assert not result.unchanged
        for path in (*tmp_path.glob("*.bin"), tmp_path / "manifest.json", tmp_path / "inputs.xxh3"):
            path.unlink()
        shutil.rmtree(tmp_path / "tokenizer")


def test_an_input_replaced_by_an_older_file_is_noticed(tmp_path: Path) -> None:
    source, out = write(tmp_path / "a.txt", "cat"), tmp_path / "out"
    prepare(source, out, tokenizer="bytes")
    assert prepare(source, out, tokenizer="bytes").unchanged
    write(source, "dog")
    os.utime(source, ns=(10**18, 10**18))
    assert "an input changed after it was prepared" in refuse(ExitCode.DATA, source, out)
    (out / "inputs.xxh3").unlink()  # as older versions left it: only a newer file is noticed
    assert prepare(source, out, tokenizer="bytes").unchanged


def test_a_finished_dataset_may_be_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write(tmp_path / "a.txt", "text"), tmp_path / "out"
    prepare(source, out, tokenizer="bytes")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(filelock, "FileLock", fail)
    monkeypatch.setattr(Path, "mkdir", fail)
    assert prepare(source, out, tokenizer="bytes").unchanged


def test_text_and_output_in_one_folder_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "text")
    assert "is the output folder, too" in refuse(ExitCode.DATA, tmp_path, tmp_path)


def test_a_missing_or_cut_shard_is_noticed(tmp_path: Path) -> None:
    source, out = write(tmp_path / "a.txt", "some text " * 100), tmp_path / "out"
    prepare(str(source), out, tokenizer="bytes")
    shard = out / "train_000000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert str(shard) in refuse(ExitCode.DATA, source, out)


def test_other_data_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "text")
    strange = write(tmp_path / "out" / "fineweb_000001.bin", b"precious")
    assert str(strange) in refuse(ExitCode.DATA, source, tmp_path / "out")
    assert strange.read_bytes() == b"precious"


@pytest.mark.parametrize("content", ['{"cursor": ', "[" * 100_000, "[]", '{"recipe": {}}'])
def test_a_garbled_progress_file_is_named(tmp_path: Path, content: str) -> None:
    source = write(tmp_path / "a.txt", "text")
    path = write(tmp_path / "out" / "progress.json", content)
    assert str(path) in refuse(ExitCode.DATA, source, tmp_path / "out")


def test_one_writer_a_folder(tmp_path: Path) -> None:
    source, out = write(tmp_path / "a.txt", "text"), tmp_path / "out"
    out.mkdir()
    with filelock.FileLock(out / ".lock"):
        assert "another preparation is using" in refuse(ExitCode.STORAGE, source, out)
    prepare(str(source), out, tokenizer="bytes")


@pytest.mark.fault(38)
def test_nothing_but_empty_documents_is_refused_and_can_be_mended(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.txt", "")
    write(tmp_path / "in" / "b.txt", b"\0")
    message = refuse(ExitCode.DATA, tmp_path / "in", tmp_path / "out", tokenizer="bpe:300")
    assert "no text: 1 empty documents, 0 skipped, 1 binary files" in message
    write(tmp_path / "in" / "a.txt", "something")
    assert prepare(str(tmp_path / "in"), tmp_path / "out", tokenizer="bpe:300").documents == 1


def test_a_place_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "text")
    for out in (source, source / "out", Path("/proc/nowhere")):
        assert str(out) in refuse(ExitCode.STORAGE, source, out)


@pytest.mark.fault(36)
def test_a_disk_that_fills_up_says_how_much_is_missing(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "some words here " * 400_000)
    program = (
        "import resource, sys; from pathlib import Path; from megatoken.data.prepare import prepare\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))\n"
        "try: prepare(sys.argv[1], Path(sys.argv[2]), tokenizer='bytes')\n"
        "except Exception as error: print(int(error.code), error)"
    )
    command = [sys.executable, "-c", program, str(source), str(tmp_path / "out")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.startswith(f"{int(ExitCode.STORAGE)} cannot write: File too large, ")
    assert " free" in printed
    assert prepare(str(source), tmp_path / "out", tokenizer="bytes").tokens == 6_400_000


@pytest.mark.fault(36)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz"])
def test_too_little_room_is_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The estimate is of tokens, not of bytes of text, and of what is not written yet."""
    draw, spec = random.Random(0), "bpe:300" if name == "a.txt" else "bytes"
    rows = [f'{{"text": "{draw.randbytes(15_000).hex()}"}}\n' for _ in range(60)]
    source = write(
        tmp_path / name,
        "one two three " * 20_000 if name == "a.txt" else gzip.compress("".join(rows).encode()),
    )
    make = partial(prepare, source, tokenizer=spec, val_fraction=0, workers=1, shard_tokens=50_000)
    tokens = make(tmp_path / "whole").tokens

    def leave(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))

    leave(tokens)  # half of what is needed, two bytes a token
    message = refuse(ExitCode.STORAGE, source, tmp_path / "out", tokenizer=spec, val_fraction=0)
    needed = int(
        re.search(r"about ([0-9,]+) bytes needed, ([0-9,]+) free", message)[1].replace(",", "")
    )  # type: ignore[index]
    assert abs(needed - 2 * tokens) < 0.1 * tokens
    assert not list((tmp_path / "out").glob("*.bin"))
    leave(2 * tokens)
    assert make(tmp_path / "enough").tokens == tokens
    if name != "a.txt":  # it has two chunks
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "half", on_progress=stop_after(1))
        leave(tokens)
        assert make(tmp_path / "half").resumed


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"workers": -1}, "workers cannot be -1"),
        ({"val_fraction": 1.0}, "val_fraction cannot be 1.0"),
        ({"val_fraction": float("nan")}, "val_fraction cannot be nan"),
        ({"shard_tokens": 0}, "shard_tokens cannot be 0"),
        ({"invalid": "ignore"}, "invalid cannot be 'ignore'"),
        ({"tokenizer": "bpe:100"}, "at least 257"),
        ({"tokenizer": "bpe:999999999"}, "at most 1,000,000"),
    ],
)
def test_impossible_settings_are_refused_before_any_work(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    assert named in refuse(
        ExitCode.CONFIG, write(tmp_path / "a.txt", "text"), tmp_path / "out", **settings
    )
    assert not (tmp_path / "out").exists()


def test_prepared_is_plain_data() -> None:
    assert {"tokens", "documents", "shards", "seconds"} <= set(PrepareResult.__dataclass_fields__)
