"""Run a tiny model on one process or several, with a fault at a chosen rank and batch."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatoken.base.errors import ExitCode, MegatokenError
from megatoken.distributed import stragglers
from megatoken.store.commit import step_folder
from megatoken.store.manifest import read_manifest
from megatoken.train import step, step_log
from megatoken.train import train as pretrain
from megatoken.train.state import CrossEntropy, TrainState
from tests.tiny_run import fingerprint, train

SETTINGS = (
    "model.dropout=0.1 machine.micro_batch=2 save.every=5steps save.keep_last=3 evaluate.every=0"
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run and its fault.

    fault: nan (the loss of a micro-batch), spike (the gradient times 1e3), flip (one bit after that
        step) or slow (three times as long, and 20 ms, from that batch on).
    rank, batches: where the fault occurs; rank -1: nowhere.
    late: read numbers as on a GPU, at steps that rank 0 chooses.
    stop: the step after which the run is stopped once and resumed.
    window: steps between two searches for slow ranks.
    skipped: batches that the data order lacks from the start.
    code: the exit code.
    """

    name: str
    settings: str = ""
    fault: str = "none"
    rank: int = -1
    batches: tuple[int, ...] = ()
    tensor: int = 0
    bit: int = 0
    late: bool = False
    stop: int = 0
    window: int = stragglers.WINDOW
    skipped: tuple[int, ...] = ()
    code: int = ExitCode.DONE


def inject(job: Job, rank: int, patch: pytest.MonkeyPatch) -> None:
    """Put the fault of a job into this process."""
    patch.setattr(stragglers, "WINDOW", job.window)
    if job.late:
        # After every second step, at which only rank 0 would read.
        false = property(lambda _: False, lambda *_: None)
        patch.setattr(step_log.StepLog, "_reads_each_step", false, raising=False)
        patch.setattr(step_log, "SYNC_SECONDS", 1e9)
        patch.setattr(step_log, "MAX_READ_STEPS", 2 if rank == 0 else 1000)
    skip_from_start(patch, job.skipped)
    if rank == job.rank:
        put_fault(job, patch)


def put_fault(job: Job, patch: pytest.MonkeyPatch) -> None:
    sums, unscale = CrossEntropy.sums, step.unscale_gradients
    train_step, flips_left = pretrain.train_step_async, set(job.batches)

    def bad_loss(loss, state, *arguments):
        scale = float("nan") if state.position.next_batch in job.batches else 1.0
        return {name: scale * value for name, value in sums(loss, state, *arguments).items()}

    def large_gradients(state):
        unscale(state)
        if state.position.next_batch in job.batches:
            for param in state.sharded.local_params.values():
                param.grad *= 1e3

    def flip_after(state, *arguments):
        batch, pending = state.position.next_batch, train_step(state, *arguments)
        if batch in flips_left:
            flips_left.remove(batch)  # not again after a rewind
            flip(state, job.tensor, job.bit)
        return pending

    def slow_loss(loss, state, *arguments):
        start = time.perf_counter()
        values = sums(loss, state, *arguments)
        if state.position.next_batch >= job.batches[0]:
            # A step takes three forwards.
            time.sleep(0.02 + 8 * (time.perf_counter() - start))
        return values

    faults = {
        "nan": (CrossEntropy, "sums", bad_loss),
        "spike": (step, "unscale_gradients", large_gradients),
        "flip": (pretrain, "train_step_async", flip_after),
        "slow": (CrossEntropy, "sums", slow_loss),
    }
    patch.setattr(*faults[job.fault])


def skip_from_start(patch: pytest.MonkeyPatch, batches: Sequence[int]) -> None:
    restore = pretrain.restore

    def restore_without(run, **options):
        manifest = restore(run, **options)
        run.state.position = run.state.position.skip(*batches)
        return manifest

    patch.setattr(pretrain, "restore", restore_without)


def flip(state: TrainState, tensor: int, bit: int) -> None:
    """Flip a bit of a weight or a moment; both numbers wrap around."""
    params = list(state.sharded.local_params.values())
    moments = [state.optimizer.state[p][key] for p in params for key in ("exp_avg", "exp_avg_sq")]
    tensors = [*params, *moments]
    raw = tensors[tensor % len(tensors)].detach().view(-1).view(torch.uint8)
    index, bit = divmod(bit % (8 * raw.numel()), 8)
    raw[index] ^= 1 << bit


def run_jobs(rank: int, jobs: Sequence[Job], data: str, folder: Path) -> list[str]:
    """Run jobs in turn in `folder/NAME` on one rank; return their errors."""
    errors = []
    for job in jobs:
        code, error = int(ExitCode.DONE), ""
        try:
            for stop in sorted({job.stop, 0}, reverse=True):
                with pytest.MonkeyPatch.context() as patch:
                    inject(job, rank, patch)
                    train(folder / job.name, data, SETTINGS, job.settings, stop=stop)
        except MegatokenError as raised:
            code, error = raised.code, str(raised)
        assert code == job.code, (job.name, error)
        errors.append(error)
    return errors


def final_bits(out: Path) -> dict[str, Any]:
    """Return what must be equal bit for bit, with the recent steps and the skipped batches."""
    bits = fingerprint(out)
    meta = read_manifest(step_folder(out / "checkpoints", bits["step"])).meta
    return bits | {key: meta[key] for key in ("recent_steps", "skipped_batches")}
