"""All nodes load the same checkpoint; rank 0 commits alone what needs no other rank."""

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatoken.base.errors import CheckpointError, PeerError
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.distributed.parallel_dims import build_dims
from megatoken.store.commit import list_steps, step_folder
from megatoken.store.manifest import verify
from megatoken.train import train as pretrain
from megatoken.train.checkpoint_saver import CheckpointSaver
from megatoken.train.state import Position
from tests.flip import flip_bit
from tests.ranks import run_ranks, train_on_ranks
from tests.tiny_run import read_column, read_events, read_losses, train


class TwoRanks(Comm):
    """Communicates as rank 0 of two, until the other rank is lost."""

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
    data: str, tmp_path: Path, sharding: str, monkeypatch: pytest.MonkeyPatch
):
    comm, env = TwoRanks(DistEnv(world_size=2)), DistEnv(world_size=2, local_world_size=2)

    def save_and_lose_rank_1(run, *_):
        run.state.comm, run.state.position = comm, Position(step=2)
        saver = CheckpointSaver(replace(run, comm=comm))
        saver.save()
        comm.is_lost = True
        dims = build_dims(sharding, 1, env) if sharding != "none" else run.state.sharded.dims
        run.state.sharded = replace(run.state.sharded, dims=dims)
        saver.try_commit_alone()
        raise PeerError("rank 1 is lost")

    monkeypatch.setattr(pretrain, "list_actions", save_and_lose_rank_1)
    with pytest.raises(PeerError):
        train(tmp_path, data)
    steps = [2] if sharding == "none" else []
    assert [*read_column(tmp_path, "step", "save")] == list_steps(tmp_path / "checkpoints") == steps
    assert not steps or verify(tmp_path / "checkpoints/step-00000002").step == 2


# Damaged checkpoints: node and step. The last case has none that is whole everywhere.
CASES = {"none": (), "first": ((0, 4),), "second": ((1, 4),), "both": ((0, 2), (1, 4))}


def train_on_nodes(rank: int, folder: Path, settings: str, cases: Iterable[str]) -> None:
    """Resume the runs on one of two machines, each of which has its own folders."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for case in cases:
        try:
            train(folder / case / str(rank), settings)
        except CheckpointError as error:
            (folder / case / f"error-{rank}").write_text(str(error))


@pytest.mark.long
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
    run_ranks(train_on_nodes, tmp_path, settings, list(CASES), nprocs=2)
    for case in ("none", "first", "second"):
        out = tmp_path / case / "0"
        assert read_losses(out) == pytest.approx(read_losses(tmp_path / "whole"), rel=1e-6)
        messages = [row["message"] for row in read_events(out, "damaged checkpoint")]
        assert len(messages) == len(CASES[case])
        for message in messages:
            assert "optimizer.safetensors" in message
            assert ("(read by rank 1)" in message) == (case == "second")
    assert len([*(tmp_path / "both").glob("error-?")]) == 2


@pytest.mark.long
def test_nodes_divide_the_files_of_a_folder_that_they_share(data: str, tmp_path: Path):
    settings = f"{data} budget.steps=4 save.every=1steps machine.sharding=zero3 evaluate.every=0"
    out, path = (
        tmp_path / "shared/0",
        "checkpoints/step-00000003/model-00001-of-00002.safetensors",
    )
    train_on_ranks(2, out, settings, stop=3)
    out.with_name("1").symlink_to(out)
    flip_bit(out / path, 4 * (out / path).stat().st_size)
    run_ranks(train_on_nodes, tmp_path, settings, ["shared"], nprocs=2)
    (event,) = read_events(out, "damaged checkpoint")
    assert path in event["message"]
    assert event["message"].endswith("(read by rank 1)")  # rank 0 has not hashed it
    assert [*read_column(out, "loss")] == [1, 2, 3, 4]
