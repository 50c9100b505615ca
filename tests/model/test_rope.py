"""Rotary positions: the frequencies of transformers, exact angles in low precision.

tests/convert/test_hf_export.py compares models with those of transformers.
"""

import pytest
import torch

from megatoken.base.config.presets import PRESETS
from megatoken.convert.hf.families import choose_family
from megatoken.model.rope import apply_rotary, rope_inv_freq, rotary_cos_sin
from tests.tiny_model import TINY_LLAMA, draw

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["llama2-7b", "llama3-8b", "llama3.1-405b", "llama3.2-1b"])
def test_inverse_frequencies_are_those_of_transformers(name: str):
    config = transformers.LlamaConfig(**choose_family(PRESETS[name]).write_config(PRESETS[name]))
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    inv_freq = rope_inv_freq(PRESETS[name], torch.device("cpu"))
    torch.testing.assert_close(inv_freq, rotary.inv_freq, rtol=3e-7, atol=0)
    assert float(inv_freq[0]) == 1.0


def test_low_precision_is_rotated_in_fp32_by_exact_angles():
    """In bf16, a cosine would be wrong by up to 1/256, and a position by whole tokens."""
    x = draw(1, 3000, 2, TINY_LLAMA.d_head, dtype=torch.bfloat16)
    cos_sin = rotary_cos_sin(TINY_LLAMA, torch.arange(3000))
    assert cos_sin[0].dtype == torch.float32
    low, exact = apply_rotary(x, cos_sin), apply_rotary(x.float(), cos_sin)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low, exact.bfloat16(), rtol=0, atol=0)
