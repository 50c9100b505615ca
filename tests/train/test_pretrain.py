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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatoken.checkpoint import save
from megatoken.checkpoint.commit import FileWriter, list_steps
from megatoken.checkpoint.manifest import FileEntry, encode_manifest, read_manifest
from megatoken.cli.verify import verify_folder
from megatoken.config.load import resolve
from megatoken.console import Console
from megatoken.data.tokenizer import load_saved_tokenizer, load_tokenizer
from megatoken.errors import ExitCode, MegatokenError, StorageError
from megatoken.plots import draw_weights
from megatoken.system.metrics_log import read_metrics
from megatoken.train.run import Run
from megatoken.train.state import TrainState
from megatoken.train.step import forward_loss
from megatoken.train.train import Summary, Trainer
from tests.ranks import FORKS, start_process

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
    """A recipe beside external shards of a repetitive byte text."""
    folder = tmp_path_factory.mktemp("tiny")
    text = b"to be or not to be, that is the question. " * 300
    np.save(folder / "train_0.npy", np.frombuffer(text, dtype=np.uint8).astype(np.uint16))
    np.save(folder / "val_0.npy", np.frombuffer(text[:1000], dtype=np.uint8).astype(np.uint16))
    path = folder / "tiny.yaml"
    path.write_text(RECIPE.replace("DATA", str(folder / "*.npy")))
    return path


def train(recipe: Path, out: Path, *overrides: str) -> Summary:
    return Trainer(resolve(str(recipe), overrides), out, console=Console(to_stderr=True)).fit()


def fingerprint(out: Path) -> dict[str, Any]:
    """Everything that must be equal bit for bit: newest weights and moments, and the log of losses."""
    newest = out / "checkpoints" / f"step-{list_steps(out / 'checkpoints')[-1]:08d}"
    digest = hashlib.sha256()
    for path in sorted(newest.glob("*.safetensors")):  # of sharded models a pair for each rank
        for name, tensor in sorted(load_file(path).items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
    keys = ("kind", "step", "tokens", "loss", "grad_norm", "lr", "text", "target_tokens")
    rows = [
        {k: row[k] for k in keys if k in row} for row in read_metrics(out) if row["kind"] != "event"
    ]
    rows.sort(key=lambda row: (row["step"], row["kind"]))  # a save is logged when it is committed
    return {"tensors": digest.hexdigest(), "rows": rows}


@pytest.fixture(scope="module")
def clean(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("clean") / "run"
    summary = train(recipe, out)
    assert (summary.code, summary.steps, summary.tokens) == (ExitCode.DONE, 40, 40 * 128)
    return out


def test_run_folder_contents(clean: Path) -> None:
    rows = read_metrics(clean)
    trained = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in trained] == list(range(1, 41))
    assert {
        "loss",
        "grad_norm",
        "lr",
        "seconds",
        "tokens_per_second",
        "mfu",
        "mfu_causal",
    } <= trained[0].keys()
    assert trained[-1]["tokens"] == 5120
    assert trained[0]["loss"] == pytest.approx(np.log(257), abs=0.2)
    assert trained[-1]["loss"] < trained[0]["loss"] - 2
    assert [row["step"] for row in rows if row["kind"] == "val"] == [0, 10, 20, 30, 40]
    assert [row["step"] for row in rows if row["kind"] == "save"] == [7, 14, 21, 28, 35, 40]
    assert [row["step"] for row in rows if row["kind"] == "sample"] == [20, 40]
    assert list_steps(clean / "checkpoints") == [28, 35, 40]
    assert (clean / "samples" / "step-00000040.txt").stat().st_size > 0
    status = json.loads((clean / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, 40)
    assert json.loads((clean / "provenance.json").read_text())["precision"] == "fp32"


def test_finished_run_is_not_touched(clean: Path, recipe: Path) -> None:
    before = fingerprint(clean)
    files = {p: p.read_bytes() for p in clean.rglob("*") if p.is_file() and p.name != ".lock"}
    summary = train(recipe, clean)
    assert {
        p: p.read_bytes() for p in clean.rglob("*") if p.is_file() and p.name != ".lock"
    } == files
    assert summary.code == ExitCode.DONE
    assert summary.steps == 40
    assert fingerprint(clean) == before


@pytest.mark.fault(41)
@pytest.mark.parametrize(
    "machine", ["machine.micro_batch=1", "machine.loss_chunk=0", "machine.micro_batch=auto"]
)
def test_runtime_settings_do_not_change_the_loss_curve(
    recipe: Path, tmp_path: Path, machine: str
) -> None:
    losses = []
    for index, overrides in enumerate([[], [machine]]):
        train(
            recipe,
            tmp_path / str(index),
            "model.dropout=0",
            "budget.steps=10",
            "sample.every=0",
            *overrides,
        )
        losses.append(
            [
                row["loss"]
                for row in read_metrics(tmp_path / str(index))
                if row["kind"] in ("train", "val")
            ]
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_damaged_checkpoint_is_reported_and_skipped(
    recipe: Path, tmp_path: Path, clean: Path
) -> None:
    out = tmp_path / "run"
    train(recipe, out)
    newest = out / "checkpoints" / "step-00000040" / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 4
    newest.write_bytes(data)
    train(recipe, out)
    assert fingerprint(out) == fingerprint(clean)
    events = [row for row in read_metrics(out) if row["kind"] == "event"]
    assert any(
        "model.safetensors" in row["message"]
        for row in events
        if row["what"] == "damaged checkpoint"
    )


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
    last = max(row["step"] for row in read_metrics(out) if row["kind"] == "train")
    assert list_steps(out / "checkpoints")[-1] == last == 9
    assert json.loads((out / "status.json").read_text())["state"] == "stopped"
    assert train(recipe, out).code == ExitCode.DONE
    both = fingerprint(out), fingerprint(clean)
    assert both[0]["tensors"] == both[1]["tensors"]
    assert [r for r in both[0]["rows"] if r["kind"] != "save"] == [
        r for r in both[1]["rows"] if r["kind"] != "save"
    ]


def test_time_limit_saves_and_stops(recipe: Path, tmp_path: Path) -> None:
    summary = train(
        recipe, tmp_path / "run", "save.time_limit=1s", "budget.steps=100000", "sample.every=0"
    )
    assert summary.code == ExitCode.STOPPED
    assert summary.reason == "time limit 1s"
    assert summary.steps < 100000  # on a slow machine perhaps not even one
    assert list_steps(tmp_path / "run" / "checkpoints")[-1] == summary.steps


@pytest.mark.fault(22)
def test_second_run_in_the_same_folder_is_refused(recipe: Path, tmp_path: Path) -> None:
    with held_process(recipe, tmp_path / "run", 1) as (process, _):
        with pytest.raises(MegatokenError, match=f"pid {process.pid} on") as error:
            train(recipe, tmp_path / "run")
        assert error.value.code == ExitCode.STORAGE
        assert process.is_alive()


def test_init_from_the_weights_of_a_run(clean: Path, recipe: Path, tmp_path: Path) -> None:
    train(recipe, tmp_path / "run", f"model.init={clean}", "budget.steps=1")
    first = next(row for row in read_metrics(tmp_path / "run") if row["kind"] == "val")
    last = [row for row in read_metrics(clean) if row["kind"] == "val"][-1]
    assert first["loss"] == pytest.approx(last["loss"], rel=1e-6)
    with pytest.raises(MegatokenError, match=r"set model.n_layer=2") as error:
        train(recipe, tmp_path / "other", f"model.init={clean}", "model.n_layer=3")
    assert error.value.code == ExitCode.CONFIG
    assert [path.name for path in (tmp_path / "other").iterdir()] == [
        ".lock"
    ]  # a start that failed leaves no log


LLAMA = (
    "model.norm=rmsnorm",
    "model.pos_emb=rotary",
    "model.mlp=swiglu",
    "model.bias=false",
    "model.tie_embeddings=false",
    "model.n_kv_head=1",
)


def test_a_llama_trains_resumes_and_samples(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(recipe, out, *LLAMA)
    before = fingerprint(out)
    losses = [row["loss"] for row in read_metrics(out) if row["kind"] == "train"]
    assert losses[0] == pytest.approx(np.log(257), abs=0.2)
    assert losses[-1] < losses[0] - 2
    for step in (35, 40):
        shutil.rmtree(out / "checkpoints" / f"step-{step:08d}")
    train(recipe, out, *LLAMA)
    assert fingerprint(out) == before
    pytest.importorskip("matplotlib")
    assert [path.name for path in draw_weights(out, tmp_path)] == [
        "matrix.png"
    ]  # there are no embeddings of positions
    # Places are computed, so a context may become longer than the one learnt with.
    longer = tmp_path / "longer"
    train(recipe, longer, *LLAMA, f"model.init={out}", "model.seq_len=32", "budget.steps=1")
    first = next(row for row in read_metrics(longer) if row["kind"] == "val")
    assert first["loss"] < losses[0] - 2
    other = ("model.n_kv_head=0", "model.rope_theta=5", f"model.init={out}")
    with pytest.raises(
        MegatokenError, match=r"set model.n_kv_head=1 model.rope_theta=10000.0"
    ) as error:
        train(recipe, tmp_path / "other", *LLAMA, *other)
    assert error.value.code == ExitCode.CONFIG


def test_damaged_machine_json_is_measured_again(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    overrides = ["machine.micro_batch=auto", "sample.every=0", "budget.steps=2"]
    train(recipe, out, *overrides)
    facts = json.loads((out / "machine.json").read_text())
    for damaged in (
        '{"micro_batch": ',
        "[" * 100_000,
        '{"forms": []}',
        json.dumps(
            facts | {"micro_batch": "4", "forms": facts["forms"] | {"kernels": {"attention": []}}}
        ),
        json.dumps(
            facts
            | {"micro_batch": 999, "forms": {"circumstances": facts["forms"]["circumstances"]}}
        ),
    ):
        shutil.rmtree(out / "checkpoints")
        (out / "machine.json").write_text(damaged)
        assert train(recipe, out, *overrides).steps == 2
        mended = json.loads((out / "machine.json").read_text())
        assert mended["micro_batch"] in (1, 2, 4, 8)
        assert mended["forms"]["kernels"]["attention"] in ("flash", "blocked", "native")


def test_run_keeps_the_kernels_it_started_with(recipe: Path, tmp_path: Path) -> None:
    """Another kernel adds in another order: a resume that chose again would not be bit-identical."""
    out = tmp_path / "run"
    train(recipe, out, "sample.every=0", "budget.steps=2")
    facts = json.loads((out / "machine.json").read_text())
    assert facts["forms"]["kernels"]["attention"] in ("flash", "blocked", "native")
    other = "blocked" if facts["forms"]["kernels"]["attention"] == "flash" else "flash"
    facts["forms"]["kernels"]["attention"] = other
    (out / "machine.json").write_text(json.dumps(facts))
    shutil.rmtree(out / "checkpoints")
    train(recipe, out, "sample.every=0", "budget.steps=2")
    assert json.loads((out / "machine.json").read_text())["forms"]["kernels"]["attention"] == other
    shutil.rmtree(out / "checkpoints")
    train(recipe, out, "sample.every=0", "budget.steps=2", "machine.attention=explicit")
    facts = json.loads((out / "machine.json").read_text())
    assert facts["forms"]["kernels"]["attention"] == "explicit"
    shutil.rmtree(out / "checkpoints")
    facts["forms"]["kernels"]["attention"] = "fa3"  # of an older version
    (out / "machine.json").write_text(json.dumps(facts))
    train(recipe, out, "sample.every=0", "budget.steps=2", "machine.attention=explicit")
    assert (
        json.loads((out / "machine.json").read_text())["forms"]["kernels"]["attention"]
        == "explicit"
    )


@pytest.mark.fault(18)
def test_space_is_asked_for_the_checkpoints_that_are_missing(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, words = tmp_path / "run", (*SHORT, "budget.steps=4", "save.every=1", "save.keep_last=2")
    train(recipe, out, *words)
    assert list_steps(out / "checkpoints") == [3, 4]
    first, second, third, fourth = (
        out / "checkpoints" / f"step-{step:08d}" for step in (1, 2, 3, 4)
    )
    one = sum(path.stat().st_size for path in third.glob("*.safetensors")) + (
        1 << 20
    )  # with the slack
    disk = shutil.disk_usage(tmp_path)
    free = lambda: 0  # noqa: E731
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk._replace(free=free()))
    assert train(recipe, out, *words).code == ExitCode.DONE  # a finished run needs nothing
    with pytest.raises(StorageError, match=r"3 more checkpoints: .* needed, 0 B free"):
        train(recipe, tmp_path / "new", *words)

    shutil.rmtree(fourth)
    for copy, step in ((first, 1), (second, 2)):
        shutil.copytree(third, copy)
        (copy / "manifest.json").write_bytes(
            encode_manifest(replace(read_manifest(third), step=step))
        )
    free = lambda: 0 if first.exists() else one  # noqa: E731  # killed after a commit, before the oldest was removed
    assert train(recipe, out, *words).steps == 4
    assert list_steps(out / "checkpoints") == [3, 4]


def test_missing_dataset(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(MegatokenError) as error:
        train(recipe, tmp_path / "run", f"data.path={tmp_path}/nothing")
    assert error.value.code == ExitCode.DATA
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("thesis.txt", "years of work"),
        ("config.yaml", "defaults:\n  - db: mysql\n"),
        ("config.yaml", RECIPE),
        ("metrics.jsonl", '{"loss": 1.0}\n'),
        ("provenance.json", '{"version": 3}'),
        ("checkpoints/step-00000010/weights.pt", "of another program"),
    ],
)
def test_folder_that_is_not_a_run_is_not_touched(
    recipe: Path, tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(MegatokenError, match="something that is not a run") as error:
        train(recipe, tmp_path)
    assert error.value.code == ExitCode.CONFIG
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / name).read_text() == text


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
            with pytest.raises(StorageError, match=r"No space left on device.* — .* — "):
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
        with pytest.raises(MegatokenError, match=r"other settings: optim.lr: 0.01 -> 0.02"):
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
    load_tokenizer("bpe:300", lambda: iter(["the cat sat on the mat. " * 50])).save(
        out / "tokenizer"
    )
    (out / "config.yaml").unlink()
    assert train(recipe, out, "budget.steps=2").steps == 2  # a checkpoint has a copy of the recipe


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
    both = [
        [row for row in fingerprint(run)["rows"] if row["kind"] != "save"] for run in (out, clean)
    ]
    assert both[0] == both[1]
    assert fingerprint(out)["tensors"] == fingerprint(clean)["tensors"]


def test_a_checkpoint_on_its_way_is_committed_when_a_step_fails(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch)

    def fail_late(state: TrainState, *arguments: Any) -> torch.Tensor:
        return forward_loss(state, *arguments) * (float("nan") if state.step >= 2 else 1.0)

    monkeypatch.setattr("megatoken.train.step.forward_loss", fail_late)
    with pytest.raises(
        MegatokenError, match=r"loss nan, gradient norm nan — step \d+, batches "
    ) as error:
        train(recipe, tmp_path / "run", "save.every=1", "evaluate.every=0")
    assert error.value.code == ExitCode.NUMERICS
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert list_steps(tmp_path / "run" / "checkpoints")[-1] == status["step"] > 0


def slowly(monkeypatch: pytest.MonkeyPatch, fails: Sequence[int] = ()) -> None:
    """Write checkpoints slowly, and those of the steps in `fails` not at all."""
    write = save.write_files

    def write_slowly(
        draft: Path, step: int, files: Mapping[str, FileWriter], *rest: Any
    ) -> dict[str, FileEntry]:
        time.sleep(0.3)
        if step in fails:
            raise StorageError("disk full", draft)
        return write(draft, step, files, *rest)

    monkeypatch.setattr(save, "write_files", write_slowly)


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
