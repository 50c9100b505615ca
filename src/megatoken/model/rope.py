"""Rotary position embedding (Su et al. 2021), as in LLaMA.

Channels i and i + D/2 of a head form a pair, which rotates by theta^(-2i/D) radians per token.
Hugging Face pairs channels in the same way, so its weights need no permutation. LLaMA 3.1 extends
the method to longer contexts: pairs that rotate fewer than `rope_low` times in `rope_context`
tokens are slowed down by `rope_factor`, pairs that rotate more than `rope_high` times are
unchanged, and between these the slowdown changes linearly.

Angles are computed in fp32 in every forward, so there is no buffer to move, cast or save.

Shapes: B batch, T time, H heads, D head width, P = D/2 pairs.
"""

import math

import torch
from torch import Tensor

from megatoken.config.model_config import ModelConfig

# Cosines and sines (T, 1, D) or (B, T, 1, D) in fp32; the sines' first half is negated.
CosSin = tuple[Tensor, Tensor]


def rope_inv_freq(config: ModelConfig, device: torch.device) -> Tensor:
    """Return how far each pair of channels rotates per token, in radians: (P,), fp32."""
    channels_P = torch.arange(0, config.d_head, 2, dtype=torch.float32, device=device)
    inv_freq_P = 1.0 / torch.pow(config.rope_theta, channels_P / config.d_head)
    if config.rope_factor == 1:
        return inv_freq_P
    rotations_P = inv_freq_P * (config.rope_context / (2 * math.pi))
    share_P = ((rotations_P - config.rope_low) / (config.rope_high - config.rope_low)).clamp(0, 1)
    return inv_freq_P * (share_P + (1 - share_P) / config.rope_factor)


def rotary_cos_sin(config: ModelConfig, positions: Tensor) -> CosSin | None:
    """Return the rotary cosines and sines at `positions`, int64 of shape (T,) or (B, T).

    Returns None if the model uses learned positions.
    """
    if config.pos_emb == "learned":
        return None
    angles_P = positions[..., None, None] * rope_inv_freq(config, positions.device)
    cos_P = angles_P.cos()
    sin_P = angles_P.sin()
    return torch.cat((cos_P, cos_P), -1), torch.cat((-sin_P, sin_P), -1)


def apply_rotary(x_BTHD: Tensor, cos_sin: CosSin) -> Tensor:
    """Rotate the channel pairs of every head in fp32 or wider. The result has the input's dtype."""
    cos_T1D, sin_T1D = cos_sin
    return (x_BTHD * cos_T1D + x_BTHD.roll(x_BTHD.shape[-1] // 2, -1) * sin_T1D).to(x_BTHD.dtype)
