"""The switches that neither GPT-2 nor LLaMA has: values by their formulas, initial weights."""

from dataclasses import replace

import pytest
import torch

from megatoken.base.config.load import load_config
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import ConfigError
from megatoken.model.flops import expected_initial_loss
from megatoken.model.gpt import GPT, set_attention
from tests.convert.models import draw_model
from tests.tiny_model import TINY_MODERN, assert_tree_logits, learn

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.randint(97, (4, 16), generator=torch.Generator().manual_seed(7))


def test_zero_init_begins_at_ln_v_exactly_and_every_parameter_learns_by_the_third_step():
    config = replace(TINY_MODERN, zero_init=True)
    assert config == TINY_MODERN  # the same network
    model = GPT(config, seed=0)
    zero = {name for name, p in model.named_parameters() if p.dim() == 2 and not p.any()}
    parts = ("0.attention.out", "0.mlp.down", "1.attention.out", "1.mlp.down")
    parts += ("1.attention.value_gate",)
    assert zero == {"head.weight", *(f"blocks.{part}.weight" for part in parts)}
    assert learn(model, IDS, steps=2)[0] == pytest.approx(expected_initial_loss(config), rel=1e-6)
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("attention", ["flash", "blocked", "explicit"])
def test_low_precision_stays_near_fp32(norm: str, attention: str):
    """Under autocast, queries, keys and values have the same dtype."""
    model, batch = GPT(replace(TINY_MODERN, norm=norm), seed=3), (IDS, IDS.roll(-1, 1))
    set_attention(model, attention)
    expected = model.loss(*batch).item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(*batch)
    assert loss.item() == pytest.approx(expected, rel=1e-3)
    loss.backward()
    assert model.bfloat16().loss(*batch).item() == pytest.approx(expected, rel=1e-2)


def test_a_tree_of_tokens_has_the_logits_of_its_sequences():
    model = draw_model(TINY_MODERN)
    ids = IDS[:2, :8].clone()
    ids[1, :3] = ids[0, :3]
    assert_tree_logits(model, ids)


def test_windows_of_layers():
    four = ModelConfig(n_layer=9, window=4)
    assert four.windows == [4, 4, 4, 0, 4, 4, 4, 0, 0]
    assert replace(four, window_pattern="SL", n_layer=3).windows == [4, 0, 0]
    assert replace(four, window=0).windows == [0] * 9
    with pytest.raises(ConfigError, match=r"unknown pattern 'SXL'"):
        load_config("quickstart", "model.window=4", "model.window_pattern=SXL")


@pytest.mark.parametrize("attention", ["flash", "blocked", "explicit"])
def test_no_token_reaches_beyond_the_windows_of_its_layers(attention: str):
    config = replace(TINY_MODERN, seq_len=200, n_layer=3, window=7, window_pattern="S")
    model, ids = GPT(config, seed=1), torch.arange(200)[None] % 97
    set_attention(model, attention)
    found = []
    model.blocks[1].register_forward_hook(lambda _, __, y: found.append(sum(y).detach()))
    model(ids)
    model(ids.index_fill(1, torch.tensor([50]), 7))
    difference = (found[1] - found[0]).abs().amax(-1)[0]
    assert difference.nonzero().flatten().tolist() == list(range(50, 50 + 2 * 6 + 1))


def test_value_embeddings_of_layers():
    for n_layer, expected in ((1, [0]), (2, [1]), (5, [0, 2, 4])):
        config = ModelConfig(n_layer=n_layer, value_embeddings=True)
        assert list(config.value_embedding_layers) == expected
    assert list(ModelConfig().value_embedding_layers) == []
