"""nanoGPT: its configuration files read and never run, its checkpoints read without running anything."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatoken.cli import main
from megatoken.config import flatten
from megatoken.errors import Exit, Fault
from megatoken.interop.hf_gpt2 import list_places
from megatoken.interop.nanogpt import translate_nanogpt
from megatoken.interop.nanogpt_checkpoint import EMBEDDING, read_nanogpt
from megatoken.interop.weights import load_weights
from megatoken.model.gpt import GPT
from tests.interop.models import BYTES, NANOGPT, SHAPE, byte_tokenizer, draw_model, relative

GPT2_FILE = """\
# config for training GPT-2 (124M), in nanoGPT's own manner
import time
wandb_log = True
wandb_run_name='gpt2-124M-' + str(time.time())
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8
max_iters = 600000
lr_decay_iters = max_iters
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


def test_the_reference_file_field_by_field(config: Path) -> None:
    told = translate_nanogpt(f"{config} --bias=True")
    resolved = told.resolve([])
    values = {key: str(value) for key, value in flatten(resolved.run).items()}
    given = {key: values[key] for key, origin in resolved.origins.items() if origin != "default"}
    assert given == {
        "seed": "1337",
        "model.n_layer": "12",
        "model.n_head": "12",
        "model.d_model": "768",
        "model.seq_len": "1024",
        "model.mlp": "gelu-erf",
        "model.bias": "True",
        "model.dropout": "0.0",
        "data.path": "data/openwebtext",
        "optim.lr": "0.0006",
        "optim.schedule": "cosine",
        "optim.warmup": "2000steps",
        "optim.floor": "0.1",
        "optim.beta1": "0.9",
        "optim.beta2": "0.95",
        "optim.eps": "1e-08",
        "optim.weight_decay": "0.1",
        "optim.clip": "1.0",
        "budget.steps": "600000",
        "budget.batch_tokens": "491520",
        "machine.micro_batch": "12",
        "save.every": "1000steps",
        "save.keep_last": "1",
        "evaluate.every": "1000steps",
        "evaluate.tokens": "2457600",
        "sample.every": "0steps",
        "log.every": "10steps",
    }
    assert resolved.origins["budget.batch_tokens"] == f"{config}:7, {config}:5, {config}:6"
    assert resolved.origins["optim.warmup"] == "nanoGPT's warmup_iters"
    assert (resolved.name, told.out) == ("nanogpt-train_gpt2", None)
    assert translate_nanogpt(f"{config} --out_dir=there").out == Path("there")
    assert any("wandb_log, wandb_run_name" in note for note in told.notes)


def test_words_win_over_the_file(config: Path) -> None:
    words = f"{config} --batch_size=4 --compile=False --device=cpu --dtype=float32 --decay_lr=False --bias=True"
    run = translate_nanogpt(words).resolve([]).run
    assert (run.budget.batch_tokens, run.machine.micro_batch) == (4 * 1024 * 40, 4)
    assert (run.machine.compile, run.machine.device, run.machine.precision) == ("off", "cpu", "fp32")
    assert (run.optim.schedule, run.optim.warmup.value) == ("constant", 0)


def test_published_weights(config: Path) -> None:
    run = translate_nanogpt(f"{config} --init_from=gpt2-xl --decay_lr=False").resolve([]).run
    assert (run.model.init, run.model.n_layer, run.model.n_head, run.model.d_model) == (
        "openai-community/gpt2-xl",
        48,
        25,
        1600,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batch_sizes = 4", r"nanoGPT has no batch_sizes — .*c\.py:1 — did you mean batch_size\?"),
        ("batch_size = 4\nn_layer = open('x')", r"n_layer would have to be computed by running the file — .*c\.py:2"),
        ("n_layer = __import__('os').system('false')", r"n_layer would have to be computed by running"),
        ("for i in range(3): pass", r"not an assignment — .*c\.py:1"),
        ("print('hello')", r"not an assignment"),
        ("n_layer = n_head = 3", r"not an assignment"),
        ("n_layer = 1 // 0", r"n_layer would have to be computed"),
        ("n_layer = 'six'", r"n_layer is 'six', nanoGPT wants int"),
        ("learning_rate = True", r"learning_rate is True, nanoGPT wants a number"),
        ("learning_rate = 1e999", r"learning_rate is inf, nanoGPT wants a number"),
        ("n_layer = (", r"not Python: .* — .*c\.py:1"),
        ("eval_only = True", r"eval_only trains nothing — .*c\.py:1 — use megatoken eval"),
        ("init_from = 'gpt3'", r"no init_from called 'gpt3'"),
        ("max_iters = 5000", r"the rate decays over 600000 of 5000 iterations.* — add --lr_decay_iters=5000"),
        ("dtype = 'int8'", r"no dtype 'int8'"),
    ],
)
def test_what_cannot_be_told_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "c.py"
    path.write_text(text)
    with pytest.raises(Fault, match=said) as caught:
        translate_nanogpt(f"{path} --bias=True")
    assert caught.value.code == Exit.CONFIG


def test_absent_file_and_words_without_a_value() -> None:
    with pytest.raises(Fault, match=r"cannot read it: No such file or directory — absent\.py"):
        translate_nanogpt("absent.py")
    with pytest.raises(Fault, match="cannot read '--batch_size'"):
        translate_nanogpt("--batch_size")


def test_data_beside_the_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "data" / "shakespeare").mkdir(parents=True)
    (tmp_path / "config").mkdir()
    path = tmp_path / "config" / "c.py"
    path.write_text("dataset = 'shakespeare'\ndecay_lr = False")
    run = translate_nanogpt(str(path)).resolve([]).run
    assert run.data.path == str(tmp_path / "data" / "shakespeare")
    assert (run.model.mlp, run.model.bias) == ("gelu-erf", False)


def test_a_translated_file_is_shown(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--nanogpt", f"{config} --bias=True", "--json"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out)["values"]["budget"]["batch_tokens"] == 491520


def to_nanogpt(model: GPT, *, rows: int = BYTES, prefix: str = "") -> dict[str, torch.Tensor]:
    """The state dict of nanoGPT's model: Linear layers, a tied head, the embedding of so many rows."""
    parameters = dict(model.named_parameters())
    tensors = {}
    for name, place in list_places(model.shape).items():
        if place.ours not in parameters:
            continue
        tensor = parameters[place.ours].detach()[slice(*place.rows)]
        if name == EMBEDDING:
            tensor = torch.cat([tensor, torch.full((rows - len(tensor), tensor.shape[1]), 7.0)])
            tensors[f"{prefix}lm_head.weight"] = tensor
        tensors[prefix + name] = tensor.clone() if name != EMBEDDING else tensor
    return tensors


def model_args(model: GPT, vocab_size: int) -> dict[str, Any]:
    shape = model.shape
    sizes = {"n_layer": shape.n_layer, "n_head": shape.n_head, "n_embd": shape.d_model, "block_size": shape.seq_len}
    return {**sizes, "bias": True, "vocab_size": vocab_size, "dropout": 0.0}


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[GPT, Path]:
    """A model of ours as nanoGPT's train.py saves it, its tokenizer beside it."""
    model, folder = draw_model(NANOGPT), tmp_path / "out"
    byte_tokenizer().save(folder)
    content = {
        "model": to_nanogpt(model, prefix="_orig_mod."),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "model_args": model_args(model, BYTES),
        "iter_num": 250,
        "best_val_loss": torch.tensor(1.5),
        "config": {"out_dir": "out", "learning_rate": 1e-3},
    }
    torch.save(content, folder / "ckpt.pt")
    return model, folder / "ckpt.pt"


def assert_same(found: GPT, expected: GPT, rows: int = BYTES) -> None:
    for name, tensor in found.state_dict().items():
        count = rows if name == "tokens.weight" else len(tensor)
        assert torch.equal(tensor[:count], expected.state_dict()[name][:count]), name


@pytest.mark.parametrize("given", ["file", "folder"])
def test_checkpoint(checkpoint: tuple[GPT, Path], given: str) -> None:
    model, path = checkpoint
    loaded = load_weights(str(path if given == "file" else path.parent), print)
    assert loaded.model.shape == NANOGPT
    assert_same(loaded.model, model)
    assert not loaded.model.tokens.weight[BYTES:].any()
    assert loaded.tokenizer.shares_ids(byte_tokenizer())


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_are_stripped(tmp_path: Path, prefix: str) -> None:
    model = draw_model()
    tensors = to_nanogpt(model, prefix=prefix) | {f"{prefix}transformer.h.0.attn.bias": torch.ones(1, 1, 24, 24)}
    torch.save({"model": tensors, "model_args": model_args(model, BYTES)}, tmp_path / "ckpt.pt")
    assert_same(read_nanogpt(tmp_path / "ckpt.pt"), model)


def test_padded_vocabulary_becomes_gpt2s(tmp_path: Path) -> None:
    model = draw_model()
    tensors = to_nanogpt(model, rows=50304)
    torch.save({"model": tensors, "model_args": model_args(model, 50304)}, tmp_path / "ckpt.pt")
    found = read_nanogpt(tmp_path / "ckpt.pt")
    assert found.shape.vocab_size == 50257
    assert_same(found, model)
    assert found.tokens.weight[50256, 0] == 7.0
    assert not found.tokens.weight[50257:].any()


def test_build_nanogpt_keeps_its_sizes_in_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("train_gpt2")
    exec("class GPTConfig: pass", module.__dict__)  # pickled under the name that the script gives it
    module.GPTConfig.__module__ = "train_gpt2"
    monkeypatch.setitem(sys.modules, "train_gpt2", module)
    model, config = draw_model(), module.GPTConfig()
    config.__dict__.update({k: v for k, v in model_args(model, BYTES).items() if k not in ("bias", "dropout")})
    torch.save({"model": to_nanogpt(model), "config": config, "step": 9, "val_loss": 3.1}, tmp_path / "model.pt")
    monkeypatch.delitem(sys.modules, "train_gpt2")
    found = read_nanogpt(tmp_path / "model.pt")
    assert_same(found, model)
    assert found.shape == SHAPE  # its GELU is GPT-2's


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpts_own_model_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    """NANOGPT_CHECKOUT is where nanoGPT's model.py is."""
    checkout = os.environ.get("NANOGPT_CHECKOUT")
    if not checkout:
        pytest.skip("NANOGPT_CHECKOUT names no checkout of karpathy/nanoGPT")
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(checkout) / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "nanogpt_model", module)
    spec.loader.exec_module(module)
    sizes = model_args(draw_model(), BYTES) | {"bias": bias}
    torch.manual_seed(0)
    theirs = module.GPT(module.GPTConfig(**sizes)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    torch.save({"model": theirs.state_dict(), "model_args": sizes}, tmp_path / "ckpt.pt")
    ours = read_nanogpt(tmp_path / "ckpt.pt").eval()
    ids = torch.randint(BYTES, (2, 24))
    with torch.no_grad():
        assert relative(ours.logits(ours(ids)), theirs(ids, ids)[0]) <= 2e-5


class Canary:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "executed")


def test_code_is_refused_and_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, canary = draw_model(), tmp_path / "canary"
    content = {"model": to_nanogpt(model), "model_args": model_args(model, BYTES), "extra": Canary(canary)}
    torch.save(content, tmp_path / "ckpt.pt")
    assert main(["sample", str(tmp_path / "ckpt.pt"), "hello"]) == Exit.CHECKPOINT
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "it asks to run " in said
    assert "and nothing in a checkpoint is run" in said
    assert not canary.exists()


def test_wrong_files_are_named(checkpoint: tuple[GPT, Path], tmp_path: Path) -> None:
    model, path = checkpoint
    raw = path.read_bytes()
    wrong = tmp_path / "wrong.pt"

    def refuse(said: str) -> None:
        with pytest.raises(Fault, match=said) as caught:
            read_nanogpt(wrong)
        assert caught.value.code == Exit.CHECKPOINT
        assert str(wrong) in str(caught.value)

    refuse("not a file of torch.save, or truncated: .*No such file")
    for damaged in (raw[:-50], raw[: len(raw) // 2], b"", b"no zip"):
        wrong.write_bytes(damaged)
        refuse("not a file of torch.save, or truncated")
    flipped = bytearray(raw)
    flipped[raw.index(model.positions.weight.detach().numpy().tobytes()) + 5] ^= 1
    wrong.write_bytes(flipped)
    refuse("damaged: the checksum of .* is wrong")
    good = {"model": to_nanogpt(model), "model_args": model_args(model, BYTES)}
    for change, said in (
        ([1, 2], "it holds no 'model'"),
        ({"model": good["model"]}, "it holds no 'model_args'"),
        (good | {"model_args": good["model_args"] | {"n_layer": 3}}, r"transformer\.h\.2\.ln_1\.weight is missing"),
        (good | {"model_args": good["model_args"] | {"n_layer": 1}}, r"transformer\.h\.1\..* is unexpected"),
        (good | {"model_args": good["model_args"] | {"n_embd": 64}}, r"transformer\.wte\.weight is \(257, 32\), its"),
        (good | {"model_args": good["model_args"] | {"n_head": 5}}, "n_embd 32 does not divide into 5 heads"),
        (good | {"model_args": good["model_args"] | {"vocab_size": None}}, "vocab_size is None"),
        (good | {"model": good["model"] | {"lm_head.weight": torch.zeros(257, 32)}}, "the output layer is not tied"),
    ):
        torch.save(change, wrong)
        refuse(said)


def test_a_vocabulary_of_its_own_needs_a_tokenizer(checkpoint: tuple[GPT, Path]) -> None:
    (checkpoint[1].parent / "tokenizer.json").unlink()
    with pytest.raises(Fault, match="no tokenizer beside a model with 257 token ids"):
        load_weights(str(checkpoint[1]), print)
