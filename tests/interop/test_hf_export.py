"""Exports to Hugging Face: the same model in transformers, to its gradients and its text; never half a folder."""

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
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
from megatoken.interop.hf_export import TOLERANCE, write_hf
from megatoken.interop.hf_families import family_of
from megatoken.interop.weights import load_weights
from megatoken.model.gpt import GPT
from megatoken.model.loss import cross_entropy
from megatoken.sample import generate
from tests.interop.models import BYTES, FAMILIES, SHAPE, byte_tokenizer, draw_model, relative, save_run

transformers = pytest.importorskip("transformers")

IDS = torch.randint(BYTES, (2, 20), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # hundreds of small steps, which a second core hardly helps and a busy one stops
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=FAMILIES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[GPT, Path]:
    """A model of ours of every family, and its folder."""
    folder = tmp_path_factory.mktemp("export")
    model = draw_model(FAMILIES[request.param])
    answer = export(str(save_run(folder / "run", model)), "hf", folder / "hf", "fp32", Console(quiet=True))
    assert answer["verified"]
    assert answer["max_relative_difference"] <= TOLERANCE
    return model, folder / "hf"


@pytest.fixture
def reloaded(exported: tuple[GPT, Path]) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(exported[1]).eval()


def test_logits_and_gradients_are_equal(exported: tuple[GPT, Path], reloaded: Any) -> None:
    model = exported[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        output = reloaded(IDS, labels=IDS)
    output.loss.backward()
    hidden = model(IDS[:, :-1])
    total, count = cross_entropy(hidden, model.unembedding, IDS[:, 1:], vocab_size=BYTES, chunk=7)
    (total / count).backward()
    assert relative(model.logits(hidden), output.logits[:, :-1]) <= TOLERANCE
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    theirs = dict(reloaded.named_parameters())
    places = family_of(model.shape).list_places(model.shape)
    assert places.keys() == theirs.keys()
    for name, place in places.items():
        if place.ours in ours:
            assert relative(place.take(ours), theirs[name].grad) <= 1e-4, name
    model.zero_grad(set_to_none=True)


def test_greedy_text_is_the_same_and_of_real_ids(exported: tuple[GPT, Path], reloaded: Any) -> None:
    prompt = IDS[:1, :4]
    reloaded.generation_config.eos_token_id = None
    theirs = reloaded.generate(prompt, max_new_tokens=16, do_sample=False)[0, 4:].tolist()
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
    tensors = load_file(folder / "model.safetensors")
    assert {len(tensors[name]) for name in tensors if "wte" in name or "embed" in name or "lm_head" in name} == {BYTES}
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
    assert replace(again.shape, bias=model.shape.bias) == model.shape  # transformers' GPT-2 always has biases: zeros
    ours = model.state_dict()
    for name, tensor in again.state_dict().items():
        rows = BYTES if name in ("tokens.weight", "head.weight") else len(tensor)
        expected = ours.get(name, torch.zeros_like(tensor))
        assert torch.equal(tensor[:rows], expected[:rows]), name
        assert not tensor[rows:].any()
    loaded = load_weights(str(folder), print)
    assert loaded.tokenizer.shares_ids(byte_tokenizer())


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_of_transformers_is_ours_to_its_gradients_and_text(tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rope = {"rope_type": "llama3", "rope_theta": 300.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = transformers.LlamaConfig(
        vocab_size=BYTES,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=40,
        tie_word_embeddings=tied,
        rope_parameters=rope | {"original_max_position_embeddings": 16},
    )
    reference = transformers.LlamaForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    model, _ = load_hf(str(tmp_path))
    assert (model.shape.kv_heads, model.shape.tied, model.shape.rope_factor, model.shape.seq_len) == (2, tied, 4.0, 40)
    output = reference(IDS, labels=IDS)
    output.loss.backward()
    hidden = model(IDS)
    assert relative(model.logits(hidden), output.logits) <= TOLERANCE
    total, count = cross_entropy(hidden[:, :-1], model.unembedding, IDS[:, 1:], vocab_size=BYTES, chunk=0)
    (total / count).backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, place in family_of(model.shape).list_places(model.shape).items():
        assert relative(place.take(ours), dict(reference.named_parameters())[name].grad) <= 1e-4, name
    prompt = IDS[:1, :4]
    theirs = reference.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert generate(model, prompt[0].tolist(), tokens=16, temperature=0)[0] == theirs[0, 4:].tolist()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "llama3's scaling lacks low_freq_factor"),
        ({"rope_theta": "big"}, "rope_theta is 'big', not a positive number"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not computed here"),
        ({"attention_bias": True}, "biases in attention and MLP must be both"),
        ({"num_key_value_heads": 3}, "4 heads do not share 3 of keys and values"),
        ({"head_dim": 16}, "head_dim 16 is not hidden_size / num_attention_heads"),
        ({"num_key_value_heads": None}, r"k_proj\.weight is \(16, 32\), config\.json says \(32, 32\)"),
        ({"tie_word_embeddings": True}, r"lm_head\.weight differs from the token embedding"),
        ({"model_type": "mistral"}, "model_type 'mistral' is not supported .* supported: gpt2 and llama"),
    ],
)
def test_llamas_that_are_not_ours(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    shape = replace(FAMILIES["llama-untied"], n_kv_head=2)
    write_hf(tmp_path, draw_model(shape), byte_tokenizer(), "fp32")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(Fault, match=said) as caught:
        load_hf(str(tmp_path))
    assert caught.value.code == Exit.CHECKPOINT


def test_a_mix_that_transformers_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = save_run(tmp_path / "run", draw_model(replace(SHAPE, norm="rmsnorm")))
    assert main(["export", str(name), "--out", str(tmp_path / "hf")]) == Exit.CONFIG
    assert "error: no model of transformers has rmsnorm, learned positions, gelu" in capsys.readouterr().err
    assert main(["export", str(name), "--to", "llmc", "--out", str(tmp_path / "hf")]) == Exit.CONFIG
    assert "llm.c computes GPT-2 alone, this model has norm rmsnorm, not layernorm" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_ids_without_a_token_stay_behind(tmp_path: Path) -> None:
    model = draw_model(replace(SHAPE, vocab_size=300))  # 43 ids more than the tokenizer has
    export(str(save_run(tmp_path / "run", model)), "hf", tmp_path / "hf", "fp32", Console(quiet=True))
    assert load_hf(str(tmp_path / "hf"))[0].shape == SHAPE


def test_bf16_weights_are_what_was_compared(tmp_path: Path) -> None:
    name = save_run(tmp_path / "run", draw_model())
    answer = export(str(name), "hf", tmp_path / "hf", "bf16", Console(quiet=True))
    assert answer["max_relative_difference"] <= TOLERANCE
    held = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    assert torch.equal(held["transformer.ln_f.bias"], draw_model().norm.bias.bfloat16())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_target_that_exists_is_left_alone(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, out = save_run(tmp_path / "run", draw_model()), tmp_path / "out"
    {"folder": out.mkdir, "file": out.touch, "link": lambda: out.symlink_to("nowhere")}[kind]()
    assert main(["export", str(name), "--to", "hf", "--out", str(out)]) == Exit.STORAGE
    assert capsys.readouterr().err == (
        f"error: the export's target exists — {out} — choose another --out, or remove it first\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_half_an_export_never_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = save_run(tmp_path / "run", draw_model())
    monkeypatch.setattr("megatoken.interop.hf_export.TOLERANCE", -1.0)
    with pytest.raises(Fault, match=r"logits differ in transformers by .* of the largest") as caught:
        export(str(name), "hf", tmp_path / "hf", "fp32", Console(quiet=True))
    assert caught.value.code == Exit.CHECKPOINT
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_without_transformers_it_says_that_nothing_was_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = save_run(tmp_path / "run", draw_model())
    monkeypatch.setitem(sys.modules, "transformers", None)  # import finds nothing
    assert main(["export", str(name), "--to", "hf", "--out", str(tmp_path / "hf"), "--json"]) == Exit.DONE
    said = capsys.readouterr()
    assert json.loads(said.out)["verified"] is False
    assert "NOT VERIFIED, because transformers is not installed" in said.err
    assert load_hf(str(tmp_path / "hf"))[0].shape == SHAPE
