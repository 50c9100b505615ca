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
from megatoken.parallel.layout import Layout
from megatoken.parallel.ranks import Ranks
from megatoken.parallel.tensor import gather_unembedding, slice_sequence

WHOLE = Layout()  # nothing is split


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
    layout: Layout = WHOLE,
) -> HeldOut:
    """The loss on all ranks together.

    windows: this rank's arrays (B, T+1) of token ids, inputs then the last target; there may be none, but where the
    model is split all ranks have to compute together, so then of as many arrays, some of them empty. byte_lengths: of
    every id (tokenizer.byte_lengths). The model is left in the mode it was in.
    """
    was_training = model.training
    model.eval()
    total, count, text_bytes = 0.0, 0, 0
    for rows in windows:
        if layout.is_whole and not len(rows):
            continue
        inputs, targets = split_windows(rows, layout)
        with device.autocast():
            loss_sum, n = cross_entropy(
                model(inputs.to(device.place)),
                gather_unembedding(model.unembedding),
                slice_sequence(layout, targets).to(device.place),
                vocab_size=model.shape.vocab_size,
                chunk=chunk,
            )
        total += float(loss_sum)
        count += int(n)
        if layout.slice == 0:  # neighbours have the same rows
            text_bytes += int(byte_lengths[rows[:, 1:]].sum())
    model.train(was_training)
    # In double precision where there is one, so that the number of ranks does not show.
    sums = torch.tensor([total, count, text_bytes], dtype=device.widest, device=device.place)
    total, counted, spelt = ranks.sum(sums).tolist()
    return HeldOut(total / max(counted, 1), int(counted), int(spelt))


def split_windows(rows: np.ndarray, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (B, T), int64; filled up with targets that do not count to a row, and to what the tensor axis
    divides."""
    ids = torch.from_numpy(rows.astype(np.int64))
    if layout.is_whole:
        return ids[:, :-1], ids[:, 1:]
    missing = -(ids.shape[1] - 1) % layout.tensor, max(0, 1 - len(ids))
    inputs = torch.nn.functional.pad(ids[:, :-1], (0, missing[0], 0, missing[1]))
    return inputs, torch.nn.functional.pad(ids[:, 1:], (0, missing[0], 0, missing[1]), value=-1)
