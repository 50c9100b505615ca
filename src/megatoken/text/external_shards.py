"""Find token shards of other programs: .bin of llm.c or nanoGPT, .npy of build-nanogpt.

They have no manifest, so one is derived from their headers.
"""

import glob
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from megatoken.base.errors import DataError
from megatoken.data.dataset import Folder, ShardFile
from megatoken.data.shard_format import (
    HEADER_BYTES,
    MANIFEST_NAME,
    RESTORE,
    Header,
    Manifest,
    Shard,
    has_magic,
    read_errors,
    read_header,
)
from megatoken.text.file_kinds import find_foreign, find_split

SUFFIXES = (".bin", ".npy")
# (vocabulary size, id between documents) of tokenizers whose shards are published. For LLaMA-3 the
# latter is begin-of-text, as llm.c writes it. Ids of other tokenizers are checked once
# `set_vocab_size` is called.
_PUBLISHED_TOKENIZERS = {"gpt2": (50257, 50256), "llama-3": (128256, 128000)}
_HEADERLESS = ("train.bin", "val.bin")  # nanoGPT's files of uint16 ids
# Read as uint32, negative ids are outside any vocabulary.
_NPY_DTYPES = {"<u2": "uint16", "<u4": "uint32", "<i4": "uint32"}


def list_external(folder: Folder, tokenizer: str) -> tuple[Manifest, list[ShardFile]] | None:
    """Return a manifest derived from the shards' headers, and the shards; None if there are none.

    folder: its path is a folder, file or glob pattern. tokenizer: name of the tokenizer that made the shards.
    Raises DataError for shards of several formats, or a dataset in a format that is not read.
    """
    shards: list[ShardFile] = []
    for file, split in _find_files(folder.path).items():
        header, offset = _read_layout(file)
        dtype = header.dtype
        row = Shard(file=file.name, split=split, tokens=header.tokens, hash="")
        shards.append(ShardFile(Folder(file.parent), row, dtype, offset))
        first = shards[0]
        if header.fingerprint:
            fix = f"name the folder with {MANIFEST_NAME}, or finish the preparation"
            raise DataError("a shard of megatoken without its manifest", file, fix)
        if dtype != first.dtype or file.suffix != first.path.suffix:
            raise DataError(f"shards of two formats: also {first.path.name}", file, "use a pattern")
        if file.name in _HEADERLESS and tokenizer == "gpt2" and (file.parent / "meta.pkl").exists():
            fix = "prepare the text: megatoken prepare FILE --out DIR --tokenizer bytes"
            raise DataError("ids of a vocabulary in meta.pkl, which is not loaded", file, fix)
    if not shards:
        return None
    if file.suffix == ".bin" and dtype == "uint32" and tokenizer == "gpt2":
        tokenizer = "llama-3"  # only llm.c's LLaMA-3 shards have 32 bits
    unknown = (1 << 16 if dtype == "uint16" else 1 << 31, -1)
    vocab_size, eot = _PUBLISHED_TOKENIZERS.get(tokenizer, unknown)
    description = {"name": tokenizer, "vocab_size": vocab_size, "eot": eot, "fingerprint": ""}
    rows = tuple(each.shard for each in shards)
    return Manifest(
        tokenizer=description, dtype=dtype, documents={}, shards=rows, source={}
    ), shards


def _find_files(path: Path) -> dict[Path, str]:
    """Return each shard with its split, "train" or "val"; {} if there is none.

    Shards that are named as test data are left out, unless there are no others.
    """
    if path.is_dir():
        paths = list(path.iterdir())
    else:
        paths = [Path(match) for match in glob.glob(str(path))]  # noqa: PTH207 (absolute patterns)
    files = sorted(file for file in paths if file.suffix in SUFFIXES)
    for each in (path, *([] if files else paths)):
        with suppress(OSError):  # a path that cannot exist
            if error := find_foreign(each):
                raise error
    if not files:
        return {}
    start = os.path.commonpath([file.parent for file in files])
    splits = {file: find_split(file.relative_to(start).as_posix()) for file in files}
    if set(splits.values()) == {"test"}:
        splits = dict.fromkeys(files, "train")
    return {file: split or "train" for file, split in splits.items() if split != "test"}


def _read_layout(path: Path) -> tuple[Header, int]:
    """Return a shard's header and the byte offset of its first token.

    Raises DataError unless the file has the size that its header implies.
    """
    with read_errors(path), path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
        size = path.stat().st_size
    error = None if has_magic(raw) else find_foreign(path)
    if error:
        raise error
    if path.suffix == ".npy":
        header, offset = _read_npy_header(path)
    elif path.name in _HEADERLESS and not has_magic(raw):
        header = Header(dtype="uint16", tokens=size // 2, fingerprint="")
        offset = 0
    else:
        header = read_header(raw, path)
        offset = HEADER_BYTES
    expected = offset + header.tokens * np.dtype(header.dtype).itemsize
    if size != expected or not header.tokens:
        what = f"shard of {header.tokens:,} tokens has {size:,} bytes, expected {expected:,}"
        raise DataError(what, path, RESTORE)
    return header, offset


def _read_npy_header(path: Path) -> tuple[Header, int]:
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # numpy's parser raises any type
        raise DataError(f"not a plain .npy file: {error!s:.200}", path, RESTORE) from error
    if array.dtype.str not in _NPY_DTYPES or array.ndim != 1:
        what = f".npy file holds {array.dtype.str} of shape {array.shape}, not token ids"
        raise DataError(what, path, "save a row of uint16, uint32 or int32")
    dtype = _NPY_DTYPES[array.dtype.str]
    return Header(dtype=dtype, tokens=len(array), fingerprint=""), array.offset
