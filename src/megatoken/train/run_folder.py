"""The names in a run folder, and whether a run may use a folder. No torch, so that a refusal comes at once."""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from megatoken.checkpoint.commit import list_steps, step_folder
from megatoken.checkpoint.manifest import MANIFEST, DamagedError, verify
from megatoken.config.load import Change, list_changes, resolve
from megatoken.config.schema import Config
from megatoken.errors import ConfigError, StorageError
from megatoken.system.atomic_write import read_object, storage_errors
from megatoken.system.file_lock import LOCK, OWNER
from megatoken.system.metrics_log import METRICS

CONFIG, MACHINE, PROVENANCE = "config.yaml", "machine.json", "provenance.json"
TOKENIZER, CHECKPOINTS = "tokenizer", "checkpoints"
BUDGET_KEYS = ("budget.steps", "budget.tokens", "budget.epochs")  # which `train --extend` changes


def check_folder(
    out: Path, config: Config, *, allow_changes: bool = False, allowed: Collection[str] = ()
) -> list[Change]:
    """The settings that differ from those of the run in `out`. allowed: guarded ones that may.

    Raises ConfigError if it holds something else, or a change is fatal, or guarded and not allowed. A run has a
    provenance.json or a checkpoint of ours. What a start leaves that failed before them counts as nothing.
    """
    with storage_errors(
        out, what="the run folder cannot be used", fix="name a folder you can write"
    ):
        checkpoints = [
            step_folder(out / CHECKPOINTS, step) for step in list_steps(out / CHECKPOINTS)
        ]
        is_run = "megatoken" in read_object(out / PROVENANCE) or any(
            (c / MANIFEST).is_file() for c in checkpoints
        )
        names = {path.name for path in out.iterdir()} if out.is_dir() else set()
        nearest = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
        if not nearest.is_dir():
            raise StorageError(
                "the run folder cannot be used: not a folder",
                nearest,
                "name a folder you can write",
            )
        if METRICS in names and not (out / METRICS).stat().st_size:
            names.remove(METRICS)
    if not is_run and not all(name.startswith((LOCK, OWNER, f".{PROVENANCE}")) for name in names):
        what = "the folder holds something that is not a run"
        raise ConfigError(what, out.absolute(), "choose a new folder with --out")
    for folder in reversed(checkpoints):
        with suppress(DamagedError):
            verify(
                folder, hashes=lambda name: name == CONFIG
            )  # a copy of the run's, which may be edited or lost
            changes = list_changes(resolve(str(folder / CONFIG)).config, config)
            fatal = [change.key for change in changes if change.resume == "fatal"]
            refused = ["fatal"] if allow_changes else ["fatal", "guarded"]
            if differs := [str(c) for c in changes if c.resume in refused and c.key not in allowed]:
                fix = "set these back, or go on with them by --allow-changes"
                if fatal:
                    fix = f"{', '.join(fatal)} cannot change in a run: set back, or choose another --out"
                raise ConfigError(f"this run has other settings: {'; '.join(differs)}", out, fix)
            return changes
    return []
