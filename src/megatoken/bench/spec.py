"""What a worker process trains: one line of JSON to its stdin. Imported before torch is, so without it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatoken.config.model_config import ModelConfig

OURS, LLMC = "megatoken", "llmc"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker trains.

    machine (fields of `MachineConfig`), micro_batch (0: tuned) and prepared (the command's process settings) are for
    ours; precision, compile and source (its file) are for a baseline. rank: of `nproc` processes that share the batch.
    """

    name: str
    model_config: ModelConfig
    batch_seqs: int
    device: str
    configuration: str = "default"
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
    def batch_tokens(self) -> int:
        return self.batch_seqs * self.model_config.seq_len

    def to_json(self) -> str:
        return json.dumps(asdict(self))
