"""Prepare a dataset folder from raw text: the same bytes for any number of workers and kills.

Whenever a shard is full, its bytes become durable, then `progress.json` with the number of tokens that count and where
to read on; a killed preparation goes on from there. Last come the manifest and the removal of `progress.json`.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatoken.data.corpus_reader import ReadPosition, read_chunks, sample_texts
from megatoken.data.dataset import load_dataset
from megatoken.data.documents import Invalid, PrepareOptions, encode_segments, token_dtype
from megatoken.data.encode_workers import encode_chunks
from megatoken.data.shard_format import (
    DESCRIPTION_NAME,
    INPUTS_NAME,
    MANIFEST_NAME,
    PROGRESS_NAME,
    SPLITS,
    Manifest,
    read_manifest,
    write_manifest,
)
from megatoken.data.shard_writer import ShardWriter
from megatoken.data.sources import Source, find_source
from megatoken.data.tokenizer import Tokenizer, load_saved_tokenizer, load_tokenizer, parse_bpe
from megatoken.errors import ConfigError, DataError, StorageError
from megatoken.system.atomic_write import (
    MALFORMED,
    local_path,
    read_json,
    replace_file,
    storage_errors,
)
from megatoken.system.file_lock import LOCK, lock_folder
from megatoken.system.machine import cpu_count

SAMPLE_BYTES = 64 << 20  # of the corpus train a BPE
MAX_SHARD_TOKENS = 2**31 - 1  # llm.c keeps the count in an int32
WORKER_BYTES = 4 << 20  # of input make another process worth its start
_ANOTHER_OUT = "choose another --out or delete the folder"
MIN_VAL_TOKENS = 1025  # one window of GPT-2 and its last target
MOST_COMPRESSED = 16  # bytes of text in a byte of parquet, .gz or .zst
SPACE_SAMPLES = 8  # chunks of text, to estimate tokens per byte
SURE_SHARE = 0.8  # of that estimate must fit: where it is near the limit, the disk decides
COUNTS = ("empty", "replaced", "skipped", "binary_files", "seams", "val_from_tail_tokens")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a preparation is. Bytes are those of the files on disk; tokens and documents count train and val."""

    stage: Literal["vocabulary", "tokens"]
    tokens: int
    documents: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareResult:
    """Summary of a prepared dataset."""

    tokens: int  # train and val
    documents: int
    shards: int
    seconds: float  # of this call
    train_tokens: int
    val_tokens: int
    tokenizer: dict[str, Any]  # name, vocab_size, eot, fingerprint
    counts: dict[
        str, int
    ]  # empty, replaced, skipped (documents), binary_files, seams, val_from_tail_tokens
    skipped_files: dict[str, int]  # in the source, by extension or reason
    resumed: bool  # an earlier call had been interrupted
    unchanged: bool  # the same dataset was there already


@dataclass
class ResumeState:
    """Content of `progress.json`: everything before `position` is in the shards and on the disk."""

    recipe: dict[str, Any]  # what decides every byte of the result
    listing: str  # digest of the inputs with their modification times
    position: ReadPosition = ReadPosition()
    counts: Counter[str] = field(default_factory=Counter)
    tokens: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(SPLITS, 0)
    )  # that count, per split


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: str = "gpt2",
    workers: int = 0,
    val_fraction: float = 0.01,
    shard_tokens: int = 100_000_000,
    invalid: Invalid = "replace",
    text_key: str = "text",
    root: Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> PrepareResult:
    """Prepare the dataset `out` from `source`; resumes where an earlier call was interrupted.

    source: file, folder, pattern or named corpus (sources.py); root: a local copy of a named corpus.
    tokenizer: gpt2, bytes, bpe:N or a file. workers: processes, 0 for one per core. val_fraction: share of the
    documents held out, 0 for none. invalid: policy for documents that are not UTF-8; "skip" skips bad lines too, and
    replaces invalid bytes of a document of more than 1 MiB.
    Raises ConfigError for a wrong setting, DataError for unusable input or an `out` that holds something else,
    StorageError when the disk fails, PeerError for a lost process.
    """
    started, out = time.monotonic(), local_path(out)
    _check_settings(tokenizer, workers, val_fraction, shard_tokens, invalid)
    corpus = find_source(str(source), root, exclude=out)
    given = None if tokenizer.startswith("bpe:") else load_tokenizer(tokenizer)
    options = PrepareOptions(invalid=invalid, text_key=text_key, val_fraction=val_fraction)
    recipe = {  # everything that decides the bytes of the result
        "source": corpus.name,
        "files": len(corpus.files),
        "bytes": corpus.size_bytes,
        "inputs": corpus.digest(times=False),
        "tokenizer": f"{given.name} {given.fingerprint[:16]}" if given else tokenizer,
        "val_fraction": float(val_fraction),
        "shard_tokens": shard_tokens,
        "invalid": invalid,
        "text_key": text_key,
    }

    def sample() -> Iterator[str]:
        sampled, size = 0, min(corpus.size_bytes, SAMPLE_BYTES)
        for text in sample_texts(corpus, options, SAMPLE_BYTES):
            if on_progress:
                on_progress(Progress("vocabulary", 0, 0, min(sampled, size), size))
            yield text
            sampled += len(text)

    leftover = any((out / name).exists() for name in (PROGRESS_NAME, LOCK))
    if not leftover and (finished := find_finished(out, recipe, corpus)):
        return summarize(
            finished, started, corpus, unchanged=True
        )  # without the lock: the folder may be read-only
    with hold_lock(out):
        if finished := find_finished(out, recipe, corpus):
            with storage_errors(out):
                (out / PROGRESS_NAME).unlink(
                    missing_ok=True
                )  # left by a kill after the manifest was written
            return summarize(finished, started, corpus, unchanged=True)
        state, resumed = load_or_create_state(out, ResumeState(recipe, corpus.digest(times=True)))
        if (out / "tokenizer" / DESCRIPTION_NAME).exists():  # an earlier call may have trained it
            saved = load_saved_tokenizer(out / "tokenizer")
        else:
            saved = given or load_tokenizer(tokenizer, sample)
            saved.save(out / "tokenizer")
        options = replace(options, split_points=saved.split_points)
        with closing(
            _DatasetWriter(out, state, saved, shard_tokens, corpus, on_progress)
        ) as writer:
            writer.check_space(options)
            writer.write_documents(options, workers)
            writer.balance_splits(val_fraction)
            manifest = writer.finish()
        return summarize(manifest, started, corpus, resumed=resumed)


@dataclass
class _DatasetWriter:
    """Writes both splits and the manifest of a dataset, from where `state` ends."""

    out: Path
    state: ResumeState
    tokenizer: Tokenizer
    shard_tokens: int
    corpus: Source
    on_progress: Callable[[Progress], None] | None

    def __post_init__(self) -> None:
        self.dtype = token_dtype(self.tokenizer.vocab_size)
        about = self.dtype, self.shard_tokens, self.tokenizer.fingerprint
        with storage_errors(self.out):
            self.splits = {
                name: ShardWriter(self.out, name, *about, self.state.tokens[name])
                for name in SPLITS
            }

    def check_space(self, options: PrepareOptions) -> None:
        """Raise StorageError unless the rest of the shards fits on the disk, estimated from samples where it is close.

        Raises DataError as `read_chunks` and `encode_segments`.
        """
        files, free = self.corpus.files, shutil.disk_usage(self.out).free
        packed = any(file.is_packed for file in files)
        written = sum(self.state.tokens.values())
        if (
            self._token_bytes(self.corpus.size_bytes * (MOST_COMPRESSED if packed else 1) - written)
            <= free
        ):
            return  # a token has at least one byte of text
        tokens = read_bytes = 0
        for index in range(0, len(files), -(-len(files) // SPACE_SAMPLES)):
            chunk = next(read_chunks(self.corpus, options, ReadPosition(index)))
            ids = encode_segments(chunk.segments, options, self.tokenizer)
            tokens += len(ids.train) + len(ids.val)
            read_bytes += chunk.done_bytes - sum(file.size for file in files[:index])
        needed = self._token_bytes(
            round(self.corpus.size_bytes * tokens / max(1, read_bytes)) - written
        )
        if needed * SURE_SHARE > free:
            what = f"not enough room for the shards: about {needed:,} bytes needed, {free:,} free"
            raise StorageError(what, self.out, "make room or choose another --out")

    def write_documents(self, options: PrepareOptions, workers: int) -> None:
        """Encode the rest of the corpus. Raises errors as `read_chunks` and `encode_chunks`, and StorageError."""
        useful = max(1, self.corpus.size_bytes // WORKER_BYTES)
        chunks = read_chunks(self.corpus, options, self.state.position)
        with closing(
            encode_chunks(chunks, options, self.tokenizer, min(workers or cpu_count(), useful))
        ) as encoded:
            full_shards = self._full_shards()
            for chunk, ids in encoded:
                with storage_errors(self.out):
                    for name, writer in self.splits.items():
                        added = getattr(ids, name)
                        writer.append(
                            added if writer.tokens else added[1:]
                        )  # <|endoftext|> stands between documents
                    self.state.counts.update(chunk.counts)
                    self.state.counts.update(ids.counts)
                    self.state.position = chunk.next
                    if full_shards != self._full_shards():
                        self._save()
                        full_shards = self._full_shards()
                self._report(chunk.done_bytes)

    def balance_splits(self, val_fraction: float) -> None:
        """Give train everything if it has nothing, then val the end of train if hashing gave it too little.

        Val gets at least MIN_VAL_TOKENS or half of all tokens. Raises DataError when there is no text.
        """
        train, val, counts = self.splits["train"], self.splits["val"], self.state.counts
        if not counts["train"] + counts["val"]:
            found = f"{counts['empty']} empty documents, {counts['skipped']} skipped"
            what = f"no text: {found}, {counts['binary_files']} binary files"
            raise DataError(what, self.corpus.files[0].path, "name files that hold text")
        with storage_errors(self.out):
            if not train.tokens:
                counts["train"], counts["val"] = counts["val"], 0
                self._move(val, 0, train)
            total = train.tokens + val.tokens
            least = min(MIN_VAL_TOKENS, total // 2)
            if val_fraction and val.tokens < least:
                kept = max(1, total - max(round(val_fraction * total), least))
                if val.tokens:
                    val.append(np.array([self.tokenizer.eot]))
                counts["val_from_tail_tokens"] = train.tokens - kept
                self._move(train, kept, val)

    def finish(self) -> Manifest:
        """Close the last shards and write the manifest."""
        state = self.state
        with storage_errors(self.out):
            shards = [shard for writer in self.splits.values() for shard in writer.finish()]
            manifest = Manifest(
                tokenizer=self.tokenizer.describe(),
                dtype=self.dtype,
                documents={name: state.counts[name] for name in SPLITS},
                shards=tuple(shards),
                source=state.recipe | {"counts": {name: state.counts[name] for name in COUNTS}},
            )
            finish_dataset(self.out, manifest, state)
        return manifest

    def close(self) -> None:
        """Close the shard files."""
        for writer in self.splits.values():
            writer.close()

    def _move(self, source: ShardWriter, start: int, target: ShardWriter) -> None:
        """Move the tokens of `source` from number `start` on to the end of `target`."""
        for ids in source.read_from(start):
            target.append(ids)
        self._save(**{source.split: start})
        source.truncate(start)

    def _save(self, **kept: int) -> None:
        """Make all tokens and the state durable; of the splits in `kept`, only so many tokens will count."""
        for writer in self.splits.values():
            writer.sync()
        self.state.tokens = {name: writer.tokens for name, writer in self.splits.items()} | kept
        _save_state(self.out, self.state)

    def _token_bytes(self, tokens: int) -> int:
        return tokens * np.dtype(self.dtype).itemsize

    def _full_shards(self) -> int:
        return sum(writer.tokens // self.shard_tokens for writer in self.splits.values())

    def _report(self, done_bytes: int) -> None:
        if self.on_progress:
            tokens = sum(writer.tokens for writer in self.splits.values())
            documents = self.state.counts["train"] + self.state.counts["val"]
            self.on_progress(
                Progress("tokens", tokens, documents, done_bytes, self.corpus.size_bytes)
            )


def _check_settings(
    tokenizer: str, workers: int, val_fraction: float, shard_tokens: int, invalid: str
) -> None:
    if tokenizer.startswith("bpe:"):
        parse_bpe(tokenizer)
    limit = f"{MAX_SHARD_TOKENS:,}"
    checks = {
        "workers": (workers >= 0, workers, "give a number of processes, 0 for one a core"),
        "val_fraction": (0 <= val_fraction < 1, val_fraction, "give a share from 0 to below 1"),
        "shard_tokens": (
            1 <= shard_tokens <= MAX_SHARD_TOKENS,
            shard_tokens,
            f"give a number from 1 to {limit}",
        ),
        "invalid": (
            invalid in ("replace", "skip", "fail"),
            repr(invalid),
            "give replace, skip or fail",
        ),
    }
    for name, (valid, value, fix) in checks.items():
        if not valid:
            raise ConfigError(f"{name} cannot be {value}", name, fix)


@contextmanager
def hold_lock(out: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel releases when a process dies; its file is removed at the end."""
    with lock_folder(out, "preparation"):
        with storage_errors(out):
            for leftover in (
                *out.glob(".*.tmp"),
                *out.glob("tokenizer/.*.tmp"),
            ):  # of atomic writes that were killed
                leftover.unlink()
        try:
            yield
        finally:
            with suppress(OSError):  # the file alone locks nothing
                (out / LOCK).unlink()


def find_finished(out: Path, recipe: dict[str, Any], corpus: Source) -> Manifest | None:
    """The manifest of a finished dataset, if it is one. Raises DataError unless it has this recipe and these inputs."""
    if not (out / MANIFEST_NAME).exists():
        return None
    manifest = read_manifest(out)
    _refuse_difference(out, manifest.source, recipe)
    prepared_at = (out / MANIFEST_NAME).stat().st_mtime_ns
    newer = [file.path for file in corpus.files if file.changed > prepared_at]
    inputs = out / INPUTS_NAME  # older versions wrote none
    if (
        inputs.read_bytes() != f"{corpus.digest(times=True)}\n".encode()
        if inputs.exists()
        else newer
    ):
        where = newer[0] if newer else corpus.name
        raise DataError(
            "an input changed after it was prepared", where, f"choose another --out or delete {out}"
        )
    load_dataset(out)  # checks headers and sizes of the shards
    return manifest


def _refuse_difference(out: Path, existing: dict[str, Any], recipe: dict[str, Any]) -> None:
    for key, value in recipe.items():
        if existing.get(key) != value:
            what = f"{key} differs from when this folder was prepared: {existing.get(key)} then, {value} now"
            raise DataError(what, out, _ANOTHER_OUT)


def load_or_create_state(out: Path, new: ResumeState) -> tuple[ResumeState, bool]:
    """Return the state to start from, and whether an earlier call left it.

    Raises DataError for an `out` that holds something else, such as durable tokens of another recipe.
    """
    earlier = _load_state(out)
    if earlier and any(earlier.tokens.values()):
        _refuse_difference(out, earlier.recipe, new.recipe)
        if earlier.listing != new.listing:
            raise DataError(
                "an input file was changed since this preparation began", out, _ANOTHER_OUT
            )
        return earlier, True
    if earlier and (earlier.recipe, earlier.listing) == (new.recipe, new.listing):
        return earlier, True
    if earlier:  # another recipe, but none of its tokens count
        shutil.rmtree(out / "tokenizer", ignore_errors=True)
        for path in out.glob("*.marks"):
            path.unlink()
    elif other := [
        path for name in ("*.bin", "*.npy", "tokenizer") for path in sorted(out.glob(name))
    ]:
        raise DataError(
            "the output folder holds other data already",
            other[0],
            "choose another --out or delete it",
        )
    with storage_errors(out):
        _save_state(out, new)
    return new, False


def finish_dataset(out: Path, manifest: Manifest, state: ResumeState) -> None:
    """Write the manifest and remove `progress.json`."""
    replace_file(out / INPUTS_NAME, state.listing + "\n", durable=True)
    write_manifest(out, manifest)
    (out / PROGRESS_NAME).unlink()


def _save_state(out: Path, state: ResumeState) -> None:
    replace_file(out / PROGRESS_NAME, json.dumps(vars(state)), durable=True)


def _load_state(out: Path) -> ResumeState | None:
    path = out / PROGRESS_NAME
    if not path.exists():
        return None
    try:
        row = read_json(path)
        state = ResumeState(
            **row | {"position": ReadPosition(*row["position"]), "counts": Counter(row["counts"])}
        )
        numbers = (
            *state.position[:3],
            *state.counts.values(),
            *(state.tokens[split] for split in SPLITS),
        )
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError("a count is impossible")
        return state
    except (OSError, *MALFORMED) as error:
        fix = "delete the output folder and prepare again"
        raise DataError(f"cannot read how far the preparation was: {error}", path, fix) from error


def summarize(
    manifest: Manifest,
    started: float,
    source: Source,
    *,
    resumed: bool = False,
    unchanged: bool = False,
) -> PrepareResult:
    """Return the result of a preparation that began at `started` (time.monotonic)."""
    train, val = (manifest.tokens(split) for split in SPLITS)
    return PrepareResult(
        tokens=train + val,
        documents=sum(manifest.documents.values()),
        shards=len(manifest.shards),
        seconds=time.monotonic() - started,
        train_tokens=train,
        val_tokens=val,
        tokenizer=manifest.tokenizer,
        counts=manifest.source["counts"],
        skipped_files=dict(source.skipped),
        resumed=resumed,
        unchanged=unchanged,
    )
