"""Supervised fine-tuning: loss and gradients of transformers, new tokens, and what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import CheckpointError, ExitCode, MegatokenError
from megatoken.convert.export import export
from megatoken.convert.hf.export import write_hf
from megatoken.convert.hf.families import choose_family
from megatoken.data.dataset import load_dataset
from megatoken.model.gpt import GPT
from megatoken.posttrain.chat_batches import make_batch
from megatoken.posttrain.new_tokens import add_mean_rows
from megatoken.text.chat_dataset import open_rows
from megatoken.text.chat_template import find_template
from megatoken.text.load_pretrained import load_pretrained
from megatoken.text.prepare_chats import prepare_chats
from megatoken.text.sources import find_source
from megatoken.text.tokenizer import load_tokenizer
from megatoken.train.state import build_state
from megatoken.train.step import forward_backward
from megatoken.train.train import Summary
from tests.convert.models import TEMPLATE, draw_chat_model
from tests.tiny_model import CPU, TINY_LLAMA, TINY_MODERN, tiny_config, tiny_step_config
from tests.tiny_run import MACHINE, read_column, read_losses, train, write_shards

CONTEXT = 80
BATCH = "budget.batch_tokens=640 machine.micro_batch=2"
SFT = f"budget.epochs=0 budget.steps=8 optim.lr=1e-2 machine.adamw=fused {BATCH} {MACHINE}"


def write_chats(path: Path) -> None:
    """Write 120 conversations of one to three turns, each about the letter that follows another."""
    lines = []
    for n in range(120):
        messages = []
        for turn in range(1 + n % 3):
            letter = 97 + (n * 7 + 5 * turn) % 25
            messages.append({"role": "user", "content": chr(letter)})
            messages.append({"role": "assistant", "content": chr(letter + 1) * (1 + n % 2)})
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on text, and conversations beside it."""
    folder = tmp_path_factory.mktemp("base")
    text = write_shards(folder / "text", b"the cat sat on the mat, " * 400)
    train(folder / "run", f"{text} model.seq_len={CONTEXT} budget.steps=30 {BATCH}")
    chats = folder / "chats.jsonl"
    write_chats(chats)
    bytes_ = load_tokenizer("bytes")
    prepare_chats(
        find_source(str(chats)), folder / "chats", bytes_, seq_len=CONTEXT, val_fraction=0.2
    )
    return folder


def tune(base: Path, out: Path, *settings: str, **options: Any) -> Summary:
    paths = f"model.init={base / 'run'} data.path={base / 'chats'}"
    return train(out, paths, SFT, *settings, recipe="sft", **options)


@pytest.mark.long
def test_a_model_learns_to_answer(base: Path, tmp_path: Path):
    tuned = tmp_path / "run"
    assert tune(base, tuned, "sample.every=4").code == ExitCode.DONE
    losses = read_losses(tuned, "val")
    assert losses[-1] < 0.6 * losses[0]
    n_trained = sum(open_rows(load_dataset(base / "chats"), "val").labels & 1)
    assert read_column(tuned, "target_tokens", "val")[8] == n_trained
    assert "user: Hello.\nassistant: " in (tuned / "samples/step-00000008.txt").read_text()
    loaded = load_pretrained(tuned)
    assert (loaded.model.config.vocab_size, find_template(loaded.tokenizer).name) == (259, "chatml")


def test_loss_and_gradients_are_those_of_transformers(base: Path, tmp_path: Path):
    """Conversations of a row are given to transformers one by one."""
    transformers = pytest.importorskip("transformers")
    model = draw_chat_model(CONTEXT)
    write_hf(tmp_path, model, TEMPLATE.tokenizer, "fp32")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    rows = open_rows(load_dataset(base / "chats"), "train")
    ids, labels = rows.read(np.arange(len(rows) - 6, len(rows)))
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row_ids, row_labels in zip(ids, labels, strict=True):
        kept = np.arange((row_labels < 4).sum())
        for piece in np.split(kept, np.flatnonzero(row_labels[kept] & 2)[1:]):
            input_ids = torch.from_numpy(row_ids[None, piece].astype(np.int64))
            is_trained = torch.from_numpy(row_labels[None, piece] & 1 > 0)
            targets = torch.where(is_trained, input_ids, -100)
            n = int((targets[:, 1:] >= 0).sum())
            total = total + reference(input_ids=input_ids, labels=targets).loss.double() * n
            count += n
    (total / count).backward()
    state = build_state(model, tiny_config(), CPU)
    loss = forward_backward(state, tiny_step_config(3), CPU, make_batch(ids, labels))
    assert loss.item() == pytest.approx(total.item() / count, rel=1e-6)
    params = dict(reference.named_parameters())
    ours = {name: param.grad for name, param in state.model.named_parameters()}
    for name, view in choose_family(model.config).view_params(ours, model.config).items():
        difference = (view - params[name].grad).norm() / params[name].grad.norm()
        assert difference < 1e-5, name


@pytest.mark.parametrize("model_config", [TINY_LLAMA, TINY_MODERN])
@pytest.mark.parametrize("n_old", [97, 127, 128])
def test_new_tokens_cost_next_to_nothing(model_config: ModelConfig, n_old: int):
    """Trained logits are far from 0, so new rows of zeros would get nearly all probability."""
    n_new = n_old + 2
    before = GPT(replace(model_config, vocab_size=n_old), seed=1)
    for table in {before.tokens.weight, before.lm_head_weight}:
        table.data[:n_old] = table.data[:n_old] * 5 - 2 * torch.linspace(-1, 1, 32)
    grown = GPT(replace(model_config, vocab_size=n_new), seed=None)
    for name, values in before.state_dict().items():
        if name.endswith(("tokens.weight", "head.weight")):
            values = add_mean_rows(values, n_old, n_new, grown.config)
        grown.state_dict()[name].copy_(values)
    ids = torch.randint(n_old, (8, 17), generator=torch.Generator().manual_seed(0))
    old, new = (model.loss(ids[:, :-1], ids[:, 1:]).item() for model in (before, grown))
    bound = math.log(1 + 2 / n_old) if not model_config.logit_softcap else 0.1
    assert -1e-6 < new - old <= bound + 1e-6


def test_what_is_refused(base: Path, tmp_path: Path):
    tokenizer = load_tokenizer("bpe:300", lambda: iter(["the cat sat on the mat " * 20]))
    other = tmp_path / "chats"  # of another tokenizer
    prepare_chats(find_source(f"{base}/chats.jsonl"), other, tokenizer, seq_len=CONTEXT)
    for setting in (
        f"data.path={base / 'text'}",
        f"data.path={other}",
        "model.seq_len=32",
        "objective.name=pretrain",
        "data.order=sequential",
        "machine.tensor_parallel=2",
        "budget.batch_tokens=64000",
    ):
        with pytest.raises(MegatokenError):
            tune(base, tmp_path / "run", setting)


def test_lora_gives_new_tokens_rows_of_their_own(base: Path, tmp_path: Path):
    """With frozen, equal rows, the stop token could never become more likely than others."""
    out = tmp_path / "run"
    tune(base, out, "model.lora_rank=8 sample.at_start=false evaluate.tokens=0", stop=1)
    old, new = load_pretrained(out).model.tokens.weight.detach()[:259].split([257, 2])
    typical = math.sqrt(2) * old.std(0).norm()  # distance of two of them
    assert float((new[0] - new[1]).norm() / typical) == pytest.approx(1, abs=0.3)
    with pytest.raises(CheckpointError):  # not an adapter of its base
        export(out, "peft", tmp_path / "adapter")
