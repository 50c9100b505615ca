"""Every form of an operation gives the plain one's values and gradients, at sizes that fit no block."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import _registry, current_flash_attention_impl

from megatoken.model.gpt import GPT, initialize, use_kernels
from megatoken.model.kernels import ATTENTION, CUDA_ONLY, LINEAR, Kernels
from megatoken.model.kernels.attention import switch_flash
from megatoken.model.loss import cross_entropy
from megatoken.presets import Shape
from tests.tiny import LLAMA, SHAPE

ONEDNN = torch.backends.mkldnn.is_available()


def random(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", ["flash", "blocked"])
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 1, 8),
        (2, 3, 3, 64, 8),
        (1, 2, 2, 65, 16),
        (2, 1, 1, 300, 8),
        (1, 2, 2, 129, 4),
        (2, 4, 2, 65, 8),
        (1, 6, 1, 9, 8),
    ],
)
def test_attention_is_the_formula(form: str, sizes: tuple[int, int, int, int, int]) -> None:
    B, H, K, T, D = sizes
    found, expected = [], []
    for forms, name in ((found, form), (expected, "explicit")):
        # As the model hands them over: views of one packed product.
        packed = random(B, T, H + 2 * K, D).requires_grad_()
        q, k, v = packed.transpose(1, 2).split((H, K, K), dim=1)
        y = ATTENTION[name](q, k, v, 0.0)
        y.backward(random(B, T, H, D, seed=1).transpose(1, 2))
        assert packed.grad is not None
        forms += [y.detach(), packed.grad]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("heads", [4, 2])
def test_flex_attention_is_the_formula(heads: int) -> None:
    """Its values: torch gives it a backward on CUDA only."""
    q, k, v = random(2, 4, 150, 16), *random(2, 2, heads, 150, 16, seed=1)
    torch.testing.assert_close(
        ATTENTION["flex"](q, k, v, 0.0), ATTENTION["explicit"](q, k, v, 0.0), rtol=2e-5, atol=2e-6
    )


def test_a_version_of_flash_attention_stays_until_another_form_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered as whoever provides FlashAttention 3 registers it, without kernels."""
    removed: list[str] = []
    handle = SimpleNamespace(remove=lambda: removed.append("FA3"))
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", lambda: handle)
    switch_flash("fa3")
    assert (current_flash_attention_impl(), removed) == ("FA3", [])
    switch_flash("fa3")
    assert removed == []
    use_kernels(torch.nn.Identity(), Kernels(attention="cudnn"))
    assert (current_flash_attention_impl(), removed) == (None, ["FA3"])


@pytest.mark.parametrize("form", sorted(set(ATTENTION) - set(CUDA_ONLY)))
def test_neighbouring_queries_share_a_key(form: str) -> None:
    """Heads 0 and 1 the first, heads 2 and 3 the second: the order of released weights."""
    q, k, v = random(1, 4, 20, 8), *random(2, 1, 2, 20, 8, seed=1)
    alone = torch.cat(
        [ATTENTION[form](q[:, h : h + 1], k[:, h // 2, None], v[:, h // 2, None], 0.0) for h in range(4)], 1
    )
    torch.testing.assert_close(ATTENTION[form](q, k, v, 0.0), alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", sorted(set(ATTENTION) - set(CUDA_ONLY)))
def test_no_query_sees_a_later_key(form: str) -> None:
    q, k, v = random(3, 1, 2, 90, 8)
    before = ATTENTION[form](q, k, v, 0.0)
    k[:, :, 70:] += 100
    v[:, :, 70:] += 100
    after = ATTENTION[form](q, k, v, 0.0)
    torch.testing.assert_close(after[:, :, :70], before[:, :, :70], rtol=0, atol=0)
    assert not torch.allclose(after[:, :, 70:], before[:, :, 70:])


@pytest.mark.parametrize("form", sorted(set(ATTENTION) - set(CUDA_ONLY)))
def test_dropout_drops(form: str) -> None:
    q, k, v = random(3, 1, 1, 32, 8)
    torch.manual_seed(0)
    assert not torch.allclose(ATTENTION[form](q, k, v, 0.5), ATTENTION[form](q, k, v, 0.0))


@pytest.mark.parametrize("form", ["numpy", pytest.param("onednn", marks=pytest.mark.skipif(not ONEDNN, reason="none"))])
@pytest.mark.parametrize("rows", [(1, 1), (3, 7), (2, 33)])
@pytest.mark.parametrize("biased", [True, False])
def test_products_by_other_libraries_are_torchs(form: str, rows: tuple[int, int], biased: bool) -> None:
    found, expected = [], []
    for results, name in ((found, form), (expected, "torch")):
        x, w, b = random(*rows, 24).requires_grad_(), random(40, 24, seed=1).requires_grad_(), random(40, seed=2)
        b.requires_grad_()
        y = LINEAR[name](x, w, b if biased else None)
        y.backward(random(*rows, 40, seed=3))
        results += [y.detach(), x.grad, w.grad, *([b.grad] if biased else [])]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", [SHAPE, LLAMA], ids=["gpt", "llama"])
def test_a_model_computes_with_what_it_is_given_and_gets_the_same_gradients(family: Shape) -> None:
    shape = replace(family, seq_len=80)
    gradients = []
    for kernels in (Kernels(), Kernels(linear="numpy", attention="blocked"), Kernels(attention="explicit")):
        model = GPT(shape)
        initialize(model, 3)
        use_kernels(model, kernels)
        assert model.blocks[0].attention.attend is ATTENTION[kernels.attention]
        assert model.blocks[1].mlp.up.multiply is LINEAR[kernels.linear]
        ids = torch.arange(160).view(2, 80) % 97
        total, _ = cross_entropy(model(ids), model.unembedding, ids.roll(-1, 1), vocab_size=97)
        total.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-4)


def test_flash_is_torchs_own() -> None:
    q, k, v = random(3, 1, 2, 16, 8)
    torch.testing.assert_close(
        ATTENTION["flash"](q, k, v, 0.0), F.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=0, atol=0
    )
