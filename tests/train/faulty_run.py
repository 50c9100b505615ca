"""Run a tiny model on one process or several, with a fault at a chosen rank and batch."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatoken.checkpoint.commit import step_folder
from megatoken.checkpoint.manifest import read_manifest
from megatoken.data.dataloader import DataLoader
from megatoken.distributed import stragglers
from megatoken.errors import MegatokenError
from megatoken.train import step, step_log
from megatoken.train import train as pretrain
from megatoken.train.spikes import RecentSteps
from megatoken.train.state import TrainState
from tests.ranks import run_ranks
from tests.tiny_run import fingerprint, train

SETTINGS = (
    "model.dropout=0.1 machine.micro_batch=2 save.every=5steps save.keep_last=3 evaluate.every=0"
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run and its fault.

    fault: nan (the loss of a micro-batch), spike (the gradient times 1e3), flip (one bit after that
        step), slow_data (`seconds` longer, from that batch on) or slow_compute (three times as
        long, and `seconds`).
    rank, batches: where the fault strikes; rank -1: nowhere.
    late: read numbers as on a GPU, when rank 0 asks for them.
    stop: the step after which the run is stopped once and resumed.
    window: steps between two searches for slow ranks.
    skipped: batches that the data order lacks from the start.
    """

    name: str
    settings: str = ""
    fault: str = "none"
    rank: int = -1
    batches: tuple[int, ...] = ()
    seconds: float = 0.02
    tensor: int = 0
    bit: int = 0
    late: bool = False
    stop: int = 0
    window: int = stragglers.WINDOW
    skipped: tuple[int, ...] = ()


@contextmanager
def inject(job: Job, rank: int) -> Iterator[None]:
    """Put the fault of a job into this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stragglers, "WINDOW", job.window)
        if job.late:
            # After every second step or so.
            patch.setattr(
                step_log.StepLog,
                "reads_each_step",
                property(lambda _: False, lambda *_: None),
                raising=False,
            )
            patch.setattr(step_log, "SYNC_SECONDS", 0.0 if rank == 0 else 1e9)
        skip_from_start(patch, job.skipped)
        if rank == job.rank:
            put_fault(job, patch)
        yield


def put_fault(job: Job, patch: pytest.MonkeyPatch) -> None:
    forward_loss, unscale, make = step.forward_loss, step.unscale_gradients, DataLoader.batch
    train_step, flips_left = pretrain.train_step_async, set(job.batches)

    def bad_loss(state: TrainState, *arguments: Any) -> Tensor:
        loss = forward_loss(state, *arguments)
        return loss * float("nan") if state.batch in job.batches else loss

    def large_gradients(state: TrainState) -> None:
        unscale(state)
        if state.batch in job.batches:
            for param in state.sharded.local_params.values():
                assert param.grad is not None
                param.grad *= 1e3

    def flip_after(state: TrainState, *arguments: Any) -> Any:
        batch, pending = state.batch, train_step(state, *arguments)
        if batch in flips_left:
            flips_left.remove(batch)  # not again after a rewind
            flip(state, job.tensor, job.bit)
        return pending

    def slow_loss(state: TrainState, *arguments: Any) -> Tensor:
        start = time.perf_counter()
        loss = forward_loss(state, *arguments)
        if state.batch >= job.batches[0]:
            # A step takes three forwards.
            time.sleep(job.seconds + 8 * (time.perf_counter() - start))
        return loss

    def slow_batch(loader: DataLoader, number: int) -> Any:
        time.sleep(job.seconds * (number >= job.batches[0]))
        return make(loader, number)

    faults = {
        "nan": (step, "forward_loss", bad_loss),
        "spike": (step, "unscale_gradients", large_gradients),
        "flip": (pretrain, "train_step_async", flip_after),
        "slow_compute": (step, "forward_loss", slow_loss),
        "slow_data": (DataLoader, "batch", slow_batch),
    }
    patch.setattr(*faults[job.fault])


def skip_from_start(patch: pytest.MonkeyPatch, batches: Sequence[int]) -> None:
    restore = pretrain.restore

    def restore_without(state: TrainState, *arguments: Any, **options: Any) -> Any:
        manifest = restore(state, *arguments, **options)
        state.skipped_batches = sorted({*state.skipped_batches, *batches})
        return manifest

    patch.setattr(pretrain, "restore", restore_without)


def flip(state: TrainState, tensor: int, bit: int) -> None:
    """Flip a bit of a weight or a moment; both numbers wrap around."""
    params = list(state.sharded.local_params.values())
    moments = [state.optimizer.state[p][key] for p in params for key in ("exp_avg", "exp_avg_sq")]
    tensors = [*params, *moments]
    raw = tensors[tensor % len(tensors)].detach().view(-1).view(torch.uint8)
    place, bit = divmod(bit % (8 * raw.numel()), 8)
    raw[place] ^= 1 << bit


def run_here(job: Job, data: str, out: Path, rank: int = 0) -> dict[str, Any]:
    """Run a job in this process; return exit code and error."""
    try:
        for stop in sorted({job.stop, 0}, reverse=True):
            with inject(job, rank):
                summary = train(out, data, SETTINGS, job.settings, stop=stop)
    except MegatokenError as error:
        return {"code": int(error.code), "error": str(error)}
    return {"code": int(summary.code), "error": ""}


def run_jobs(jobs: Sequence[Job], data: str, folder: Path, nproc: int) -> dict[str, dict[str, Any]]:
    """Run jobs in turn in `folder/NAME` on `nproc` processes; return rank 0's results by name."""
    if nproc == 1:
        return {job.name: run_here(job, data, folder / job.name) for job in jobs}
    answers = folder / f"answers-{nproc}.json"
    run_ranks(_work, list(jobs), data, folder, answers, nprocs=nproc)
    return dict(json.loads(answers.read_text()))


def _work(rank: int, jobs: list[Job], data: str, folder: Path, answers: Path) -> None:
    found = {job.name: run_here(job, data, folder / job.name, rank) for job in jobs}
    if rank == 0:
        answers.write_text(json.dumps(found))


def final_bits(out: Path) -> dict[str, Any]:
    """Return what must be equal bit for bit, with the recent steps and the skipped batches."""
    bits = fingerprint(out)
    meta = read_manifest(step_folder(out / "checkpoints", bits["step"])).meta
    return bits | {key: meta[key] for key in ("recent_steps", "skipped_batches")}


def count_false_alarms(n: int, seed: int = 0) -> int:
    """Count spikes reported in `n` clean steps, a quarter of them of each kind of gradient norms."""
    rng, n = np.random.default_rng(seed), n // 4
    steps = np.arange(n)
    start = steps % 500  # of a run: warm-up again and again
    losses = 3 + 8 * np.exp(-steps / 300) + 0.1 * rng.standard_normal(n)
    warm_up = 1 + 4 * np.exp(-start / 80) + 2 * np.exp(-(((start - 200) / 60) ** 2))
    found = 0
    for grad_norms in (
        5 / np.sqrt(1 + steps / 50) * np.exp(0.15 * rng.standard_normal(n)),
        np.exp(0.5 * rng.standard_normal(n)),
        np.exp(0.15 * rng.standard_t(6, n)),  # heavy tails: one in 100,000 is 6 times the median
        warm_up * np.exp(0.2 * rng.standard_normal(n)),
    ):
        recent = RecentSteps()
        for loss, grad_norm in zip(losses.tolist(), grad_norms.tolist(), strict=True):
            max_loss, max_grad_norm = recent.limits()
            found += loss > max_loss or grad_norm > max_grad_norm
            recent.values.append((loss, grad_norm))
    return found
