"""Seconds of a training step on GPUs that are not here, by arithmetic, without torch.

Products and attention take their FLOPs at a share of the data sheet's peak, everything else its bytes at the speed of
memory; a small micro-batch waits for the host that starts its kernels, many GPUs for what they send and cannot hide.
docs/numbers.md lists the constants, what set them, and how far off published runs are.
"""

import math
from dataclasses import dataclass

from megatoken.config.model_config import ModelConfig
from megatoken.model.flops import count_padded_parameters
from megatoken.optim.costs import count_optimizer_flops
from megatoken.system.gpus import Gpu

# Share of the data sheet's peak that large products reach, in 16 bits or TF32, and in fp32 without TF32; and that
# attention reaches at long contexts (FlashAttention-2, figures of its paper for A100 and H100).
PRODUCT_SHARE = {
    "pascal": (0.75, 0.87), "turing": (0.29, 0.55), "volta": (0.75, 0.87), "ampere": (0.78, 0.90),
    "ampere-graphics": (0.80, 0.60), "ada": (0.80, 0.60), "hopper": (0.62, 0.65), "blackwell": (0.60, 0.60),
    "cdna": (0.50, 0.60),
}  # fmt: skip
ATTENTION_SHARE = {"ampere": 0.58, "hopper": 0.36, "blackwell": 0.30, "turing": 0.2, "cdna": 0.25}
ATTENTION_SHARE_OTHERS = 0.5
HALF_SPEED_CONTEXT = 950  # tokens at which attention has half of that share
HALF_SPEED_DEPTH = 128  # length of a product's sums at which it has half of its share: the tiles' beginning and end
TILE, SPLIT = (
    128,
    2048,
)  # rows and columns of a tile; sums this long are split among multiprocessors
HALF_SPEED_TILES = 0.4  # tiles a multiprocessor at which a product has half of its share
MEMORY_SHARE = 0.85  # of the data sheet's bandwidth
LINK_SHARE, NETWORK_SHARE = 0.75, 0.75
HIDDEN_SHARE = 0.85  # of the last micro-batch's backward, beside which gradients travel (records/ranks-overlap.json)
UNHIDDEN_SHARE = 0.05  # of a collective's time, which even a long backward does not hide
WAIT_SHARE = (
    0.01  # of compute, in which GPUs wait for the slowest, each time that their number doubles
)
LATENCY = 15e-6  # seconds of a collective, and of each step around the ring between machines
LAUNCH = 7.2e-6  # seconds in which the host starts an operation
STEP_LAUNCHES = 1200  # operations of a step outside the layers: batch, loss, norm, clip, metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """How well a training program fuses. Bytes moved to and from memory, forward and backward, in 16 bits with fp32
    masters; in fp32 times FP32_TRAFFIC.

    element_bytes: element-wise work of a layer, for each number of a token's d_model. logit_bytes: of the loss, a
    logit. score_bytes: of attention by the explicit formula, a pair of tokens and head. weight_bytes: casts and sums
    of gradients, a parameter and micro-batch. adamw_bytes: norm, clip and update, a parameter. launches: operations
    that the host starts in a layer, forward and backward.
    """

    element_bytes: float
    logit_bytes: float
    score_bytes: float
    weight_bytes: float
    adamw_bytes: float
    launches: float


PROGRAMS = {
    "eager": Program(
        element_bytes=210,
        logit_bytes=26,
        score_bytes=90,
        weight_bytes=16,
        adamw_bytes=36,
        launches=83,
    ),
    "compiled": Program(
        element_bytes=120,
        logit_bytes=10,
        score_bytes=22,
        weight_bytes=16,
        adamw_bytes=36,
        launches=45,
    ),
    "fused": Program(
        element_bytes=80, logit_bytes=4, score_bytes=22, weight_bytes=6, adamw_bytes=32, launches=25
    ),
}
FP32_TRAFFIC = 1.3
FOREACH_BYTES, FOREACH_LAUNCHES = 67, 900  # AdamW by lists of tensors instead of in one kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a model is computed on some GPUs. micro_batch: sequences a GPU at once; micro_steps: how often a step."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step by part; host and communication: what the others do not hide."""

    products: float
    attention: float
    elements: float
    loss: float
    weights: float
    optimizer: float
    host: float
    communication: float
    tokens: int

    @property
    def seconds(self) -> float:
        compute = self.products + self.attention + self.elements + self.loss + self.weights
        return compute + self.optimizer + self.host + self.communication

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs."""
        return self.tokens / self.seconds


def estimate_step(model: ModelConfig, gpu: Gpu, layout: Layout) -> StepTime:
    """The time of one step of `micro_steps` micro-batches on every data-parallel rank."""
    steps, ranks = layout.micro_steps, layout.gpus // layout.tensor_parallel
    parts = micro_batch_seconds(model, gpu, layout)
    compute, update = sum(parts.values()), update_seconds(model, gpu, layout)
    slowest = WAIT_SHARE * math.log2(layout.gpus) * steps * compute
    return StepTime(
        **{name: steps * seconds for name, seconds in parts.items()},
        optimizer=update,
        host=max(0.0, LAUNCH * count_launches(model, layout) - steps * compute - update),
        communication=communication_seconds(model, gpu, layout, compute) + slowest,
        tokens=layout.micro_batch * model.seq_len * steps * ranks,
    )


def micro_batch_seconds(model: ModelConfig, gpu: Gpu, layout: Layout) -> dict[str, float]:
    """Seconds of a GPU's forward and backward of one micro-batch, by part of StepTime."""
    program, tp, memory_rate = (
        PROGRAMS[layout.program],
        layout.tensor_parallel,
        MEMORY_SHARE * gpu.memory_rate,
    )
    tokens, is_low = layout.micro_batch * model.seq_len, layout.precision in ("bf16", "fp16")
    byte_seconds = (1.0 if is_low else FP32_TRAFFIC) / memory_rate
    passes = forward_passes(layout)
    element_bytes = program.element_bytes * (1.1 if layout.checkpointing == "gelu" else passes)
    if is_low:
        weight_bytes = program.weight_bytes
    else:
        weight_bytes = 8 * (layout.micro_steps > 1)  # sums of gradients alone
    return {
        "products": passes * product_seconds(model, gpu, tokens, layout.precision, tp),
        "attention": passes * _attention_seconds(model, gpu, layout, tokens) / tp,
        "elements": byte_seconds * tokens * model.n_layer * model.d_model * element_bytes / tp,
        "loss": byte_seconds * tokens * model.padded_vocab_size * program.logit_bytes / tp,
        "weights": count_padded_parameters(model) / tp * weight_bytes / memory_rate,
    }


def forward_passes(layout: Layout) -> float:
    """Work of forward and backward, over that without recomputed blocks, which are a second forward."""
    return 4 / 3 if layout.checkpointing == "block" else 1.0


def updates_by_lists(layout: Layout) -> bool:
    """Whether the update is many operations instead of one kernel."""
    return layout.adamw != "fused"


def update_seconds(model: ModelConfig, gpu: Gpu, layout: Layout) -> float:
    """Seconds of gradient norm, clip and AdamW on a GPU's share of the parameters, and of muon's products."""
    tp = layout.tensor_parallel
    ranks = layout.gpus // tp
    shards = {"none": 1, "hybrid": min(gpu.per_machine // tp, ranks)}.get(layout.sharding, ranks)
    bytes_per_param = (
        FOREACH_BYTES if updates_by_lists(layout) else PROGRAMS[layout.program].adamw_bytes
    )
    products = (
        count_optimizer_flops(layout.optimizer, model)
        / product_rate(gpu, layout.precision)
        / layout.gpus
    )
    return (
        products
        + count_padded_parameters(model)
        / tp
        * bytes_per_param
        / (MEMORY_SHARE * gpu.memory_rate)
        / shards
    )


def count_launches(model: ModelConfig, layout: Layout) -> float:
    """Operations that the host starts in a step."""
    in_layer = PROGRAMS[layout.program].launches * forward_passes(layout) + 14 * (
        layout.attention == "explicit"
    )
    outside = STEP_LAUNCHES + FOREACH_LAUNCHES * updates_by_lists(layout)
    return layout.micro_steps * model.n_layer * in_layer + outside


def product_seconds(
    model: ModelConfig, gpu: Gpu, tokens: int, precision: str, tp: int = 1
) -> float:
    """Seconds of all matrix products of a micro-batch, forward and backward."""
    d, f, kv = model.d_model, model.d_ff // tp, 2 * model.kv_heads * model.d_head
    shapes = [
        (d, (d + kv) // tp),
        (d // tp, d),
        (f, d),
        *[(d, f)] * (2 if model.mlp == "swiglu" else 1),
    ]
    layers = sum(_three_products(gpu, tokens, inner, outer, precision) for inner, outer in shapes)
    return model.n_layer * layers + _three_products(
        gpu, tokens // tp, d, model.padded_vocab_size, precision
    )


def _three_products(gpu: Gpu, tokens: int, inner: int, outer: int, precision: str) -> float:
    """Seconds of a linear layer's output, gradient of its input, gradient of its weight."""
    sizes = ((tokens, outer, inner), (tokens, inner, outer), (inner, outer, tokens))
    return sum(_product_seconds(gpu, *size, precision) for size in sizes)


def product_rate(gpu: Gpu, precision: str) -> float:
    """FLOP/s of large products."""
    is_plain = gpu.compute_precision(precision) == "fp32"
    return gpu.peak_flops(precision) * PRODUCT_SHARE[gpu.architecture][is_plain]


def _product_seconds(gpu: Gpu, rows: int, columns: int, depth: int, precision: str) -> float:
    half_depth = (
        HALF_SPEED_DEPTH / 4 if gpu.compute_precision(precision) == "fp32" else HALF_SPEED_DEPTH
    )
    tiles = (
        math.ceil(rows / TILE)
        * math.ceil(columns / TILE)
        * max(1.0, depth / SPLIT)
        / gpu.multiprocessors
    )
    rate = (
        product_rate(gpu, precision)
        * depth
        / (depth + half_depth)
        * tiles
        / (tiles + HALF_SPEED_TILES)
    )
    item = 2 if precision in ("bf16", "fp16") else 4
    moved = item * (rows * columns + rows * depth + columns * depth)
    return max(2 * rows * columns * depth / rate, moved / (MEMORY_SHARE * gpu.memory_rate))


def _attention_seconds(model: ModelConfig, gpu: Gpu, layout: Layout, tokens: int) -> float:
    context, precision = model.seq_len, layout.precision
    if layout.attention == "explicit":  # whole squares, several times through memory
        traffic = tokens * context * model.n_head * PROGRAMS[layout.program].score_bytes
        flops = 12 * tokens * context * model.d_model
        products = flops / product_rate(gpu, precision) * 2
        return model.n_layer * (traffic / (MEMORY_SHARE * gpu.memory_rate) + products)
    share = (
        ATTENTION_SHARE.get(gpu.architecture, ATTENTION_SHARE_OTHERS)
        * context
        / (context + HALF_SPEED_CONTEXT)
    )
    flops = (
        7 * tokens * context * model.d_model
    )  # half of each square; the backward computes it anew
    return model.n_layer * flops / (gpu.peak_flops(precision) * share)


def communication_seconds(
    model: ModelConfig, gpu: Gpu, layout: Layout, micro_seconds: float
) -> float:
    """Seconds of a step in which GPUs wait for one another. micro_seconds: compute of one micro-batch."""
    if layout.gpus == 1:
        return 0.0
    exposed = _data_parallel_seconds(model, gpu, layout, micro_seconds)
    return exposed + _tensor_parallel_seconds(model, gpu, layout)


def _data_parallel_seconds(
    model: ModelConfig, gpu: Gpu, layout: Layout, micro_seconds: float
) -> float:
    """What the backward does not hide of reducing gradients and gathering weights, by rings."""
    tp, ranks = layout.tensor_parallel, layout.gpus // layout.tensor_parallel
    if ranks == 1:
        return 0.0
    rate = LINK_SHARE * gpu.link_rate
    if layout.gpus > gpu.per_machine:
        rate = min(rate, NETWORK_SHARE * gpu.network_rate)
    machines = math.ceil(layout.gpus / gpu.per_machine)
    sent = count_padded_parameters(model) / tp * (ranks - 1) / ranks  # numbers of a ring
    reduce_bytes, gather_bytes = layout.gradient_bytes * sent, item_bytes(layout) * sent
    hidden = HIDDEN_SHARE * micro_seconds * (2 / 3 if layout.sharding in ("none", "zero1") else 1)
    latency = LATENCY * (2 + machines + min(layout.gpus, gpu.per_machine))
    if layout.sharding == "none":
        seconds = 2 * reduce_bytes / rate
        return max(0.0, seconds + latency - hidden) + UNHIDDEN_SHARE * seconds
    shards_weights = layout.sharding in ("zero3", "hybrid")
    reduces = 1 if layout.sharding == "zero1" else layout.micro_steps
    gathers = 2 * layout.micro_steps if shards_weights else 1
    seconds = (reduces * reduce_bytes + gathers * gather_bytes) / rate
    latencies = latency * (reduces + gathers) * (model.n_layer if shards_weights else 1)
    return max(0.0, seconds + latencies - hidden * reduces) + UNHIDDEN_SHARE * seconds


def _tensor_parallel_seconds(model: ModelConfig, gpu: Gpu, layout: Layout) -> float:
    """Two all-gathers and two reduce-scatters a layer, forward, and the same backward; nothing hides them."""
    tp = layout.tensor_parallel
    if tp == 1:
        return 0.0
    sent = layout.micro_batch * model.seq_len * model.d_model * item_bytes(layout) * (tp - 1) / tp
    return layout.micro_steps * model.n_layer * 8 * (sent / (LINK_SHARE * gpu.link_rate) + LATENCY)


def item_bytes(layout: Layout) -> int:
    """Of an activation or a gathered weight."""
    return 2 if layout.precision in ("bf16", "fp16") else 4
