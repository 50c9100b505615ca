"""Predict the seconds of a training step on GPUs by arithmetic, without torch.

Matmuls and attention run at a share of peak FLOP/s, everything else at memory bandwidth. With small
micro-batches, GPUs wait for the host to launch kernels; with many GPUs, they wait for communication
that computation does not hide. docs/plan.md lists the constants with their sources, and the
error on published runs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.console import Console
from megatoken.base.system.gpus import Gpu
from megatoken.base.system.table import read_table
from megatoken.model.extensions import count_additions
from megatoken.model.flops import count_padded_parameters, count_trained_parameters
from megatoken.optim.costs import ORTHOGONALIZE_STEPS

_TABLE = read_table(__file__)
ARCHITECTURES: dict[str, dict[str, Any]] = _TABLE["architectures"]
HALF_SPEED_CONTEXT = 950  # tokens at which attention reaches half of that share
HALF_SPEED_DEPTH = 128  # inner dimension at which a matmul reaches half of its share
TILE = 128  # rows and columns of a tile
SPLIT = 2048  # inner dimension from which a matmul is split among multiprocessors
HALF_SPEED_TILES = 0.4  # tiles per multiprocessor at which a matmul reaches half of its share
MEMORY_SHARE = 0.85  # of the data sheet's bandwidth
LINK_SHARE = 0.75
NETWORK_SHARE = 0.75
HIDDEN_SHARE = (
    0.85  # of the last backward, during which gradients are sent (records/ranks-overlap.json)
)
UNHIDDEN_SHARE = 0.05  # of a collective's time that even a long backward does not hide
WAIT_SHARE = 0.01  # of compute lost to the slowest GPU, per doubling of GPUs
LATENCY = 15e-6  # seconds of a collective, and of each ring step between machines
LAUNCH = 7.2e-6  # seconds to launch an operation
STEP_LAUNCHES = 1200  # operations per step outside the layers: batch, loss, norm, clip, metrics
EXPLICIT_LAUNCHES = 14  # more operations per layer for explicit attention
FP32_TRAFFIC = 1.3  # bytes moved in fp32, relative to 16 bits with fp32 master weights
FOREACH_BYTES = 67  # per parameter, for AdamW on lists of tensors instead of in one kernel
FOREACH_LAUNCHES = 900


@dataclass(frozen=True, kw_only=True)
class Program:
    """Cost coefficients of a training step that is eager, compiled, or eager with fused kernels.

    They hold for 16-bit precision with fp32 master weights, and cover forward and backward
    together. element_bytes: bytes that element-wise operations of a layer move, per feature of a
    token. logit_bytes: bytes that the loss moves, per logit. score_bytes: bytes that explicit
    attention moves, per pair of tokens and head. weight_bytes: bytes that casts of weights and sums
    of gradients move, per parameter and micro-batch. adamw_bytes: bytes that gradient norm,
    clipping and update move, per parameter. launches: kernel launches per layer.
    """

    element_bytes: float
    logit_bytes: float
    score_bytes: float
    weight_bytes: float
    adamw_bytes: float
    launches: float


PROGRAMS = {name: Program(**row) for name, row in _TABLE["programs"].items()}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a training step is computed.

    micro_batch: sequences that a GPU computes at once. micro_steps: micro-batches per step.
    """

    gpus: int = 1
    micro_batch: int = 1
    micro_steps: int = 1
    precision: str = "bf16"  # bf16, fp16, fp32 or tf32
    program: str = "compiled"
    attention: str = "flash"  # or explicit
    optimizer: str = "adamw"
    adamw: str = "fused"  # foreach, or loop, which takes about as long
    checkpointing: str = "none"
    sharding: str = "none"
    tensor_parallel: int = 1
    gradient_bytes: int = 4

    @property
    def is_16_bit(self) -> bool:
        return self.precision in ("bf16", "fp16")

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of an activation or a gathered weight."""
        return 2 if self.is_16_bit else 4

    @property
    def passes(self) -> float:
        """Work of forward and backward, relative to that without recomputation of blocks."""
        return 4 / 3 if self.checkpointing == "block" else 1.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of one step.

    parts: by kind of work; "host" and "communication" only where computation does not hide them.
    tokens: tokens per step of all GPUs. sent: duration of all communication, hidden or not.
    """

    parts: Mapping[str, float]
    tokens: int
    sent: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def computing(self) -> float:
        """Seconds of a GPU's own work."""
        return self.seconds - self.parts["host"] - self.parts["communication"]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs together."""
        return self.tokens / self.seconds

    def describe_communication(self) -> str:
        return f"{self.sent:.3g} s per step, computing {self.computing:.3g} s"

    def warn(self, console: Console) -> None:
        """Print a warning if communication takes longer than computing."""
        if self.sent > self.computing:
            what = f"communication takes longer than computing: {self.describe_communication()}"
            console.warn(f"{what}; fewer GPUs or larger micro-batches send less")


def estimate_step(model: ModelConfig, gpu: Gpu, layout: Layout) -> StepTime:
    """Estimate the time of one step; each data-parallel rank runs `micro_steps` micro-batches."""
    steps = layout.micro_steps
    ranks = layout.gpus // layout.tensor_parallel
    parts = micro_batch_seconds(model, gpu, layout)
    compute = sum(parts.values())
    update = update_seconds(model, gpu, layout)
    sent, waits = _data_parallel_seconds(model, gpu, layout, compute)
    in_tensors = _tensor_parallel_seconds(model, gpu, layout)
    waits += in_tensors + WAIT_SHARE * math.log2(layout.gpus) * steps * compute  # for the slowest
    launches = LAUNCH * count_launches(model, layout)
    parts = {name: steps * seconds for name, seconds in parts.items()} | {
        "optimizer": update,
        "host": max(0.0, launches - steps * compute - update),
        "communication": waits,
    }
    tokens = layout.micro_batch * model.seq_len * steps * ranks
    return StepTime(parts=parts, tokens=tokens, sent=sent + in_tensors)


def micro_batch_seconds(model: ModelConfig, gpu: Gpu, layout: Layout) -> dict[str, float]:
    """Return a GPU's seconds for one micro-batch's forward and backward, by kind of work."""
    program = PROGRAMS[layout.program]
    tp = layout.tensor_parallel
    memory_rate = MEMORY_SHARE * gpu.memory_rate
    tokens = layout.micro_batch * model.seq_len
    byte_seconds = (1.0 if layout.is_16_bit else FP32_TRAFFIC) / memory_rate
    element_passes = 1.1 if layout.checkpointing == "gelu" else layout.passes
    element_bytes = program.element_bytes * element_passes
    weight_bytes = program.weight_bytes
    if not layout.is_16_bit:  # no casts
        weight_bytes = 8 * (layout.micro_steps > 1)
    return {
        "products": layout.passes * product_seconds(model, gpu, tokens, layout.precision, tp),
        "attention": layout.passes * _attention_seconds(model, gpu, layout, tokens) / tp,
        "elements": byte_seconds * tokens * model.n_layer * model.d_model * element_bytes / tp,
        "loss": byte_seconds * tokens * model.padded_vocab_size * program.logit_bytes / tp,
        "weights": count_padded_parameters(model) / tp * weight_bytes / memory_rate,
    }


def update_seconds(model: ModelConfig, gpu: Gpu, layout: Layout) -> float:
    """Return a GPU's seconds for gradient norm, clipping, AdamW's update and Muon's matmuls."""
    tp = layout.tensor_parallel
    shards = layout.gpus // tp
    if layout.sharding == "none":
        shards = 1
    elif layout.sharding == "hybrid":
        shards = min(gpu.per_machine // tp, shards)
    param_bytes = PROGRAMS[layout.program].adamw_bytes
    if layout.adamw != "fused":
        param_bytes = FOREACH_BYTES
    rate = product_rate(gpu, layout.precision)
    products = count_optimizer_flops(layout.optimizer, model) / rate / layout.gpus
    moved = count_trained_parameters(model) / tp * param_bytes
    return products + moved / (MEMORY_SHARE * gpu.memory_rate) / shards


def count_launches(model: ModelConfig, layout: Layout) -> float:
    """Return how many operations the host launches in a step."""
    per_layer = PROGRAMS[layout.program].launches * layout.passes
    if layout.attention == "explicit":
        per_layer += EXPLICIT_LAUNCHES
    outside = STEP_LAUNCHES + FOREACH_LAUNCHES * (layout.adamw != "fused")
    return layout.micro_steps * model.n_layer * per_layer + outside


def product_seconds(model: ModelConfig, gpu: Gpu, tokens: int, precision: str, tp: int) -> float:
    """Return the seconds of all matmuls of a micro-batch, in forward and backward."""
    d = model.d_model
    f = model.d_ff // tp
    heads = model.attention_width // tp
    shapes = [(d, sum(model.qkv_rows) // tp), (heads, d), (f, d), *[(d, f)] * (1 + model.is_gated)]
    passes = 2 if model.lora_rank else 3
    layers = sum(_linear_seconds(gpu, tokens, *shape, precision, passes) for shape in shapes)
    if model.lora_rank:
        pairs = [pair for i, o in shapes for pair in ((i, model.lora_rank), (model.lora_rank, o))]
        layers += sum(_linear_seconds(gpu, tokens, *pair, precision, 3) for pair in pairs)
    head = _linear_seconds(gpu, tokens // tp, d, model.padded_vocab_size, precision, passes)
    return model.n_layer * layers + head


def _linear_seconds(
    gpu: Gpu, tokens: int, inner: int, outer: int, precision: str, passes: int
) -> float:
    """Return the total seconds of a linear layer's forward, input gradient and weight gradient.

    passes: how many of these to count, in that order.
    """
    sizes = ((tokens, outer, inner), (tokens, inner, outer), (inner, outer, tokens))
    return sum(_product_seconds(gpu, *size, precision) for size in sizes[:passes])


def product_rate(gpu: Gpu, precision: str) -> float:
    """Return the FLOP/s that large matmuls reach."""
    share = "products_fp32" if gpu.compute_precision(precision) == "fp32" else "products"
    reached: float = ARCHITECTURES[gpu.architecture][share]
    return gpu.peak_flops(precision) * reached


def _product_seconds(gpu: Gpu, rows: int, columns: int, depth: int, precision: str) -> float:
    half_depth: float = HALF_SPEED_DEPTH
    if gpu.compute_precision(precision) == "fp32":
        half_depth /= 4
    tiles = math.ceil(rows / TILE) * math.ceil(columns / TILE) * max(1.0, depth / SPLIT)
    tiles /= gpu.multiprocessors
    rate = product_rate(gpu, precision) * depth / (depth + half_depth)
    rate = rate * tiles / (tiles + HALF_SPEED_TILES)
    item = 2 if precision in ("bf16", "fp16") else 4
    moved = item * (rows * columns + rows * depth + columns * depth)
    return max(2 * rows * columns * depth / rate, moved / (MEMORY_SHARE * gpu.memory_rate))


def _attention_seconds(model: ModelConfig, gpu: Gpu, layout: Layout, tokens: int) -> float:
    context = model.seq_len
    if layout.attention == "explicit":  # all T x T scores, read and written several times
        traffic = tokens * context * model.n_head * PROGRAMS[layout.program].score_bytes
        flops = 12 * tokens * context * model.attention_width
        products = flops / product_rate(gpu, layout.precision) * 2
        return model.n_layer * (traffic / (MEMORY_SHARE * gpu.memory_rate) + products)
    share: float = ARCHITECTURES[gpu.architecture]["attention"]
    share *= context / (context + HALF_SPEED_CONTEXT)
    # Half of the scores, which the backward recomputes.
    flops = 7 * tokens * context * model.attention_width
    return model.n_layer * flops / (gpu.peak_flops(layout.precision) * share)


def _data_parallel_seconds(
    model: ModelConfig, gpu: Gpu, layout: Layout, micro_seconds: float
) -> tuple[float, float]:
    """Return the seconds of data-parallel collectives, and those that the backward does not hide.

    micro_seconds: time to compute a micro-batch.
    """
    tp = layout.tensor_parallel
    ranks = layout.gpus // tp
    if ranks == 1:
        return 0.0, 0.0
    rate = LINK_SHARE * gpu.link_rate
    if layout.gpus > gpu.per_machine:
        rate = min(rate, NETWORK_SHARE * gpu.network_rate)
    machines = math.ceil(layout.gpus / gpu.per_machine)
    share = (ranks - 1) / ranks / tp  # of all values that a rank sends
    reduce_bytes = layout.gradient_bytes * count_trained_parameters(model) * share
    gather_bytes = layout.item_bytes * count_padded_parameters(model) * share
    hidden = HIDDEN_SHARE * micro_seconds * (2 / 3 if layout.sharding in ("none", "zero1") else 1)
    latency = LATENCY * (2 + machines + min(layout.gpus, gpu.per_machine))
    if layout.sharding == "none":
        seconds = 2 * reduce_bytes / rate
        waits = max(0.0, seconds + latency - hidden) + UNHIDDEN_SHARE * seconds
        return seconds + latency, waits
    shards_weights = layout.sharding in ("zero3", "hybrid")
    reduces = 1 if layout.sharding == "zero1" else layout.micro_steps
    gathers = 2 * layout.micro_steps if shards_weights else 1
    seconds = (reduces * reduce_bytes + gathers * gather_bytes) / rate
    latencies = latency * (reduces + gathers) * (model.n_layer if shards_weights else 1)
    waits = max(0.0, seconds + latencies - hidden * reduces) + UNHIDDEN_SHARE * seconds
    return seconds + latencies, waits


def _tensor_parallel_seconds(model: ModelConfig, gpu: Gpu, layout: Layout) -> float:
    """Return a step's seconds in tensor-parallel collectives.

    There are 2 all-gathers and 2 reduce-scatters per layer, in forward and again in backward.
    """
    tp = layout.tensor_parallel
    if tp == 1:
        return 0.0
    sent = layout.micro_batch * model.seq_len * model.d_model * layout.item_bytes * (tp - 1) / tp
    return layout.micro_steps * model.n_layer * 8 * (sent / (LINK_SHARE * gpu.link_rate) + LATENCY)


def count_optimizer_flops(name: str, model: ModelConfig) -> int:
    """Return the matmul FLOPs of one optimizer step.

    Only Muon has any, in its Newton-Schulz iteration.
    """
    if name != "muon" or count_additions(model).freezes:
        return 0
    d, f = model.d_model, model.d_ff
    shapes = [
        *((rows, d) for rows in model.qkv_rows),
        (d, model.attention_width),
        *[(f, d)] * (2 + model.is_gated),
    ]
    shapes = [*shapes * model.n_layer, *[(model.kv_heads, d)] * len(model.value_embedding_layers)]
    sizes = [(min(shape), max(shape)) for shape in shapes]
    return ORTHOGONALIZE_STEPS * sum(4 * n * n * m + 2 * n**3 for n, m in sizes)
