"""Runs of dpo, reward, grpo and ppo from a model that talks: kills, processes, what is refused, what is logged."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatoken.config.load import resolve
from megatoken.console import Console
from megatoken.convert.load_pretrained import load_pretrained
from megatoken.data.chat_template import add_control_tokens
from megatoken.data.prepare_chats import prepare_chats
from megatoken.data.sources import find_source
from megatoken.data.tokenizer import load_tokenizer
from megatoken.errors import ExitCode
from megatoken.model.gpt import GPT
from megatoken.pretrain import Summary, Trainer
from megatoken.train.metrics_log import read_metrics
from tests.convert.models import TINY_GPT, save_run

TOKENIZER = add_control_tokens(load_tokenizer("bytes"))
MODEL = replace(TINY_GPT, vocab_size=TOKENIZER.vocab_size, seq_len=64)
SETTINGS = [
    *("machine.device=cpu", "machine.precision=fp32", "machine.threads=1", "machine.micro_batch=4", "log.plots=false"),
    *("machine.attention=explicit", "machine.gemm_backend=torch", "machine.adamw=loop", "machine.fused=off"),
    *("budget.batch_tokens=512", "budget.steps=6", "budget.epochs=0", "evaluate.every=3steps", "save.every=2steps"),
]
ROLLOUTS = ["objective.group=4", "objective.max_new_tokens=6"]


def prepare(folder: Path, name: str, rows: list[dict[str, Any]], tokenizer: str = "bytes") -> Path:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare_chats(find_source(str(file)), folder / name, load_tokenizer(tokenizer), seq_len=64, val_fraction=0.2)
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


def pay_for_digits(prompt: str, answer: str, right: str) -> float:
    return sum(sign.isalpha() for sign in answer) / 6


def train(base: Path, name: str, out: Path, *words: str, **options: Any) -> Summary:
    data = base / ("pairs" if name in ("dpo", "reward") else "prompts")
    given = [f"model.init={base / 'run'}", f"data.path={data}", *SETTINGS]
    given += ROLLOUTS if name in ("grpo", "ppo") else []
    if name in ("grpo", "ppo"):
        options.setdefault("reward", pay_for_digits)
    return Trainer(resolve(name, [*given, *words]), out, console=Console(quiet=True), **options).fit()


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_pretrained(out).model.state_dict()


def losses(out: Path) -> list[tuple[Any, ...]]:
    rows = [row for row in read_metrics(out) if row["kind"] in ("train", "val")]
    keys = ("kind", "step", "loss", "grad_norm", "reward", "accuracy", "kl")
    return sorted(tuple(row.get(key) for key in keys) for row in rows)


@pytest.mark.parametrize(
    ("name", "words"), [("dpo", []), ("reward", []), ("grpo", ["objective.kl=0.1"]), ("ppo", ["objective.kl=0.1"])]
)
def test_stopped_runs_end_bit_identical(base: Path, tmp_path: Path, name: str, words: list[str]) -> None:
    """Stopped at step 3, that of no save; the model that the run began with is gone by then."""
    init = tmp_path / "base"
    shutil.copytree(base, init)
    assert train(init, name, tmp_path / "whole", *words).code == ExitCode.DONE
    stop = [lambda row: row["kind"] == "train" and row["step"] == 3]
    assert train(init, name, tmp_path / "parts", *words, callbacks=stop).code == ExitCode.STOPPED
    shutil.rmtree(init / "run")
    assert train(init, name, tmp_path / "parts", *words).code == ExitCode.DONE
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
