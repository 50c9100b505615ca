"""Rotary position embedding (Su et al. 2021), as in LLaMA.

Channels i and i + D/2 of a head form a pair, which rotates by theta^(-2i/D) radians per token.
Hugging Face pairs channels in the same way, so its weights need no permutation.

Scaling extends the method to longer contexts: `rope_scaling` chooses how much of each pair's
rotation is slowed down by `rope_factor`.

- linear: all of it (Chen et al. 2023).
- llama3: all of it for pairs that rotate fewer than `rope_low` times in `rope_context` tokens, none
  for pairs that rotate more than `rope_high` times, and a share linear in the number of rotations
  between these (Dubey et al. 2024).
- yarn: the same limits, with a share linear in the number of the pair, i. Rotated queries and keys
  are multiplied by `rope_attention` (Peng et al. 2023).

Angles are computed in fp32 in every forward, so there is no buffer to move, cast or save.

Shapes: B batch, T time, H heads, D head width, P = D/2 pairs.
"""

import math

import torch
from torch import Tensor

from megatoken.base.config.model_config import ModelConfig

# Cosines and sines (T, 1, D) or (B, T, 1, D) in fp32; the sines' first half is negated.
CosSin = tuple[Tensor, Tensor]


def rope_inv_freq(config: ModelConfig, device: torch.device, *, local: bool = False) -> Tensor:
    """Return how far each pair of channels rotates per token, in radians: (P,), fp32.

    local: whether for layers with a window, if these have a base of their own.
    """
    theta = config.rope_local_theta if local else config.rope_theta
    channels_P = torch.arange(0, config.d_head, 2, dtype=torch.float32, device=device)
    inv_freq_P = 1.0 / torch.pow(theta, channels_P / config.d_head)
    if config.rope_factor == 1 or local:
        return inv_freq_P
    kept_P = torch.zeros_like(inv_freq_P)  # share that is not slowed down
    if config.rope_scaling == "llama3":
        rotations_P = inv_freq_P * (config.rope_context / (2 * math.pi))
        kept_P = (rotations_P - config.rope_low) / (config.rope_high - config.rope_low)
    elif config.rope_scaling == "yarn":
        first = max(math.floor(_find_pair(config, config.rope_high)), 0)
        last = min(math.ceil(_find_pair(config, config.rope_low)), config.d_head - 1)
        kept_P = 1 - (channels_P / 2 - first) / max(last - first, 1e-3)
    kept_P = kept_P.clamp(0, 1)
    return inv_freq_P * (kept_P + (1 - kept_P) / config.rope_factor)


def _find_pair(config: ModelConfig, rotations: float) -> float:
    """Return the index of the pair that makes that many turns in `rope_context` tokens."""
    ratio = config.rope_context / (2 * math.pi * rotations)
    return config.d_head / 2 * math.log(ratio) / math.log(config.rope_theta)


def rotary_cos_sin(config: ModelConfig, positions: Tensor, *, local: bool = False) -> CosSin | None:
    """Return the rotary cosines and sines at `positions`, int64 of shape (T,) or (B, T).

    Returns None if the model uses learned positions. local: as in `rope_inv_freq`.
    """
    if config.pos_emb == "learned":
        return None
    angles_P = positions[..., None, None] * rope_inv_freq(config, positions.device, local=local)
    cos_P = angles_P.cos()
    sin_P = angles_P.sin()
    if config.rope_factor != 1 and config.rope_scaling == "yarn" and not local:
        scale = config.rope_attention or 1 + 0.1 * math.log(config.rope_factor)
        cos_P, sin_P = cos_P * scale, sin_P * scale
    return torch.cat((cos_P, cos_P), -1), torch.cat((-sin_P, sin_P), -1)


def apply_rotary(x_BTHD: Tensor, cos_sin: CosSin) -> Tensor:
    """Rotate the channel pairs of every head in fp32 or wider. The result has the input's dtype."""
    cos_T1D, sin_T1D = cos_sin
    return (x_BTHD * cos_T1D + x_BTHD.roll(x_BTHD.shape[-1] // 2, -1) * sin_T1D).to(x_BTHD.dtype)
