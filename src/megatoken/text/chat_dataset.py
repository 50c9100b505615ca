"""Read datasets of conversations: token rows of equal length, with a byte of labels per token.

A row is one token longer than the context that the dataset was prepared for. The manifest's
`source` records the kind of dataset, the context, and a hash of each extra file.

| kind | a row | extra files next to the shards |
|---|---|---|
| chat | complete conversations, as many as fit | `train_000000.marks`, ... |
| preference | one conversation; chosen and rejected rows alternate | the same |
| kto | one conversation; a label tells whether its answer is desirable | the same |
| prompt | one prompt with the header of the answer | also `train_answers.jsonl`, the examples as read |
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.base.errors import DataError
from megatoken.data.dataset import Dataset, Tokens
from megatoken.data.shard_format import RESTORE, check_hash, read_errors

# Bits of a token's label: it is trained on, starts a conversation, pads the row, or (for KTO) starts
# a conversation with a desirable answer.
TRAINED = 1
START = 2
PADDING = 4
DESIRABLE = 8
Labels = NDArray[np.uint8]


@dataclass(frozen=True)
class ChatRows:
    """The rows of one split.

    labels (n_tokens,): the bits TRAINED, START, PADDING and DESIRABLE of each token.
    """

    tokens: Tokens
    labels: Labels
    seq_len: int

    def __len__(self) -> int:
        return len(self.labels) // (self.seq_len + 1)

    def read(self, rows: NDArray[np.int64]) -> tuple[NDArray[Any], Labels]:
        """Return (ids, labels) of the rows with these numbers, both (n, seq_len + 1).

        Raises DataError as `Tokens.gather` does.
        """
        length = self.seq_len + 1
        return self.tokens.gather(rows * length, length), self.labels.reshape(-1, length)[rows]

    def sequence(self, row: int) -> tuple[list[int], list[bool]]:
        """Return a row's ids without padding, and for each id whether it is trained on."""
        ids, labels = self.read(np.array([row]))
        is_real = labels[0] & PADDING == 0
        return ids[0][is_real].tolist(), (labels[0][is_real] & TRAINED > 0).tolist()

    def is_desirable(self, row: int) -> bool:
        """Return whether a row's answer is desirable (KTO)."""
        return bool(self.labels[row * (self.seq_len + 1)] & DESIRABLE)


def open_rows(dataset: Dataset, split: str) -> ChatRows:
    """Return the rows of a split. Raises DataError if a .marks file is missing or damaged."""
    parts = [np.zeros(0, np.uint8)]
    for shard in dataset.manifest.shards:
        if shard.split == split:
            labels = np.frombuffer(_read_verified(dataset, labels_name(shard.file)), np.uint8)
            if len(labels) != shard.tokens:
                path = dataset.path / labels_name(shard.file)
                raise DataError(f"{len(labels):,} labels, {shard.tokens:,} tokens", path, RESTORE)
            parts.append(labels)
    seq_len = int(dataset.manifest.source["seq_len"])
    return ChatRows(getattr(dataset, split), np.concatenate(parts), seq_len)


def read_answers(dataset: Dataset, split: str) -> list[dict[str, Any]]:
    """Return the input row of each prompt; its key `answer` holds the answer.

    Raises DataError if the answers file is missing or damaged.
    """
    name = answers_name(split)
    if name not in dataset.manifest.source["files_beside"]:  # an empty split
        return []
    return [json.loads(line) for line in _read_verified(dataset, name).splitlines()]


def labels_name(shard: str) -> str:
    """Return the name of a shard's .marks file."""
    return f"{Path(shard).stem}.marks"


def answers_name(split: str) -> str:
    """Return the name of a split's answers file."""
    return f"{split}_answers.jsonl"


def _read_verified(dataset: Dataset, name: str) -> bytes:
    path = dataset.path / name
    with read_errors(path):
        return check_hash(
            path.read_bytes(), dataset.manifest.source["files_beside"].get(name), path
        )
