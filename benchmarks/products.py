"""`products`: every matrix product of a training step, by each BLAS library that torch can use.

A layer has three: forward (with its bias), gradient of its input, gradient of its weight. Operands
have the layouts that the compiled step passes to torch. The output layer's products are for a chunk
of rows, whose weight gradient is added to an fp32 sum (model/loss.py).
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.sweep import KERNEL, Call, Case, time_cases
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import MachineConfig
from megatoken.base.console import Console
from megatoken.base.markdown_table import show_rows
from megatoken.base.system.device import Device, open_device
from megatoken.base.system.metrics_log import Row
from megatoken.model.gpt import GPT, Linear
from megatoken.model.kernels.cross_entropy import torch_matmul

TOKENS = {"cpu": 1024, "mps": 4096, "cuda": 65536}
CHUNKS = {"cpu": (512,), "mps": (4096,), "cuda": (4096, 16384)}
COLUMNS = {"name": "product", "library": "library", "calls": "calls a step", **KERNEL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A linear layer: x (rows, width) @ weight (out, width).T.

    calls: how often a step computes each of its products. chunk: rows of the loss; 0 for a layer of
    a block.
    """

    name: str
    rows: int
    width: int
    out: int
    has_bias: bool
    calls: int
    chunk: int = 0


def run_products(options: argparse.Namespace, console: Console) -> Iterator[Row]:
    """Time all products of a step of a preset, and sum their seconds by library."""
    device = open_device(MachineConfig(device=options.device))
    tokens = options.batch_tokens or TOKENS[device.type]
    chunks = sorted({min(rows, tokens) for rows in CHUNKS[device.type]})
    layers = list_layers(PRESETS[options.preset], tokens, chunks)
    libraries = ("cublas", "cublaslt") if device.type == "cuda" else ("torch",)
    groups = list_cases(layers, libraries, device)
    about = {"device": device.name, "precision": device.precision, "preset": options.preset}
    about["tokens"] = tokens
    rows: list[Row] = []
    for new in time_cases(groups, device, "flops_per_second", options.repeats, console):
        rows += new
        yield {**about, "rows": rows}
    totals = [sum_step(rows, library, chunk) for chunk in chunks for library in libraries]
    title = f"{options.preset}, {tokens} tokens, {device.precision} on {device.name}"
    console.print(f"matrix products of a step of {title}")
    show_rows(COLUMNS, rows, console)
    show_rows(COLUMNS, totals, console)
    yield {**about, "totals": totals, "rows": rows}


def list_layers(config: ModelConfig, tokens: int, chunks: Sequence[int]) -> list[Layer]:
    """Return the linear layers of a block, then the output layer with each chunk size."""
    block = GPT(replace(config, n_layer=1, vocab_size=1), seed=None).blocks[0]
    layers = [
        Layer(
            name=name,
            rows=tokens,
            width=part.in_features,
            out=part.out_features,
            has_bias=part.bias is not None,
            calls=config.n_layer,
        )
        for name, part in block.named_modules()
        if isinstance(part, Linear)
    ]
    return layers + [
        Layer(
            name=f"output, {chunk} rows",
            rows=chunk,
            width=config.d_model,
            out=config.padded_vocab_size,
            has_bias=False,
            calls=tokens // chunk,
            chunk=chunk,
        )
        for chunk in chunks
    ]


def list_cases(
    layers: Sequence[Layer], libraries: Sequence[str], device: Device
) -> Iterator[list[Case]]:
    """Yield a group for each product, with a case per library."""
    for layer in layers:
        for name, call in build_products(layer, device).items():
            yield [
                Case(
                    row={
                        "name": f"{layer.name}, {name}",
                        "library": library,
                        "rows": layer.rows,
                        "width": layer.width,
                        "out": layer.out,
                        "calls": layer.calls,
                        "chunk": layer.chunk,
                    },
                    label=name,
                    series=f"{layer.name}, {library}",
                    amount=2.0 * layer.rows * layer.width * layer.out,
                    build=partial(partial, call_library, library, call),
                )
                for library in libraries
            ]


def build_products(layer: Layer, device: Device) -> dict[str, Call]:
    """Return the layer's three products, each into a preallocated result."""
    noise = torch.Generator(device.torch_device).manual_seed(0)  # chips clock higher on constants
    like: dict[str, Any] = {"dtype": device.dtype, "device": device.torch_device}
    x = torch.randn(layer.rows, layer.width, generator=noise, **like)
    weight = torch.randn(layer.out, layer.width, generator=noise, **like)
    grad = torch.randn(layer.rows, layer.out, generator=noise, **like)
    y = torch.empty_like(grad)
    forward: Call = partial(torch.mm, x, weight.T, out=y)
    if layer.has_bias:
        forward = partial(torch.addmm, torch.zeros(layer.out, **like), x, weight.T, out=y)
    sums = torch.zeros_like(weight, dtype=torch.float32 if layer.chunk else device.dtype)
    add = {"accumulate": layer.chunk > 0}
    return {
        "forward": forward,
        "input gradient": partial(torch.mm, grad, weight, out=torch.empty_like(x)),
        "weight gradient": partial(torch_matmul, grad.T, x, sums, **add),
    }


def call_library(library: str, call: Call) -> None:
    """Call a product after telling torch which library to prefer."""
    if library != "torch":
        torch.backends.cuda.preferred_blas_library(library)
    call()


def sum_step(rows: Sequence[Row], library: str, chunk: int) -> Row:
    """Return the seconds and speed of a step's products by a library, with one chunk size."""
    own = [row for row in rows if row["library"] == library and row["chunk"] in (0, chunk)]
    flops = sum(2.0 * row["rows"] * row["width"] * row["out"] * row["calls"] for row in own)
    seconds = sum(row["seconds"]["median"] * row["calls"] for row in own)
    return {
        "name": f"step, {chunk} rows of the loss",
        "library": library,
        "calls": sum(row["calls"] for row in own),
        "seconds": seconds,
        "flops_per_second": flops / seconds,
    }
