"""Training by several processes of the command: the same curve for any number, signals, lost ranks, errors."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatoken.checkpoint.commit import list_steps
from megatoken.config.load import resolve
from megatoken.console import Console
from megatoken.data.dataloader import DataLoader
from megatoken.data.dataset import load_dataset
from megatoken.data.prepare import prepare
from megatoken.errors import ExitCode
from megatoken.launch.local import find_free_port, launch
from megatoken.system.metrics_log import read_metrics
from megatoken.train.train import Summary, Trainer
from tests.processes import children, read_variable
from tests.ranks import run_ranks
from tests.tiny_run import read_rows, stop_at

STEPS = 12
FIXED = [
    "model.n_layer=2",
    "model.n_head=2",
    "model.d_model=32",
    "model.seq_len=16",
    "budget.batch_tokens=192",
    f"budget.steps={STEPS}",
    "optim.lr=1e-2",
    "machine.gemm_backend=torch",
    "machine.attention=flash",
    "machine.threads=1",
    "machine.loss_chunk=32",
    "evaluate.every=5",
    "evaluate.tokens=400",
    "sample.every=0",
    "log.plots=false",
    "save.every=4",
    "machine.device=cpu",
    "machine.precision=fp32",
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.txt"
    text.write_text(
        "".join(f"{n} bottles of beer on the wall, take {n % 7} down\n" for n in range(400))
    )
    prepare(str(text), folder / "shards", tokenizer="bytes", val_fraction=0.1)
    return folder / "shards"


def command(shards: Path, out: Path, nproc: int, *words: str) -> list[str]:
    start = [sys.executable, "-m", "megatoken", "train", "quickstart", "--out", str(out)]
    return [*start, "--nproc", str(nproc), f"data.path={shards}", *FIXED, *words]


def train(shards: Path, out: Path, nproc: int, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(shards, out, nproc, *words), capture_output=True, text=True, timeout=240
    )


def train_here(shards: Path, out: Path, *words: str, stop: int = 0) -> Summary:
    """Train in this process, until a step if one is given."""
    config = resolve("quickstart", [f"data.path={shards}", *FIXED, *words])
    return Trainer(config, out, console=Console(quiet=True), callbacks=[stop_at(stop)]).fit()


def curve(out: Path, kind: str = "train") -> list[float]:
    return [row["loss"] for row in read_rows(out, kind)]


@pytest.fixture(scope="module")
def alone(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    assert train_here(shards, out, "machine.micro_batch=12", "log.every=1").code == ExitCode.DONE
    return out


@pytest.mark.fault(40)
def test_the_curve_of_three_processes_is_that_of_one(
    shards: Path, alone: Path, tmp_path: Path
) -> None:
    done = train(shards, tmp_path / "run", 3, "machine.micro_batch=4", "log.every=1", "--json")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1  # only rank 0 prints
    assert json.loads(done.stdout)["steps"] == STEPS
    assert curve(tmp_path / "run") == pytest.approx(curve(alone), rel=1e-6)
    assert curve(tmp_path / "run", "val") == pytest.approx(curve(alone, "val"), rel=1e-6)
    counts = [
        [r["target_tokens"] for r in read_metrics(run) if r["kind"] == "val"]
        for run in (alone, tmp_path / "run")
    ]
    assert counts[0] == counts[1]
    facts = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert (facts["processes"], facts["command"][:2]) == (3, ["megatoken", "train"])


def train_as_rank(
    rank: int, nproc: int, port: int, shards: Path, out: Path, words: list[str], step: int
) -> None:
    """Train as one of `nproc` ranks until a step."""
    environment = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MASTER_PORT": port}
    environment |= {"RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in environment.items()})
    assert train_here(shards, out, *words, stop=step).code == ExitCode.STOPPED


def test_a_run_resumes_with_other_parallel_dims(shards: Path, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    common = ["log.every=1", "sample.every=4", "sample.tokens=3"]
    attempts = ((3, 2, "machine.sharding=zero3", 5), (2, 3, "machine.tensor_parallel=2", 9))
    for nproc, micro_batch, override, step in attempts:
        words = [*common, f"machine.micro_batch={micro_batch}", override]
        run_ranks(train_as_rank, nproc, find_free_port(), shards, out, words, step, nprocs=nproc)
        assert list_steps(out / "checkpoints")[-1] == step
    assert train_here(shards, out, *common, "machine.micro_batch=12").code == ExitCode.DONE
    assert curve(out) == pytest.approx(curve(alone), rel=1e-6)


@pytest.mark.slow
def test_a_checkpoint_of_step_0_is_loaded_by_every_rank(
    shards: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that starts from given weights and is stopped before its first step has them in that checkpoint only."""
    words = [f"model.init={alone}", "log.every=1", "budget.steps=1", "save.every=0"]
    with monkeypatch.context() as patch:
        patch.setattr(
            "megatoken.train.train.parse_time", lambda _: 1e-9
        )  # a time limit that is over
        assert train_here(shards, tmp_path / "2", *words).code == ExitCode.STOPPED
    assert list_steps(tmp_path / "2" / "checkpoints") == [0]
    shutil.copytree(tmp_path / "2", tmp_path / "1")
    assert train_here(shards, tmp_path / "1", *words).code == ExitCode.DONE
    done = train(shards, tmp_path / "2", 2, *words)
    assert done.returncode == 0, done.stderr
    assert curve(tmp_path / "2") == pytest.approx(curve(tmp_path / "1"), rel=1e-6)
    assert curve(tmp_path / "2")[0] < curve(alone)[0] - 1


@pytest.mark.fault(6)
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="finds processes in /proc")
def test_a_killed_rank_ends_the_others_and_the_run_resumes(
    shards: Path, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = [
        "machine.micro_batch=2",
        "log.every=1",
        "budget.steps=100000",
        "save.every=2",
        "machine.sharding=zero1",
    ]
    running = subprocess.Popen(
        command(shards, out, 2, "--restarts", "0", *words), stderr=subprocess.PIPE
    )
    while (
        running.poll() is None and len(list_steps(out / "checkpoints")) < 2
    ):  # the next one is on its way
        time.sleep(0.02)
    os.kill(find_rank(running.pid, 1), signal.SIGKILL)
    _, errors = running.communicate(timeout=250)
    assert running.returncode == ExitCode.PEER
    assert b"error: rank 1 was killed by SIGKILL" in errors
    assert b"Traceback" not in errors
    kept = list_steps(out / "checkpoints")[-1]
    assert kept >= 4
    done = train(shards, out, 2, *words, "save.time_limit=1s")
    assert done.returncode == ExitCode.STOPPED, done.stderr
    assert f"resuming from step-{kept:08d}" in done.stdout


@pytest.mark.fault(13)
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="finds processes in /proc")
def test_a_signal_to_one_rank_stops_all_at_the_same_step(shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [
        "machine.micro_batch=2",
        "budget.steps=100000",
        "save.every=0",
        "machine.sharding=zero1",
        "log.every=1",
    ]
    with subprocess.Popen(command(shards, out, 2, *words), stderr=subprocess.PIPE) as running:
        wait_for_training(out, running)
        os.kill(find_rank(running.pid, 1), signal.SIGTERM)
        _, errors = running.communicate(timeout=180)
    assert (running.returncode, errors) == (ExitCode.STOPPED, b"")
    assert list_steps(out / "checkpoints") == [
        max(row["step"] for row in read_metrics(out) if row["kind"] == "train")
    ]


def wait_for_training(out: Path, running: "subprocess.Popen[bytes]") -> None:
    """Before its first step a rank has nothing to save and ends at once."""
    log = out / "metrics.jsonl"
    while running.poll() is None and not (log.is_file() and '"train"' in log.read_text()):
        time.sleep(0.02)


def find_rank(pid: int, rank: int) -> int:
    """The process of a rank, a child of `pid`."""
    return next(child for child in children(pid) if read_variable(child, "RANK") == str(rank))


@pytest.mark.slow
@pytest.mark.fault(9)
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's parent-death signal")
def test_ranks_stop_and_save_when_their_launcher_is_killed(shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["machine.micro_batch=2", "budget.steps=100000", "save.every=0"]
    running = subprocess.Popen(command(shards, out, 2, *words), stderr=subprocess.DEVNULL)
    wait_for_training(out, running)
    running.kill()
    running.wait()
    until = time.monotonic() + 250
    while time.monotonic() < until and not list_steps(out / "checkpoints"):
        time.sleep(0.05)
    assert list_steps(out / "checkpoints")
    while (
        time.monotonic() < until
        and (status := json.loads((out / "status.json").read_text()))["state"] == "running"
    ):
        time.sleep(0.05)
    assert (status["state"], status["exit_code"]) == ("stopped", ExitCode.STOPPED)


@pytest.mark.slow
@pytest.mark.fault(30, 34)
def test_data_that_is_damaged_for_one_rank_ends_all(shards: Path, tmp_path: Path) -> None:
    """The block that rank 1 reads first at step 2; rank 0 computes on until it misses rank 1."""
    data = tmp_path / "shards"
    prepare(shards.parent / "text.txt", data, tokenizer="bytes", val_fraction=0.1, shard_tokens=64)
    loader = DataLoader(load_dataset(data).train, seq_len=16, batch_size=12, seed=3)
    read = [
        {number * 16 // 64, (number + 1) * 16 // 64}
        for step in range(3)
        for number in loader.windows(step).tolist()
    ]
    index = min(set().union(*read[30:]) - set().union(*read[:30]))
    with (data / f"train_{index:06d}.bin").open("r+b") as file:
        file.seek(1030)
        file.write(b"\xee")
    done = train(data, tmp_path / "run", 2, "machine.micro_batch=6", "seed=3", "log.every=1")
    assert done.returncode == ExitCode.DATA, done.stderr
    assert re.search(
        rf"^\[rank 1\] error: shard is damaged: block 0 .*train_{index:06d}\.bin",
        done.stderr,
        re.MULTILINE,
    )
    assert {row["step"] for row in read_metrics(tmp_path / "run") if row["kind"] == "train"} <= {
        1,
        2,
    }


@pytest.mark.fault(7)
def test_the_error_of_one_rank_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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
