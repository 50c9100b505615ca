"""What happens after a bad step: its batch is skipped; after several in a row training goes back to a checkpoint.

A skipped batch leaves no trace: the run has the bits of one whose data never held it. After `optim.max_skips` in a row
the fault may lie in the weights, so training goes back to the newest checkpoint and skips every batch from there to the
last bad one, because the same batches would lead to the same weights (PaLM, Chowdhery et al. 2022, section 5.1).
Replicas that differ go back, too, and skip nothing. All ranks decide alike, by numbers that all of them have.
"""

from bisect import insort
from typing import Any

import torch

from megatoken.checkpoint.load import list_optimizer_tensors
from megatoken.data.dataloader import batch_of_step
from megatoken.distributed.replica_check import compare_replicas
from megatoken.errors import NumericsError
from megatoken.train.actions import CheckpointSaver
from megatoken.train.restore import restore
from megatoken.train.run_context import RunContext
from megatoken.train.step import StepMetrics, bad_step_error

MAX_REWINDS = 2  # without a step beyond the furthest one
REPLICA_CHECK_STEPS = 100
REPLICA_FIX = "test the memory and the device of that rank; the same command goes on from the newest checkpoint"


class Recovery:
    """Skips bad batches, and goes back to the newest checkpoint. All ranks must make the same calls."""

    def __init__(self, run: RunContext, saver: CheckpointSaver) -> None:
        self.run, self.state, self.saver = run, run.state, saver
        self.in_a_row: list[int] = []  # batches skipped since the last good step
        self.furthest = run.state.step
        self.rewinds = 0  # since the furthest step
        self.in_spike = False

    def accept(self, step: StepMetrics) -> None:
        """Take in the numbers of a step that updated the weights; report it if it is the first of a spike."""
        self.in_a_row.clear()
        if step.step > self.furthest:
            self.furthest, self.rewinds = step.step, 0
        if step.overflowed or self.run.config.optim.spike == "off":
            return
        max_loss, max_grad_norm = self.state.recent.limits()
        is_spike = step.loss > max_loss or step.grad_norm > max_grad_norm
        if is_spike and not self.in_spike:
            self.report(
                step, "spike", f"at most {max_loss:.4g} and {max_grad_norm:.4g} were expected"
            )
        self.in_spike = is_spike
        self.state.recent.values.append((step.loss, step.grad_norm))

    def skip(self, bad: StepMetrics) -> None:
        """Leave the batch of a bad step, to which `state.step` has gone back, out of the data order.

        Goes back to the newest checkpoint after too many in a row. Raises NumericsError where that is no help, and for
        a step without a gradient.
        """
        if bad.grad_norm == 0:
            raise bad_step_error(bad.step, bad.loss, bad.grad_norm)
        if self.check_replicas():  # the fault lies in one rank's weights, not in the batch
            return
        batch = self.state.batch
        self.run.heartbeat.beat("skip", self.state.step)  # the next step has the same number
        self.report(bad, "batch skipped", "the weights are those before it")
        insort(self.state.skipped_batches, batch)
        self.in_a_row.append(batch)
        if len(self.in_a_row) >= self.run.config.optim.max_skips:
            where = f"step {bad.step}, batches {', '.join(map(str, self.in_a_row))}"
            self.rewind(
                bad_step_error(bad.step, bad.loss, bad.grad_norm, where), last_bad_batch=batch
            )

    def report(self, step: StepMetrics, what: str, message: str) -> None:
        """Write an event about a step and its batch, and a warning."""
        batch = batch_of_step(step.step - 1, self.state.skipped_batches)
        numbers: dict[str, Any] = {"batch": batch, "loss": step.loss, "grad_norm": step.grad_norm}
        self.run.write("event", step=step.step, what=what, **numbers, message=message)
        values = f"loss {step.loss:.4g}, gradient norm {step.grad_norm:.4g}"
        self.run.console.warn(f"step {step.step}: {what}: batch {batch}, {values}: {message}")

    def check_replicas(self) -> bool:
        """Compare weights and optimizer state of all replicas; if they differ, go back to the newest checkpoint.

        Return whether they did.
        Processes on other devices, or with another number of threads, may round differently and are not compared.
        """
        run, state, dims = self.run, self.state, self.state.dims
        if dims.dp_replicate == 1:
            return False
        part = dims.shard_rank, dims.tp_rank, run.device.name, torch.get_num_threads()
        tensors = {**state.sharded.local_params, **list_optimizer_tensors(state)}
        divergence = compare_replicas(tensors, part, state.comm)
        if divergence is not None:
            ranks, names = divergence.ranks, divergence.tensors
            run.write(
                "event",
                what="replicas differ",
                ranks=ranks,
                tensors=names,
                message=divergence.message,
            )
            run.console.warn(f"step {state.step}: {divergence.message}")
            self.rewind(NumericsError(divergence.message, f"step {state.step}", REPLICA_FIX))
        return divergence is not None

    def rewind(self, error: NumericsError, last_bad_batch: int = -1) -> None:
        """Go back to the newest checkpoint and skip the batches from there to `last_bad_batch`.

        Raises `error` where there is no checkpoint, or after too many rewinds without progress.
        """
        run, state, left_step = self.run, self.state, self.state.step
        self.saver.try_commit()
        if self.rewinds >= MAX_REWINDS or not restore(run):
            raise error
        self.rewinds += 1
        self.in_a_row.clear()
        skipped = range(state.batch, last_bad_batch + 1)
        state.skipped_batches = sorted({*state.skipped_batches, *skipped})
        message = f"back from step {left_step} to {state.step}"
        message += f", batches {skipped[0]} to {skipped[-1]} are skipped" if skipped else ""
        run.write("event", what="rewind", message=f"{message}: {error}")
        run.console.warn(message)
