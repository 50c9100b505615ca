"""LLaMA's switches of the model: values and gradients of transformers, places that only matter by their distance."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatoken.model.gpt import GPT, initialize, use_recompute
from megatoken.model.loss import cross_entropy
from megatoken.model.rotary import find_speeds, make_turns, turn
from megatoken.presets import PRESETS, Shape
from tests.tiny import LLAMA, tiny_state

transformers = pytest.importorskip("transformers")

SCALED = {"rope_factor": 8.0, "rope_context": 32}  # of four planes one is left, one lies between, two are stretched
SHAPE = replace(LLAMA, n_head=4, n_kv_head=2, d_model=32, vocab_size=131, seq_len=80, rope_theta=10000.0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def configure(shape: Shape) -> Any:
    """transformers' words for our shape."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_factor != 1:
        rope |= {
            "rope_type": "llama3",
            "factor": shape.rope_factor,
            "low_freq_factor": shape.rope_low,
            "high_freq_factor": shape.rope_high,
            "original_max_position_embeddings": shape.rope_context,
        }
    return transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.n_layer,
        num_attention_heads=shape.n_head,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.seq_len,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=shape.tied,
        rope_parameters=rope,
    )


def collect(shape: Shape, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names: queries, keys and values packed, rows of padding left out."""
    ours = {"tokens.weight": theirs["model.embed_tokens.weight"], "norm.weight": theirs["model.norm.weight"]}
    if not shape.tied:
        ours["head.weight"] = theirs["lm_head.weight"]
    names = {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "attention.out": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }
    for i in range(shape.n_layer):
        layer = f"model.layers.{i}"
        ours |= {f"blocks.{i}.{mine}.weight": theirs[f"{layer}.{name}.weight"] for mine, name in names.items()}
        ours[f"blocks.{i}.attention.qkv.weight"] = torch.cat(
            [theirs[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
        )
    return ours


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers' model and in ours."""

    reference: Any
    model: GPT


def build_pair(shape: Shape) -> Pair:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        reference = transformers.LlamaForCausalLM(configure(shape)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            # Norms too, so that nothing can be mixed up unseen; matrices large enough for attention to choose.
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.2))
    model = GPT(shape)
    weights = model.state_dict()
    for name, tensor in collect(shape, reference.state_dict()).items():
        weights[name].zero_()[: len(tensor)] = tensor
    model.load_state_dict(weights)
    return Pair(reference, model)


CASES = {
    "tied": SHAPE,
    "untied": replace(SHAPE, tied=False),
    "tied, scaled": replace(SHAPE, **SCALED),
    "untied, scaled": replace(SHAPE, tied=False, **SCALED),
    "a key for every query": replace(SHAPE, n_kv_head=0, norm_eps=1e-3),
    "one key for all": replace(SHAPE, n_kv_head=1),
}


@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
def test_logits_and_gradients_are_those_of_transformers(shape: Shape) -> None:
    pair = build_pair(shape)
    ids = torch.randint(0, shape.vocab_size, (2, shape.seq_len), generator=torch.Generator().manual_seed(1))
    output = pair.reference(ids, labels=ids)
    output.loss.backward()
    hidden = pair.model(ids)
    logits, expected = pair.model.logits(hidden), output.logits
    assert logits.shape == expected.shape
    assert float((logits - expected).detach().abs().max() / expected.detach().abs().max()) <= 2e-5
    targets = torch.cat([ids[:, 1:], torch.full((2, 1), -1)], dim=1)
    total, count = cross_entropy(hidden, pair.model.unembedding, targets, vocab_size=shape.vocab_size, chunk=24)
    (total / count).backward()
    assert float((total / count).detach()) == pytest.approx(float(output.loss.detach()), rel=1e-6)
    wanted = collect(shape, {name: p.grad for name, p in pair.reference.named_parameters()})
    found = {name: p.grad for name, p in pair.model.named_parameters()}
    assert set(found) == set(wanted)
    for name, gradient in wanted.items():
        assert torch.count_nonzero(found[name][len(gradient) :]) == 0
        error = float((found[name][: len(gradient)] - gradient).norm() / gradient.norm())
        assert error <= 2e-5, f"{name} differs by {error:.1e}"


@pytest.mark.parametrize("name", ["llama2-7b", "llama3-8b", "llama3.1-405b", "llama3.2-1b"])
def test_speeds_are_those_of_transformers(name: str) -> None:
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(configure(PRESETS[name]))
    speeds = find_speeds(PRESETS[name], torch.device("cpu"))
    torch.testing.assert_close(speeds, rotary.inv_freq, rtol=3e-7, atol=0)
    assert float(speeds[0]) == 1.0


def test_scaling_stretches_long_waves_only() -> None:
    plain, scaled = (
        find_speeds(replace(SHAPE, d_model=32 * 16, rope_factor=factor, rope_context=1024), torch.device("cpu"))
        for factor in (1.0, 4.0)
    )
    rounds, share = plain * 1024 / (2 * math.pi), scaled / plain
    assert torch.all(share[rounds >= 4] == 1)
    torch.testing.assert_close(share[rounds <= 1], torch.full_like(share[rounds <= 1], 0.25))
    assert torch.all(share.diff() <= 0)
    assert 0.25 < float(share[(rounds > 1) & (rounds < 4)][0]) < 1


def test_only_the_distance_of_two_places_matters() -> None:
    q, k = torch.randn(2, 1, 1, 1, SHAPE.d_head, generator=torch.Generator().manual_seed(0)).double()

    def score(one: int, other: int) -> float:
        turns = [make_turns(SHAPE, torch.tensor([place])) for place in (one, other)]
        assert turns[0] is not None
        assert turns[1] is not None
        return float((turn(q, turns[0]) * turn(k, turns[1])).sum())

    assert score(9, 4) == pytest.approx(score(55, 50), rel=1e-5)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-2)
    assert make_turns(replace(SHAPE, positions="learned"), torch.arange(3)) is None


def test_low_precision_is_turned_in_fp32_by_exact_angles() -> None:
    """A cosine in bf16 is wrong by up to 1/256, and a place in bf16 by whole tokens."""
    x = torch.randn(1, 3000, 2, SHAPE.d_head, generator=torch.Generator().manual_seed(0)).bfloat16()
    turns = make_turns(SHAPE, torch.arange(3000))
    assert turns is not None
    assert turns[0].dtype == torch.float32
    low, exact = turn(x, turns), turn(x.float(), turns)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low, exact.bfloat16(), rtol=0, atol=0)


def test_shapes_of_the_parameters() -> None:
    """What checkpoints hold and other parts of the house split by name."""
    model = GPT(replace(SHAPE, tied=False))
    sizes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    block = {name.removeprefix("blocks.1."): size for name, size in sizes.items() if name.startswith("blocks.1.")}
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
    shape = replace(SHAPE, n_layer=8, d_model=128, d_ff=256, vocab_size=1000, tied=tied)
    model = GPT(shape)
    initialize(model, 3)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.all(parameter == 1), name
            continue
        std = 0.02 / 4 if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
        assert parameter[:1000].std().item() == pytest.approx(std, rel=0.03), name
    assert torch.count_nonzero(model.unembedding[1000:]) == torch.count_nonzero(model.tokens.weight[1000:]) == 0
    assert torch.equal(model.unembedding, model.tokens.weight) == tied


def learn(model: GPT, ids: Tensor, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for _ in range(steps + 1):
        total, count = cross_entropy(
            model(ids[:, :-1]), model.unembedding, ids[:, 1:], vocab_size=model.shape.vocab_size, chunk=7
        )
        losses.append(float((total / count).detach()))
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    return losses


def draw_ids(shape: Shape, rows: int) -> Tensor:
    return torch.randint(0, shape.vocab_size, (rows, shape.seq_len), generator=torch.Generator().manual_seed(1337))


def test_golden_losses() -> None:
    """Three AdamW steps on one batch; the literals change only when the model, its init or the loss does."""
    model = GPT(replace(LLAMA, tied=False, **SCALED))
    initialize(model, 1337)
    assert learn(model, draw_ids(LLAMA, 4)) == pytest.approx([4.571456, 4.172758, 3.897610, 3.598461], abs=1e-5)


def test_norms_are_not_decayed() -> None:
    state = tiny_state(shape=replace(LLAMA, tied=False))
    decayed, plain = (len(group["params"]) for group in state.optimizer.param_groups)
    assert (decayed, plain) == (2 + 2 * 5, 2 * 2 + 1)


@pytest.mark.parametrize("recompute", ["gelu", "block"])
def test_recomputing_changes_nothing(recompute: str) -> None:
    losses = []
    for what in ("none", recompute):
        model = GPT(LLAMA, dropout=0.1)
        initialize(model, 5)
        use_recompute(model, what)
        torch.manual_seed(0)
        losses.append(learn(model, draw_ids(LLAMA, 2)))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("switch", [{"norm": "rmsnorm"}, {"positions": "rotary"}, {"mlp": "swiglu"}, {"bias": False},
                                    {"tied": False}, {"n_kv_head": 1}])  # fmt: skip
def test_every_switch_works_alone(switch: dict[str, Any]) -> None:
    shape = Shape(n_layer=2, n_head=2, d_model=32, d_ff=64, vocab_size=97, seq_len=16, **switch)
    model = GPT(shape)
    initialize(model, 0)
    losses = learn(model, draw_ids(shape, 4))
    assert losses[0] == pytest.approx(math.log(97), abs=0.1)
    assert losses[-1] < losses[0] - 0.3
    assert [name for name, p in model.named_parameters() if p.grad is None or p.grad.norm() == 0] == []


def test_a_token_sees_only_its_past() -> None:
    model = GPT(SHAPE).eval()
    initialize(model, 0)
    ids = draw_ids(SHAPE, 1)
    changed = ids.clone()
    changed[0, 9] = (changed[0, 9] + 1) % SHAPE.vocab_size
    with torch.no_grad():
        difference = (model(ids) - model(changed)).abs().amax(-1)[0]
    assert torch.count_nonzero(difference[:9]) == 0
    assert torch.all(difference[9:] > 0)
