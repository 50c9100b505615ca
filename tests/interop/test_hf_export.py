"""Exports to Hugging Face: the same model in transformers, to its gradients and its text; never half a folder."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatoken.cli import main
from megatoken.console import Console
from megatoken.errors import Exit, Fault
from megatoken.interop.export import export
from megatoken.interop.hf import load_hf
from megatoken.interop.hf_export import TOLERANCE
from megatoken.interop.weights import load_weights
from megatoken.model.gpt import GPT
from megatoken.model.loss import cross_entropy
from megatoken.sample import generate
from tests.interop.models import BYTES, SHAPE, byte_tokenizer, draw_model, relative, save_llmc

transformers = pytest.importorskip("transformers")

IDS = torch.randint(BYTES, (2, 20), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[GPT, Path]:
    """A model of ours, and its folder."""
    folder = tmp_path_factory.mktemp("export")
    model = draw_model()
    answer = export(str(save_llmc(folder / "llmc", model)), "hf", folder / "hf", "fp32", Console(quiet=True))
    assert answer["verified"]
    assert answer["max_relative_difference"] <= TOLERANCE
    return model, folder / "hf"


@pytest.fixture
def reloaded(exported: tuple[GPT, Path]) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(exported[1]).eval()


def test_logits_and_gradients_are_equal(exported: tuple[GPT, Path], reloaded: Any) -> None:
    model = exported[0]
    output = reloaded(IDS, labels=IDS)
    output.loss.backward()
    hidden = model(IDS[:, :-1])
    total, count = cross_entropy(hidden, model.unembedding, IDS[:, 1:], vocab_size=BYTES, chunk=7)
    (total / count).backward()
    assert relative(model.logits(hidden), output.logits[:, :-1]) <= TOLERANCE
    theirs = reloaded.transformer
    pairs = [
        (model.tokens.weight.grad[:BYTES], theirs.wte.weight.grad),
        (model.positions.weight.grad, theirs.wpe.weight.grad),
        (model.norm.bias.grad, theirs.ln_f.bias.grad),
        (model.blocks[1].attention.qkv.weight.grad, theirs.h[1].attn.c_attn.weight.grad.T),
        (model.blocks[0].mlp.down.bias.grad, theirs.h[0].mlp.c_proj.bias.grad),
    ]
    for ours, wanted in pairs:
        assert relative(ours, wanted) <= 1e-4
    model.zero_grad(set_to_none=True)


def test_greedy_text_is_the_same_and_of_real_ids(exported: tuple[GPT, Path], reloaded: Any) -> None:
    prompt = IDS[:1, :4]
    theirs = reloaded.generate(prompt, max_new_tokens=16, min_new_tokens=16, do_sample=False)[0, 4:].tolist()
    ours = generate(exported[0], prompt[0].tolist(), tokens=16, temperature=0)[0]
    assert ours == theirs
    drawn = generate(exported[0], prompt[0].tolist(), tokens=16, temperature=2.0, n=8, seed=1)
    assert max(map(max, drawn)) < BYTES  # padding rows of the model have weights of 100


def test_the_folder_holds_no_padding_and_loads_silently(
    exported: tuple[GPT, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = exported[1]
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == BYTES
    assert load_file(folder / "model.safetensors")["transformer.wte.weight"].shape == (BYTES, 32)
    transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == generation.pad_token_id == byte_tokenizer().eot
    assert tokenizer("né\n")["input_ids"] == list("né\n".encode())
    assert (tokenizer.eos_token_id, tokenizer.model_max_length) == (256, 24)
    said = capfd.readouterr()
    assert said.out + said.err == ""


def test_and_back(exported: tuple[GPT, Path]) -> None:
    model, folder = exported
    again, _ = load_hf(str(folder))
    assert again.shape == model.shape == SHAPE
    for name, tensor in again.state_dict().items():
        rows = BYTES if name == "tokens.weight" else len(tensor)
        assert torch.equal(tensor[:rows], model.state_dict()[name][:rows]), name
    loaded = load_weights(str(folder), print)
    assert loaded.tokenizer.shares_ids(byte_tokenizer())


def test_bf16_weights_are_what_was_compared(tmp_path: Path) -> None:
    name = save_llmc(tmp_path / "llmc", draw_model())
    answer = export(str(name), "hf", tmp_path / "hf", "bf16", Console(quiet=True))
    assert answer["max_relative_difference"] <= TOLERANCE
    held = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    assert torch.equal(held["transformer.ln_f.bias"], draw_model().norm.bias.bfloat16())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_target_that_exists_is_left_alone(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, out = save_llmc(tmp_path / "llmc", draw_model()), tmp_path / "out"
    {"folder": out.mkdir, "file": out.touch, "link": lambda: out.symlink_to("nowhere")}[kind]()
    assert main(["export", str(name), "--to", "hf", "--out", str(out)]) == Exit.STORAGE
    assert capsys.readouterr().err == (
        f"error: the export's target exists — {out} — choose another --out, or remove it first\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llmc", "out"]


def test_half_an_export_never_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = save_llmc(tmp_path / "llmc", draw_model())
    monkeypatch.setattr("megatoken.interop.hf_export.TOLERANCE", -1.0)
    with pytest.raises(Fault, match=r"logits differ in transformers by .* of the largest") as caught:
        export(str(name), "hf", tmp_path / "hf", "fp32", Console(quiet=True))
    assert caught.value.code == Exit.CHECKPOINT
    assert [path.name for path in tmp_path.iterdir()] == ["llmc"]


def test_without_transformers_it_says_that_nothing_was_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = save_llmc(tmp_path / "llmc", draw_model())
    monkeypatch.setitem(sys.modules, "transformers", None)  # import finds nothing
    assert main(["export", str(name), "--to", "hf", "--out", str(tmp_path / "hf"), "--json"]) == Exit.DONE
    said = capsys.readouterr()
    assert json.loads(said.out)["verified"] is False
    assert "NOT VERIFIED, because transformers is not installed" in said.err
    assert load_hf(str(tmp_path / "hf"))[0].shape == SHAPE
