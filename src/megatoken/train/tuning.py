"""Measure kernels, micro-batch and compilation before the first step.

machine.json in the run folder keeps the choices for a resume, which must add in the same order to
stay bit-identical. Rank 0 chooses for all.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatoken.config.schema import Config
from megatoken.console import Console, format_duration
from megatoken.errors import ConfigError
from megatoken.model.kernels.attention import ATTENTION, BUILT_IN, WITHOUT_MASK
from megatoken.native.library import NO_LIBRARY, find_library
from megatoken.system.atomic_write import read_object, replace_file, storage_errors
from megatoken.system.device import misses_triton, wants_compile
from megatoken.train.compilation import compile_forward
from megatoken.train.kernel_autotune import (
    KernelChoice,
    apply_choice,
    autotune,
    list_requests,
    with_library,
)
from megatoken.train.micro_batch import find_rates, pick_micro_batch
from megatoken.train.run import RunContext, RunData
from megatoken.train.run_folder import MACHINE
from megatoken.train.state import StepConfig, TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What tuning decided: the steps with their micro-batch, and whether the model is compiled."""

    step_config: StepConfig
    is_compiled: bool


def tune(
    state: TrainState,
    step_config: StepConfig,
    config: Config,
    data: RunData,
    context: RunContext,
    *,
    is_at_end: bool,
    explain: bool,
) -> Tuned:
    """Choose kernels, then the micro-batch with them, then compile for that size.

    is_at_end: no step is left, so the micro-batch is not measured. explain: print the measurements.
    """
    choose_kernels(state, step_config, config, data, context, explain=explain)
    micro_batch = choose_micro_batch(state, step_config, config, context, is_at_end=is_at_end)
    step_config = replace(step_config, micro_batch=micro_batch)
    is_compiled = compile_model(state, step_config, config, context)
    return Tuned(step_config=step_config, is_compiled=is_compiled)


def choose_kernels(
    state: TrainState,
    step_config: StepConfig,
    config: Config,
    data: RunData,
    context: RunContext,
    *,
    explain: bool,
) -> None:
    """Use the kernels that the config names, that the run started with, or that are fastest here."""
    attention = config.machine.attention
    if attention in WITHOUT_MASK and (data.tasks or config.sample.every.value):
        what = f"attention {attention!r} has no mask or cache, which sampling and tasks need"
        fix = "set sample.every=0 and evaluate.tasks=''"
        raise ConfigError(what, "machine.attention", fix)
    choice = KernelChoice.from_json(
        state.comm.run_on_rank0(
            lambda: _choose_kernels(state, step_config, config, context).to_json()
        )
    )
    apply_choice(state, choice, context.device)
    context.console.print(f"kernels  {choice}")
    _warn_of_ignored_settings(config, choice, context)
    if explain:
        reasons = choice.explain()
        if config.model.dropout and choice.kernels.attention in BUILT_IN:
            reason = "torch's kernels cannot apply our dropout masks"
            reasons.append(("dropout", f"attention trains by the explicit formula: {reason}"))
        for name, reason in reasons:
            context.console.print(f"  {name:<9} {reason}")


def _warn_of_ignored_settings(config: Config, choice: KernelChoice, context: RunContext) -> None:
    machine = config.machine
    device = context.device
    console = context.console
    if device.type == "cpu" and not find_library():
        console.warn(f"no native kernels for this processor, so training is slower: {NO_LIBRARY}")
    if machine.fused == "on" and choice.kernels.loss == "torch" and misses_triton(device):
        console.warn(f"machine.fused=on is ignored: {misses_triton(device)}")
    if machine.master_weights == "on" and not choice.master_weights:
        console.warn("machine.master_weights=on is ignored in fp32")
    if machine.master_weights == "off" and choice.master_weights:
        console.warn("machine.master_weights=off is ignored: native kernels need bf16 weights")
    if (
        config.model.dropout
        and choice.kernels.attention in BUILT_IN
        and machine.attention not in ("auto", "explicit")
    ):
        what = f"machine.attention={machine.attention} is used for evaluation and sampling only"
        console.warn(f"{what}: torch's kernels cannot apply our dropout masks")


def _choose_kernels(
    state: TrainState, step_config: StepConfig, config: Config, context: RunContext
) -> KernelChoice:
    """Return the saved choice of this run if it still applies, else measure; save the choice."""
    machine = config.machine
    device = context.device
    file = context.out / MACHINE
    is_compiled = wants_compile(machine, device, step_config.total_steps)[0] != "off"
    circumstances = {
        "device": device.name,
        "precision": device.precision,
        "dropout": config.model.dropout,
        "compiled": is_compiled,
        **list_requests(machine),
    }
    saved: Any = read_object(file).get("forms")
    saved_choice = None
    match saved:
        case {
            "circumstances": saved_circumstances,
            "kernels": {"attention": str(attention)},
            "masters": bool(),
            "seconds": dict(),
        }:
            saved_choice = KernelChoice.from_json(saved)
            has_kernels = attention in ATTENTION and (
                find_library() is not None or not saved_choice.is_native
            )
            if saved_circumstances == circumstances and has_kernels:
                choice = with_library(saved_choice)
                if choice != saved_choice:
                    _warn_of_other_kernels(state, saved_choice, choice, context.console)
                    _update_json(file, {"forms": saved | choice.to_json()})
                return choice
    micro_batch = machine.micro_batch if machine.micro_batch != "auto" else config.batch_seqs
    choice = autotune(
        state.model.config,
        machine,
        device,
        micro_batch=micro_batch,
        dropout=config.model.dropout,
        compiled=is_compiled,
    )
    if saved_choice:
        _warn_of_other_kernels(state, saved_choice, choice, context.console)
    elif state.step:
        context.console.warn(f"{file} not found: re-tuning kernels, which may differ")
    _update_json(file, {"forms": {"circumstances": circumstances, **choice.to_json()}})
    return choice


def _warn_of_other_kernels(
    state: TrainState, saved: KernelChoice, choice: KernelChoice, console: Console
) -> None:
    """Warn that a run resumes with kernels that sum in a different order."""
    if not state.step or choice.sums_in_same_order(saved):
        return
    names = [f"{c} ({c.library})" if c.library else str(c) for c in (saved, choice)]
    what = f"different kernels than before step {state.step}, so the resume is not bit-identical"
    console.warn(f"{what}: {names[0]} -> {names[1]}")


def choose_micro_batch(
    state: TrainState,
    step_config: StepConfig,
    config: Config,
    context: RunContext,
    *,
    is_at_end: bool,
) -> int:
    """Return the config's micro-batch, the one the run started with, or the fastest.

    All ranks measure together.
    """
    machine = config.machine
    if machine.micro_batch != "auto":
        return machine.micro_batch
    if is_at_end:
        return 1
    device = context.device
    file = context.out / MACHINE
    batch_seqs = config.batch_seqs // state.dims.dp_size
    circumstances = {
        "device": device.name,
        "precision": device.precision,
        "batch_seqs": batch_seqs,
        "loss_chunk": step_config.loss_chunk,
    }
    saved = read_object(file)
    saved_size = saved.get("micro_batch") if saved.get("circumstances") == circumstances else None
    size = state.comm.broadcast_from_rank0(saved_size)
    if isinstance(size, int) and 0 < size <= batch_seqs:
        return size
    rates, is_cached = find_rates(state, step_config, machine, device, batch_seqs)
    size = pick_micro_batch(rates)
    if len(rates) > 1:
        measured = ", ".join(f"{n}: {rate:,.0f}" for n, rate in rates.items())
        source = ", cached" if is_cached else ""
        context.console.print(
            f"micro-batch {size} of {batch_seqs} sequences (tokens/s by size{source}: {measured})"
        )
    record = {"micro_batch": size, "circumstances": circumstances, "tokens_per_second": rates}
    state.comm.run_on_rank0(lambda: _update_json(file, record))
    return size


def compile_model(
    state: TrainState, step_config: StepConfig, config: Config, context: RunContext
) -> bool:
    """Compile the forward if wanted, and return whether that worked; warn where it did not."""
    mode, note = wants_compile(config.machine, context.device, step_config.total_steps)
    if mode != "off":
        if not state.dims.is_unsharded:
            mode = "blocks"  # weights are gathered between them
        start = time.monotonic()
        note = compile_forward(state, step_config, context.device, mode)
        if not note:
            duration = format_duration(time.monotonic() - start)
            context.console.print(f"compiled (machine.compile={mode}) in {duration}")
    if note:
        context.console.warn(note)
    is_compiled = mode != "off" and not note
    record = {"compile": "off" if note else mode}
    state.comm.run_on_rank0(lambda: _update_json(context.out / MACHINE, record))
    return is_compiled


def _update_json(path: Path, values: Mapping[str, Any]) -> None:
    with storage_errors(path.parent):
        replace_file(path, json.dumps(read_object(path) | dict(values), indent=1) + "\n")
