"""Build the step that a worker times: the same step as `megatoken train` runs on this machine."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatoken.base.config.schema import MachineConfig
from megatoken.base.system.device import Device, choose_device
from megatoken.data.dataloader import Batch
from megatoken.distributed.comm import join_process_group
from megatoken.distributed.env import DistEnv
from megatoken.study.bench.worker import WorkerSpec
from megatoken.study.bench.workload import build_workload, draw_batch
from megatoken.train.step import train_step


@dataclass(kw_only=True)
class Training:
    """A model being trained.

    step: a function that trains on a batch and returns the mean loss in nats. peak_memory_bytes: a
    function that returns the peak memory of this GPU or, on a CPU, the sum over ranks.
    tuning_seconds: time to build, tune and compile before the first step.
    """

    spec: WorkerSpec
    device: Device
    step: Callable[[Batch], float]
    chosen: str
    peak_memory_bytes: Callable[[], int]
    tuning_seconds: float = 0.0
    steps: int = 0

    def run(self, steps: int) -> dict[str, Any]:
        """Train on the next `steps` batches; time each step, not counting the drawing of its batch.

        Return {"seconds": of each step, "loss": of the last step, "peak_memory_bytes"}.
        """
        spec = self.spec
        seconds: list[float] = []
        loss = 0.0
        for _ in range(steps):
            batch = draw_batch(
                spec.model_config,
                spec.batch_seqs,
                self.steps,
                self.device,
                rank=spec.rank,
                nproc=spec.nproc,
            )
            self.device.synchronize()
            start = time.perf_counter()
            loss = self.step(batch)
            self.device.synchronize()
            seconds.append(time.perf_counter() - start)
            self.steps += 1
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # for the next worker
        return {"seconds": seconds, "loss": loss, "peak_memory_bytes": self.peak_memory_bytes()}


def build_training(spec: WorkerSpec, stack: ExitStack) -> Training:
    """Build the step as a training run would, with kernels and micro-batch tuned on this machine.

    spec.machine overrides the default machine settings. stack: ends the process group when closed.
    """
    start = time.perf_counter()
    machine = replace(MachineConfig(device=spec.device), **spec.machine)
    dist_env = DistEnv(
        rank=spec.rank,
        world_size=spec.nproc,
        local_rank=spec.rank,
        local_world_size=spec.nproc,
        port=spec.port,
    )
    comm = stack.enter_context(join_process_group(dist_env, choose_device(machine).type))
    workload = build_workload(
        spec.model_config,
        machine,
        batch_seqs=spec.batch_seqs,
        micro_batch=spec.micro_batch or "auto",
        comm=comm,
    )
    state, device, tuning = workload.state, workload.device, workload.tuning
    constant_lr = replace(workload.step_config.schedule, decay="constant", warmup=0)
    step_config = replace(workload.step_config, schedule=constant_lr)

    def peak_memory_bytes() -> int:
        memory = device.peak_memory_bytes()
        return int(comm.sum(torch.tensor(memory))) if device.type == "cpu" else memory

    mode = tuning.compile
    compilation = tuning.note or {"off": "eager", "on": "compile"}.get(mode, f"compile {mode}")
    kernels = f"{device.precision}, {tuning.choice}"
    return Training(
        spec=spec,
        device=device,
        step=lambda batch: train_step(state, step_config, device, batch).loss,
        chosen=f"{kernels}, micro-batch {step_config.micro_batch}, {compilation}",
        peak_memory_bytes=peak_memory_bytes,
        tuning_seconds=time.perf_counter() - start,
    )
