"""Name the files in a run folder, and check whether a run may use a folder. No torch."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatoken.base.config.load import Change, ResolvedConfig, list_changes, resolve
from megatoken.base.errors import ConfigError
from megatoken.base.system.atomic_write import read_object, storage_errors
from megatoken.base.system.file_lock import LOCK, OWNER
from megatoken.base.system.metrics_log import METRICS, OTHER_FOLDER, STATUS, UNUSABLE
from megatoken.store.commit import list_steps, step_folder
from megatoken.store.manifest import MANIFEST, DamagedError, verify

CONFIG, MACHINE, PROVENANCE = "config.yaml", "machine.json", "provenance.json"
TOKENIZER, CHECKPOINTS = "tokenizer", "checkpoints"
BUDGET_KEYS = ("budget.steps", "budget.tokens", "budget.epochs")
EXTEND = "--extend "  # prefix of the origin of an extended budget
IDENTITY = "mirror.json"  # identifies the run, in its folder and in its mirror
LEFTOVERS = (LOCK, OWNER, IDENTITY, f".{PROVENANCE}")  # files of a failed start


def is_copy(folder: Path) -> bool:
    """Return whether a folder is the copy of a run made by `save.mirror`, not the run itself."""
    return (folder / IDENTITY).is_file() and not (folder / STATUS).exists()


def find_changes(
    out: Path, resolved: ResolvedConfig, *, allow_changes: bool = False
) -> list[Change]:
    """Return the settings in which `resolved` differs from the newest valid checkpoint in `out`.

    Returns an empty list if the folder is new or has no valid checkpoint. Raises ConfigError if the
    folder holds something that is not a run, or if a setting differs that a resume must not change.
    Raises StorageError if the folder cannot be read.

    allow_changes: whether guarded settings may change. The budget of an extended run may.
    """
    with storage_errors(out, what=UNUSABLE, fix=OTHER_FOLDER):
        root = out / CHECKPOINTS
        checkpoints = [step_folder(root, step) for step in list_steps(root)]
        is_run = "megatoken" in read_object(out / PROVENANCE)
        is_run = is_run or any((folder / MANIFEST).is_file() for folder in checkpoints)
        names = set()
        with suppress(FileNotFoundError):
            names = {path.name for path in out.iterdir()}
        if METRICS in names and not (out / METRICS).stat().st_size:
            names.remove(METRICS)
    if not is_run and not all(name.startswith(LEFTOVERS) for name in names):
        what = "the folder holds something that is not a run"
        raise ConfigError(what, out.absolute(), "choose a new folder with --out")
    for folder in reversed(checkpoints):
        with suppress(DamagedError):
            verify(folder, hashes=lambda name: name == CONFIG)  # RUN's may be edited or lost
            changes = list_changes(resolve(str(folder / CONFIG)).config, resolved.config)
            extended = [key for key in BUDGET_KEYS if resolved.origins[key].startswith(EXTEND)]
            check_changes(changes, out, allow_changes=allow_changes, allowed=extended)
            return changes
    return []


def check_changes(
    changes: list[Change], out: Path, *, allow_changes: bool, allowed: Sequence[str] = ()
) -> None:
    """Raise ConfigError if a change is of the class `fatal`, or is `guarded` and not allowed.

    allowed: keys that may change.
    """
    refused = ["fatal"] if allow_changes else ["fatal", "guarded"]
    differences = [str(c) for c in changes if c.resume in refused and c.key not in allowed]
    if not differences:
        return
    fatal = [change.key for change in changes if change.resume == "fatal"]
    fix = "restore them, or pass --allow-changes"
    if fatal:
        fix = f"{', '.join(fatal)} cannot change in a run: restore, or choose another --out"
    raise ConfigError(f"this run has other settings: {'; '.join(differences)}", out, fix)
