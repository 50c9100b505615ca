"""`bench gemm`, `attention`, `batch` and `size`: one quantity grows, everything else stays. Each lists its cases;
`time_cases` times them, `run` prints and draws them."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatoken.bench.report import FIGURE, format_cell, save_picture, show_rows
from megatoken.bench.workload import (
    SPEED,
    build_workload,
    describe_mfu,
    describe_peak,
    describe_seconds,
    estimate_step_bytes,
    find_allowed_bytes,
    format_peak,
    reset_peak_memory,
)
from megatoken.config.model_config import ModelConfig
from megatoken.config.presets import GPT2_VOCABULARY, PRESETS
from megatoken.config.schema import MachineConfig
from megatoken.console import Console, format_quantity
from megatoken.errors import ConfigError
from megatoken.model.flops import count_parameters, flops_per_token
from megatoken.model.kernels import ATTENTION, CUDA_ONLY
from megatoken.native.library import find_library
from megatoken.plots import save_figure
from megatoken.system.device import Device, cache_peak, open_device, product_calls, with_peak
from megatoken.system.timing import time_calls

LONGEST_SECONDS = (
    20.0  # for the repeats of a case; there are fewer, but three, of what takes longer
)
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
LARGEST_CPU_TOKENS = (
    8192  # of a micro-batch: beyond it products stop getting faster, and a step takes a minute
)
MOST_SEQS = 1 << 14
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
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How a sweep is shown. columns: of its table; panels: the rows' `sweep`, the key of the horizontal axis, the keys
    whose values are a line each; y: each of the panels shows one of these."""

    columns: dict[str, str]
    panels: tuple[tuple[str, str, tuple[str, ...]], ...]
    y: tuple[str, ...]


KERNEL = {"seconds": "time", "flops_per_second": "FLOP/s"}
STEP = {"name": "step", "parameters": "parameters", "seq_len": "context", "batch_tokens": "tokens"}
STEP |= {"flops_per_token": "FLOPs/token", "seconds_per_token": "time/token", **SPEED}
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
    "batch": View(columns=STEP, panels=(("batch", "micro_batch", ()),), y=STEP_PANELS),
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
    """One thing to time. row: the first columns of its record; series: what is skipped after memory ended; amount:
    FLOPs or tokens of a call; needed_bytes: refused beforehand where the system would swap."""

    row: Row
    label: str
    series: str
    amount: float
    build: Callable[[], Call]
    needed_bytes: float = 0.0


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure one of the sweeps, show its table and its picture. Raises ConfigError for a size that cannot be."""
    title, answer = SWEEPS[options.bench](options, console)
    view, rows = VIEWS[options.bench], answer["rows"]
    console.print(title)
    show_rows(view.columns, rows, console)
    timed = [row for row in rows if not row["skipped"]]
    if timed:
        save_picture(
            partial(draw, view, timed, title), options.out / f"{options.name}.png", console
        )
    return answer


def time_cases(
    groups: Iterable[Sequence[Case]],
    device: Device,
    rate: str,
    repeats: int,
    console: Console,
    optional: tuple[type[Exception], ...] = (),
) -> list[Row]:
    """Time all cases, those of a group in turn; return a record's row for each, `skipped` where it was not timed.

    rate: key of the amount a second; optional: errors that skip a series.
    """
    rows: list[Row] = []
    ended: dict[str, str] = {}
    allowed = find_allowed_bytes(device)
    for group in groups:
        calls: dict[str, Call] = {}
        for case in group:
            console.step(f"measuring {case.series}, {case.label}")
            row = case.row | dict.fromkeys(
                ("seconds", rate, "best", "peak_memory_bytes", "extra_memory_bytes")
            )
            row["skipped"] = ended.get(case.series)
            rows.append(row)
            if not row["skipped"] and case.needed_bytes > allowed:
                needed, most = (
                    format_quantity(case.needed_bytes, "B"),
                    format_quantity(allowed, "B"),
                )
                row["skipped"] = (
                    f"{case.label} would hold about {needed}, more than the {most} allowed"
                )
            if row["skipped"]:
                continue
            try:
                reset_peak_memory(device)
                call = case.build()
                before = device.peak_memory_bytes()
                call()
                device.synchronize()
            except (torch.OutOfMemoryError, *optional) as error:  # type: ignore[misc]  # all are exceptions
                what = (
                    "out of memory"
                    if isinstance(error, torch.OutOfMemoryError)
                    else str(error).partition("\n")[0].rstrip(".")
                )
                row["skipped"] = ended[case.series] = f"{what} at {case.label}"
                continue
            calls[str(len(rows) - 1)] = call
            row["peak_memory_bytes"] = device.peak_memory_bytes()
            row["extra_memory_bytes"] = (
                row["peak_memory_bytes"] - before if device.type == "cuda" else None
            )
        if not calls:
            continue
        longest, first = LONGEST_SECONDS * len(group), len(rows) - len(group)
        timings = time_calls(
            calls, repeats=repeats, longest=longest, fewest=3, synchronize=device.synchronize
        )
        for index, timing in timings.items():
            amount = group[int(index) - first].amount
            figures = {
                "seconds": describe_seconds(timing),
                rate: timing.rate(amount),
                "best": amount / timing.best,
            }
            rows[int(index)] |= figures
    console.close()
    return rows


def draw(view: View, rows: Sequence[Row], title: str, pyplot: Any, path: Path) -> Path:
    """A row of panels for each of the view's, or one row if each has one: a line for each series, and a band between
    the quartiles of figures."""
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
    figure, axes = pyplot.subplots(len(panels) // columns, columns, squeeze=False, **size)
    figure.suptitle(title)
    for axis, (own, x_key, y_key, series) in zip(axes.flat, panels, strict=True):
        labels = [", ".join(str(row[key]) for key in series) for row in own]
        for label in dict.fromkeys(labels):
            line = [row for row, its_label in zip(own, labels, strict=True) if its_label == label]
            x, y = [row[x_key] for row in line], [row[y_key] for row in line]
            median, low, high = (
                [v[key] if isinstance(v, dict) else v for v in y] for key in FIGURE[:3]
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
        axis.set_xticks(ticks, [f"{x:g}" if x < 1e5 else format_quantity(x) for x in ticks])
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
            axis.set_ylim(0)
    return save_figure(pyplot, figure, path)


def open_dtypes(name: str) -> Iterator[tuple[str, Device]]:
    """A device in each dtype worth measuring: what it is fast in, TF32, fp32; each configures this process."""
    device = open_device(MachineConfig(device=name))
    for dtype in dict.fromkeys([device.precision, *(["tf32"] if device.is_ampere else []), "fp32"]):
        precision: Any = "fp32" if dtype == "tf32" else dtype
        yield (
            dtype,
            open_device(MachineConfig(device=name, precision=precision, tf32=dtype == "tf32")),
        )


def list_powers(largest: int) -> list[int]:
    """64, 128 .. `largest`. Raises ConfigError when there are none."""
    if largest < SMALLEST:
        raise ConfigError(
            f"{largest} is less than the first size",
            "--largest or --longest",
            f"give {SMALLEST} or more",
        )
    return [1 << power for power in range(SMALLEST.bit_length() - 1, largest.bit_length())]


def run_gemm(options: argparse.Namespace, console: Console) -> tuple[str, dict[str, Any]]:
    """FLOP/s of square products over size, dtype and library, and in the first dtype of a layer's (N, K) x (K, K) over
    its tokens N and width K. The best of each dtype is kept as this machine's peak."""
    rows: list[Row] = []
    peaks: dict[str, float] = {}
    for dtype, device in open_dtypes(options.device):
        sizes = list_powers(options.largest or LARGEST_SQUARE[device.type])
        groups = list_squares(device, dtype, sizes)
        rows += time_cases(groups, device, "flops_per_second", options.repeats, console)
        if not peaks:
            groups = list_layers(device, dtype, sizes)
            rows += time_cases(groups, device, "flops_per_second", options.repeats, console)
        peaks[dtype] = max(
            (row["best"] for row in rows if row["dtype"] == dtype and row["best"]), default=0.0
        )
        cache_peak(device, peaks[dtype])
    found = ", ".join(f"{dtype} {format_quantity(peak, 'FLOP/s')}" for dtype, peak in peaks.items())
    title = f"matrix products on {device.name}; peak: {found}"
    return title, {"device": device.name, "peak": peaks, "rows": rows}


def list_squares(device: Device, dtype: str, sizes: Sequence[int]) -> Iterator[list[Case]]:
    """Products of two squares; the libraries of a product are a group."""
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
    """Products of N tokens with a layer of K x K weights, by torch, as a model computes them."""
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


def run_attention(options: argparse.Namespace, console: Console) -> tuple[str, dict[str, Any]]:
    """One layer's causal attention, forward and backward, by every implementation over the context."""
    config, rows = PRESETS[options.preset], []
    for dtype, device in open_dtypes(options.device):
        lengths = list_powers(options.longest or LONGEST_CONTEXT[device.type])
        groups = list_attention(device, dtype, config, options.seqs, lengths)
        # A backend may lack this dtype or head width, or not be installed.
        optional = (RuntimeError, ImportError)
        rows += time_cases(groups, device, "flops_per_second", options.repeats, console, optional)
    sizes = {"n_head": config.n_head, "d_head": config.d_head}
    title = f"causal attention of {options.preset}, batch of {options.seqs}, forward and backward, on {device.name}"
    return title, {
        "device": device.name,
        "preset": options.preset,
        "seqs": options.seqs,
        **sizes,
        "rows": rows,
    }


def list_attention(
    device: Device, dtype: str, config: ModelConfig, seqs: int, lengths: Sequence[int]
) -> Iterator[list[Case]]:
    """Every implementation at every length.

    FLOPs: 3.5 * 4 B H T^2 D / 2 for all: two products forward and five backward, as flash attention makes the scores
    again (Dao et al. 2022), half of each for the triangle. B batch, H heads, T length, D head width.
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
                row={"dtype": dtype, "form": form, "seq_len": T},
                label=f"{T} tokens",
                series=form,
                amount=3.5 * 4 * seqs * config.d_model * T**2 / 2,
                build=partial(partial, differentiate, form, packed, grad),
                needed_bytes=SCORES.get(form, 0.0) * device.dtype.itemsize * seqs * H * T**2,
            )
            for form in ATTENTION
            if form in own or form not in ("native", *CUDA_ONLY)
        ]


def differentiate(form: str, packed: Tensor, grad: Tensor) -> None:
    """Forward and backward of attention on packed queries, keys and values by one implementation."""
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    y = ATTENTION[form](q, k, v, mask=None, causal=True, dropout=None)
    torch.autograd.grad(y, packed, grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A training step of `bench batch` or `bench size`; its batch is one micro-batch."""

    name: str
    sweep: str
    model_config: ModelConfig
    seqs: int

    @property
    def tokens(self) -> int:
        return self.seqs * self.model_config.seq_len


def run_batch(options: argparse.Namespace, console: Console) -> tuple[str, dict[str, Any]]:
    """Tokens/s, MFU and peak memory of a training step over its micro-batch: 1, 2, 4 .. sequences until memory ends."""
    preset, device = (
        PRESETS[options.preset],
        with_peak(open_device(MachineConfig(device=options.device))),
    )
    config = replace(preset, seq_len=options.seq_len or preset.seq_len)
    largest = options.largest or (
        MOST_SEQS if device.type == "cuda" else max(1, LARGEST_CPU_TOKENS // config.seq_len)
    )
    sizes = [
        Size(name=f"micro-batch {seqs}", sweep="batch", model_config=config, seqs=seqs)
        for seqs in (1 << power for power in range(largest.bit_length()))
    ]
    rows = measure_steps([sizes], device, options.repeats, console)
    if rows[0]["skipped"]:
        raise ConfigError(
            f"one sequence does not fit: {rows[0]['skipped']}", "--seq-len", "give less"
        )
    ended = next((row["skipped"] for row in rows if row["skipped"]), f"--largest {largest}")
    about = {
        "preset": options.preset,
        "seq_len": config.seq_len,
        "rows": [row for row in rows if not row["skipped"]],
    }
    title = f"{options.preset} at {config.seq_len}, {format_peak(device)}; ended at {ended}"
    return title, {**describe_peak(device), **about, "ended": ended}


def run_size(options: argparse.Namespace, console: Console) -> tuple[str, dict[str, Any]]:
    """How the cost of a token grows with the model and with the context."""
    device = with_peak(open_device(MachineConfig(device=options.device)))
    groups = [[size] for size in list_sizes(device.type, options.batch_tokens)]
    rows = measure_steps(groups, device, options.repeats, console)
    return f"training steps, {format_peak(device)}", {**describe_peak(device), "rows": rows}


def measure_steps(
    groups: Sequence[Sequence[Size]], device: Device, repeats: int, console: Console
) -> list[Row]:
    """Rows of training steps, by growing memory, as a CPU's peak only grows. One model lives at a time."""
    live: dict[ModelConfig, Any] = {}

    def build(size: Size) -> Call:
        config, machine = size.model_config, MachineConfig(device=str(device.torch_device))
        if config not in live:
            live.clear()
            live[config] = build_workload(
                config, machine, batch_seqs=size.seqs, micro_batch=size.seqs
            )
        return live[config].resize(size.seqs).step  # type: ignore[no-any-return]

    def make_case(size: Size) -> Case:
        config = size.model_config
        row = {
            "name": size.name,
            "sweep": size.sweep,
            "n_layer": config.n_layer,
            "d_model": config.d_model,
        }
        row |= {"seq_len": config.seq_len, "micro_batch": size.seqs, "batch_tokens": size.tokens}
        row |= {
            "parameters": count_parameters(config),
            "flops_per_token": flops_per_token(config, causal=False),
        }
        return Case(
            row=row | {"flops_per_token_causal": flops_per_token(config, causal=True)},
            label=size.name,
            series=size.sweep,
            amount=size.tokens,
            build=partial(build, size),
            needed_bytes=estimate_step_bytes(config, size.tokens),
        )

    cases = [[make_case(size) for size in group] for group in groups]
    rows = time_cases(cases, device, "tokens_per_second", repeats, console)
    for row, size in zip(rows, chain.from_iterable(groups), strict=True):
        row |= dict.fromkeys(("mfu", "mfu_causal", "seconds_per_token"))
        if not row["skipped"]:
            row |= describe_mfu(row["tokens_per_second"]["median"], size.model_config, device)
            row["seconds_per_token"] = row["seconds"]["median"] / size.tokens
    return rows


def list_sizes(device_type: str, step_tokens: int | None = None) -> list[Size]:
    """All models and contexts for a type of device, by growing memory.

    The contexts are of the smallest model, at the same tokens a step; a step of the longest may need more than asked.
    """
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


SWEEPS = {"gemm": run_gemm, "attention": run_attention, "batch": run_batch, "size": run_size}
