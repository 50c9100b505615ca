"""Verify every byte of a dataset."""

from collections.abc import Callable, Iterator
from typing import Any

from megatoken.base.errors import MegatokenError, StorageError
from megatoken.data.dataset import Folder, ShardFile, Tokens, list_shards
from megatoken.data.shard_format import BLOCK_BYTES, SPLITS

LOADED_BLOCKS = 64  # at once, if the dataset is at an address
LOADS = 16


def verify_dataset(folder: Folder) -> Iterator[MegatokenError]:
    """Yield one MegatokenError for each defect of a dataset.

    External shards record no hashes, so only their headers, sizes and ids are checked.
    """
    try:
        manifest, lists = list_shards(folder, "gpt2")
    except MegatokenError as error:
        yield error
        return
    for shards in (each for split in SPLITS for each in lists[split]):
        tokens = Tokens([shards], manifest.dtype, manifest.tokenizer["vocab_size"])
        if found := _catch(getattr, shards, "files"):
            if shards not in lists["val"]:  # val has the same parts as train
                yield found
            continue
        for file, start in zip(shards.files, shards.starts, strict=False):
            if found := _catch(getattr, file, "opened"):
                yield found
            else:
                yield from _verify_shard(tokens, file, start)


def _verify_shard(tokens: Tokens, file: ShardFile, start: int) -> Iterator[MegatokenError]:
    """start: the token at which the shard begins."""
    step = LOADED_BLOCKS * BLOCK_BYTES // tokens.dtype.itemsize
    end = start + file.shard.tokens
    ranges = [(first, min(first + step, end)) for first in range(start, end, step)]
    for index, each in enumerate(ranges):
        found = _catch(tokens.load, [each], ranges[index + 1 : index + LOADS])
        if isinstance(found, StorageError):
            yield found
            return
        first = index * LOADED_BLOCKS
        blocks = range(first, min(first + LOADED_BLOCKS, file.n_blocks))
        yield from filter(None, (_catch(tokens.read_block, file, number) for number in blocks))


def _catch(call: Callable[..., object], *arguments: Any) -> MegatokenError | None:
    try:
        call(*arguments)
    except MegatokenError as error:
        return error
    return None
