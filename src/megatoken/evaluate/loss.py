"""Held-out loss over a fixed set of tokens: the same number for any micro-batch and any number of ranks.

Bits per byte compare models of different tokenizers: all nats, those of the marks between documents too, over the
bytes of the text that the targets spell.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatoken.device import Device
from megatoken.model.gpt import GPT
from megatoken.model.loss import cross_entropy
from megatoken.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Mean loss in nats a target, the number of targets, and the bytes of text that they spell."""

    loss: float
    targets: int
    text_bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 709.0))  # above it a float ends

    @property
    def bits_per_byte(self) -> float:
        """NaN where the targets spell nothing."""
        return self.loss * self.targets / math.log(2) / self.text_bytes if self.text_bytes else math.nan


@torch.no_grad()
def held_out_loss(
    model: GPT,
    windows: Iterable[np.ndarray],
    device: Device,
    *,
    chunk: int,
    ranks: Ranks,
    byte_lengths: NDArray[np.int64],
) -> HeldOut:
    """The loss on all ranks together.

    windows: this rank's arrays (B, T+1) of token ids, inputs then the last target; there may be none. byte_lengths:
    of every id (tokenizer.byte_lengths). The model is left in the mode it was in.
    """
    was_training = model.training
    model.eval()
    total, count, text_bytes = 0.0, 0, 0
    for rows in windows:
        ids = torch.from_numpy(rows.astype(np.int64)).to(device.place)
        with device.autocast():
            loss_sum, n = cross_entropy(
                model(ids[:, :-1]), model.unembedding, ids[:, 1:], vocab_size=model.shape.vocab_size, chunk=chunk
            )
        total += float(loss_sum)
        count += int(n)
        text_bytes += int(byte_lengths[rows[:, 1:]].sum())
    model.train(was_training)
    # In double precision where there is one, so that the number of ranks does not show.
    precise = torch.float32 if device.place.type == "mps" else torch.float64
    sums = torch.tensor([total, count, text_bytes], dtype=precise, device=device.place)
    total, counted, spelt = ranks.sum(sums).tolist()
    return HeldOut(total / max(counted, 1), int(counted), int(spelt))
