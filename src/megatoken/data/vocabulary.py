"""What training knows of a tokenizer: its identity, its size and the bytes of its tokens.

A dataset, a run and a checkpoint each have a folder `tokenizer` with a tokenizer.json, the model's
files beside it, and a description. Training copies it; text/ makes it and can encode and decode.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megatoken.base.errors import DataError, MegatokenError
from megatoken.base.system.atomic_write import (
    read_json,
    read_small_file,
    replace_file,
    storage_errors,
)
from megatoken.data.shard_format import DESCRIPTION_NAME, RESTORE, hash_bytes

TOKENIZER_FILE = "tokenizer.json"
LARGEST_FILE = 64 << 20  # bytes of a tokenizer.json; 256k ids take 33 MB

Ids = NDArray[np.uint16] | NDArray[np.uint32]  # as shards hold them
Ints = NDArray[np.int64]
CountBytes = Callable[[Ints, Ints], float]  # of text in inputs and targets


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a tokenizer.

    vocab_size: highest id + 1. eot: id of the token between documents. fingerprint: sha256 hex of
    everything that affects encoding or decoding. files: content of tokenizer.json and of the
    model's files beside it, by name.
    """

    name: str
    vocab_size: int
    eot: int
    fingerprint: str
    files: Mapping[str, str]

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each token."""
        return self._inner.get_vocab()

    def shares_ids(self, other: "Vocabulary") -> bool:
        """Return whether both have the same tokens with the same ids."""
        return self.ids == other.ids

    def describe(self) -> dict[str, Any]:
        """Return the tokenizer's entry in the manifest, also saved in megatoken_tokenizer.json."""
        return {
            "name": self.name,
            "vocab_size": self.vocab_size,
            "eot": self.eot,
            "fingerprint": self.fingerprint,
        }

    def save(self, folder: Path) -> None:
        """Durably write `files` and, last, megatoken_tokenizer.json.

        Raises StorageError if the folder cannot be written.
        """
        digest = hash_bytes(self.files[TOKENIZER_FILE].encode())
        row = json.dumps(self.describe() | {"xxh3_128": digest}, indent=1) + "\n"
        with storage_errors(folder, what="cannot save the tokenizer"):
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in {**self.files, DESCRIPTION_NAME: row}.items():
                replace_file(folder / name, text, durable=True)

    def count_bytes(self, inputs_BT: Ints, targets_BT: Ints) -> int:
        """Return the number of bytes of text in the targets >= 0, without special tokens.

        inputs_BT: needed because the text of a token can depend on the token before it.
        """
        if self.byte_lengths is not None:
            return int(self.byte_lengths[targets_BT[targets_BT >= 0]].sum())
        total = 0
        for inputs, targets in zip(inputs_BT, targets_BT, strict=True):
            ids = np.append(inputs[:1], targets[targets >= 0])  # text depends on the previous id
            documents = np.split(ids, np.flatnonzero(ids == self.eot))
            total += sum(map(self._count_decoded, documents)) - self._count_decoded(ids[:1])
        return total

    @cached_property
    def byte_lengths(self) -> Ints | None:
        """Bytes of text per id, (vocab_size,), or None if the tokenizer is not byte-level."""
        content = json.loads(self.files[TOKENIZER_FILE])
        if "ByteLevel" not in json.dumps(content["decoder"]):
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, id in self.ids.items():
            lengths[id] = len(token)
        for token in content["added_tokens"]:
            lengths[token["id"]] = 0 if token["special"] else len(token["content"].encode())
        return lengths

    @cached_property
    def _inner(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self.files[TOKENIZER_FILE])

    def _count_decoded(self, ids: Ints) -> int:
        text = self._inner.decode(ids.tolist(), skip_special_tokens=True)
        return len(text.replace("\ufffd", "?").encode())  # one byte of a split character


def read_vocabulary(folder: Path) -> Vocabulary:
    """Return the vocabulary that `save` wrote to `folder`.

    Raises DataError if it is missing or damaged.
    """
    path = folder / TOKENIZER_FILE
    with tokenizer_errors("tokenizer is missing or damaged", path, RESTORE):
        row = read_json(folder / DESCRIPTION_NAME)
        digest = row.pop("xxh3_128")
        names = [each.name for each in sorted(folder.glob("[!.]*.j*"))]
        files = {name: read_small_file(folder / name, LARGEST_FILE).decode() for name in names}
        del files[DESCRIPTION_NAME]
        if digest != hash_bytes(files[TOKENIZER_FILE].encode()):
            raise ValueError("its hash differs")
        vocabulary = Vocabulary(**row, files=files)
        if [*map(type, row.values())] != [str, int, int, str] or vocabulary.describe() != row:
            raise ValueError(f"{DESCRIPTION_NAME} does not describe it")
        _ = vocabulary.byte_lengths  # fails if an id is outside the vocabulary
        return vocabulary


@contextmanager
def tokenizer_errors(what: str, where: str | Path, fix: str) -> Iterator[None]:
    """Convert what `tokenizers` raises, including Rust panics (BaseException), to DataError."""
    try:
        yield
    except MegatokenError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: {error!s:.200}", where, fix) from error
