"""Dropout masks are random, and depend only on seed, step, sequence, layer, site and position."""

import math

import pytest
import torch
from torch import Tensor

from megatoken.model.dropout import Dropout, fold_in, sequence_keys

CPU = torch.device("cpu")
SHAPE = (16, 24, 32, 40)


def keys(seed: int = 1, step: int = 0, first: int = 0, count: int = SHAPE[0]) -> Tensor:
    return sequence_keys(seed, step, first, count, CPU)


def kept(keys_B: Tensor, p: float = 0.5, site: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return Dropout(p, site)(keys_B, torch.ones(shape)) > 0


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.99])
def test_the_share_that_is_kept_and_its_scale(p: float):
    values = Dropout(p, 2)(keys(), torch.ones(SHAPE))
    assert set(values.unique().tolist()) == {0.0, torch.tensor(1.0).div(1 - p).item()}
    mask = (values > 0).double()
    for dims in ((), (0,), (1,), (2,), (3,)):  # the whole; each sequence, head, query and key
        share = mask.mean([dim for dim in range(4) if dim not in dims])
        sigma = math.sqrt(p * (1 - p) * share.numel() / mask.numel())
        assert float((share - (1 - p)).abs().max()) < 4 * sigma


def test_masks_of_neighbours_are_not_correlated():
    own = kept(keys())
    others = [kept(each) for each in (keys(seed=2), keys(step=1), fold_in(keys(), 1))]
    others += [kept(keys(), site=1), own.roll((1, 1), (1, 2)), own.roll((1, -1), (2, 3))]
    others += [own.roll(1, dim) for dim in range(4)]
    # If the last round of the hash were linear, groups of four would repeat.
    fours = own[..., ::2, ::2] ^ own[..., 1::2, ::2] ^ own[..., ::2, 1::2] ^ own[..., 1::2, 1::2]
    for coins in (*(own ^ other for other in others), fours):
        assert float((coins.double().mean() - 0.5).abs()) < 4 * 0.5 / math.sqrt(coins.numel())


def test_a_mask_is_the_same_in_any_slice():
    whole = kept(keys())
    parts = [kept(keys(first=n, count=4), shape=(4, *SHAPE[1:])) for n in (0, 4, 8, 12)]
    assert torch.equal(torch.cat(parts), whole)
    slices = []
    for rank in range(3):
        part = Dropout(0.5, 0)
        part.tp_rank = rank
        slices.append(part(keys(), torch.ones(16, 8, 32, 40)) > 0)
    assert torch.equal(torch.cat(slices, 1), whole)


def test_keys_of_a_batch_differ_and_never_change():
    """If these change, the curves of all runs with dropout change, even after a resume."""
    assert keys(seed=1337, step=7, first=5, count=3).tolist() == [306510868, 438861281, 922554776]
    assert len(set(keys(step=2**33, count=10_000).tolist())) == 10_000
