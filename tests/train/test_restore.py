"""Checkpoints on several nodes: all load the same one, and rank 0 commits alone what needs no other rank."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatoken.checkpoint.commit import list_steps, step_folder
from megatoken.checkpoint.manifest import verify
from megatoken.console import Console
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.distributed.parallel_dims import ParallelDims, build_dims
from megatoken.errors import CheckpointError, PeerError
from megatoken.system.metrics_log import MetricsLogger, read_metrics
from megatoken.train.checkpoint_saver import CheckpointSaver
from megatoken.train.preemption import PreemptionHandler
from megatoken.train.run import Progress, Run, RunData, RunLog, RunPlan
from tests.ranks import run_ranks
from tests.tiny_model import CPU, TINY_GPT, tiny_config, tiny_state, tiny_step_config
from tests.tiny_run import flip_bit, read_events, read_losses, train


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


@pytest.mark.parametrize("sharding", ["none", "zero3"])
def test_rank_0_commits_what_it_has_written_alone_when_another_rank_is_lost(
    tmp_path: Path, sharding: str
):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "config.yaml").touch()
    comm, state, unused = TwoRanks(DistEnv(world_size=2)), tiny_state(), SimpleNamespace()
    state.comm, state.step = comm, 2
    dataset: Any = SimpleNamespace(fingerprint="d", tokenizer=SimpleNamespace(fingerprint="t"))
    data = RunData(dataset=dataset, model_config=TINY_GPT, tasks={}, loader=None, epoch_tokens=1)
    with MetricsLogger.open(tmp_path) as log_file, PreemptionHandler() as stop:
        plan: dict[str, Any] = {
            **{"out": tmp_path, "console": Console(quiet=True), "device": CPU, "comm": comm},
            **{"config": tiny_config(save__every=2), "data": data, "dims": ParallelDims()},
            **{"step_config": tiny_step_config(), "log_file": log_file, "stop": stop},
        }
        progress = Progress()
        log = RunLog(plan=RunPlan(**plan), state=state, progress=progress)
        run = Run(
            **plan,
            **{"state": state, "progress": progress, "log": log, "is_compiled": False},
            **{"batches": unused, "validation": None, "restore": lambda: None},
        )
        saver = CheckpointSaver(run)
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


# Damaged checkpoints: node and step. The last case has none that is whole everywhere.
CASES = {"none": (), "first": ((0, 4),), "second": ((1, 4),), "both": ((0, 2), (1, 4))}


def train_on_nodes(rank: int, folder: Path, settings: str) -> None:
    """Resume the runs on one of two machines, each of which has its own copy of them."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for case in CASES:
        try:
            train(folder / case / str(rank), settings)
        except CheckpointError as error:
            (folder / case / f"error-{rank}").write_text(str(error))


def test_damage_that_one_node_reads_makes_all_fall_back_together(data: str, tmp_path: Path):
    settings = f"{data} budget.steps=5 save.every=2steps evaluate.every=0"
    train(tmp_path / "whole", settings)
    train(tmp_path / "stopped", settings, stop=4)
    for case, damaged in CASES.items():
        for node in "01":
            shutil.copytree(tmp_path / "stopped", tmp_path / case / node)
        for node, step in damaged:
            folder = step_folder(tmp_path / case / str(node) / "checkpoints", step)
            path = folder / "optimizer.safetensors"
            flip_bit(path, 4 * path.stat().st_size)
    run_ranks(train_on_nodes, tmp_path, settings, nprocs=2)
    for case in ("none", "first", "second"):
        out = tmp_path / case / "0"
        assert read_losses(out) == pytest.approx(read_losses(tmp_path / "whole"), rel=1e-6)
        messages = [row["message"] for row in read_events(out, "damaged checkpoint")]
        assert len(messages) == len(CASES[case])
        for message in messages:
            assert "optimizer.safetensors" in message
            assert ("(read by rank 1)" in message) == (case == "second")
    assert len([*(tmp_path / "both").glob("error-?")]) == 2
