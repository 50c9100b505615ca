"""Hugging Face folders: parity with transformers at full size, and every way in which a folder can be wrong."""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatoken.data.tokenizer import load_tokenizer
from megatoken.errors import Exit, Fault
from megatoken.interop.hf import hf_tokenizer_spec, load_hf
from megatoken.interop.hf_export import write_hf
from megatoken.model.gpt import GPT
from megatoken.model.loss import cross_entropy
from megatoken.presets import PRESETS, Shape
from megatoken.sample import generate

transformers = pytest.importorskip("transformers")

SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 24, "vocab_size": 130}


def reference_model(seed: int = 0, **sizes: int) -> Any:
    """A GPT2LMHeadModel with random weights, biases and norms too, so that nothing can be mixed up unseen."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        reference = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return reference


def save(reference: Any, folder: Path, **how: Any) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        reference.save_pretrained(folder, **how)
    return folder


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers' model and in ours, and what both make of the same ids."""

    reference: Any
    model: GPT
    logits: torch.Tensor
    expected_logits: torch.Tensor
    ids: torch.Tensor


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """gpt2-124m at full size: forward and backward of both, once."""
    reference = reference_model()
    folder = save(reference, tmp_path_factory.mktemp("gpt2-124m"))
    model, _ = load_hf(str(folder))
    again = tmp_path_factory.mktemp("again")
    write_hf(again, model, load_tokenizer("bytes"), "fp32")  # whatever the tokenizer: weights are looked at
    theirs, ours = (load_file(place / "model.safetensors") for place in (folder, again))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())  # so all that holds in, holds out
    for place in (folder, again):
        shutil.rmtree(place)  # half a gigabyte
    ids = torch.randint(0, 50257, (2, 32), generator=torch.Generator().manual_seed(1))
    output = reference(ids, labels=ids)
    output.loss.backward()
    hidden = model(ids[:, :-1])
    total, count = cross_entropy(hidden, model.unembedding, ids[:, 1:], vocab_size=50257, chunk=24)
    assert float((total / count).detach()) == pytest.approx(float(output.loss.detach()), rel=1e-6)
    (total / count).backward()
    with torch.no_grad():
        logits = model.logits(hidden)
    return Pair(reference, model, logits, output.logits[:, :-1].detach(), ids)


def test_full_size_logits_are_those_of_transformers(pair: Pair) -> None:
    assert pair.model.shape == PRESETS["gpt2-124m"]
    assert pair.logits.shape == pair.expected_logits.shape
    difference = (pair.logits - pair.expected_logits).abs().max() / pair.expected_logits.abs().max()
    assert float(difference) <= 2e-5


def test_full_size_gradients_of_every_tensor_are_those_of_transformers(pair: Pair) -> None:
    theirs = dict(pair.reference.transformer.named_parameters())
    ours = dict(pair.model.named_parameters())
    table = {
        "wte": "tokens",
        "wpe": "positions",
        "ln_f": "norm",
        "ln_1": "norm1",
        "ln_2": "norm2",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
    }
    checked = set()
    for name, expected in theirs.items():
        stem, _, kind = name.rpartition(".")
        block = ".".join(stem.split(".")[:2]) if stem.startswith("h.") else ""
        key = table[stem.removeprefix(block + ".") if block else stem]
        own = f"{block.replace('h.', 'blocks.')}.{key}.{kind}" if block else f"{key}.{kind}"
        gradient = ours[own].grad
        assert gradient is not None
        if own == "tokens.weight":
            assert torch.count_nonzero(gradient[50257:]) == 0
            gradient = gradient[:50257]
        wanted = expected.grad.T if ".c_" in name and kind == "weight" else expected.grad
        relative = float((gradient - wanted).norm() / wanted.norm())
        assert relative <= 1e-4, f"{own} differs by {relative:.1e}"
        checked.add(own)
    assert checked == set(ours)


def test_full_size_greedy_generation_is_that_of_transformers(pair: Pair) -> None:
    prompt = pair.ids[:1, :8]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # hundreds of small steps, which a second core hardly helps and a busy one stops
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        expected = pair.reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=64,
            min_new_tokens=64,
            do_sample=False,
            pad_token_id=50256,
        )
    torch.set_num_threads(threads)
    assert generate(pair.model, prompt[0].tolist(), tokens=64, temperature=0) == [expected[0, 8:].tolist()]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    reference = reference_model(**SMALL)
    return reference, save(reference, tmp_path_factory.mktemp("small"))


@pytest.fixture
def folder(small: tuple[Any, Path], tmp_path: Path) -> Path:
    """A copy of the small model's folder, to be spoilt."""
    return Path(shutil.copytree(small[1], tmp_path / "copy"))


def logits_of(model: GPT) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(torch.arange(20)[None]))


def test_small_model_of_odd_vocabulary(small: tuple[Any, Path]) -> None:
    reference, folder = small
    model, found = load_hf(str(folder))
    assert found == folder
    assert model.shape == Shape(n_layer=2, n_head=2, d_model=16, d_ff=64, vocab_size=130, seq_len=24)
    assert model.tokens.weight.shape == (256, 16)
    assert torch.count_nonzero(model.tokens.weight[130:]) == 0
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(logits_of(model), reference(torch.arange(20)[None]).logits, rtol=1e-5, atol=1e-6)


def test_n_inner_is_d_ff(tmp_path: Path) -> None:
    model, _ = load_hf(str(save(reference_model(**SMALL, n_inner=40), tmp_path)))
    assert model.shape.d_ff == 40


def test_shards_are_one_model(small: tuple[Any, Path], tmp_path: Path) -> None:
    reference, whole = small
    folder = save(reference, tmp_path, max_shard_size="5KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(load_hf(str(folder))[0]), logits_of(load_hf(str(whole))[0]))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def reconfigure(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {name.removeprefix("transformer."): t for name, t in tensors.items()},  # as OpenAI's repository
        lambda tensors: tensors | {"transformer.h.0.attn.bias": torch.ones(1, 1, 24, 24)},
        lambda tensors: tensors | {"transformer.h.1.attn.masked_bias": torch.tensor(-1e4)},
        lambda tensors: tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()},
    ],
)
def test_other_ways_of_saving_the_same_model(
    small: tuple[Any, Path], folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    rewrite(folder, change)
    assert torch.equal(logits_of(load_hf(str(folder))[0]), logits_of(load_hf(str(small[1]))[0]))


def test_half_precision_becomes_fp32(folder: Path) -> None:
    rewrite(folder, lambda tensors: {name: t.bfloat16() for name, t in tensors.items()})
    model, _ = load_hf(str(folder))
    saved = load_file(folder / "model.safetensors")["transformer.wpe.weight"]
    assert torch.equal(model.positions.weight, saved.float())


def drop(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: t for key, t in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: drop(t, "transformer.h.1.mlp.c_fc.bias"), r"h\.1\.mlp\.c_fc\.bias is missing"),
        (lambda t: t | {"score.weight": torch.zeros(2, 2)}, r"score\.weight is unexpected"),
        (lambda t: t | {"transformer.ln_f.bias": torch.zeros(7)}, r"ln_f\.bias is \(7,\), config\.json says \(16,\)"),
        (lambda t: {"a": torch.zeros(1)}, r"wte\.weight is missing.* and \d+ more"),
        (lambda t: t | {"wpe.weight": torch.zeros(24, 16)}, "is there twice"),
        (lambda t: t | {"lm_head.weight": torch.zeros(130, 16)}, "lm_head.weight differs from the token embedding"),
        (lambda t: t | {"transformer.ln_f.bias": torch.full((16,), torch.nan)}, "ln_f.bias .* not finite"),
        (lambda t: t | {"transformer.ln_f.bias": torch.zeros(16, dtype=torch.int8)}, "ln_f.bias .*int8"),
    ],
)
def test_wrong_tensors_are_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], said: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(Fault, match=said) as caught:
        load_hf(str(folder))
    assert caught.value.code == Exit.CHECKPOINT
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "opt"}, "model_type 'opt' is not supported — .*config.json — supported: gpt2 and llama"),
        ({"activation_function": "relu"}, "activation_function is 'relu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon is 0, not a positive number"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"tie_word_embeddings": False}, r"lm_head\.weight is missing"),
        ({"n_head": 3}, "n_embd 16 does not divide into 3 heads"),
        ({"n_layer": "2"}, "n_layer is '2'"),
        ({"n_embd": None}, "n_embd is None"),
        ({"n_positions": 0}, "n_positions is 0"),
        ({"n_layer": 3}, r"h\.2\.ln_1\.weight is missing"),
        ({"vocab_size": 131}, r"wte\.weight is \(130, 16\), config\.json says \(131, 16\)"),
    ],
)
def test_configurations_that_are_not_this_gpt2(folder: Path, values: dict[str, Any], said: str) -> None:
    reconfigure(folder, **values)
    with pytest.raises(Fault, match=said) as caught:
        load_hf(str(folder))
    assert caught.value.code == Exit.CHECKPOINT


@pytest.mark.parametrize("keep", [0, 7, 300, -1])
def test_truncated_weights_are_named(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(Fault, match=r"truncated or damaged.*model\.safetensors") as caught:
        load_hf(str(folder))
    assert caught.value.code == Exit.CHECKPOINT


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00\xff"])
def test_damaged_configuration_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(Fault, match=r"config\.json"):
        load_hf(str(folder))


def test_missing_files_are_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(Fault, match=r"holds no model\.safetensors"):
        load_hf(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(Fault, match=r"holds no config\.json"):
        load_hf(str(folder))


def test_a_shard_that_is_missing_or_outside_the_folder(small: tuple[Any, Path], tmp_path: Path) -> None:
    folder = save(small[0], tmp_path / "shards", max_shard_size="5KB")
    index = folder / "model.safetensors.index.json"
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.rename(tmp_path / shard.name)
    with pytest.raises(Fault, match=f"weights file missing: {shard.name}"):
        load_hf(str(folder))
    index.write_text(index.read_text().replace(shard.name, f"../{shard.name}"))
    with pytest.raises(Fault, match="does not name the files of the folder"):
        load_hf(str(folder))


class Canary:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "executed")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "ckpt.pt", "consolidated.00.pth"])
def test_pickles_are_refused_and_never_loaded(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    canary = tmp_path / "canary"
    torch.save(Canary(canary), folder / name)
    with pytest.raises(Fault, match=f"{name} is a pickle.*save_pretrained.*safe_serialization=True") as caught:
        load_hf(str(folder))
    assert caught.value.code == Exit.CHECKPOINT
    assert not canary.exists()


def test_hub_names_are_found_in_the_local_cache(
    small: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    commit = "0" * 40
    home = tmp_path / "models--somebody--tiny-gpt2"
    shutil.copytree(small[1], home / "snapshots" / commit)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    model, found = load_hf("somebody/tiny-gpt2")
    assert found == home / "snapshots" / commit
    assert model.shape.n_layer == 2
    with pytest.raises(Fault, match=r"the hub did not give it: .* — somebody/absent — check the name") as caught:
        load_hf("somebody/absent")
    assert caught.value.code == Exit.CHECKPOINT


@pytest.mark.parametrize("name", ["no/such/folder", "./nowhere", "/nowhere/at/all", ""])
def test_paths_that_do_not_exist_are_not_asked_of_the_hub(name: str) -> None:
    with pytest.raises(Fault, match=r"no such folder — |holds no config"):
        load_hf(name)


def test_a_file_is_not_a_folder(folder: Path) -> None:
    with pytest.raises(Fault, match="not a folder"):
        load_hf(str(folder / "model.safetensors"))


def test_tokenizer_spec(folder: Path) -> None:
    with pytest.raises(Fault, match="no tokenizer beside a model with 130 token ids") as caught:
        hf_tokenizer_spec(folder)
    assert caught.value.code == Exit.CHECKPOINT
    reconfigure(folder, vocab_size=50257)
    assert hf_tokenizer_spec(folder) == "gpt2"
    for name in ("vocab.json", "merges.txt"):
        (folder / name).touch()
    assert hf_tokenizer_spec(folder) == str(folder)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    (folder / "tokenizer.json").touch()
    assert hf_tokenizer_spec(folder) == str(folder)
