"""Held-out loss over a fixed set of tokens: the same number for any micro-batch."""

from collections.abc import Iterable

import numpy as np
import torch

from megatoken.device import Device
from megatoken.model.gpt import GPT
from megatoken.model.loss import cross_entropy
from megatoken.parallel.ranks import Ranks


@torch.no_grad()
def held_out_loss(
    model: GPT, windows: Iterable[np.ndarray], device: Device, *, chunk: int, ranks: Ranks
) -> tuple[float, int]:
    """Mean loss in nats and the number of targets it is over, on all ranks together.

    windows: this rank's arrays (B, T+1) of token ids, inputs then the last target; there may be none. The model is
    left in the mode it was in.
    """
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for rows in windows:
        ids = torch.from_numpy(rows.astype(np.int64)).to(device.place)
        with device.autocast():
            loss_sum, n = cross_entropy(
                model(ids[:, :-1]), model.unembedding, ids[:, 1:], vocab_size=model.shape.vocab_size, chunk=chunk
            )
        total += float(loss_sum)
        count += int(n)
    model.train(was_training)
    # In double precision where there is one, so that the number of ranks does not show.
    precise = torch.float32 if device.place.type == "mps" else torch.float64
    total, counted = ranks.sum(torch.tensor([total, count], dtype=precise, device=device.place)).tolist()
    return total / max(counted, 1), int(counted)
