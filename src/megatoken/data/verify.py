"""Verify every byte of a dataset."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatoken.base.errors import MegatokenError
from megatoken.data.dataset import Folder, Tokens, list_shards
from megatoken.data.shard_format import SPLITS


def verify_dataset(path: Path) -> Iterator[MegatokenError]:
    """Yield one MegatokenError for each defect of a dataset.

    External shards record no hashes, so only their headers, sizes and ids are checked.
    """
    try:
        manifest, lists = list_shards(Folder(path), "gpt2")
    except MegatokenError as error:
        yield error
        return
    for shards in (each for split in SPLITS for each in lists[split]):
        tokens = Tokens([shards], manifest.dtype, manifest.tokenizer["vocab_size"])
        if found := _catch(getattr, shards, "files"):
            if shards not in lists["val"]:  # val has the same parts as train
                yield found
            continue
        for file in shards.files:
            if found := _catch(getattr, file, "opened"):
                yield found
                continue
            errors = (_catch(tokens.read_block, file, number) for number in range(file.n_blocks))
            yield from filter(None, errors)


def _catch(call: Callable[..., object], *arguments: Any) -> MegatokenError | None:
    try:
        call(*arguments)
    except MegatokenError as error:
        return error
    return None
