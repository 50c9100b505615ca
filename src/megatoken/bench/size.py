"""bench size: how the cost of a token grows with the model and with the context, by real training steps.

In: which sweep or sizes. Out: rows of parameters, tokens/s, seconds and FLOPs a token, MFU, memory, and size.png. The
models are GPT-2's vocabulary with a ladder of widths on a CPU, the GPT-2 presets elsewhere; the contexts are of the
smallest of them, all at the same tokens a step. Sizes are measured one after another, small before large: two live
models would share memory, and the most resident memory of a process only grows. Absent: finding the best batch.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatoken.bench.batch import describe_speed, format_speed
from megatoken.bench.memory import SHARE, estimate_step_bytes, find_free_bytes, forget_peak
from megatoken.bench.report import show_table
from megatoken.bench.workload import build_workload
from megatoken.config import Machine
from megatoken.console import Console, format_quantity
from megatoken.device import Device, open_device, with_peak
from megatoken.errors import Exit, Fault
from megatoken.model.count import count_parameters, flops_per_token
from megatoken.plot import load_pyplot, save_figure
from megatoken.presets import GPT2_VOCABULARY, PRESETS, Shape
from megatoken.timing import time_calls
from megatoken.train.state import LOSS_CHUNK

CPU_LADDER = ((128, 4), (256, 6), (384, 6), (512, 8))  # width, layers; gpt2-124m, 768 wide with 12 layers, follows
HEAD_WIDTH = 64
SEQ_LENS = (256, 512, 1024, 2048)
STEP_TOKENS = {"cpu": 1024, "mps": 1024, "cuda": 8192}
SEQ_LEN = {"cpu": 256, "mps": 256, "cuda": 1024}  # of the models: a step of few tokens still has several sequences
LONGEST_SECONDS = 20.0  # for the repeats of one size; there are fewer, but three, of what takes longer
SWEEPS = ("models", "contexts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One size to measure: its name, the sweep it belongs to, the tokens of its step."""

    name: str
    sweep: str
    shape: Shape
    step_tokens: int

    @property
    def seqs(self) -> int:
        return self.step_tokens // self.shape.seq_len


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure both sweeps, or what --only names. Raises Fault(CONFIG) for an unknown name."""
    machine = Machine(device=options.device)
    device = with_peak(open_device(machine))
    cases = list_cases(device.place.type, options.batch_tokens)
    if options.only:
        cases = choose_cases(cases, options.only.split(","))
    peak = f"{format_quantity(device.peak_flops, 'FLOP/s')} ({device.peak_source})"
    console.say(f"training steps in {device.precision} on {device.name}; MFU against {peak}")
    if device.place.type != "cuda":
        console.say("memory is the most resident so far: it only grows within a process, so small sizes come first")
    rows = measure(cases, machine, device, SHARE * find_free_bytes(device), options.repeats, console)
    show_rows(rows, console)
    try:
        title = f"{device.precision} on {device.name}"
        console.say(f"picture: {draw(rows, device.peak_flops, title, options.out / 'size.png')}")
    except Fault as fault:
        console.say(f"not drawn: {fault}")
    return {
        "device": device.name,
        "precision": device.precision,
        "peak_flops": device.peak_flops,
        "peak_source": device.peak_source,
        "rows": rows,
    }


def list_cases(kind: str, step_tokens: int | None = None) -> list[Case]:
    """Everything there is to measure on a device of this type, by growing memory.

    step_tokens: of a step; None for the default. A step of one long sequence may need more: then all contexts get it.
    """
    tokens = step_tokens or STEP_TOKENS[kind]
    models = _list_models(kind)
    cases = []
    for name, shape in models.items():
        shape = replace(shape, seq_len=min(SEQ_LEN[kind], tokens))
        whole = tokens // shape.seq_len * shape.seq_len
        cases.append(Case(name=name, sweep="models", shape=shape, step_tokens=whole))
    smallest = next(iter(models))
    for seq_len in SEQ_LENS:
        shape = replace(models[smallest], seq_len=seq_len)
        whole = max(tokens, SEQ_LENS[-1]) // SEQ_LENS[-1] * SEQ_LENS[-1]
        cases.append(Case(name=f"{smallest}@{seq_len}", sweep="contexts", shape=shape, step_tokens=whole))
    return sorted(cases, key=_estimate)


def _list_models(kind: str) -> dict[str, Shape]:
    if kind == "cuda":
        return {name: shape for name, shape in PRESETS.items() if name.startswith("gpt2-")}
    ladder = {
        f"{width}x{layers}": Shape(
            n_layer=layers,
            n_head=width // HEAD_WIDTH,
            d_model=width,
            d_ff=4 * width,
            vocab_size=GPT2_VOCABULARY,
            seq_len=SEQ_LEN[kind],
        )
        for width, layers in CPU_LADDER
    }
    return ladder | {"gpt2-124m": PRESETS["gpt2-124m"]}


def _estimate(case: Case, chunk: int = LOSS_CHUNK["cpu"]) -> float:
    return estimate_step_bytes(case.shape, case.step_tokens, chunk=chunk)


def choose_cases(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Those that are named or belong to a named sweep. Raises Fault(CONFIG) for a name that is neither."""
    known = [*SWEEPS, *(case.name for case in cases)]
    for name in names:
        if name not in known:
            raise Fault(Exit.CONFIG, f"there is no size '{name}' here", "--only", f"use some of {','.join(known)}")
    return [case for case in cases if {case.name, case.sweep} & set(names)]


def measure(
    cases: Sequence[Case], machine: Machine, device: Device, allowed: float, repeats: int, console: Console
) -> list[dict[str, Any]]:
    """One row a case, printed as it comes. allowed: bytes, held to where a system would swap rather than refuse.

    What does not fit is skipped with its reason, and so is all of its sweep that would hold more.
    """
    rows: list[dict[str, Any]] = []
    ended: dict[str, str] = {}
    for case in cases:
        needed = _estimate(case)
        reason = ended.get(case.sweep, "")
        if not reason and device.place.type != "cuda" and needed > allowed:
            reason = f"would hold about {format_quantity(needed, 'B')} of {format_quantity(allowed, 'B')} allowed"
        found = None if reason else measure_case(case, machine, device, repeats)
        if not reason and found is None:
            ended[case.sweep] = f"{case.name} ran out of memory"
            reason = "out of memory"
        rows.append(_describe(case, found, reason))
        said = f"skipped: {reason}" if found is None else f"{format_speed(rows[-1])[1]} tokens/s"
        console.say(f"{case.name:<18} {said}")
    return rows


def measure_case(case: Case, machine: Machine, device: Device, repeats: int) -> dict[str, Any] | None:
    """Speed and peak memory of one size; None where memory ended."""
    forget_peak(device)
    try:
        workload = build_workload(case.shape, machine, batch_seqs=case.seqs, micro_batch=case.seqs)
        timing = time_calls(
            {"step": workload.step},
            repeats=repeats,
            longest=LONGEST_SECONDS,
            fewest=3,
            synchronize=device.synchronize,
        )["step"]
    except torch.OutOfMemoryError:
        return None
    speed = describe_speed(timing, case.shape, device, case.step_tokens)
    return {
        **speed,
        "seconds_per_token": timing.median / case.step_tokens,
        "peak_memory_bytes": device.peak_memory_bytes(),
    }


def _describe(case: Case, found: dict[str, Any] | None, reason: str) -> dict[str, Any]:
    measured = ("tokens_per_second", "mfu", "mfu_causal", "seconds_per_token", "peak_memory_bytes")
    return {
        "name": case.name,
        "sweep": case.sweep,
        "n_layer": case.shape.n_layer,
        "d_model": case.shape.d_model,
        "seq_len": case.shape.seq_len,
        "batch_tokens": case.step_tokens,
        "parameters": count_parameters(case.shape),
        "flops_per_token": flops_per_token(case.shape, causal=False),
        "flops_per_token_causal": flops_per_token(case.shape, causal=True),
        **(found or dict.fromkeys(measured)),
        "skipped": reason or None,
    }


def show_rows(rows: list[dict[str, Any]], console: Console) -> None:
    """A Markdown table for each sweep."""
    heads = ("size", "parameters", "context", "GFLOPs/token", "us/token", "tokens", "tokens/s", "low to high", "MFU",
             "MFU causal", "peak memory")  # fmt: skip
    for sweep in SWEEPS:
        cells = []
        for row in (row for row in rows if row["sweep"] == sweep):
            known = (row["name"], f"{row['parameters']:,}", str(row["seq_len"]), f"{row['flops_per_token'] / 1e9:.4g}")
            if row["skipped"]:
                cells.append((*known, *[""] * (len(heads) - len(known) - 1), row["skipped"]))
            else:
                cells.append((*known, f"{1e6 * row['seconds_per_token']:,.4g}", *format_speed(row)))
        if cells:
            console.say()
            show_table(heads, cells, console)


def draw(rows: list[dict[str, Any]], peak_flops: float, title: str, target: Path) -> Path:
    """Picture of seconds a token over parameters and over context, beside what its FLOPs take at the peak.

    Raises Fault(CONFIG) without matplotlib, Fault(STORAGE) when it cannot be written.
    """
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    panels = (("models", "parameters", "parameters"), ("contexts", "seq_len", "context (tokens)"))
    for axis, (sweep, key, label) in zip(axes, panels, strict=True):
        mine = sorted((r for r in rows if r["sweep"] == sweep and not r["skipped"]), key=lambda row: row[key])
        axis.set(title=f"{sweep}: {title}", xlabel=label, ylabel="seconds a token")
        if not mine:
            continue
        sizes = [row[key] for row in mine]
        axis.plot(sizes, [row["seconds_per_token"] for row in mine], "o-", label="measured")
        if peak_flops:
            floor = [row["flops_per_token"] / peak_flops for row in mine]
            axis.plot(sizes, floor, "--", color="gray", label="its FLOPs at the peak rate")
        for row in mine:
            note = row["name"] if row["mfu"] is None else f"{row['name']}\n{row['mfu']:.0%} MFU"
            place = (row[key], row["seconds_per_token"])
            axis.annotate(note, place, xytext=(0, -24), textcoords="offset points", fontsize=8, ha="center")
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [format_quantity(size) if key == "parameters" else str(size) for size in sizes])
        axis.minorticks_off()
        axis.margins(x=0.12, y=0.15)
        if key == "parameters":
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, None)
        axis.grid(alpha=0.25)
        axis.legend(loc="upper left" if key == "parameters" else "lower right")
    return save_figure(pyplot, figure, target)
