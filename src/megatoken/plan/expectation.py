"""The expected time and memory of a run, printed at its start and compared at its end."""

from dataclasses import dataclass, replace

from megatoken.base.config.schema import Config
from megatoken.base.console import format_duration, format_memory
from megatoken.base.system.device import Device
from megatoken.base.system.gpus import find_driver
from megatoken.base.system.measurement_cache import read_measurements
from megatoken.base.system.metrics_log import Row
from megatoken.plan.calibration import Calibration, count_run_bytes
from megatoken.plan.estimate import build_layout
from megatoken.plan.speed import estimate_step
from megatoken.plan.tuning.kernels import step_key
from megatoken.train.run import Run
from megatoken.train.state import StepConfig

CALIBRATIONS = "calibration.json"  # file in the measurement cache
EXACT_SHARE = 0.005  # smaller relative deviations are reported as exact


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """The expected seconds per full-batch step and peak bytes per process.

    source: how they were obtained, for printing.
    """

    step_seconds: float
    memory_bytes: int
    source: str

    def describe(self, steps: StepConfig, step: int) -> str:
        """Describe the expected speed and memory, and the time from `step` to the run's end."""
        left = steps.tokens_before(steps.total_steps) - steps.tokens_before(step)
        duration = format_duration(left / steps.batch_tokens * self.step_seconds)
        rate = steps.batch_tokens / self.step_seconds
        memory = format_memory(self.memory_bytes)
        return f"{duration} of steps, {rate:,.0f} tokens/s, {memory} ({self.source})"

    def describe_error(self, batches: float, seconds: float, memory_bytes: int) -> str:
        """Describe how the measured time and memory differ from the expected ones.

        batches: training length in full batches. seconds: time of all steps.
        """
        time_error = seconds / (batches * self.step_seconds) - 1
        memory_error = memory_bytes / self.memory_bytes - 1
        time_text = _describe_deviation(time_error, "longer", "shorter")
        memory_text = _describe_deviation(memory_error, "more", "less")
        return (
            f"steps took {format_duration(seconds)}, {time_text}; "
            f"memory {format_memory(memory_bytes)}, {memory_text}"
        )


def find_calibration(config: Config, device: Device, micro_batch: int) -> Calibration | None:
    """Return the cached calibration for the config's model, or None.

    It may have been measured with another depth, but not with another micro-batch.
    """
    saved = read_measurements(CALIBRATIONS).get(step_key(config, config.model, device))
    if saved is None or saved["micro_batch"] != micro_batch:
        return None
    return Calibration(**saved)


def _describe_deviation(share: float, above: str, below: str) -> str:
    if abs(share) < EXACT_SHARE:
        return "as planned"
    return f"{abs(share):.0%} {above if share > 0 else below} than planned"


@dataclass
class Comparison:
    """Observer that prints the expectation of a run at its start and how it differed at its end.

    batches, seconds: size of the steps so far in full batches, and their time.
    """

    run: Run
    expectation: Expectation | None = None
    batches: float = 0.0
    seconds: float = 0.0

    def __call__(self, row: Row) -> None:
        run = self.run
        if row["kind"] == "start":
            steps = replace(run.step_config, micro_batch=row["micro_batch"])
            self.expectation = expect(run, steps, compiled=row["compiled"])
            if self.expectation is None:
                return
            message = self.expectation.describe(steps, row["step"])
            run.console.print(f"plan     {message}")
            rate = steps.batch_tokens / self.expectation.step_seconds
            run.event("planned", message=message, tokens_per_second=rate)
        elif row["kind"] == "train":
            steps = run.step_config
            self.batches += steps.batch_size(row["step"] - 1) / steps.batch_tokens
            self.seconds += row["seconds"]
        elif row["kind"] == "end" and row["exit_code"] == 0 and self.expectation and self.batches:
            memory = run.device.peak_memory_bytes()
            message = self.expectation.describe_error(self.batches, self.seconds, memory)
            run.console.print(f"plan     {message}")


def open_comparison(run: Run) -> Comparison | None:
    return Comparison(run) if run.is_main else None


def expect(run: Run, steps: StepConfig, *, compiled: bool) -> Expectation | None:
    """Return the expected time and memory of a run, or None if they cannot be predicted.

    They come from a calibration by `megatoken plan --calibrate` if there is one. Otherwise they are
    computed from the specifications of the GPU, if it is a known model.
    """
    model = run.data.model_config
    config = replace(run.config, model=model)
    device = run.device
    if run.comm.is_single_process and not compiled:
        calibration = find_calibration(config, device, steps.micro_batch)
        if calibration:
            batch_seqs = steps.batch_tokens // model.seq_len
            return Expectation(
                step_seconds=calibration.step_seconds(model.n_layer, batch_seqs),
                memory_bytes=count_run_bytes(calibration, config, device),
                source="this machine, measured before",
            )
    gpu = find_driver(device.name)
    if gpu is None:
        return None
    layout, memory = build_layout(
        config,
        gpu,
        run.dims,
        precision=device.precision,
        micro_batch=steps.micro_batch,
        compiled=compiled,
        attention=run.state.model.attention_name,
        checkpointing=config.machine.activation_checkpointing,
    )
    return Expectation(
        step_seconds=estimate_step(model, gpu, layout).seconds,
        memory_bytes=memory.total_bytes,
        source="arithmetic",
    )
