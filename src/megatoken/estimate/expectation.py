"""What training expects of itself: one line at its start, and how far off that was at its end."""

from dataclasses import dataclass

from megatoken.console import format_duration, format_memory
from megatoken.estimate.calibrate import count_run_bytes, find_calibration
from megatoken.estimate.plan import build_layout
from megatoken.estimate.speed import estimate_step
from megatoken.system.gpus import find_driver
from megatoken.train.run_context import RunContext

MOST_OFF = 0.005  # share below which the plan was exact for any reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Seconds of a step with the full batch, peak bytes of a process, and what says so."""

    step_seconds: float
    memory_bytes: int
    source: str

    def describe(self, run: RunContext) -> str:
        """What is expected of the run, or of the rest of it."""
        steps = run.step_config
        left = steps.tokens_before(steps.total_steps) - steps.tokens_before(run.state.step)
        seconds, rate = (
            left / steps.batch_tokens * self.step_seconds,
            steps.batch_tokens / self.step_seconds,
        )
        memory = format_memory(self.memory_bytes)
        return (
            f"{format_duration(seconds)} of steps, {rate:,.0f} tokens/s, {memory} ({self.source})"
        )

    def describe_error(self, batches: float, seconds: float, memory_bytes: int) -> str:
        """How far off that was. batches: full ones that took `seconds`."""
        longer, more = (
            seconds / (batches * self.step_seconds) - 1,
            memory_bytes / self.memory_bytes - 1,
        )
        time = f"steps took {format_duration(seconds)}, {_compare(longer, 'longer', 'shorter')}"
        return f"{time}; memory {format_memory(memory_bytes)}, {_compare(more, 'more', 'less')}"


def _compare(share: float, above: str, below: str) -> str:
    if abs(share) < MOST_OFF:
        return "as planned"
    return f"{abs(share):.0%} {above if share > 0 else below} than planned"


def expect(run: RunContext, *, compiled: bool) -> Expectation | None:
    """By a measurement of this machine (`megatoken plan --calibrate`), else by arithmetic for a GPU that is known; None
    where neither is there, so that nothing is guessed."""
    dims, model, device = run.state.dims, run.model_config, run.device
    micro_batch = run.step_config.micro_batch
    micro_steps = run.step_config.batch_tokens // model.seq_len // dims.dp_size // micro_batch
    if run.comm.is_single_process and (
        known := find_calibration(run.config, model, device, micro_batch)
    ):
        seconds = known.step_seconds(model.n_layer, run.step_config.batch_tokens // model.seq_len)
        memory_bytes = count_run_bytes(known, run.config, model, device)
        return Expectation(
            step_seconds=seconds, memory_bytes=memory_bytes, source="this machine, measured before"
        )
    if (gpu := find_driver(device.name)) is None:
        return None
    layout, memory = build_layout(
        run.config,
        model,
        gpu,
        dims,
        precision=device.precision,
        micro_batch=micro_batch,
        micro_steps=micro_steps,
        compiled=compiled,
        attention=run.state.model.attention_name,
        checkpointing=run.config.machine.activation_checkpointing,
    )
    step = estimate_step(model, gpu, layout)
    return Expectation(
        step_seconds=step.seconds, memory_bytes=memory.total_bytes, source="arithmetic"
    )
