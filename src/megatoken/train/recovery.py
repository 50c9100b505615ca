"""Recover from bad steps: skip the batch; after several in a row, rewind to a checkpoint.

With batches of one size, a skipped batch leaves no trace: the run is bit-identical to one without
that batch in its data. In a batch ramp, sizes go by batch and learning rates by step.

After `optim.max_skips` bad steps in a row, the weights may be at fault, so training rewinds to the
newest checkpoint and skips every batch from there to the last bad one (PaLM, Chowdhery et al. 2022,
section 5.1). If replicas differ, training rewinds but skips no batches. All ranks see the same
numbers and so make the same decisions.
"""

from bisect import insort

from megatoken.base.errors import NumericsError
from megatoken.data.dataloader import batch_of_step
from megatoken.distributed.replica_check import compare_replicas
from megatoken.store.load import list_optimizer_tensors
from megatoken.train.checkpoint_saver import CheckpointSaver
from megatoken.train.run import Run
from megatoken.train.step import StepMetrics, bad_step_error

MAX_REWINDS = 2  # without getting past the furthest step
REPLICA_CHECK_STEPS = 100
REPLICA_FIX = "test the memory and device of that rank; the same command resumes"


class Recovery:
    """Skips bad batches and rewinds to the newest checkpoint.

    All ranks must make the same calls.
    """

    def __init__(self, run: Run, saver: CheckpointSaver) -> None:
        self.run = run
        self.state = run.state
        self.saver = saver
        self.bad_batches: list[int] = []  # since the last good step
        self.furthest_step = run.state.step
        self.n_rewinds = 0  # since the furthest step
        self.in_spike = False

    def accept(self, step: StepMetrics) -> None:
        """Record a step that updated the weights; report the first step of a spike."""
        self.bad_batches.clear()
        if step.step > self.furthest_step:
            self.furthest_step = step.step
            self.n_rewinds = 0
        if step.overflowed or self.run.config.optim.spike == "off":
            return
        max_loss, max_grad_norm = self.state.recent.limits()
        is_spike = step.loss > max_loss or step.grad_norm > max_grad_norm
        if is_spike and not self.in_spike:
            limits = f"expected at most {max_loss:.4g} and {max_grad_norm:.4g}"
            self.report(step, "spike", limits)
        self.in_spike = is_spike
        self.state.recent.values.append((step.loss, step.grad_norm))

    def skip(self, bad: StepMetrics) -> None:
        """Remove a bad step's batch from the data order.

        `state.step` must already be back at its value before the bad step. After `optim.max_skips`
        bad steps in a row, rewinds to a checkpoint. Raises NumericsError if the gradient is 0, or
        if rewinding does not help.
        """
        if bad.grad_norm == 0:
            raise bad_step_error(bad.step, bad.loss, bad.grad_norm)
        if self.check_replicas():  # the weights of one rank are at fault, not the batch
            return
        batch = self.state.batch
        self.run.heartbeat.beat("skip", self.state.step)  # the next step has the same number
        self.report(bad, "batch skipped", "weights unchanged")
        insort(self.state.skipped_batches, batch)
        self.bad_batches.append(batch)
        if len(self.bad_batches) >= self.run.config.optim.max_skips:
            where = f"step {bad.step}, batches {', '.join(map(str, self.bad_batches))}"
            error = bad_step_error(bad.step, bad.loss, bad.grad_norm, where)
            self.rewind(error, last_bad_batch=batch)

    def report(self, step: StepMetrics, what: str, message: str) -> None:
        """Log an event and print a warning about a step and its batch."""
        batch = batch_of_step(step.step - 1, self.state.skipped_batches)
        self.run.log.event(
            what,
            step=step.step,
            batch=batch,
            loss=step.loss,
            grad_norm=step.grad_norm,
            message=message,
        )
        values = f"loss {step.loss:.4g}, gradient norm {step.grad_norm:.4g}"
        self.run.console.warn(f"step {step.step}: {what}: batch {batch}, {values}: {message}")

    def check_replicas(self) -> bool:
        """Compare weights and optimizer state of all replicas; if they differ, rewind.

        Returns whether they differ. Replicas are compared only with others on the same kind of
        device, because rounding may depend on it.
        """
        run = self.run
        state = self.state
        dims = state.dims
        if dims.dp_replicate == 1:
            return False
        group = dims.shard_rank, dims.tp_rank, run.device.name
        tensors = {**state.sharded.local_params, **list_optimizer_tensors(state)}
        divergence = compare_replicas(tensors, group, state.comm)
        if divergence is None:
            return False
        run.log.event(
            "replicas differ",
            ranks=divergence.ranks,
            tensors=divergence.tensors,
            message=divergence.message,
        )
        run.console.warn(f"step {state.step}: {divergence.message}")
        self.rewind(NumericsError(divergence.message, f"step {state.step}", REPLICA_FIX))
        return True

    def rewind(self, error: NumericsError, last_bad_batch: int = -1) -> None:
        """Load the newest checkpoint and skip the batches from there to `last_bad_batch`.

        By default no batches are skipped. Raises `error` if there is no checkpoint, or if
        MAX_REWINDS rewinds did not get training past its furthest step.
        """
        run = self.run
        state = self.state
        left_step = state.step
        self.saver.try_commit()
        if self.n_rewinds >= MAX_REWINDS or run.restore() is None:
            raise error
        self.n_rewinds += 1
        self.bad_batches.clear()
        skipped = range(state.batch, last_bad_batch + 1)
        state.skipped_batches = sorted({*state.skipped_batches, *skipped})
        message = f"rewound from step {left_step} to {state.step}"
        if skipped:
            message += f", skipping batches {skipped[0]} to {skipped[-1]}"
        run.log.event("rewind", message=f"{message}: {error}")
        run.console.warn(message)
