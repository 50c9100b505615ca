"""Exports have the same logits, gradients and text in transformers; a failed one leaves nothing."""

import json
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megatoken.console import Console
from megatoken.convert.export import export
from megatoken.convert.hf.export import TOLERANCE, write_hf
from megatoken.convert.hf.families import choose_family
from megatoken.convert.hf.load import load_hf
from megatoken.convert.load_pretrained import LoadedModel, load_pretrained
from megatoken.errors import CheckpointError, ConfigError, StorageError
from megatoken.model.gpt import GPT
from megatoken.model.loss import cross_entropy
from megatoken.sampling.choose import Sampling
from megatoken.sampling.generate import generate_ids
from tests.convert.models import (
    BYTES,
    FAMILIES,
    TINY_GPT,
    byte_tokenizer,
    draw_model,
    relative,
    save_run,
)

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.randint(BYTES, (2, 20), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", params=FAMILIES)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[GPT, Path]:
    """A model of every family, and the folder it is exported to."""
    folder = tmp_path_factory.mktemp("export")
    model = draw_model(FAMILIES[request.param])
    answer = export(
        str(save_run(folder / "run", model)), "hf", folder / "hf", "fp32", Console(quiet=True)
    )
    assert answer["verified"]
    assert answer["max_relative_difference"] <= TOLERANCE
    return model, folder / "hf"


@pytest.fixture
def reloaded(exported: tuple[GPT, Path]) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(exported[1]).eval()


def test_logits_and_gradients_are_equal(exported: tuple[GPT, Path], reloaded: Any):
    model = exported[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        output = reloaded(IDS, labels=IDS)
    output.loss.backward()
    hidden = model(IDS[:, :-1])
    total, count = cross_entropy(
        hidden, model.lm_head_weight, IDS[:, 1:], vocab_size=BYTES, chunk=7
    )
    (total / count).backward()
    assert relative(model.lm_head(hidden), output.logits[:, :-1]) <= TOLERANCE
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    theirs = dict(reloaded.named_parameters())
    views = choose_family(model.config).view_params(ours, model.config)
    assert views.keys() == {
        name for name in theirs if model.config.bias or not name.endswith(".bias")
    }
    for name, view in views.items():
        assert relative(view, theirs[name].grad) <= 1e-4, name
    model.zero_grad(set_to_none=True)


def decode(model: GPT, prompt: torch.Tensor) -> list[int]:
    sampling = Sampling(max_new_tokens=16, temperature=0)
    return generate_ids(model, prompt[0].tolist(), sampling)[0]


def test_greedy_text_is_the_same_without_padding_ids(exported: tuple[GPT, Path], reloaded: Any):
    model = exported[0]
    prompt = IDS[:1, :4]
    reloaded.generation_config.eos_token_id = None
    theirs = reloaded.generate(prompt, max_new_tokens=16, do_sample=False)[0, 4:].tolist()
    assert decode(model, prompt) == theirs
    sampling = Sampling(max_new_tokens=16, temperature=2.0, seed=1)
    samples = generate_ids(model, prompt[0].tolist(), sampling, num_samples=8)
    assert max(map(max, samples)) < BYTES  # padding rows of the model have weights of 100


def test_the_folder_holds_no_padding_and_loads_silently(
    exported: tuple[GPT, Path], capfd: pytest.CaptureFixture[str]
):
    folder = exported[1]
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == BYTES
    transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == generation.pad_token_id == byte_tokenizer().eot
    assert tokenizer("né\n")["input_ids"] == list("né\n".encode())
    assert (tokenizer.eos_token_id, tokenizer.model_max_length) == (256, 24)
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""


def test_round_trip(exported: tuple[GPT, Path]):
    model, folder = exported
    again, _ = load_hf(str(folder))
    # transformers' GPT-2 always has biases.
    assert replace(again.config, bias=model.config.bias) == model.config
    ours = model.state_dict()
    for name, tensor in again.state_dict().items():
        rows = BYTES if name in ("tokens.weight", "head.weight") else len(tensor)
        expected = ours.get(name, torch.zeros_like(tensor))
        assert torch.equal(tensor[:rows], expected[:rows]), name
        assert not tensor[rows:].any()
    loaded = load_pretrained(str(folder), print)
    assert loaded.tokenizer.shares_ids(byte_tokenizer())


@pytest.mark.parametrize(("kind", "tied"), [("Llama", True), ("Llama", False), ("Qwen3", True)])
def test_a_model_of_transformers_has_the_same_logits_and_text(
    kind: str, tied: bool, tmp_path: Path
):
    torch.manual_seed(0)
    rope = {
        "rope_type": "llama3",
        "rope_theta": 300.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    config = getattr(transformers, f"{kind}Config")(
        head_dim=8,
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
    reference = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    reference.save_pretrained(tmp_path)
    model, _ = load_hf(str(tmp_path))
    assert relative(model.logits(IDS), reference(IDS).logits) <= TOLERANCE
    prompt = IDS[:1, :4]
    text = reference.generate(
        prompt, max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert decode(model, prompt) == text[0, 4:].tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"head_dim": 16},
        {"num_key_value_heads": 3},
    ],
)
def test_unsupported_llama_configs_are_refused(tmp_path: Path, change: dict[str, Any]):
    model_config = replace(FAMILIES["llama-untied"], n_kv_head=2)
    write_hf(tmp_path, draw_model(model_config), byte_tokenizer(), "fp32")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError):
        load_hf(str(tmp_path))


@pytest.mark.parametrize(
    "switch",
    [{"embedding_norm": True}, {"logit_softcap": 15.0}, {"bias": True}, {"norm": "layernorm"}],
    ids=str,
)
def test_models_that_no_format_has_are_refused(switch: dict[str, Any], tmp_path: Path):
    model = draw_model(replace(FAMILIES["qwen3-tied"], **switch))
    for to in ("hf", "llmc"):
        with pytest.raises(ConfigError):
            export_model(model, tmp_path, to=to)
    assert list(tmp_path.iterdir()) == []


def export_model(model: GPT, folder: Path, to: str = "hf", dtype: str = "fp32") -> dict[str, Any]:
    loaded = LoadedModel(model, byte_tokenizer(), "it")
    return export(loaded, to, folder / "out", dtype, Console(quiet=True))


def test_unused_ids_are_left_out(tmp_path: Path):
    answer = export_model(draw_model(replace(TINY_GPT, vocab_size=300)), tmp_path)
    assert answer["ids_left_out"] == 43
    assert load_hf(f"{tmp_path}/out")[0].config == TINY_GPT


def test_bf16_export_is_compared_as_written(tmp_path: Path):
    answer = export_model(draw_model(), tmp_path, dtype="bf16")
    assert answer["max_relative_difference"] <= TOLERANCE
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert torch.equal(tensors["transformer.ln_f.bias"], draw_model().norm.bias.bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_target_that_exists_is_left_alone(tmp_path: Path):
    (tmp_path / "out").symlink_to("nowhere")
    with pytest.raises(StorageError):
        export_model(draw_model(), tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def fail(error: Exception, *_: object, **__: object) -> None:
    raise error


@pytest.mark.parametrize(
    ("target", "value", "expected"),
    [
        (
            "megatoken.convert.hf.export.save_file",
            partial(fail, SafetensorError("I/O error: No space (os error 28)")),
            StorageError,
        ),
        (
            "transformers.AutoModelForCausalLM.from_pretrained",
            partial(fail, ValueError("unknown\narchitecture")),
            CheckpointError,
        ),
        ("megatoken.convert.hf.export.TOLERANCE", -1.0, CheckpointError),
    ],
)
def test_a_failed_export_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    value: object,
    expected: type[Exception],
):
    monkeypatch.setattr(target, value)
    with pytest.raises(expected):
        export_model(draw_model(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_transformers_verified_is_false(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert export_model(draw_model(), tmp_path)["verified"] is False
    assert load_hf(f"{tmp_path}/out")[0].config == TINY_GPT
