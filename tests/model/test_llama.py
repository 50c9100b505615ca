"""LLaMA's model: values and gradients of transformers, rotary positions."""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatoken.config.model_config import ModelConfig
from megatoken.config.presets import PRESETS
from megatoken.model.gpt import GPT
from megatoken.model.loss import cross_entropy
from megatoken.model.rope import apply_rotary, rope_inv_freq, rotary_cos_sin
from tests.tiny_model import TINY_LLAMA

transformers = pytest.importorskip("transformers")

SCALED = {
    "rope_factor": 8.0,
    "rope_context": 32,
}  # of four pairs one is kept, one lies in the transition, two are scaled
TINY_GPT = replace(
    TINY_LLAMA, n_head=4, n_kv_head=2, d_model=32, vocab_size=131, seq_len=80, rope_theta=10000.0
)


pytestmark = pytest.mark.usefixtures("one_thread")


def configure(model_config: ModelConfig) -> Any:
    """Our model config as transformers has it."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model_config.rope_theta}
    if model_config.rope_factor != 1:
        rope |= {
            "rope_type": "llama3",
            "factor": model_config.rope_factor,
            "low_freq_factor": model_config.rope_low,
            "high_freq_factor": model_config.rope_high,
            "original_max_position_embeddings": model_config.rope_context,
        }
    return transformers.LlamaConfig(
        vocab_size=model_config.vocab_size,
        hidden_size=model_config.d_model,
        intermediate_size=model_config.d_ff,
        num_hidden_layers=model_config.n_layer,
        num_attention_heads=model_config.n_head,
        num_key_value_heads=model_config.kv_heads,
        max_position_embeddings=model_config.seq_len,
        rms_norm_eps=model_config.norm_eps,
        tie_word_embeddings=model_config.tie_embeddings,
        rope_parameters=rope,
    )


def collect(model_config: ModelConfig, reference: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' tensors under our names: queries, keys and values packed, rows of padding left out."""
    weights = {
        "tokens.weight": reference["model.embed_tokens.weight"],
        "norm.weight": reference["model.norm.weight"],
    }
    if not model_config.tie_embeddings:
        weights["head.weight"] = reference["lm_head.weight"]
    names = {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "attention.out": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }
    for i in range(model_config.n_layer):
        layer = f"model.layers.{i}"
        weights |= {
            f"blocks.{i}.{mine}.weight": reference[f"{layer}.{name}.weight"]
            for mine, name in names.items()
        }
        weights[f"blocks.{i}.attention.qkv.weight"] = torch.cat(
            [reference[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
        )
    return weights


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers' model and in weights."""

    reference: Any
    model: GPT


def build_pair(model_config: ModelConfig) -> Pair:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        reference = transformers.LlamaForCausalLM(configure(model_config)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            # Norms too, so that nothing can be mixed up unseen; matrices large enough for attention to choose.
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.2))
    model = GPT(model_config)
    weights = model.state_dict()
    for name, tensor in collect(model_config, reference.state_dict()).items():
        weights[name].zero_()[: len(tensor)] = tensor
    model.load_state_dict(weights)
    return Pair(reference, model)


CASES = {
    "tied": TINY_GPT,
    "untied": replace(TINY_GPT, tie_embeddings=False),
    "tied, scaled": replace(TINY_GPT, **SCALED),
    "untied, scaled": replace(TINY_GPT, tie_embeddings=False, **SCALED),
    "a key for every query": replace(TINY_GPT, n_kv_head=0, norm_eps=1e-3),
    "one key for all": replace(TINY_GPT, n_kv_head=1),
}


@pytest.mark.parametrize("model_config", CASES.values(), ids=CASES)
def test_logits_and_gradients_are_those_of_transformers(model_config: ModelConfig):
    pair = build_pair(model_config)
    ids = torch.randint(
        0,
        model_config.vocab_size,
        (2, model_config.seq_len),
        generator=torch.Generator().manual_seed(1),
    )
    output = pair.reference(ids, labels=ids)
    output.loss.backward()
    hidden = pair.model(ids)
    logits, expected = pair.model.lm_head(hidden), output.logits
    assert logits.shape == expected.shape
    assert float((logits - expected).detach().abs().max() / expected.detach().abs().max()) <= 2e-5
    targets = torch.cat([ids[:, 1:], torch.full((2, 1), -1)], dim=1)
    total, count = cross_entropy(
        hidden, pair.model.lm_head_weight, targets, vocab_size=model_config.vocab_size, chunk=24
    )
    (total / count).backward()
    assert float((total / count).detach()) == pytest.approx(float(output.loss.detach()), rel=1e-6)
    expected_grads = collect(
        model_config, {name: p.grad for name, p in pair.reference.named_parameters()}
    )
    found = {name: p.grad for name, p in pair.model.named_parameters()}
    assert set(found) == set(expected_grads)
    for name, gradient in expected_grads.items():
        assert torch.count_nonzero(found[name][len(gradient) :]) == 0
        error = float((found[name][: len(gradient)] - gradient).norm() / gradient.norm())
        assert error <= 2e-5, f"{name} differs by {error:.1e}"


@pytest.mark.parametrize("name", ["llama2-7b", "llama3-8b", "llama3.1-405b", "llama3.2-1b"])
def test_inverse_frequencies_are_those_of_transformers(name: str):
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(configure(PRESETS[name]))
    inv_freq = rope_inv_freq(PRESETS[name], torch.device("cpu"))
    torch.testing.assert_close(inv_freq, rotary.inv_freq, rtol=3e-7, atol=0)
    assert float(inv_freq[0]) == 1.0


def test_low_precision_is_rotated_in_fp32_by_exact_angles():
    """A cosine in bf16 is wrong by up to 1/256, and a position in bf16 by whole tokens."""
    x = torch.randn(
        1, 3000, 2, TINY_GPT.d_head, generator=torch.Generator().manual_seed(0)
    ).bfloat16()
    cos_sin = rotary_cos_sin(TINY_GPT, torch.arange(3000))
    assert cos_sin is not None
    assert cos_sin[0].dtype == torch.float32
    low, exact = apply_rotary(x, cos_sin), apply_rotary(x.float(), cos_sin)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low, exact.bfloat16(), rtol=0, atol=0)
