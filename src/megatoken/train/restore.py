"""Loading a run's newest valid checkpoint: before the first step, and when train/recovery.py goes back to it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megatoken.checkpoint.commit import list_steps, remove_leftovers, step_folder
from megatoken.checkpoint.load import restore_state
from megatoken.checkpoint.manifest import CheckpointManifest, DamagedError, FileEntry, verify
from megatoken.config.load import Change
from megatoken.errors import CheckpointError, DataError, MegatokenError
from megatoken.train.metrics_log import read_metrics
from megatoken.train.run_context import RunContext
from megatoken.train.run_folder import CHECKPOINTS


def restore(run: RunContext) -> bool:
    """Load the newest checkpoint that is valid on every node, if there is one; rewind the metrics log to its step.

    Return whether there was one. Damaged checkpoints are reported and skipped. All ranks load the same one or raise
    together: DataError when the dataset is not the one trained on, CheckpointError when no checkpoint is valid.
    """
    root = run.out / CHECKPOINTS
    if run.is_main:
        remove_leftovers(root)
    steps = run.comm.run_on_rank0(lambda: list_steps(root))
    elapsed_seconds = 0.0
    for folder in (step_folder(root, step) for step in reversed(steps)):
        manifest = _load_on_all(run, folder)
        if manifest is not None:
            elapsed_seconds = manifest.meta.get("elapsed_seconds", 0.0)
            run.verified[folder] = manifest.files
            run.console.print(f"resuming from {folder.name}")
            break
    else:
        if steps:
            raise CheckpointError(
                "no checkpoint of this run is whole", root, "choose another --out"
            )
    run.logged, run.val_losses = run.comm.run_on_rank0(lambda: _rewind_log(run, elapsed_seconds))
    return bool(steps)


def _rewind_log(
    run: RunContext, elapsed_seconds: float
) -> tuple[set[tuple[str, int]], dict[int, float]]:
    """Drop the rows after the run's step; (kind or task, step) and the validation losses of those that are left."""
    run.log.rewind(run.state.step, elapsed_seconds)
    rows = read_metrics(run.out)
    logged = {(row.get("task", row["kind"]), row["step"]) for row in rows}
    return logged, {row["step"]: row["loss"] for row in rows if row["kind"] == "val"}


def _load_on_all(run: RunContext, folder: Path) -> CheckpointManifest | None:
    """Load a checkpoint and return its manifest; None on all ranks, which then must load another one, if it is damaged
    where one reads it.

    What a disk or a network gets wrong differs by node: the ranks of each verify all files, every rank its share. What
    they read of the others' is in the memory of their machine. What a rank finds besides damage is raised by all.
    """
    files: Mapping[str, FileEntry] = {}
    error: MegatokenError | None = None
    try:
        manifest, files = _load(run, folder)
    except MegatokenError as raised:
        error = raised
        try:
            verify(folder)  # damage may be why it does not fit
        except CheckpointError as cause:
            error = cause
    reports = run.comm.gather((files, error))
    errors = [(rank, error) for rank, (_, error) in enumerate(reports) if error]
    for _, error in errors:
        if not isinstance(error, DamagedError):
            raise error
    for rank, error in errors[:1]:
        message = f"{error} (read by rank {rank})" if rank else str(error)
        run.console.warn(f"{message}: passing over {folder.name}")
        values = {"what": "damaged checkpoint", "checkpoint": folder.name, "message": message}
        run.log.write("event", 0, 0, elapsed_seconds=run.log.elapsed_seconds, **values)
        return None
    return replace(
        manifest,
        files={name: entry for files, _ in reversed(reports) for name, entry in files.items()},
    )


def _load(run: RunContext, folder: Path) -> tuple[CheckpointManifest, Mapping[str, FileEntry]]:
    """Fill the state of this rank from a checkpoint; return its manifest and the files that this rank has verified."""
    rank, n_ranks = run.comm.dist_env.local_rank, run.comm.dist_env.local_world_size
    manifest = verify(folder, hashes=lambda name: rank == 0 and not name.endswith(".safetensors"))
    _check_dataset(run, manifest)
    verified = restore_state(folder, manifest, run.state, share=slice(rank, None, n_ranks))
    run.state.refresh_low_precision_copy()
    run.state.skipped_batches = list(manifest.meta.get("skipped_batches", []))
    run.state.recent.load(manifest.meta.get("recent_steps", []))
    return manifest, {
        name: entry for name, entry in manifest.files.items() if entry.mtime_ns >= 0
    } | verified


def _check_dataset(run: RunContext, manifest: CheckpointManifest) -> None:
    """Raise DataError unless the run's dataset is the one trained on, or another of the same tokens is allowed."""
    dataset, trained_on = run.dataset, str(manifest.meta.get("dataset"))
    if trained_on == dataset.fingerprint:
        return
    same_ids = manifest.meta.get("tokenizer") == run.tokenizer.fingerprint
    if not (same_ids and run.allow_changes):
        what = f"checkpoint was trained on dataset {trained_on}, this one is {dataset.fingerprint}"
        fix = "point data.path at the dataset the run began with, or choose another --out"
        fix += (
            ", or go on with this one by --allow-changes" if same_ids else ": its tokens are others"
        )
        raise DataError(what, str(dataset), fix)
    change = Change("dataset", trained_on, dataset.fingerprint, "guarded")
    run.changes += [change] if change not in run.changes else []
