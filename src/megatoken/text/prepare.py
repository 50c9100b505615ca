"""Prepare a dataset folder from text.

The result does not depend on the number of workers or on interruptions.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatoken.base.console import format_count
from megatoken.base.errors import ConfigError, DataError
from megatoken.base.system.atomic_write import local_path
from megatoken.base.system.machine import cpu_count
from megatoken.data.shard_format import DESCRIPTION_NAME, SPLITS, Manifest
from megatoken.text.corpus_reader import sample_texts
from megatoken.text.documents import Invalid, PrepareOptions
from megatoken.text.encode_workers import encode_corpus
from megatoken.text.output_folder import DatasetWriter, PrepareResult, ResumeState, make_dataset
from megatoken.text.shard_writer import ShardWriter
from megatoken.text.sources import Source, find_corpus
from megatoken.text.tokenizer import load_tokenizer, parse_bpe

SAMPLE_BYTES = 64 << 20  # size of the sample that a BPE is trained on
WORKER_BYTES = 4 << 20  # of input per worker, at least; with less input, there are fewer workers
MIN_VAL_TOKENS = 1025  # GPT-2's context and one more target
LARGEST_LOSS = 0.1  # share of the text that a tokenizer without an unknown token can drop
SIZES = ("text", "decoded", "lost")  # of `Tokenizer.measure_text`
COUNTS = ("empty", "replaced", "skipped", "binary_files", "seams", "val_from_tail_tokens")


@dataclass(frozen=True)
class Progress:
    """Progress of a preparation.

    Bytes are those of the input files on disk, tokens those of both splits.
    """

    stage: Literal["vocabulary", "tokens"]
    tokens: int
    done_bytes: int
    total_bytes: int


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class CorpusPart:
    """Which part of a corpus a source is. number: from 1 to `total`."""

    number: int
    total: int
    corpus: Source

    def describe(self) -> dict[str, Any]:
        """Return what the manifest says of it. The number and the files of all parts are equal."""
        return {"part": self.number, "parts": self.total, "corpus": self.corpus.digest(times=False)}


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
    part: CorpusPart | None = None,
    on_progress: OnProgress = lambda _: None,
) -> PrepareResult:
    """Prepare the dataset `out` from `source`, or resume an interrupted preparation.

    source: a file, folder, glob pattern or named corpus (sources.py). root: folder with a local
    copy of a named corpus. val: names the validation files like `source`; by default, these are the
    files named as such, for example val.txt. tokenizer: gpt2, bytes, bpe:N or a path. workers:
    number of processes, or 0 for one per core. With any number but 1, processes are spawned, so a
    script must call this function under `if __name__ == "__main__"`. val_fraction: share of
    documents held out if there are no validation files. invalid: what to do with documents that are
    not UTF-8; "skip" also skips bad rows. part: what part of a corpus `source` is (parts.py).

    Raises ConfigError for a bad setting, DataError for unusable input or an `out` that holds
    something else, StorageError if the disk fails, and PeerError if a worker dies.
    """
    out = local_path(out)
    if workers < 0:
        raise ConfigError("workers is out of range", "workers", "see megatoken prepare --help")
    corpus = source
    if not isinstance(corpus, Source):
        corpus = find_corpus(str(source), root, exclude=out, val=val)
    val_fraction *= not (part.corpus if part else corpus).has_val
    is_trained = tokenizer.startswith("bpe:") and parse_bpe(tokenizer) > 0
    loaded = None if is_trained else load_tokenizer(tokenizer)
    options = PrepareOptions(invalid=invalid, text_key=text_key, val_fraction=val_fraction)
    recipe = {
        "tokenizer": f"{loaded.name} {loaded.fingerprint[:16]}" if loaded else tokenizer,
        "val_fraction": float(val_fraction),
        "shard_tokens": shard_tokens,
        "invalid": invalid,
        "text_key": text_key,
    }
    recipe |= part.describe() if part else {}

    def write(state: ResumeState) -> Manifest:
        is_saved = (out / "tokenizer" / DESCRIPTION_NAME).exists()
        spec = str(out) if is_saved else tokenizer
        chosen = loaded or load_tokenizer(spec, lambda: sample(corpus, options, on_progress))
        shape = out, state, chosen, shard_tokens
        with closing(_TextWriter(*shape, corpus, part, on_progress)) as writer:
            writer.write_documents(replace(options, split_points=chosen.split_points), workers)
            writer.balance_splits(val_fraction)
            return writer.finish_text()

    return make_dataset(out, corpus, recipe, write)


def sample(corpus: Source, options: PrepareOptions, on_progress: OnProgress) -> Iterator[str]:
    """Yield text to train a tokenizer on, and report progress."""
    sampled = 0
    size = min(corpus.size_bytes, SAMPLE_BYTES)
    for text in sample_texts(corpus, options, SAMPLE_BYTES):
        on_progress(Progress("vocabulary", 0, min(sampled, size), size))
        yield text
        sampled += len(text)


@dataclass
class _TextWriter(DatasetWriter):
    """Writes the documents of a corpus."""

    corpus: Source
    part: CorpusPart | None
    on_progress: OnProgress

    def write_documents(self, options: PrepareOptions, workers: int) -> None:
        """Encode and write the part of the corpus that `state` does not cover yet.

        Raises the errors of `encode_corpus`, DataError for a tokenizer that drops
        much of the text, and StorageError.
        """
        useful = max(1, self.corpus.size_bytes // WORKER_BYTES)
        n_workers = min(workers or cpu_count(), useful)
        counts, n_bytes = self.state.counts, self.corpus.size_bytes
        start = self.state.position
        with closing(
            encode_corpus(self.corpus, options, start, self.tokenizer, n_workers)
        ) as encoded:
            for chunk, ids in encoded:
                is_full = False
                for split, writer in self.splits.items():
                    added = getattr(ids, split)
                    # <|endoftext|> separates documents, so there is none before the first.
                    follows = writer.tokens or (self.part and self.part.number > 1)
                    is_full |= writer.append(added if follows else added[1:])
                counts.update(chunk.counts)
                counts.update(ids.counts)
                self._check_loss()
                self.state.position = chunk.next
                n_tokens = sum(writer.tokens for writer in self.splits.values())
                if is_full:
                    self.save()
                self.on_progress(Progress("tokens", n_tokens, chunk.done_bytes, n_bytes))

    def balance_splits(self, val_fraction: float) -> None:
        """Move tokens between train and val if either has too few.

        If train is empty, all of val moves to train. Then, if val has fewer than MIN_VAL_TOKENS and
        less than half of all tokens, the end of train moves to val, unless val_fraction is 0.
        Nothing moves in a part of a corpus. Raises DataError if there is no text.
        """
        if self.part:
            return
        train, val = (self.splits[split] for split in SPLITS)
        counts = self.state.counts
        if not counts["train"] + bool(val_fraction) * counts["val"]:
            what = f"no text in {format_count(len(self.corpus.files), 'file')}"
            raise DataError(what, self.corpus.files[0].path, "name files that hold text")
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

    def finish_text(self) -> Manifest:
        """Close the last shards and return the manifest."""
        counts = self.state.counts
        return self.finish(
            {split: counts[split] for split in SPLITS},
            {"counts": {name: counts[name] for name in COUNTS}},
            bytes={split: {size: counts[f"{split}_{size}"] for size in SIZES} for split in SPLITS},
        )

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
        self.save()
        source.truncate(start)

    def _check_loss(self) -> None:
        counts = self.state.counts
        text = counts["train_text"] + counts["val_text"]
        lost = counts["train_lost"] + counts["val_lost"]
        if lost > LARGEST_LOSS * text and self.tokenizer.drops_unknown:
            what = f"tokenizer {self.tokenizer.name} drops {lost / text:.0%} of the text"
            raise DataError(what, self.corpus.name, "use one that has tokens for all bytes")
