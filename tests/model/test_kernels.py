"""All implementations of an operation agree; custom attention is used everywhere or refused."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.rooms import REGISTERED, list_entries
from megatoken.inference.generate import generate_ids
from megatoken.inference.kv_cache import KeyValueCache
from megatoken.inference.sampling import Sampling
from megatoken.model.gpt import GPT, set_attention
from megatoken.model.kernels.attention import (
    CUDA_ONLY,
    Dropout,
    explicit_attention,
    find_attention,
    flash_attention,
    repeat_kv,
)
from megatoken.model.native.selection import find_library
from tests.tiny_model import TINY_GPT, TINY_LLAMA, assert_tree_logits, differentiate, draw

ON_CPU = sorted(set(list_entries("attention")) - set(CUDA_ONLY))
SIZES = """\
1 1 1 1 8
2 3 3 64 8
1 2 2 65 16
2 1 1 300 8
1 2 2 129 4
2 4 2 65 8
1 6 1 9 8
"""
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def causal(
    name: str, q: Tensor, k: Tensor, v: Tensor, dropout: Dropout = None, **window: int
) -> Tensor:
    if name == "native" and find_library() is None:
        pytest.skip("the native kernels are not compiled")
    return find_attention(name)(q, k, v, mask=None, causal=True, dropout=dropout, **window)


@pytest.mark.parametrize("name", ["flash", "blocked"])
@pytest.mark.parametrize("sizes", SIZES.splitlines())
@pytest.mark.parametrize("window", [0, 1, 50, 70, 128, 500])
def test_attention_equals_the_formula(name: str, sizes: str, window: int):
    B, H, K, T, D = map(int, sizes.split())
    packed, dy = draw(B, T, H + 2 * K, D), draw(B, T, H, D, seed=1).transpose(1, 2)

    def attend(packed, name):
        """The model passes views of one packed product."""
        return causal(name, *packed.transpose(1, 2).split((H, K, K), dim=1), window=window)

    found, expected = (
        differentiate(partial(attend, name=each), [packed], dy) for each in (name, "explicit")
    )
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("T", "S"), [(1, 7), (3, 7), (7, 7)])
def test_masked_and_decoding_attention_equal_the_formula(kv_heads: int, T: int, S: int):
    q, k, v = draw(2, 4, T, 8), *draw(2, 2, kv_heads, S, 8, seed=1)
    mask = draw(2, 1, T, S, seed=2) > 0
    mask[..., -1] = True  # every query sees something
    for each in (mask, mask[:1], None):
        options = {"mask": each, "causal": False, "dropout": None}
        expected = explicit_attention(q, k, v, **options)
        torch.testing.assert_close(flash_attention(q, k, v, **options), expected, **CLOSE)


@pytest.mark.parametrize("name", ON_CPU)
def test_dropout_is_applied_to_the_weights(name: str):
    q, k, v = draw(3, 1, 2, 32, 8)

    def drop_odd_keys(weights_BHTS):
        return 2 * weights_BHTS * (torch.arange(32) % 2 == 0)

    scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(32, 32).triu(1) > 0, -torch.inf)
    expected = drop_odd_keys(scores.softmax(-1)) @ v
    torch.testing.assert_close(causal(name, q, k, v, drop_odd_keys), expected, **CLOSE)


def alibi(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor,
    *, mask: Tensor | None, causal: bool, dropout: Dropout,
) -> Tensor:  # fmt: skip
    """Compute attention with linear biases (Press et al. 2022): per head, a slope times the distance."""
    (H, T), S = q_BHTD.shape[1:3], k_BKSD.shape[2]
    if causal:
        mask = torch.ones(1, 1, T, T, dtype=torch.bool).tril()
    if mask is None:
        mask = torch.ones(1, 1, T, S, dtype=torch.bool)
    query_positions = mask.sum(-1) - 1  # a query sees itself and everything before it
    key_positions = query_positions if T == S else torch.arange(S)[None, None]
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    slopes = 0.5 ** torch.arange(1, H + 1)
    scores = q_BHTD @ repeat_kv(k_BKSD, H).mT - distance * slopes[:, None, None]
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return (weights if dropout is None else dropout(weights)) @ repeat_kv(v_BKSD, H)


@pytest.mark.parametrize("family", [TINY_GPT, TINY_LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize(
    "fn", [alibi, lambda q, k, v, **options: flash_attention(3 * q, k, v, **options)]
)
def test_a_custom_attention_computes_training_sampling_and_scoring(
    family: ModelConfig, fn: object, monkeypatch: pytest.MonkeyPatch
):
    model = GPT(replace(family, n_head=4)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() == 2 else 1)
    ids = torch.arange(24).view(2, 12) * 7 % 97
    plain = model.logits(ids)
    monkeypatch.setitem(REGISTERED, "attention", {"custom": fn})
    set_attention(model, "custom")
    with torch.no_grad():
        expected = model.logits(ids)
        assert float((expected - plain).abs().max()) > 0.1

        cache = KeyValueCache(
            model.config, rows=2, capacity=12, dtype=torch.float32, device=ids.device
        )
        pieces = [model(piece, cache) for piece in ids.split([4, 1, 5, 2], dim=1)]
        found = model.lm_head(torch.cat(pieces, 1))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

        ids[1, :3] = ids[0, :3]
        assert_tree_logits(model, ids)

        sampled = [5]
        for _ in range(8):
            sampled.append(int(model.logits(torch.tensor([sampled]))[0, -1].argmax()))
    assert generate_ids(model, [5], Sampling(max_new_tokens=8, temperature=0)) == [sampled[1:]]
