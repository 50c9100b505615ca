"""A benchmark's worker process: build one training step, then run steps on request.

stdin: a `WorkerSpec` as one line of JSON, then one step count per line. stdout: one line of JSON
per request, or {"failed": reason}. The worker exits at the end of stdin. Process settings must be
made before torch is imported, so this module imports neither torch nor numpy.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pkgutil import resolve_name
from typing import Any

from megatoken.config.model_config import ModelConfig
from megatoken.system.environment import prepare_process


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker trains.

    builder: "module:function" that takes this spec and returns a `Training`. options: its extra
    arguments. machine: fields of `MachineConfig`. micro_batch: 0 to tune it. prepare_process: apply
    the process settings of `megatoken train`. nproc: processes that share the batch.
    """

    model_config: ModelConfig
    batch_seqs: int
    device: str
    name: str = "megatoken"
    configuration: str = "default"
    builder: str = "megatoken.bench.training:build_training"
    options: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    micro_batch: int = 0
    prepare_process: bool = True
    nproc: int = 1
    rank: int = 0
    port: int = 0

    @property
    def batch_tokens(self) -> int:
        return self.batch_seqs * self.model_config.seq_len

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "WorkerSpec":
        values = json.loads(text)
        values["model_config"] = ModelConfig(**values["model_config"])
        return cls(**values)


def main() -> None:
    """Serve one spec until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps prints out of the answers
    first_line = sys.stdin.readline()
    if not first_line:
        return
    spec = WorkerSpec.from_json(first_line)
    if spec.prepare_process:
        prepare_process()
    try:
        training = resolve_name(spec.builder)(spec)
        built = {"chosen": training.chosen, "tuning_seconds": training.tuning_seconds}
        answers.write(json.dumps(built) + "\n")
        for line in sys.stdin:
            answers.write(json.dumps(training.run(int(line))) + "\n")
    except Exception as error:  # models, compilers and memory fail in many ways
        lines = [type(error).__name__, *str(error).strip().splitlines()[:1]]
        answers.write(json.dumps({"failed": ": ".join(lines)}) + "\n")
