"""`gemm`, `attention` and `size`: vary one size and keep everything else fixed.

Each benchmark lists its cases; `time_cases` times them, `show` prints and draws them.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.batch import COLUMNS as STEP
from benchmarks.batch import describe_size, estimate_step_bytes, find_allowed_bytes
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import GPT2_VOCABULARY, PRESETS
from megatoken.base.config.schema import MachineConfig
from megatoken.base.console import Console, format_memory, format_quantity
from megatoken.base.errors import ConfigError, DataError
from megatoken.base.markdown_table import format_cell, show_rows
from megatoken.base.pictures import load_pyplot, save_figure
from megatoken.base.rooms import list_entries
from megatoken.base.system.device import Device, open_device
from megatoken.base.system.metrics_log import Row
from megatoken.base.system.timing import time_calls
from megatoken.model.kernels.attention import CUDA_ONLY, find_attention
from megatoken.model.native.selection import find_library
from megatoken.plan.tuning.peak import cache_peak, product_calls, with_peak
from megatoken.study.bench.report import save_picture
from megatoken.study.bench.workload import (
    build_workload,
    describe_peak,
    describe_seconds,
    format_peak,
)

LONGEST_SECONDS = 20.0  # per case; slow cases get fewer repeats, at least 3
SMALLEST = 64  # square product, context of attention
LARGEST_SQUARE = {"cpu": 4096, "mps": 8192, "cuda": 16384}
TOKENS = {
    "cpu": (256, 1024, 4096),
    "mps": (1024, 4096),
    "cuda": (1024, 2048, 4096, 8192, 16384),
}  # of layers' products
LONGEST_CONTEXT = {"cpu": 2048, "mps": 4096, "cuda": 16384}
SCORES = {
    "explicit": 4.0,
    "blocked": 0.75,
}  # T x T numbers a head that an implementation holds at its peak
CPU_MODELS = (
    (128, 4),
    (256, 6),
    (384, 6),
    (512, 8),
)  # width, layers; gpt2-124m, 768 wide with 12 layers, follows
HEAD_WIDTH = 64
CONTEXTS = (256, 512, 1024, 2048)
STEP_TOKENS = {"cpu": 1024, "mps": 1024, "cuda": 8192}
SEQ_LEN = {
    "cpu": 256,
    "mps": 256,
    "cuda": 1024,
}  # of the models: a step of few tokens still has several sequences

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How a benchmark is shown.

    columns: of its table. panels: `sweep` of the rows, key of the x axis, keys that make a line.
    y: keys of the y axes.
    """

    columns: dict[str, str]
    panels: tuple[tuple[str, str, tuple[str, ...]], ...]
    y: tuple[str, ...]


KERNEL = {"seconds": "time", "flops_per_second": "FLOP/s"}
LAYER = {
    "form": "attention",
    "dtype": "dtype",
    "seq_len": "context",
    **KERNEL,
    "extra_memory_bytes": "more memory",
}
STEP_PANELS = ("tokens_per_second", "mfu", "peak_memory_bytes")
VIEWS = {
    "gemm": View(
        columns={"name": "product", "dtype": "dtype", "library": "library", **KERNEL},
        panels=(
            ("squares", "m", ("dtype", "library")),
            ("layers", "width", ("tokens",)),
            ("layers", "tokens", ("width",)),
        ),
        y=("flops_per_second",),
    ),
    "attention": View(
        columns=LAYER,
        panels=(("", "seq_len", ("form", "dtype")),),
        y=("seconds", "flops_per_second", "extra_memory_bytes"),
    ),
    "size": View(
        columns=STEP,
        panels=(("models", "parameters", ()), ("contexts", "seq_len", ())),
        y=STEP_PANELS,
    ),
}
AXES = (
    LAYER | STEP | {"m": "size of the squares", "micro_batch": "micro-batch (sequences)"}
)  # labels of pictures
AXES |= {"tokens": "tokens N", "width": "width K of (N, K) x (K, K)", "library": "library"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call to time.

    row: first columns of its record. series: cases that are skipped after one runs out of memory.
    amount: FLOPs or tokens per call. needed_bytes: cases that would swap are skipped.
    """

    row: Row
    label: str
    series: str
    amount: float
    build: Callable[[], Call]
    needed_bytes: float = 0.0


def show(title: str, result: dict[str, Any], options: argparse.Namespace, console: Console) -> None:
    """Print and draw the rows of a result."""
    view = VIEWS[options.bench]
    console.print(title)
    show_rows(view.columns, result["rows"], console)
    picture = partial(draw_record, options.bench, result)
    save_picture(picture, options.out / f"{options.name}.png", console)


def draw_record(bench: str, result: Mapping[str, Any], path: Path) -> Path:
    """Draw the answer of a record of a benchmark of VIEWS. Raises DataError if nothing was timed."""
    view = VIEWS[bench]
    timed = [row for row in result["rows"] if not row.get("skipped")]
    shown = [row for row in timed if row.get("sweep", "") in {sweep for sweep, *_ in view.panels}]
    if not shown:
        raise DataError("the record has no rows to draw", path, "measure it again")
    title = ", ".join(result[key] for key in ("preset", "precision", "device") if key in result)
    return draw(view, shown, title, path)


def time_cases(
    groups: Iterable[Sequence[Case]],
    device: Device,
    rate: str,
    repeats: int,
    console: Console,
    optional: tuple[type[Exception], ...] = (),
) -> Iterator[list[Row]]:
    """Time all cases, interleaved within a group; after each group, yield its rows.

    rate: key of the amount per second. optional: errors that skip the rest of a series.
    """
    ended: dict[str, str] = {}
    allowed = find_allowed_bytes(device)
    for group in groups:
        rows: list[Row] = []
        calls: dict[str, Call] = {}
        for case in group:
            console.step(f"measuring {case.series}, {case.label}")
            row = case.row | dict.fromkeys(
                ("seconds", rate, "best", "peak_memory_bytes", "extra_memory_bytes")
            )
            row["skipped"] = ended.get(case.series)
            rows.append(row)
            if not row["skipped"] and case.needed_bytes > allowed:
                needed = format_memory(case.needed_bytes)
                row["skipped"] = f"{case.label} needs about {needed}"
            if row["skipped"]:
                continue
            try:
                device.reset_peak_memory()
                call = case.build()
                before = device.peak_memory_bytes()
                call()
                device.synchronize()
            except (torch.OutOfMemoryError, *optional) as error:
                what = str(error).partition("\n")[0].rstrip(".")
                if isinstance(error, torch.OutOfMemoryError):
                    what = "out of memory"
                row["skipped"] = ended[case.series] = f"{what} at {case.label}"
                continue
            calls[str(len(rows) - 1)] = call
            row["peak_memory_bytes"] = device.peak_memory_bytes()
            if device.type == "cuda":
                row["extra_memory_bytes"] = row["peak_memory_bytes"] - before
        timings = {}
        if calls:
            timings = time_calls(
                calls,
                repeats=repeats,
                longest=LONGEST_SECONDS * len(group),
                fewest=3,
                synchronize=device.synchronize,
            )
        for index, timing in timings.items():
            amount = group[int(index)].amount
            row = rows[int(index)]
            row["seconds"] = describe_seconds(timing)
            row[rate] = timing.rate(amount)
            row["best"] = amount / timing.best
        yield rows
    console.close()


def draw(view: View, rows: Sequence[Row], title: str, path: Path) -> Path:
    """Plot a line per series with a band between the quartiles, in a row of panels per sweep."""
    ys = [key for key in view.y if any(row[key] is not None for row in rows)]
    panels = [
        (sorted(own, key=lambda row, key=x_key: float(row[key])), x_key, y_key, series)  # type: ignore[misc]
        for sweep, x_key, series in view.panels
        if (own := [row for row in rows if row.get("sweep", "") == sweep])
        for y_key in ys
    ]
    columns = len(ys) if len(ys) > 1 else len(panels)
    size = {
        "figsize": (max(9.0, 5.5 * columns), 5.0 * len(panels) / columns),
        "layout": "constrained",
    }
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(len(panels) // columns, columns, squeeze=False, **size)
    figure.suptitle(title)
    for axis, (own, x_key, y_key, series) in zip(axes.flat, panels, strict=True):
        labels = [", ".join(str(row[key]) for key in series) for row in own]
        for label in dict.fromkeys(labels):
            line = [row for row, its_label in zip(own, labels, strict=True) if its_label == label]
            x, y = [row[x_key] for row in line], [row[y_key] for row in line]
            median, low, high = (
                [v[key] if isinstance(v, dict) else v for v in y]
                for key in ("median", "low", "high")
            )
            axis.plot(x, median, "o-", label=label)
            axis.fill_between(x, low, high, alpha=0.2, lw=0)
        axis.set(
            xlabel=AXES[x_key],
            ylabel=AXES[y_key],
            xscale="log",
            yscale="log" if y_key == "seconds" else "linear",
        )
        ticks = sorted({row[x_key] for row in own})
        axis.set_xticks(ticks, [f"{x:,}" if x < 1e5 else format_quantity(x) for x in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.yaxis.set_major_formatter(
            pyplot.FuncFormatter(lambda value, _, key=y_key: format_cell(key, value))
        )
        if series:
            axis.legend(
                title=", ".join(AXES[key] for key in series),
                loc="upper left",
                bbox_to_anchor=(1, 1),
            )
        if y_key != "seconds":
            axis.set_ylim(0, 1.05 * axis.dataLim.ymax)
    return save_figure(figure, path)


def open_dtypes(name: str) -> Iterator[tuple[str, Device]]:
    """Yield a device in its fast precision, TF32 and fp32; each configures this process."""
    device = open_device(MachineConfig(device=name))
    dtypes = [device.precision, *(["tf32"] if device.is_ampere else []), "fp32"]
    for dtype in dict.fromkeys(dtypes):
        is_tf32 = dtype == "tf32"
        precision: Any = "fp32" if is_tf32 else dtype
        machine = MachineConfig(device=name, precision=precision, tf32=is_tf32)
        yield dtype, open_device(machine)


def list_powers(largest: int) -> list[int]:
    """Return 64, 128 ... `largest`. Raises ConfigError if there are none."""
    if largest < SMALLEST:
        raise ConfigError(f"{largest} is below the first size, {SMALLEST}")
    return [1 << power for power in range(SMALLEST.bit_length() - 1, largest.bit_length())]


def run_gemm(options: argparse.Namespace, console: Console) -> Iterator[Row]:
    """Time square products by size, dtype and library, and products of N tokens with K x K weights.

    The best of each dtype is cached as this machine's peak.
    """
    rows: list[Row] = []
    peaks: dict[str, float] = {}
    for dtype, device in open_dtypes(options.device):
        sizes = list_powers(options.largest or LARGEST_SQUARE[device.type])
        groups = list_squares(device, dtype, sizes)
        if not peaks:
            groups = chain(groups, list_layers(device, dtype, sizes))
        peaks[dtype] = 0.0
        for new in time_cases(groups, device, "flops_per_second", options.repeats, console):
            rows += new
            peaks[dtype] = max(peaks[dtype], *(row["best"] or 0.0 for row in new))
            yield {"device": device.name, "peak": peaks, "rows": rows}
        cache_peak(device, peaks[dtype])
    found = ", ".join(f"{dtype} {format_quantity(peak, 'FLOP/s')}" for dtype, peak in peaks.items())
    title = f"matrix products on {device.name}; peak: {found}"
    show(title, {"device": device.name, "rows": rows}, options, console)


def list_squares(device: Device, dtype: str, sizes: Sequence[int]) -> Iterator[list[Case]]:
    """Yield groups of products of two squares, one case per library."""
    noise = torch.Generator(device.torch_device).manual_seed(0)  # chips clock higher on constants
    for n in sizes:
        shape: dict[str, Any] = {
            "size": (n, n),
            "dtype": device.dtype,
            "device": device.torch_device,
            "generator": noise,
        }
        try:
            calls = product_calls(torch.randn(**shape), torch.randn(**shape))
        except torch.OutOfMemoryError:
            return
        yield [
            Case(
                row={
                    "name": f"square {n}",
                    "sweep": "squares",
                    "dtype": dtype,
                    "library": library,
                    "m": n,
                    "k": n,
                    "n": n,
                },
                label=f"square {n}",
                series=library,
                amount=2.0 * n**3,
                build=partial(lambda call: call, call),
            )
            for library, call in calls.items()
        ]


def list_layers(device: Device, dtype: str, widths: Sequence[int]) -> Iterator[list[Case]]:
    """Yield groups of products of N tokens with K x K weights, by torch."""
    noise = torch.Generator(device.torch_device).manual_seed(0)
    like: dict[str, Any] = {
        "dtype": device.dtype,
        "device": device.torch_device,
        "generator": noise,
    }

    def build(tokens: int, width: int) -> Call:
        return partial(
            torch.matmul, torch.randn(tokens, width, **like), torch.randn(width, width, **like)
        )

    for width in widths:
        yield [
            Case(
                row={
                    "name": f"{tokens} x {width} x {width}",
                    "sweep": "layers",
                    "dtype": dtype,
                    "library": "torch",
                }
                | {"m": tokens, "k": width, "n": width, "tokens": tokens, "width": width},
                label=f"width {width}",
                series=f"layers of {tokens} tokens",
                amount=2.0 * tokens * width**2,
                build=partial(build, tokens, width),
            )
            for tokens in TOKENS[device.type]
        ]


def run_attention(options: argparse.Namespace, console: Console) -> Iterator[Row]:
    """Time one layer's causal attention, forward and backward, by implementation and context."""
    config = PRESETS[options.preset]
    rows: list[Row] = []
    title = ""
    for dtype, device in open_dtypes(options.device):
        about = {"device": device.name, "preset": options.preset, "seqs": options.seqs}
        about |= {"n_head": config.n_head, "d_head": config.d_head}
        title = f"causal attention of {options.preset}, batch of {options.seqs}, forward and backward, on {device.name}"
        lengths = list_powers(options.longest or LONGEST_CONTEXT[device.type])
        groups = list_attention(device, dtype, config, options.seqs, lengths)
        # A backend may lack this dtype or head width, or not be installed.
        optional = (RuntimeError, ImportError)
        repeats = options.repeats
        for new in time_cases(groups, device, "flops_per_second", repeats, console, optional):
            rows += new
            yield {**about, "rows": rows}
    show(title, {**about, "rows": rows}, options, console)


def list_attention(
    device: Device, dtype: str, config: ModelConfig, seqs: int, lengths: Sequence[int]
) -> Iterator[list[Case]]:
    """Yield a group for each length, with a case per implementation.

    FLOPs: 3.5 * 4 B H T^2 D / 2 for all: two products forward and five backward, because flash
    attention recomputes the scores (Dao et al. 2022); causal attention computes half of each. B
    batch, H heads, T length, D head width.
    """
    H, D = config.n_head, config.d_head
    own = (
        CUDA_ONLY
        if device.type == "cuda"
        else ("native",)
        if device.type == "cpu" and find_library()
        else ()
    )
    for T in lengths:
        noise = torch.Generator(device.torch_device).manual_seed(T)
        like: dict[str, Any] = {
            "dtype": device.dtype,
            "device": device.torch_device,
            "generator": noise,
        }
        packed = torch.randn(
            size=(seqs, T, 3, H, D), **like
        ).requires_grad_()  # as the model packs them
        grad = torch.randn(size=(seqs, H, T, D), **like)
        yield [
            Case(
                row={"dtype": dtype, "form": name, "seq_len": T},
                label=f"{T} tokens",
                series=name,
                amount=3.5 * 4 * seqs * config.d_model * T**2 / 2,
                build=partial(partial, differentiate, name, packed, grad),
                needed_bytes=SCORES.get(name, 0.0) * device.dtype.itemsize * seqs * H * T**2,
            )
            for name in list_entries("attention")
            if name in own or name not in ("native", *CUDA_ONLY)
        ]


def differentiate(name: str, packed: Tensor, grad: Tensor) -> None:
    """Run forward and backward of attention on packed queries, keys and values."""
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    y = find_attention(name)(q, k, v, mask=None, causal=True, dropout=None)
    torch.autograd.grad(y, packed, grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A training step of `size`; its batch is one micro-batch."""

    name: str
    sweep: str
    model_config: ModelConfig
    seqs: int

    @property
    def tokens(self) -> int:
        return self.seqs * self.model_config.seq_len


def run_size(options: argparse.Namespace, console: Console) -> Iterator[Row]:
    """Measure how the cost per token grows with the model and with the context."""
    device = with_peak(open_device(MachineConfig(device=options.device)))
    sizes = list_sizes(device.type, options.batch_tokens)
    result: Row = {**describe_peak(device), "rows": []}
    for row in measure_steps(sizes, device, options.repeats, console):
        result["rows"].append(row)
        yield result
    show(f"training steps, {format_peak(device)}", result, options, console)


def measure_steps(
    sizes: Sequence[Size], device: Device, repeats: int, console: Console
) -> Iterator[Row]:
    """Time training steps one model at a time, in order of memory, because a CPU's peak only grows."""
    allowed = find_allowed_bytes(device)
    machine = MachineConfig(device=str(device.torch_device), compile="off")
    for size in sizes:
        needed = estimate_step_bytes(size.model_config, size.tokens)
        if needed > allowed:
            console.warn(f"{size.name}: skipped, needs about {format_memory(needed)}")
            continue
        console.step(f"measuring {size.name}")
        device.reset_peak_memory()
        workload = build_workload(
            size.model_config, machine, batch_seqs=size.seqs, micro_batch=size.seqs
        )
        workload.step()
        timing = time_calls(
            {"step": workload.step},
            repeats=repeats,
            longest=LONGEST_SECONDS,
            synchronize=device.synchronize,
        )["step"]
        row = describe_size(workload, device, size.seqs, timing)
        row |= {"name": size.name, "sweep": size.sweep}
        row["peak_memory_bytes"] = device.peak_memory_bytes()
        yield row
    console.close()


def list_sizes(device_type: str, step_tokens: int | None = None) -> list[Size]:
    """Return all models, and contexts of the smallest model, in order of memory."""
    tokens = step_tokens or STEP_TOKENS[device_type]
    models = {name: config for name, config in PRESETS.items() if name.startswith("gpt2-")}
    if device_type != "cuda":
        base = ModelConfig(vocab_size=GPT2_VOCABULARY)
        models = {f"{d}x{n}": replace(base, n_layer=n, n_head=d // HEAD_WIDTH, d_model=d, d_ff=4 * d)
                  for d, n in CPU_MODELS} | {"gpt2-124m": models["gpt2-124m"]}  # fmt: skip
    seq_len, smallest = min(SEQ_LEN[device_type], tokens), next(iter(models))
    longest = max(tokens, CONTEXTS[-1]) // CONTEXTS[-1] * CONTEXTS[-1]
    steps = [
        ("models", name, replace(config, seq_len=seq_len), tokens)
        for name, config in models.items()
    ]
    steps += [
        ("contexts", f"{smallest}@{n}", replace(models[smallest], seq_len=n), longest)
        for n in CONTEXTS
    ]
    sizes = [
        Size(name=name, sweep=sweep, model_config=config, seqs=whole // config.seq_len)
        for sweep, name, config, whole in steps
    ]
    return sorted(sizes, key=lambda size: estimate_step_bytes(size.model_config, size.tokens))
