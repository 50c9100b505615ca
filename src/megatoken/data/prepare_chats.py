"""Prepare a dataset folder (chat_dataset.py) from conversations, preferences or prompts: the same bytes every time."""

import json
import time
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatoken.data.chat_dataset import PADDING, START, TRAINED, answers_name, marks_name
from megatoken.data.chat_formats import Example, Format, parse_row
from megatoken.data.chat_template import ChatTemplate, add_control_tokens, find_template
from megatoken.data.documents import Invalid, token_dtype
from megatoken.data.prepare import (
    PrepareResult,
    ResumeState,
    find_finished,
    finish_dataset,
    hold_lock,
    load_or_create_state,
    summarize,
)
from megatoken.data.shard_format import Manifest, Shard
from megatoken.data.shard_writer import ShardWriter
from megatoken.data.sources import Source
from megatoken.data.text_files import read_rows
from megatoken.data.tokenizer import Tokenizer
from megatoken.errors import ConfigError, DataError
from megatoken.system.atomic_write import replace_file, storage_errors

Long = Literal["fail", "skip"]
Encoded = tuple[NDArray[np.uint32], NDArray[np.uint8]]  # ids and marks, both (n,)


def prepare_chats(
    source: Source,
    out: Path,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    val_fraction: float = 0.01,
    shard_tokens: int = 100_000_000,
    invalid: Invalid = "replace",
    long: Long = "fail",
) -> PrepareResult:
    """Prepare the dataset `out` from rows (chat_formats.py), all held in memory.

    tokenizer: the model's; it gets control tokens where it has no template. seq_len: the context of the model. invalid:
    "skip" skips rows that cannot be used. long: what to do with a conversation longer than the context. Equal prompts
    are in the same split. Raises ConfigError for an unknown template or a wrong setting, DataError for rows that cannot
    be used or an `out` that holds something else, StorageError when the disk fails.
    """
    started = time.monotonic()
    if seq_len < 1 or not 0 <= val_fraction < 1:
        raise ConfigError(
            f"seq_len {seq_len}, val_fraction {val_fraction}",
            "prepare",
            "give 1 or more, 0 to below 1",
        )
    tokenizer = add_control_tokens(tokenizer)
    template = find_template(tokenizer)
    recipe: dict[str, Any] = {
        "source": source.name,
        "files": len(source.files),
        "bytes": source.size_bytes,
        "inputs": source.digest(times=False),
        "tokenizer": f"{tokenizer.name} {tokenizer.fingerprint[:16]}",
        "val_fraction": float(val_fraction),
        "shard_tokens": shard_tokens,
        "invalid": invalid,
        "long": long,
        "seq_len": seq_len,
        "template": template.name,
    }
    with hold_lock(out):
        if finished := find_finished(out, recipe, source):
            return summarize(finished, started, source, unchanged=True)
        state, _ = load_or_create_state(out, ResumeState(recipe, source.digest(times=True)))
        examples, encoded, row_format = _encode_rows(source, template, invalid, state.counts)
        splits = _split_examples(examples, encoded, seq_len, val_fraction, long, state.counts)
        about = {"kind": row_format.kind, "format": row_format.name, "counts": dict(state.counts)}
        with storage_errors(out):
            tokenizer.save(out / "tokenizer")
            shards: list[Shard] = []
            files: dict[str, str] = {}
            for split, chosen in splits.items():
                rows = [encoded[number] for number in chosen]
                writer = ShardWriter(
                    out,
                    split,
                    token_dtype(tokenizer.vocab_size),
                    shard_tokens,
                    tokenizer.fingerprint,
                    0,
                )
                beside = _write_split(
                    writer, rows, seq_len + 1, tokenizer.eot, pack=row_format.kind == "chat"
                )
                shards += writer.finish()
                if row_format.kind == "prompt" and chosen:
                    lines = (json.dumps(examples[number].row) + "\n" for number in chosen)
                    beside[answers_name(split)] = "".join(lines).encode()
                for name, data in beside.items():
                    replace_file(out / name, data, durable=True)
                    files[name] = xxhash.xxh3_128_hexdigest(data)
            manifest = Manifest(
                tokenizer=tokenizer.describe(),
                dtype=writer.dtype,
                documents={split: len(chosen) for split, chosen in splits.items()},
                shards=tuple(shards),
                source=recipe | about | {"files_beside": files},
            )
            finish_dataset(out, manifest, state)
    return summarize(manifest, started, source)


def _encode_rows(
    source: Source, template: ChatTemplate, invalid: Invalid, counts: Counter[str]
) -> tuple[list[Example], list[list[Encoded]], Format]:
    """Return the rows, the sequences of each, and their format. counts: rows skipped are added to `skipped`."""
    examples: list[Example] = []
    encoded: list[list[Encoded]] = []
    row_format: Format | None = None
    for where, line in read_rows(source):
        try:
            row_format, example = parse_row(line, where, row_format)
            sequences = _encode(example, row_format, template)
        except DataError:
            if invalid != "skip":
                raise
            counts["skipped"] += 1
            continue
        examples.append(example)
        encoded.append(sequences)
    if row_format is None or not examples:
        raise DataError(
            f"no rows, {counts['skipped']:,} skipped",
            source.files[0].path,
            "name files that hold some",
        )
    return examples, encoded, row_format


def _encode(example: Example, row_format: Format, template: ChatTemplate) -> list[Encoded]:
    """Return the sequences of a row: the conversation, the chosen and the rejected one, or the prompt."""
    whole = [template.encode(messages) for messages in example.answers]
    if row_format.kind == "prompt":
        whole = [template.encode(example.prompt, reply=True)]
    elif (
        row_format.kind == "preference"
    ):  # the prompt may hold earlier answers: the last one alone is preferred
        if whole[0][0] == whole[1][0]:
            raise DataError(
                "chosen and rejected are the same tokens", example.where, "leave the pair out"
            )
        n_prompt = len(template.encode(example.prompt, reply=True)[0])
        whole = [
            (ids, [place >= n_prompt and mark for place, mark in enumerate(marks)])
            for ids, marks in whole
        ]
    sequences = []
    for ids, trained in whole:
        marks = np.array(trained, np.uint8) * TRAINED
        marks[0] |= START
        sequences.append((np.array(ids, np.uint32), marks))
    return sequences


def _split_examples(
    examples: Sequence[Example],
    encoded: Sequence[list[Encoded]],
    seq_len: int,
    val_fraction: float,
    long: Long,
    counts: Counter[str],
) -> dict[str, list[int]]:
    """Return the numbers of the rows of each split, in order. Raises DataError.

    counts: the rows that are too long are added to `skipped`. A row's split is decided by the hash of its prompt; where
    that leaves a split empty, the nearest hash is moved.
    """
    room = seq_len + 1
    lengths = [max(len(ids) for ids, _ in sequences) for sequences in encoded]
    too_long = [number for number, length in enumerate(lengths) if length > room]
    if too_long and long == "fail":
        longest = max(too_long, key=lengths.__getitem__)
        what = f"{len(too_long):,} of {len(lengths):,} rows are longer than the context of {seq_len:,} tokens"
        what += f", the longest has {lengths[longest]:,}"
        fix = "--long skip leaves them out, nothing is cut; or take a model of a longer context"
        raise DataError(what, examples[longest].where, fix)
    kept = [number for number, length in enumerate(lengths) if length <= room]
    if not kept:
        what = f"all {len(lengths):,} rows are longer than the context of {seq_len:,} tokens"
        raise DataError(
            what, examples[0].where, "give shorter ones, or take a model of a longer context"
        )
    hashes = {}
    for number in kept:
        text = json.dumps([[message.role, message.content] for message in examples[number].prompt])
        hashes[number] = xxhash.xxh3_64_intdigest(text.encode())
    limit = val_fraction * 2**64
    lowest, highest = min(hashes.values()), max(hashes.values())
    if val_fraction and lowest != highest:
        limit = min(max(limit, lowest + 1), highest)
    elif lowest == highest:
        limit = 0
    val = [number for number in kept if hashes[number] < limit]
    train = [number for number in kept if hashes[number] >= limit]
    counts["skipped"] += len(too_long)
    return {"train": train, "val": val}


def _pack(sequences: Sequence[Encoded], length: int) -> list[list[Encoded]]:
    """Whole sequences in rows of at most `length` tokens: the longest first, each into the row that it fills best."""
    order = sorted(range(len(sequences)), key=lambda number: -len(sequences[number][0]))
    rows: list[list[int]] = []
    with_room: defaultdict[int, list[int]] = defaultdict(
        list
    )  # rows by the tokens that they have left
    sizes: list[int] = []  # the keys of `with_room` that have rows, ascending
    for number in order:
        needed = len(sequences[number][0])
        at = bisect_left(sizes, needed)
        if at < len(sizes):
            left = sizes[at]
            row = with_room[left].pop()
            if not with_room[left]:
                del sizes[at]
        else:
            left, row = length, len(rows)
            rows.append([])
        rows[row].append(number)
        if left := left - needed:
            if not with_room[left]:
                insort(sizes, left)
            with_room[left].append(row)
    return [[sequences[number] for number in sorted(row)] for row in rows]


def _write_split(
    writer: ShardWriter, sequences: Sequence[list[Encoded]], length: int, filler: int, *, pack: bool
) -> dict[str, bytes]:
    """Append rows of `length` tokens, filled up with `filler`; the files of their marks.

    sequences: of each row of the input; packed, or one in each row.
    """
    flat = [sequence for each in sequences for sequence in each]
    marks = []
    for row in _pack(flat, length) if pack else [[sequence] for sequence in flat]:
        rest = length - sum(len(ids) for ids, _ in row)
        writer.append(np.concatenate([*(ids for ids, _ in row), np.full(rest, filler, np.uint32)]))
        marks += [own.tobytes() for _, own in row] + [bytes([PADDING]) * rest]
    data, size = b"".join(marks), writer.shard_tokens
    return {
        marks_name(f"{writer.split}_{index:06d}.bin"): data[first : first + size]
        for index, first in enumerate(range(0, len(data), size))
    }
