"""A benchmark's worker process: build a training step, then run steps on request.

Process settings must be applied before torch is imported, so this module imports neither torch nor
numpy.
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Any

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.system.environment import prepare_process, replace_environment


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """The training step that a worker process runs.

    builder: "module:function"; the function takes this spec and an ExitStack, and returns a
    `Training`. options: extra arguments for the builder. machine: fields of `MachineConfig`.
    micro_batch: 0 to tune it. prepare_process: whether to apply the process settings of `megatoken
    train`. nproc: number of processes that share the batch.
    """

    model_config: ModelConfig
    batch_seqs: int
    device: str
    name: str = "megatoken"
    configuration: str = "default"
    builder: str = "megatoken.study.bench.training:build_training"
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


def serve(
    connection: Connection, spec: WorkerSpec, log: str, environment: Mapping[str, str]
) -> None:
    """Build the training of `spec`, then run steps on request.

    A request is the number of steps to run. Sends a dict after building and after each request. On
    failure, sends {"failed": reason} and returns. Output goes to the file `log`. Returns when the
    connection is closed.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    replace_environment(environment)
    if spec.prepare_process:
        prepare_process()
    with ExitStack() as stack:
        try:
            training = resolve_name(spec.builder)(spec, stack)
            result = {"chosen": training.chosen, "tuning_seconds": training.tuning_seconds}
            while True:
                connection.send(result)
                result = training.run(connection.recv())
        except EOFError:
            return
        except Exception as error:  # models, compilers and memory fail in many ways
            lines = [type(error).__name__, *str(error).strip().splitlines()[:1]]
            connection.send({"failed": ": ".join(lines)})
