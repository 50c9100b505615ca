"""Compute the mean loss over fixed windows, and bits per byte of text.

Results do not depend on the micro-batch or the number of ranks.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from megatoken.base.system.device import Device
from megatoken.data.dataloader import Batch, to_batch
from megatoken.data.vocabulary import CountBytes
from megatoken.distributed.comm import Comm
from megatoken.distributed.parallel_dims import UNSHARDED, ParallelDims
from megatoken.distributed.tensor_parallel import gather_lm_head, slice_sequence
from megatoken.model.gpt import GPT
from megatoken.model.kernels.cross_entropy import OutputLayer
from megatoken.model.loss import cross_entropy
from megatoken.model.masks import separate_conversations


@torch.no_grad()
def validation_loss(
    model: GPT,
    windows: Iterable[np.ndarray | Batch],
    device: Device,
    *,
    chunk: int,
    comm: Comm,
    count_bytes: CountBytes,
    dims: ParallelDims = UNSHARDED,
    output_layer: type[OutputLayer] = OutputLayer,
) -> dict[str, Any]:
    """Return `loss_metrics` over the windows of all ranks.

    windows: this rank's arrays of token ids (B, T+1), or batches. Ranks that share a sharded model
    (`dims`) must pass the same number of them, so some may have no rows. count_bytes:
    `Dataset.byte_counter`. chunk, output_layer: as in `cross_entropy`.
    """
    was_training = model.training
    model.eval()
    total = text_bytes = 0.0
    count = 0
    for window in windows:
        if dims.is_unsharded and not len(window):
            continue
        batch = window if isinstance(window, Batch) else to_batch(window)
        inputs, targets, starts = batch.inputs_BT, batch.targets_BT, batch.starts_BT
        if dims.tp_rank == 0:  # tensor-parallel ranks have the same windows
            text_bytes += count_bytes(inputs.numpy(), targets.numpy())
        if not dims.is_unsharded:
            # A sharded model needs at least one row, whose length its ranks can divide.
            pad = (0, -inputs.shape[1] % dims.tp_size, 0, max(0, 1 - len(inputs)))
            inputs = F.pad(inputs, pad)
            targets = F.pad(targets, pad, value=-1)  # no target
            starts = None if starts is None else F.pad(starts, pad)
        mask = None if starts is None else separate_conversations(starts, device.torch_device)
        with device.autocast():
            loss_sum, n = cross_entropy(
                model(inputs.to(device.torch_device), tree_mask=mask),
                gather_lm_head(model.lm_head_weight),
                slice_sequence(dims, targets).to(device.torch_device),
                vocab_size=model.config.vocab_size,
                softcap=model.config.logit_softcap,
                chunk=chunk,
                output_layer=output_layer,
            )
        total += float(loss_sum)
        count += int(n)
    model.train(was_training)
    # The widest dtype, so that the sum does not depend on the number of ranks.
    sums = torch.tensor([total, count, text_bytes], dtype=device.widest, device=device.torch_device)
    return loss_metrics(*comm.sum(sums).tolist())


def perplexity(loss: float) -> float:
    """Return exp(loss), capped at exp(709) because larger powers overflow a float."""
    return math.exp(min(loss, 709.0))


def loss_metrics(nats: float, n_targets: float, text_bytes: float) -> dict[str, Any]:
    """Return loss (nats per target), perplexity, bits_per_byte, target_tokens and text_bytes.

    bits_per_byte is the total loss in bits, including that of special tokens, divided by the bytes
    of text in the targets, so it can compare models with different tokenizers. It is NaN without
    text.
    """
    loss = nats / max(n_targets, 1)
    text_bytes = round(text_bytes)
    return {
        "loss": loss,
        "perplexity": perplexity(loss),
        "bits_per_byte": loss * n_targets / math.log(2) / text_bytes if text_bytes else math.nan,
        "target_tokens": int(n_targets),
        "text_bytes": text_bytes,
    }
