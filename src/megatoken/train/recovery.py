"""Decide how to go on after bad steps: skip the batch; after several in a row, rewind the run.

With batches of one size, a skipped batch leaves no trace: the run is bit-identical to one without
that batch in its data. In a batch ramp, sizes depend on the batch number, but learning rates
on the step.

After `optim.max_skips` bad steps in a row, the weights may be at fault, so training rewinds to the
newest checkpoint and skips every batch from there to the last bad one (PaLM, Chowdhery et al. 2022,
section 5.1). If replicas differ, training rewinds but skips no batches. All ranks see the same
numbers and so make the same decisions.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatoken.base.errors import NumericsError
from megatoken.distributed.replica_check import compare_replicas
from megatoken.optim.spikes import RecentSteps
from megatoken.store.load import list_optimizer_tensors
from megatoken.train.checkpoint_saver import CheckpointSaver
from megatoken.train.restore import restore
from megatoken.train.run import Run
from megatoken.train.step import StepMetrics, bad_step_error
from megatoken.train.step_log import StepLog

MAX_REWINDS = 2  # without getting past the furthest step
REPLICA_CHECK_STEPS = 100
REPLICA_FIX = "test the memory and device of that rank; the same command resumes"


class Accept(NamedTuple):
    """The step updated the weights.

    spike: describes a spike that begins with this step, else "". recent: includes this step.
    """

    spike: str
    recent: RecentSteps


class Skip(NamedTuple):
    """Take the bad step again, with the next batch."""


class Rewind(NamedTuple):
    """Load the newest checkpoint, and skip the batches from there to `last_bad_batch`.

    By default no batches are skipped. error: to raise if there is no checkpoint.
    """

    error: NumericsError
    last_bad_batch: int = -1


@dataclass
class Guard:
    """Judges steps by their numbers.

    furthest_step: the last good step so far. bad_batches: those of bad steps since the last good
    one. n_rewinds: rewinds since the furthest step.
    """

    max_skips: int
    finds_spikes: bool
    furthest_step: int
    bad_batches: list[int] = field(default_factory=list)
    n_rewinds: int = 0
    in_spike: bool = False

    def judge(self, step: StepMetrics, batch: int, recent: RecentSteps) -> Accept | Skip | Rewind:
        """Decide about a step.

        Raises NumericsError if the gradient is 0, and what `rewind` raises.

        batch: the number of the step's batch.
        """
        if not step.bad:
            return self._accept(step, recent)
        if step.grad_norm == 0:
            raise bad_step_error(step)
        self.bad_batches.append(batch)
        if len(self.bad_batches) < self.max_skips:
            return Skip()
        return self.rewind(bad_step_error(step, self.bad_batches), batch)

    def rewind(self, error: NumericsError, last_bad_batch: int = -1) -> Rewind:
        """Raise `error` if MAX_REWINDS rewinds did not get training past its furthest step."""
        if self.n_rewinds >= MAX_REWINDS:
            raise error
        self.n_rewinds += 1
        self.bad_batches.clear()
        return Rewind(error, last_bad_batch)

    def _accept(self, step: StepMetrics, recent: RecentSteps) -> Accept:
        self.bad_batches.clear()
        if step.step > self.furthest_step:
            self.furthest_step = step.step
            self.n_rewinds = 0
        if step.overflowed or not self.finds_spikes:
            return Accept("", recent)
        max_loss, max_grad_norm = recent.limits()
        was_in_spike = self.in_spike
        self.in_spike = step.loss > max_loss or step.grad_norm > max_grad_norm
        begins = self.in_spike and not was_in_spike
        spike = f"expected at most {max_loss:.4g} and {max_grad_norm:.4g}" if begins else ""
        return Accept(spike, recent.add(step.loss, step.grad_norm))


def settle_steps(
    run: Run, saver: CheckpointSaver, guard: Guard, log: StepLog, *, compares: bool
) -> None:
    """Read and log the pending steps; recover if one is bad or replicas differ.

    A bad step moves `state.position` back: `log.read` to before it, `rewind` to a checkpoint.

    compares: whether to compare replicas even if no step is bad.
    """
    state = run.state
    for step, values in log.read():
        error = find_difference(run) if step.bad else None
        at = state.position
        decision = guard.rewind(error) if error else guard.judge(step, at.next_batch, at.recent)
        match decision:
            case Accept(spike, recent):
                state.position = replace(at, recent=recent)
                if spike:
                    report(run, step, "spike", spike)
                log.write(step, values)
            case Skip():
                skip_batch(run, step)
            case Rewind():
                rewind(run, saver, decision)
    if compares and (error := find_difference(run)):
        rewind(run, saver, guard.rewind(error))


def report(run: Run, step: StepMetrics, what: str, message: str) -> None:
    """Log an event and print a warning about a step and its batch."""
    batch = replace(run.state.position, step=step.step - 1).next_batch
    numbers = {"step": step.step, "batch": batch, "loss": step.loss, "grad_norm": step.grad_norm}
    run.event(what, **numbers, message=message)
    values = f"loss {step.loss:.4g}, gradient norm {step.grad_norm:.4g}"
    run.console.warn(f"step {step.step:,}: {what}: batch {batch}, {values}: {message}")


def skip_batch(run: Run, bad: StepMetrics) -> None:
    """Remove the batch of a bad step, the next one, from the data order."""
    run.heartbeat.beat("skip", run.state.step)  # the next step has the same number
    report(run, bad, "batch skipped", "weights unchanged")
    position = run.state.position
    run.state.position = position.skip(position.next_batch)


def find_difference(run: Run) -> NumericsError | None:
    """Compare weights and optimizer state of all replicas; log and return how they differ.

    Replicas are compared only with others on the same kind of device, because rounding may depend
    on it.
    """
    state = run.state
    dims = state.dims
    if dims.dp_replicate == 1:
        return None
    group = dims.shard_rank, dims.tp_rank, run.device.name
    tensors = {**state.sharded.local_params, **list_optimizer_tensors(state)}
    found = compare_replicas(tensors, group, state.comm)
    if found is None:
        return None
    message = found.message
    run.event("replicas differ", ranks=found.ranks, tensors=found.tensors, message=message)
    run.console.warn(f"step {state.step:,}: {message}")
    return NumericsError(message, f"step {state.step:,}", REPLICA_FIX)


def rewind(run: Run, saver: CheckpointSaver, decision: Rewind) -> None:
    """Carry out a decision to rewind. Raises its error if there is no checkpoint."""
    state = run.state
    left_step = state.step
    saver.try_commit()
    if restore(run, allow_changes=True) is None:
        raise decision.error
    skipped = range(state.position.next_batch, decision.last_bad_batch + 1)
    state.position = state.position.skip(*skipped)
    message = f"rewound from step {left_step:,} to {state.step:,}"
    if skipped:
        message += f", skipping batches {skipped[0]} to {skipped[-1]}"
    run.event("rewind", message=f"{message}: {decision.error}")
    run.console.warn(message)
