"""Parts that other rooms add to a model, selected by fields of its config. No torch.

For each field in EXTENSIONS, the entry `extension` is a module with two functions: `apply` adds the
part to a GPT, and `merge` turns it into weights of the GPT where that is possible. The entry
`extension_size` is a function of the config that returns what the part adds.
"""

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import ConfigError
from megatoken.base.rooms import list_entries, load_entry


@dataclass(frozen=True, kw_only=True)
class Additions:
    """What extensions add to a model.

    freezes: whether nothing but the extensions trains.
    block_parameters: parameters in each block, all in matrices.
    block_outputs: numbers per token that each block saves for the backward.
    parameters: those outside the blocks. decayed: how many of these have weight decay.
    """

    freezes: bool = False
    block_parameters: int = 0
    block_outputs: int = 0
    parameters: int = 0
    decayed: int = 0


@cache
def count_additions(config: ModelConfig) -> Additions:
    """Return what all extensions of a model add. Raises what `load_extensions` raises."""
    found = [count(config) for count in load_extensions(config, "extension_size")]
    names = [field.name for field in fields(Additions)]
    return Additions(**{name: sum(getattr(each, name) for each in found) for name in names})


def load_extensions(config: ModelConfig, kind: str = "extension") -> list[Any]:
    """Import the entries of a model's extensions. Raises ConfigError if a room is missing."""
    for name in config.extensions:
        if name not in list_entries(kind):
            fix = "leave it out, or install all of megatoken"
            raise ConfigError("no part of this installation provides it", f"model.{name}", fix)
    return [load_entry(kind, name) for name in config.extensions]
