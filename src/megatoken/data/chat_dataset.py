"""Datasets of conversations: rows of one length, and beside each shard a byte for every token.

A row has one token more than the context that it was made for; the first `seq_len` are inputs, the last `seq_len`
targets. The manifest's `source` names the kind of the dataset, the context, and a hash of every file beside the shards.

| kind | a row | beside it |
|---|---|---|
| chat | whole conversations, as many as fit | |
| preference | one conversation; the chosen one's row is before the rejected one's | |
| prompt | one prompt with the header of the answer | `train_answers.jsonl`: the rows of the input, in order |
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatoken.data.dataset import Dataset, Tokens
from megatoken.data.shard_format import RESTORE, Manifest
from megatoken.errors import DataError

TRAINED, START, PADDING = (
    1,
    2,
    4,
)  # bits of a token's byte: trained; a conversation starts here; fills up the row
KINDS = {
    "text": "text",
    "chat": "conversations",
    "preference": "preferences",
    "prompt": "prompts with answers",
}
OBJECTIVE_DATA = {"pretrain": "text", "sft": "chat", "dpo": "preference", "reward": "preference"}
OBJECTIVE_DATA |= {"grpo": "prompt", "ppo": "prompt"}  # the kind that each objective trains on
ROW_OBJECTIVES = ("dpo", "reward", "grpo", "ppo")  # whose batches are made of single rows
# What makes each kind, for errors.
_MADE_FROM = {
    "text": "text",
    "chat": "`messages` or another format of conversations",
    "preference": "rows of `prompt`, `chosen` and `rejected`",
    "prompt": "rows of `prompt` and `answer`",
}

Marks = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ChatRows:
    """The rows of one split. marks (tokens,): the bytes beside the shards."""

    tokens: Tokens
    marks: Marks
    seq_len: int

    def __len__(self) -> int:
        return len(self.marks) // (self.seq_len + 1)

    def read(self, rows: NDArray[np.int64]) -> tuple[NDArray[Any], Marks]:
        """Ids and marks of rows, both (n, seq_len + 1). Raises DataError as `Tokens.gather`."""
        length = self.seq_len + 1
        return self.tokens.gather(rows * length, length), self.marks.reshape(-1, length)[rows]

    def sequence(self, row: int) -> tuple[list[int], list[bool]]:
        """Ids of a row without what fills it up, and which are trained."""
        ids, marks = self.read(np.array([row]))
        kept = marks[0] & PADDING == 0
        return ids[0][kept].tolist(), (marks[0][kept] & TRAINED > 0).tolist()


def find_kind(manifest: Manifest) -> str:
    """text, chat, preference or prompt."""
    return str(manifest.source.get("kind", "text"))


def require_data_for(objective: str, dataset: Dataset) -> None:
    """Raise DataError unless a dataset is of the kind that the objective trains on."""
    require_kind(dataset, OBJECTIVE_DATA[objective], f"objective.name={objective}")


def require_kind(dataset: Dataset, kind: str, needed_by: str) -> None:
    """Raise DataError unless a dataset is of this kind. needed_by: for the error, such as `objective.name=sft`."""
    if (found := find_kind(dataset.manifest)) != kind:
        what = f"{needed_by} needs {KINDS[kind]}, this dataset holds {KINDS.get(found, found)}"
        raise DataError(what, dataset.path, f"prepare one from {_MADE_FROM[kind]}")


def open_rows(dataset: Dataset, split: str) -> ChatRows:
    """The rows of a split, train or val. Raises DataError where a file beside the shards is missing or damaged."""
    source, parts = dataset.manifest.source, [np.zeros(0, np.uint8)]
    for shard in dataset.manifest.shards:
        if shard.split == split:
            data = _read_verified(dataset, marks_name(shard.file))
            if len(data) != shard.tokens:
                what = f"{len(data):,} marks beside a shard of {shard.tokens:,} tokens"
                raise DataError(what, dataset.path / marks_name(shard.file), RESTORE)
            parts.append(np.frombuffer(data, np.uint8))
    return ChatRows(getattr(dataset, split), np.concatenate(parts), int(source["seq_len"]))


def read_answers(dataset: Dataset, split: str) -> list[dict[str, Any]]:
    """The rows of the input of a dataset of prompts, one for each row of tokens: `answer`, and whatever it had beside.

    Raises DataError as `open_rows`.
    """
    name = answers_name(split)
    data = _read_verified(dataset, name) if name in dataset.manifest.source["files_beside"] else b""
    return [json.loads(line) for line in data.splitlines()]


def marks_name(shard: str) -> str:
    """The file of a shard's marks."""
    return f"{Path(shard).stem}.marks"


def answers_name(split: str) -> str:
    """The file of a split's answers."""
    return f"{split}_answers.jsonl"


def _read_verified(dataset: Dataset, name: str) -> bytes:
    path = dataset.path / name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read a file beside the shards: {error.strerror}", path, RESTORE
        ) from error
    expected = dataset.manifest.source["files_beside"].get(name)
    if (actual := xxhash.xxh3_128_hexdigest(data)) != expected:
        raise DataError(
            f"file is damaged: its hash is {actual}, expected {expected}", path, RESTORE
        )
    return data
