"""Choose kernels and micro-batch by measurement, and compile the model, before the first step.

The choices are saved in machine.json in the run folder: a resumed run is bit-identical only if it
adds numbers in the same order as before. Rank 0 chooses for all ranks.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from megatoken.base.config.schema import Config
from megatoken.base.console import format_duration
from megatoken.base.rooms import list_own
from megatoken.base.system.atomic_write import read_object, replace_file, storage_errors
from megatoken.base.system.device import Device
from megatoken.base.system.threads import set_thread_count, thread_count
from megatoken.distributed.comm import SINGLE_PROCESS, Comm
from megatoken.distributed.memory import holds_low_precision
from megatoken.distributed.parallel_dims import UNSHARDED, ParallelDims
from megatoken.model.gpt import GPT
from megatoken.model.native.selection import NO_LIBRARY, find_amx_fault, find_library
from megatoken.plan.tuning.compilation import compile_forward, wants_compile
from megatoken.plan.tuning.kernels import KernelChoice, Kernels, apply_choice, autotune, step_key
from megatoken.plan.tuning.micro_batch import find_rates, pick_micro_batch
from megatoken.store.run_folder import MACHINE
from megatoken.train.run import Run
from megatoken.train.state import StepConfig, TrainState, build_state, build_step_config

OWN_GPU_KERNELS = {"loss triton"}  # warn if they fail; others just do not support some head sizes


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The choices for a step, as saved in machine.json.

    key: the settings under which they were measured, and are valid. tokens_per_second: by
    micro-batch; empty if the config sets the micro-batch. compile: how the model is compiled, or
    "off". note: why it is not compiled as the config asks, or "".
    """

    key: str
    choice: KernelChoice
    micro_batch: int
    tokens_per_second: Mapping[int, float]
    compile: str
    note: str

    def __str__(self) -> str:
        return f"{self.choice}, compile {self.compile}"


def prepare_step(
    state: TrainState,
    step_config: StepConfig,
    config: Config,
    device: Device,
    saved: Tuning | None,
    *,
    measures_sizes: bool,
) -> tuple[StepConfig, Tuning]:
    """Choose and apply kernels, then choose the micro-batch with them, then compile for that size.

    All ranks must call it. Returns the step config with the micro-batch, and the choices. Choices
    that the config leaves to `auto` are measured, unless `saved` has the same key.

    saved: earlier choices; only rank 0's are used. measures_sizes: whether to measure the
        micro-batch; if False, an `auto` one is 1.
    """
    comm = state.comm
    machine = config.machine
    model = state.model.config
    set_thread_count(min(comm.gather(thread_count())))  # rounding depends on it
    mode, note = wants_compile(machine, device, step_config.total_steps)
    if mode != "off" and not state.dims.is_unsharded:
        mode = "blocks"  # weights are gathered between them
    key = step_key(config, model, device, state.dims, mode)
    size = machine.micro_batch
    batch_seqs = config.batch_seqs // state.dims.dp_size
    tuning_key = f"{key}; {batch_seqs} sequences"
    saved = comm.broadcast_from_rank0(saved if saved and saved.key == tuning_key else None)
    choose = partial(
        autotune,
        model,
        machine,
        device,
        micro_batch=batch_seqs if size == "auto" else size,
        key=key,
        compiled=mode != "off",
    )
    choice = saved.choice if saved else comm.run_on_rank0(choose)
    apply_choice(state, choice, device)
    rates: Mapping[int, float] = {}
    if size == "auto" and saved and saved.tokens_per_second:
        size, rates = saved.micro_batch, saved.tokens_per_second
    elif size == "auto" and measures_sizes:
        rates = find_rates(state, step_config, device, batch_seqs, mode, tuning_key)
        size = pick_micro_batch(rates)
    step_config = replace(step_config, micro_batch=1 if size == "auto" else size)
    if mode != "off":
        note = compile_forward(state, step_config, device, mode)
    state.start_grad_reduction()
    tuning = Tuning(
        key=tuning_key,
        choice=choice,
        micro_batch=step_config.micro_batch,
        tokens_per_second=rates,
        compile="off" if note else mode,
        note=note,
    )
    return step_config, tuning


def build_step(
    model: GPT,
    config: Config,
    device: Device,
    dims: ParallelDims = UNSHARDED,
    comm: Comm = SINGLE_PROCESS,
    saved: Tuning | None = None,
    *,
    measures_sizes: bool = True,
) -> tuple[TrainState, StepConfig, Tuning]:
    """Build the state of a model outside of a run, and prepare its step.

    Arguments are those of `build_state` and `prepare_step`.
    """
    state = build_state(model, config, device, dims, comm=comm)
    step_config = build_step_config(
        config,
        epoch_tokens=config.budget.batch_tokens,
        device_type=device.type,
        is_fused=holds_low_precision(config.machine, dims, device.precision),
    )
    prepared = prepare_step(
        state, step_config, config, device, saved, measures_sizes=measures_sizes
    )
    return state, *prepared


def tune(run: Run, explain: bool) -> StepConfig:
    """Prepare the step with the choices in machine.json or with new ones, save and print them.

    Arguments and result are those of train/setup.py's `tune`.
    """
    state, console = run.state, run.console
    start = time.monotonic()
    saved = state.comm.run_on_rank0(lambda: _read_tuning(run.out))
    step_config, tuning = prepare_step(
        state, run.step_config, run.config, run.device, saved, measures_sizes=not run.is_at_end
    )
    if state.step and str(saved) != str(tuning):
        old = saved or f"unknown, not in {MACHINE}"
        what = f"other kernels than before step {state.step}: {old} -> {tuning}"
        console.warn(f"{what}; the resume is not bit-identical")
    state.comm.run_on_rank0(lambda: _save(run.out, tuning))
    _print(tuning, run, explain=explain)
    if state.compute.is_compiled:
        duration = format_duration(time.monotonic() - start)
        console.print(f"compiled (machine.compile={tuning.compile}), tuned in {duration}")
    run.device.reset_peak_memory()  # sizes that did not fit are not the run's memory
    return step_config


def _print(tuning: Tuning, run: Run, *, explain: bool) -> None:
    """Print the choices, warn of what makes training slower, and explain them if asked."""
    console = run.console
    choice = tuning.choice
    console.print(f"kernels       {choice}")
    if run.device.type == "cpu" and not find_library():
        console.warn(f"no native kernels for this processor, so training is slower: {NO_LIBRARY}")
    elif run.device.type == "cpu" and (fault := find_amx_fault()):
        console.warn(f"AMX is not used, so bf16 is slower: {fault}")
    for name in OWN_GPU_KERNELS & choice.errors.keys():
        console.warn(f"our {name} kernel failed, so training is slower: {choice.errors[name]}")
    if explain:
        reasons = choice.explain()
        if run.config.model.dropout and choice.kernels.attention not in list_own("attention"):
            reason = "torch's kernels cannot apply our dropout masks"
            reasons.append(("dropout", f"attention trains by the explicit formula: {reason}"))
        for name, reason in reasons:
            console.print(f"  {name:<9} {reason}")
    if len(tuning.tokens_per_second) > 1:
        rates = ", ".join(f"{n}: {rate:,.0f}" for n, rate in tuning.tokens_per_second.items())
        console.print(f"micro-batch   {tuning.micro_batch} sequences (tokens/s by size: {rates})")
    if tuning.note:
        console.warn(tuning.note)


def _read_tuning(out: Path) -> Tuning | None:
    """Return the choices in a run's machine.json, or None if there are none."""
    saved = read_object(out / MACHINE)
    if "key" not in saved:
        return None
    choice = saved.pop("forms")
    kernels = Kernels(**choice.pop("kernels"))
    return Tuning(**saved, choice=KernelChoice(**choice, kernels=kernels))


def _save(out: Path, tuning: Tuning) -> None:
    saved = asdict(tuning)
    saved["forms"] = saved.pop("choice")  # its name in the file
    with storage_errors(out):
        replace_file(out / MACHINE, json.dumps(saved, indent=1) + "\n")
