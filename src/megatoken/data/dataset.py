"""Open a dataset: a prepared folder, .bin shards of llm.c or nanoGPT, .npy shards of build-nanogpt.

File sizes and headers are checked when it is opened; block hashes and token ids when a block is first read, or all at
once by `verify_dataset`. No file can run code: the header of a .npy file is a literal, and nothing is unpickled.
"""

import os
import re
import shlex
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatoken.config.load import prepare_words
from megatoken.data.documents import Ids
from megatoken.data.remote import Report, local_dataset, no_report
from megatoken.data.shard_format import (
    BLOCK_BYTES,
    HEADER_BYTES,
    MANIFEST_NAME,
    PROGRESS_NAME,
    RESTORE,
    SPLITS,
    Header,
    Manifest,
    Shard,
    has_magic,
    hash_block,
    read_header,
    read_manifest,
)
from megatoken.data.sources import IN_FOLDERS
from megatoken.data.tokenizer import Tokenizer, load_saved_tokenizer, load_tokenizer
from megatoken.errors import DataError, MegatokenError
from megatoken.system.machine import allow_open_files

_PERMISSIONS = "check the path and its permissions"
# (vocabulary size, id between documents) of the tokenizers whose shards are published; llm.c's LLaMA-3 writer puts
# begin-of-text there. Other shards are checked against the range of their dtype until `set_vocab_size` is called.
_PUBLISHED_TOKENIZERS = {"gpt2": (50257, 50256), "llama-3": (128256, 128000)}
_TOKENIZER_FACTS = {
    "fingerprint": "tokenizer",
    "eot": "end of text",
    "vocab_size": "a vocabulary of",
    "name": "name",
}
_SAMPLED_BLOCKS = 18  # of each external shard, for the fingerprint: first, last and 16 between
_HEADERLESS = ("train.bin", "val.bin")  # nanoGPT's files: uint16 ids without a header
_VAL = re.compile(
    r"(?<![a-z])val(id|idation)?(?![a-z])"
)  # a word of a shard's name, so not in "interval"
_SEEK_LOCK = threading.Lock()
_NPY_DTYPES = {
    "<u2": "uint16",
    "<u4": "uint32",
    "<i4": "uint32",
}  # a negative id reads as one outside any vocabulary


class ShardFile:
    """An open shard, read by position: a mapped file that is truncated, or whose disk fails, ends the process (SIGBUS).

    What was opened stays readable when the file is removed or replaced by a rename.
    """

    def __init__(self, shard: Shard, path: Path, dtype: str, offset: int) -> None:
        """shard: its row of the manifest; offset: bytes before the first token. Raises OSError."""
        self.shard, self.path, self.offset = shard, path, offset
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._stamp = self._read_stamp()

    @property
    def size(self) -> int:
        """Bytes that the file must have."""
        return self.offset + self.shard.tokens * self.dtype.itemsize

    def read(self, start: int, out: Ids) -> None:
        """Fill `out` (n,) from token `start` on. Raises DataError when the file ends before, or the disk fails."""
        at, size, done = self.offset + start * self.dtype.itemsize, out.nbytes, 0
        try:
            while done < size:
                part = (
                    out.data.cast("B")[done:] if done else out
                )  # a file system may give less at once
                if not (count := _read_at(self._descriptor, part, at + done)):
                    what = (
                        f"shard was truncated while it was in use: {self._read_stamp()[0]:,} bytes"
                    )
                    raise DataError(f"{what}, expected {self.size:,}", self.path, RESTORE)
                done += count
        except OSError as error:
            where = f"{self.path}, byte offset {at + done:,}"
            raise DataError(f"cannot read the shard: {error.strerror}", where, RESTORE) from error

    def read_block(self, number: int) -> Ids:
        """The ids of block `number`, the unit of hashing. Raises as `read`."""
        per_block = BLOCK_BYTES // self.dtype.itemsize
        ids = np.empty(min(per_block, self.shard.tokens - number * per_block), self.dtype)
        self.read(number * per_block, ids)
        return ids

    def has_changed(self) -> bool:
        """Whether the file was written to since it was opened or since this was last asked."""
        before, self._stamp = self._stamp, self._read_stamp()
        return before != self._stamp

    def _read_stamp(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns


def _read_at(descriptor: int, out: Any, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, (out,), offset)
    with (
        _SEEK_LOCK,
        open(descriptor, "rb", buffering=0, closefd=False) as file,
    ):  # Windows has no preadv
        file.seek(offset)
        return file.readinto(out)


class Tokens:
    """The token ids of one split: its shards joined end to end, each block verified when it is first read.

    A shard that was written to since is verified again.
    """

    def __init__(self, shards: list[ShardFile], dtype: str, vocab_size: int) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.vocab_size = vocab_size
        self._shards = shards
        self._block_tokens = BLOCK_BYTES // self.dtype.itemsize
        sizes = np.array([0, *(file.shard.tokens for file in shards)], dtype=np.int64)
        self._starts = np.cumsum(sizes)  # of the shards, and the end
        self._first_block = np.cumsum(-(-sizes // self._block_tokens))  # of the shards, and the end
        self._verified = np.zeros(self._first_block[-1], dtype=np.bool_)
        self._all_verified = False

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def shard_tokens(self) -> list[int]:
        """Tokens of each shard."""
        return [file.shard.tokens for file in self._shards]

    def set_vocab_size(self, vocab_size: int) -> None:
        """Set the vocabulary that ids are checked against; every block is verified again."""
        self.vocab_size = vocab_size
        self._verified[:] = False
        self._all_verified = False

    def read(self, start: int, count: int) -> Ids:
        """A copy of tokens [start, start + count), shape (count,). Raises DataError as `gather`."""
        return self.gather(np.array([start]), count).reshape(count)

    def gather(self, starts: NDArray[np.int64], length: int) -> Ids:
        """Windows of `length` tokens at `starts` (n,), copied into (n, length), in the shards' dtype.

        Raises DataError when a shard cannot be read, or when a block that is read for the first time, or of a shard
        that was written to, is damaged or holds an id outside the vocabulary.
        """
        out = np.empty((len(starts), length), dtype=self.dtype)
        if not out.size:
            return out
        assert starts.min() >= 0
        assert starts.max() + length <= len(self)
        first, last = self._find_shards(starts), self._find_shards(starts + length - 1)
        spans = set(zip(first.tolist(), last.tolist(), strict=True))
        touched = {index for start, end in spans for index in range(start, end + 1)}
        local = starts - self._starts[first]
        while True:
            if not self._all_verified:
                self._verify_windows(starts, length)
            for row, index, end, start in zip(
                out, first.tolist(), last.tolist(), local.tolist(), strict=True
            ):
                if index == end:
                    self._shards[index].read(start, row)
                else:
                    self._copy(index, start, row)
            # After copying: what was written between the verification and the copy is noticed, too.
            if not self._distrust_changed(touched):
                return out

    def verify(self) -> Iterator[MegatokenError]:
        """Verify every block and yield one DataError for each bad one."""
        for number in range(len(self._verified)):
            try:
                self._verify_block(number)
            except MegatokenError as error:
                yield error

    def _copy(self, index: int, start: int, out: Ids) -> None:
        """Fill `out` from token `start` of shard `index`, going on in the shards after it."""
        while len(out):
            file = self._shards[index]
            count = min(len(out), file.shard.tokens - start)
            file.read(start, out[:count])
            out, index, start = out[count:], index + 1, 0

    def _distrust_changed(self, shards: Iterable[int]) -> bool:
        """Whether any of these shards was written to; all of its blocks will be verified again."""
        changed = [index for index in shards if self._shards[index].has_changed()]
        for index in changed:
            self._verified[self._first_block[index] : self._first_block[index + 1]] = False
            self._all_verified = False
        return bool(changed)

    def _find_shards(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._starts, positions, side="right") - 1

    def _find_blocks(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        index = self._find_shards(positions)
        return self._first_block[index] + (positions - self._starts[index]) // self._block_tokens

    def _verify_windows(self, starts: NDArray[np.int64], length: int) -> None:
        """Verify the unverified blocks under windows. Threads that verify the same block at once do no harm."""
        first, last = self._find_blocks(starts), self._find_blocks(starts + length - 1)
        for step in range(int((last - first).max()) + 1):
            blocks = np.minimum(first + step, last)
            for number in np.unique(blocks[~self._verified[blocks]]):
                self._verify_block(int(number))
                self._verified[number] = True
        self._all_verified = bool(self._verified.all())

    def _verify_block(self, number: int) -> None:
        index = int(np.searchsorted(self._first_block, number, side="right")) - 1
        file, local = self._shards[index], number - int(self._first_block[index])
        start, ids = local * self._block_tokens, file.read_block(local)
        offset = file.offset + local * BLOCK_BYTES
        if file.shard.blocks and (actual := hash_block(ids)) != (
            expected := file.shard.blocks[local]
        ):
            what = f"shard is damaged: block {local} has hash {actual}, expected {expected}"
            where = f"{file.path}, {ids.nbytes:,} bytes from offset {offset:,} (token {start:,})"
            raise DataError(what, where, RESTORE)
        if int(ids.max()) >= self.vocab_size:
            at = int(np.argmax(ids >= self.vocab_size))
            what = f"token id {int(ids[at])} is outside the vocabulary of {self.vocab_size:,}"
            where = (
                f"{file.path}, byte offset {offset + at * ids.itemsize:,} (token {start + at:,})"
            )
            raise DataError(what, where, "these shards belong to another tokenizer, or are damaged")


@dataclass(frozen=True)
class Dataset:
    """An opened dataset. The manifest of external shards is derived from their headers."""

    path: Path
    manifest: Manifest
    train: Tokens
    val: Tokens
    shards: tuple[ShardFile, ...]
    external_tokenizer: str  # loaded where no tokenizer was saved beside the shards

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary that ids are checked against."""
        return self.train.vocab_size

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the shards: the saved one, for external shards the one named when opening.

        Raises DataError when it is missing, damaged or not the one that made the shards.
        """
        saved = self.path / "tokenizer"
        tokenizer = (
            load_saved_tokenizer(saved)
            if saved.is_dir()
            else load_tokenizer(self.external_tokenizer)
        )
        found, expected = tokenizer.describe(), self.manifest.tokenizer
        if expected["fingerprint"]:
            for key, noun in _TOKENIZER_FACTS.items():
                if found[key] != expected[key]:
                    made_with = f"{noun} {expected[key]!s:.64}"
                    what = f"shards were made with {made_with}, the folder's tokenizer has {found[key]}"
                    raise DataError(
                        what, saved, "restore the folder's tokenizer, or prepare the dataset again"
                    )
        return tokenizer

    def set_vocab_size(self, vocab_size: int) -> None:
        """Set the vocabulary that both splits are checked against; external shards do not record theirs."""
        self.train.set_vocab_size(vocab_size)
        self.val.set_vocab_size(vocab_size)

    @cached_property
    def fingerprint(self) -> str:
        """xxh3_128 hex that identifies the dataset.

        Prepared: over the manifest, hence over every token. External: over names, sizes, headers and up to 18 blocks
        (256 KiB each) of every shard.
        """
        if all(file.shard.blocks for file in self.shards if file.shard.tokens):
            return self.manifest.fingerprint
        hasher = xxhash.xxh3_128()
        for file in self.shards:
            hasher.update(f"{file.shard.file}\n{file.shard.split}\n{file.size}\n".encode())
            with file.path.open("rb") as header:
                hasher.update(header.read(file.offset))
            n_blocks = -(-(file.size - file.offset) // BLOCK_BYTES)
            for block in sorted(
                {at * (n_blocks - 1) // (_SAMPLED_BLOCKS - 1) for at in range(_SAMPLED_BLOCKS)}
            ):
                hasher.update(file.read_block(block).data)
        return str(hasher.hexdigest())


def load_dataset(
    path: str | Path, *, external_tokenizer: str = "gpt2", report: Report = no_report
) -> Dataset:
    """Open a prepared folder, or a folder, file or glob of llm.c / modded-nanogpt .bin or .npy token shards, also at an
    address such as s3://bucket/data, from which it is fetched first.

    external_tokenizer: the tokenizer of shards that do not record one. report: called with a line while data is
    fetched. Raises DataError, naming the file, when one is missing, truncated, of another tokenizer or not a token
    shard, and StorageError when it cannot be fetched.
    """
    path = local_dataset(path, report)
    manifest, files = _list_shards(path, external_tokenizer)
    allow_open_files(len(files))
    opened = tuple(
        _open_shard(file, shard, manifest)
        for file, shard in zip(files, manifest.shards, strict=True)
    )
    train, val = (
        Tokens(
            [one for one in opened if one.shard.split == split],
            manifest.dtype,
            manifest.tokenizer["vocab_size"],
        )
        for split in SPLITS
    )
    return Dataset(path, manifest, train, val, opened, external_tokenizer)


def verify_dataset(
    path: str | Path, *, external_tokenizer: str = "gpt2"
) -> Iterator[MegatokenError]:
    """Verify every byte of a dataset; yield one MegatokenError for each defect.

    External shards record no hashes: their headers, sizes and range of ids are checked.
    """
    try:
        manifest, files = _list_shards(Path(path), external_tokenizer)
    except MegatokenError as error:
        yield error
        return
    for file, shard in zip(files, manifest.shards, strict=True):
        try:
            opened = _open_shard(file, shard, manifest)
        except MegatokenError as error:
            yield error
        else:
            yield from Tokens([opened], manifest.dtype, manifest.tokenizer["vocab_size"]).verify()


def _list_shards(path: Path, external_tokenizer: str) -> tuple[Manifest, list[Path]]:
    """The manifest, read or derived from the headers of external shards, and the file of each of its rows."""
    try:
        prepared = (path / MANIFEST_NAME).exists()
        unfinished = not prepared and (path / PROGRESS_NAME).exists()
    except OSError as error:
        raise DataError(f"cannot read the dataset: {error.strerror}", path, _PERMISSIONS) from error
    if prepared:
        manifest = read_manifest(path)
        return manifest, [path / shard.file for shard in manifest.shards]
    if unfinished:
        raise DataError(
            "this dataset is not finished",
            path,
            "run the same `megatoken prepare` again: it goes on",
        )
    files = _list_external(path)
    if len(suffixes := sorted({file.suffix for file in files})) > 1:
        what = f"shards of two formats in one dataset: {' and '.join(suffixes)}"
        raise DataError(what, path, "name one format with a glob, for example 'DIR/*.bin'")
    headers = [_read_layout(file)[0] for file in files]
    for file, header in zip(files, headers, strict=True):
        if header.fingerprint:
            if (file.parent / MANIFEST_NAME).exists():
                what = "shards prepared by megatoken are read with their manifest"
                raise DataError(what, file, f"give the folder: data.path={file.parent}")
            what = f"shard was prepared by megatoken, but {MANIFEST_NAME} is not beside it"
            raise DataError(what, file, "finish the preparation or copy the whole folder")
        if header.dtype != headers[0].dtype:
            what = (
                f"mixed dataset: {header.dtype} tokens here, {headers[0].dtype} in {files[0].name}"
            )
            raise DataError(what, file, "keep shards of one tokenizer in one folder")
        if (
            file.name in _HEADERLESS
            and external_tokenizer == "gpt2"
            and (file.parent / "meta.pkl").exists()
        ):
            what = "these ids are of a vocabulary of their own, in meta.pkl: a pickle, which is never loaded"
            fix = "prepare the text again: megatoken prepare FILE --out DIR --tokenizer bytes"
            raise DataError(what, file, fix)
        if header.tokens == 0:
            raise DataError("shard holds no tokens", file, "remove it from the folder")
    dtype, name = headers[0].dtype, external_tokenizer
    if files[0].suffix == ".bin" and dtype == "uint32" and name == "gpt2":
        name = "llama-3"  # llm.c's version 7; GPT-2's ids never need 32 bits
    vocab_size, eot = _PUBLISHED_TOKENIZERS.get(
        name, (1 << 16 if dtype == "uint16" else 1 << 31, -1)
    )
    tokenizer = {"name": name, "vocab_size": vocab_size, "eot": eot, "fingerprint": ""}
    splits = ["val" if _VAL.search(file.name) else "train" for file in files]
    shards = tuple(
        Shard(file=file.name, split=split, tokens=header.tokens, blocks=(), header="")
        for file, split, header in zip(files, splits, headers, strict=True)
    )
    return Manifest(tokenizer=tokenizer, dtype=dtype, documents={}, shards=shards, source={}), files


def _list_external(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            found = list(path.iterdir())
        elif path.exists() or not any(sign in str(path) for sign in "*?["):
            found = [path]
        else:
            found = list(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))))
    except ValueError as error:
        raise DataError(
            f"not a pattern: {error}", path, "write it like DIR/*.bin or DIR/**/*.bin"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read the dataset: {error.strerror}", path, _PERMISSIONS) from error
    files = sorted(file for file in found if file.suffix in (".bin", ".npy"))
    if not files:
        what = f"no dataset here: no {MANIFEST_NAME}, no .bin and no .npy shards"
        fix = f"make it with: megatoken {' '.join(prepare_words(str(path), str(path)))}"
        if any(sign in str(path) for sign in "*?["):
            fix = "check the pattern; or make shards: megatoken prepare SOURCE --out DIR, and set data.path=DIR"
        elif path.exists() and any(file.suffix in IN_FOLDERS for file in found):
            what, made = (
                "text, not a dataset",
                f"data/{path.stem if path.is_file() else path.absolute().name}",
            )
            fix = f"{shlex.join(['megatoken', 'prepare', str(path), '--out', made])}, and set data.path={made}"
        raise DataError(what, path, fix)
    return files


def _open_shard(path: Path, shard: Shard, manifest: Manifest) -> ShardFile:
    """Open a shard after checking its header against its row of the manifest."""
    header, offset, raw = _read_layout(path)
    expectations = {
        "token type": (header.dtype, manifest.dtype),
        "token count": (header.tokens, shard.tokens),
        "tokenizer fingerprint": (
            header.fingerprint or "unknown",
            manifest.tokenizer["fingerprint"] or "unknown",
        ),
    }
    if shard.header or shard.blocks:  # not an external one
        n_blocks = -(-shard.tokens * np.dtype(manifest.dtype).itemsize // BLOCK_BYTES)
        expectations["hash of the header"] = (hash_block(raw), shard.header)
        expectations["number of block hashes"] = (n_blocks, len(shard.blocks))
    for noun, (actual, expected) in expectations.items():
        if actual != expected:
            what = f"shard does not fit its manifest: {noun} is {actual}, expected {expected}"
            raise DataError(what, path, RESTORE)
    try:
        return ShardFile(shard, path, header.dtype, offset)
    except OSError as error:
        raise DataError(f"cannot read the shard: {error.strerror}", path, _PERMISSIONS) from error


def _read_layout(path: Path) -> tuple[Header, int, bytes]:
    """A shard's header, the offset of its tokens and the bytes before them; checks the file's size."""
    try:
        with path.open("rb") as file:
            raw = file.read(HEADER_BYTES)
            size = path.stat().st_size
    except FileNotFoundError as error:
        raise DataError("shard is missing", path, RESTORE) from error
    except OSError as error:
        raise DataError(f"cannot read the shard: {error.strerror}", path, _PERMISSIONS) from error
    if path.suffix == ".npy":
        header, offset = _read_npy_header(path)
    elif path.name in _HEADERLESS and not has_magic(raw):
        header, offset = Header(dtype="uint16", tokens=size // 2, fingerprint=""), 0
    else:
        header, offset = read_header(raw, str(path)), HEADER_BYTES
    item = np.dtype(header.dtype).itemsize
    expected = offset + header.tokens * item
    if size != expected:
        reason = "truncated" if size < expected else "longer than its header says"
        if (size - offset) % item:
            reason += f", and not a whole number of {item}-byte tokens"
        what = (
            f"shard is {reason}: {size:,} bytes, expected {expected:,} for {header.tokens:,} tokens"
        )
        raise DataError(what, path, RESTORE)
    return header, offset, raw[:offset]


def _read_npy_header(path: Path) -> tuple[Header, int]:
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # what numpy parses may raise any type
        raise DataError(f"not a plain .npy file: {error!s:.200}", path, RESTORE) from error
    if array.dtype.str not in _NPY_DTYPES or array.ndim != 1:
        what = f".npy file holds {array.dtype.str} of shape {array.shape}, not a row of token ids"
        raise DataError(
            what, path, "save a one-dimensional uint16, uint32 or int32 array with numpy.save"
        )
    return Header(
        dtype=_NPY_DTYPES[array.dtype.str], tokens=len(array), fingerprint=""
    ), array.offset
