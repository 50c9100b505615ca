"""Plan a training run without torch: memory, speed, hours, dollars and energy, by arithmetic.

Where the config leaves the layout open (sharding, recomputation, micro-batch), picks the fastest
one that fits. distributed/memory.py estimates the memory and plan/speed.py the time.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from megatoken.base.config.batch_ramp import BatchRamp
from megatoken.base.config.load import ResolvedConfig
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import Config
from megatoken.base.errors import ConfigError
from megatoken.base.system.atomic_write import read_object
from megatoken.base.system.gpus import Gpu
from megatoken.distributed.env import DistEnv
from megatoken.distributed.memory import Memory, estimate_memory, holds_low_precision
from megatoken.distributed.parallel_dims import (
    SIMPLEST_FIRST,
    ParallelDims,
    build_dims,
    check_dims,
    fit_batch,
)
from megatoken.model.flops import count_parameters, count_value_parameters, flops_per_token
from megatoken.plan.speed import ARCHITECTURES, Layout, StepTime, estimate_step

TOKENS_PER_PARAMETER = 20  # compute-optimal (Hoffmann et al. 2022, Chinchilla)
GPU_COUNTS = tuple(2**i for i in range(11))
# Range of measured divided by predicted tokens/s that contains four in five published runs
# (tests/plan/test_published.py).
SLOWEST = 0.77
FASTEST = 1.12
MEASURED_SPREAD = 0.9, 1.1  # the range if this GPU was measured
SIZES = ("n_layer", "n_head", "d_model", "vocab_size", "seq_len")  # of a model, in records
CHECKPOINTING = ("none", "gelu", "block")
VAL_COST = 1 / 3  # of evaluating a token, relative to training on it


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training run of one model on a number of GPUs.

    config: with a batch that divides among the GPUs. tokens: training tokens; 0 if unknown.
    prices: dollars per GPU-hour; none if unknown. speed_factor: measured divided by predicted
    tokens/s, 1 if not measured. spread: expected range of tokens/s, relative to
    `tokens_per_second`.
    """

    config: Config
    gpu: Gpu
    layout: Layout
    memory: Memory
    step: StepTime
    tokens: float
    prices: Sequence[float]
    speed_factor: float
    spread: tuple[float, float]

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def ramp(self) -> BatchRamp | None:
        return self.config.budget.ramp

    @property
    def fits(self) -> bool:
        return self.memory.usable_share(self.gpu.memory_bytes) <= 1

    @property
    def tokens_per_second(self) -> float:
        return self.step.tokens_per_second * self.speed_factor

    @property
    def mfu(self) -> float:
        """MFU as in metrics.jsonl: with full attention, relative to the precision's peak FLOP/s."""
        peak = self.gpu.peak_flops(self.layout.precision) * self.layout.gpus
        return self.tokens_per_second * flops_per_token(self.model, causal=False) / peak

    @cached_property
    def hours(self) -> float:
        evaluated = VAL_COST * count_evaluated_tokens(self.config, self.tokens)
        seconds = (self.tokens + evaluated) / self.tokens_per_second
        return (seconds + self._ramp_seconds() / self.speed_factor) / 3600

    def _ramp_seconds(self) -> float:
        """Return how many seconds the batch ramp adds, because its smaller batches run slower."""
        extra = 0.0
        for size, tokens in self.ramp.smaller(self.tokens) if self.ramp else ():
            layout = shrink_batch(self.layout, size // self.model.seq_len)
            rate = estimate_step(self.model, self.gpu, layout).tokens_per_second
            extra += tokens / rate - tokens / self.step.tokens_per_second
        return extra

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.layout.gpus

    @property
    def dollars(self) -> list[float]:
        """Cost at each of the prices."""
        return [self.gpu_hours * price for price in self.prices]

    @property
    def energy_kwh(self) -> float:
        """Energy of the GPUs at full power; the rest of the machines is not counted."""
        return self.gpu_hours * self.gpu.watts / 1000


def shrink_batch(layout: Layout, batch_seqs: int) -> Layout:
    """Return the layout for a smaller batch of `batch_seqs` sequences."""
    seqs = batch_seqs // (layout.gpus // layout.tensor_parallel)
    micro_batch = min(layout.micro_batch, seqs)
    return replace(layout, micro_batch=micro_batch, micro_steps=math.ceil(seqs / micro_batch))


def plan_run(
    config: Config,
    gpu: Gpu,
    gpus: int,
    *,
    tokens: float = 0.0,
    prices: Sequence[float] = (),
    measured: float = 0.0,
    modes: Sequence[str] = CHECKPOINTING,
) -> Plan:
    """Plan a run in the fastest layout that fits, or with the least memory if none fits.

    config: its model must have a vocabulary size. tokens: 0 for the config's budget. prices:
    dollars per GPU-hour; the GPU table's if empty. measured: measured divided by predicted
    tokens/s, 0 if unknown. modes: kinds of activation checkpointing to choose from if the config
    sets none. Raises ConfigError if the batch does not divide among the GPUs.
    """
    tokens = tokens or budget_tokens(config)
    dist_env = DistEnv(world_size=gpus, local_world_size=min(gpus, gpu.per_machine))
    config = fit_batch(config, dist_env, "--gpus")
    plans = [
        Plan(
            config=config,
            gpu=gpu,
            layout=layout,
            memory=memory,
            step=estimate_step(config.model, gpu, layout),
            tokens=tokens,
            prices=prices or [gpu.price] * bool(gpu.price),
            speed_factor=measured or 1.0,
            spread=MEASURED_SPREAD if measured else (SLOWEST, FASTEST),
        )
        for layout, memory in list_layouts(config, gpu, dist_env, modes)
    ]
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return min(plans, key=lambda plan: plan.memory.total_bytes)
    base = fitting[0].step.tokens_per_second
    # On ties within 1%, max returns the first, which is the simplest.
    return max(fitting, key=lambda plan: round(plan.step.tokens_per_second / base, 2))


def open_modes(resolved: ResolvedConfig) -> Sequence[str]:
    """Return the kinds of activation checkpointing to choose from: only the config's if set."""
    if resolved.origins["machine.activation_checkpointing"] == "default":
        return CHECKPOINTING
    return (resolved.config.machine.activation_checkpointing,)


def measured_factor(folder: Path, gpu: Gpu) -> tuple[float, int]:
    """Return the median ratio of measured to predicted tokens/s, and the number of measurements.

    Without any record of this GPU in the folder, returns (0, 0).
    """
    ratios = [measured / predicted for _, measured, predicted in list_measured(folder, gpu)]
    return median(ratios or [0.0]), len(ratios)


def list_measured(folder: Path, gpu: Gpu) -> Iterator[tuple[str, float, float]]:
    """Yield (record, measured tokens/s, predicted tokens/s) of the steps timed on this GPU.

    Reads the records of `python -m benchmarks.sustained` and `python -m benchmarks knob`: each
    micro-batch size, and of another setting the first value, which is the default.
    """
    for path in folder.glob("*.json"):
        record = read_object(path)
        with suppress(KeyError, TypeError, ZeroDivisionError):  # a record of something else
            if record["hardware"]["device"] != gpu.driver:
                continue
            result = record["answer"]
            model = replace(PRESETS[result["preset"]], **{name: result[name] for name in SIZES})
            rows = [row for row in result["rows"] if row.get("program", "megatoken") == "megatoken"]
            if result.get("knob", "micro_batch") != "micro_batch":
                del rows[1:]
            for row in rows:
                micro_batch = row.get("micro_batch") or result["batch_seqs"]
                layout = Layout(
                    micro_batch=micro_batch,
                    micro_steps=row["batch_tokens"] // micro_batch // model.seq_len,
                    precision=result["precision"],
                    program="compiled" if result["precision"] == "fp32" else "fused",
                )
                predicted = estimate_step(model, gpu, layout).tokens_per_second
                yield path.stem, row["tokens_per_second"]["median"], predicted


def list_layouts(
    config: Config, gpu: Gpu, dist_env: DistEnv, modes: Sequence[str]
) -> Iterator[tuple[Layout, Memory]]:
    """Yield the layouts that the config allows, each with the largest micro-batch that fits.

    A layout with more recomputation is left out unless it makes a larger micro-batch fit.
    """
    machine = config.machine
    tp = machine.tensor_parallel
    if machine.activation_checkpointing != "none":
        modes = (machine.activation_checkpointing,)
    if tp > 1:
        modes = [mode for mode in modes if mode != "gelu"]
    layouts_seen = set()
    for sharding in SIMPLEST_FIRST if machine.sharding == "auto" else (machine.sharding,):
        dims = build_dims(sharding, tp, dist_env)
        check_dims(dims, config.model)
        if dims in layouts_seen:  # one GPU: nothing to shard
            continue
        layouts_seen.add(dims)
        largest = 0  # micro-batch that fits with less recomputation
        for mode in modes:
            layout, memory = _fit_micro_batch(config, gpu, dims, mode)
            fits = memory.usable_share(gpu.memory_bytes) <= 1
            if largest and not (fits and layout.micro_batch > largest):
                continue
            largest = layout.micro_batch if fits else 0
            yield layout, memory


def _fit_micro_batch(
    config: Config, gpu: Gpu, dims: ParallelDims, checkpointing: str
) -> tuple[Layout, Memory]:
    """Return the layout with the largest micro-batch that fits, or with the smallest if none does.

    Return its memory as well.
    """
    machine = config.machine
    seqs = config.batch_seqs // dims.dp_size
    sizes = [size for size in range(seqs, 0, -1) if seqs % size == 0]
    if machine.micro_batch != "auto":
        sizes = [machine.micro_batch]
    precision: str = machine.precision
    if precision == "auto":
        precision = ARCHITECTURES[gpu.architecture]["precision"]
    for size in sizes:
        layout, memory = build_layout(
            config,
            gpu,
            dims,
            precision=precision,
            micro_batch=size,
            compiled=machine.compile != "off" and gpu.architecture != "pascal",  # no Triton
            attention=machine.attention,
            checkpointing=checkpointing,
        )
        if memory.usable_share(gpu.memory_bytes) <= 1:
            break
    return layout, memory


def build_layout(
    config: Config,
    gpu: Gpu,
    dims: ParallelDims,
    *,
    precision: str,
    micro_batch: int,
    compiled: bool,
    attention: str,
    checkpointing: str,
) -> tuple[Layout, Memory]:
    """Return the layout of a run, and its memory on each GPU."""
    machine, model = config.machine, config.model
    micro_steps = max(1, config.batch_seqs // dims.dp_size // micro_batch)
    uses_master_weights = holds_low_precision(machine, dims, gpu.compute_precision(precision))
    memory = estimate_memory(
        model,
        dims,
        precision=precision,
        micro_batch=micro_batch,
        accumulates=micro_steps > 1,
        checkpointing=checkpointing,
        loss_chunk=machine.loss_chunk,
        optimizer=config.optim.name,
        uses_master_weights=uses_master_weights,
    )
    is_explicit = attention == "explicit" or bool(model.dropout)
    if is_explicit:  # scores in fp32, and a copy in the precision of matmuls
        scores = model.n_layer * micro_batch * model.n_head * model.seq_len**2
        score_bytes = scores * (4 if precision == "fp32" else 6)
        memory = replace(memory, activations=memory.activations + score_bytes)
    if precision == "fp32" and machine.tf32:
        precision = gpu.compute_precision("tf32")
    layout = Layout(
        gpus=dims.dp_size * dims.tp_size,
        micro_batch=micro_batch,
        micro_steps=micro_steps,
        precision=precision,
        program="eager" if not compiled else "fused" if uses_master_weights else "compiled",
        attention="explicit" if is_explicit else "flash",
        checkpointing=checkpointing,
        sharding=dims.sharding,
        tensor_parallel=dims.tp_size,
        optimizer=config.optim.name,
        adamw="fused" if machine.adamw in ("auto", "native") else machine.adamw,
    )
    return layout, memory


def list_settings(config: Config, plan: Plan) -> list[str]:
    """Return the overrides with which `train` follows the plan on these GPUs.

    The micro-batch is left to `train`, which times several sizes.
    """
    layout = plan.layout
    settings = []
    if layout.gpus > 1 and layout.sharding != config.machine.sharding:
        settings.append(f"machine.sharding={layout.sharding}")
    if layout.checkpointing != config.machine.activation_checkpointing:
        settings.append(f"machine.activation_checkpointing={layout.checkpointing}")
    if plan.ramp and plan.ramp != config.budget.ramp:
        settings.append(f"budget.batch_start={plan.ramp.start}")
    return settings


def budget_tokens(config: Config) -> float:
    """Return the number of tokens of the config's budget; 0 if it is in epochs."""
    budget = config.budget
    return float(budget.tokens_before(budget.steps) if budget.steps else budget.tokens)


def count_evaluated_tokens(config: Config, tokens: float) -> float:
    """Count the tokens of all evaluations: before the first step, at intervals and at the end."""
    batch_tokens = config.budget.batch_tokens
    ramp = config.budget.ramp
    steps = max(1, ramp.count(tokens) if ramp else round(tokens / batch_tokens))
    every = config.evaluate.every.steps(
        batch_tokens=batch_tokens, epoch_tokens=0, total_steps=steps
    )
    return config.evaluate.tokens * (1 + math.ceil(steps / every) if every else 1)


def optimal_tokens(model: ModelConfig) -> float:
    """Return the compute-optimal number of training tokens: 20 per parameter.

    Value embeddings do not count as parameters.
    """
    parameters = count_parameters(model) - count_value_parameters(model, model.vocab_size)
    return TOKENS_PER_PARAMETER * parameters


def scale_gpus(config: Config, gpu: Gpu, counts: Sequence[int], **options: Any) -> list[Plan]:
    """Plan the same batch on each number of GPUs (strong scaling).

    Leaves out numbers of GPUs that do not divide the batch evenly. options: those of `plan_run`.
    """
    plans = []
    for count in counts:
        with suppress(ConfigError):
            plans.append(plan_run(config, gpu, count, **options))
    return plans


def plan_family(
    config: Config, gpu: Gpu, counts: Sequence[int], *, tokens: float, **options: Any
) -> dict[str, list[Plan]]:
    """Plan each preset of the model's family (gpt2, llama2, ...) on each number of GPUs.

    Returns plans by preset; all use the config's batch. tokens: training tokens, or 0 for each
    model's compute-optimal number. options: those of `plan_run`.
    """
    families = {}
    for name, member in PRESETS.items():
        is_related = name.partition("-")[0] == config.model.preset.partition("-")[0]
        if is_related and config.budget.batch_tokens % member.seq_len == 0:
            length = tokens or optimal_tokens(member)
            sized = replace(config, model=member)
            plans = scale_gpus(sized, gpu, counts, tokens=length, **options)
            if plans:
                families[name] = plans
    return families


def find_deadline(config: Config, gpu: Gpu, hours: float, **options: Any) -> Plan | None:
    """Return the plan with the fewest GPUs that fits and ends within `hours`, or None."""
    seqs = config.batch_seqs
    tp = config.machine.tensor_parallel
    counts = [count * tp for count in range(1, seqs + 1) if seqs % count == 0]
    for plan in scale_gpus(config, gpu, counts, **options):
        if plan.fits and plan.hours <= hours:
            return plan
    return None
