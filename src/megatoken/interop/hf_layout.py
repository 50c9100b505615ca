"""What Hugging Face's families have in common: where each tensor of a file belongs in ours, how a config.json is read.

Source: the files that transformers' save_pretrained writes. Absent: the families themselves (hf_gpt2.py, hf_llama.py),
files (hf.py, hf_export.py).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatoken.errors import Exit, Fault
from megatoken.presets import Shape

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of a file belongs: our parameter, its sizes in the file, and whether the file has it transposed.

    rows: first and one past the last row of ours that it is; None: to the end.
    """

    ours: str
    sizes: tuple[int, ...]
    transposed: bool = False
    rows: tuple[int, int | None] = (0, None)

    def put(self, tensor: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copy a file's tensor into ours."""
        parameters[self.ours].data[slice(*self.rows)] = tensor.T if self.transposed else tensor

    def take(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """A file's tensor out of ours, with storage of its own; zeros for a bias that ours does not have."""
        if self.ours not in parameters:
            return torch.zeros(self.sizes)
        tensor = parameters[self.ours].detach()[slice(*self.rows)]
        return (tensor.T if self.transposed else tensor).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model type of transformers. list_places: every tensor of a shape, by its name in the file.

    read: config.json and its path to a Shape; write: back. prefix: of every name but the output layer's, which a file
    of the bare model lacks. buffers: what old versions saved besides weights. model_type and architecture: its names.
    """

    model_type: str
    architecture: str
    prefix: str
    buffers: re.Pattern[str]
    list_places: Callable[[Shape], dict[str, Place]]
    read: Callable[[Config, str], Shape]
    write: Callable[[Shape], dict[str, Any]]


def read_sizes(config: Config, names: Mapping[str, str], where: str) -> dict[str, Any]:
    """Positive whole numbers by our name. names: theirs. Raises Fault(CHECKPOINT) naming those that are none."""
    sizes: dict[str, Any] = {ours: config.get(theirs) for ours, theirs in names.items()}
    if odd := [f"{names[ours]} is {v!r}" for ours, v in sizes.items() if type(v) is not int or v < 1]:
        raise Fault(Exit.CHECKPOINT, f"no size: {', '.join(odd)}", where, "restore the file")
    if sizes["d_model"] % sizes["n_head"]:
        what = f"{names['d_model']} {sizes['d_model']} does not divide into {sizes['n_head']} heads"
        raise Fault(Exit.CHECKPOINT, what, where, "restore the file")
    return sizes


def check_choices(config: Config, choices: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Raise Fault(CHECKPOINT) for a value that is none of those we compute; the first holds where nothing is said."""
    for key, allowed in choices.items():
        if (value := config.get(key, allowed[0])) not in allowed:
            fix = f"supported: {' or '.join(map(str, allowed))}"
            raise Fault(Exit.CHECKPOINT, f"{key} is {value!r}, which is not computed here", where, fix)


def read_number(config: Config, key: str, default: float, where: str) -> float:
    """A positive number. Raises Fault(CHECKPOINT) for anything else."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise Fault(Exit.CHECKPOINT, f"{key} is {value!r}, not a positive number", where, "restore the file")
    return float(value)
