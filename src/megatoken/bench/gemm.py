"""bench gemm: achieved FLOP/s of matrix products over size and dtype, and of those that a GPT-2 124M step is made of.

Out: rows, the best rate of each dtype (kept as this machine's peak, see device.py) and gemm.png: why wide layers train
efficiently. Absent: what surrounds the products in a step.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatoken.config import Machine
from megatoken.console import Console, format_quantity
from megatoken.device import Device, open_device, product_calls, remember_peak
from megatoken.errors import Exit, Fault
from megatoken.plot import load_pyplot, save_figure
from megatoken.presets import PRESETS, Shape
from megatoken.timing import Timing, take_turns

SMALLEST = 64
LARGEST = {"cpu": 4096, "mps": 8192, "cuda": 16384}
LONGEST_SECONDS = 8.0  # for the repeats of one product; there are fewer of what takes longer
SHORTEST_SECONDS = 0.002  # of one repeat: shorter calls are repeated within it, clocks and schedulers being coarse
WARM_SECONDS = 0.1  # a first call that took longer hardly felt what it paid for threads and kernels
Product = tuple[str, torch.Tensor, torch.Tensor]  # name, left (m, k), right (k, n)


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure squares of 64, 128 .. `options.largest` and the products of a step of `options.tokens` tokens.

    Raises Fault(CONFIG) for a dtype or size that cannot be.
    """
    if options.tokens < 0:
        raise Fault(Exit.CONFIG, f"{options.tokens} tokens", "--tokens", "give a number of tokens, or 0")
    if 0 != options.largest < SMALLEST:
        what = f"{options.largest} is smaller than the smallest square"
        raise Fault(Exit.CONFIG, what, "--largest", f"give {SMALLEST} or more")
    kinds = _choose_kinds(options)
    name = _open(options.device, kinds[0]).name
    console.say(f"matrix products on {name}: FLOP/s, median of repeats (middle half)")
    rows: list[dict[str, Any]] = []
    peaks: dict[str, float] = {}
    for kind in kinds:
        device = _open(options.device, kind)  # again for each: it sets how fp32 is multiplied in this process
        largest = options.largest or LARGEST[device.place.type]
        found, peaks[kind] = measure_products(device, kind, largest, options.tokens, options.repeats, console)
        rows += found
        kept = remember_peak(device, peaks[kind])
        said = f", {format_quantity(kept, 'FLOP/s')} the best so far" if kept > peaks[kind] else ""
        printed = f", data sheet {format_quantity(device.peak_flops, 'FLOP/s')}" if device.peak_flops else ""
        console.say(f"peak {kind}: {format_quantity(peaks[kind], 'FLOP/s')}{said}{printed}")
    try:
        console.say(f"picture: {draw(rows, name, options.out / 'gemm.png')}")
    except Fault as fault:
        console.say(f"not drawn: {fault}")
    return {"device": name, "peak": peaks, "rows": rows}


def _choose_kinds(options: argparse.Namespace) -> list[str]:
    """The dtypes to measure, checked, in the order given; "tf32" is fp32 with TF32 allowed."""
    device = open_device(Machine(device=options.device))
    has_tf32 = device.place.type == "cuda" and torch.cuda.get_device_capability(device.place) >= (8, 0)
    if options.dtypes == "auto":
        return list(dict.fromkeys([device.precision, *(["tf32"] if has_tf32 else []), "fp32"]))
    kinds = list(dict.fromkeys(options.dtypes.split(",")))
    for kind in kinds:
        if kind not in ("fp32", "tf32", "bf16", "fp16"):
            raise Fault(Exit.CONFIG, f"unknown dtype '{kind}'", "--dtypes", "use some of fp32,tf32,bf16,fp16")
        if kind == "tf32" and not has_tf32:
            raise Fault(Exit.CONFIG, f"no TF32 on {device.name}", "--dtypes", "use fp32")
        _open(options.device, kind)
    return kinds


def _open(place: str, kind: str) -> Device:
    precision = "fp32" if kind == "tf32" else kind
    return open_device(Machine(device=place, precision=precision, tf32=kind == "tf32"))  # type: ignore[arg-type]


def measure_products(
    device: Device, kind: str, largest: int, tokens: int, repeats: int, console: Console, *, shape: Shape | None = None
) -> tuple[list[dict[str, Any]], float]:
    """Rows of every product in the device's precision, and the best FLOP/s of a single repeat among them.

    tokens: of the step of a model of `shape` (GPT-2 124M when None); 0 leaves the step out. Ends where memory ends.
    """
    rows: list[dict[str, Any]] = []
    best = 0.0
    try:
        for name, left, right in _products(device, largest, tokens, shape or PRESETS["gpt2-124m"]):
            (m, k), n = left.shape, right.shape[1]
            flops = 2 * m * k * n
            for library, (timing, calls) in _time_product(device, left, right, repeats).items():
                rate = timing.rate(flops * calls)
                sizes = {"name": name, "dtype": kind, "library": library, "m": m, "k": k, "n": n}
                rows.append({**sizes, "flops_per_second": rate})
                best = max(best, flops * calls / timing.best)
                console.say(_format_row(rows[-1]))
    except torch.OutOfMemoryError:
        if not rows:
            fix = "free some memory"
            raise Fault(Exit.CONFIG, "the smallest product does not fit", str(device.place), fix) from None
        console.warn(f"out of memory after {rows[-1]['name']}: the rest is left out")
    return rows, best


def _products(device: Device, largest: int, tokens: int, shape: Shape) -> Iterator[Product]:
    """Squares, then each linear layer of the model forward, for the gradient of its input and for that of its weight.

    Noise from a generator of our own fills them, since chips clock higher on constants.
    """
    noise = torch.Generator(device.place).manual_seed(0)

    def make(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=device.dtype, device=device.place, generator=noise)

    for size in (1 << power for power in range(SMALLEST.bit_length() - 1, largest.bit_length())):
        yield f"square {size}", make(size, size), make(size, size)
    d, f = shape.d_model, shape.d_ff
    layers = {"qkv": (d, 3 * d), "proj": (d, d), "up": (d, f), "down": (f, d), "head": (d, shape.padded_vocab_size)}
    for name, (inputs, outputs) in layers.items() if tokens else ():
        x, w, dy = make(tokens, inputs), make(outputs, inputs), make(tokens, outputs)
        yield f"{name} forward", x, w.T
        yield f"{name} input gradient", dy, w
        yield f"{name} weight gradient", dy.T, x


def _time_product(
    device: Device, left: torch.Tensor, right: torch.Tensor, repeats: int
) -> dict[str, tuple[Timing, int]]:
    """By library: the timing of its repeats, and how many calls each of them is made of. Libraries take turns."""
    inner: dict[str, int] = {}
    seconds = 0.0  # of one turn of all

    def repeat(call: Callable[[], object], times: int) -> None:
        for _ in range(times):
            call()

    calls = product_calls(left, right)
    for library, call in calls.items():
        once = _time_once(call, device)
        if once < WARM_SECONDS:
            once = _time_once(call, device)
        inner[library] = max(1, math.ceil(SHORTEST_SECONDS / once))
        seconds += inner[library] * once
    timings = take_turns(
        {library: partial(repeat, call, inner[library]) for library, call in calls.items()},
        repeats=min(repeats, max(2, int(LONGEST_SECONDS / seconds))),
        warmup=0,
        synchronize=device.synchronize,
    )
    return {library: (timing, inner[library]) for library, timing in timings.items()}


def _time_once(call: Callable[[], object], device: Device) -> float:
    device.synchronize()
    began = time.perf_counter()
    call()
    device.synchronize()
    return time.perf_counter() - began


def _format_row(row: dict[str, Any]) -> str:
    rate = row["flops_per_second"]
    low, high, median = (format_quantity(rate[key]) for key in ("low", "high", "median"))
    product = f"{row['m']}x{row['k']} @ {row['k']}x{row['n']}"
    return f"{row['name']:<21} {product:<28} {row['dtype']} {row['library']:<6} {median:>9} ({low} .. {high})"


def draw(rows: list[dict[str, Any]], device_name: str, target: Path) -> Path:
    """Picture of FLOP/s over size: a line a dtype and library for squares, crosses for the products of the step.

    Raises Fault(CONFIG) without matplotlib, Fault(STORAGE) when it cannot be written.
    """
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(9, 6), layout="constrained")
    for index, (dtype, library) in enumerate(dict.fromkeys((row["dtype"], row["library"]) for row in rows)):
        mine = [row for row in rows if (row["dtype"], row["library"]) == (dtype, library)]
        square = [row for row in mine if row["name"].startswith("square")]
        other = [row for row in mine if row not in square]
        rates = {key: [row["flops_per_second"][key] for row in square] for key in ("low", "median", "high")}
        sizes, color = [row["m"] for row in square], f"C{index % 10}"
        axis.plot(sizes, rates["median"], "o-", color=color, label=f"{dtype}, {library}")
        axis.fill_between(sizes, rates["low"], rates["high"], color=color, alpha=0.2, lw=0)
        side = [(row["m"] * row["k"] * row["n"]) ** (1 / 3) for row in other]
        label = f"{dtype}, {library}: products of a GPT-2 124M step" if other else None
        axis.plot(side, [row["flops_per_second"]["median"] for row in other], "x", color=color, label=label)
    axis.set_xscale("log", base=2)
    axis.set_ylim(0, None)
    axis.set(title=f"matrix products on {device_name}", xlabel="size: (m k n)^(1/3)", ylabel="FLOP/s")
    axis.xaxis.set_major_formatter(pyplot.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_major_formatter(pyplot.FuncFormatter(lambda value, _: format_quantity(value)))
    axis.grid(alpha=0.25)
    axis.legend()
    return save_figure(pyplot, figure, target)
