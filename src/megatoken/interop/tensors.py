"""A model yet to be filled, and what every tensor that fills it must be, whichever file it comes from."""

from pathlib import Path

import torch
from torch import Tensor

from megatoken.errors import Exit, Fault
from megatoken.model.gpt import GPT
from megatoken.presets import Shape


def build_empty(shape: Shape) -> GPT:
    """A model on the CPU in fp32 whose memory holds nothing yet, but zeros in the rows that only pad the vocabulary."""
    with torch.device("meta"):
        model = GPT(shape)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for weight in (model.tokens.weight, model.unembedding):
            weight[shape.vocab_size :] = 0.0
    return model


def check_numbers(tensor: Tensor, name: str, path: Path) -> Tensor:
    """The tensor itself. Raises Fault(CHECKPOINT) unless it holds finite floating-point numbers."""
    if not tensor.is_floating_point() or not torch.isfinite(tensor.float()).all():
        what = f"{name} ({tensor.dtype}) holds values that are not finite numbers"
        raise Fault(Exit.CHECKPOINT, what, str(path), "copy or download it again")
    return tensor
