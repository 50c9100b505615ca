"""Hugging Face folders load as in transformers; damaged or unsupported ones are refused."""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatoken.base.errors import CheckpointError
from megatoken.convert.hf.load import WEIGHTS, load_hf
from megatoken.convert.vocabulary import find_tokenizer
from megatoken.model.gpt import GPT

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:::transformers")

Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 24, "vocab_size": 130}


def reference_model(seed: int = 0, **sizes: int) -> Any:
    """Return a GPT2LMHeadModel with random weights, biases and norms."""
    torch.manual_seed(seed)
    reference = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return reference


def save(reference: Any, folder: Path, **options: Any) -> Path:
    reference.save_pretrained(folder, **options)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    reference = reference_model(**SMALL)
    return reference, save(reference, tmp_path_factory.mktemp("small"))


@pytest.fixture
def folder(small: tuple[Any, Path], tmp_path: Path) -> Path:
    """A copy of the small model's folder, to be damaged."""
    return shutil.copytree(small[1], tmp_path / "copy")


def logits_of(model: GPT) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(torch.arange(20)[None])


def test_the_index_selects_weights(small: tuple[Any, Path], tmp_path: Path):
    folder = save(reference_model(seed=1, **SMALL), tmp_path)
    (folder / WEIGHTS).rename(tmp_path / "stale")
    save(small[0], folder, max_shard_size="5KB")
    (tmp_path / "stale").rename(folder / WEIGHTS)
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(load_hf(str(folder))[0]), logits_of(load_hf(str(small[1]))[0]))


def test_missing_files_are_refused(small: tuple[Any, Path], folder: Path, tmp_path: Path):
    shards = save(small[0], tmp_path / "shards", max_shard_size="5KB")
    sorted(shards.glob("*.safetensors"))[1].unlink()
    (folder / WEIGHTS).unlink()
    for path in (shards, folder, tmp_path):
        with pytest.raises(CheckpointError):
            load_hf(str(path))


def test_hub_names_are_found_in_the_local_cache(
    small: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    commit = "0" * 40
    home = tmp_path / "models--somebody--tiny-gpt2"
    shutil.copytree(small[1], home / "snapshots" / commit)
    (home / "refs").mkdir()
    (home / "refs/main").write_text(commit)
    assert load_hf("somebody/tiny-gpt2")[1] == home / "snapshots" / commit
    with pytest.raises(CheckpointError):
        load_hf("somebody/absent")


def test_find_tokenizer(tmp_path: Path):
    with pytest.raises(CheckpointError):
        find_tokenizer(tmp_path, 130)
    (tmp_path / "vocab.json").touch()
    assert find_tokenizer(tmp_path, 50257) == "gpt2"
    (tmp_path / "merges.txt").touch()
    assert find_tokenizer(tmp_path, 50257) == str(tmp_path)
    (tmp_path / "vocab.json").rename(tmp_path / "tokenizer.json")
    assert find_tokenizer(tmp_path, 130) == str(tmp_path)


OLDER = [
    lambda t: {name.removeprefix("transformer."): t[name] for name in t},  # OpenAI's repository
    lambda t: t | {"transformer.h.0.attn.bias": torch.ones(1, 1, 24, 24)},
    lambda t: t | {"transformer.h.1.attn.masked_bias": torch.tensor(-1e4)},
    lambda t: t | {"lm_head.weight": t["transformer.wte.weight"].clone()},
]
WRONG = [
    lambda t: {key: value for key, value in t.items() if key != "transformer.ln_f.bias"},
    lambda t: t | {"score.weight": torch.zeros(2, 2)},
    lambda t: t | {"transformer.ln_f.bias": torch.zeros(7)},
    lambda t: t | {"lm_head.weight": torch.zeros(130, 16)},
    lambda t: t | {"transformer.ln_f.bias": torch.full((16,), torch.nan)},
    lambda t: t | {"transformer.ln_f.bias": torch.zeros(16, dtype=torch.int8)},
]


def test_older_layouts_load_and_tensors_that_do_not_fit_are_refused(folder: Path):
    name, path = str(folder), folder / WEIGHTS
    tensors, logits = load_file(path), logits_of(load_hf(name)[0])
    for change in OLDER:
        save_file(change(tensors), path)
        assert torch.equal(logits_of(load_hf(name)[0]), logits)
    for change in WRONG:
        save_file(change(tensors), path)
        with pytest.raises(CheckpointError, match=re.escape(name)):
            load_hf(name)
    save_file({key: value.bfloat16() for key, value in tensors.items()}, path)
    rounded = tensors["transformer.wpe.weight"].bfloat16().float()
    assert torch.equal(load_hf(name)[0].positions.weight, rounded)


def test_missing_paths_are_not_looked_up_on_the_hub(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for name in ("no/such/folder", "./nowhere", "runs/absent", ""):
        with pytest.raises(CheckpointError, match=r"^(?!.*hub:)"):
            load_hf(name)
