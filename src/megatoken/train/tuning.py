"""Choose kernels and micro-batch by measurement, and compile the model, before the first step.

The choices are saved in machine.json in the run folder: a resumed run is bit-identical only if it
adds numbers in the same order as before. Rank 0 chooses for all ranks.
"""

import json
import time
from dataclasses import asdict, replace
from typing import Any

from megatoken.console import format_duration
from megatoken.errors import ConfigError
from megatoken.model.kernels import Kernels
from megatoken.model.kernels.attention import BUILT_IN, WITHOUT_MASK
from megatoken.native.selection import NO_LIBRARY, find_amx_fault, find_library
from megatoken.system.atomic_write import read_object, replace_file, storage_errors
from megatoken.system.device import wants_compile
from megatoken.train.compilation import compile_forward
from megatoken.train.kernel_autotune import KernelChoice, apply_choice, autotune, list_requests
from megatoken.train.micro_batch import find_rates, pick_micro_batch
from megatoken.train.run import RunContext, RunPlan
from megatoken.train.run_folder import MACHINE
from megatoken.train.state import StepConfig, TrainState

OWN_GPU_KERNELS = {"loss triton"}  # warn if they fail; others just do not support some head sizes


def tune(
    state: TrainState, plan: RunPlan, *, is_at_end: bool, explain: bool
) -> tuple[StepConfig, bool]:
    """Choose kernels, then the micro-batch with these kernels, then compile for that size.

    Returns the step config with the chosen micro-batch, and whether the model is compiled.

    is_at_end: whether no step is left, so that the micro-batch need not be measured.
    explain: whether to print the measurements.
    """
    choose_kernels(state, plan, explain=explain)
    mode, note = wants_compile(plan.config.machine, plan.device, plan.step_config.total_steps)
    if mode != "off" and not state.dims.is_unsharded:
        mode = "blocks"  # weights are gathered between them
    micro_batch = choose_micro_batch(state, plan, mode, is_at_end=is_at_end)
    steps = replace(plan.step_config, micro_batch=micro_batch)
    is_compiled = compile_model(state, steps, plan, mode, note)
    plan.device.reset_peak_memory()  # sizes that did not fit are not the run's memory
    return steps, is_compiled


def choose_kernels(state: TrainState, plan: RunPlan, *, explain: bool) -> None:
    """Switch the state to the kernels of this run, and print them.

    A kernel that the config leaves to `auto` is the fastest one. A resumed run keeps its earlier
    choice, unless the machine or the settings changed.
    """
    config = plan.config
    attention = config.machine.attention
    if attention in WITHOUT_MASK and (plan.data.tasks or config.sample.every.value):
        what = f"attention {attention!r} has no mask or cache, which sampling and tasks need"
        fix = "set sample.every=0 and evaluate.tasks=''"
        raise ConfigError(what, "machine.attention", fix)
    choice = state.comm.run_on_rank0(lambda: _choose_kernels(state, plan))
    apply_choice(state, choice, plan.device)
    console = plan.console
    console.print(f"kernels  {choice}")
    if plan.device.type == "cpu" and not find_library():
        console.warn(f"no native kernels for this processor, so training is slower: {NO_LIBRARY}")
    elif plan.device.type == "cpu" and (fault := find_amx_fault()):
        console.warn(f"AMX is not used, so bf16 is slower: {fault}")
    for form in OWN_GPU_KERNELS & choice.errors.keys():
        console.warn(f"our {form} kernel failed, so training is slower: {choice.errors[form]}")
    if explain:
        reasons = choice.explain()
        if config.model.dropout and choice.kernels.attention in BUILT_IN:
            reason = "torch's kernels cannot apply our dropout masks"
            reasons.append(("dropout", f"attention trains by the explicit formula: {reason}"))
        for name, reason in reasons:
            console.print(f"  {name:<9} {reason}")


def _choose_kernels(state: TrainState, plan: RunPlan) -> KernelChoice:
    """Return the choice saved in machine.json, or measure and save it if something changed."""
    config = plan.config
    machine = config.machine
    device = plan.device
    library = find_library()
    is_compiled = wants_compile(machine, device, plan.step_config.total_steps)[0] != "off"
    circumstances = {
        "device": device.name,
        "precision": device.precision,
        "dropout": config.model.dropout,
        "compiled": is_compiled,
        "library": library.name if library else "",
        **list_requests(machine),
    }
    saved: dict[str, Any] = read_object(plan.out / MACHINE).get("forms", {})
    saved_choice = None
    if saved:
        is_same = saved.pop("circumstances") == circumstances
        saved_choice = KernelChoice(**saved | {"kernels": Kernels(**saved["kernels"])})
        if is_same:
            return saved_choice
    choice = autotune(
        state.model.config,
        machine,
        device,
        micro_batch=config.batch_seqs if machine.micro_batch == "auto" else machine.micro_batch,
        dropout=config.model.dropout,
        compiled=is_compiled,
    )
    if state.step and not (saved_choice and choice.sums_in_same_order(saved_choice)):
        old = saved_choice or f"unknown, {MACHINE} is missing"
        what = f"other kernels than before step {state.step}: {old} -> {choice}"
        plan.console.warn(f"{what}; the resume is not bit-identical")
    _save(plan, forms={"circumstances": circumstances, **asdict(choice)})
    return choice


def choose_micro_batch(state: TrainState, plan: RunPlan, mode: str, *, is_at_end: bool) -> int:
    """Return the micro-batch from the config, or for `auto` the saved or else the fastest one.

    All ranks must call it, because they measure together.
    """
    machine = plan.config.machine
    if machine.micro_batch != "auto":
        return machine.micro_batch
    if is_at_end:
        return 1
    batch_seqs = plan.config.batch_seqs // state.dims.dp_size
    circumstances = {
        "device": plan.device.name,
        "precision": plan.device.precision,
        "batch_seqs": batch_seqs,
        "loss_chunk": plan.step_config.loss_chunk,
    }
    saved = state.comm.run_on_rank0(lambda: read_object(plan.out / MACHINE))
    if saved.get("circumstances") == circumstances:
        size: int = saved["micro_batch"]
        return size
    rates, is_cached = find_rates(state, plan.step_config, machine, plan.device, batch_seqs, mode)
    size = pick_micro_batch(rates)
    if len(rates) > 1:
        measured = ", ".join(f"{n}: {rate:,.0f}" for n, rate in rates.items())
        source = ", cached" if is_cached else ""
        plan.console.print(
            f"micro-batch {size} of {batch_seqs} sequences (tokens/s by size{source}: {measured})"
        )
    state.comm.run_on_rank0(
        lambda: _save(plan, micro_batch=size, circumstances=circumstances, tokens_per_second=rates)
    )
    return size


def compile_model(
    state: TrainState, steps: StepConfig, plan: RunPlan, mode: str, note: str
) -> bool:
    """Compile the forward unless `mode` is "off"; warn on failure.

    Returns whether the model is compiled. note: why the requested mode is impossible, or "".
    """
    if mode != "off":
        start = time.monotonic()
        note = compile_forward(state, steps, plan.device, mode)
        if not note:
            duration = format_duration(time.monotonic() - start)
            plan.console.print(f"compiled (machine.compile={mode}) in {duration}")
    if note:
        plan.console.warn(note)
        mode = "off"
    state.comm.run_on_rank0(lambda: _save(plan, compile=mode))
    return mode != "off"


def _save(context: RunContext, **values: Any) -> None:
    """Add values to the run's machine.json."""
    path = context.out / MACHINE
    with storage_errors(context.out):
        replace_file(path, json.dumps(read_object(path) | values, indent=1) + "\n")
