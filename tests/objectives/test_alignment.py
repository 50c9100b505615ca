"""Runs of dpo, reward, grpo and ppo from a model that talks: kills, processes, what is refused, what is logged."""

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

from megatoken.checkpoint.commit import list_steps
from megatoken.cli.main import main
from megatoken.config.load import resolve
from megatoken.console import Console, format_step
from megatoken.convert.load_pretrained import load_pretrained
from megatoken.data.chat_template import add_control_tokens, find_template
from megatoken.data.prepare_chats import prepare_chats
from megatoken.data.sources import find_source
from megatoken.data.tokenizer import Tokenizer, load_tokenizer
from megatoken.errors import CheckpointError, ConfigError, DataError, ExitCode
from megatoken.launch.local import find_free_port
from megatoken.model.gpt import GPT
from megatoken.system.metrics_log import read_metrics
from megatoken.train.train import Summary, Trainer
from tests.convert.models import TINY_GPT, llama_tokenizer, save_run
from tests.ranks import run_ranks, start_process
from tests.tiny_run import assert_equal_tensors, stop_at

TOKENIZER = add_control_tokens(load_tokenizer("bytes"))
MODEL = replace(TINY_GPT, vocab_size=TOKENIZER.vocab_size, seq_len=64)
SETTINGS = [
    *(
        "machine.device=cpu",
        "machine.precision=fp32",
        "machine.threads=1",
        "machine.micro_batch=4",
        "log.plots=false",
    ),
    *(
        "machine.attention=explicit",
        "machine.gemm_backend=torch",
        "machine.adamw=loop",
        "machine.fused=off",
    ),
    *(
        "budget.batch_tokens=512",
        "budget.steps=6",
        "budget.epochs=0",
        "evaluate.every=3steps",
        "save.every=2steps",
    ),
]
ROLLOUTS = ["objective.group=4", "objective.max_new_tokens=6"]


def prepare(
    folder: Path, name: str, rows: list[dict[str, Any]], tokenizer: Tokenizer = TOKENIZER
) -> Path:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare_chats(find_source(str(file)), folder / name, tokenizer, seq_len=64, val_fraction=0.2)
    return folder / name


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run `run` with random weights, and the datasets `pairs` and `prompts`."""
    folder = tmp_path_factory.mktemp("base")
    save_run(folder / "run", GPT(MODEL, seed=1), TOKENIZER)
    pairs = [{"prompt": f"{n}?", "chosen": f"{n}", "rejected": "no"} for n in range(40)]
    prepare(folder, "pairs", pairs)
    prepare(folder, "prompts", [{"prompt": f"{n}?", "answer": n} for n in range(40)])
    return folder


def pay_for_letters(prompt: str, answer: str, right: str) -> float:
    return sum(sign.isalpha() for sign in answer) / 6


def train(base: Path, name: str, out: Path, *words: str, **options: Any) -> Summary:
    data = base / ("pairs" if name in ("dpo", "reward") else "prompts")
    given = [f"model.init={base / 'run'}", f"data.path={data}", *SETTINGS]
    given += ROLLOUTS if name in ("grpo", "ppo") else []
    if name in ("grpo", "ppo") and not any(word.startswith("objective.reward=") for word in words):
        options.setdefault("reward", pay_for_letters)
    options.setdefault("console", Console(quiet=True))
    return Trainer(resolve(name, [*given, *words]), out, **options).fit()


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_pretrained(out).model.state_dict()


def losses(out: Path) -> list[tuple[Any, ...]]:
    rows = [row for row in read_metrics(out) if row["kind"] in ("train", "val")]
    keys = ("kind", "step", "loss", "grad_norm", "reward", "accuracy", "kl")
    return sorted(tuple(row.get(key) for key in keys) for row in rows)


def assert_equal_runs(out: Path, expected: Path) -> None:
    assert_equal_tensors(out, expected)
    assert losses(out) == losses(expected)


@pytest.mark.parametrize(
    ("name", "words"),
    [("dpo", []), ("reward", []), ("grpo", ["objective.kl=0.1"]), ("ppo", ["objective.kl=0.1"])],
)
def test_stopped_runs_end_bit_identical(
    base: Path, tmp_path: Path, name: str, words: list[str]
) -> None:
    """Stopped at step 3, that of no save; the model that the run began with is gone by then."""
    init = tmp_path / "base"
    shutil.copytree(base, init)
    assert train(init, name, tmp_path / "whole", *words).code == ExitCode.DONE
    assert (
        train(init, name, tmp_path / "parts", *words, callbacks=[stop_at(3)]).code
        == ExitCode.STOPPED
    )
    shutil.rmtree(init / "run")
    assert train(init, name, tmp_path / "parts", *words).code == ExitCode.DONE
    assert_equal_runs(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_stop_waits_for_the_last_update_on_a_rollout(
    base: Path, tmp_path: Path, name: str
) -> None:
    words = ["objective.updates=2", "objective.kl=0.1", "save.every=0"]
    assert train(base, name, tmp_path / "whole", *words).code == ExitCode.DONE
    stopped = train(base, name, tmp_path / "parts", *words, callbacks=[stop_at(3)])
    assert (stopped.code, stopped.steps, stopped.reason) == (ExitCode.STOPPED, 4, "callback")
    assert train(base, name, tmp_path / "parts", *words).code == ExitCode.DONE
    assert_equal_runs(tmp_path / "parts", tmp_path / "whole")


def train_and_die(base: Path, name: str, out: Path, words: list[str], step: int) -> None:
    def die(row: dict[str, Any]) -> None:
        if row["kind"] == "train" and row["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)

    train(base, name, out, *words, callbacks=[die])


@pytest.mark.parametrize(
    ("name", "words", "step"),
    [
        ("dpo", [], 5),
        (
            "grpo",
            ["objective.updates=3", "budget.steps=9", "save.every=3steps"],
            8,
        ),  # the second of three updates
    ],
)
def test_killed_runs_end_bit_identical(
    base: Path, tmp_path: Path, name: str, words: list[str], step: int
) -> None:
    """Killed behind the second save, before which the first is committed."""
    process = start_process(train_and_die, base, name, tmp_path / "killed", words, step)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list_steps(tmp_path / "killed" / "checkpoints")[-1] < step
    for out in ("killed", "whole"):
        assert train(base, name, tmp_path / out, *words).code == ExitCode.DONE
    assert_equal_runs(tmp_path / "killed", tmp_path / "whole")


OBJECTIVES = {
    "dpo": [],
    "reward": [],
    "grpo": ["objective.kl=0.1", "objective.updates=2"],
    "ppo": ["objective.kl=0.1"],
}


def train_as_ranks(
    rank: int,
    base: Path,
    name: str,
    words: list[str],
    outs: dict[Path, str],
    port: int,
    die_at: int,
) -> None:
    """One of two ranks; outs: run folders with their sharding."""
    facts = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_PORT": port,
    }
    os.environ.update({key: str(value) for key, value in facts.items()})

    def die(row: dict[str, Any]) -> None:
        if row["kind"] == "train" and row["step"] == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    for out, sharding in outs.items():
        own = [*OBJECTIVES[name], *words, f"machine.sharding={sharding}", "machine.micro_batch=2"]
        train(base, name, out, *own, callbacks=[die])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "dpo" else pytest.mark.slow) for name in OBJECTIVES],
)
def test_sharded_processes_train_as_one(base: Path, tmp_path: Path, name: str) -> None:
    """All held-out pairs are in one batch, so that a rank has none; answers end after different numbers of tokens."""
    model = GPT(MODEL, seed=1)
    with torch.no_grad():  # the answer stops in one of four places
        model.norm.bias[0], model.tokens.weight[find_template(TOKENIZER).stop_ids[0], 0] = 3.0, 1.5
    save_run(tmp_path / "run", model, TOKENIZER)
    outs = {tmp_path / sharding: sharding for sharding in ("zero1", "zero2", "zero3")}
    words = [
        f"model.init={tmp_path / 'run'}",
        "budget.steps=4",
        "evaluate.every=4steps",
        "save.every=0",
    ]
    run_ranks(train_as_ranks, base, name, words, outs, find_free_port(), 0, nprocs=2)
    train(base, name, tmp_path / "one", *OBJECTIVES[name], *words)
    one, expected = weights(tmp_path / "one"), losses(tmp_path / "one")
    assert any(0 < row.get("stopped", 0.5) < 1 for row in read_metrics(tmp_path / "one"))
    for out in outs:
        found = weights(out)
        assert found.keys() == one.keys()
        for key in one:
            if (name, key) != (
                "reward",
                "value_head.bias",
            ):  # cancels in a pair: its gradient is rounding alone
                assert torch.allclose(one[key], found[key], rtol=0, atol=2e-6), (out, key)
        for a, b in zip(expected, losses(out), strict=True):
            assert a[:2] == b[:2]
            known = [[x for x in row[2:] if x is not None] for row in (a, b)]
            assert known[0] == pytest.approx(known[1], rel=1e-6, abs=1e-6)


def test_two_ranks_train_and_use_a_reward_model_with_an_output_layer_of_its_own(
    base: Path, tmp_path: Path
) -> None:
    """The loss does not use the output layer; of the one held-out prompt a rank has none."""
    save_run(tmp_path / "run", GPT(replace(MODEL, tie_embeddings=False), seed=1), TOKENIZER)
    words = [f"model.init={tmp_path / 'run'}", "budget.steps=2", "save.every=0"]
    exact = [*words, "machine.deterministic=true"]
    train(base, "reward", tmp_path / "one", *words)
    run_ranks(
        train_as_ranks,
        base,
        "reward",
        words,
        {tmp_path / "two": "none"},
        find_free_port(),
        0,
        nprocs=2,
    )
    run_ranks(
        train_as_ranks,
        base,
        "reward",
        exact,
        {tmp_path / "exact": "none"},
        find_free_port(),
        0,
        nprocs=2,
    )
    for out in ("two", "exact"):
        for key, weight in weights(tmp_path / "one").items():
            assert torch.allclose(weight, weights(tmp_path / out)[key], rtol=0, atol=2e-5), (
                out,
                key,
            )
    prompts = prepare(tmp_path, "few", [{"prompt": f"{n}?", "answer": n} for n in range(5)])
    own = [*words, f"data.path={prompts}", f"objective.reward={tmp_path / 'two'}"]
    run_ranks(
        train_as_ranks,
        base,
        "grpo",
        own,
        {tmp_path / "grpo": "none"},
        find_free_port(),
        0,
        nprocs=2,
    )
    assert [row["prompts"] for row in read_metrics(tmp_path / "grpo") if row["kind"] == "val"] == [
        1,
        1,
    ]


def test_a_sharded_run_that_was_killed_ends_bit_identical(base: Path, tmp_path: Path) -> None:
    """Its reference is lost, too: it is made again, of the model that the hash of the gathered weights names."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    with pytest.raises(ProcessException):
        run_ranks(
            train_as_ranks, base, "grpo", [], {killed: "zero3"}, find_free_port(), 5, nprocs=2
        )
    assert 0 < list_steps(killed / "checkpoints")[-1] < 5
    reference = killed / "reference" / "reference.safetensors"
    kept = reference.read_bytes()
    reference.unlink()
    run_ranks(
        train_as_ranks,
        base,
        "grpo",
        [],
        {killed: "zero3", whole: "zero3"},
        find_free_port(),
        0,
        nprocs=2,
    )
    assert reference.read_bytes() == kept
    one, other = weights(whole), weights(killed)
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert losses(killed) == losses(whole)


def test_what_is_logged(base: Path, tmp_path: Path) -> None:
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
    held_out = [row for row in rows if row["kind"] == "val"]
    assert [row["step"] for row in held_out] == [0, 3, 6]
    assert all(row["loss"] == -row["reward"] and row["prompts"] > 0 for row in held_out)
    assert "| reward 0." in format_step(first, 6, 0, 0.0).split("| loss")[0]


def test_a_reward_model_takes_the_place_of_a_rule(base: Path, tmp_path: Path) -> None:
    train(base, "reward", tmp_path / "scorer", "optim.lr=3e-3", "budget.steps=20")
    assert {row["mfu"] for row in read_metrics(tmp_path / "scorer") if row["kind"] == "train"} == {
        None
    }
    assert (
        train(base, "grpo", tmp_path / "run", f"objective.reward={tmp_path / 'scorer'}").steps == 6
    )
    spreads = [
        row["reward_std"] for row in read_metrics(tmp_path / "run") if row["kind"] == "train"
    ]
    assert min(spreads) > 0
    with pytest.raises(ConfigError):
        train(base, "grpo", tmp_path / "other", f"objective.reward={base / 'run'}")


def test_a_damaged_reference_is_made_again_or_missed(base: Path, tmp_path: Path) -> None:
    init, out = tmp_path / "base", tmp_path / "run"
    shutil.copytree(base, init)
    train(init, "dpo", tmp_path / "whole")
    train(init, "dpo", out, callbacks=[stop_at(3)])
    kept = (out / "reference" / "reference.safetensors").read_bytes()
    (out / "reference" / "reference.safetensors").write_bytes(kept[:-4] + b"flip")
    assert train(init, "dpo", out).code == ExitCode.DONE
    assert (out / "reference" / "reference.safetensors").read_bytes() == kept
    assert losses(out) == losses(tmp_path / "whole")
    train(init, "dpo", tmp_path / "other", callbacks=[stop_at(3)])
    (tmp_path / "other" / "reference" / "reference.safetensors").unlink()
    shutil.rmtree(init / "run")
    save_run(init / "run", GPT(MODEL, seed=2), TOKENIZER)
    with pytest.raises(CheckpointError):
        train(init, "dpo", tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "words", "error", "text"),
    [
        ("grpo", ["objective.group=1"], ConfigError, "objective.group: "),
        ("ppo", ["objective.group=3"], ConfigError, "objective.group: "),
        ("grpo", ["objective.group=3"], ConfigError, "objective.group: "),
        ("grpo", ["model.value_head=true"], ConfigError, "model.value_head: "),
        ("ppo", ["model.value_head=false"], ConfigError, "model.value_head: "),
        ("grpo", ["objective.updates=4"], ConfigError, "save.every: "),
        ("dpo", ["machine.tensor_parallel=2"], ConfigError, "machine.tensor_parallel: "),
        ("ppo", ["machine.sharding=zero3", "machine.tensor_parallel=2"], ConfigError, "machine.tensor_parallel: "),
        ("grpo", ["machine.sharding=zero2", "machine.master_weights=on"], ConfigError, "machine.master_weights: "),
        ("grpo", ["objective.reward=exakt"], ConfigError, "exakt"),
        ("grpo", ["objective.reward=os:remove"], ConfigError, "--reward os:remove"),
        ("grpo", ["data.path=PAIRS"], DataError, "objective.name=grpo"),
        ("dpo", ["data.path=PROMPTS"], DataError, "objective.name=dpo"),
        ("grpo", ["objective.max_new_tokens=64"], ConfigError, "context"),
        ("grpo", ["data.path=OTHER"], DataError, "model.init"),
    ],
)  # fmt: skip
def test_what_does_not_fit(
    base: Path, tmp_path: Path, name: str, words: list[str], error: type[Exception], text: str
) -> None:
    if words == ["data.path=OTHER"]:
        rows = [{"prompt": f"{n}?", "answer": n} for n in range(40)]
        prepare(tmp_path, "other", rows, add_control_tokens(llama_tokenizer()))
    paths = {"PAIRS": base / "pairs", "PROMPTS": base / "prompts", "OTHER": tmp_path / "other"}
    given = [
        f"{key}={paths.get(value, value)}" for key, value in (word.split("=") for word in words)
    ]
    with pytest.raises(error, match=text):
        train(base, name, tmp_path / "run", *given, reward=None)


def test_a_value_head_is_left_out_of_an_export(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(base, "reward", tmp_path / "run", "budget.steps=2")
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf")]) == ExitCode.DONE
    assert "the value head" in "".join(capsys.readouterr())
    assert load_pretrained(tmp_path / "hf").model.value_head is None


def test_a_reward_that_raises_ends_the_run_with_one_line(base: Path, tmp_path: Path) -> None:
    def fail(prompt: str, answer: str, right: str) -> float:
        raise KeyError(right)

    with pytest.raises(ConfigError):
        train(base, "grpo", tmp_path / "run", reward=fail)
    with pytest.raises(ConfigError):  # a start again without it
        train(
            base,
            "grpo",
            tmp_path / "run",
            f"objective.reward={fail.__module__}:{fail.__qualname__}",
            reward=None,
        )
