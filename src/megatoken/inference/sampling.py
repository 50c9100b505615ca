"""Sampling settings, and the choice of one id per row of logits.

Shapes: N sequences, V vocabulary without padding, K most likely ids.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatoken.base.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How to continue a prompt. Raises ConfigError for a value out of range.

    temperature: 0 means greedy. top_k: sample from the k most likely ids only; 0 for all. top_p:
    sample from the smallest set of most likely ids whose probabilities sum to p (Holtzman et al.
    2020). stop_ids: ids that end the sequence.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name, is_valid, valid in (
            ("max_new_tokens", self.max_new_tokens >= 1, "1 or more"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0, up to 1 (all)"),
        ):
            if not is_valid:
                raise ConfigError(f"{name} is {getattr(self, name)}", fix=f"use {valid}")


def rank_ids(logits_V: Tensor, id: int, count: int) -> list[tuple[int, float]]:
    """Return (id, logprob) of `id`, then of the `count` most likely ids."""
    logprobs_V = logits_V.log_softmax(-1)
    best = logprobs_V.topk(count)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(id, float(logprobs_V[id])), *pairs]


def choose_ids(
    logits_NV: Tensor, draws_N: Tensor, temperature: float, top_k: int, top_p: float
) -> Tensor:
    """Choose an id (N,) per row, by inverting the row's cumulative distribution.

    draws_N: a random number from [0, 1) for each row.
    """
    if temperature == 0:
        return logits_NV.argmax(-1)
    tiny = torch.finfo(logits_NV.dtype).tiny  # smaller numbers underflow to 0
    temperature = max(temperature, tiny)
    top_p = max(top_p, tiny)
    if top_p < 1 and not top_k:
        top_k = logits_NV.shape[-1]  # top_p needs sorted probabilities
    sorted_ids_NK = None
    if top_k:
        logits_NV, sorted_ids_NK = logits_NV.topk(min(top_k, logits_NV.shape[-1]))
    probs_NK = torch.softmax((logits_NV - logits_NV.amax(-1, keepdim=True)) / temperature, dim=-1)
    if top_p < 1:
        probs_NK = probs_NK.masked_fill(cumulative_sum(probs_NK) - probs_NK >= top_p, 0.0)
    cumulative_NK = cumulative_sum(probs_NK)
    # The first index above the draw has a positive probability, because it raises the sum.
    thresholds_N1 = draws_N[:, None] * cumulative_NK[:, -1:]
    indices_N1 = torch.searchsorted(cumulative_NK, thresholds_N1, right=True).clamp_(
        max=probs_NK.shape[-1] - 1
    )
    return (indices_N1 if sorted_ids_NK is None else sorted_ids_NK.gather(1, indices_N1))[:, 0]


def cumulative_sum(probs_NK: Tensor) -> Tensor:
    """Return each row's cumulative sum.

    If torch must be deterministic, the sum is computed on the CPU, because it varies on CUDA.
    """
    if torch.are_deterministic_algorithms_enabled():
        return probs_NK.cpu().cumsum(-1).to(probs_NK.device)
    return probs_NK.cumsum(-1)
