"""One id of each row of logits, by the likeliest or by a draw.

Shapes: N sequences, V real vocabulary, K likeliest ids.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatoken.errors import ConfigError


def choose_ids(
    logits_NV: Tensor, draws_N: Tensor, temperature: float, top_k: int, top_p: float
) -> Tensor:
    """One id (N,) per row of logits: where its uniform draw from [0, 1) falls in the cumulative probability."""
    if temperature == 0:
        return logits_NV.argmax(-1)
    tiny = torch.finfo(logits_NV.dtype).tiny  # a smaller number would count as 0
    temperature, top_p = max(temperature, tiny), max(top_p, tiny)
    if top_p < 1 and not top_k:
        top_k = logits_NV.shape[
            -1
        ]  # the cumulative probability starts at the likeliest, so all are sorted
    sorted_ids_NK = None
    if top_k:
        logits_NV, sorted_ids_NK = logits_NV.topk(min(top_k, logits_NV.shape[-1]))
    probs_NK = torch.softmax((logits_NV - logits_NV.amax(-1, keepdim=True)) / temperature, dim=-1)
    if top_p < 1:
        probs_NK = probs_NK.masked_fill(cumulative_sum(probs_NK) - probs_NK >= top_p, 0.0)
    cumulative_NK = cumulative_sum(probs_NK)
    # An id without probability does not raise the sum, so the first index above the draw is never one.
    thresholds_N1 = draws_N[:, None] * cumulative_NK[:, -1:]
    indices_N1 = torch.searchsorted(cumulative_NK, thresholds_N1, right=True).clamp_(
        max=probs_NK.shape[-1] - 1
    )
    return (indices_N1 if sorted_ids_NK is None else sorted_ids_NK.gather(1, indices_N1))[:, 0]


def cumulative_sum(probs_NK: Tensor) -> Tensor:
    """Cumulative sums of rows; a deterministic run adds on the CPU, because torch refuses to on CUDA."""
    if torch.are_deterministic_algorithms_enabled():
        return probs_NK.cpu().cumsum(-1).to(probs_NK.device)
    return probs_NK.cumsum(-1)


def check_settings(
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    num_samples: int,
    names: Sequence[str] = ("max_new_tokens", "temperature", "top_k", "top_p", "num_samples"),
) -> None:
    """Raise ConfigError for a setting out of range. names: what the caller calls each."""
    rules = (
        (max_new_tokens, max_new_tokens >= 1, "1 or more"),
        (temperature, 0 <= temperature < math.inf, "0 (greedy) or more"),
        (top_k, top_k >= 0, "0 (all) or more"),
        (top_p, 0 < top_p <= 1, "above 0, up to 1 (all)"),
        (num_samples, num_samples >= 1, "1 or more"),
    )
    for name, (value, valid, expected) in zip(names, rules, strict=True):
        if not valid:
            raise ConfigError(f"{name} is {value}", "sampling", f"give {expected}")
