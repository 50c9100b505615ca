"""Prepare a dataset folder from text.

The result does not depend on the number of workers or on interruptions.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from megatoken.base.console import format_count
from megatoken.base.errors import ConfigError, DataError
from megatoken.base.system.atomic_write import local_path, storage_errors
from megatoken.base.system.machine import cpu_count
from megatoken.data.shard_format import DESCRIPTION_NAME, SPLITS, Manifest, check_manifest_size
from megatoken.text.corpus_reader import read_chunks, sample_texts
from megatoken.text.documents import Invalid, PrepareOptions, token_dtype
from megatoken.text.encode_workers import encode_chunks
from megatoken.text.output_folder import (
    PrepareResult,
    ResumeState,
    describe_source,
    find_finished,
    finish_dataset,
    hold_lock,
    save_state,
    start_or_resume,
    summarize,
)
from megatoken.text.shard_writer import ShardWriter
from megatoken.text.sources import Source, find_corpus
from megatoken.text.tokenizer import Tokenizer, load_tokenizer, parse_bpe

SAMPLE_BYTES = 64 << 20  # size of the sample that a BPE is trained on
MAX_SHARD_TOKENS = 2**31 - 1  # llm.c stores the count as an int32
WORKER_BYTES = 4 << 20  # of input per worker, at least; with less input, there are fewer workers
MIN_VAL_TOKENS = 1025  # GPT-2's context and one more target
LARGEST_LOSS = 0.1  # share of the text that a tokenizer without an unknown token can drop
SIZES = ("text", "decoded", "lost")  # of `Tokenizer.measure_text`
COUNTS = ("empty", "replaced", "skipped", "binary_files", "seams", "val_from_tail_tokens")


@dataclass(frozen=True)
class Progress:
    """Progress of a preparation.

    Bytes are those of the input files on disk; tokens and documents are those of both splits.
    """

    stage: Literal["vocabulary", "tokens"]
    tokens: int
    documents: int
    done_bytes: int
    total_bytes: int


OnProgress = Callable[[Progress], None]


def prepare(
    source: str | Path | Source,
    out: str | Path,
    *,
    tokenizer: str = "gpt2",
    workers: int = 0,
    val_fraction: float = 0.01,
    shard_tokens: int = 100_000_000,
    invalid: Invalid = "replace",
    text_key: str = "text",
    val: str | None = None,
    root: Path | None = None,
    on_progress: OnProgress | None = None,
) -> PrepareResult:
    """Prepare the dataset `out` from `source`, or resume an interrupted preparation.

    source: a file, folder, glob pattern or named corpus (sources.py). root: folder with a local
    copy of a named corpus. val: the validation files, as `source`; by default those named so, such
    as val.txt. tokenizer: gpt2, bytes, bpe:N or a path. workers: number of processes, or 0 for one
    per core. With any number but 1, processes are spawned, so a script must call this function
    under `if __name__ == "__main__"`. val_fraction: share of documents held out if there are no
    validation files. invalid: what to do with documents that are not UTF-8; "skip" also skips bad
    rows.

    Raises ConfigError for a bad setting, DataError for unusable input or an `out` that holds
    something else, StorageError if the disk fails, and PeerError if a worker dies.
    """
    started = time.monotonic()
    out = local_path(out)
    _check_settings(workers, val_fraction, shard_tokens, invalid)
    corpus = source
    if not isinstance(corpus, Source):
        corpus = find_corpus(str(source), root, exclude=out, val=val)
    val_fraction *= not corpus.has_val
    if tokenizer.startswith("bpe:"):
        parse_bpe(tokenizer)
        loaded = None
    else:
        loaded = load_tokenizer(tokenizer)
    options = PrepareOptions(invalid=invalid, text_key=text_key, val_fraction=val_fraction)
    recipe = describe_source(corpus) | {
        "tokenizer": f"{loaded.name} {loaded.fingerprint[:16]}" if loaded else tokenizer,
        "val_fraction": float(val_fraction),
        "shard_tokens": shard_tokens,
        "invalid": invalid,
        "text_key": text_key,
    }
    finished = find_finished(out, recipe, corpus)  # before the lock: the folder may be read-only
    if finished:
        return summarize(finished, started, corpus, unchanged=True)
    with hold_lock(out):
        state, resumed = start_or_resume(out, ResumeState(recipe, corpus.digest(times=True)))
        sample = _sample(corpus, options, on_progress)
        loaded = _save_tokenizer(out / "tokenizer", loaded, tokenizer, sample)
        options = replace(options, split_points=loaded.split_points)
        with closing(_Writer(out, state, loaded, shard_tokens, corpus, on_progress)) as writer:
            writer.write_documents(options, workers)
            writer.balance_splits(val_fraction)
            manifest = writer.finish()
    return summarize(manifest, started, corpus, resumed=resumed)


def _save_tokenizer(
    folder: Path, loaded: Tokenizer | None, spec: str, sample: Iterator[str]
) -> Tokenizer:
    """Return the tokenizer saved in `folder`; if there is none, save one first.

    The one saved is `loaded` or, if that is None, `spec` trained on `sample`.
    """
    if (folder / DESCRIPTION_NAME).exists():
        return load_tokenizer(str(folder))
    tokenizer = loaded or load_tokenizer(spec, lambda: sample)
    tokenizer.vocabulary.save(folder)
    return tokenizer


def _check_settings(workers: int, val_fraction: float, shard_tokens: int, invalid: str) -> None:
    for name, valid in {
        "workers": workers >= 0,
        "val_fraction": 0 <= val_fraction < 1,
        "shard_tokens": 1 <= shard_tokens <= MAX_SHARD_TOKENS,
        "invalid": invalid in ("replace", "skip", "fail"),
    }.items():
        if not valid:
            raise ConfigError(f"{name} is out of range", name, "see megatoken prepare --help")


def _sample(
    corpus: Source, options: PrepareOptions, on_progress: OnProgress | None
) -> Iterator[str]:
    """Yield text to train a tokenizer on, and report progress."""
    sampled = 0
    size = min(corpus.size_bytes, SAMPLE_BYTES)
    for text in sample_texts(corpus, options, SAMPLE_BYTES):
        if on_progress:
            on_progress(Progress("vocabulary", 0, 0, min(sampled, size), size))
        yield text
        sampled += len(text)


@dataclass
class _Writer:
    """Writes both splits and the manifest of a dataset, starting where `state` ends."""

    out: Path
    state: ResumeState
    tokenizer: Tokenizer
    shard_tokens: int
    corpus: Source
    on_progress: OnProgress | None

    def __post_init__(self) -> None:
        self.dtype = token_dtype(self.tokenizer.vocab_size)
        shape = self.dtype, self.shard_tokens, self.tokenizer.fingerprint
        with storage_errors(self.out):
            self.splits = {
                split: ShardWriter(self.out, split, *shape, self.state.tokens[split])
                for split in SPLITS
            }

    def write_documents(self, options: PrepareOptions, workers: int) -> None:
        """Encode and write the part of the corpus that `state` does not cover yet.

        Raises the errors of `read_chunks` and `encode_chunks`, DataError for a tokenizer that drops
        much of the text, and StorageError.
        """
        useful = max(1, self.corpus.size_bytes // WORKER_BYTES)
        chunks = read_chunks(self.corpus, options, self.state.position)
        with closing(
            encode_chunks(chunks, options, self.tokenizer, min(workers or cpu_count(), useful))
        ) as encoded:
            for chunk, ids in encoded:
                n_full = self._count_full_shards()
                with storage_errors(self.out):
                    for split, writer in self.splits.items():
                        added = getattr(ids, split)
                        # <|endoftext|> separates documents, so there is none before the first.
                        writer.append(added if writer.tokens else added[1:])
                    self.state.counts.update(chunk.counts)
                    self.state.counts.update(ids.counts)
                    self._check_loss()
                    self.state.position = chunk.next
                    if n_full != self._count_full_shards():
                        self._check_size(chunk.done_bytes)
                        self._save()
                self._report(chunk.done_bytes)

    def balance_splits(self, val_fraction: float) -> None:
        """Move tokens between train and val if either has too few.

        If train is empty, all of val moves to train. Then, if val has fewer than MIN_VAL_TOKENS and
        less than half of all tokens, the end of train moves to val, unless val_fraction is 0.
        Raises DataError if there is no text.
        """
        train, val = (self.splits[split] for split in SPLITS)
        counts = self.state.counts
        if not counts["train"] + bool(val_fraction) * counts["val"]:
            what = f"no text in {format_count(len(self.corpus.files), 'file')}"
            raise DataError(what, self.corpus.files[0].path, "name files that hold text")
        with storage_errors(self.out):
            if not train.tokens:
                counts["train"] = counts.pop("val")
                self._move(val, 0, train)
            total = train.tokens + val.tokens
            least = min(MIN_VAL_TOKENS, total // 2)
            if val_fraction and val.tokens < least:
                n_train = max(1, total - max(round(val_fraction * total), least))
                if val.tokens:
                    val.append(np.array([self.tokenizer.eot]))
                counts["val_from_tail_tokens"] = train.tokens - n_train
                self._move(train, n_train, val)

    def finish(self) -> Manifest:
        """Close the last shards and write the manifest."""
        counts = self.state.counts
        with storage_errors(self.out):
            manifest = Manifest(
                tokenizer=self.tokenizer.vocabulary.describe(),
                dtype=self.dtype,
                documents={split: counts[split] for split in SPLITS},
                bytes={
                    split: {size: counts[f"{split}_{size}"] for size in SIZES} for split in SPLITS
                },
                shards=tuple(shard for writer in self.splits.values() for shard in writer.finish()),
                source=self.state.recipe | {"counts": {name: counts[name] for name in COUNTS}},
            )
            finish_dataset(self.out, manifest, self.state)
        return manifest

    def close(self) -> None:
        """Close the shard files."""
        for writer in self.splits.values():
            writer.close()

    def _move(self, source: ShardWriter, start: int, target: ShardWriter) -> None:
        """Move the tokens of `source` from index `start` on to the end of `target`."""
        counts = self.state.counts
        decoded = max(1, counts[f"{source.split}_decoded"])
        moved = 0
        for ids in source.read_from(start):
            target.append(ids)
            moved += self.tokenizer.vocabulary.count_bytes(ids[None], ids[None])
        for size in SIZES:
            part = counts[f"{source.split}_{size}"]
            if start:
                part = part * moved // decoded
            counts[f"{source.split}_{size}"] -= part
            counts[f"{target.split}_{size}"] += part
        source.tokens = start  # recorded before the rest is removed
        self._save()
        source.truncate(start)

    def _save(self) -> None:
        """Write all tokens and the state durably."""
        for split, writer in self.splits.items():
            writer.sync()
            self.state.tokens[split] = writer.tokens
        save_state(self.out, self.state)

    def _check_loss(self) -> None:
        counts = self.state.counts
        text = counts["train_text"] + counts["val_text"]
        lost = counts["train_lost"] + counts["val_lost"]
        if lost > LARGEST_LOSS * text and self.tokenizer.drops_unknown:
            what = f"tokenizer {self.tokenizer.name} drops {lost / text:.0%} of the text"
            raise DataError(what, self.corpus.name, "use one that has tokens for all bytes")

    def _check_size(self, done_bytes: int) -> None:
        """Raise DataError if the manifest is going to be too large to be read.

        The rest of the input is expected to have at least half as many tokens as its size implies.
        """
        tokens = float(self._count_tokens())
        if done_bytes > WORKER_BYTES:
            tokens *= (1 + self.corpus.size_bytes / done_bytes) / 2
        check_manifest_size(tokens, self.shard_tokens, self.dtype, self.corpus.name)

    def _count_tokens(self) -> int:
        return sum(writer.tokens for writer in self.splits.values())

    def _count_full_shards(self) -> int:
        return sum(writer.tokens // self.shard_tokens for writer in self.splits.values())

    def _report(self, done_bytes: int) -> None:
        if self.on_progress:
            tokens = self._count_tokens()
            documents = self.state.counts["train"] + self.state.counts["val"]
            total = self.corpus.size_bytes
            self.on_progress(Progress("tokens", tokens, documents, done_bytes, total))
