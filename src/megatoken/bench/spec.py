"""What a contender of `bench peers` or `bench ladder` is told: data that crosses to its process as a JSON line."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatoken.presets import Shape

OURS = "megatoken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Who trains what. precision, compile and source (its own file) are for peers: ours chooses for itself, but for
    the fields of `Machine` in `machine`, a micro-batch other than 0, and the process settings of the command. Of
    `nproc` processes that share the batch this is number `rank`; number 0 starts the others, who find it at `port`."""

    name: str
    shape: Shape
    batch_seqs: int
    device: str
    precision: str = "fp32"
    compile: bool = False
    source: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)
    micro_batch: int = 0
    prepared: bool = True
    nproc: int = 1
    rank: int = 0
    port: int = 0

    @property
    def configuration(self) -> str:
        """What tells the contenders of one name apart."""
        return "default" if self.name == OURS else f"{self.precision} {'compile' if self.compile else 'eager'}"

    def to_line(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_line(cls, line: str) -> "Spec":
        values = json.loads(line)
        return cls(**values | {"shape": Shape(**values["shape"])})
