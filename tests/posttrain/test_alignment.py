"""Runs of dpo, kto, reward, grpo and ppo: reward models, references, adapters, what is refused."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import ProcessException

from megatoken.base.errors import CheckpointError, ConfigError, ExitCode, MegatokenError
from megatoken.cli.main import main
from megatoken.convert.export import export
from megatoken.model.gpt import GPT
from megatoken.text.chat_template import add_control_tokens
from megatoken.text.load_pretrained import load_pretrained
from megatoken.train.train import Summary
from tests import tiny_run
from tests.convert.models import llama_tokenizer, save_run
from tests.ranks import run_ranks
from tests.tiny_run import MACHINE, fingerprint, newest_step, read_column, read_rows
from tests.train.search import (
    ROWS,
    SAMPLED,
    TOKENIZER,
    die_at,
    pay_for_letters,
    write_data,
    write_rows,
)
from tests.train.test_resume import MODEL

SETTINGS = (
    f"{MACHINE} machine.attention=explicit machine.micro_batch=2 machine.adamw=loop "
    "machine.fused=off budget.batch_tokens=512 budget.steps=6 budget.epochs=0 "
    "evaluate.every=3steps save.every=2steps"
)
LORA = "model.lora_rank=2 optim.lr=1e-2"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run `run` with random weights, and the datasets of all objectives."""
    folder = tmp_path_factory.mktemp("base")
    write_data(folder)
    rows = [{"prompt": f"{n}?", "answer": n} for n in range(40)]
    write_rows(folder, "other", rows, add_control_tokens(llama_tokenizer()))
    save_run(folder / "run", GPT(MODEL, seed=1), TOKENIZER)
    return folder


def train(base: Path, name: str, out: Path, *settings: str, **options: Any) -> Summary:
    given = [f"model.init={base / 'run'} data.path={base / ROWS[name]}", SETTINGS]
    if name in SAMPLED:
        given.append("objective.group=4 objective.max_new_tokens=6 objective.kl=0.1")
        if "objective.reward=" not in " ".join(settings):
            options.setdefault("reward", pay_for_letters)
    return tiny_run.train(out, *given, *settings, recipe=name, **options)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_pretrained(out).model.state_dict()


def train_on_two(base: Path, *runs: tuple[str, Path, str], step: int = 0) -> None:
    """Train (objective, run folder, settings) in turn on two ranks, which die at a step."""
    run_ranks(_train_rank, base, runs, step, nprocs=2)


def _train_rank(rank: int, base: Path, runs: list[tuple[str, Path, str]], step: int) -> None:
    for name, out, settings in runs:
        train(base, name, out, settings, callbacks=[partial(die_at, step)])


@pytest.mark.long
def test_two_ranks_train_and_use_a_reward_model_with_an_output_layer_of_its_own(
    base: Path, tmp_path: Path
):
    """The loss does not use the output layer; of the one held-out prompt a rank has none."""
    one, two, exact, scored = (tmp_path / name for name in ("one", "two", "exact", "scored"))
    save_run(tmp_path / "run", GPT(replace(MODEL, tie_embeddings=False), seed=1), TOKENIZER)
    settings = f"model.init={tmp_path / 'run'} budget.steps=2 save.every=0"
    prompts = write_rows(tmp_path, "few", [{"prompt": f"{n}?", "answer": n} for n in range(5)])
    train(base, "reward", one, settings)
    train_on_two(
        base,
        ("reward", two, settings),
        ("reward", exact, f"{settings} machine.deterministic=true"),
        ("grpo", scored, f"{settings} data.path={prompts} objective.reward={two}"),
    )
    for out in (two, exact):
        torch.testing.assert_close(weights(out), weights(one), rtol=0, atol=2e-5)
    assert {*read_column(two, "mfu").values()} == {None}
    assert [row["prompts"] for row in read_rows(scored, "val")] == [1, 1]
    assert min(read_column(scored, "reward_std").values()) > 0
    assert main(f"export {two} --out {tmp_path}/hf".split()) == ExitCode.DONE
    assert not load_pretrained(tmp_path / "hf").model.config.value_head


@pytest.mark.long
def test_a_sharded_run_that_was_killed_ends_bit_identical(base: Path, tmp_path: Path):
    """Its reference is damaged: it is made again, of the model that the hash of the weights names."""
    out, once = tmp_path / "killed", tmp_path / "once"
    killed = "grpo", out, "machine.sharding=zero3 objective.updates=2"
    with pytest.raises(ProcessException):
        train_on_two(base, killed, step=5)
    assert 0 < newest_step(out) < 5
    reference = out / "reference/reference.safetensors"
    content = reference.read_bytes()
    reference.write_bytes(content[:-4] + b"flip")
    train_on_two(base, killed, ("grpo", once, killed[2]))
    assert reference.read_bytes() == content
    assert fingerprint(out) == fingerprint(once)


def test_adapters_of_a_run_are_exported_and_read(base: Path, tmp_path: Path):
    init, run, lora = (tmp_path / name for name in ("init", "run", "lora"))
    shutil.copytree(base, init)
    train(init, "dpo", run, LORA)
    assert export(run, "peft", lora)["max_relative_difference"] < 2e-6
    torch.testing.assert_close(weights(lora), weights(run), rtol=0, atol=1e-6)
    train(base, "dpo", tmp_path / "next", f"model.init={lora}", stop=1)
    assert weights(tmp_path / "next").keys() == weights(run).keys()
    with pytest.raises(ConfigError):
        export(init / "run", "peft", tmp_path / "none")
    shutil.rmtree(init / "run")
    save_run(init / "run", GPT(MODEL, seed=3), TOKENIZER)
    with pytest.raises(CheckpointError):
        export(run, "peft", tmp_path / "other")


def test_a_lost_reference_is_made_again_or_missed(base: Path, tmp_path: Path):
    init, out = tmp_path / "base", tmp_path / "run"
    shutil.copytree(base, init)
    train(init, "dpo", out, stop=3)
    reference = out / "reference/reference.safetensors"
    content = reference.read_bytes()
    reference.unlink()
    train(init, "dpo", out, stop=5)
    assert reference.read_bytes() == content
    reference.unlink()
    shutil.rmtree(init / "run")
    save_run(init / "run", GPT(MODEL, seed=2), TOKENIZER)
    with pytest.raises(CheckpointError):
        train(init, "dpo", out)


# The last: a dataset of another tokenizer.
REFUSED = """\
grpo objective.group=1
ppo objective.group=3
grpo objective.group=3
grpo model.value_head=true
ppo model.value_head=false
grpo objective.updates=4
dpo machine.tensor_parallel=2
ppo machine.sharding=zero3 machine.tensor_parallel=2
grpo machine.sharding=zero2 machine.master_weights=on
grpo objective.reward=exakt
grpo objective.reward=os:remove
grpo objective.reward=no_such_module:reward
grpo objective.reward=math:no_such_function
grpo objective.reward=BASE/run
grpo data.path=BASE/pairs
dpo data.path=BASE/prompts
dpo data.path=BASE/rated
kto data.path=BASE/pairs
grpo objective.max_new_tokens=64
grpo data.path=BASE/other
"""


@pytest.mark.parametrize("case", REFUSED.splitlines())
def test_what_does_not_fit(base: Path, tmp_path: Path, case: str):
    name, *settings = case.replace("BASE", str(base)).split()
    with pytest.raises(MegatokenError) as error:
        train(base, name, tmp_path / "run", *settings, reward=None)
    assert error.value.code in (ExitCode.CONFIG, ExitCode.DATA)
