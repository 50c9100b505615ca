"""What training writes; kills, stops and damage do not change its result."""

import errno
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from megatoken.base.errors import (
    ConfigError,
    DataError,
    ExitCode,
    MegatokenError,
    NumericsError,
    StorageError,
)
from megatoken.base.system.atomic_write import read_json
from megatoken.cli.verify import verify_folder
from megatoken.data.vocabulary import read_vocabulary
from megatoken.store import save
from megatoken.store.commit import list_steps
from megatoken.text.tokenizer import load_tokenizer
from megatoken.train import initial_state
from megatoken.train.run import Run
from megatoken.train.train import Summary
from tests import tiny_run
from tests.flip import flip_bit
from tests.ranks import start_process
from tests.tiny_run import (
    fingerprint,
    newest_step,
    read_column,
    read_events,
    read_losses,
    read_rows,
)
from tests.train.faulty_run import Job, put_fault
from tests.train.search import die_at

Train = Callable[..., Summary]
LONG = (
    "model.dropout=0.1 budget.steps=30 save.every=7 save.keep_last=3 evaluate.every=10 "
    "sample.every=15 sample.tokens=8"
)
SHORT = "budget.steps=2 sample.every=0 evaluate.every=0"
LLAMA = (
    "model.norm=rmsnorm model.pos_emb=rotary model.mlp=swiglu model.bias=false "
    "model.tie_embeddings=false model.n_kv_head=1"
)


@pytest.fixture(scope="module")
def long(data: str) -> str:
    return f"{data} {LONG}"


@pytest.fixture(scope="module")
def clean(long: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("clean") / "run"
    summary = tiny_run.train(out, long)
    assert (summary.code, summary.steps, summary.tokens) == (ExitCode.DONE, 30, 30 * 192)
    return out


@pytest.fixture
def train(long: str) -> Train:
    """Return a function that trains with other settings."""
    return lambda out, *settings: tiny_run.train(out, long, *settings)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_run_folder_contents(clean: Path):
    assert list(read_column(clean, "tokens").items())[::29] == [(1, 192), (30, 5760)]
    losses = read_losses(clean)
    assert losses[0] == pytest.approx(np.log(257), abs=0.2)
    assert losses[-1] < losses[0] - 2
    steps = {"val": [0, 10, 20, 30], "save": [7, 14, 21, 28, 30], "sample": [15, 30]}
    assert {kind: [row["step"] for row in read_rows(clean, kind)] for kind in steps} == steps
    assert list_steps(clean / "checkpoints") == [21, 28, 30]
    assert (clean / "samples/step-00000030.txt").stat().st_size > 0
    status = read_json(clean / "status.json")
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, 30)
    assert read_json(clean / "provenance.json")["precision"] == "fp32"


def read_files(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_finished_run_is_not_touched_and_a_damaged_checkpoint_is_reported_and_skipped(
    clean: Path, out: Path, train: Train, monkeypatch: pytest.MonkeyPatch
):
    copy = shutil.copytree(clean, out)
    files = read_files(copy)
    summary = train(copy)
    assert (summary.code, summary.steps) == (ExitCode.DONE, 30)
    assert read_files(copy) == files
    newest = copy / "checkpoints/step-00000030/model.safetensors"
    flip_bit(newest, 4 * newest.stat().st_size)
    monkeypatch.setattr(initial_state, "init_weights", None)  # a resume does not draw any
    train(copy)
    assert fingerprint(copy) == fingerprint(clean)
    (event,) = read_events(copy, "damaged checkpoint")
    assert "model.safetensors" in event["message"]


def train_and_die(out: Path, settings: str, step: int, save_number: int) -> None:
    """Train, and die after a step, or when the `save_number`-th checkpoint is written but not published."""
    saves, publish = count(1), save.publish

    def publish_or_die(*arguments, **others):
        if next(saves) == save_number:
            os.kill(os.getpid(), signal.SIGKILL)
        publish(*arguments, **others)

    save.publish = publish_or_die
    tiny_run.train(out, settings, callbacks=[partial(die_at, step)])


@pytest.mark.long
@pytest.mark.fault(1, 2, 5)
def test_killed_runs_resume_bit_identical(long: str, out: Path, clean: Path, train: Train):
    """Killed before the first save, in the second, and perhaps in the fourth."""
    for step, save_number in ((5, 0), (0, 2), (29, 0)):
        process = start_process(train_and_die, out, long, step, save_number)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        if save_number:
            assert list_steps(out / "checkpoints") == [7]
            assert [*(out / "checkpoints").glob(".tmp-step-00000014-*")]
    train(out)
    assert fingerprint(out) == fingerprint(clean)
    assert not [*(out / "checkpoints").glob(".tmp-*")]


@pytest.mark.fault(11, 22)
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to handle")
def test_sigterm_saves_and_loses_no_step_and_a_second_run_is_refused(
    long: str, out: Path, clean: Path, train: Train
):
    def start_another_and_stop(row):
        if (row["kind"], row["step"]) == ("train", 9):
            with pytest.raises(StorageError, match=f"pid {os.getpid()}"):
                train(out)
            signal.raise_signal(signal.SIGTERM)

    stopped = tiny_run.train(out, long, callbacks=[start_another_and_stop])
    assert (stopped.code, stopped.reason) == (ExitCode.STOPPED, "SIGTERM")
    assert newest_step(out) == len(read_losses(out)) == 9
    assert read_json(out / "status.json")["state"] == "stopped"
    train(out)
    assert fingerprint(out) == fingerprint(clean)


def test_time_limit_saves_and_stops(out: Path, train: Train):
    summary = train(out, "save.time_limit=1s budget.steps=100000 sample.every=0")
    assert summary.code == ExitCode.STOPPED
    assert newest_step(out) == summary.steps < 100000  # on a slow machine perhaps 0


def test_a_llama_trains_and_grows_its_context(out: Path, tmp_path: Path, train: Train):
    train(out, LLAMA, "evaluate.every=0 save.every=0 sample.every=0")
    losses = read_losses(out)
    assert losses[-1] < losses[0] - 2
    longer = f"model.init={out} model.seq_len=32 machine.micro_batch=2 budget.steps=1"
    train(tmp_path / "longer", LLAMA, longer)
    assert read_losses(tmp_path / "longer", "val")[0] < losses[0] - 2


@pytest.mark.long
def test_a_run_keeps_the_kernels_it_started_with(out: Path, train: Train):
    """Another kernel adds in another order: a resume with it would not be bit-identical."""
    auto = f"{SHORT} machine.micro_batch=auto machine.attention=auto"
    machine = out / "machine.json"

    def train_again(*settings):
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
        assert train(out, auto, *settings).steps == 2
        return read_json(machine)

    facts = train_again()
    kernels = facts["forms"]["kernels"]
    kernels["attention"] = other = "blocked" if kernels["attention"] == "flash" else "flash"
    facts |= {"tokens_per_second": {"6": 1.0}, "micro_batch": 6}
    machine.write_text(json.dumps(facts))
    kept = train_again("machine.activation_checkpointing=none")
    assert (kept["forms"]["kernels"]["attention"], kept["micro_batch"]) == (other, 6)
    saving = train_again("machine.activation_checkpointing=block")  # advised when memory runs out
    assert saving["tokens_per_second"] != {"6": 1.0}
    explicit = train_again("machine.attention=explicit")
    assert explicit["forms"]["kernels"]["attention"] == "explicit"
    machine.write_text('{"micro_batch": ')  # measured again
    assert train_again()["micro_batch"] in (1, 2, 3, 4, 6, 12)


@pytest.mark.fault(18)
def test_space_is_asked_for_the_checkpoints_that_are_missing(
    out: Path, tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
):
    settings = f"{SHORT} budget.steps=4 save.every=1 save.keep_last=2"
    disk, free = shutil.disk_usage(tmp_path), 1 << 40
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk._replace(free=free))
    train(out, settings)
    free = 0
    assert train(out, settings).code == ExitCode.DONE  # a finished run needs nothing
    shutil.rmtree(out / "checkpoints/step-00000004")
    tensors = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
    free = 2 * (tensors + (1 << 20))  # room for two checkpoints with their slack
    with pytest.raises(StorageError):
        train(tmp_path / "new", settings)
    assert train(out, settings).steps == 4


@pytest.mark.parametrize(
    "name", ["thesis.txt", "config.yaml", "metrics.jsonl", "checkpoints/step-00000010/weights.pt"]
)
def test_folder_that_is_not_a_run_is_not_touched(tmp_path: Path, name: str, train: Train):
    with pytest.raises(DataError):
        train(tmp_path / "new", f"data.path={tmp_path}/nothing")
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("model: {n_layer: 2}")
    files = read_files(tmp_path)
    with pytest.raises(ConfigError):
        train(tmp_path)
    assert read_files(tmp_path) == files
    assert not (tmp_path / "new").exists()


def test_start_on_a_full_disk_leaves_a_folder_that_can_be_started_again(
    out: Path, train: Train, monkeypatch: pytest.MonkeyPatch
):
    def replace_file(path, content, durable=False):
        path.with_name(f".{path.name.lstrip('.')}.{os.getpid()}.tmp").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    for module in ("base.system.file_lock", "train.setup"):
        with monkeypatch.context() as full:
            full.setattr(f"megatoken.{module}.replace_file", replace_file)
            with pytest.raises(StorageError):
                train(out, SHORT)
    assert newest_step(out) == 0
    assert train(out, SHORT).steps == 2


def test_damaged_or_missing_config_is_restored_from_a_checkpoint(out: Path, train: Train):
    settings = f"{SHORT} save.every=1"
    train(out, settings)
    path = out / "config.yaml"
    config = path.read_text()
    for damaged in ("", config[:300], None):
        path.write_text(damaged or "")
        if damaged is None:
            path.unlink()
            (out / "checkpoints/step-00000002/config.yaml").write_text("cut")
        with pytest.raises(MegatokenError):
            train(out, settings, "optim.lr=2e-2")
        assert train(out, settings).steps == 2
    assert path.read_text() == config


def test_tokenizer_of_the_dataset_replaces_a_stale_one(out: Path, train: Train):
    train(out, "budget.steps=1")
    shutil.rmtree(out / "checkpoints")  # as if the first start had failed
    load_tokenizer("bpe:300", lambda: iter(["the cat sat on the mat. " * 50])).vocabulary.save(
        out / "tokenizer"
    )
    train(out, "budget.steps=2")
    assert read_vocabulary(out / "tokenizer").name == "bytes"
    assert verify_folder(out).errors == []


@pytest.mark.fault(14)
def test_the_last_step_is_saved_before_the_last_evaluation(
    out: Path, clean: Path, train: Train, monkeypatch: pytest.MonkeyPatch
):
    """A signal stops an evaluation before its next batch; the resumed run evaluates again."""
    checks = []
    check_stop, signalled = Run.check_stop, 0

    def signal_at_fifth_check(run, seconds=0.0, **options):
        step = run.state.step
        for thread in threading.enumerate():
            if step == 30 and thread.name == "megatoken-save":
                thread.join()  # an evaluation takes longer than writing a checkpoint
        checks.append((step, newest_step(out)))
        if step == signalled and [at for at, _ in checks].count(step) == 5:
            signal.raise_signal(signal.SIGTERM)
        return check_stop(run, seconds, **options)

    monkeypatch.setattr(Run, "check_stop", signal_at_fifth_check)
    for signalled in (10, 30):
        summary = train(out, "save.every=0")
        expected = ExitCode.STOPPED, signalled, "SIGTERM"
        assert (summary.code, summary.steps, summary.reason) == expected
        assert newest_step(out) == signalled
        assert signalled not in read_column(out, "loss", "val")
    assert (30, 30) in checks[:-1]  # committed during the evaluation
    monkeypatch.undo()
    train(out, "save.every=0")
    assert fingerprint(out) == fingerprint(clean)


def test_a_checkpoint_on_its_way_is_committed_when_a_step_fails(
    out: Path, train: Train, monkeypatch: pytest.MonkeyPatch
):
    write = save.write_files

    def write_slowly(*arguments):
        time.sleep(0.3)
        return write(*arguments)

    monkeypatch.setattr(save, "write_files", write_slowly)
    put_fault(Job(name="fails late", fault="nan", batches=tuple(range(2, 30))), monkeypatch)
    with pytest.raises(NumericsError):
        train(out, "save.every=1 evaluate.every=0")
    assert newest_step(out) == read_json(out / "status.json")["step"] > 0


@pytest.mark.fault(14)
def test_a_save_that_failed_is_tried_again_when_the_run_stops_there(
    out: Path, train: Train, monkeypatch: pytest.MonkeyPatch
):
    failing, begin = [True], save.AsyncSave.__init__

    def fail_once(self, *arguments, **others):
        if failing:
            failing.clear()
            signal.raise_signal(signal.SIGTERM)
            raise StorageError("disk full", out)
        begin(self, *arguments, **others)

    monkeypatch.setattr(save.AsyncSave, "__init__", fail_once)
    summary = train(out, "save.every=2 evaluate.every=2 sample.every=0")
    assert (summary.code, summary.steps) == (ExitCode.STOPPED, 2)
    assert newest_step(out) == 2


def test_sample_that_cannot_be_written_does_not_stop_training(out: Path, train: Train):
    out.mkdir()
    (out / "provenance.json").write_text('{"megatoken": "0.1.0"}')
    (out / "samples").write_text("in the way")
    train(out, "budget.steps=15 sample.at_start=true")
    assert list(read_column(out, "text", "sample")) == [0, 15]
