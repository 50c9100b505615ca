"""Whole runs of a tiny model on one process or several, with a fault at a chosen rank and batch."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor

from megatoken.checkpoint.commit import list_steps, step_folder
from megatoken.checkpoint.manifest import read_manifest
from megatoken.config.load import resolve
from megatoken.console import Console
from megatoken.data.dataloader import DataLoader
from megatoken.distributed import stragglers
from megatoken.errors import MegatokenError
from megatoken.launch.local import find_free_port
from megatoken.system.metrics_log import read_metrics
from megatoken.train import step, step_log
from megatoken.train import train as pretrain
from megatoken.train.spikes import RecentSteps
from megatoken.train.state import TrainState
from megatoken.train.train import Trainer
from tests.ranks import run_ranks

RECIPE = """\
model: {n_layer: 2, n_head: 2, d_model: 32, seq_len: 16, dropout: 0.1}
data: {path: DATA, tokenizer: bytes}
optim: {lr: 1e-2, warmup: 5steps}
budget: {steps: 12, batch_tokens: 192}
machine: {device: cpu, precision: fp32, micro_batch: 2, threads: 1, attention: flash, gemm_backend: torch}
save: {every: 5steps, keep_last: 3}
evaluate: {every: 0}
sample: {every: 0}
log: {plots: false}
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run and its fault. batches: at which the fault strikes; rank: where, -1: nowhere.

    fault: nan (the loss of a micro-batch), spike (the gradient times 1e3), flip (one bit after that step), slow_data
    (`seconds` longer, from that batch on) or slow_compute (three times as long, and `seconds`). late: numbers are read
    as on a GPU, when rank 0 asks for it. stop: the step after which the run is stopped once and resumed. window: steps
    between two looks for slow ranks.
    skipped: batches that the data order lacks from the start.
    """

    name: str
    words: tuple[str, ...] = ()
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


def write_recipe(folder: Path) -> Path:
    """The recipe beside shards of a repetitive text."""
    text = b"to be or not to be, that is the question. " * 300
    np.save(folder / "train_0.npy", np.frombuffer(text, dtype=np.uint8).astype(np.uint16))
    path = folder / "tiny.yaml"
    path.write_text(RECIPE.replace("DATA", str(folder / "*.npy")))
    return path


@contextmanager
def inject(job: Job, rank: int) -> Iterator[None]:
    """Put the fault of a job into this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stragglers, "WINDOW", job.window)
        if job.late:
            read_late(patch, rank)
        if job.skipped:
            skip_from_start(patch, job.skipped)
        if rank != job.rank:
            yield
            return
        forward_loss, unscale, train_step = (
            step.forward_loss,
            step.unscale_gradients,
            pretrain.train_step_async,
        )
        make = DataLoader.batch

        def bad_loss(state: TrainState, *arguments: Any) -> Tensor:
            loss = forward_loss(state, *arguments)
            return loss * float("nan") if state.batch in job.batches else loss

        def large_gradients(state: TrainState) -> None:
            unscale(state)
            if state.batch in job.batches:
                for param in state.sharded.local_params.values():
                    assert param.grad is not None
                    param.grad *= 1e3

        left = set(job.batches)

        def flip_after(state: TrainState, *arguments: Any) -> Any:
            batch, pending = state.batch, train_step(state, *arguments)
            if batch in left:
                left.remove(batch)  # not again after going back
                flip(state, job.tensor, job.bit)
            return pending

        def slow_loss(state: TrainState, *arguments: Any) -> Tensor:
            start = time.perf_counter()
            loss = forward_loss(state, *arguments)
            if state.batch >= job.batches[0]:
                time.sleep(
                    job.seconds + 8 * (time.perf_counter() - start)
                )  # a step takes three forwards
            return loss

        def slow_batch(loader: DataLoader, number: int) -> Any:
            time.sleep(job.seconds * (number >= job.batches[0]))
            return make(loader, number)

        match job.fault:
            case "nan":
                patch.setattr(step, "forward_loss", bad_loss)
            case "spike":
                patch.setattr(step, "unscale_gradients", large_gradients)
            case "flip":
                patch.setattr(pretrain, "train_step_async", flip_after)
            case "slow_compute":
                patch.setattr(step, "forward_loss", slow_loss)
            case "slow_data":
                patch.setattr(DataLoader, "batch", slow_batch)
        yield


def read_late(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Read numbers when rank 0 asks for it, after every second step or so: the others would never."""
    patch.setattr(step_log.StepLog, "reads_each_step", False)
    patch.setattr(step_log, "SYNC_SECONDS", 0.0 if rank == 0 else 1e9)


def skip_from_start(patch: pytest.MonkeyPatch, batches: Sequence[int]) -> None:
    restore = pretrain.restore

    def restore_without(state: TrainState, *arguments: Any, **options: Any) -> Any:
        manifest = restore(state, *arguments, **options)
        state.skipped_batches = sorted({*state.skipped_batches, *batches})
        return manifest

    patch.setattr(pretrain, "restore", restore_without)


def flip(state: TrainState, tensor: int, bit: int) -> None:
    """Flip a bit of a weight or of a moment, both counted around."""
    moments = [
        state.optimizer.state[p][key]
        for p in state.sharded.local_params.values()
        for key in ("exp_avg", "exp_avg_sq")
    ]
    tensors = [*state.sharded.local_params.values(), *moments]
    raw = tensors[tensor % len(tensors)].detach().view(-1).view(torch.uint8)
    place, bit = divmod(bit % (8 * raw.numel()), 8)
    raw[place] ^= 1 << bit


def run_here(job: Job, recipe: Path, out: Path, rank: int = 0) -> dict[str, Any]:
    """Run a job in this process: exit code and error."""
    config = resolve(str(recipe), job.words)
    stops = [lambda row: row["kind"] == "train" and row["step"] == job.stop]
    try:
        for callbacks in ([stops] if job.stop else []) + [[]]:
            with inject(job, rank):
                summary = Trainer(
                    config, out, callbacks=callbacks, console=Console(quiet=True)
                ).fit()
    except MegatokenError as error:
        return {"code": int(error.code), "error": str(error)}
    return {"code": int(summary.code), "error": ""}


def run_jobs(
    jobs: Sequence[Job], recipe: Path, folder: Path, nproc: int
) -> dict[str, dict[str, Any]]:
    """Run jobs one after another in `folder/NAME` on `nproc` processes: what rank 0 got, by name."""
    if nproc == 1:
        return {job.name: run_here(job, recipe, folder / job.name) for job in jobs}
    answers = folder / f"answers-{nproc}.json"
    run_ranks(_work, nproc, find_free_port(), list(jobs), recipe, folder, answers, nprocs=nproc)
    return dict(json.loads(answers.read_text()))


def _work(
    rank: int, nproc: int, port: int, jobs: list[Job], recipe: Path, folder: Path, answers: Path
) -> None:
    facts = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "MASTER_PORT": port,
    }
    os.environ |= {key: str(value) for key, value in facts.items()}
    found = {job.name: run_here(job, recipe, folder / job.name, rank) for job in jobs}
    if rank == 0:
        answers.write_text(json.dumps(found))


def events(out: Path, what: str) -> list[dict[str, Any]]:
    """The rows of one kind of event."""
    return [row for row in read_metrics(out) if row["kind"] == "event" and row["what"] == what]


def final_bits(out: Path) -> dict[str, Any]:
    """What must be equal bit for bit: the hashes of weights and moments, the recent steps, and the losses."""
    newest = list_steps(out / "checkpoints")[-1]
    folder = step_folder(out / "checkpoints", newest)
    hashes = {}
    for path in folder.glob("*.safetensors"):
        for name, tensor in load_file(path).items():  # headers have their entries in any order
            hashes[path.name, name] = xxhash.xxh3_128_hexdigest(
                tensor.flatten().view(torch.uint8).numpy()
            )
    losses = [
        (row["step"], row["loss"], row["lr"]) for row in read_metrics(out) if row["kind"] == "train"
    ]
    meta = read_manifest(folder).meta
    return {"step": newest, "tensors": hashes, "losses": losses} | {
        key: meta[key] for key in ("recent_steps", "skipped_batches")
    }


def count_false_alarms(n: int, seed: int = 0) -> int:
    """Spikes reported in `n` clean steps, a quarter of them of each kind of gradient norms."""
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
