"""Counts by arithmetic against published figures, real modules and torch's own FLOP counter."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import PRESETS
from megatoken.model.flops import (
    count_decayed_parameters,
    count_matmul_parameters,
    count_padded_parameters,
    count_parameters,
    count_trained_parameters,
    flops_per_token,
)
from megatoken.model.gpt import GPT
from megatoken.model.loss import cross_entropy
from tests.convert.models import FAMILIES
from tests.tables import read_table
from tests.tiny_model import TINY_GEMMA, TINY_GPT, TINY_LLAMA, TINY_MODERN, TINY_OLMO

PUBLISHED = """
gpt2-124m 124_439_808
gpt2-355m 354_823_168
gpt2-774m 774_030_080
gpt2-1558m 1_557_611_200
llama-15m 15_191_712
llama2-7b 6_738_415_616
llama2-13b 13_015_864_320
llama2-70b 68_976_648_192
llama3-8b 8_030_261_248
llama3-70b 70_553_706_496
llama3.1-405b 405_853_388_800
llama3.2-1b 1_235_814_400
llama3.2-3b 3_212_749_824
mistral-7b 7_241_732_096
qwen2.5-0.5b 494_032_768
qwen2.5-1.5b 1_543_714_304
qwen2.5-7b 7_615_616_512
qwen2.5-3b 3_085_938_688
qwen3-14b 14_768_307_200
qwen3-32b 32_762_123_264
qwen3-0.6b 596_049_920
qwen3-1.7b 1_720_574_976
qwen3-4b 4_022_468_096
qwen3-8b 8_190_735_360
smollm2-135m 134_515_008
smollm2-360m 361_821_120
smollm2-1.7b 1_711_376_384
smollm3-3b 3_075_098_624
olmo2-1b 1_484_916_736
olmo2-7b 7_298_617_344
gemma3-270m 268_098_176
gemma3-1b 999_885_952
modern-5m 9_181_834
modern-124m 393_764_376
modern-355m 1_022_629_936
modern-hf-5m 6_032_768
modern-hf-124m 162_151_680
modern-hf-355m 404_972_544
"""
# In the rounding of GPT-3's paper, table 2.1, and of the names.
ROUNDED = """
gpt3-125m 125e6
gpt3-350m 356e6
gpt3-760m 760e6
gpt3-1.3b 1.3e9
gpt3-2.7b 2.65e9
gpt3-6.7b 6.66e9
gpt3-13b 12.85e9
gpt3-175b 174.6e9
llama-5m 5e6
llama-42m 42e6
llama-110m 110e6
"""


def test_published_counts():
    """Names of modern models count the weights in matrix products."""
    published, rounded = read_table(PUBLISHED), read_table(ROUNDED)
    assert published.keys() | rounded.keys() == set(PRESETS)
    for name, count in published.items():
        assert count_parameters(PRESETS[name]) == int(count), name
        if name.startswith("modern"):
            size = 1e6 * int(name.rpartition("-")[2].removesuffix("m"))
            assert count_matmul_parameters(PRESETS[name]) == pytest.approx(size, rel=0.01), name
    for name, count in rounded.items():
        assert count_parameters(PRESETS[name]) == pytest.approx(float(count), rel=0.015), name
    assert f"{count_parameters(PRESETS['gpt3-175b']) / 1e9:.1f}" == "174.6"


ODD = ModelConfig(n_layer=3, n_head=3, d_model=15, d_ff=7, vocab_size=131, seq_len=5)
OTHERS = FAMILIES | {
    "odd": ODD,
    "modern": TINY_MODERN,
    "biases of layer norms": replace(TINY_GEMMA, bias_in="attention", norm="layernorm"),
    "all switches of a GPT-2": replace(
        ODD, qk_norm=True, embedding_norm=True, value_embeddings=True
    ),
    "a value head": replace(TINY_LLAMA, value_head=True),
    "adapters": replace(TINY_LLAMA, lora_rank=3),
    "adapters and a value head": replace(ODD, lora_rank=2, value_head=True),
    "biases of a gate": replace(ODD, mlp="swiglu", norm="rmsnorm", tie_embeddings=False),
}


def count(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


@pytest.mark.parametrize("name", [*PRESETS, *OTHERS])
def test_counts_are_those_of_the_module(name: str):
    model_config = OTHERS.get(name) or PRESETS[name]
    with torch.device("meta"):  # sizes without memory, up to 405B
        model = GPT(model_config)
    parameters, padded_size = list(model.parameters()), model_config.padded_vocab_size
    trained = [p for p in parameters if p.requires_grad]
    tables = [p for p in parameters if p.shape[:1] == (padded_size,) and p.dim() == 2]
    padding = (padded_size - model_config.vocab_size) * sum(table.shape[1] for table in tables)
    layers = [m.weight for m in model.blocks.modules() if isinstance(m, torch.nn.Linear)]
    head = model_config.vocab_size * model_config.d_model
    expected = {
        count_parameters: count(parameters) - padding,
        count_padded_parameters: count(parameters),
        count_matmul_parameters: count(layers) + head,
        count_trained_parameters: count(trained),
        count_decayed_parameters: count(p for p in trained if p.dim() >= 2),
    }
    assert {function: function(model_config) for function in expected} == expected


LORA = replace(TINY_LLAMA, lora_rank=4)
# The first block needs no gradient of its input; B of queries, keys and values is block-diagonal.
LORA_FLOPS = 6 * 2 * 4 * 2 * sum(LORA.qkv_rows) - 2 * (sum(LORA.qkv_rows) + 3 * 4) * 32


@pytest.mark.parametrize(
    ("model_config", "others"),
    [
        *((each, 0) for each in (TINY_GPT, TINY_LLAMA, TINY_MODERN, TINY_GEMMA, TINY_OLMO)),
        (LORA, LORA_FLOPS),
    ],
)
def test_flops_are_those_that_torch_counts(model_config: ModelConfig, others: int):
    model_config = replace(model_config, vocab_size=256, window=0)  # no padding, whole products
    model = GPT(model_config)
    ids = torch.zeros(3, model_config.seq_len + 1, dtype=torch.long)
    # Explicit attention, because the counter ignores fused attention on a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        hidden, softcap = model(ids[:, :-1]), model_config.logit_softcap
        total, _ = cross_entropy(
            hidden, model.lm_head_weight, ids[:, 1:], vocab_size=256, softcap=softcap, chunk=0
        )
        total.backward()
    per_token = flops_per_token(model_config, causal=False) + others
    assert counter.get_total_flops() == 3 * model_config.seq_len * per_token


def test_a_causal_product_counts_half():
    both = (flops_per_token(PRESETS["gpt2-124m"], causal=causal) for causal in (True, False))
    assert [*both] == [6 * 123_532_032 + n * 12 * 768 * 1024 for n in (6, 12)]
