"""Rotary positions: queries and keys are turned by angles that grow with their place (Su et al. 2021), as in LLaMA.

Channels i and i + D/2 of a head are a plane (Hugging Face's pairing, so that its weights need no permutation), which
turns by theta^(-2i/D) radians a token. LLaMA 3.1 stretches it to longer contexts: planes that turn less than `rope_low`
times in `rope_context` tokens turn `rope_factor` times more slowly, those that turn more than `rope_high` times as
before, between them goes a straight line.

Angles are made in fp32 at every forward: there is no buffer to be moved, cast, saved or forgotten.

Shapes: B batch, T time, H heads, D head width, P = D/2 planes.
"""

import math

import torch
from torch import Tensor

from megatoken.presets import Shape

Turns = tuple[Tensor, Tensor]  # cosines and sines (T, 1, D), or (B, T, 1, D), in fp32, sines of the first half negative


def find_speeds(shape: Shape, device: torch.device) -> Tensor:
    """Radians a token of every plane (P,), fp32."""
    exponents_P = torch.arange(0, shape.d_head, 2, dtype=torch.float32, device=device) / shape.d_head
    speeds_P = 1.0 / torch.pow(shape.rope_theta, exponents_P)
    if shape.rope_factor == 1:
        return speeds_P
    rounds_P = speeds_P * (shape.rope_context / (2 * math.pi))
    kept_P = ((rounds_P - shape.rope_low) / (shape.rope_high - shape.rope_low)).clamp(0, 1)
    return speeds_P * (kept_P + (1 - kept_P) / shape.rope_factor)


def make_turns(shape: Shape, places: Tensor) -> Turns | None:
    """How to turn the tokens at these places, (T,) or (B, T) int64; None for a model whose positions are learned."""
    if shape.positions == "learned":
        return None
    return find_turns(places[..., None, None] * find_speeds(shape, places.device))


def find_turns(angles_P: Tensor) -> Turns:
    """Cosines and sines of angles (..., P), for both channels of every plane."""
    cos_P, sin_P = angles_P.cos(), angles_P.sin()
    return torch.cat((cos_P, cos_P), -1), torch.cat((-sin_P, sin_P), -1)


def turn(x_BTHD: Tensor, turns: Turns) -> Tensor:
    """Every plane of every head turned by its angle, in fp32 or wider, rounded to the dtype of `x_BTHD`."""
    cos_T1D, sin_T1D = turns
    return (x_BTHD * cos_T1D + x_BTHD.roll(x_BTHD.shape[-1] // 2, -1) * sin_T1D).to(x_BTHD.dtype)
