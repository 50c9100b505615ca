"""Exports have the same logits, gradients and text in transformers; a failed one leaves nothing."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import PRESETS
from megatoken.base.errors import CheckpointError, ConfigError, StorageError
from megatoken.convert.export import export
from megatoken.convert.hf.export import TOLERANCE, write_hf
from megatoken.convert.hf.families import choose_family
from megatoken.convert.hf.load import load_hf
from megatoken.inference.generate import generate_ids
from megatoken.inference.sampling import Sampling
from megatoken.model.flops import count_parameters
from megatoken.model.gpt import GPT
from megatoken.model.loss import cross_entropy
from megatoken.text.load_pretrained import LoadedModel, load_pretrained
from tests.convert.models import (
    BYTES,
    FAMILIES,
    TINY_GPT,
    assert_same_weights,
    byte_tokenizer,
    draw_model,
    relative,
    save_run,
)

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.randint(BYTES, (2, 20), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_the_same_model(
    family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """It has the same logits, gradients, text and ids, is read back, and holds no padding."""
    model = draw_model(FAMILIES[family])
    source, folder = str(save_run(tmp_path / "run", model)), tmp_path / "hf"
    answer = export(source, "hf", folder)
    assert answer["verified"]
    assert answer["max_relative_difference"] <= TOLERANCE
    capfd.readouterr()
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert capfd.readouterr() == ("", "")
    compare_gradients(model, reloaded)

    eos, pad = (getattr(reloaded.generation_config, f"{name}_token_id") for name in ("eos", "pad"))
    assert eos == pad == tokenizer.eos_token_id == byte_tokenizer().eot
    assert (reloaded.config.vocab_size, tokenizer.model_max_length) == (BYTES, 24)
    assert tokenizer("né\n")["input_ids"] == list("né\n".encode())
    assert_same_text(model, reloaded)
    sampling = Sampling(max_new_tokens=4, temperature=2.0, seed=1)
    samples = generate_ids(model, [1], sampling, num_samples=8)
    assert max(map(max, samples)) < BYTES  # padding rows of the model have weights of 100

    again = load_pretrained(folder)
    # transformers' GPT-2 always has biases.
    assert replace(again.model.config, bias=model.config.bias) == model.config
    assert_same_weights(again.model, model)
    for table in (again.model.tokens.weight, again.model.lm_head_weight):
        assert not table[BYTES:].any()
    assert again.tokenizer.vocabulary.shares_ids(byte_tokenizer().vocabulary)


def compare_gradients(model: GPT, theirs: Any) -> None:
    """Compare the logits of a forward, and the gradients of its loss."""
    targets, softcap = IDS[:, 1:], model.config.logit_softcap
    logits = theirs(IDS).logits[:, :-1]
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    hidden = model(IDS[:, :-1])
    total, count = cross_entropy(
        hidden, model.lm_head_weight, targets, vocab_size=BYTES, softcap=softcap, chunk=7
    )
    (total / count).backward()
    assert relative(model.lm_head(hidden), logits) <= TOLERANCE
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    expected = dict(theirs.named_parameters())
    views = choose_family(model.config).view_params(ours, model.config)
    has_bias = model.config.bias
    assert views.keys() == {name for name in expected if has_bias or not name.endswith(".bias")}
    for name, view in views.items():
        assert relative(view, expected[name].grad) <= 1e-4, name


def assert_same_text(model: GPT, theirs: Any) -> None:
    """Compare greedy text, of more ids than a window has."""
    theirs.generation_config.eos_token_id = None
    text = theirs.generate(IDS[:1, :4], max_new_tokens=8, do_sample=False, pad_token_id=0)
    ours = generate_ids(model, IDS[0, :4].tolist(), Sampling(max_new_tokens=8, temperature=0))
    assert ours == [text[0, 4:].tolist()]


SIZES = yaml.safe_load("""
vocab_size: 257
hidden_size: 48
intermediate_size: 80
num_hidden_layers: 3
num_attention_heads: 6
num_key_value_heads: 2
max_position_embeddings: 40
""")
MADE_BY_TRANSFORMERS = """
gpt2:
  kind: GPT2
  bos_token_id: 0
  eos_token_id: 0
  resid_pdrop: 0.0
  embd_pdrop: 0.0
  attn_pdrop: 0.0
llama:
  kind: Llama
  head_dim: 8
  rope_parameters: &llama3
    rope_type: llama3
    rope_theta: 300.0
    factor: 4.0
    low_freq_factor: 1.0
    high_freq_factor: 4.0
    original_max_position_embeddings: 16
llama, one kind of bias:
  kind: Llama
  attention_bias: true
  rope_parameters: &linear {rope_type: linear, rope_theta: 300.0, factor: 4.0}
llama, the other:
  kind: Llama
  mlp_bias: true
  rope_parameters: &yarn {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 100}
smollm2: {kind: Llama, tie_word_embeddings: true, rope_parameters: {rope_theta: 1.0e+5}}
qwen2: {kind: Qwen2, tie_word_embeddings: true}
qwen2, windows: {kind: Qwen2, use_sliding_window: true, sliding_window: 5, max_window_layers: 1}
qwen3: {kind: Qwen3, tie_word_embeddings: true, rope_parameters: *llama3}
qwen3, narrow heads: {kind: Qwen3, head_dim: 4, rope_parameters: *yarn}
qwen3, biases: {kind: Qwen3, attention_bias: true}
mistral: {kind: Mistral, sliding_window: 5, head_dim: 16}
mistral without windows: {kind: Mistral, sliding_window: null}
smollm3: {kind: SmolLM3, no_rope_layer_interval: 2, pad_token_id: null}
smollm3, windows:
  kind: SmolLM3
  no_rope_layer_interval: 2
  pad_token_id: 0
  use_sliding_window: true
  sliding_window: 5
olmo2:
  kind: Olmo2
  rope_parameters: {<<: *yarn, attention_factor: 1.2, beta_fast: 16.0, beta_slow: 2.0}
gemma3: &gemma {kind: Gemma3Text, query_pre_attn_scalar: 16, head_dim: 16, sliding_window: 5}
gemma3, scaled:
  <<: *gemma
  layer_types: [sliding_attention, full_attention, sliding_attention]
  final_logit_softcapping: 3.0
  rope_parameters:
    full_attention: *linear
    sliding_attention: {rope_type: default, rope_theta: 100.0}
"""


@pytest.mark.parametrize("name", yaml.safe_load(MADE_BY_TRANSFORMERS))
def test_a_model_of_transformers_has_the_same_logits_and_text_and_goes_back(
    name: str, tmp_path: Path
):
    torch.manual_seed(0)
    options = SIZES | yaml.safe_load(MADE_BY_TRANSFORMERS)[name]
    config = getattr(transformers, f"{options.pop('kind')}Config")(**options)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    reference.save_pretrained(tmp_path / "theirs")
    model, _ = load_hf(f"{tmp_path}/theirs")
    assert relative(model.logits(IDS), reference(IDS).logits) <= TOLERANCE
    assert_same_text(model, reference)
    export_model(model, tmp_path)
    again, _ = load_hf(f"{tmp_path}/out")
    assert again.config == model.config
    assert torch.equal(again.logits(IDS), model.logits(IDS))
    written = transformers.AutoConfig.from_pretrained(tmp_path / "out").to_dict()
    ignored = {"dtype", "rope_parameters", "max_window_layers", "_name_or_path", "n_inner"}
    if written["model_type"] == config.model_type:
        for key, value in config.to_dict().items():
            if key not in ignored and not key.endswith("_token_id"):
                assert written.get(key, value) == value, key


@pytest.mark.parametrize(
    "name",
    [name for name in PRESETS if name.startswith(("mistral", "qwen", "smollm", "olmo", "gemma"))],
)
def test_published_sizes_have_the_parameters_of_transformers(name: str):
    family = choose_family(PRESETS[name])
    values = family.write_config(PRESETS[name])
    config = transformers.AutoConfig.for_model(family.model_type, **values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == count_parameters(PRESETS[name])


def export_model(model: GPT, folder: Path, to: str = "hf", dtype: str = "fp32") -> dict[str, Any]:
    loaded = LoadedModel(model, byte_tokenizer(), "it")
    return export(loaded, to, folder / "out", dtype)


UNSUPPORTED_GPT2 = """
- model_type: opt
- activation_function: relu
- scale_attn_by_inverse_layer_idx: true
- layer_norm_epsilon: 0
- tie_word_embeddings: false
- n_head: 3
- n_layer: 3
- n_layer: 10_000_000
"""
UNSUPPORTED_LLAMA = """
- rope_scaling: {type: dynamic, factor: 2.0}
- rope_parameters: {rope_type: longrope}
- rope_parameters: {rope_type: default, partial_rotary_factor: 0.5}
- hidden_act: gelu
- quantization_config: {quant_method: fp8}
- layer_types: [chunked_attention, full_attention, full_attention]
- attention_bias: true
- head_dim: 16
- num_key_value_heads: 3
"""


@pytest.mark.parametrize(
    ("model_config", "table"),
    [
        (TINY_GPT, UNSUPPORTED_GPT2),
        (replace(FAMILIES["llama-untied"], n_kv_head=2), UNSUPPORTED_LLAMA),
    ],
)
def test_unsupported_configs_are_refused(model_config: ModelConfig, table: str, tmp_path: Path):
    write_hf(tmp_path, draw_model(model_config), byte_tokenizer(), "fp32")
    load_hf(str(tmp_path))
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    for change in yaml.safe_load(table):
        path.write_text(json.dumps(written | change))
        with pytest.raises(CheckpointError):
            load_hf(str(tmp_path))


def test_models_that_no_format_has_are_refused(tmp_path: Path):
    for switch in (
        {"embedding_norm": True},
        {"logit_softcap": 15.0},
        {"bias": True},
        {"norm": "layernorm"},
    ):
        model = draw_model(replace(FAMILIES["qwen3-tied"], **switch))
        for to in ("hf", "llmc"):
            with pytest.raises(ConfigError):
                export_model(model, tmp_path, to=to)
    assert list(tmp_path.iterdir()) == []
    config = replace(TINY_GPT, rope_context=99, rope_low=0.5, window_pattern="SL")
    assert choose_family(config).model_type == "gpt2"  # fields without effect do not matter


@pytest.mark.filterwarnings("ignore:43 ids without a token")
def test_unused_ids_are_left_out_and_without_transformers_nothing_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "transformers", None)
    answer = export_model(draw_model(replace(TINY_GPT, vocab_size=300)), tmp_path)
    assert (answer["ids_left_out"], answer["verified"]) == (43, False)
    assert load_hf(f"{tmp_path}/out")[0].config == TINY_GPT


def test_bf16_export_is_compared_as_written(tmp_path: Path):
    answer = export_model(draw_model(), tmp_path, dtype="bf16")
    assert answer["max_relative_difference"] <= TOLERANCE
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert torch.equal(tensors["transformer.ln_f.bias"], draw_model().norm.bias.bfloat16())
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("target", "error", "expected"),
    [
        ("megatoken.convert.hf.export.save_file", SafetensorError("(os error 28)"), StorageError),
        (
            "transformers.AutoModelForCausalLM.from_pretrained",
            ValueError("unknown\narchitecture"),
            CheckpointError,
        ),
        ("megatoken.convert.hf.export.TOLERANCE", None, CheckpointError),
    ],
)
def test_a_failed_export_leaves_what_was_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    error: Exception | None,
    expected: type[Exception],
):
    monkeypatch.setattr(target, Mock(side_effect=error) if error else -1.0)
    with pytest.raises(expected):
        export_model(draw_model(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").symlink_to("nowhere")
    with pytest.raises(StorageError):
        export_model(draw_model(), tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
