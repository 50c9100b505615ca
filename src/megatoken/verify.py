"""Whether a folder is still what was written: every hash of a dataset or of a run's checkpoints, recomputed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatoken.checkpoint.store import is_checkpoint, step_folder, steps, verify
from megatoken.data.dataset import verify_dataset
from megatoken.data.shards import MANIFEST_NAME, read_manifest
from megatoken.data.tokenizer import load_saved_tokenizer
from megatoken.errors import Exit, Fault
from megatoken.recipe import resolve


@dataclass(frozen=True, slots=True)
class Report:
    """kind: dataset, run or checkpoint; checked: shards or checkpoints looked at; faults: what is damaged."""

    kind: str
    checked: int
    faults: list[Fault]


def verify_folder(folder: Path) -> Report:
    """Check a dataset folder, a run folder or a single checkpoint, whichever it is.

    Raises Fault(DATA) when it is none of them. Damage is reported, not raised.
    """
    if (folder / "checkpoints").is_dir():
        return _verify_run(folder)
    if is_checkpoint(folder):
        return Report("checkpoint", 1, _catch(lambda: _verify_checkpoint(folder)))
    if not folder.is_dir():
        raise Fault(Exit.DATA, "not a folder", str(folder), "name a dataset or run folder")
    faults = list(verify_dataset(folder))
    shards = len([*folder.glob("*.bin"), *folder.glob("*.npy")])
    if not faults and (folder / MANIFEST_NAME).is_file():
        faults += _catch(lambda: _verify_tokenizer(folder))
    return Report("dataset", shards, faults)


def _verify_run(folder: Path) -> Report:
    root = folder / "checkpoints"
    found = steps(root)
    faults = [fault for step in found for fault in _catch(partial(_verify_checkpoint, step_folder(root, step)))]
    faults += _catch(lambda: resolve(str(folder / "config.yaml")))
    faults += _catch(lambda: load_saved_tokenizer(folder / "tokenizer"))
    return Report("run", len(found), faults)


def _verify_checkpoint(folder: Path) -> None:
    made_for = verify(folder).meta.get("tokenizer")
    saved = load_saved_tokenizer(folder / "tokenizer").fingerprint
    if made_for != saved:
        what = f"tokenizer {saved[:12]} is not the one it was trained with, {str(made_for)[:12]}"
        raise Fault(Exit.CHECKPOINT, what, str(folder / "tokenizer"), "use another checkpoint")


def _verify_tokenizer(folder: Path) -> None:
    made_by = read_manifest(folder).tokenizer["fingerprint"]
    saved = load_saved_tokenizer(folder / "tokenizer").fingerprint
    if made_by != saved:
        what = f"tokenizer {saved[:12]} is not the one that made the shards, {made_by[:12]}"
        raise Fault(Exit.DATA, what, str(folder / "tokenizer"), "prepare the dataset again")


def _catch(check: Callable[[], object]) -> list[Fault]:
    try:
        check()
    except Fault as fault:
        return [fault]
    return []
