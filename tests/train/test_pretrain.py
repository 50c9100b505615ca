"""The training program: what it writes, and that kills, stops and damage do not change the result."""

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatoken.checkpoint import save
from megatoken.checkpoint.commit import list_steps
from megatoken.checkpoint.manifest import FileEntry
from megatoken.cli.verify import verify_folder
from megatoken.config.load import resolve
from megatoken.console import Console
from megatoken.data.tokenizer import load_saved_tokenizer, load_tokenizer
from megatoken.errors import ExitCode, MegatokenError, StorageError
from megatoken.system.metrics_log import read_metrics
from megatoken.train.run import Run
from megatoken.train.state import TrainState
from megatoken.train.step import forward_loss
from megatoken.train.train import Summary, Trainer
from tests.ranks import FORKS, start_process
from tests.tiny_run import TEXT, read_events, read_losses, read_rows, read_tensors, write_recipe

RECIPE = """\
model: {n_layer: 2, n_head: 2, d_model: 32, seq_len: 16, dropout: 0.1}
data: {path: DATA, tokenizer: bytes}
optim: {lr: 1e-2, warmup: 5steps}
budget: {steps: 40, batch_tokens: 128}
machine: {device: cpu, precision: fp32, micro_batch: 4, threads: 1}
save: {every: 7steps, keep_last: 3}
evaluate: {every: 10steps, tokens: 256}
sample: {every: 20steps, tokens: 8}
log: {plots: false}
"""
SHORT = ("budget.steps=2", "sample.every=0", "evaluate.every=0")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("tiny"), RECIPE, val=TEXT * 23)


def train(recipe: Path, out: Path, *overrides: str) -> Summary:
    return Trainer(resolve(str(recipe), overrides), out, console=Console(to_stderr=True)).fit()


def fingerprint(out: Path) -> dict[str, Any]:
    """Return what must be equal bit for bit: newest weights and moments, and the logged numbers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(read_tensors(out).items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    keys = ("kind", "step", "tokens", "loss", "grad_norm", "lr", "text", "target_tokens")
    rows = [
        {k: row[k] for k in keys if k in row} for row in read_metrics(out) if row["kind"] != "event"
    ]
    rows.sort(key=lambda row: (row["step"], row["kind"]))  # a save is logged when it is committed
    return {"tensors": digest.hexdigest(), "rows": rows}


def fingerprint_without_saves(out: Path) -> dict[str, Any]:
    found = fingerprint(out)
    found["rows"] = [row for row in found["rows"] if row["kind"] != "save"]
    return found


@pytest.fixture(scope="module")
def clean(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("clean") / "run"
    summary = train(recipe, out)
    assert (summary.code, summary.steps, summary.tokens) == (ExitCode.DONE, 40, 40 * 128)
    return out


@pytest.fixture
def copy(clean: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change."""
    return Path(shutil.copytree(clean, tmp_path / "run"))


def test_run_folder_contents(clean: Path) -> None:
    trained = read_rows(clean, "train")
    assert [row["step"] for row in trained] == list(range(1, 41))
    keys = {"loss", "grad_norm", "lr", "seconds", "tokens_per_second", "mfu", "mfu_causal"}
    assert keys <= trained[0].keys()
    assert trained[-1]["tokens"] == 5120
    assert trained[0]["loss"] == pytest.approx(np.log(257), abs=0.2)
    assert trained[-1]["loss"] < trained[0]["loss"] - 2
    steps = {"val": [0, 10, 20, 30, 40], "save": [7, 14, 21, 28, 35, 40], "sample": [20, 40]}
    for kind, expected in steps.items():
        assert [row["step"] for row in read_rows(clean, kind)] == expected
    assert list_steps(clean / "checkpoints") == [28, 35, 40]
    assert (clean / "samples" / "step-00000040.txt").stat().st_size > 0
    status = json.loads((clean / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, 40)
    assert json.loads((clean / "provenance.json").read_text())["precision"] == "fp32"


def read_files(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_finished_run_is_not_touched(copy: Path, recipe: Path) -> None:
    files = read_files(copy)
    summary = train(recipe, copy)
    assert read_files(copy) == files
    assert (summary.code, summary.steps) == (ExitCode.DONE, 40)


@pytest.mark.fault(41)
def test_runtime_settings_do_not_change_the_loss_curve(recipe: Path, tmp_path: Path) -> None:
    curves = []
    for machine in ("", "micro_batch=1", "loss_chunk=0", "micro_batch=auto"):
        words = ["model.dropout=0", "budget.steps=10", "sample.every=0"]
        words += [f"machine.{machine}"] if machine else []
        out = tmp_path / machine
        train(recipe, out, *words)
        curves.append(read_losses(out) + read_losses(out, "val"))
        shutil.rmtree(out / "checkpoints")
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-5)


def test_damaged_checkpoint_is_reported_and_skipped(recipe: Path, copy: Path, clean: Path) -> None:
    newest = copy / "checkpoints" / "step-00000040" / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 4
    newest.write_bytes(data)
    train(recipe, copy)
    assert fingerprint(copy) == fingerprint(clean)
    (event,) = read_events(copy, "damaged checkpoint")
    assert "model.safetensors" in event["message"]


def train_and_hold(recipe: Path, out: Path, step: int, held: Event, go: Event) -> None:
    """Train, and wait at a step for a word of the test."""

    def hold(row: dict[str, Any]) -> None:
        if row["kind"] == "train" and row["step"] >= step and not go.is_set():
            held.set()
            go.wait()

    sys.exit(
        Trainer(resolve(str(recipe)), out, console=Console(quiet=True), callbacks=[hold]).fit().code
    )


@contextmanager
def held_process(recipe: Path, out: Path, step: int) -> Iterator[tuple[ForkServerProcess, Event]]:
    """A process that has trained to `step` and waits there for the event; killed in the end."""
    held, go = FORKS.Event(), FORKS.Event()
    process = start_process(train_and_hold, recipe, out, step, held, go)
    try:
        assert held.wait(200)
        yield process, go
    finally:
        process.kill()
        process.join()


def train_and_die(recipe: Path, out: Path, number: int) -> None:
    """Train, and die when a checkpoint, the `number`-th, is written but not published."""
    saves, publish = count(1), save.publish

    def publish_or_die(*arguments: Any, **others: Any) -> None:
        if next(saves) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        publish(*arguments, **others)

    save.publish = publish_or_die
    Trainer(resolve(str(recipe)), out, console=Console(quiet=True)).fit()


@pytest.mark.fault(1, 2, 5)
def test_killed_runs_resume_bit_identical(recipe: Path, tmp_path: Path, clean: Path) -> None:
    out = tmp_path / "run"
    for step in (
        5,
        0,
        29,
    ):  # before the first checkpoint; in the second; while the fourth is perhaps being written
        if step:
            with held_process(recipe, out, step) as (process, _):
                process.kill()
        else:
            process = start_process(train_and_die, recipe, out, 2)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        if not step:
            assert list_steps(out / "checkpoints") == [7]
            assert [*(out / "checkpoints").glob(".tmp-step-00000014-*")]
    assert train(recipe, out).code == ExitCode.DONE
    assert fingerprint(out) == fingerprint(clean)
    assert not [*(out / "checkpoints").glob(".tmp-*")]


@pytest.mark.fault(11)
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to handle")
def test_sigterm_saves_and_loses_no_step(recipe: Path, tmp_path: Path, clean: Path) -> None:
    out = tmp_path / "run"
    with held_process(recipe, out, 9) as (process, go):
        process.terminate()
        go.set()
        process.join(200)
        assert process.exitcode == ExitCode.STOPPED
    assert list_steps(out / "checkpoints")[-1] == len(read_losses(out)) == 9
    assert json.loads((out / "status.json").read_text())["state"] == "stopped"
    assert train(recipe, out).code == ExitCode.DONE
    assert fingerprint_without_saves(out) == fingerprint_without_saves(clean)


def test_time_limit_saves_and_stops(recipe: Path, tmp_path: Path) -> None:
    summary = train(
        recipe, tmp_path / "run", "save.time_limit=1s", "budget.steps=100000", "sample.every=0"
    )
    assert summary.code == ExitCode.STOPPED
    assert summary.steps < 100000  # on a slow machine perhaps not even one
    assert list_steps(tmp_path / "run" / "checkpoints")[-1] == summary.steps


@pytest.mark.fault(22)
def test_second_run_in_the_same_folder_is_refused(recipe: Path, tmp_path: Path) -> None:
    with held_process(recipe, tmp_path / "run", 1) as (process, _):
        with pytest.raises(MegatokenError, match=f"pid {process.pid}") as error:
            train(recipe, tmp_path / "run")
        assert error.value.code == ExitCode.STORAGE
        assert process.is_alive()


def test_init_from_the_weights_of_a_run(clean: Path, recipe: Path, tmp_path: Path) -> None:
    train(recipe, tmp_path / "run", f"model.init={clean}", "budget.steps=1")
    first, last = read_losses(tmp_path / "run", "val")[0], read_losses(clean, "val")[-1]
    assert first == pytest.approx(last, rel=1e-6)
    with pytest.raises(MegatokenError) as error:
        train(recipe, tmp_path / "other", f"model.init={clean}", "model.n_layer=3")
    assert error.value.code == ExitCode.CONFIG
    assert [path.name for path in (tmp_path / "other").iterdir()] == [".lock"]


LLAMA = "norm=rmsnorm pos_emb=rotary mlp=swiglu bias=false tie_embeddings=false n_kv_head=1"


def test_a_llama_trains_resumes_and_grows_its_context(recipe: Path, tmp_path: Path) -> None:
    llama = [f"model.{word}" for word in LLAMA.split()]
    out, longer = tmp_path / "run", tmp_path / "longer"
    train(recipe, out, *llama)
    before, losses = fingerprint(out), read_losses(out)
    assert losses[-1] < losses[0] - 2
    for step in (35, 40):
        shutil.rmtree(out / "checkpoints" / f"step-{step:08d}")
    train(recipe, out, *llama)
    assert fingerprint(out) == before
    train(recipe, longer, *llama, f"model.init={out}", "model.seq_len=32", "budget.steps=1")
    assert read_losses(longer, "val")[0] < losses[0] - 2


def read_facts(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "machine.json").read_text()))


def test_damaged_machine_json_is_measured_again(recipe: Path, tmp_path: Path) -> None:
    out, words = tmp_path / "run", (*SHORT, "machine.micro_batch=auto")
    train(recipe, out, *words)
    shutil.rmtree(out / "checkpoints")
    (out / "machine.json").write_text('{"micro_batch": ')
    assert train(recipe, out, *words).steps == 2
    assert read_facts(out)["micro_batch"] in (1, 2, 4, 8)
    assert read_facts(out)["forms"]["kernels"]["attention"] in ("flash", "blocked", "native")


def test_run_keeps_the_kernels_it_started_with(recipe: Path, tmp_path: Path) -> None:
    """Another kernel adds in another order: a resume that chose again would not be bit-identical."""
    out = tmp_path / "run"
    train(recipe, out, *SHORT)
    facts = read_facts(out)
    other = "blocked" if facts["forms"]["kernels"]["attention"] == "flash" else "flash"
    facts["forms"]["kernels"]["attention"] = other
    (out / "machine.json").write_text(json.dumps(facts))
    for words, attention in (((), other), (("machine.attention=explicit",), "explicit")):
        shutil.rmtree(out / "checkpoints")
        train(recipe, out, *SHORT, *words)
        assert read_facts(out)["forms"]["kernels"]["attention"] == attention


@pytest.mark.fault(18)
def test_space_is_asked_for_the_checkpoints_that_are_missing(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    words = (*SHORT, "budget.steps=4", "save.every=1", "save.keep_last=2")
    train(recipe, out, *words)
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk._replace(free=0))
    assert train(recipe, out, *words).code == ExitCode.DONE  # a finished run needs nothing
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    tensors = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
    free = 2 * (tensors + (1 << 20))  # room for two checkpoints with their slack
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk._replace(free=free))
    with pytest.raises(StorageError):
        train(recipe, tmp_path / "new", *words)
    assert train(recipe, out, *words).steps == 4


def test_missing_dataset(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(MegatokenError) as error:
        train(recipe, tmp_path / "run", f"data.path={tmp_path}/nothing")
    assert error.value.code == ExitCode.DATA
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name", ["thesis.txt", "config.yaml", "metrics.jsonl", "checkpoints/step-00000010/weights.pt"]
)
def test_folder_that_is_not_a_run_is_not_touched(recipe: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(RECIPE)
    files = read_files(tmp_path)
    with pytest.raises(MegatokenError) as error:
        train(recipe, tmp_path)
    assert error.value.code == ExitCode.CONFIG
    assert read_files(tmp_path) == files


def test_start_on_a_full_disk_leaves_a_folder_that_can_be_started_again(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"

    def replace_file(path: Path, content: str, durable: bool = False) -> None:
        path.with_name(f".{path.name.lstrip('.')}.{os.getpid()}.tmp").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    for module in ("system.file_lock", "train.setup"):
        with monkeypatch.context() as full:
            full.setattr(f"megatoken.{module}.replace_file", replace_file)
            with pytest.raises(StorageError):
                train(recipe, out, *SHORT)
    assert list_steps(out / "checkpoints") == []
    assert train(recipe, out, *SHORT).steps == 2


def test_damaged_or_missing_config_is_restored_from_a_checkpoint(
    recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train(recipe, out, "budget.steps=2", "save.every=1")
    config = (out / "config.yaml").read_text()
    for damaged in ("", config[:300], None):
        (out / "config.yaml").write_text(damaged or "")
        if damaged is None:
            (out / "config.yaml").unlink()
            (out / "checkpoints" / "step-00000002" / "config.yaml").write_text("cut")
        with pytest.raises(MegatokenError):
            train(recipe, out, "budget.steps=2", "save.every=1", "optim.lr=2e-2")
        assert train(recipe, out, "budget.steps=2", "save.every=1").steps == 2
    assert (out / "config.yaml").read_text() == config


def test_tokenizer_of_the_dataset_replaces_a_stale_one(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(recipe, out, "budget.steps=1")
    shutil.rmtree(out / "checkpoints")  # as if that start had come to nothing
    load_tokenizer("bpe:300", lambda: iter(["the cat sat on the mat. " * 50])).save(
        out / "tokenizer"
    )
    train(recipe, out, "budget.steps=2")
    assert load_saved_tokenizer(out / "tokenizer").name == "bytes"
    assert verify_folder(out).errors == []


@pytest.mark.fault(14)
def test_the_last_step_is_saved_before_the_last_evaluation(
    recipe: Path, tmp_path: Path, clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal during an evaluation is heard before its next batch; what was evaluated is not evaluated again."""
    out, seen = tmp_path / "run", []

    def stop_at(step: int) -> Callable[..., bool]:
        def check_stop(run: Run, seconds: float = 0.0, **options: bool) -> bool:
            for (
                thread
            ) in threading.enumerate():  # an evaluation takes longer than to write a checkpoint
                if run.state.step == 40 and thread.name == "megatoken-save":
                    thread.join()
            seen.append((run.state.step, list_steps(out / "checkpoints")[-1:]))
            if [at for at, _ in seen].count(step) == 5 and run.state.step == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(run, seconds, **options)

        return check_stop

    original = Run.check_stop
    for step in (10, 40):
        monkeypatch.setattr(Run, "check_stop", stop_at(step))
        summary = train(recipe, out, "save.every=0")
        assert (summary.code, summary.steps, summary.reason) == (ExitCode.STOPPED, step, "SIGTERM")
        assert list_steps(out / "checkpoints")[-1] == step
        assert "val" not in {row["kind"] for row in read_metrics(out) if row["step"] == step}
    assert (40, [40]) in seen[:-1]  # committed while the evaluation went on
    monkeypatch.undo()
    assert train(recipe, out, "save.every=0").code == ExitCode.DONE
    assert fingerprint_without_saves(out) == fingerprint_without_saves(clean)


def test_a_checkpoint_on_its_way_is_committed_when_a_step_fails(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = save.write_files

    def write_slowly(*arguments: Any) -> dict[str, FileEntry]:
        time.sleep(0.3)
        return write(*arguments)

    monkeypatch.setattr(save, "write_files", write_slowly)

    def fail_late(state: TrainState, *arguments: Any) -> torch.Tensor:
        return forward_loss(state, *arguments) * (float("nan") if state.step >= 2 else 1.0)

    monkeypatch.setattr("megatoken.train.step.forward_loss", fail_late)
    with pytest.raises(MegatokenError) as error:
        train(recipe, tmp_path / "run", "save.every=1", "evaluate.every=0")
    assert error.value.code == ExitCode.NUMERICS
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert list_steps(tmp_path / "run" / "checkpoints")[-1] == status["step"] > 0


@pytest.mark.fault(14)
def test_a_save_that_failed_is_tried_again_when_the_run_stops_there(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, begin = [True], save.AsyncSave.__init__

    def fail_once(self: save.AsyncSave, *arguments: Any, **others: Any) -> None:
        if failing.pop() if failing else False:
            os.kill(os.getpid(), signal.SIGTERM)
            raise StorageError("disk full", tmp_path)
        begin(self, *arguments, **others)

    monkeypatch.setattr(save.AsyncSave, "__init__", fail_once)
    summary = train(recipe, tmp_path / "run", "save.every=2", "evaluate.every=2", "sample.every=0")
    assert (summary.code, summary.steps) == (ExitCode.STOPPED, 2)
    assert list_steps(tmp_path / "run" / "checkpoints") == [2]


def test_sample_that_cannot_be_written_does_not_stop_training(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "provenance.json").write_text('{"megatoken": "0.1.0"}')
    (out / "samples").write_text("in the way")
    assert train(recipe, out, "budget.steps=20").code == ExitCode.DONE
    assert [row["step"] for row in read_metrics(out) if row["kind"] == "sample"] == [20]
