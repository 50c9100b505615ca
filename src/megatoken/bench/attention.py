"""bench attention: one layer's causal attention, forward and backward, in each of its forms over the context.

Out: seconds, FLOP/s and memory of every form, dtype and length, how far its values lie from the plain formula's in
fp32, and attention.png. A form that would hold more than the memory allowed is skipped. Absent: the products before
and after it, dropout, the cache of sampling.

FLOPs: 3.5 * 4 B H T^2 D / 2 for all forms alike: two products forward and five backward, as flash attention makes the
scores again (Dao et al. 2022), half of each for the triangle. B batch, H heads, T length, D head width.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatoken.bench.batch import describe_seconds
from megatoken.bench.memory import SHARE, find_free_bytes, forget_peak
from megatoken.config import Machine
from megatoken.console import Console, format_quantity
from megatoken.device import DTYPES, Device, open_device
from megatoken.errors import Exit, Fault
from megatoken.model.kernels import ATTENTION, CUDA_ONLY, Attend
from megatoken.model.kernels.attention import switch_flash
from megatoken.plot import load_pyplot, save_figure
from megatoken.presets import PRESETS, Shape
from megatoken.timing import Timing, time_calls

SHORTEST = 64
LONGEST = {"cpu": 2048, "mps": 4096, "cuda": 16384}
LONGEST_SECONDS = 10.0  # for the repeats of all forms at one length; there are fewer of what takes longer
SQUARES = {
    "explicit": 4.0,
    "blocked": 0.75,
    "flash": 0.0,
    "cudnn": 0.0,
    "fa2": 0.0,
    "fa3": 0.0,
    "fa4": 0.0,
    "flex": 0.0,
}  # T x T numbers a head that a form holds at its peak
ROWS = 12  # T x D numbers a head: queries, keys, values, output, their gradients, and copies


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure the heads of a preset. Raises Fault(CONFIG) for lengths or memory that cannot be."""
    device = open_device(Machine(device=options.device, tf32=False))
    longest = options.longest or LONGEST[device.place.type]
    if longest < SHORTEST:
        raise Fault(Exit.CONFIG, f"{longest} is shorter than the first length", "--longest", f"give {SHORTEST} or more")
    if options.memory < 0:
        raise Fault(Exit.CONFIG, f"{options.memory:g} GB of memory", "--memory", "give a size, or 0 for most of it")
    allowed = options.memory * 1e9 or SHARE * find_free_bytes(device)
    shape, kinds = PRESETS[options.preset], list(dict.fromkeys(["fp32", device.precision]))
    console.say(
        f"causal attention of {shape.n_head} heads of {shape.d_head} ({options.preset}), batch of {options.seqs}, "
        f"on {device.name}: forward and backward; difference: from the formula in fp32"
    )
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        precise = open_device(Machine(device=options.device, precision=kind, tf32=False))  # type: ignore[arg-type]
        rows += measure_forms(precise, shape, options.seqs, longest, allowed, options.repeats, console)
    if all(row["skipped"] for row in rows):
        raise Fault(Exit.CONFIG, "every form was skipped: nothing was measured", "--memory", "give more")
    try:
        console.say(f"picture: {draw(rows, f'{options.preset} on {device.name}', options.out / 'attention.png')}")
    except Fault as fault:
        console.say(f"not drawn: {fault}")
    return {
        "device": device.name,
        "preset": options.preset,
        "seqs": options.seqs,
        "n_head": shape.n_head,
        "d_head": shape.d_head,
        "rows": rows,
    }


def measure_forms(
    device: Device, shape: Shape, seqs: int, longest: int, allowed: float, repeats: int, console: Console
) -> list[dict[str, Any]]:
    """A row of every form at 64, 128 .. `longest` tokens in the device's precision; forms take turns.

    allowed: bytes. A skipped form has its reason in `skipped` and null for what was not measured.
    """
    rows: list[dict[str, Any]] = []
    ended: dict[str, str] = {}  # forms that ran out of memory at a shorter length
    for seq_len in (1 << power for power in range(SHORTEST.bit_length() - 1, longest.bit_length())):
        found: dict[str, dict[str, Any]] = {}
        calls: dict[str, Callable[[], object]] = {}
        packed, grad = draw_inputs(device, shape, seqs, seq_len)
        expected = _expect(packed, grad, estimate_bytes("explicit", seqs, shape, seq_len, 4) <= allowed)
        for form in list_forms(device):
            attend = ATTENTION[form]
            reason = ended.get(form, "") or _refuse(form, seqs, shape, seq_len, device.dtype.itemsize, allowed)
            values = {} if reason else _try_once(device, form, attend, packed, grad, expected)
            if isinstance(values, str):
                values, reason = {}, f"{values} at {seq_len} tokens"
                ended[form] = reason
            empty = dict.fromkeys(("seconds", "flops_per_second", "extra_memory_bytes", "difference"))
            sizes = {"dtype": device.precision, "form": form, "seq_len": seq_len}
            found[form] = {**sizes, **empty, **values, "skipped": reason or None}
            if not reason:
                calls[form] = partial(differentiate, attend, packed, grad)
        turns: dict[str, Timing] = {}
        if calls:
            turns = time_calls(
                calls,
                repeats=repeats,
                longest=LONGEST_SECONDS,
                before=switch_flash,
                synchronize=device.synchronize,
            )
        for form, timing in turns.items():
            found[form]["seconds"] = describe_seconds(timing)
            found[form]["flops_per_second"] = timing.rate(count_flops(shape, seqs, seq_len))
        for row in found.values():
            console.say(_format_row(row))
        rows += found.values()
    return rows


def list_forms(device: Device) -> list[str]:
    """Those that this type of device could run."""
    return [form for form in ATTENTION if device.place.type == "cuda" or form not in CUDA_ONLY]


def count_flops(shape: Shape, seqs: int, seq_len: int) -> float:
    """FLOPs of one layer's attention forward and backward, only the triangle; B H D = B times the width."""
    return 3.5 * 4 * seqs * shape.d_model * seq_len**2 / 2


def estimate_bytes(form: str, seqs: int, shape: Shape, seq_len: int, itemsize: int) -> float:
    """What a form holds at its peak: squares of scores, rows of queries and the like."""
    squares = SQUARES.get(form, SQUARES["explicit"]) * shape.n_head * seq_len**2
    return itemsize * seqs * (squares + ROWS * seq_len * shape.d_model)


def _refuse(form: str, seqs: int, shape: Shape, seq_len: int, itemsize: int, allowed: float) -> str:
    """Why a form is not even tried; empty if it is."""
    needed = estimate_bytes(form, seqs, shape, seq_len, itemsize)
    if needed <= allowed:
        return ""
    return f"would hold {format_quantity(needed, 'B')}, more than the {format_quantity(allowed, 'B')} allowed"


def draw_inputs(device: Device, shape: Shape, seqs: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Queries, keys and values packed as the model packs them (B, T, 3, H, D), and a gradient (B, H, T, D)."""
    noise = torch.Generator(device.place).manual_seed(seq_len)
    heads = (shape.n_head, shape.d_head)
    made = [
        torch.randn(*sizes, dtype=device.dtype, device=device.place, generator=noise)
        for sizes in ((seqs, seq_len, 3, *heads), (seqs, heads[0], seq_len, heads[1]))
    ]
    return made[0].requires_grad_(), made[1]


def differentiate(attend: Attend, packed: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, D) and the gradient of the packed input."""
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    y = attend(q, k, v, 0.0)
    (dx,) = torch.autograd.grad(y, packed, grad)
    return y.detach(), dx


def _expect(packed: Tensor, grad: Tensor, fits: bool) -> tuple[Tensor, Tensor] | None:
    """Values of the plain formula on the same inputs in fp32, if they fit."""
    if not fits:
        return None
    precise = packed.detach().to(DTYPES["fp32"]).requires_grad_()
    try:
        return differentiate(ATTENTION["explicit"], precise, grad.to(DTYPES["fp32"]))
    except torch.OutOfMemoryError:
        return None


def _try_once(
    device: Device, form: str, attend: Attend, packed: Tensor, grad: Tensor, expected: tuple[Tensor, Tensor] | None
) -> dict[str, Any] | str:
    """Extra memory and the difference of values, or why there are none."""
    try:
        switch_flash(form)
        forget_peak(device)
        before = device.peak_memory_bytes()
        found = differentiate(attend, packed, grad)
        device.synchronize()
        extra = device.peak_memory_bytes() - before if device.place.type == "cuda" else None
        return {"extra_memory_bytes": extra, "difference": find_difference(found, expected) if expected else None}
    except torch.OutOfMemoryError:
        return "out of memory"
    except (RuntimeError, ImportError) as wrong:  # a backend that lacks this dtype or head width, or is not installed
        return str(wrong).partition("\n")[0].rstrip(".")


def find_difference(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Largest difference of any number of output or gradient, as a share of the largest number expected there."""
    shares = [float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]
    return max(shares)


def _format_row(row: dict[str, Any]) -> str:
    named = f"{row['dtype']} {row['form']:<9} T={row['seq_len']:<6}"
    if row["skipped"]:
        return f"{named} skipped: {row['skipped']}"
    seconds, rate, extra = row["seconds"], row["flops_per_second"], row["extra_memory_bytes"]
    low, high, median = (f"{1e3 * seconds[key]:.4g}" for key in ("low", "high", "median"))
    memory = "" if extra is None else f"  +{format_quantity(extra, 'B')}"
    difference = "unknown" if row["difference"] is None else f"{row['difference']:.1e}"
    speed = format_quantity(rate["median"], "FLOP/s")
    return f"{named} {median:>9} ms ({low} .. {high})  {speed:>14}{memory}  difference {difference}"


def draw(rows: list[dict[str, Any]], title: str, target: Path) -> Path:
    """Picture of seconds over length, a line a form and dtype.

    Raises Fault(CONFIG) without matplotlib, Fault(STORAGE) when it cannot be written.
    """
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(9, 6), layout="constrained")
    for index, (dtype, form, mine) in enumerate(_group(rows)):
        lengths = [row["seq_len"] for row in mine]
        seconds = {key: [row["seconds"][key] for row in mine] for key in ("low", "median", "high")}
        color = f"C{index % 10}"
        axis.plot(lengths, seconds["median"], "o-", color=color, label=f"{form}, {dtype}")
        axis.fill_between(lengths, seconds["low"], seconds["high"], color=color, alpha=0.2, lw=0)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set(title=f"causal attention, forward and backward: {title}", xlabel="context (tokens)", ylabel="seconds")
    axis.xaxis.set_major_formatter(pyplot.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.grid(alpha=0.25)
    axis.legend()
    return save_figure(pyplot, figure, target)


def _group(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """(dtype, form, measured rows) in the order of the first."""
    for dtype, form in dict.fromkeys((row["dtype"], row["form"]) for row in rows):
        mine = [row for row in rows if (row["dtype"], row["form"]) == (dtype, form) and not row["skipped"]]
        if mine:
            yield dtype, form, mine
