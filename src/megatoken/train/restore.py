"""Load a run's newest valid checkpoint, at the start of a run or to rewind after bad steps."""

from functools import partial
from pathlib import Path

from megatoken.base.config.load import Change
from megatoken.base.errors import DataError
from megatoken.base.system.metrics_log import read_metrics
from megatoken.data.mixture import Mixture
from megatoken.optim.spikes import RecentSteps
from megatoken.store.commit import remove_leftovers, step_folder
from megatoken.store.load import restore_newest
from megatoken.store.manifest import CheckpointManifest
from megatoken.store.run_folder import CHECKPOINTS
from megatoken.train.run import Run
from megatoken.train.state import Position


def restore(run: Run, *, allow_changes: bool) -> CheckpointManifest | None:
    """Load the newest checkpoint that is valid on every node, and rewind the log to its step.

    Returns its manifest, or None if the run has no checkpoint. Damaged checkpoints are reported and
    skipped. Raises what `restore_newest` raises, and DataError on all ranks if the checkpoint was
    trained on a different dataset.

    allow_changes: whether to accept a different dataset, provided its tokenizer is the same.
    """
    state, history = run.state, run.history
    root = run.out / CHECKPOINTS
    if run.is_main:
        remove_leftovers(root)
    check = partial(_check_dataset, dataset=run.data.dataset, allow_changes=allow_changes)
    manifest = restore_newest(root, state, check, partial(_report_damage, run))
    seconds = 0.0
    if manifest is not None:
        meta = manifest.meta
        state.refresh_low_precision_copy(with_frozen=True)
        state.position = Position(
            step=manifest.step,
            skipped_batches=tuple(meta.get("skipped_batches", [])),
            recent=RecentSteps(tuple((loss, norm) for loss, norm in meta.get("recent_steps", []))),
        )
        history.verified[step_folder(root, manifest.step)] = manifest.files
        seconds = meta.get("elapsed_seconds", 0.0)
        run.console.print(f"resuming from {step_folder(root, manifest.step).name}")
    history.logged, history.val_losses = state.comm.run_on_rank0(
        lambda: _rewind_log(run, state.step, seconds)
    )
    return manifest


def find_dataset_change(manifest: CheckpointManifest | None, dataset: Mixture) -> list[Change]:
    """Return a list with the change of dataset since the checkpoint; empty if it is the same."""
    if manifest is None or manifest.meta.get("dataset") == dataset.fingerprint:
        return []
    trained_on = str(manifest.meta.get("dataset"))
    return [Change("dataset", trained_on, dataset.fingerprint, "guarded")]


def _rewind_log(
    run: Run, step: int, elapsed_seconds: float
) -> tuple[set[tuple[str, int]], dict[int, float]]:
    """Drop the log's rows after `step`, and summarize the remaining ones.

    Returns their (kind, step) pairs as a set, and a dict from step to validation loss. In the pair
    of a task score, the task's name replaces the kind.
    """
    run.log_file.rewind(step, elapsed_seconds)
    rows = read_metrics(run.out)
    logged = {(row.get("task") or row["kind"], row["step"]) for row in rows}
    return logged, {row["step"]: row["loss"] for row in rows if row["kind"] == "val"}


def _report_damage(run: Run, folder: Path, message: str) -> None:
    run.console.warn(f"{message}: skipping {folder.name}")
    what = "damaged checkpoint"
    run.write("event", step=0, what=what, checkpoint=folder.name, message=message)


def _check_dataset(manifest: CheckpointManifest, dataset: Mixture, *, allow_changes: bool) -> None:
    """Raise DataError unless the checkpoint was trained on this dataset.

    allow_changes: whether to accept a different dataset, provided its tokenizer is the same.
    """
    trained_on = str(manifest.meta.get("dataset"))
    has_same_ids = manifest.meta.get("tokenizer") == dataset.vocabulary.fingerprint
    if trained_on == dataset.fingerprint or (has_same_ids and allow_changes):
        return
    what = f"checkpoint was trained on dataset {trained_on}, this one is {dataset.fingerprint}"
    fix = "point data.path at the original dataset, or choose another --out"
    if has_same_ids:
        fix += ", or continue with this one by --allow-changes"
    raise DataError(what, str(dataset), fix)
