"""Load a run's newest valid checkpoint, at the start of a run or to rewind after bad steps."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megatoken.base.config.load import Change
from megatoken.base.errors import CheckpointError, DataError, MegatokenError
from megatoken.base.system.metrics_log import read_metrics
from megatoken.data.mixture import Mixture
from megatoken.store.commit import list_steps, remove_leftovers, step_folder
from megatoken.store.load import restore_state
from megatoken.store.manifest import CheckpointManifest, DamagedError, FileEntry, verify
from megatoken.train.run import Progress, RunPlan
from megatoken.train.run_folder import CHECKPOINTS
from megatoken.train.state import TrainState


def restore(
    state: TrainState, progress: Progress, plan: RunPlan, *, allow_changes: bool
) -> CheckpointManifest | None:
    """Load the newest checkpoint that is valid on every node, and rewind the log to its step.

    Returns its manifest, or None if the run has no checkpoint. Damaged checkpoints are reported and
    skipped. All ranks load the same checkpoint or raise the same error: CheckpointError if every
    checkpoint is damaged, DataError if the checkpoint was trained on a different dataset.

    allow_changes: whether to accept a different dataset, provided its tokenizer is the same.
    """
    root = plan.out / CHECKPOINTS
    if plan.is_main:
        remove_leftovers(root)
    steps = state.comm.run_on_rank0(lambda: list_steps(root))
    manifest = None
    for folder in (step_folder(root, step) for step in reversed(steps)):
        manifest = _load_on_all(state, folder, plan, allow_changes=allow_changes)
        if manifest is not None:
            progress.verified[folder] = manifest.files
            plan.console.print(f"resuming from {folder.name}")
            break
    if steps and manifest is None:
        raise CheckpointError("all checkpoints are damaged", root, "choose another --out")
    seconds = manifest.meta.get("elapsed_seconds", 0.0) if manifest else 0.0
    progress.logged, progress.val_losses = state.comm.run_on_rank0(
        lambda: _rewind_log(plan, state.step, seconds)
    )
    return manifest


def find_dataset_change(manifest: CheckpointManifest | None, dataset: Mixture) -> list[Change]:
    """Return a list with the change of dataset since the checkpoint; empty if it is the same."""
    if manifest is None or manifest.meta.get("dataset") == dataset.fingerprint:
        return []
    trained_on = str(manifest.meta.get("dataset"))
    return [Change("dataset", trained_on, dataset.fingerprint, "guarded")]


def _rewind_log(
    plan: RunPlan, step: int, elapsed_seconds: float
) -> tuple[set[tuple[str, int]], dict[int, float]]:
    """Drop the log's rows after `step`, and summarize the remaining ones.

    Returns their (kind, step) pairs as a set, and a dict from step to validation loss. In the pair
    of a task score, the task's name stands in place of the kind.
    """
    plan.log_file.rewind(step, elapsed_seconds)
    rows = read_metrics(plan.out)
    logged = {(row.get("task") or row["kind"], row["step"]) for row in rows}
    return logged, {row["step"]: row["loss"] for row in rows if row["kind"] == "val"}


def _load_on_all(
    state: TrainState, folder: Path, plan: RunPlan, *, allow_changes: bool
) -> CheckpointManifest | None:
    """Load a checkpoint on all ranks and return its manifest, or None if any rank finds damage.

    Each node may have its own copy of the files, and perhaps only one of these is damaged. So all
    files are verified on every node, divided among its ranks. Errors other than damage are raised
    on all ranks.
    """
    files: Mapping[str, FileEntry] = {}
    error: MegatokenError | None = None
    try:
        manifest, files = _load(state, folder, plan.data.dataset, allow_changes=allow_changes)
    except MegatokenError as raised:
        error = raised
        try:
            verify(folder)  # report damage if that is the cause
        except CheckpointError as cause:
            error = cause
    reports = state.comm.gather((files, error))
    damaged = []
    for rank, (_, rank_error) in enumerate(reports):
        if rank_error is not None and not isinstance(rank_error, DamagedError):
            raise rank_error
        if rank_error is not None:
            damaged.append(f"{rank_error} (read by rank {rank})" if rank else str(rank_error))
    if damaged:
        plan.console.warn(f"{damaged[0]}: skipping {folder.name}")
        plan.log_file.write(
            "event",
            0,
            0,
            elapsed_seconds=plan.log_file.elapsed_seconds,
            what="damaged checkpoint",
            checkpoint=folder.name,
            message=damaged[0],
        )
        return None
    all_files: dict[str, FileEntry] = {}
    for rank_files, _ in reversed(reports):
        all_files |= rank_files
    return replace(manifest, files=all_files)


def _load(
    state: TrainState, folder: Path, dataset: Mixture, *, allow_changes: bool
) -> tuple[CheckpointManifest, Mapping[str, FileEntry]]:
    """Load a checkpoint into this rank's state.

    Returns its manifest, and the entries of the files that this rank has verified.
    """
    rank = state.comm.dist_env.local_rank
    n_ranks = state.comm.dist_env.local_world_size
    manifest = verify(folder, hashes=lambda name: rank == 0 and not name.endswith(".safetensors"))
    _check_dataset(manifest, dataset, allow_changes=allow_changes)
    verified = restore_state(folder, manifest, state, share=slice(rank, None, n_ranks))
    state.refresh_low_precision_copy(with_frozen=True)
    state.skipped_batches = list(manifest.meta.get("skipped_batches", []))
    state.recent.load(manifest.meta.get("recent_steps", []))
    hashed = {name: entry for name, entry in manifest.files.items() if entry.mtime_ns >= 0}
    return manifest, hashed | verified


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
