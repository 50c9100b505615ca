"""Training on several processes: the same curve for any number, signals, lost ranks, errors."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatoken.base.errors import ExitCode
from megatoken.cli.main import main
from megatoken.distributed.local_launch import COMMAND, launch
from megatoken.store.commit import list_steps
from tests.processes import HANG_SECONDS, children, read_variable, wait_until
from tests.ranks import run_ranks, train_on_ranks
from tests.tiny_run import TINY, newest_step, read_column, read_losses, train, write_shards

RATE = "optim.lr=1e-3"  # AdamW amplifies rounding at higher ones


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shards(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def alone(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    train(out, data, RATE, "machine.micro_batch=12")
    return out


def train_by_command(rank: int, data: str, out: Path) -> None:
    """Run `megatoken train --json` as a launcher's rank does."""
    with out.with_name(f"{rank}.json").open("w") as file, contextlib.redirect_stdout(file):
        assert main(f"train {TINY} --out {out} --json {data} {RATE}".split()) == ExitCode.DONE


@pytest.mark.fault(40)
def test_the_curve_of_three_processes_is_that_of_one(data: str, alone: Path, tmp_path: Path):
    out = tmp_path / "run"
    run_ranks(train_by_command, data, out, nprocs=3)
    printed = [out.with_name(f"{rank}.json").read_text() for rank in range(3)]
    assert (json.loads(printed[0])["steps"], printed[1:]) == (12, ["", ""])
    for kind in ("train", "val"):
        assert read_losses(out, kind) == pytest.approx(read_losses(alone, kind), rel=1e-6)
    counts = read_column(alone, "target_tokens", "val")
    assert read_column(out, "target_tokens", "val") == counts
    assert json.loads((out / "provenance.json").read_text())["processes"] == 3


@pytest.mark.long
def test_a_run_resumes_with_other_parallel_dims(data: str, alone: Path, tmp_path: Path):
    out = tmp_path / "run"
    settings = f"{data} {RATE} sample.every=4 sample.tokens=3"
    for nproc, layout, step in (
        (3, "machine.micro_batch=2 machine.sharding=zero3", 5),
        (2, "machine.micro_batch=3 machine.tensor_parallel=2", 9),
    ):
        train_on_ranks(nproc, out, settings, layout, stop=step)
        assert newest_step(out) == step
    train(out, settings, "machine.micro_batch=12")
    assert read_losses(out) == pytest.approx(read_losses(alone), rel=1e-6)


@pytest.mark.slow
def test_a_checkpoint_of_step_0_is_loaded_by_every_rank(
    data: str, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """After a start from given weights and no step, only that checkpoint has them."""
    one, two = tmp_path / "1", tmp_path / "2"
    settings = f"{data} model.init={alone} budget.steps=1 save.every=0"
    with monkeypatch.context() as patch:
        patch.setattr("megatoken.train.train.parse_time", lambda _: 1e-9)  # the time is over
        assert train(two, settings).code == ExitCode.STOPPED
    assert list_steps(two / "checkpoints") == [0]
    shutil.copytree(two, one)
    train(one, settings)
    train_on_ranks(2, two, settings)
    assert read_losses(two) == pytest.approx(read_losses(one), rel=1e-6)
    assert read_losses(two)[0] < read_losses(alone)[0] - 0.1


@pytest.mark.long
@pytest.mark.fault(6)
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="finds processes in /proc")
def test_a_killed_rank_ends_all(data: str, tmp_path: Path):
    out = tmp_path / "run"
    options = "--nproc 2 --restarts 0 budget.steps=100000 save.every=2 machine.micro_batch=2"
    line = f"train {TINY} {data} --out {out} {options} machine.sharding=zero1"
    running = subprocess.Popen([*COMMAND, *line.split()], stderr=subprocess.PIPE)
    wait_until(lambda: len(list_steps(out / "checkpoints")) >= 2, running)  # the next is on its way
    ranks = {read_variable(child, "RANK"): child for child in children(running.pid)}
    os.kill(ranks["1"], signal.SIGKILL)
    _, errors = running.communicate(timeout=HANG_SECONDS)
    assert running.returncode == ExitCode.PEER
    assert b"error: rank 1 was killed by SIGKILL" in errors
    assert b"Traceback" not in errors
    assert newest_step(out) >= 4


def stop_rank_1(rank: int, out: Path, settings: str) -> None:
    def stop(row):
        if rank == 1 and (row["kind"], row["step"]) == ("train", 3):
            signal.raise_signal(signal.SIGTERM)

    assert train(out, settings, callbacks=[stop]).code == ExitCode.STOPPED


@pytest.mark.fault(13)
def test_a_signal_to_one_rank_stops_all_at_the_same_step(data: str, tmp_path: Path):
    settings = f"{data} machine.micro_batch=2 machine.sharding=zero1 save.every=0"
    run_ranks(stop_rank_1, tmp_path, settings, nprocs=2)
    assert 3 <= newest_step(tmp_path) == max(read_column(tmp_path, "loss")) < 12


@pytest.mark.fault(7)
def test_the_error_of_one_rank_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "rank = int(os.environ['RANK'])\n"
        "error = 'disk full' if rank == 2 else 'lost a peer'\n"
        "sys.stderr.write(f'[rank {rank}] note\\n[rank {rank}] error: {error}\\n')\n"  # at once: others write, too
        "sys.exit(5 if rank == 2 else 7)\n"
    )
    assert launch([sys.executable, str(program)], 4) == ExitCode.STORAGE
    lines = capfd.readouterr().err.splitlines()
    notes = [f"[rank {rank}] note" for rank in range(4)]
    assert sorted(lines) == sorted(
        [*notes, "[rank 0] error: lost a peer", "[rank 2] error: disk full"]
    )
