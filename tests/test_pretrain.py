"""The program: what it writes down, and that nothing a machine can do to it changes the result."""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from megatoken.checkpoint.store import steps
from megatoken.console import Console
from megatoken.data.tokenizer import load_saved_tokenizer, load_tokenizer
from megatoken.errors import Exit, Fault
from megatoken.plot import draw_weights
from megatoken.pretrain import Summary, pretrain
from megatoken.recipe import resolve
from megatoken.train.journal import read_metrics
from megatoken.verify import verify_folder

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


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe beside foreign shards of bytes that have something to learn."""
    folder = tmp_path_factory.mktemp("tiny")
    text = b"to be or not to be, that is the question. " * 300
    np.save(folder / "train_0.npy", np.frombuffer(text, dtype=np.uint8).astype(np.uint16))
    np.save(folder / "val_0.npy", np.frombuffer(text[:1000], dtype=np.uint8).astype(np.uint16))
    path = folder / "tiny.yaml"
    path.write_text(RECIPE.replace("DATA", str(folder / "*.npy")))
    return path


def train(recipe: Path, out: Path, *overrides: str) -> Summary:
    return pretrain(resolve(str(recipe), overrides), out, Console(to_stderr=True))


def fingerprint(out: Path) -> dict[str, object]:
    """Everything that must be equal bit for bit: newest weights and moments, and the log of losses."""
    newest = out / "checkpoints" / f"step-{steps(out / 'checkpoints')[-1]:08d}"
    tensors = {**load_file(newest / "model.safetensors"), **load_file(newest / "optimizer.safetensors")}
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].numpy().tobytes())
    keys = ("kind", "step", "tokens", "loss", "grad_norm", "lr", "text", "target_tokens")
    rows = [{k: row[k] for k in keys if k in row} for row in read_metrics(out) if row["kind"] != "event"]
    rows.sort(key=lambda row: row["step"])  # a save is told when it is committed: steps later
    return {"tensors": digest.hexdigest(), "rows": rows}


@pytest.fixture(scope="module")
def clean(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("clean") / "run"
    summary = train(recipe, out)
    assert (summary.code, summary.steps, summary.tokens) == (Exit.DONE, 40, 40 * 128)
    return out


def test_the_run_folder_holds_what_is_drawn(clean: Path) -> None:
    rows = read_metrics(clean)
    trained = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in trained] == list(range(1, 41))
    assert {"loss", "grad_norm", "lr", "seconds", "tokens_per_second", "mfu", "mfu_causal"} <= trained[0].keys()
    assert trained[-1]["tokens"] == 5120
    assert trained[0]["loss"] == pytest.approx(np.log(257), abs=0.2)
    assert trained[-1]["loss"] < trained[0]["loss"] - 2
    assert [row["step"] for row in rows if row["kind"] == "val"] == [0, 10, 20, 30, 40]
    assert [row["step"] for row in rows if row["kind"] == "save"] == [7, 14, 21, 28, 35, 40]
    assert [row["step"] for row in rows if row["kind"] == "sample"] == [20, 40]
    assert steps(clean / "checkpoints") == [28, 35, 40]
    assert (clean / "samples" / "step-00000040.txt").stat().st_size > 0
    status = json.loads((clean / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, 40)
    assert json.loads((clean / "provenance.json").read_text())["precision"] == "fp32"


def test_a_finished_run_is_left_as_it_is(clean: Path, recipe: Path) -> None:
    before = fingerprint(clean)
    files = {p: p.read_bytes() for p in clean.rglob("*") if p.is_file() and p.name != ".lock"}
    summary = train(recipe, clean)
    assert {p: p.read_bytes() for p in clean.rglob("*") if p.is_file() and p.name != ".lock"} == files
    assert summary.code == Exit.DONE
    assert summary.steps == 40
    assert fingerprint(clean) == before


@pytest.mark.parametrize("machine", ["machine.micro_batch=1", "machine.loss_chunk=0", "machine.micro_batch=auto"])
def test_the_machine_does_not_change_the_curve(recipe: Path, tmp_path: Path, machine: str) -> None:
    losses = []
    for index, knobs in enumerate([[], [machine]]):
        train(recipe, tmp_path / str(index), "model.dropout=0", "budget.steps=10", "sample.every=0", *knobs)
        losses.append([row["loss"] for row in read_metrics(tmp_path / str(index)) if row["kind"] in ("train", "val")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_other_science_is_refused_with_the_difference(clean: Path, recipe: Path) -> None:
    with pytest.raises(Fault, match=r"optim.lr: 0.01 -> 0.02; budget.steps: 40 -> 50") as fault:
        train(recipe, clean, "optim.lr=2e-2", "budget.steps=50")
    assert fault.value.code == Exit.CONFIG


def test_other_data_is_refused(clean: Path, recipe: Path, tmp_path: Path) -> None:
    for name in ("train_0.npy", "val_0.npy"):
        ids = np.load(recipe.parent / name)
        np.save(tmp_path / name, np.roll(ids, 1))
    with pytest.raises(Fault, match="was trained on dataset") as fault:
        train(recipe, clean, f"data.path={tmp_path}/*.npy")
    assert fault.value.code == Exit.DATA


def test_a_damaged_checkpoint_is_named_and_passed_over(recipe: Path, tmp_path: Path, clean: Path) -> None:
    out = tmp_path / "run"
    train(recipe, out)
    newest = out / "checkpoints" / "step-00000040" / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 4
    newest.write_bytes(data)
    train(recipe, out)
    assert fingerprint(out) == fingerprint(clean)
    events = [row for row in read_metrics(out) if row["kind"] == "event"]
    assert any("model.safetensors" in row["message"] for row in events if row["what"] == "damaged checkpoint")


def launch(recipe: Path, out: Path, *overrides: str) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "megatoken.cli", "train", str(recipe), "--out", str(out), *overrides]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_step(out: Path, step: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if (out / "metrics.jsonl").exists() and f'"step": {step},' in (out / "metrics.jsonl").read_text():
            return
        time.sleep(0.005)
    assert process.poll() is not None, "no such step within a minute"


def test_killed_runs_end_bit_identical(recipe: Path, tmp_path: Path, clean: Path) -> None:
    rng = random.Random(0)
    out = tmp_path / "run"
    kills = 0
    for _ in range(3):
        process = launch(recipe, out)
        wait_for_step(out, rng.randrange(3, 35), process)
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert kills >= 2
    assert train(recipe, out).code == Exit.DONE
    assert fingerprint(out) == fingerprint(clean)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to handle")
def test_a_stop_loses_no_step(recipe: Path, tmp_path: Path, clean: Path) -> None:
    out = tmp_path / "run"
    process = launch(recipe, out)
    wait_for_step(out, 9, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == Exit.STOPPED
    last = max(row["step"] for row in read_metrics(out) if row["kind"] == "train")
    assert steps(out / "checkpoints")[-1] == last
    assert json.loads((out / "status.json").read_text())["state"] == "stopped"
    assert train(recipe, out).code == Exit.DONE
    both = fingerprint(out), fingerprint(clean)
    assert both[0]["tensors"] == both[1]["tensors"]
    assert [r for r in both[0]["rows"] if r["kind"] != "save"] == [r for r in both[1]["rows"] if r["kind"] != "save"]  # type: ignore[attr-defined]


def test_the_time_limit_stops_and_goes_on(recipe: Path, tmp_path: Path) -> None:
    summary = train(recipe, tmp_path / "run", "save.time_limit=6s", "budget.steps=100000", "sample.every=0")
    assert summary.code == Exit.STOPPED
    assert summary.reason == "time limit 6s"
    assert summary.steps < 100000  # on a slow machine perhaps not even one
    assert steps(tmp_path / "run" / "checkpoints")[-1] == summary.steps


def test_two_runs_do_not_share_a_folder(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = launch(recipe, out, "budget.steps=100000", "sample.every=0", "save.every=0")
    try:
        wait_for_step(out, 1, process)
        began = time.monotonic()
        with pytest.raises(Fault, match=f"pid {process.pid} on") as fault:
            train(recipe, out)
        assert fault.value.code == Exit.STORAGE
        assert time.monotonic() - began < 2
    finally:
        process.kill()
        process.wait()


def test_starting_from_the_weights_of_a_run(clean: Path, recipe: Path, tmp_path: Path) -> None:
    train(recipe, tmp_path / "run", f"model.init={clean}", "budget.steps=1")
    first = next(row for row in read_metrics(tmp_path / "run") if row["kind"] == "val")
    last = [row for row in read_metrics(clean) if row["kind"] == "val"][-1]
    assert first["loss"] == pytest.approx(last["loss"], rel=1e-6)
    with pytest.raises(Fault, match=r"set model.n_layer=2") as fault:
        train(recipe, tmp_path / "other", f"model.init={clean}", "model.n_layer=3")
    assert fault.value.code == Exit.CONFIG


LLAMA = (
    "model.norm=rmsnorm",
    "model.positions=rotary",
    "model.mlp=swiglu",
    "model.bias=false",
    "model.tied=false",
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
    assert [path.name for path in draw_weights(out, tmp_path)] == ["matrix.png"]  # there are no embeddings of positions
    # Places are computed, so a context may become longer than the one learnt with.
    longer = tmp_path / "longer"
    train(recipe, longer, *LLAMA, f"model.init={out}", "model.seq_len=32", "budget.steps=1")
    first = next(row for row in read_metrics(longer) if row["kind"] == "val")
    assert first["loss"] < losses[0] - 2
    other = ("model.n_kv_head=0", "model.rope_theta=5", f"model.init={out}")
    with pytest.raises(Fault, match=r"set model.n_kv_head=1 model.rope_theta=10000.0") as fault:
        train(recipe, tmp_path / "other", *LLAMA, *other)
    assert fault.value.code == Exit.CONFIG


def test_half_a_memory_of_the_micro_batch_is_measured_again(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    knobs = ["machine.micro_batch=auto", "sample.every=0", "budget.steps=2"]
    train(recipe, out, *knobs)
    shutil.rmtree(out / "checkpoints")
    (out / "machine.json").write_text('{"micro_batch": ')
    assert train(recipe, out, *knobs).steps == 2
    assert json.loads((out / "machine.json").read_text())["micro_batch"] in (1, 2, 4, 8)


def test_a_run_keeps_the_forms_it_began_with(recipe: Path, tmp_path: Path) -> None:
    """Another form adds in another order: a resume that chose anew would end at other bits."""
    out = tmp_path / "run"
    train(recipe, out, "sample.every=0", "budget.steps=2")
    facts = json.loads((out / "machine.json").read_text())
    assert facts["forms"]["kernels"]["attention"] in ("flash", "blocked")
    other = "blocked" if facts["forms"]["kernels"]["attention"] == "flash" else "flash"
    facts["forms"]["kernels"]["attention"] = other
    (out / "machine.json").write_text(json.dumps(facts))
    shutil.rmtree(out / "checkpoints")
    train(recipe, out, "sample.every=0", "budget.steps=2")
    assert json.loads((out / "machine.json").read_text())["forms"]["kernels"]["attention"] == other
    shutil.rmtree(out / "checkpoints")
    train(recipe, out, "sample.every=0", "budget.steps=2", "machine.attention=explicit")
    assert json.loads((out / "machine.json").read_text())["forms"]["kernels"]["attention"] == "explicit"


def test_explaining_says_what_was_measured(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(
        resolve(str(recipe), ["sample.every=0", "budget.steps=1", "model.dropout=0"]),
        tmp_path / "run",
        Console(),
        explain=True,
    )
    said = capsys.readouterr().out
    assert re.search(r"forms +linear \w+, attention \w+", said)
    assert re.search(r"attention +(flash|blocked) \(flash [\d.e-]+ ms, blocked [\d.e-]+ ms\)", said)
    assert "GOMP_SPINCOUNT" in said


def test_no_data(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(Fault) as fault:
        train(recipe, tmp_path / "run", f"data.path={tmp_path}/nothing")
    assert fault.value.code == Exit.DATA
    assert not (tmp_path / "run").exists()


def test_a_folder_with_something_else_is_left_alone(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(Fault, match="something that is not a run") as fault:
        train(recipe, tmp_path)
    assert fault.value.code == Exit.CONFIG
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_tokenizer_is_the_one_trained_with_whatever_was_there(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(recipe, out, "budget.steps=1")
    shutil.rmtree(out / "checkpoints")  # as if that start had come to nothing
    load_tokenizer("bpe:300", lambda: iter(["the cat sat on the mat. " * 50])).save(out / "tokenizer")
    train(recipe, out, "budget.steps=2")
    assert load_saved_tokenizer(out / "tokenizer").name == "bytes"
    assert verify_folder(out).faults == []
    load_tokenizer("bpe:300", lambda: iter(["the cat sat on the mat. " * 50])).save(out / "tokenizer")
    (out / "config.yaml").unlink()
    assert train(recipe, out, "budget.steps=2").steps == 2  # a checkpoint has a copy of the recipe


def test_a_prompt_without_room_is_refused_at_once(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(Fault, match=r"sample\.prompt has 20 tokens, the model's context is 16"):
        train(recipe, tmp_path / "run", f"sample.prompt={'x' * 20}")
    assert not (tmp_path / "run").exists()


def test_a_reader_that_goes_away_does_not_stop_training(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [sys.executable, "-m", "megatoken.cli", "train", str(recipe), "--out", str(out)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=120) == Exit.DONE
    assert steps(out / "checkpoints")[-1] == 40


def test_a_sample_that_cannot_be_kept_does_not_stop_training(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").touch()
    (out / "samples").write_text("in the way")
    assert train(recipe, out, "budget.steps=20").code == Exit.DONE
    assert [row["step"] for row in read_metrics(out) if row["kind"] == "sample"] == [20]
