"""Opening a dataset: a prepared folder, .bin shards of llm.c or nanoGPT or .npy shards of build-nanogpt, as they are.

In: a folder, a file or a glob. Out: `Dataset`, one `Tokens` a split. What is cheap is checked here: every file,
its size, its header. Hashes and ids are checked at first touch (tokens.py) or all at once by `verify_dataset`.
Deliberately absent: the tokenizer, and anything that could run code from a file (.npy is mapped, never
unpickled).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from megatoken.data.shards import (
    BLOCK_BYTES,
    HEADER_BYTES,
    ITEM_BYTES,
    MANIFEST_NAME,
    SPLITS,
    Header,
    Manifest,
    Shard,
    has_magic,
    hash_block,
    read_header,
    read_manifest,
)
from megatoken.data.tokens import MappedShard, Tokens
from megatoken.errors import Exit, Fault

_PERMISSIONS = "check the path and its permissions"
_AGAIN = "restore it from a copy or prepare the dataset again"
# (vocabulary, token between documents) of the tokenizers whose shards are published; llm.c's LLaMA-3 writer
# puts begin-of-text there. Others are checked against the range of their dtype until `limit_ids` is called.
_KNOWN_TOKENIZERS = {"gpt2": (50257, 50256), "llama-3": (128256, 128000)}
_SAMPLED_BLOCKS = 18  # of each foreign shard for the fingerprint: the first, the last and 16 between
_BARE = ("train.bin", "val.bin")  # what nanoGPT writes: ids and nothing else
_NPY_DTYPES = {"<u2": "uint16", "<u4": "uint32", "<i4": "uint32"}  # a negative id reads as a huge one
_NPY_HEADER = re.compile(
    rb"\{\s*'descr':\s*'([^']{1,20})',\s*'fortran_order':\s*(?:True|False),\s*'shape':\s*\(([\d, ]{0,99})\),?\s*\}\s*"
)


@dataclass(frozen=True)
class Dataset:
    """An opened dataset: its manifest (made up for foreign shards) and one `Tokens` a split."""

    path: Path
    manifest: Manifest
    train: Tokens
    val: Tokens
    shards: tuple[MappedShard, ...]

    def limit_ids(self, vocab_size: int) -> None:
        """Sets the vocabulary that both splits are checked against (foreign shards do not record theirs)."""
        self.train.limit_ids(vocab_size)
        self.val.limit_ids(vocab_size)

    @cached_property
    def fingerprint(self) -> str:
        """xxh3_128 hex that tells this dataset from another.

        Ours: over the manifest, hence over every token. Foreign: over names, sizes, headers and up to 18 blocks
        (256 KiB each) of every shard.
        """
        if all(mapped.shard.blocks for mapped in self.shards if mapped.shard.tokens):
            return self.manifest.fingerprint
        hasher = xxhash.xxh3_128()
        for mapped in self.shards:
            size = mapped.offset + mapped.ids.nbytes
            hasher.update(f"{mapped.shard.file}\n{mapped.shard.split}\n{size}\n".encode())
            with mapped.path.open("rb") as file:
                hasher.update(file.read(mapped.offset))
            per_block = BLOCK_BYTES // mapped.ids.itemsize
            n_blocks = -(-len(mapped.ids) // per_block)
            for block in sorted({turn * (n_blocks - 1) // (_SAMPLED_BLOCKS - 1) for turn in range(_SAMPLED_BLOCKS)}):
                hasher.update(mapped.ids[block * per_block : (block + 1) * per_block].data)
        return str(hasher.hexdigest())


def open_dataset(path: str | Path, *, foreign_tokenizer: str = "gpt2") -> Dataset:
    """Opens a prepared folder, or a folder, file or glob of llm.c / modded-nanogpt .bin or .npy token shards.

    foreign_tokenizer names the tokenizer of shards that do not record one. Fault(Exit.DATA) names the file and
    what is wrong with it: missing, truncated, odd length, wrong magic, another tokenizer, mixed kinds.
    """
    place, manifest, files = _survey(Path(path), foreign_tokenizer)
    mapped = tuple(_map_shard(file, shard, manifest) for file, shard in zip(files, manifest.shards, strict=True))
    train, val = (
        Tokens([one for one in mapped if one.shard.split == split], manifest.dtype, manifest.tokenizer["vocab_size"])
        for split in SPLITS
    )
    return Dataset(path=place, manifest=manifest, train=train, val=val, shards=mapped)


def verify_dataset(path: str | Path, *, foreign_tokenizer: str = "gpt2") -> Iterator[Fault]:
    """Checks every byte of a dataset and yields one Fault for each thing that is wrong; nothing when it is whole.

    Foreign shards record no hashes: their headers, sizes and range of ids are checked.
    """
    try:
        _, manifest, files = _survey(Path(path), foreign_tokenizer)
    except Fault as fault:
        yield fault
        return
    for file, shard in zip(files, manifest.shards, strict=True):
        try:
            mapped = _map_shard(file, shard, manifest)
        except Fault as fault:
            yield fault
        else:
            yield from Tokens([mapped], manifest.dtype, manifest.tokenizer["vocab_size"]).check_all()


def _survey(path: Path, foreign_tokenizer: str) -> tuple[Path, Manifest, list[Path]]:
    """Which shards make the dataset: its folder, its manifest (read or made up) and a file for each row of it."""
    try:
        prepared = (path / MANIFEST_NAME).exists()
    except OSError as error:
        raise Fault(Exit.DATA, f"cannot read the dataset: {error.strerror}", str(path), _PERMISSIONS) from error
    if prepared:
        manifest = read_manifest(path)
        return path, manifest, [path / shard.file for shard in manifest.shards]
    files = _list_foreign(path)
    if len(kinds := sorted({file.suffix for file in files})) > 1:
        what = f"shards of two kinds in one dataset: {' and '.join(kinds)}"
        raise Fault(Exit.DATA, what, str(path), "name one kind with a glob, for example 'DIR/*.bin'")
    headers = [_read_layout(file)[0] for file in files]
    for file, header in zip(files, headers, strict=True):
        if header.fingerprint:
            what = f"shard was prepared by megatoken, but {MANIFEST_NAME} is not beside it"
            raise Fault(Exit.DATA, what, str(file), "finish the preparation or copy the whole folder")
        if header.dtype != headers[0].dtype:
            what = f"mixed dataset: {header.dtype} tokens here, {headers[0].dtype} in {files[0].name}"
            raise Fault(Exit.DATA, what, str(file), "keep shards of one tokenizer in one folder")
        if file.name in _BARE and foreign_tokenizer == "gpt2" and (file.parent / "meta.pkl").exists():
            what = "these ids are of a vocabulary of their own, in meta.pkl: a pickle, which is never loaded"
            fix = "prepare the text again: megatoken prepare FILE --out DIR --tokenizer bytes"
            raise Fault(Exit.DATA, what, str(file), fix)
        if header.tokens == 0:
            raise Fault(Exit.DATA, "shard holds no tokens", str(file), "remove it from the folder")
    return path, _describe_foreign(files, headers, foreign_tokenizer), files


def _list_foreign(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            found = list(path.iterdir())
        elif path.exists() or not any(sign in str(path) for sign in "*?["):
            found = [path]
        else:
            found = list(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))))
    except OSError as error:
        raise Fault(
            Exit.DATA, f"cannot read the dataset: {error.strerror}", str(path), "check its permissions"
        ) from error
    files = sorted(file for file in found if file.suffix in (".bin", ".npy"))
    if not files:
        what = f"no dataset here: no {MANIFEST_NAME}, no .bin and no .npy shards"
        raise Fault(Exit.DATA, what, str(path), "make one with: megatoken prepare SOURCE --out DIR")
    return files


def _describe_foreign(files: list[Path], headers: list[Header], tokenizer: str) -> Manifest:
    """The manifest that foreign shards would have: no hashes, the tokenizer as told, its fingerprint unknown."""
    dtype = headers[0].dtype
    if files[0].suffix == ".bin" and dtype == "uint32" and tokenizer == "gpt2":
        tokenizer = "llama-3"  # what llm.c's version 7 means; GPT-2's ids never need 32 bits
    vocab_size, eot = _KNOWN_TOKENIZERS.get(tokenizer, (1 << 16 if dtype == "uint16" else 1 << 31, -1))
    shards = tuple(
        Shard(
            file=file.name,
            split="val" if "val" in file.name else "train",
            tokens=header.tokens,
            blocks=(),
            header="",
        )
        for file, header in zip(files, headers, strict=True)
    )
    return Manifest(
        tokenizer={"name": tokenizer, "vocab_size": vocab_size, "eot": eot, "fingerprint": ""},
        dtype=dtype,
        documents={},
        shards=shards,
        source={"kind": f"foreign {files[0].suffix} shards"},
    )


def _map_shard(path: Path, shard: Shard, manifest: Manifest) -> MappedShard:
    """Maps a shard after checking its header against its row of the manifest."""
    header, offset, raw = _read_layout(path)
    expectations = {
        "token type": (header.dtype, manifest.dtype),
        "token count": (header.tokens, shard.tokens),
        "tokenizer fingerprint": (header.fingerprint or "unknown", manifest.tokenizer["fingerprint"] or "unknown"),
    }
    foreign = not (shard.header or shard.blocks)
    if not foreign:
        n_blocks = -(-shard.tokens * ITEM_BYTES[manifest.dtype] // BLOCK_BYTES)
        expectations["hash of the header"] = (hash_block(raw), shard.header)
        expectations["number of block hashes"] = (n_blocks, len(shard.blocks))
    for noun, (actual, expected) in expectations.items():
        if actual != expected:
            what = f"shard does not fit its manifest: {noun} is {actual}, expected {expected}"
            raise Fault(Exit.DATA, what, str(path), _AGAIN)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    ids = np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(header.tokens,))
    return MappedShard(shard=shard, path=path, offset=offset, ids=np.asarray(ids))


def _read_layout(path: Path) -> tuple[Header, int, bytes]:
    """A shard's header, the byte its tokens start at and the bytes before; checks the file's size."""
    try:
        with path.open("rb") as file:
            raw = file.read(HEADER_BYTES)
            size = path.stat().st_size
    except FileNotFoundError as error:
        raise Fault(Exit.DATA, "shard is missing", str(path), _AGAIN) from error
    except OSError as error:
        raise Fault(
            Exit.DATA, f"cannot read the shard: {error.strerror}", str(path), "check its permissions"
        ) from error
    if path.suffix == ".npy":
        header, offset = _read_npy_header(path, raw)
    elif path.name in _BARE and not has_magic(raw):
        header, offset = Header(dtype="uint16", tokens=size // 2, fingerprint=""), 0
    else:
        header, offset = read_header(raw, str(path)), HEADER_BYTES
    item = ITEM_BYTES[header.dtype]
    expected = offset + header.tokens * item
    if size != expected:
        reason = "truncated" if size < expected else "longer than its header says"
        if (size - offset) % item:
            reason += f", and not a whole number of {item}-byte tokens"
        what = f"shard is {reason}: {size:,} bytes, expected {expected:,} for {header.tokens:,} tokens"
        raise Fault(Exit.DATA, what, str(path), _AGAIN)
    return header, offset, raw[:offset]


def _read_npy_header(path: Path, raw: bytes) -> tuple[Header, int]:
    """Reads the header of format 1.0 that numpy.save writes (numpy.lib.format) without evaluating it."""
    fix = "save a one-dimensional uint16, uint32 or int32 array with numpy.save"
    if raw[:8] != b"\x93NUMPY\x01\x00":
        raise Fault(Exit.DATA, "not a plain .npy file of version 1.0 (pickles are never loaded)", str(path), fix)
    offset = 10 + int.from_bytes(raw[8:10], "little")
    found = _NPY_HEADER.fullmatch(raw[10:offset])
    if found is None or len(raw) < offset:
        raise Fault(Exit.DATA, "the .npy header makes no sense", str(path), fix)
    descr, shape = (group.decode("ascii", "backslashreplace") for group in found.groups())
    if descr not in _NPY_DTYPES or not re.fullmatch(r"\d+,", shape):
        what = f".npy file holds {descr} of shape ({shape}), not a row of token ids"
        raise Fault(Exit.DATA, what, str(path), fix)
    return Header(dtype=_NPY_DTYPES[descr], tokens=int(shape[:-1]), fingerprint=""), offset
