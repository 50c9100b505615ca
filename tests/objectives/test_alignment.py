"""Runs of dpo, kto, reward, grpo and ppo: kills, processes, what is refused, what is logged."""

import json
import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import ProcessException

from megatoken.cli.main import main
from megatoken.console import format_step
from megatoken.convert.export import export
from megatoken.convert.load_pretrained import load_pretrained
from megatoken.data.chat_template import add_control_tokens, find_template
from megatoken.data.prepare_chats import prepare_chats
from megatoken.data.sources import find_source
from megatoken.data.tokenizer import Tokenizer, load_tokenizer
from megatoken.errors import CheckpointError, ConfigError, ExitCode, MegatokenError
from megatoken.model.gpt import GPT
from megatoken.system.metrics_log import read_metrics
from megatoken.train.train import Summary
from tests import tiny_run
from tests.convert.models import TINY_GPT, llama_tokenizer, save_run
from tests.ranks import run_ranks, start_process
from tests.tiny_run import (
    MACHINE,
    assert_equal_tensors,
    newest_step,
    read_column,
    read_rows,
    read_tensors,
)

TOKENIZER = add_control_tokens(load_tokenizer("bytes"))
MODEL = replace(TINY_GPT, vocab_size=TOKENIZER.vocab_size, seq_len=64)
SETTINGS = (
    f"{MACHINE} machine.attention=explicit machine.micro_batch=4 machine.adamw=loop "
    "machine.fused=off budget.batch_tokens=512 budget.steps=6 budget.epochs=0 "
    "evaluate.every=3steps save.every=2steps"
)
LORA = "model.lora_rank=2 optim.lr=1e-2"
OBJECTIVES = {
    "dpo": "",
    "kto": "",
    "reward": "",
    "grpo": "objective.kl=0.1 objective.updates=2",
    "ppo": "objective.kl=0.1",
}


def prepare(
    folder: Path, name: str, rows: list[dict[str, Any]], tokenizer: Tokenizer = TOKENIZER
) -> Path:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare_chats(find_source(str(file)), folder / name, tokenizer, seq_len=64, val_fraction=0.2)
    return folder / name


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run `run` with random weights, and the datasets `pairs`, `rated` and `prompts`."""
    folder = tmp_path_factory.mktemp("base")
    save_run(folder / "run", GPT(MODEL, seed=1), TOKENIZER)
    pairs = [{"prompt": f"{n}?", "chosen": f"{n}", "rejected": "no"} for n in range(40)]
    prepare(folder, "pairs", pairs)
    rated = [
        {"prompt": pair["prompt"], "completion": pair[key], "label": key == "chosen"}
        for pair in pairs
        for key in ("chosen", "rejected")
    ]
    prepare(folder, "rated", rated)
    prepare(folder, "prompts", [{"prompt": f"{n}?", "answer": n} for n in range(40)])
    return folder


def pay_for_letters(prompt: str, answer: str, right: str) -> float:
    return sum(sign.isalpha() for sign in answer) / 6


def train(base: Path, name: str, out: Path, *settings: str, **options: Any) -> Summary:
    data = base / {"dpo": "pairs", "reward": "pairs", "kto": "rated"}.get(name, "prompts")
    given = [f"model.init={base / 'run'} data.path={data}", SETTINGS]
    if name in ("grpo", "ppo"):
        given.append("objective.group=4 objective.max_new_tokens=6")
        if "objective.reward=" not in " ".join(settings):
            options.setdefault("reward", pay_for_letters)
    return tiny_run.train(out, *given, *settings, recipe=name, **options)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_pretrained(out).model.state_dict()


def losses(out: Path) -> list[tuple[Any, ...]]:
    rows = [*read_rows(out, "train"), *read_rows(out, "val")]
    keys = ("kind", "step", "loss", "grad_norm", "reward", "accuracy", "kl")
    return [tuple(row.get(key) for key in keys) for row in rows]


def assert_equal_runs(out: Path, expected: Path) -> None:
    assert_equal_tensors(out, expected)
    assert losses(out) == losses(expected)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_stopped_runs_end_bit_identical(base: Path, tmp_path: Path, name: str):
    """Stopped at step 3, that of no save; the model that the run began with is gone by then.

    A stop waits for the last update on a rollout.
    """
    init, once, twice = tmp_path / "base", tmp_path / "once", tmp_path / "twice"
    shutil.copytree(base, init)
    settings = OBJECTIVES[name]
    assert train(init, name, once, settings).code == ExitCode.DONE
    stopped = train(init, name, twice, settings, stop=3)
    steps = 4 if "updates=2" in settings else 3
    assert (stopped.code, stopped.steps, stopped.reason) == (ExitCode.STOPPED, steps, "callback")
    shutil.rmtree(init / "run")
    assert train(init, name, twice, settings).code == ExitCode.DONE
    assert_equal_runs(twice, once)


def die_at(step: int, row: dict[str, Any]) -> None:
    if row["kind"] == "train" and row["step"] == step:
        os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(base: Path, name: str, out: Path, settings: str, step: int) -> None:
    train(base, name, out, settings, callbacks=[partial(die_at, step)])


@pytest.mark.parametrize(
    ("name", "settings", "step"),
    [
        ("dpo", "", 5),
        # Killed in the second of three updates.
        ("grpo", "objective.updates=3 budget.steps=9 save.every=3steps", 8),
    ],
)
def test_killed_runs_end_bit_identical(
    base: Path, tmp_path: Path, name: str, settings: str, step: int
):
    """Killed behind the second save, before which the first is committed."""
    killed, once = tmp_path / "killed", tmp_path / "once"
    process = start_process(train_and_die, base, name, killed, settings, step)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert newest_step(killed) < step
    for out in (killed, once):
        assert train(base, name, out, settings).code == ExitCode.DONE
    assert_equal_runs(killed, once)


def train_as_rank(
    rank: int, base: Path, name: str, settings: str, outs: dict[Path, str], step: int = 0
) -> None:
    """Train on one of two ranks, until it dies at a step. outs: run folders with their sharding."""
    for out, sharding in outs.items():
        split = f"machine.sharding={sharding} machine.micro_batch=2"
        callbacks = [partial(die_at, step)]
        train(base, name, out, OBJECTIVES[name], settings, split, callbacks=callbacks)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "dpo" else pytest.mark.slow) for name in OBJECTIVES],
)
def test_sharded_processes_train_as_one(base: Path, tmp_path: Path, name: str):
    """A rank has no held-out pairs; answers end after different numbers of tokens."""
    model = GPT(MODEL, seed=1)
    with torch.no_grad():  # the answer stops in one of four places
        model.norm.bias[0], model.tokens.weight[find_template(TOKENIZER).stop_ids[0], 0] = 3.0, 1.5
    save_run(tmp_path / "run", model, TOKENIZER)
    outs = {tmp_path / sharding: sharding for sharding in ("zero1", "zero2", "zero3")}
    settings = f"model.init={tmp_path / 'run'} budget.steps=4 evaluate.every=4steps save.every=0"
    run_ranks(train_as_rank, base, name, settings, outs, nprocs=2)
    train(base, name, tmp_path / "one", OBJECTIVES[name], settings)
    one, expected = weights(tmp_path / "one"), losses(tmp_path / "one")
    assert any(0 < row.get("stopped", 0.5) < 1 for row in read_metrics(tmp_path / "one"))
    for out in outs:
        found = weights(out)
        assert found.keys() == one.keys()
        for key in one:
            # A bias cancels in a pair: its gradient is rounding alone.
            if (name, key) != ("reward", "value_head.bias"):
                assert torch.allclose(one[key], found[key], rtol=0, atol=2e-6), (out, key)
        for a, b in zip(expected, losses(out), strict=True):
            assert a[:2] == b[:2]
            numbers = [[x for x in row[2:] if x is not None] for row in (a, b)]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-6, abs=1e-6)


def test_two_ranks_train_and_use_a_reward_model_with_an_output_layer_of_its_own(
    base: Path, tmp_path: Path
):
    """The loss does not use the output layer; of the one held-out prompt a rank has none."""
    save_run(tmp_path / "run", GPT(replace(MODEL, tie_embeddings=False), seed=1), TOKENIZER)
    settings = f"model.init={tmp_path / 'run'} budget.steps=2 save.every=0"
    train(base, "reward", tmp_path / "one", settings)
    for out, exact in (("two", ""), ("exact", "machine.deterministic=true")):
        outs = {tmp_path / out: "none"}
        run_ranks(train_as_rank, base, "reward", f"{settings} {exact}", outs, nprocs=2)
        for key, weight in weights(tmp_path / "one").items():
            assert torch.allclose(weight, weights(tmp_path / out)[key], rtol=0, atol=2e-5), key
    prompts = prepare(tmp_path, "few", [{"prompt": f"{n}?", "answer": n} for n in range(5)])
    scored = f"{settings} data.path={prompts} objective.reward={tmp_path / 'two'}"
    run_ranks(train_as_rank, base, "grpo", scored, {tmp_path / "grpo": "none"}, nprocs=2)
    assert [row["prompts"] for row in read_rows(tmp_path / "grpo", "val")] == [1, 1]


def test_a_sharded_run_that_was_killed_ends_bit_identical(base: Path, tmp_path: Path):
    """Its reference is lost: it is made again, of the model that the hash of the weights names."""
    killed, once = tmp_path / "killed", tmp_path / "once"
    settings = "evaluate.every=6"
    with pytest.raises(ProcessException):
        run_ranks(train_as_rank, base, "grpo", settings, {killed: "zero3"}, 5, nprocs=2)
    assert 0 < newest_step(killed) < 5
    reference = killed / "reference" / "reference.safetensors"
    content = reference.read_bytes()
    reference.unlink()
    outs = {killed: "zero3", once: "zero3"}
    run_ranks(train_as_rank, base, "grpo", settings, outs, nprocs=2)
    assert reference.read_bytes() == content
    assert_equal_runs(killed, once)


def train_lora_as_rank(rank: int, base: Path, out: Path) -> None:
    split = f"{LORA} machine.sharding=zero3 machine.micro_batch=2"
    assert train(base, "dpo", out, split).code == ExitCode.DONE


def test_a_sharded_model_trains_its_adapters_as_one_process_does(base: Path, tmp_path: Path):
    run_ranks(train_lora_as_rank, base, tmp_path / "split", nprocs=2)
    train(base, "dpo", tmp_path / "one", LORA)
    for key in ("loss", "grad_norm"):
        expected = pytest.approx(read_column(tmp_path / "one", key), rel=1e-5)
        assert read_column(tmp_path / "split", key) == expected
    split, one = weights(tmp_path / "split"), weights(tmp_path / "one")
    for key, tensor in one.items():
        assert torch.allclose(split[key], tensor, atol=1e-6), key


@pytest.mark.parametrize("name", OBJECTIVES)
def test_lora_trains_adapters_alone_and_resumes_bit_identical(
    base: Path, tmp_path: Path, name: str
):
    settings = f"{OBJECTIVES[name]} {LORA}"
    once, twice = tmp_path / "once", tmp_path / "twice"
    assert train(base, name, once, settings).code == ExitCode.DONE
    assert train(base, name, twice, settings, stop=3).code == ExitCode.STOPPED
    assert train(base, name, twice, settings).code == ExitCode.DONE
    assert_equal_runs(twice, once)
    found = read_tensors(once)
    for key, tensor in weights(base / "run").items():
        assert torch.equal(found.pop(f"model.safetensors/{key}"), tensor), key
    assert all(".lora." in key or "/value_head." in key for key in found)
    ups = [tensor for key, tensor in found.items() if key.endswith("lora.b")]
    assert len(ups) == 2 * 4
    assert all(tensor.any() for tensor in ups)
    assert (once / "reference").exists() == (
        name in ("dpo", "kto")
    )  # KL's is the model without adapters
    if "kl" in settings:
        kl = read_column(once, "kl")
        assert abs(kl[1]) < 1e-6 < kl[6]


def test_adapters_of_a_run_are_exported_and_read(base: Path, tmp_path: Path):
    init, run = tmp_path / "init", tmp_path / "run"
    shutil.copytree(base, init)
    train(init, "dpo", run, LORA)
    assert export(run, "peft", tmp_path / "lora")["max_relative_difference"] < 2e-6
    merged, read = weights(run), weights(tmp_path / "lora")
    assert merged.keys() == read.keys()
    assert max(float((merged[key] - read[key]).abs().max()) for key in merged) < 1e-6
    train(base, "dpo", tmp_path / "next", f"model.init={tmp_path / 'lora'}", stop=1)
    assert weights(tmp_path / "next").keys() == merged.keys()
    with pytest.raises(ConfigError):
        export(init / "run", "peft", tmp_path / "none")
    shutil.rmtree(init / "run")
    save_run(init / "run", GPT(MODEL, seed=3), TOKENIZER)
    with pytest.raises(CheckpointError):
        export(run, "peft", tmp_path / "other")


def test_what_is_logged(base: Path, tmp_path: Path):
    train(base, "grpo", tmp_path / "run", "objective.kl=0.1", reward=partial(pay_for_letters))
    rows = read_metrics(tmp_path / "run")
    first = next(row for row in rows if row["kind"] == "train")
    names = {
        "reward",
        "reward_std",
        "groups_without_difference",
        "answer_tokens",
        "stopped",
        "kl",
        "clip_share",
    }
    assert names <= first.keys()
    assert first["kl"] == pytest.approx(0, abs=1e-6)  # the model is its reference
    held_out = read_rows(tmp_path / "run", "val")
    assert [row["step"] for row in held_out] == [0, 3, 6]
    assert all(row["loss"] == -row["reward"] and row["prompts"] > 0 for row in held_out)
    assert "| reward 0." in format_step(first, 6, 0, 0.0).split("| loss")[0]


def test_a_reward_model_takes_the_place_of_a_rule(base: Path, tmp_path: Path):
    scorer, out = tmp_path / "scorer", tmp_path / "run"
    train(base, "reward", scorer, "optim.lr=3e-3 budget.steps=20")
    assert {*read_column(scorer, "mfu").values()} == {None}
    assert train(base, "grpo", out, f"objective.reward={scorer}").steps == 6
    assert min(read_column(out, "reward_std").values()) > 0
    with pytest.raises(ConfigError):
        train(base, "grpo", tmp_path / "other", f"objective.reward={base / 'run'}")


def test_a_damaged_reference_is_made_again_or_missed(base: Path, tmp_path: Path):
    init, once, out = tmp_path / "base", tmp_path / "once", tmp_path / "run"
    shutil.copytree(base, init)
    train(init, "dpo", once)
    train(init, "dpo", out, stop=3)
    reference = out / "reference" / "reference.safetensors"
    content = reference.read_bytes()
    reference.write_bytes(content[:-4] + b"flip")
    assert train(init, "dpo", out).code == ExitCode.DONE
    assert reference.read_bytes() == content
    assert losses(out) == losses(once)
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    reference.unlink()
    shutil.rmtree(init / "run")
    save_run(init / "run", GPT(MODEL, seed=2), TOKENIZER)
    with pytest.raises(CheckpointError):
        train(init, "dpo", out)


OTHER_MODEL = "data.path=OTHER"  # of another tokenizer


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", "objective.group=1"),
        ("ppo", "objective.group=3"),
        ("grpo", "objective.group=3"),
        ("grpo", "model.value_head=true"),
        ("ppo", "model.value_head=false"),
        ("grpo", "objective.updates=4"),
        ("dpo", "machine.tensor_parallel=2"),
        ("ppo", "machine.sharding=zero3 machine.tensor_parallel=2"),
        ("grpo", "machine.sharding=zero2 machine.master_weights=on"),
        ("grpo", "objective.reward=exakt"),
        ("grpo", "objective.reward=os:remove"),
        ("grpo", "data.path=BASE/pairs"),
        ("dpo", "data.path=BASE/prompts"),
        ("dpo", "data.path=BASE/rated"),
        ("kto", "data.path=BASE/pairs"),
        ("grpo", "objective.max_new_tokens=64"),
        ("grpo", OTHER_MODEL),
    ],
)
def test_what_does_not_fit(base: Path, tmp_path: Path, name: str, settings: str):
    if settings == OTHER_MODEL:
        rows = [{"prompt": f"{n}?", "answer": n} for n in range(40)]
        prepare(tmp_path, "other", rows, add_control_tokens(llama_tokenizer()))
    settings = settings.replace("BASE", str(base)).replace("OTHER", str(tmp_path / "other"))
    with pytest.raises(MegatokenError) as error:
        train(base, name, tmp_path / "run", settings, reward=None)
    assert error.value.code in (ExitCode.CONFIG, ExitCode.DATA)


def test_a_value_head_is_left_out_of_an_export(base: Path, tmp_path: Path):
    train(base, "reward", tmp_path / "run", "budget.steps=2")
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf")]) == ExitCode.DONE
    assert load_pretrained(tmp_path / "hf").model.value_head is None


def test_a_reward_that_raises_ends_the_run(base: Path, tmp_path: Path):
    def fail(prompt: str, answer: str, right: str) -> float:
        raise KeyError(right)

    with pytest.raises(ConfigError):
        train(base, "grpo", tmp_path / "run", reward=fail)
