"""Hugging Face folders: parity with transformers at full size, and errors for damaged or unsupported folders."""

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

from megatoken.config.model_config import ModelConfig
from megatoken.config.presets import PRESETS
from megatoken.convert.hf.export import write_hf
from megatoken.convert.hf.load import load_hf
from megatoken.convert.load_pretrained import find_tokenizer
from megatoken.data.tokenizer import load_tokenizer
from megatoken.errors import ExitCode, MegatokenError
from megatoken.model.gpt import GPT
from megatoken.model.loss import cross_entropy
from megatoken.sampling.choose import Sampling
from megatoken.sampling.generate import generate_ids

transformers = pytest.importorskip("transformers")

SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 24, "vocab_size": 130}


def reference_model(seed: int = 0, **sizes: int) -> Any:
    """A GPT2LMHeadModel with random weights, biases and norms too, so that no mix-up goes unnoticed."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        reference = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return reference


def save(reference: Any, folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        reference.save_pretrained(folder, **options)
    return folder


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers and here, and the logits of both for the same ids."""

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
    write_hf(again, model, load_tokenizer("bytes"), "fp32")  # the tokenizer does not matter here
    theirs, ours = (load_file(each / "model.safetensors") for each in (folder, again))
    assert theirs.keys() == ours.keys()
    assert all(
        torch.equal(ours[name], tensor) for name, tensor in theirs.items()
    )  # so the tests below cover the export, too
    for each in (folder, again):
        shutil.rmtree(each)  # half a gigabyte
    ids = torch.randint(0, 50257, (2, 32), generator=torch.Generator().manual_seed(1))
    output = reference(ids, labels=ids)
    output.loss.backward()
    hidden = model(ids[:, :-1])
    total, count = cross_entropy(
        hidden, model.lm_head_weight, ids[:, 1:], vocab_size=50257, chunk=24
    )
    assert float((total / count).detach()) == pytest.approx(float(output.loss.detach()), rel=1e-6)
    (total / count).backward()
    with torch.no_grad():
        logits = model.lm_head(hidden)
    return Pair(reference, model, logits, output.logits[:, :-1].detach(), ids)


def test_full_size_logits_equal_transformers(pair: Pair) -> None:
    assert pair.model.config == PRESETS["gpt2-124m"]
    assert pair.logits.shape == pair.expected_logits.shape
    difference = (pair.logits - pair.expected_logits).abs().max() / pair.expected_logits.abs().max()
    assert float(difference) <= 2e-5


def test_full_size_gradients_equal_transformers(pair: Pair) -> None:
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


def test_full_size_greedy_text_equals_transformers(pair: Pair) -> None:
    prompt = pair.ids[:1, :8]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # hundreds of small steps, that a second thread slows down
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
    assert generate_ids(
        pair.model, prompt[0].tolist(), Sampling(max_new_tokens=64, temperature=0)
    ) == [expected[0, 8:].tolist()]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    reference = reference_model(**SMALL)
    return reference, save(reference, tmp_path_factory.mktemp("small"))


@pytest.fixture
def folder(small: tuple[Any, Path], tmp_path: Path) -> Path:
    """A copy of the small model's folder, to be damaged."""
    return Path(shutil.copytree(small[1], tmp_path / "copy"))


def logits_of(model: GPT) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(torch.arange(20)[None])


def test_small_model_of_odd_vocabulary(small: tuple[Any, Path]) -> None:
    reference, folder = small
    model, found = load_hf(str(folder))
    assert found == folder
    assert model.config == ModelConfig(
        n_layer=2, n_head=2, d_model=16, d_ff=64, vocab_size=130, seq_len=24
    )
    assert model.tokens.weight.shape == (256, 16)
    assert torch.count_nonzero(model.tokens.weight[130:]) == 0
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(
            logits_of(model), reference(torch.arange(20)[None]).logits, rtol=1e-5, atol=1e-6
        )


def test_n_inner_is_d_ff(tmp_path: Path) -> None:
    model, _ = load_hf(str(save(reference_model(**SMALL, n_inner=40), tmp_path)))
    assert model.config.d_ff == 40


def test_shards_are_one_model(small: tuple[Any, Path], tmp_path: Path) -> None:
    reference, one_file = small
    folder = save(reference, tmp_path, max_shard_size="5KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(load_hf(str(folder))[0]), logits_of(load_hf(str(one_file))[0]))


def test_weights_are_those_that_the_index_names(tmp_path: Path) -> None:
    """Older files in the same folder, and files with names of their own."""
    folder = save(reference_model(seed=1, **SMALL), tmp_path, max_shard_size="3KB")
    for path in folder.glob("*.safetensors"):
        path.rename(path.with_name(path.name.replace("-of-", "-of-9")))
    save(reference_model(seed=2, **SMALL), folder, max_shard_size="5KB")
    index = folder / "model.safetensors.index.json"
    for path in sorted(folder.glob("*-of-0*.safetensors"))[:2]:
        path.rename(path.with_name(renamed := path.name.replace("model-", "weights.")))
        index.write_text(index.read_text().replace(path.name, renamed))
    reference = transformers.GPT2LMHeadModel.from_pretrained(folder)
    stale = save(reference_model(seed=3, **SMALL), tmp_path / "stale")
    (stale / "model.safetensors").rename(folder / "model.safetensors")
    model, _ = load_hf(str(folder))
    with torch.no_grad():
        torch.testing.assert_close(
            logits_of(model), reference(torch.arange(20)[None]).logits, rtol=1e-5, atol=1e-6
        )


def rewrite(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def reconfigure(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {
            name.removeprefix("transformer."): t for name, t in tensors.items()
        },  # as OpenAI's repository
        lambda tensors: tensors | {"transformer.h.0.attn.bias": torch.ones(1, 1, 24, 24)},
        lambda tensors: tensors | {"transformer.h.1.attn.masked_bias": torch.tensor(-1e4)},
        lambda tensors: tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()},
    ],
)
def test_older_layouts_of_the_same_model(
    small: tuple[Any, Path],
    folder: Path,
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
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
    "change",
    [
        lambda t: drop(t, "transformer.h.1.mlp.c_fc.bias"),
        lambda t: t | {"score.weight": torch.zeros(2, 2)},
        lambda t: t | {"transformer.ln_f.bias": torch.zeros(7)},
        lambda t: {"a": torch.zeros(1)},
        lambda t: t | {"lm_head.weight": torch.zeros(130, 16)},
        lambda t: t | {"transformer.ln_f.bias": torch.full((16,), torch.nan)},
        lambda t: t | {"transformer.ln_f.bias": torch.zeros(16, dtype=torch.int8)},
    ],
)
def test_wrong_tensors_are_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    rewrite(folder, change)
    with pytest.raises(MegatokenError) as caught:
        load_hf(str(folder))
    assert caught.value.code == ExitCode.CHECKPOINT
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "opt"},
        {"activation_function": "relu"},
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"layer_norm_epsilon": 0},
        {"tie_word_embeddings": False},
        {"n_head": 3},
        {"n_layer": "two"},
        {"n_embd": None},
        {"n_positions": 0},
        {"n_layer": 10**7},
        {"n_embd": 10**15, "n_head": 7},
        {"vocab_size": 10**400},
        {"layer_norm_epsilon": 10**400},
        {"model_type": ["gpt2"]},
        {"n_layer": 3},
        {"vocab_size": 131},
    ],
)
def test_unsupported_gpt2_configs_are_refused(folder: Path, values: dict[str, Any]) -> None:
    reconfigure(folder, **values)
    with pytest.raises(MegatokenError) as caught:
        load_hf(str(folder))
    assert caught.value.code == ExitCode.CHECKPOINT


@pytest.mark.parametrize("keep", [0, 7, 300, -1])
def test_truncated_weights_are_named(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(MegatokenError) as caught:
        load_hf(str(folder))
    assert caught.value.code == ExitCode.CHECKPOINT


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00\xff", "[" * 100_000], ids=str.__len__)
def test_damaged_configuration_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(MegatokenError, match=r"config\.json"):
        load_hf(str(folder))


def test_four_bit_weights_are_refused(folder: Path) -> None:
    """Two numbers a byte: torch can neither compare nor copy them."""
    path = folder / "model.safetensors"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    header["transformer.ln_f.bias"] |= {"dtype": "F4", "shape": [128]}  # of 64 bytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + path.read_bytes()[8 + length :])
    with pytest.raises(MegatokenError, match=r"ln_f\.bias") as caught:
        load_hf(str(folder))
    assert caught.value.code == ExitCode.CHECKPOINT


def test_missing_files_are_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(MegatokenError):
        load_hf(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(MegatokenError):
        load_hf(str(folder))
    (folder / "run-a" / "checkpoints").mkdir(parents=True)
    with pytest.raises(MegatokenError):
        load_hf(str(folder))


def test_a_missing_shard_is_named(small: tuple[Any, Path], tmp_path: Path) -> None:
    folder = save(small[0], tmp_path / "shards", max_shard_size="5KB")
    sorted(folder.glob("*.safetensors"))[1].unlink()
    with pytest.raises(MegatokenError):
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
    with pytest.raises(MegatokenError) as caught:
        load_hf(str(folder))
    assert caught.value.code == ExitCode.CHECKPOINT
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
    assert model.config.n_layer == 2
    with pytest.raises(MegatokenError) as caught:
        load_hf("somebody/absent")
    assert caught.value.code == ExitCode.CHECKPOINT


@pytest.mark.parametrize("name", ["no/such/folder", "./nowhere", "/nowhere/at/all", ""])
def test_missing_paths_are_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(MegatokenError):
        load_hf(name)


def test_find_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(MegatokenError) as caught:
        find_tokenizer(tmp_path, 130)
    assert caught.value.code == ExitCode.CHECKPOINT
    assert find_tokenizer(tmp_path, 50257) == "gpt2"
    (tmp_path / "vocab.json").touch()
    assert find_tokenizer(tmp_path, 50257) == "gpt2"
    (tmp_path / "merges.txt").touch()
    assert find_tokenizer(tmp_path, 50257) == str(tmp_path)
    (tmp_path / "vocab.json").rename(tmp_path / "tokenizer.json")
    assert find_tokenizer(tmp_path, 130) == str(tmp_path)
