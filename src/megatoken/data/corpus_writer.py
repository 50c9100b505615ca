"""Blocks of a corpus to shards, a validation split and the manifest, stoppable at any moment.

In: a Job. Out: the Manifest, written. Deliberately absent: whether the folder is ours to write (prepare.py).

The order in which things become durable makes a kill harmless: shards, then `progress.json` which says how much
of them counts, then the manifest, then the end of `progress.json`.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from megatoken.data.blocks import Block, Cursor, read_blocks
from megatoken.data.disk import blame_disk
from megatoken.data.documents import Encoded, Rules, token_dtype
from megatoken.data.parts import read_part
from megatoken.data.position import PROGRESS_NAME, Position, save_position
from megatoken.data.shard_writer import ShardWriter, SplitState
from megatoken.data.shards import ITEM_BYTES, SPLITS, Manifest, write_manifest
from megatoken.data.sources import Source
from megatoken.data.tokenizer import Tokenizer
from megatoken.data.workers import encode_blocks
from megatoken.errors import Exit, Fault
from megatoken.hardware import cpu_count

WORKER_BYTES = 4 << 20  # of input make another process worth its start
SAVE_SECONDS = 10.0
SAVE_BLOCKS = 64
SHORTEST_VAL = 1025  # tokens: one window of GPT-2 and its last target
COUNTS = ("empty", "replaced", "skipped", "binary_files", "seams", "val_from_tail_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far it is. Bytes are those of the files on disk; tokens and documents count train and val."""

    stage: Literal["vocabulary", "tokens"]
    tokens: int
    documents: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to write where. `position` moves on while it is done."""

    out: Path
    corpus: Source
    rules: Rules
    tokenizer: Tokenizer
    shard_tokens: int
    workers: int  # 0: one a core
    position: Position
    is_part: bool = False  # of a corpus: what makes a validation split of any corpus is left to the whole
    parts: Sequence[tuple[Path, Manifest]] = ()  # to put together instead of reading the corpus
    on_progress: Callable[[Progress], None] | None = None

    @property
    def dtype(self) -> str:
        """Token type of the shards."""
        return token_dtype(self.tokenizer.vocab_size)

    def open_split(self, split: str, state: SplitState) -> ShardWriter:
        """A writer that goes on from `state`."""
        return ShardWriter(self.out, split, self.dtype, self.shard_tokens, self.tokenizer.fingerprint, state)


def write_dataset(job: Job) -> Manifest:
    """Writes what is missing of the dataset and, last, its manifest.

    Faults as `read_blocks` and `encode_blocks`; Fault(Exit.STORAGE) from the disk, with everything up to the
    last saved position kept; Fault(Exit.DATA) when there is no text at all.
    """
    position = job.position
    splits: dict[str, ShardWriter] = {}
    try:
        with blame_disk(job.out):
            for name in SPLITS:
                splits[name] = job.open_split(name, getattr(position, name))
        if not position.complete:
            if job.parts:
                _join_parts(job, splits)
            else:
                _write_documents(job, splits)
        if not position.complete and not job.is_part:
            _expect_text(job)
            with blame_disk(job.out):
                if not splits["train"].tokens:
                    _move_val_to_train(job, splits)
                _cut_val_from_tail(job, splits)
        with blame_disk(job.out):
            shards = [shard for writer in splits.values() for shard in writer.finish()]
    finally:
        for writer in splits.values():
            writer.close()
    manifest = Manifest(
        tokenizer=job.tokenizer.describe(),
        dtype=job.dtype,
        documents={name: position.counts[name] for name in SPLITS},
        shards=tuple(shards),
        source=position.recipe | {"counts": {name: position.counts[name] for name in COUNTS}},
    )
    write_manifest(job.out, manifest)
    with blame_disk(job.out):
        (job.out / PROGRESS_NAME).unlink()
    return manifest


def _write_documents(job: Job, splits: dict[str, ShardWriter]) -> None:
    """From the position's cursor to the end of the corpus, the position saved now and then."""
    most = max(1, job.corpus.size_bytes // WORKER_BYTES)
    blocks = read_blocks(job.corpus, job.rules, job.position.cursor)
    saved, unsaved = time.monotonic(), 0
    encoded_blocks = encode_blocks(blocks, job.rules, job.tokenizer, min(job.workers or cpu_count(), most))
    with closing(encoded_blocks):
        for block, encoded in encoded_blocks:
            with blame_disk(job.out, lambda: _estimate_rest(job, splits)):
                _append(job.position, splits, block, encoded)
                unsaved += 1
                if unsaved >= SAVE_BLOCKS or time.monotonic() - saved > SAVE_SECONDS:
                    _save(job, splits)
                    saved, unsaved = time.monotonic(), 0
            if job.on_progress:
                job.on_progress(_measure(job, splits))


def _expect_text(job: Job) -> None:
    counts = job.position.counts
    if not counts["train"] + counts["val"]:
        what = f"no text: {counts['empty']} empty documents, {counts['skipped']} skipped, "
        what += f"{counts['binary_files']} binary files"
        raise Fault(Exit.DATA, what, job.corpus.files[0].path, "name files that hold text")


def _join_parts(job: Job, splits: dict[str, ShardWriter]) -> None:
    """Every part's tokens after those of the part before it. Begun anew when it is interrupted."""
    position, eot = job.position, np.array([job.tokenizer.eot])
    for number, (folder, manifest) in enumerate(job.parts, start=1):
        with blame_disk(job.out):
            for name, writer in splits.items():
                if writer.tokens and manifest.tokens(name):
                    writer.append(eot)  # <|endoftext|> stands between documents
                for ids in read_part(folder, manifest, name):
                    writer.append(ids)
        position.counts.update(manifest.documents | manifest.source["counts"])
        position.done_bytes = job.corpus.size_bytes * number // len(job.parts)
        if job.on_progress:
            job.on_progress(_measure(job, splits))
    position.cursor = Cursor(len(job.corpus.files))
    with blame_disk(job.out):
        _save(job, splits)


def _append(position: Position, splits: dict[str, ShardWriter], block: Block, encoded: Encoded) -> None:
    if position.open:
        splits[position.open].append(encoded.carried)
    for name, writer in splits.items():
        ids = getattr(encoded, name)
        writer.append(ids if writer.tokens else ids[1:])  # <|endoftext|> stands between documents
    counts = position.counts
    counts.update(block.counts)
    counts.update(encoded.counts)
    counts["replaced"] += encoded.carried_replaced and not position.open_replaced
    if encoded.open == "carried":
        position.open_replaced |= encoded.carried_replaced
    else:
        position.open, position.open_replaced = encoded.open, encoded.open_replaced
    position.cursor, position.done_bytes = block.cursor, block.done_bytes


def _save(job: Job, splits: dict[str, ShardWriter]) -> None:
    job.position.train, job.position.val = splits["train"].sync(), splits["val"].sync()
    save_position(job.out, job.position)


def _move_val_to_train(job: Job, splits: dict[str, ShardWriter]) -> None:
    """For a corpus all of whose documents fell to val. Copied, then val's state made empty, then val."""
    position = job.position
    for ids in splits["val"].read_from(0):
        splits["train"].append(ids)
    position.counts["train"], position.counts["val"] = position.counts["val"], 0
    position.train, position.val = splits["train"].sync(), SplitState()
    save_position(job.out, position)
    splits["val"].close()
    splits["val"] = job.open_split("val", position.val)


def _cut_val_from_tail(job: Job, splits: dict[str, ShardWriter]) -> None:
    """Gives val at least SHORTEST_VAL tokens or half of all, from the end of train, when hashing gave it fewer.

    The state says so before the tokens leave train, so a kill in between costs nothing.
    """
    train, val, position = splits["train"], splits["val"], job.position
    total, kept = train.tokens + val.tokens, train.tokens
    least = min(SHORTEST_VAL, total // 2)
    if job.rules.val_fraction and val.tokens < least:
        wanted = max(round(job.rules.val_fraction * total), least) - val.tokens
        kept = max(1, train.tokens - wanted)
        if val.tokens:
            val.append(np.array([job.tokenizer.eot]))
        for ids in train.read_from(kept):
            val.append(ids)
        position.counts["val_from_tail_tokens"] = train.tokens - kept
    train.sync()
    position.train, position.val, position.complete = train.state_at(kept), val.sync(), True
    save_position(job.out, position)
    train.close()
    splits["train"] = job.open_split("train", position.train)


def _measure(job: Job, splits: dict[str, ShardWriter]) -> Progress:
    counts = job.position.counts
    return Progress(
        stage="tokens",
        tokens=sum(writer.tokens for writer in splits.values()),
        documents=counts["train"] + counts["val"],
        done_bytes=job.position.done_bytes,
        total_bytes=job.corpus.size_bytes,
    )


def _estimate_rest(job: Job, splits: dict[str, ShardWriter]) -> int:
    """Bytes still to be written if the rest of the corpus is like its beginning."""
    done = job.position.done_bytes
    tokens = sum(writer.tokens for writer in splits.values())
    return ITEM_BYTES[job.dtype] * tokens * (job.corpus.size_bytes - done) // done if done else 0
