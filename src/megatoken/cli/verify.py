"""`megatoken verify`: recompute every hash of a dataset or of a run's checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatoken.checkpoint.commit import is_checkpoint, is_copy, list_steps, step_folder
from megatoken.checkpoint.manifest import verify
from megatoken.checkpoint.mirror import list_mirrored, verify_mirror
from megatoken.config.load import resolve
from megatoken.data.dataset import load_dataset, verify_dataset
from megatoken.data.remote import fetch_dataset, list_remote, verify_remote
from megatoken.data.shard_format import MANIFEST_NAME
from megatoken.data.tokenizer import load_saved_tokenizer
from megatoken.errors import CheckpointError, DataError, MegatokenError
from megatoken.system.object_store import ObjectStore


@dataclass(frozen=True, slots=True)
class Report:
    """kind: dataset, run or checkpoint; checked: number of shards or checkpoints; errors: what is damaged."""

    kind: str
    checked: int
    errors: list[MegatokenError]


def verify_folder(folder: Path | str) -> Report:
    """Check a dataset, run or checkpoint folder, or a dataset at an address; damage is reported, not raised.

    DataError if it is none of them.
    """
    if isinstance(folder, str):
        if list_mirrored(store := ObjectStore(folder)):
            return Report("run", *verify_mirror(store))
        if (remote := list_remote(folder)).shards:
            return Report("dataset", len(remote.shards), verify_remote(remote))
        folder = fetch_dataset(folder)  # external shards, which record no hashes
    root = folder / "checkpoints"
    if root.is_dir() or (folder / "provenance.json").is_file():
        steps = list_steps(root)
        errors = [
            error for step in steps for error in _catch(_verify_checkpoint, step_folder(root, step))
        ]
        errors += _catch(resolve, str(folder / "config.yaml"))
        if not is_copy(folder):  # in which only the checkpoints have a tokenizer
            errors += _catch(load_saved_tokenizer, folder / "tokenizer")
        return Report("run", len(steps), errors)
    if is_checkpoint(folder):
        return Report("checkpoint", 1, _catch(_verify_checkpoint, folder))
    if not folder.is_dir():
        raise DataError("not a folder", str(folder), "name a dataset or run folder")
    shards, is_prepared = (
        [*folder.glob("*.bin"), *folder.glob("*.npy")],
        (folder / MANIFEST_NAME).is_file(),
    )
    if not shards and not is_prepared:
        raise DataError(
            "neither a dataset nor a run",
            str(folder),
            "name a dataset, a run or one of its checkpoints",
        )
    errors = list(verify_dataset(folder))
    if not errors and is_prepared:
        errors += _catch(lambda _: load_dataset(folder).tokenizer, folder)
    return Report("dataset", len(shards), errors)


def _verify_checkpoint(folder: Path) -> None:
    expected = str(verify(folder).meta.get("tokenizer"))
    if (found := load_saved_tokenizer(folder / "tokenizer").fingerprint) != expected:
        what = f"the checkpoint was trained with another tokenizer: expected {expected[:12]}, found {found[:12]}"
        raise CheckpointError(what, str(folder / "tokenizer"), "use another checkpoint")


def _catch(check: Callable[[Any], object], argument: object) -> list[MegatokenError]:
    try:
        check(argument)
    except MegatokenError as error:
        return [error]
    return []
