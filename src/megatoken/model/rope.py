"""Rotary position embedding (Su et al. 2021), as in LLaMA.

Channels i and i + D/2 of a head are a pair (Hugging Face's pairing, so that its weights need no permutation), rotated
by theta^(-2i/D) radians per token. LLaMA 3.1 extends it to longer contexts: pairs that rotate fewer than `rope_low`
times in `rope_context` tokens rotate `rope_factor` times more slowly, those above `rope_high` times as before, with a
linear transition between.

Angles are computed in fp32 at every forward: there is no buffer to be moved, cast or saved.

Shapes: B batch, T time, H heads, D head width, P = D/2 pairs.
"""

import math

import torch
from torch import Tensor

from megatoken.config.model_config import ModelConfig

# Cosines and sines (T, 1, D) or (B, T, 1, D) in fp32; sines of the first half negative
CosSin = tuple[Tensor, Tensor]


def rope_inv_freq(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians per token of every pair (P,), fp32."""
    exponents_P = (
        torch.arange(0, config.d_head, 2, dtype=torch.float32, device=device) / config.d_head
    )
    inv_freq_P = 1.0 / torch.pow(config.rope_theta, exponents_P)
    if config.rope_factor == 1:
        return inv_freq_P
    rotations_P = inv_freq_P * (config.rope_context / (2 * math.pi))
    kept_P = ((rotations_P - config.rope_low) / (config.rope_high - config.rope_low)).clamp(0, 1)
    return inv_freq_P * (kept_P + (1 - kept_P) / config.rope_factor)


def rotary_cos_sin(config: ModelConfig, positions: Tensor) -> CosSin | None:
    """Cosines and sines at positions (T,) or (B, T) int64; None for a model with learned positions."""
    if config.pos_emb == "learned":
        return None
    angles_P = positions[..., None, None] * rope_inv_freq(config, positions.device)
    cos_P, sin_P = angles_P.cos(), angles_P.sin()
    return torch.cat((cos_P, cos_P), -1), torch.cat((-sin_P, sin_P), -1)


def apply_rotary(x_BTHD: Tensor, cos_sin: CosSin) -> Tensor:
    """Rotate every pair of every head by its angle, in fp32 or wider; the result has the dtype of `x_BTHD`."""
    cos_T1D, sin_T1D = cos_sin
    return (x_BTHD * cos_T1D + x_BTHD.roll(x_BTHD.shape[-1] // 2, -1) * sin_T1D).to(x_BTHD.dtype)
