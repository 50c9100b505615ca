"""Prepare a dataset folder (chat_dataset.py) from conversations, preferences or prompts."""

import json
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatoken.base.errors import ConfigError, DataError
from megatoken.data.shard_format import Manifest
from megatoken.text.chat_dataset import (
    DESIRABLE,
    PADDING,
    START,
    TRAINED,
    answers_name,
    labels_name,
)
from megatoken.text.chat_formats import HARMLESS, Example, Kind, RowFormat, parse_row
from megatoken.text.chat_template import THOUGHTS, ChatTemplate, add_control_tokens, find_template
from megatoken.text.documents import Invalid
from megatoken.text.output_folder import DatasetWriter, PrepareResult, ResumeState, make_dataset
from megatoken.text.sources import Source
from megatoken.text.text_files import read_rows
from megatoken.text.tokenizer import Tokenizer

Long = Literal["fail", "skip"]
LabeledIds = tuple[NDArray[np.uint32], NDArray[np.uint8]]  # ids and labels, both (n,)


class EncodedExample(NamedTuple):
    """An example and its sequences: two (chosen, rejected) for a preference, else one.

    split: the split of its file, or "".
    """

    example: Example
    sequences: list[LabeledIds]
    split: str


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
    """Prepare the dataset `out` from rows of conversations (chat_formats.py), all held in memory.

    tokenizer: the model's; it gets ChatML's control tokens if it has no chat template. seq_len: the
    model's context. invalid: "skip" drops unusable rows. long: "skip" drops rows longer than the
    context. Rows with equal prompts go to the same split.

    Raises ConfigError for an unusable template or a bad setting, DataError for unusable rows or an
    `out` that holds something else, and StorageError if the disk fails.
    """
    if seq_len < 1:
        raise ConfigError("--context is out of range", "prepare", "see --help")
    val_fraction *= not source.has_val
    tokenizer = add_control_tokens(tokenizer)
    template = find_template(tokenizer)
    recipe = {
        "tokenizer": f"{tokenizer.name} {tokenizer.fingerprint[:16]}",
        "val_fraction": float(val_fraction),
        "shard_tokens": shard_tokens,
        "invalid": invalid,
        "long": long,
        "seq_len": seq_len,
        "template": template.name,
    }

    def write(state: ResumeState) -> Manifest:
        examples, row_format, counts = _encode_examples(source, template, invalid)
        fitting = _drop_long(examples, seq_len, long)
        splits = _split_examples(fitting, val_fraction)
        counts["skipped"] += len(examples) - len(fitting)
        with closing(DatasetWriter(out, state, tokenizer, shard_tokens)) as writer:
            for split, chosen in splits.items():
                _write_split(writer, split, chosen, seq_len + 1, row_format.kind)
            described = {
                "kind": row_format.kind,
                "format": row_format.name,
                "counts": counts,
                "files_beside": writer.files_beside,
            }
            return writer.finish({name: len(chosen) for name, chosen in splits.items()}, described)

    return make_dataset(out, source, recipe, write)


def _encode_examples(
    source: Source, template: ChatTemplate, invalid: Invalid
) -> tuple[list[EncodedExample], RowFormat, Counter[str]]:
    """Return the examples, their format, and counts of rows: skipped, or with an unused key."""
    examples: list[EncodedExample] = []
    counts = Counter(skipped=0)
    row_format: RowFormat | None = None
    jinja = f"{template.jinja}{template.tokenizer.templates}"
    for where, line, split in read_rows(source):
        counts["skipped"] += 1
        try:
            row_format, example = parse_row(line, where, row_format)
            if example.weight:
                sequences = _encode(example, row_format.kind, template)
                examples.append(EncodedExample(example, sequences, split))
                counts["skipped"] -= 1
                messages = chain(example.prompt, *example.conversations)
                keys = {key for each in messages for key in each.fields if key not in jinja}
                keys -= {*THOUGHTS, *HARMLESS}
                counts.update(f"rows with unused {key}" for key in keys.union(example.unused))
        except DataError:
            if invalid != "skip":
                raise
    if row_format is None or not examples:
        what = f"no rows, {counts['skipped']:,} skipped"
        raise DataError(what, source.files[0].path, "name other files")
    return examples, row_format, counts


def _encode(example: Example, kind: Kind, template: ChatTemplate) -> list[LabeledIds]:
    options = {"where": example.where} | example.options
    encoded = [template.encode(messages, **options) for messages in example.conversations]
    if kind == "prompt":
        encoded = [template.encode(example.prompt, reply=True, **options)]
    if kind == "preference" and encoded[0][0] == encoded[1][0]:
        what = "chosen and rejected are the same tokens"
        raise DataError(what, example.where, "leave the pair out")
    sequences = []
    for ids, trained in encoded:
        labels = np.array(trained, np.uint8) * TRAINED
        labels[0] |= START | DESIRABLE * example.is_desirable
        sequences.append((np.array(ids, np.uint32), labels))
    return sequences


def _drop_long(examples: list[EncodedExample], seq_len: int, long: Long) -> list[EncodedExample]:
    """Return the examples that fit the context.

    Raises DataError if `long` is "fail" and an example does not fit, or if none fits.
    """
    lengths = [max(len(ids) for ids, _ in each.sequences) for each in examples]
    fitting = [
        each for each, length in zip(examples, lengths, strict=True) if length <= seq_len + 1
    ]
    n_long = len(examples) - len(fitting)
    if n_long and (long == "fail" or not fitting):
        longest = max(range(len(examples)), key=lengths.__getitem__)
        what = f"{n_long:,} of {len(examples):,} rows exceed the context of {seq_len:,} tokens"
        fix = "skip them with --long skip, or use a model with a longer context"
        where = examples[longest].example.where
        raise DataError(f"{what}, by up to {lengths[longest]:,}", where, fix)
    return fitting


def _split_examples(
    examples: list[EncodedExample], val_fraction: float
) -> dict[str, list[EncodedExample]]:
    """Split into train and val by the examples' files, or where a file has no split, by a hash.

    The hash is that of the prompt. A split that would be empty gets the prompt whose hash is nearest
    to the threshold. With a val_fraction of 0 or a single prompt, val stays empty. Raises DataError
    if train does.
    """
    hashes = []
    for each in examples:
        prompt = json.dumps([[message.role, message.content] for message in each.example.prompt])
        hashes.append(xxhash.xxh3_64_intdigest(prompt.encode()))
    limit = min(max(val_fraction * 2**64, min(hashes) + 1), max(hashes)) if val_fraction else 0
    splits: dict[str, list[EncodedExample]] = {"train": [], "val": []}
    for each, digest in zip(examples, hashes, strict=True):
        splits[each.split or ("val" if digest < limit else "train")].append(each)
    if not splits["train"]:
        raise DataError("no rows to train on", examples[0].example.where, "name other files")
    return splits


def _pack(sequences: Sequence[LabeledIds], length: int) -> list[list[LabeledIds]]:
    """Pack sequences into rows of at most `length` tokens by best fit, longest first."""
    order = sorted(range(len(sequences)), key=lambda number: -len(sequences[number][0]))
    rows: list[list[int]] = []
    gaps: list[tuple[int, int, int]] = []  # tokens left, minus the step that left them, row
    for step, number in enumerate(order):
        needed, gap, row = len(sequences[number][0]), length, len(rows)
        best = bisect_left(gaps, (needed,))
        if best < len(gaps):
            gap, _, row = gaps.pop(best)
        else:
            rows.append([])
        rows[row].append(number)
        if gap > needed:
            insort(gaps, (gap - needed, -step, row))
    return [[sequences[number] for number in sorted(row)] for row in rows]


def _write_split(
    writer: DatasetWriter, split: str, examples: list[EncodedExample], length: int, kind: Kind
) -> None:
    """Write a split's rows of `length` tokens with padding, their labels, and the answers."""
    flat = [sequence for each in examples for sequence in each.sequences]
    labels: list[bytes] = []
    for packed in _pack(flat, length) if kind == "chat" else [[sequence] for sequence in flat]:
        n_free = length - sum(len(ids) for ids, _ in packed)
        padding = np.full(n_free, writer.tokenizer.eot, np.uint32)
        writer.splits[split].append(np.concatenate([*(ids for ids, _ in packed), padding]))
        labels += [*(each.tobytes() for _, each in packed), bytes([PADDING]) * n_free]
    data = b"".join(labels)
    for index, start in enumerate(range(0, len(data), writer.shard_tokens)):
        name = labels_name(f"{split}_{index:06d}.bin")
        writer.write_beside(name, data[start : start + writer.shard_tokens])
    if kind == "prompt" and examples:
        lines = "".join(json.dumps(each.example.row) + "\n" for each in examples)
        writer.write_beside(answers_name(split), lines.encode())
