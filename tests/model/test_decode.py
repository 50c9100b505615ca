"""One token at a time on plain tensors: the numbers of the modules."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.model.decode import HAS_MKL, Decoder, plan_product, turn_weights
from megatoken.model.gpt import GPT, initialize
from megatoken.presets import Shape
from megatoken.sample import KeyValueCache

CPU = torch.device("cpu")
FAMILY = {"n_kv_head": 2, "norm": "rmsnorm", "positions": "rotary", "mlp": "swiglu", "bias": False}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # the sliced product is for more than one
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [32, 512])  # the products of the wide one are sliced
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "switches",
    [{}, {"mlp": "gelu-erf", "bias": False}, FAMILY | {"tied": False}, FAMILY | {"n_kv_head": 1}],
    ids=["gpt", "nanogpt", "llama", "1"],
)
def test_steps_equal_the_full_forward(rows: int, width: int, turned: bool, switches: dict[str, Any]) -> None:
    shape = Shape(n_layer=2, n_head=4, d_model=width, d_ff=3 * width, vocab_size=500, seq_len=12, **switches)
    model = GPT(shape).eval()
    initialize(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, so that none can be forgotten
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
        for weight in (model.tokens.weight, model.unembedding):
            weight[500:] = 9.0
    ids = torch.randint(0, 500, (rows, 12), generator=torch.Generator().manual_seed(2))
    cache = KeyValueCache(shape, rows=rows, capacity=12, dtype=torch.float32, place=CPU)
    with torch.inference_mode():
        expected = model.logits(model(ids))
        if turned:
            turn_weights(model)
        model(ids[:, :6], cache)
        decoder = Decoder(model, rows=rows)
        for place in range(6, 12):
            logits = decoder.step(ids[:, place], cache)
            assert logits.shape == (rows, 500)
            difference = (logits - expected[:, place]).abs().max() / expected.abs().max()
            assert float(difference) < 1e-5
        assert cache.length == 12


def test_weights_are_read_in_place() -> None:
    shape = Shape(n_layer=1, n_head=4, d_model=512, d_ff=1024, vocab_size=128, seq_len=4)
    model = GPT(shape).eval()
    initialize(model, 0)
    ids = torch.tensor([5])
    with torch.inference_mode():
        decoder = Decoder(model, rows=1)
        for _ in range(2):
            cache = KeyValueCache(shape, rows=1, capacity=1, dtype=torch.float32, place=CPU)
            found = decoder.step(ids, cache)
            torch.testing.assert_close(found, model.logits(model(ids[None]))[0], rtol=1e-5, atol=1e-6)
            for parameter in model.parameters():
                parameter.mul_(1.5)


@settings(deadline=None, max_examples=30)
@given(
    out=st.integers(1, 12).map(lambda k: k * 210),
    width=st.sampled_from([512, 770, 1024]),
    biased=st.booleans(),
    threads=st.integers(1, 5),
    turned=st.booleans(),
)
def test_the_sliced_product_is_the_product(out: int, width: int, biased: bool, threads: int, turned: bool) -> None:
    generator = torch.Generator().manual_seed(out + width)
    x = torch.randn(1, width, generator=generator)
    weight, bias = torch.randn(out, width, generator=generator), torch.randn(out, generator=generator)
    kept = bias.clone()
    torch.set_num_threads(threads)
    with torch.inference_mode():
        laid_out = weight.t().contiguous().t() if turned else weight
        y = plan_product(laid_out, bias if biased else None, sliced=True)(x)
    expected = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    assert y.shape == expected.shape
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5 * math.sqrt(width))
    assert torch.equal(bias, kept)


@pytest.mark.skipif(not HAS_MKL, reason="the sliced product is for MKL")
def test_only_one_fp32_row_of_a_large_weight_is_sliced() -> None:
    large, small = torch.randn(1024, 512), torch.randn(8, 8)
    assert plan_product(large, None, sliced=True).__name__ == "multiply"  # type: ignore[attr-defined]
    for product in (
        plan_product(small, None, sliced=True),
        plan_product(large, None, sliced=False),
        plan_product(large.bfloat16(), None, sliced=True),
    ):
        assert product.func is F.linear  # type: ignore[attr-defined]


def test_turning_keeps_shapes_and_values_and_only_wide_weights() -> None:
    shape = Shape(n_layer=1, n_head=2, d_model=16, d_ff=64, vocab_size=90, seq_len=8)
    plain, turned = GPT(shape), GPT(shape)
    for model in (plain, turned):
        initialize(model, 3)
    turn_weights(turned)
    wide = {name for name, p in turned.named_parameters() if p.dim() == 2 and not p.is_contiguous()}
    assert wide == {"tokens.weight", "blocks.0.attention.qkv.weight", "blocks.0.mlp.up.weight"}
    expected = plain.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in turned.state_dict().items())
    ids = torch.arange(8)[None]
    torch.testing.assert_close(turned(ids), plain(ids), rtol=1e-5, atol=1e-6)
