"""Restoring on several nodes: all load the same checkpoint, although only one of them reads damaged bytes."""

import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatoken.checkpoint.commit import list_steps
from megatoken.checkpoint.manifest import verify
from megatoken.checkpoint.save import AsyncSave
from megatoken.config.schema import Config
from megatoken.console import Console
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.distributed.parallel_dims import ParallelDims, build_dims
from megatoken.errors import CheckpointError, PeerError
from megatoken.system.metrics_log import MetricsLogger, read_metrics
from megatoken.train.checkpoint_saver import CheckpointSaver
from megatoken.train.preemption import PreemptionHandler
from megatoken.train.restore import restore
from megatoken.train.run import Progress, Run, RunData, RunLog, RunPlan
from megatoken.train.state import TrainState
from tests.tiny_model import CPU, TINY_GPT, tiny_config, tiny_state, tiny_step_config


class TwoRanks(Comm):
    """Rank 0 of two, until the other is lost."""

    is_lost = False

    def gather(self, value: Any) -> list[Any]:
        if self.is_lost:
            raise PeerError("rank 0 lost another rank")
        return [value, ({}, None) if isinstance(value, list) else value]

    def any_of_each(self, flags: Sequence[bool]) -> list[bool]:
        return [bool(self.gather(flag)[0]) for flag in flags]

    def broadcast_from_rank0(self, value: Any) -> Any:
        return self.gather(value)[0]


DATASET: Any = SimpleNamespace(fingerprint="d", tokenizer=SimpleNamespace(fingerprint="t"))


def make_plan(
    out: Path, comm: Comm, log_file: MetricsLogger, stop: PreemptionHandler, config: Config
) -> RunPlan:
    return RunPlan(
        out=out,
        console=Console(quiet=True),
        device=CPU,
        comm=comm,
        config=config,
        data=RunData(dataset=DATASET, model_config=TINY_GPT, tasks={}, loader=None, epoch_tokens=1),
        step_config=tiny_step_config(),
        dims=ParallelDims(),
        log_file=log_file,
        stop=stop,
    )


def open_saver(plan: RunPlan, state: TrainState) -> CheckpointSaver:
    progress = Progress()
    batches: Any = None
    run = Run(
        **{field.name: getattr(plan, field.name) for field in fields(plan)},
        state=state,
        progress=progress,
        log=RunLog(plan=plan, state=state, progress=progress),
        is_compiled=False,
        batches=batches,
        validation=None,
        restore=lambda: None,
    )
    return CheckpointSaver(run)


class Node:
    """A machine of one process, with its own copy of the run folder."""

    def __init__(self, out: Path, comm: Comm) -> None:
        self.state = tiny_state(seed=9)
        self.state.comm = comm
        self.progress = Progress()
        self.out = out
        is_main = comm.dist_env.is_main_process
        self.log = MetricsLogger.open(out) if is_main else MetricsLogger(out)
        self.plan = make_plan(out, comm, self.log, PreemptionHandler(), tiny_config())

    def restore(self) -> None:
        restore(self.state, self.progress, self.plan, allow_changes=False)


@pytest.mark.parametrize("sharding", ["none", "zero3"])
def test_rank_0_commits_what_it_has_written_alone_when_another_rank_is_lost(
    tmp_path: Path, sharding: str
):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "config.yaml").touch()
    config, comm = tiny_config(save__every=2), TwoRanks(DistEnv(world_size=2))
    state = tiny_state()
    state.comm = comm
    state.step = 2
    with MetricsLogger.open(tmp_path) as log_file, PreemptionHandler() as stop:
        saver = open_saver(make_plan(tmp_path, comm, log_file, stop, config), state)
        saver.save()
        comm.is_lost = True
        if sharding != "none":
            dims = build_dims(sharding, 1, DistEnv(world_size=2, local_world_size=2))
            state.sharded = replace(state.sharded, dims=dims)
        saver.try_commit_alone()
    assert list_steps(tmp_path / "checkpoints") == ([2] if sharding == "none" else [])
    if sharding == "none":
        assert verify(tmp_path / "checkpoints" / "step-00000002").meta["tokenizer"] == "t"
        assert [row["kind"] for row in read_metrics(tmp_path)] == ["save"]


class ThreadComm(Comm):
    """Ranks that are threads of this process."""

    values: list[Any]
    barrier_of_all: threading.Barrier

    def gather(self, value: Any) -> list[Any]:
        self.values[self.dist_env.rank] = value
        self.barrier_of_all.wait(timeout=200)
        gathered = list(self.values)
        self.barrier_of_all.wait(timeout=200)
        return gathered

    def broadcast_from_rank0(self, value: Any) -> Any:
        return self.gather(value)[0]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Two nodes of one process each, which see the same two checkpoints each in its own folder."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "config.yaml").touch()
    copies = {
        "config": tmp_path / "config.yaml",
        "tokenizer": tmp_path / "tokenizer",
        "meta": {"dataset": "d"},
    }
    for step in (1, 2):
        state = tiny_state(seed=step)
        state.step, state.comm = step, Comm(DistEnv())
        AsyncSave(tmp_path / "0" / "checkpoints", state, **copies).finish()
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    values, barrier, runs = [None, None], threading.Barrier(2), []
    for rank in (0, 1):
        out = tmp_path / str(rank)
        comm = ThreadComm(DistEnv(rank=rank, world_size=2, local_rank=0))
        comm.values, comm.barrier_of_all = values, barrier
        runs.append(Node(out, comm))
    yield runs
    runs[0].log.close()


def restore_all(nodes: list[Node]) -> list[Exception | None]:
    with ThreadPoolExecutor(len(nodes)) as threads:
        return [future.exception() for future in [threads.submit(node.restore) for node in nodes]]  # type: ignore[misc]


def damage(run: Node, step: int) -> None:
    path = run.out / "checkpoints" / f"step-{step:08d}" / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damaged", [None, 0, 1])
def test_damage_that_one_node_reads_makes_all_fall_back_together(
    nodes: list[Node], damaged: int | None
):
    if damaged is not None:
        damage(nodes[damaged], 2)
    assert restore_all(nodes) == [None, None]
    step = 2 if damaged is None else 1
    expected = tiny_state(seed=step).model.state_dict()
    for run in nodes:
        assert run.state.step == step
        assert all(
            torch.equal(values, expected[name])
            for name, values in run.state.model.state_dict().items()
        )
        assert run.progress.verified.keys() == {run.out / "checkpoints" / f"step-{step:08d}"}
    events = [row["message"] for row in read_metrics(nodes[0].out)]
    assert len(events) == (damaged is not None)
    assert all(
        "optimizer.safetensors" in event and ("(read by rank 1)" in event) == damaged
        for event in events
    )


def test_damage_everywhere_is_an_error_on_all(nodes: list[Node]):
    damage(nodes[0], 1)
    damage(nodes[1], 2)
    for error in restore_all(nodes):
        assert isinstance(error, CheckpointError)
    assert verify(nodes[0].out / "checkpoints" / "step-00000002").step == 2
