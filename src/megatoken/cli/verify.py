"""`megatoken verify PATH`: check every hash of a dataset, run or checkpoint."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from megatoken.base.config.load import resolve
from megatoken.base.console import Console
from megatoken.base.errors import CheckpointError, DataError, ExitCode, MegatokenError
from megatoken.cli import Result
from megatoken.store.commit import is_checkpoint, list_steps, step_folder
from megatoken.store.manifest import verify
from megatoken.store.objects import ObjectStore
from megatoken.store.run_folder import is_copy

if TYPE_CHECKING:
    from megatoken.data.dataset import Folder

HELP = "check every hash of a dataset, run or checkpoint"
EXAMPLE = "megatoken verify data/mine"
SCRATCH_BYTES = 10**9  # for a dataset at an address


class Report(NamedTuple):
    """The result of verification.

    kind: dataset, run or checkpoint. checked: number of shards or checkpoints checked.
    """

    kind: str
    checked: int
    errors: list[MegatokenError]


def run(options: Namespace, console: Console) -> Result:
    report = verify_folder(options.folder)
    messages = [str(error) for error in report.errors]
    for message in messages:
        console.print(f"damaged: {message}")
    counts = f"{report.checked} checked, {len(messages)} damaged"
    console.print(f"{report.kind} {options.folder}: {counts}")
    code = report.errors[0].code if report.errors else ExitCode.DONE
    return Result(code, {"kind": report.kind, "checked": report.checked, "damaged": messages})


def verify_folder(folder: Path | str) -> Report:
    """Verify a dataset, run or checkpoint, in a folder or at an address.

    Raises DataError if it is none of these. Damage is not raised, but reported in the result.
    """
    from megatoken.data.dataset import Folder
    from megatoken.data.shard_format import MANIFEST_NAME

    if isinstance(folder, str):
        return _verify_address(folder)
    if (folder / "checkpoints").is_dir() or (folder / "provenance.json").is_file():
        return _verify_run(folder)
    if is_checkpoint(folder):
        return Report("checkpoint", 1, _catch(_verify_checkpoint, folder))
    if not ((folder / MANIFEST_NAME).is_file() or _count_shards(folder)):
        fix = "name a dataset, run or checkpoint folder"
        raise DataError("not a dataset or run", str(folder), fix)
    return _verify_dataset(Folder(folder))


def _verify_address(address: str) -> Report:
    from megatoken.store.mirror import list_mirrored, verify_mirror
    from megatoken.store.stream import open_dataset, open_prepared

    store = ObjectStore(address)
    if list_mirrored(store):
        return Report("run", *verify_mirror(store))
    with TemporaryDirectory(prefix="megatoken-") as scratch:
        if folder := open_prepared(address, SCRATCH_BYTES, path=Path(scratch)):
            return _verify_dataset(folder)
    return _verify_dataset(open_dataset(address, None))  # external shards, which have no hashes


def _verify_dataset(folder: "Folder") -> Report:
    from megatoken.data.dataset import load_dataset
    from megatoken.data.shard_format import MANIFEST_NAME
    from megatoken.data.verify import verify_dataset

    errors = list(verify_dataset(folder))
    if not errors and (folder.path / MANIFEST_NAME).is_file():
        errors += _catch(lambda path: load_dataset(path).vocabulary, folder.path)
    return Report("dataset", _count_shards(folder.path), errors)


def _count_shards(folder: Path) -> int:
    return sum(1 for pattern in ("*.bin", "*.npy", "part-*/*.bin") for _ in folder.glob(pattern))


def _verify_run(folder: Path) -> Report:
    from megatoken.data.vocabulary import read_vocabulary

    root = folder / "checkpoints"
    steps = list_steps(root)
    errors = []
    for step in steps:
        errors += _catch(_verify_checkpoint, step_folder(root, step))
    errors += _catch(resolve, str(folder / "config.yaml"))
    if not is_copy(folder):  # a copy has tokenizers only in its checkpoints
        errors += _catch(read_vocabulary, folder / "tokenizer")
    return Report("run", len(steps), errors)


def _verify_checkpoint(folder: Path) -> None:
    from megatoken.data.vocabulary import read_vocabulary

    expected = str(verify(folder).meta.get("tokenizer"))
    fingerprint = read_vocabulary(folder / "tokenizer").fingerprint
    if fingerprint != expected:
        what = f"another tokenizer: expected {expected[:12]}, found {fingerprint[:12]}"
        raise CheckpointError(what, str(folder / "tokenizer"), "use another checkpoint")


def _catch(check: Callable[[Any], object], argument: object) -> list[MegatokenError]:
    try:
        check(argument)
    except MegatokenError as error:
        return [error]
    return []
