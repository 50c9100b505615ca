"""Raw text to a dataset folder: the same bytes for any number of workers and any number of kills.

In: a source, an output folder, a tokenizer. Out: `train_*.bin`, `val_*.bin`, `tokenizer/` and `manifest.json`.
Deliberately absent: printing (a callback carries the progress) and torch.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import filelock

from megatoken.data.blocks import Cursor, sample_texts
from megatoken.data.corpus_writer import Job, Progress, write_dataset
from megatoken.data.disk import blame_disk, sync_folder
from megatoken.data.documents import Invalid, Rules
from megatoken.data.parts import FOLDER, find_parts, list_parts, name_part, take_part
from megatoken.data.position import PROGRESS_NAME, Position, load_position, save_position
from megatoken.data.shards import HEADER_BYTES, ITEM_BYTES, MANIFEST_NAME, Manifest, read_manifest
from megatoken.data.sources import Source, find_source
from megatoken.data.tokenizer import Tokenizer, load_saved_tokenizer, load_tokenizer, parse_bpe
from megatoken.errors import Exit, Fault

SAMPLE_BYTES = 64 << 20  # of the corpus teach a BPE
MOST_SHARD_TOKENS = 2**31 - 1  # llm.c keeps the count in an int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What came out. counts: empty, replaced, skipped (documents), binary_files, seams, val_from_tail_tokens."""

    tokens: int  # train and val
    documents: int
    shards: int
    seconds: float  # of this call
    train_tokens: int
    val_tokens: int
    tokenizer: dict[str, Any]  # name, vocab_size, eot, fingerprint
    counts: dict[str, int]
    resumed: bool  # an earlier call had been interrupted
    unchanged: bool  # the same dataset was there already


def prepare(
    source: str,
    out: Path,
    *,
    tokenizer: str,
    workers: int = 0,
    val_fraction: float = 0.01,
    shard_tokens: int = 100_000_000,
    invalid: Invalid = "replace",
    text_key: str = "text",
    root: Path | None = None,
    part: tuple[int, int] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Prepared:
    """Makes the dataset `out` from `source`; goes on where an earlier call was stopped.

    source: file, folder, pattern or named corpus (sources.py). tokenizer: gpt2, bytes, bpe:N or a file.
    workers: processes, 0 for one a core. val_fraction: share of the documents held out, 0 for none.
    invalid: what becomes of documents that are not UTF-8; "skip" passes over bad lines too.
    part: (number from 1, of how many) to make only this part of it, below `out`. Machines make parts in any order; a
    last call without it puts them together, to the same bytes as if it had made everything.
    root: a local copy of a named corpus. on_progress: called after every block.
    Fault(Exit.CONFIG) for a wrong setting, Exit.DATA for unusable input or an `out` that holds something else,
    Exit.STORAGE for a disk that cannot take it, Exit.PEER for a lost process.
    """
    started = time.monotonic()
    _check(tokenizer, workers, val_fraction, shard_tokens, invalid, part)
    corpus = find_source(source, root, exclude=out)
    given = None if tokenizer.startswith("bpe:") else load_tokenizer(tokenizer)
    rules = Rules(invalid=invalid, text_key=text_key, val_fraction=val_fraction)
    recipe = _describe(corpus, rules, f"{given.name} {given.fingerprint[:16]}" if given else tokenizer, shard_tokens)
    whole = corpus
    if part:
        _check_siblings(out, part[1], recipe)
        out, corpus = out / name_part(*part), take_part(whole, *part)
        recipe["part"] = f"{part[0]}/{part[1]}"
    with _only_writer(out):
        if (out / MANIFEST_NAME).exists():
            return _report(_find_prepared(out, recipe, corpus), started, unchanged=True)
        position, resumed = _begin(out, Position(recipe, corpus.digest(times=True)))
        settled = _settle_tokenizer(out, tokenizer, given, whole, rules, on_progress)
        parts = [] if part or position.cursor != Cursor() else _find_parts(out, recipe, settled, whole)
        job = Job(
            out=out,
            corpus=corpus,
            rules=replace(rules, cuts=settled.cuts),
            tokenizer=settled,
            shard_tokens=shard_tokens,
            workers=workers,
            position=position,
            is_part=part is not None,
            parts=parts,
            on_progress=on_progress,
        )
        manifest = write_dataset(job)
        if not part:
            shutil.rmtree(out / FOLDER, ignore_errors=True)
        return _report(manifest, started, resumed=resumed)


def _describe(corpus: Source, rules: Rules, tokenizer: str, shard_tokens: int) -> dict[str, Any]:
    """Everything that decides the bytes of the result."""
    return {
        "source": corpus.name,
        "files": len(corpus.files),
        "bytes": corpus.size_bytes,
        "inputs": corpus.digest(times=False),
        "tokenizer": tokenizer,
        "val_fraction": float(rules.val_fraction),
        "shard_tokens": shard_tokens,
        "invalid": rules.invalid,
        "text_key": rules.text_key,
    }


def _check(
    tokenizer: str, workers: int, val_fraction: float, shard_tokens: int, invalid: str, part: tuple[int, int] | None
) -> None:
    if tokenizer.startswith("bpe:"):
        parse_bpe(tokenizer)
    most = f"{MOST_SHARD_TOKENS:,}"
    checks = {
        "workers": (workers >= 0, workers, "give a number of processes, 0 for one a core"),
        "val_fraction": (0 <= val_fraction < 1, val_fraction, "give a share from 0 to below 1"),
        "shard_tokens": (1 <= shard_tokens <= MOST_SHARD_TOKENS, shard_tokens, f"give a number from 1 to {most}"),
        "part": (part is None or 1 <= part[0] <= part[1], part and f"{part[0]}/{part[1]}", "give K/N, K from 1 to N"),
        "invalid": (invalid in ("replace", "skip", "fail"), repr(invalid), "give replace, skip or fail"),
    }
    for name, (right, value, fix) in checks.items():
        if not right:
            raise Fault(Exit.CONFIG, f"{name} cannot be {value}", name, fix)


@contextmanager
def _only_writer(out: Path) -> Iterator[None]:
    """Holds the folder's lock, which the kernel frees when a process dies; removes its file at the end."""
    path = out / ".lock"
    lock = filelock.FileLock(path, timeout=0)
    with blame_disk(out):
        out.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except filelock.Timeout as error:
            fix = "wait for it to finish or choose another --out"
            raise Fault(Exit.STORAGE, "another preparation is writing to this folder", str(out), fix) from error
    try:
        yield
    finally:
        with suppress(OSError):  # tidiness only: without its holder the file locks nothing
            path.unlink()
        lock.release()


def _find_prepared(out: Path, recipe: dict[str, Any], corpus: Source) -> Manifest:
    """The finished dataset, if it is the one that was asked for and all of it is there."""
    manifest = read_manifest(out)
    _refuse_difference(out, manifest.source, recipe)
    _refuse_newer(out, corpus)
    for shard in manifest.shards:
        path, size = out / shard.file, HEADER_BYTES + shard.tokens * ITEM_BYTES[manifest.dtype]
        if not path.exists() or path.stat().st_size != size:
            what = "a shard is missing or has another size than the manifest says"
            raise Fault(Exit.DATA, what, str(path), f"delete {out} and prepare again")
    with blame_disk(out):
        (out / PROGRESS_NAME).unlink(missing_ok=True)  # left by a kill after the manifest was written
    return manifest


def _refuse_newer(out: Path, corpus: Source) -> None:
    """Raise Fault(DATA) when text is newer than what was made of it in `out`."""
    prepared_at = (out / MANIFEST_NAME).stat().st_mtime_ns
    for file in corpus.files:
        if file.changed > prepared_at:
            what = "an input changed after it was prepared"
            raise Fault(Exit.DATA, what, file.path, f"choose another --out or delete {out}")


def _begin(out: Path, fresh: Position) -> tuple[Position, bool]:
    """Where to start, and whether that goes on with an earlier call."""
    earlier = load_position(out)
    if earlier and earlier.tokens:
        _refuse_difference(out, earlier.recipe, fresh.recipe)
        if earlier.listing != fresh.listing:
            what = "an input file was changed since this preparation began"
            raise Fault(Exit.DATA, what, str(out), "choose another --out or delete the folder")
        return earlier, True
    if earlier and (earlier.recipe, earlier.listing) == (fresh.recipe, fresh.listing):
        return earlier, True
    if earlier:  # of something else, but not one token was kept of it
        shutil.rmtree(out / "tokenizer", ignore_errors=True)
    else:
        strange = [path for name in ("*.bin", "*.npy", "tokenizer") for path in sorted(out.glob(name))]
        if strange:
            what = "the output folder holds other data already"
            raise Fault(Exit.DATA, what, str(strange[0]), "choose another --out or delete it")
    with blame_disk(out):
        save_position(out, fresh)
    return fresh, False


def _check_siblings(out: Path, of: int, recipe: dict[str, Any]) -> None:
    """Raise Fault(DATA) when other parts that were begun in `out` are of another division or made otherwise."""
    for folder, count in list_parts(out).items():
        if count != of:
            fix = f"use --part K/{count}, or delete the parts that are there"
            raise Fault(Exit.DATA, f"parts of another division are here, K/{count}", str(out / FOLDER), fix)
        if (folder / MANIFEST_NAME).exists():
            _refuse_difference(folder, read_manifest(folder).source, recipe)
        elif (begun := load_position(folder)) and begun.tokens:
            _refuse_difference(folder, begun.recipe, recipe)


def _find_parts(out: Path, recipe: dict[str, Any], tokenizer: Tokenizer, corpus: Source) -> list[tuple[Path, Manifest]]:
    parts = find_parts(out)
    for number, (folder, manifest) in enumerate(parts, start=1):
        _refuse_difference(folder, manifest.source, recipe)
        _refuse_newer(folder, take_part(corpus, number, len(parts)))
        if manifest.tokenizer != tokenizer.describe():
            what = f"made by tokenizer {manifest.tokenizer['fingerprint'][:12]}, not the others'"
            raise Fault(Exit.DATA, what, str(folder), "delete it and prepare it again")
    return parts


def _refuse_difference(out: Path, there: dict[str, Any], asked: dict[str, Any]) -> None:
    for key, value in asked.items():
        if there.get(key) != value:
            what = f"the folder was prepared with another {key}: {there.get(key)} there, {value} now"
            raise Fault(Exit.DATA, what, str(out), "choose another --out or delete the folder")


def _settle_tokenizer(
    out: Path,
    spec: str,
    given: Tokenizer | None,
    corpus: Source,
    rules: Rules,
    on_progress: Callable[[Progress], None] | None,
) -> Tokenizer:
    """The tokenizer, saved in `out` first of all; a BPE that an earlier call trained is taken from there."""
    folder, partial = out / "tokenizer", out / "tokenizer.tmp"
    if folder.exists():
        return load_saved_tokenizer(folder)
    if on_progress and given is None:
        none_yet = Progress(stage="vocabulary", tokens=0, documents=0, done_bytes=0, total_bytes=corpus.size_bytes)
        on_progress(none_yet)
    tokenizer = given or load_tokenizer(spec, lambda: sample_texts(corpus, rules, SAMPLE_BYTES))
    with blame_disk(out):
        shutil.rmtree(partial, ignore_errors=True)
        tokenizer.save(partial)
        sync_folder(partial)
        partial.rename(folder)
        sync_folder(out)
    return tokenizer


def _report(manifest: Manifest, started: float, resumed: bool = False, unchanged: bool = False) -> Prepared:
    train, val = manifest.tokens("train"), manifest.tokens("val")
    return Prepared(
        tokens=train + val,
        documents=sum(manifest.documents.values()),
        shards=len(manifest.shards),
        seconds=time.monotonic() - started,
        train_tokens=train,
        val_tokens=val,
        tokenizer=manifest.tokenizer,
        counts=manifest.source["counts"],
        resumed=resumed,
        unchanged=unchanged,
    )
