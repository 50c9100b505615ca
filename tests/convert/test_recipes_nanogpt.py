"""nanoGPT's config files and checkpoints are read without running code."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatoken.base.config.schema import flatten
from megatoken.base.errors import CheckpointError, ConfigError
from megatoken.convert.hf.families import OTHERS
from megatoken.convert.nanogpt import EMBEDDING, read_nanogpt
from megatoken.convert.recipes.nanogpt import translate as translate_nanogpt
from megatoken.model.gpt import GPT
from megatoken.text.load_pretrained import load_pretrained
from megatoken.train.state import build_step_config
from tests.convert.models import (
    BYTES,
    NANOGPT,
    TINY_GPT,
    assert_same_weights,
    byte_tokenizer,
    draw_model,
    relative,
    translated_values,
)
from tests.tables import read_table

GPT2_FILE = """\
# config for training GPT-2 (124M), in nanoGPT's format
import time
wandb_log = True
wandb_run_name='gpt2-124M-' + str(time.time())
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8
max_iters = 600000
lr_decay_iters = 600000
eval_interval = 1000
eval_iters = 200
log_interval = 10
weight_decay = 1e-1
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "train_gpt2.py"
    path.write_text(GPT2_FILE)
    return path


REFERENCE_FIELDS = """
seed 1337
model.n_layer 12
model.n_head 12
model.d_model 768
model.seq_len 1024
model.mlp gelu-erf
model.bias True
model.dropout 0.0
data.path data/openwebtext
optim.lr 0.0006
optim.schedule cosine
optim.warmup 2000steps
optim.min_lr_ratio 0.1
optim.beta1 0.9
optim.beta2 0.95
optim.eps 1e-08
optim.weight_decay 0.1
optim.grad_clip 1.0
budget.steps 600000
budget.batch_tokens 491520
machine.micro_batch 12
save.every 1000steps
save.keep_last 1
evaluate.every 1000steps
evaluate.tokens 2457600
sample.every 0steps
log.every 10steps
"""


def test_reference_file_field_by_field(config: Path):
    translation = translate_nanogpt(f"{config} --bias=True")
    resolved = translation.resolve([])
    assert translated_values(resolved) == read_table(REFERENCE_FIELDS)
    assert resolved.origins["budget.batch_tokens"] == f"{config}:7, {config}:5, {config}:6"
    assert resolved.origins["optim.warmup"] == "nanoGPT warmup_iters 2000 (default)"
    assert (resolved.name, translation.out) == ("nanogpt-train_gpt2", None)
    assert translate_nanogpt(f"{config} --out_dir=there").out == Path("there")
    assert any("wandb_log, wandb_run_name" in note for note in translation.notes)


@pytest.mark.parametrize("decay_iters", [3000, 5000, 600_000])
def test_the_rate_is_nanogpts_at_every_iteration(config: Path, decay_iters: int):
    words = f"--max_iters=5000 --lr_decay_iters={decay_iters} --min_lr=1e-4 --warmup_iters=100"
    resolved = translate_nanogpt(f"{config} {words}").resolve([]).config
    schedule = build_step_config(resolved, epoch_tokens=10**9).schedule
    assert resolved.total_steps(10**9) == 5000
    for step in (100, 101, 2999, 3001, 4999):  # its warm-up divides by one more
        done = min((step - 100) / (decay_iters - 100), 1.0)
        expected = 1e-4 + 0.5 * (1.0 + math.cos(math.pi * done)) * (6e-4 - 1e-4)
        assert schedule.lr(step) == pytest.approx(expected, rel=1e-9)


REFUSED = """\
batch_sizes = 4
n_layer = open('x')
n_layer = __import__('os').system('false')
for i in range(3): pass
n_layer = 'six'
learning_rate = True
n_layer = (
eval_only = True
init_from = 'resume'
lr_decay_iters = 9
"""


def test_refused_settings_and_commands(tmp_path: Path):
    path = tmp_path / "c.py"
    for text in REFUSED.splitlines():
        path.write_text(f"# comment\n{text}")
        with pytest.raises(ConfigError):
            translate_nanogpt(f"{path} --bias=True")
    for command in ("absent.py", "--batch_size"):
        with pytest.raises(ConfigError):
            translate_nanogpt(command)


def test_words_around_the_file(config: Path):
    """Settings override it, a launcher is skipped, data lie next to it, and a resume continues our run."""
    words = f"torchrun --nproc_per_node=8 nanoGPT/train.py {config} --batch_size=4 --bias=True"
    words += " --compile=False --device=cpu --dtype=float32 --decay_lr=False"
    values = flatten(translate_nanogpt(words).resolve([]).config)
    assert values["budget.batch_tokens"] == 4 * 1024 * 40
    expected = {"machine.compile": "off", "machine.precision": "fp32", "optim.warmup": "0steps"}
    assert {key: str(values[key]) for key in expected} == expected
    run = translate_nanogpt(f"{config} --init_from=gpt2-xl --decay_lr=False").resolve([]).config
    assert (run.model.init, run.model.n_layer) == ("openai-community/gpt2-xl", 48)
    folder = config.parent
    for name in ("data/shakespeare", "config", "checkpoints"):
        (folder / name).mkdir(parents=True)
    path = folder / "config/c.py"
    path.write_text("dataset = 'shakespeare'\ndecay_lr = False")
    run = translate_nanogpt(str(path)).resolve([]).config
    assert run.data.path == f"{folder}/data/shakespeare"
    assert translate_nanogpt(f"--init_from=resume --out_dir={folder}").out == folder


def to_nanogpt(model: GPT, rows: int = BYTES) -> dict[str, torch.Tensor]:
    """Return a state dict of nanoGPT's model, with `rows` in the tied embedding."""
    views = OTHERS["nanogpt"].view_params(dict(model.named_parameters()), model.config)
    tensors = {name: view.clone() for name, view in views.items()}
    table = tensors[EMBEDDING]
    table = torch.cat([table, torch.full((rows - len(table), table.shape[1]), 7.0)])
    return {"lm_head.weight": table} | tensors | {EMBEDDING: table}


def model_args(model: GPT, vocab_size: int = BYTES) -> dict[str, Any]:
    sizes = dict(n_layer="n_layer", n_head="n_head", n_embd="d_model", block_size="seq_len")
    values = {name: getattr(model.config, ours) for name, ours in sizes.items()}
    return values | {"bias": model.config.bias, "vocab_size": vocab_size, "dropout": 0.0}


def nanogpt_logits(
    tensors: dict[str, torch.Tensor], n_head: int, ids_T: torch.Tensor, approximate: str
) -> torch.Tensor:
    """Return the logits (T, vocab) of nanoGPT's model in plain PyTorch."""

    def weights(module):
        name = f"transformer.{module}"
        return tensors[f"{name}.weight"], tensors.get(f"{name}.bias")

    def normalize(x, module):
        return F.layer_norm(x, x.shape[-1:], *weights(module))

    x = tensors[EMBEDDING][ids_T] + tensors["transformer.wpe.weight"][: len(ids_T)]
    for layer in range(2):
        block = f"h.{layer}"
        qkv = F.linear(normalize(x, f"{block}.ln_1"), *weights(f"{block}.attn.c_attn"))
        q, k, v = (part.unflatten(1, (n_head, -1)).transpose(0, 1) for part in qkv.chunk(3, 1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
        x = x + F.linear(attended.flatten(1), *weights(f"{block}.attn.c_proj"))
        up = F.linear(normalize(x, f"{block}.ln_2"), *weights(f"{block}.mlp.c_fc"))
        x = x + F.linear(F.gelu(up, approximate=approximate), *weights(f"{block}.mlp.c_proj"))
    return F.linear(normalize(x, "ln_f"), tensors["lm_head.weight"])


# When it was written, its GELU, whether its head is tied, with biases, and a prefix of its names. The
# second has no bias in model_args; those before 2023-03 have masks, as PyTorch's attention is younger.
VERSIONS = """\
2022-12 tanh untied bias _orig_mod.
2023-01 tanh tied bias
2023-02 tanh tied bias module.
2023-06 none tied bias _orig_mod.module.
2023-06 none tied plain
"""


@pytest.mark.parametrize("row", VERSIONS.splitlines())
def test_gelu_and_head_are_those_of_the_version(tmp_path: Path, row: str):
    written, approximate, head, biases, *prefixes = row.split()
    tied = head == "tied"
    torch.manual_seed(1)
    model = draw_model(replace(NANOGPT, tie_embeddings=tied, bias=biases == "bias"))
    tensors = to_nanogpt(model)
    sizes = model_args(model)
    if written < "2023-02":
        del sizes["bias"]
    masks = {f"transformer.h.{n}.attn.bias": torch.ones(1, 1, 24, 24).tril() for n in range(2)}
    content = tensors | (masks if written < "2023-06" else {})
    others = {"optimizer": {"param_groups": [{"lr": 1e-3}]}, "best_val_loss": torch.tensor(1.5)}
    content = {"".join([*prefixes, name]): tensor for name, tensor in content.items()}
    byte_tokenizer().vocabulary.save(tmp_path)
    torch.save({"model": content, "model_args": sizes, **others}, tmp_path / "ckpt.pt")
    lines = []
    found = load_pretrained(tmp_path, lines.append)
    assert found.tokenizer.vocabulary.shares_ids(byte_tokenizer().vocabulary)
    assert found.model.config.tie_embeddings == tied
    assert any("GELU" in line for line in lines)
    ids = torch.randint(BYTES, (24,))
    expected = nanogpt_logits(tensors, model.config.n_head, ids, approximate)
    with torch.no_grad():
        assert relative(found.model.logits(ids[None])[0], expected) <= 1e-6
    assert not found.model.tokens.weight[BYTES:].any()


def save_nanogpt(path: Path, model: GPT, rows: int = BYTES) -> dict[str, Any]:
    content = {"model": to_nanogpt(model, rows), "model_args": model_args(model, rows)}
    torch.save(content, path)
    return content


def test_padded_vocabulary_becomes_gpt2s(tmp_path: Path):
    model = draw_model()
    save_nanogpt(tmp_path / "ckpt.pt", model, 50304)
    loaded = read_nanogpt(tmp_path / "ckpt.pt")
    assert loaded.config.vocab_size == 50257
    assert_same_weights(loaded, model)
    assert loaded.tokens.weight[50256, 0] == 7.0
    assert not loaded.tokens.weight[50257:].any()


def test_build_nanogpt_keeps_its_sizes_in_an_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = ModuleType("train_gpt2")
    module.GPTConfig = type("GPTConfig", (), {"__module__": "train_gpt2"})
    monkeypatch.setitem(sys.modules, "train_gpt2", module)
    model = draw_model()
    config = module.GPTConfig()
    config.__dict__ |= model_args(model)
    torch.save({"model": to_nanogpt(model), "config": config, "step": 9}, tmp_path / "model.pt")
    monkeypatch.delitem(sys.modules, "train_gpt2")
    loaded = read_nanogpt(tmp_path / "model.pt")
    assert_same_weights(loaded, model)
    assert loaded.config == TINY_GPT  # its GELU is GPT-2's


WRONG = [
    {"model_args": {"n_layer": 3}},
    {"model_args": {"n_layer": 10**9}},
    {"model_args": {"n_embd": 64}},
    {"model_args": {"n_head": 5}},
    {"model_args": {"vocab_size": None}},
    {"model": {"a": "text"}},
    {"model": {EMBEDDING: torch.tensor(1.0)}},
    {"model": {"lm_head.weight": torch.zeros(257, 32)}},
]


def test_damaged_files_and_contents_that_do_not_fit_are_refused(tmp_path: Path):
    """A damaged file is one that is cut short, empty, has a flipped bit, or is missing."""
    model, path = draw_model(), tmp_path / "ckpt.pt"
    content = save_nanogpt(path, model)
    assert_same_weights(read_nanogpt(path), model)
    raw = path.read_bytes()
    flipped = bytearray(raw)
    flipped[raw.index(model.positions.weight.detach().numpy().tobytes()) + 5] ^= 1
    for change in WRONG:
        torch.save({key: content[key] | change.get(key, {}) for key in content}, path)
        with pytest.raises(CheckpointError):
            read_nanogpt(path)
    for damaged in (raw[:-50], b"", flipped, None):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            read_nanogpt(path)
