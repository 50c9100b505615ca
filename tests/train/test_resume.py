"""Runs of every kind end with the same bits after a stop or kill, and losses on two ranks."""

import shutil
import signal
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from megatoken.base.errors import ExitCode
from megatoken.model.gpt import GPT
from megatoken.posttrain.objectives import Policy
from megatoken.text.chat_template import find_template
from megatoken.text.load_pretrained import load_pretrained
from megatoken.train.train import Summary
from tests import tiny_run
from tests.convert.models import TINY_GPT, save_run
from tests.ranks import run_ranks, start_process
from tests.tiny_run import (
    MACHINE,
    fingerprint,
    newest_step,
    read_column,
    read_losses,
    read_rows,
    read_tensors,
)
from tests.train.search import ROWS, SAMPLED, TOKENIZER, die_at, pay_for_letters, write_data

pytestmark = pytest.mark.long  # every kind of run is trained once for all tests

MODEL = replace(TINY_GPT, vocab_size=TOKENIZER.vocab_size, seq_len=64)
SETTINGS = (
    f"{MACHINE} machine.micro_batch=8 machine.adamw=loop machine.fused=off budget.batch_tokens=512 "
    "budget.steps=6 budget.epochs=0 evaluate.every=2steps save.every=2steps sample.every=0 "
    "sample.at_start=false"
)
LORA = "model.lora_rank=2 optim.lr=1e-2"
KL = "objective.kl=0.1 objective.group=4 objective.max_new_tokens=6"
RUNS = {
    "mixture": "data.path=DATA/a/*.npy:3,DATA/b/*.npy:1 model.dropout=0.1",
    "mask": "data.path=DATA/a/*.npy data.document_mask=true machine.loss_chunk=32",
    "ramp": "data.path=DATA/a/*.npy budget.batch_start=128 budget.batch_ramp=1024",
    "sft": LORA,
    "dpo": "",
    "kto": LORA,
    "reward": LORA,
    "grpo": f"{KL} objective.updates=2",
    "ppo": f"{KL} {LORA}",
}
LAYOUTS = dict(zip(RUNS, cycle(("none", "zero1", "zero2", "zero3")), strict=False))


def train(folder: Path, name: str, out: Path, *settings: str, **options: Any) -> Summary:
    given = [SETTINGS, RUNS[name].replace("DATA", str(folder))]
    if name in ROWS:
        given.append(f"model.init={folder / 'init'} data.path={folder / ROWS[name]}")
        options["recipe"] = name
    if name in SAMPLED:
        options["reward"] = pay_for_letters
    return tiny_run.train(out, *given, *settings, **options)


def train_all(rank: int, folder: Path) -> None:
    """Train the first half of every run on one of two ranks, with other kernels."""
    for name, layout in LAYOUTS.items():
        split = f"machine.sharding={layout} machine.micro_batch=2 machine.attention=explicit"
        train(folder, name, folder / "split" / name, split, stop=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return data, a model `init` whose completions stop at different lengths, and runs."""
    folder = tmp_path_factory.mktemp("runs")
    write_data(folder)
    model = GPT(MODEL, seed=1)
    with torch.no_grad():
        model.norm.bias[0], model.tokens.weight[find_template(TOKENIZER).stop_ids[0], 0] = 3.0, 1.5
    save_run(folder / "init", model, TOKENIZER)
    for name in RUNS:
        train(folder, name, folder / "whole" / name)
    run_ranks(train_all, folder, nprocs=2)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_ends_with_the_same_bits(folder: Path, tmp_path: Path, name: str):
    """Stopped at step 3, that of no save; the model that the run began with is gone by then.

    A stop waits for the last update on a rollout.
    """
    init, out = tmp_path / "init", tmp_path / "run"
    shutil.copytree(folder / "init", init)
    own = f"model.init={init}" if name in ROWS else ""
    stopped = train(folder, name, out, own, stop=3)
    steps = 4 if name == "grpo" else 3
    assert (stopped.code, stopped.steps, stopped.reason) == (ExitCode.STOPPED, steps, "callback")
    shutil.rmtree(init)
    train(folder, name, out, own)
    assert fingerprint(out) == fingerprint(folder / "whole" / name)


@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_a_killed_run_ends_with_the_same_bits(folder: Path, tmp_path: Path, name: str):
    """Killed after the second save, so the first is committed, and between updates on a rollout."""
    out = tmp_path / "run"
    process = start_process(partial(train, callbacks=[partial(die_at, 5)]), folder, name, out)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert newest_step(out) < 5
    train(folder, name, out)
    assert fingerprint(out) == fingerprint(folder / "whole" / name)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_as_one(folder: Path, name: str):
    """The second one has no held-out pairs; completions end after different numbers of tokens."""
    for kind, key in (("train", "loss"), ("train", "grad_norm"), ("val", "loss")):
        expected = read_column(folder / "whole" / name, key, kind)
        found = read_column(folder / "split" / name, key, kind)
        assert len(found) >= 2
        assert found == pytest.approx({at: expected[at] for at in found}, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in RUNS if LORA in RUNS[name]])
def test_lora_trains_adapters_alone(folder: Path, name: str):
    out = folder / "whole" / name
    found, init = read_tensors(out), load_pretrained(folder / "init").model.state_dict()
    kept = {key: found.pop(f"model.safetensors/{key}") for key in init}
    torch.testing.assert_close(kept, init, rtol=0, atol=0)
    assert all(".lora." in key or "/value_head." in key for key in found)
    ups = [tensor for key, tensor in found.items() if key.endswith("lora.b")]
    assert [bool(tensor.any()) for tensor in ups] == 2 * 4 * [True]
    assert (out / "reference").exists() == (name == "kto")  # KL's is the model without adapters


@pytest.mark.parametrize("name", SAMPLED)
def test_rollouts_are_logged(folder: Path, name: str):
    rows, held_out = (read_rows(folder / "whole" / name, kind) for kind in ("train", "val"))
    assert abs(rows[0]["kl"]) < 1e-6 < rows[-1]["kl"]  # the model is its reference
    assert 0 < rows[0]["stopped"] < 1
    assert Policy().show(rows[0])[0].startswith("reward 0.")
    assert [row["step"] for row in held_out] == [0, 2, 4, 6]
    assert all(row["loss"] == -row["reward"] and row["prompts"] > 0 for row in held_out)


def test_the_mask_changes_the_losses_and_the_compiler_does_not(folder: Path, tmp_path: Path):
    losses = read_losses(folder / "whole/mask")
    for name, setting in (
        ("unmasked", "data.document_mask=false"),
        ("compiled", "machine.compile=blocks"),
    ):
        train(folder, "mask", tmp_path / name, setting)
        is_same = read_losses(tmp_path / name) == pytest.approx(losses, rel=1e-5)
        assert is_same == (name == "compiled")
