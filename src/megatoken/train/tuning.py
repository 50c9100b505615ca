"""Choices that are measured before the first step: kernels, the micro-batch, whether to compile.

machine.json in the run folder keeps them for a resume.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatoken.console import format_duration
from megatoken.errors import ConfigError
from megatoken.model.kernels.attention import ATTENTION, BUILT_IN, WITHOUT_MASK
from megatoken.native.library import NO_LIBRARY, find_library
from megatoken.system.atomic_write import read_object, replace_file, storage_errors
from megatoken.system.device import misses_triton, wants_compile
from megatoken.train.kernel_autotune import (
    KernelChoice,
    apply_choice,
    autotune,
    list_requests,
    with_library,
)
from megatoken.train.micro_batch import compile_forward, find_rates, pick_micro_batch
from megatoken.train.run_context import RunContext
from megatoken.train.run_folder import MACHINE


def choose_kernels(run: RunContext, *, explain: bool) -> None:
    """Use the kernels that the config names, that the run started with, or that are the fastest here.

    machine.json in the run folder keeps them: a resume must add in the same order to stay bit-identical. Rank 0 chooses
    for all.
    """
    attention = run.config.machine.attention
    if attention in WITHOUT_MASK and (run.tasks or run.config.sample.every.value):
        what = f"attention {attention!r} supports neither a mask nor a cache, which sampling and tasks need"
        raise ConfigError(
            what, "machine.attention", "set sample.every=0 and evaluate.tasks='', or support both"
        )
    choice = KernelChoice.from_json(run.comm.run_on_rank0(lambda: _choose_kernels(run).to_json()))
    apply_choice(run.state, choice, run.device)
    run.console.print(f"kernels  {choice}")
    if run.device.type == "cpu" and not find_library():
        run.console.warn(f"no native kernels for this processor, which train faster: {NO_LIBRARY}")
    missing = (
        misses_triton(run.device)
        if run.config.machine.fused == "on" and choice.kernels.loss == "torch"
        else ""
    )
    if missing:
        run.console.warn(f"fused kernels are left out: {missing}")
    if run.config.machine.master_weights == "on" and not choice.master_weights:
        run.console.warn(
            "machine.master_weights=on is left out: in fp32 the weights are their own masters"
        )
    if run.config.machine.master_weights == "off" and choice.master_weights:
        run.console.warn(
            "machine.master_weights=off is left out: native products take weights in low precision"
        )
    reasons = choice.explain()
    if run.config.model.dropout and choice.kernels.attention in BUILT_IN:
        reason = (
            "trains by the explicit formula with dropout: torch's kernels cannot take its masks"
        )
        reasons.append(("dropout", f"attention {reason}"))
        if attention not in ("auto", "explicit"):
            run.console.warn(f"machine.attention={attention} evaluates and samples; it {reason}")
    for name, reason in reasons if explain else []:
        run.console.print(f"  {name:<9} {reason}")


def _choose_kernels(run: RunContext) -> KernelChoice:
    machine, device, dropout = run.config.machine, run.device, run.config.model.dropout
    compiled = wants_compile(machine, device, run.step_config.total_steps)[0] != "off"
    circumstances = {
        "device": device.name,
        "precision": device.precision,
        "dropout": dropout,
        "compiled": compiled,
    }
    circumstances |= list_requests(machine)
    kept: Any = read_object(run.out / MACHINE).get("forms")
    before = None
    match kept:
        case {
            "circumstances": known,
            "kernels": {"attention": str(name)},
            "masters": bool(),
            "seconds": dict(),
        }:
            # Older versions had fewer settings, and another name for one; what they chose may be gone.
            known = {"block" if key == "linear" else key: value for key, value in known.items()}
            before = KernelChoice.from_json(kept)
            if (
                known.items() <= circumstances.items()
                and name in ATTENTION
                and (find_library() or not before.is_native)
            ):
                choice = with_library(before)
                if choice != before:
                    _warn_of_other_kernels(run, before, choice)
                    _update_json(run.out / MACHINE, {"forms": kept | choice.to_json()})
                return choice
    micro_batch = machine.micro_batch if machine.micro_batch != "auto" else run.config.batch_seqs
    model_config = run.state.model.config
    choice = autotune(
        model_config, machine, device, micro_batch=micro_batch, dropout=dropout, compiled=compiled
    )
    if before:
        _warn_of_other_kernels(run, before, choice)
    elif run.state.step:
        what = f"{run.out / MACHINE} does not tell the kernels of the steps so far: chosen anew, maybe others"
        run.console.warn(what)
    _update_json(run.out / MACHINE, {"forms": {"circumstances": circumstances, **choice.to_json()}})
    return choice


def _warn_of_other_kernels(run: RunContext, before: KernelChoice, choice: KernelChoice) -> None:
    """Say that a run goes on with kernels that add in another order than those before."""
    if run.state.step and not choice.adds_as(before):
        names = [
            f"{each} ({each.library})" if each.library else str(each) for each in (before, choice)
        ]
        what = f"other kernels than before step {run.state.step}, so not bit-identical to an undisturbed run"
        run.console.warn(f"{what}: before {names[0]}; now {names[1]}")


def choose_micro_batch(run: RunContext) -> None:
    """Set the micro-batch: the config's, the one that the run started with, or the fastest, measured by all ranks.

    1 for a run at its end, which has come here without its status, as from a mirror.
    """
    micro_batch, device = run.config.machine.micro_batch, run.device
    if micro_batch == "auto" and run.is_at_end:
        micro_batch = 1
    elif micro_batch == "auto":
        batch_seqs = run.config.batch_seqs // run.state.dims.dp_size
        circumstances = {
            "device": device.name,
            "precision": device.precision,
            "batch_seqs": batch_seqs,
        }
        circumstances["loss_chunk"] = run.step_config.loss_chunk
        kept = read_object(run.out / MACHINE)
        known = kept.get("micro_batch") if kept.get("circumstances") == circumstances else None
        micro_batch = run.comm.broadcast_from_rank0(known)
        if not isinstance(micro_batch, int) or not 0 < micro_batch <= batch_seqs:
            rates, is_kept = find_rates(
                run.state, run.step_config, run.config.machine, device, batch_seqs
            )
            micro_batch = pick_micro_batch(rates)
            if len(rates) > 1:
                measured = ", ".join(f"{size}: {rate:,.0f}" for size, rate in rates.items())
                when = ", measured before" if is_kept else ""
                what = f"micro-batch {micro_batch} of {batch_seqs} sequences (tokens/s by size{when}: {measured})"
                run.console.print(what)
            record = {
                "micro_batch": micro_batch,
                "circumstances": circumstances,
                "tokens_per_second": rates,
            }
            run.comm.run_on_rank0(lambda: _update_json(run.out / MACHINE, record))
    run.step_config = replace(run.step_config, micro_batch=int(micro_batch))


def compile_model(run: RunContext) -> bool:
    """Compile the forward where that is wanted and works, and return whether it is; one warning where it does not."""
    mode, note = wants_compile(run.config.machine, run.device, run.step_config.total_steps)
    if mode != "off":
        mode = (
            mode if run.state.dims.is_unsharded else "blocks"
        )  # weights are gathered between them
        start = time.monotonic()
        note = compile_forward(run.state, run.step_config, run.device, mode)
        if not note:
            run.console.print(
                f"compiled (machine.compile={mode}) in {format_duration(time.monotonic() - start)}"
            )
    if note:
        run.console.warn(note)
    run.comm.run_on_rank0(
        lambda: _update_json(run.out / MACHINE, {"compile": "off" if note else mode})
    )
    return mode != "off" and not note


def _update_json(path: Path, values: Mapping[str, Any]) -> None:
    with storage_errors(path.parent):
        replace_file(path, json.dumps(read_object(path) | dict(values), indent=1) + "\n")
