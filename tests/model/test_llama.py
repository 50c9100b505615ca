"""LLaMA's model: values and gradients of transformers, rotary positions, golden losses."""

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatoken.config.model_config import ModelConfig
from megatoken.config.presets import PRESETS
from megatoken.model.gpt import GPT, set_activation_checkpointing
from megatoken.model.loss import cross_entropy
from megatoken.model.rope import apply_rotary, rope_inv_freq, rotary_cos_sin
from tests.tiny_model import TINY_LLAMA, tiny_state

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
def test_logits_and_gradients_are_those_of_transformers(model_config: ModelConfig) -> None:
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
def test_inverse_frequencies_are_those_of_transformers(name: str) -> None:
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(configure(PRESETS[name]))
    inv_freq = rope_inv_freq(PRESETS[name], torch.device("cpu"))
    torch.testing.assert_close(inv_freq, rotary.inv_freq, rtol=3e-7, atol=0)
    assert float(inv_freq[0]) == 1.0


def test_scaling_slows_long_wavelengths_only() -> None:
    plain, scaled = (
        rope_inv_freq(
            replace(TINY_GPT, d_model=32 * 16, rope_factor=factor, rope_context=1024),
            torch.device("cpu"),
        )
        for factor in (1.0, 4.0)
    )
    rounds, share = plain * 1024 / (2 * math.pi), scaled / plain
    assert torch.all(share[rounds >= 4] == 1)
    torch.testing.assert_close(share[rounds <= 1], torch.full_like(share[rounds <= 1], 0.25))
    assert torch.all(share.diff() <= 0)
    assert 0.25 < float(share[(rounds > 1) & (rounds < 4)][0]) < 1


def test_only_the_distance_of_two_positions_matters() -> None:
    q, k = torch.randn(
        2, 1, 1, 1, TINY_GPT.d_head, generator=torch.Generator().manual_seed(0)
    ).double()

    def score(one: int, other: int) -> float:
        cos_sin = [rotary_cos_sin(TINY_GPT, torch.tensor([position])) for position in (one, other)]
        assert cos_sin[0] is not None
        assert cos_sin[1] is not None
        return float((apply_rotary(q, cos_sin[0]) * apply_rotary(k, cos_sin[1])).sum())

    assert score(9, 4) == pytest.approx(score(55, 50), rel=1e-5)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-2)
    assert rotary_cos_sin(replace(TINY_GPT, pos_emb="learned"), torch.arange(3)) is None


def test_low_precision_is_rotated_in_fp32_by_exact_angles() -> None:
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


def test_shapes_of_the_parameters() -> None:
    """Checkpoints and tensor parallelism rely on these names and shapes."""
    model = GPT(replace(TINY_GPT, tie_embeddings=False))
    sizes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    block = {
        name.removeprefix("blocks.1."): size
        for name, size in sizes.items()
        if name.startswith("blocks.1.")
    }
    assert block == {
        "norm1.weight": (32,),
        "attention.qkv.weight": (32 + 2 * 16, 32),
        "attention.out.weight": (32, 32),
        "norm2.weight": (32,),
        "mlp.gate.weight": (96, 32),
        "mlp.up.weight": (96, 32),
        "mlp.down.weight": (32, 96),
    }
    others = {name for name in sizes if not name.startswith("blocks.")}
    assert others == {"tokens.weight", "norm.weight", "head.weight"}
    assert sizes["head.weight"] == sizes["tokens.weight"] == (256, 32)
    assert list(model.buffers()) == []


@pytest.mark.parametrize("tied", [True, False])
def test_initial_weights(tied: bool) -> None:
    model_config = replace(
        TINY_GPT, n_layer=8, d_model=128, d_ff=256, vocab_size=1000, tie_embeddings=tied
    )
    model = GPT(model_config, seed=3)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.all(parameter == 1), name
            continue
        std = 0.02 / 4 if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
        assert parameter[:1000].std().item() == pytest.approx(std, rel=0.03), name
    assert (
        torch.count_nonzero(model.lm_head_weight[1000:])
        == torch.count_nonzero(model.tokens.weight[1000:])
        == 0
    )
    assert torch.equal(model.lm_head_weight, model.tokens.weight) == tied


def learn(model: GPT, ids: Tensor, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for _ in range(steps + 1):
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def draw_ids(model_config: ModelConfig, rows: int) -> Tensor:
    return torch.randint(
        0,
        model_config.vocab_size,
        (rows, model_config.seq_len),
        generator=torch.Generator().manual_seed(1337),
    )


def test_golden_losses() -> None:
    """Three AdamW steps on one batch; the literals change only when the model, its init or the loss does."""
    model = GPT(replace(TINY_LLAMA, tie_embeddings=False, **SCALED), seed=1337)
    assert learn(model, draw_ids(TINY_LLAMA, 4)) == pytest.approx(
        [4.571456, 4.172758, 3.897610, 3.598461], abs=1e-5
    )


def test_norms_are_not_decayed() -> None:
    state = tiny_state(model_config=replace(TINY_LLAMA, tie_embeddings=False))
    decayed, plain = (len(group["params"]) for group in state.optimizer.param_groups)
    assert (decayed, plain) == (2 + 2 * 5, 2 * 2 + 1)


@pytest.mark.parametrize("recompute", ["gelu", "block"])
def test_recomputing_changes_nothing(recompute: str) -> None:
    losses = []
    for mode in ("none", recompute):
        model = GPT(replace(TINY_LLAMA, dropout=0.1), seed=5)
        set_activation_checkpointing(model, mode)
        torch.manual_seed(0)
        losses.append(learn(model, draw_ids(TINY_LLAMA, 2)))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("switch", [{"norm": "rmsnorm"}, {"pos_emb": "rotary"}, {"mlp": "swiglu"}, {"bias": False},
                                    {"tie_embeddings": False}, {"n_kv_head": 1}])  # fmt: skip
def test_every_switch_works_alone(switch: dict[str, Any]) -> None:
    model_config = ModelConfig(
        n_layer=2, n_head=2, d_model=32, d_ff=64, vocab_size=97, seq_len=16, **switch
    )
    model = GPT(model_config, seed=0)
    losses = learn(model, draw_ids(model_config, 4))
    assert losses[0] == pytest.approx(math.log(97), abs=0.1)
    assert losses[-1] < losses[0] - 0.3
    assert [
        name for name, p in model.named_parameters() if p.grad is None or p.grad.norm() == 0
    ] == []


def test_attention_is_causal() -> None:
    model = GPT(TINY_GPT).eval()
    ids = draw_ids(TINY_GPT, 1)
    changed = ids.clone()
    changed[0, 9] = (changed[0, 9] + 1) % TINY_GPT.vocab_size
    with torch.no_grad():
        difference = (model(ids) - model(changed)).abs().amax(-1)[0]
    assert torch.count_nonzero(difference[:9]) == 0
    assert torch.all(difference[9:] > 0)
