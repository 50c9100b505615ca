"""A fused block equals its operations called one by one, and fp64, for every instruction set."""

from dataclasses import replace

import pytest
import torch
import yaml
from torch import Tensor
from torch.func import functional_call

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.rooms import load_entry
from megatoken.inference.kv_cache import KeyValueCache
from megatoken.model.gpt import (
    GPT,
    Block,
    add_term,
    set_activation_checkpointing,
    set_attention,
    set_block_kernels,
)
from megatoken.model.kernels.attention import find_attention
from megatoken.model.native.block import fuse
from megatoken.model.rope import rotary_cos_sin
from tests.model.native.twins import assert_same
from tests.tiny_model import (
    TINY_GEMMA,
    TINY_GPT,
    TINY_LLAMA,
    TINY_MODERN,
    TINY_OLMO,
    assert_tree_logits,
    differentiate,
    draw,
    tiny_rows,
)

GPT2 = replace(TINY_GPT, n_head=3, d_model=48, d_ff=70)
LLAMA = replace(TINY_LLAMA, n_head=4, n_kv_head=2, d_model=64, d_ff=90)
MIXED = replace(LLAMA, bias=True, norm="layernorm")  # biases and a gate
B, T = 2, 37
# Errors of values, relative to typical ones: a value passes through ten operations.
LARGEST = {torch.float32: 2e-5, torch.bfloat16: 0.06}
TYPICAL = {torch.float32: 2e-6, torch.bfloat16: 0.01}


class Call:
    """Calls a block with its input and its parameters."""

    def __init__(self, config: ModelConfig, kernels: str = "native", *, fused: bool = True) -> None:
        self.block = Block(config.resolve(97), layer=0)
        loaded = load_entry("block_kernels", kernels)
        set_block_kernels(self.block, loaded if fused else replace(loaded, fuse=None))
        attention = find_attention("native" if kernels == "native" else "flash")
        self.block.attention.attention_fn = attention
        assert (fuse(self.block) is not None) == (kernels == "native")
        self.cos_sin = rotary_cos_sin(config, torch.arange(T))

    def __call__(self, x: Tensor, *parameters: Tensor) -> Tensor:
        named = dict(zip(dict(self.block.named_parameters()), parameters, strict=True))
        ids = torch.zeros(x.shape[:2], dtype=torch.long)
        return add_term(*functional_call(self.block, named, (x, ids, None, self.cos_sin, None)))

    def draw(self, dtype: torch.dtype) -> list[Tensor]:
        """Draw an input, and parameters with which all operations matter."""
        x = draw(B, T, self.block.norm1.weight.numel(), dtype=dtype)
        parameters = enumerate(self.block.parameters(), start=1)
        return [x, *((draw(*p.shape, seed=seed) * 0.2).to(dtype) for seed, p in parameters)]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("config", [GPT2, LLAMA, MIXED], ids=["gpt2", "llama", "mixed"])
def test_values_and_gradients_are_those_of_the_operations(config: ModelConfig, dtype: torch.dtype):
    fused, separate = Call(config), Call(config, fused=False)
    inputs = fused.draw(dtype)
    for got, expected in zip(
        differentiate(fused, inputs), differentiate(separate, inputs), strict=True
    ):
        if config is GPT2:
            assert torch.equal(got, expected)
        # Rotations are fused multiply-adds, and the gradients of gate and up are added unrounded.
        assert (got - expected).norm() <= TYPICAL[dtype] * expected.norm()
    assert_same(fused, Call(config, "torch"), [*inputs], largest=LARGEST, typical=TYPICAL)


@pytest.mark.usefixtures("fastest")
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_what_the_forward_saved_may_move(config: ModelConfig):
    """Checkpointing recomputes saved tensors, and FSDP gathers weights again."""
    call = Call(config)
    inputs = call.draw(torch.float32)
    expected = differentiate(call, inputs)

    def move(x):
        moved = x.detach().clone()
        x.detach().fill_(torch.nan)
        return moved

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, move):
        moved = differentiate(call, inputs)
    assert all(map(torch.equal, moved, expected))


def build(config: ModelConfig, attention: str = "native", kernels: str = "native") -> GPT:
    model = GPT(config, seed=1)
    set_attention(model, attention)
    set_block_kernels(model, load_entry("block_kernels", kernels))
    return model


def loss_and_gradients(model: GPT) -> list[Tensor]:
    torch.manual_seed(0)  # of dropout
    loss = model.loss(*tiny_rows())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


MODELS = {
    "gpt": TINY_GPT,
    "llama": TINY_LLAMA,
    "olmo": TINY_OLMO,
    "modern": TINY_MODERN,
    "gemma": TINY_GEMMA,
}
# Model, attention, checkpointing, and what is changed in the model.
FUSED = """
gpt native none {}
gpt native block {}
llama native none {embedding_norm: true, residual_scales: true}
olmo native none {norm_position: pre, qk_norm: false}
"""
OTHERS = """
llama native none {qk_norm: true}
llama native none {mlp: relu2}
llama native none {mlp: geglu}
llama native none {value_embeddings: true, n_layer: 1}
llama native none {head_dim: 8}
llama native none {bias: true, bias_in: qkv}
llama native none {norm_position: both}
llama native none {lora_rank: 4}
gpt native none {dropout: 0.1}
gpt native none {mlp: gelu-erf}
gpt blocked none {}
modern blocked none {}
gemma blocked none {}
gpt native gelu {}
gpt native gelu {lora_rank: 4}
"""
ROWS = [(row, table == FUSED) for table in (FUSED, OTHERS) for row in table.strip().splitlines()]


@pytest.mark.usefixtures("fastest")
@pytest.mark.parametrize(("row", "is_fused"), ROWS)
def test_blocks_with_other_parts_are_not_fused(row: str, is_fused: bool):
    name, attention, recompute, parts = row.split(maxsplit=3)
    config = replace(MODELS[name], **yaml.safe_load(parts))
    model = build(config, attention)
    set_activation_checkpointing(model, recompute)
    assert all((fuse(block) is not None) == is_fused for block in model.blocks)
    results = loss_and_gradients(model), loss_and_gradients(build(config, "explicit", "torch"))
    for got, expected in zip(*results, strict=True):
        assert (got - expected).norm() < 1e-5 * expected.norm() + 1e-8


@pytest.mark.usefixtures("fastest")
@pytest.mark.parametrize("part", ["attention", "mlp", "norm1"])
def test_a_part_of_ones_own_is_not_ignored(part: str):
    block = build(TINY_GPT).blocks[0]
    assert fuse(block) is not None
    module = block.get_submodule(part)
    module.__class__ = type("Own", (type(module),), {})
    assert fuse(block) is None


def test_heads_that_are_divided_between_processes_are_not_fused():
    (block,) = build(replace(TINY_GPT, n_layer=1)).blocks
    block.attention.heads = [1, 1, 1]
    assert fuse(block) is None


@pytest.mark.usefixtures("fastest")
@pytest.mark.parametrize("config", [TINY_GPT, TINY_LLAMA], ids=["gpt", "llama"])
@torch.no_grad()
def test_a_cache_or_a_mask_is_not_ignored(config: ModelConfig):
    ours, torchs = build(config), build(config, "explicit", "torch")
    ids, _ = tiny_rows()
    cache = KeyValueCache(
        ours.config, rows=len(ids), capacity=16, dtype=torch.float32, device=ids.device
    )
    pieces = [ours(ids[:, :10], cache), ours(ids[:, 10:11], cache)]
    torch.testing.assert_close(torch.cat(pieces, 1), torchs(ids[:, :11]), rtol=1e-4, atol=1e-5)
    ids[1, :3] = ids[0, :3]
    assert_tree_logits(ours, ids[:2])
