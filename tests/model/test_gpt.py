"""The network: initial weights, initial loss, golden losses, dropout, padding."""

import math
import re
from dataclasses import replace

import pytest
import torch

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import ConfigError
from megatoken.model.gpt import GPT
from tests.tiny_model import TINY_GPT, TINY_LLAMA, TINY_MODERN, learn

TINY = replace(TINY_GPT, d_ff=128)


pytestmark = pytest.mark.usefixtures("one_thread")


def build(model_config: ModelConfig = TINY, seed: int = 0, dropout: float = 0.0) -> GPT:
    return GPT(replace(model_config, dropout=dropout), seed=seed)


def random_ids(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 97, (rows, 16), generator=torch.Generator().manual_seed(seed))


SCALED = {"rope_factor": 8.0, "rope_context": 32}
GOLDEN = [
    (TINY, 1337, [4.570636, 4.222779, 4.034568, 3.804951]),
    (
        replace(TINY_LLAMA, tie_embeddings=False, **SCALED),
        1337,
        [4.571456, 4.172758, 3.897610, 3.598461],
    ),
    (TINY_MODERN, 7, [4.583349, 4.179933, 3.853769, 3.557288]),
    (replace(TINY_MODERN, zero_init=True), 7, [4.574711, 4.34221, 3.992392, 3.634015]),
]


@pytest.mark.parametrize(("config", "seed", "losses"), GOLDEN)
def test_golden_losses(config: ModelConfig, seed: int, losses: list[float]):
    """Three AdamW steps on one batch; the literals change only when the model, its init or the loss does."""
    found = learn(build(config, seed=1337), random_ids(4, seed))
    assert found == pytest.approx(losses, abs=1e-5)


def test_initial_statistics():
    sizes = {"n_layer": 8, "n_head": 4, "d_model": 128, "d_ff": 512}
    model = build(replace(TINY, **sizes, vocab_size=1000), seed=3)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            expected = 1.0 if name.endswith("weight") else 0.0
            assert torch.all(parameter == expected), name
            continue
        residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
        std = 0.02 / math.sqrt(16) if residual else 0.02
        real = parameter[:1000] if name == "tokens.weight" else parameter
        assert real.std().item() == pytest.approx(std, rel=0.03), name
        assert abs(real.mean().item()) < 5 * std / math.sqrt(real.numel()), name
    assert sum("norm" in name for name, _ in model.named_parameters()) == 2 * (2 * 8 + 1)


def test_sizes_left_open_are_resolved_by_the_vocabulary():
    section = ModelConfig(n_layer=1, n_head=2, d_model=32, seq_len=16)
    config = GPT(section, vocab_size=97).config
    assert (config.vocab_size, config.d_ff) == (97, 128)
    assert GPT(TINY, vocab_size=50).config == TINY  # a size in the config is kept
    with pytest.raises(
        ConfigError, match=r"vocabulary size is unknown — model\.vocab_size — .* to GPT"
    ):
        GPT(section)


def test_loss_is_torchs_mean_over_targets_that_are_not_negative():
    model, ids = build(), random_ids(2)
    targets = ids.roll(-1, 1)
    targets[:, 9:] = -1
    logits = model.logits(ids).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-1)
    torch.testing.assert_close(model.loss(ids, targets), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("config", [TINY, TINY_MODERN], ids=["gpt", "modern"])
def test_padding_rows_are_zero_get_no_gradient_and_have_no_logits(config: ModelConfig):
    model, ids = build(config), random_ids(2)
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    tables = [p for name, p in model.named_parameters() if re.search("tokens|head.weight", name)]
    assert len(tables) == (1 if config is TINY else 3)  # of value embeddings, too
    for weight in tables:
        assert torch.count_nonzero(weight[97:]) == torch.count_nonzero(weight.grad[97:]) == 0
    assert torch.all(model.lm_head_weight.grad[:97].norm(dim=1) > 0)
    assert model.logits(ids).shape == model.lm_head(model(ids)).shape == (2, 16, 97)


def test_dropout():
    ids, before = random_ids(2), torch.get_rng_state()
    plain, dropping, empty = GPT(TINY), build(dropout=0.3), GPT(TINY, seed=None)
    assert plain.state_dict().keys() == dropping.state_dict().keys() == empty.state_dict().keys()
    assert torch.equal(plain(ids), plain(ids))
    assert torch.equal(torch.get_rng_state(), before)  # without dropout nothing is drawn
    assert torch.equal(dropping.eval()(ids), plain(ids))
    dropping.train()
    torch.manual_seed(0)
    first, second = dropping(ids), dropping(ids)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(dropping(ids), first)


def test_dropout_reaches_embeddings_attention_and_both_residual_branches():
    """With dropout 1, the input of the final norm is 0."""
    model = build(dropout=1.0)
    assert not model(random_ids(2)).any()
