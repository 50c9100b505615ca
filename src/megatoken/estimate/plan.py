"""What a training run will take: fit, speed, hours, dollars, energy; by arithmetic, without torch.

The layout (sharding, what the backward recomputes, micro-batch) is the fastest that fits in memory, in so far as the
config leaves it open. distributed/memory.py has the memory, estimate/speed.py the time.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatoken.config.batch_ramp import BatchRamp
from megatoken.config.model_config import ModelConfig
from megatoken.config.presets import PRESETS
from megatoken.config.schema import Config, nearest_multiples
from megatoken.distributed.env import DistEnv
from megatoken.distributed.memory import USABLE, Memory, choose_dims, estimate_memory
from megatoken.distributed.parallel_dims import SIMPLEST_FIRST, ParallelDims, build_dims, check_dims
from megatoken.errors import ConfigError
from megatoken.estimate.speed import Layout, StepTime, estimate_step
from megatoken.model.flops import count_parameters, count_value_parameters, flops_per_token
from megatoken.model.memory import LOSS_CHUNK
from megatoken.system.atomic_write import read_object
from megatoken.system.gpus import Gpu

TOKENS_PER_PARAMETER = 20  # compute-optimal (Hoffmann et al. 2022, Chinchilla)
GPU_COUNTS = tuple(2**i for i in range(11))
# Of the predicted tokens/s: four in five published runs lie within (tests/estimate/test_published.py).
SLOWEST, FASTEST = 0.77, 1.12
MEASURED_SPREAD = 0.9, 1.1  # where this machine or a record was measured
CHECKPOINTING = ("none", "gelu", "block")
LOW_PRECISION = {"turing": "fp16", "volta": "fp16", "pascal": "fp32"}  # elsewhere bf16


@dataclass(frozen=True, kw_only=True)  # without slots, where a cached property has no place
class Plan:
    """One model on a number of GPUs. speed_factor: measured tokens/s over predicted ones, 1 where nothing was measured.

    evaluated_tokens: of all evaluations, which take a third of training's time. ramp: of the batch, from a size that
    divides among the GPUs. price: dollars of a GPU-hour, 0 where unknown. spread: lowest and highest tokens/s as shares
    of the expected ones.
    """

    model: ModelConfig
    gpu: Gpu
    layout: Layout
    memory: Memory
    step: StepTime
    tokens: float
    evaluated_tokens: float = 0.0
    ramp: BatchRamp | None = None
    price: float = 0.0
    speed_factor: float = 1.0
    spread: tuple[float, float] = (SLOWEST, FASTEST)

    @property
    def fits(self) -> bool:
        return self.memory.total_bytes <= USABLE * self.gpu.memory_bytes

    @property
    def tokens_per_second(self) -> float:
        return self.step.tokens_per_second * self.speed_factor

    @property
    def mfu(self) -> float:
        """By full attention, over the peak of the precision trained in, as metrics.jsonl has it."""
        peak = self.gpu.peak_flops(self.layout.precision) * self.layout.gpus
        return self.tokens_per_second * flops_per_token(self.model, causal=False) / peak

    @cached_property  # a batch that grows takes an estimate for each of its sizes
    def hours(self) -> float:
        seconds = (self.tokens + self.evaluated_tokens / 3) / self.tokens_per_second
        return (seconds + self._ramp_seconds / self.speed_factor) / 3600

    @property
    def _ramp_seconds(self) -> float:
        """Seconds by which the smaller first batches take longer than as many tokens in full ones."""
        longer = 0.0
        for size, trained in self.ramp.smaller(self.tokens) if self.ramp else ():
            rate = estimate_step(
                self.model, self.gpu, shrink_batch(self.layout, size // self.model.seq_len)
            )
            longer += trained / rate.tokens_per_second - trained / self.step.tokens_per_second
        return longer

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.layout.gpus

    @property
    def dollars(self) -> float | None:
        return self.gpu_hours * self.price if self.price else None

    @property
    def energy_kwh(self) -> float:
        """Of the GPUs at their full power, without the machines around them."""
        return self.gpu_hours * self.gpu.watts / 1000


def shrink_batch(layout: Layout, batch_seqs: int) -> Layout:
    """The same layout with a smaller batch, of so many sequences."""
    seqs = batch_seqs // (layout.gpus // layout.tensor_parallel)
    micro_batch = min(layout.micro_batch, seqs)
    return replace(layout, micro_batch=micro_batch, micro_steps=math.ceil(seqs / micro_batch))


def plan_run(
    config: Config,
    model: ModelConfig,
    gpu: Gpu,
    gpus: int,
    *,
    tokens: float = 0.0,
    price: float = 0.0,
    measured: float = 0.0,
    modes: Sequence[str] = CHECKPOINTING,
) -> Plan:
    """The fastest layout that fits; of those that do not, the one that needs the least memory.

    tokens: 0 for the config's own budget. price: dollars of a GPU-hour, 0 for the table's. measured: tokens/s measured
    over planned ones, 0 where nothing was measured. modes: of recomputation, from the least, to choose from where the
    config has none. Raises ConfigError when the batch does not divide among the GPUs, or the length is given in epochs.
    """
    tokens = tokens or budget_tokens(config)
    others: dict[str, Any] = {
        "tokens": tokens,
        "evaluated_tokens": count_evaluated_tokens(config, tokens),
    }
    others["price"] = price or gpu.price
    if measured:
        others |= {"speed_factor": measured, "spread": MEASURED_SPREAD}
    if budget_ramp := config.budget.ramp:
        whole = (
            gpus // config.machine.tensor_parallel * model.seq_len
        )  # tokens of a sequence on each replica
        others["ramp"] = replace(budget_ramp, start=math.ceil(budget_ramp.start / whole) * whole)
    plans = [
        Plan(
            model=model,
            gpu=gpu,
            layout=layout,
            memory=memory,
            step=estimate_step(model, gpu, layout),
            **others,
        )
        for layout, memory in list_layouts(config, model, gpu, gpus, modes)
    ]
    fitting = [plan for plan in plans if plan.fits]
    # The first of equals is the simplest; a more complicated layout has to be worth it.
    if fitting:
        return max(
            fitting,
            key=lambda plan: round(
                plan.step.tokens_per_second / fitting[0].step.tokens_per_second, 2
            ),
        )
    return min(plans, key=lambda plan: plan.memory.total_bytes)


def measured_factor(folder: Path, gpu: Gpu) -> tuple[float, int]:
    """(measured over planned tokens/s, number of measurements) of `megatoken bench batch` records of this GPU in a
    folder; their median, 0 where there is none. Raises ConfigError for a record whose numbers are none."""
    ratios = list[float]()
    for path in sorted(folder.glob("*.json")):
        record = read_object(path)
        answer, hardware = record.get("answer"), record.get("hardware")
        if not (
            isinstance(answer, dict)
            and isinstance(hardware, dict)
            and hardware.get("device") == gpu.driver
        ):
            continue
        if "preset" not in answer or "seq_len" not in answer:
            continue
        try:
            model = replace(PRESETS[answer["preset"]], seq_len=answer["seq_len"])
            for row in answer["rows"]:
                size, steps = (
                    row["micro_batch"],
                    row["batch_tokens"] // (row["micro_batch"] * model.seq_len),
                )
                layout = Layout(micro_batch=size, micro_steps=steps, precision=answer["precision"])
                rate = row["tokens_per_second"]["median"]
                ratios.append(rate / estimate_step(model, gpu, layout).tokens_per_second)
        except (KeyError, TypeError, ZeroDivisionError) as error:
            what = f"not a record of `megatoken bench batch`: {type(error).__name__} {error}"
            raise ConfigError(what, str(path), "remove it, or choose another folder") from None
    if not ratios:
        return 0.0, 0
    ordered, middle = sorted(ratios), len(ratios) // 2
    return (ordered[middle] + ordered[~middle]) / 2, len(ratios)


def list_layouts(
    config: Config, model: ModelConfig, gpu: Gpu, gpus: int, modes: Sequence[str] = CHECKPOINTING
) -> Iterator[tuple[Layout, Memory]]:
    """Each sharding and recomputation that the config leaves open, with the largest micro-batch that fits; more
    recomputation only where it makes room for a larger one."""
    machine, tp = config.machine, config.machine.tensor_parallel
    precision: str = machine.precision
    if precision == "auto":
        precision = LOW_PRECISION.get(gpu.architecture, "bf16")
    dist_env = DistEnv(world_size=gpus, local_world_size=min(gpus, gpu.per_machine))
    seen = set()
    for sharding in SIMPLEST_FIRST if machine.sharding == "auto" else (machine.sharding,):
        dims = build_dims(sharding, tp, dist_env)
        check_dims(dims, model)
        batch_seqs = config.batch_seqs // dims.dp_size
        if config.batch_seqs % dims.dp_size or not batch_seqs:
            among = f"{dims.dp_size:,} replicas of {tp} GPUs" if tp > 1 else f"{gpus:,} GPUs"
            what = f"a batch of {config.batch_seqs:,} sequences does not divide among {among}"
            near = ", ".join(
                f"{size * model.seq_len:,}"
                for size in nearest_multiples(config.batch_seqs, dims.dp_size)
            )
            raise ConfigError(what, "--gpus", f"nearest budget.batch_tokens: {near}")
        if dims in seen:
            continue  # one GPU: nothing to shard
        seen.add(dims)
        modes = (
            modes
            if machine.activation_checkpointing == "none"
            else (machine.activation_checkpointing,)
        )
        largest = 0  # micro-batch that fits with less recomputation
        for mode in modes if tp == 1 else [mode for mode in modes if mode != "gelu"]:
            sizes = [size for size in range(batch_seqs, 0, -1) if batch_seqs % size == 0]
            if machine.micro_batch != "auto":
                sizes = [machine.micro_batch]
            for size in sizes:
                layout, memory = build_layout(
                    config,
                    model,
                    gpu,
                    dims,
                    precision=precision,
                    micro_batch=size,
                    micro_steps=max(1, batch_seqs // size),
                    compiled=machine.compile != "off"
                    and gpu.architecture != "pascal",  # too old for Triton
                    attention=machine.attention,
                    checkpointing=mode,
                )
                if fits := memory.total_bytes <= USABLE * gpu.memory_bytes:
                    break
            if largest and not (fits and size > largest):
                continue
            largest = size if fits else 0
            yield layout, memory


def build_layout(
    config: Config,
    model: ModelConfig,
    gpu: Gpu,
    dims: ParallelDims,
    *,
    precision: str,
    micro_batch: int,
    micro_steps: int,
    compiled: bool,
    attention: str,
    checkpointing: str,
) -> tuple[Layout, Memory]:
    """The layout of a run on GPUs that may not be here, and its memory on each."""
    machine, optimizer = config.machine, config.optim.name
    memory = estimate_memory(
        model,
        dims,
        precision=precision,
        micro_batch=micro_batch,
        accumulates=micro_steps > 1,
        checkpointing=checkpointing,
        loss_chunk=LOSS_CHUNK["cuda"] if machine.loss_chunk == "auto" else machine.loss_chunk,
        optimizer=optimizer,
    )
    layout = Layout(
        gpus=dims.dp_size * dims.tp_size,
        micro_batch=micro_batch,
        micro_steps=micro_steps,
        precision=gpu.compute_precision("tf32")
        if precision == "fp32" and machine.tf32
        else precision,
        program="compiled" if compiled else "eager",
        attention="explicit" if attention == "explicit" or model.dropout else "flash",
        checkpointing=checkpointing,
        sharding=dims.sharding,
        tensor_parallel=dims.tp_size,
        optimizer=optimizer,
        adamw="fused" if machine.adamw in ("auto", "native") else machine.adamw,
    )
    return layout, memory


def list_settings(config: Config, plan: Plan) -> list[str]:
    """Overrides of the plan that `train` would not choose itself on these GPUs."""
    layout, machine = plan.layout, config.machine
    dist_env = DistEnv(
        world_size=layout.gpus, local_world_size=min(layout.gpus, plan.gpu.per_machine)
    )
    precision = "fp32" if layout.precision == "tf32" else layout.precision
    dims = choose_dims(
        machine, plan.model, precision, plan.gpu.memory_bytes, dist_env, config.optim.name
    )
    settings = [f"machine.sharding={layout.sharding}"] if layout.sharding != dims.sharding else []
    if layout.checkpointing != machine.activation_checkpointing:
        settings.append(f"machine.activation_checkpointing={layout.checkpointing}")
    if (
        plan.ramp and plan.ramp != config.budget.ramp
    ):  # whose first batch does not divide among these GPUs
        settings.append(f"budget.batch_start={plan.ramp.start}")
    return settings


def budget_tokens(config: Config) -> float:
    """Tokens of the config's budget. Raises ConfigError for a length in epochs, which needs the dataset."""
    if config.budget.epochs:
        raise ConfigError(
            "the recipe's length is in epochs",
            "--tokens",
            "give the tokens: --tokens 10e9 or chinchilla",
        )
    budget = config.budget
    if budget.steps:
        return float(
            budget.ramp.before(budget.steps) if budget.ramp else budget.steps * budget.batch_tokens
        )
    return float(budget.tokens)


def count_evaluated_tokens(config: Config, tokens: float) -> float:
    """Tokens of all evaluations of the loss: before the first step, as often as asked, and at the end."""
    evaluate, batch_tokens, ramp = config.evaluate, config.budget.batch_tokens, config.budget.ramp
    steps = max(1, ramp.count(tokens) if ramp else round(tokens / batch_tokens))
    every = evaluate.every.steps(batch_tokens=batch_tokens, epoch_tokens=0, total_steps=steps)
    return evaluate.tokens * (1 + math.ceil(steps / every) if every else 1)


def optimal_tokens(model: ModelConfig) -> float:
    """Compute-optimal training tokens: 20 a parameter, without value embeddings, which are looked up."""
    return TOKENS_PER_PARAMETER * (
        count_parameters(model) - count_value_parameters(model, model.vocab_size)
    )


def scale_gpus(
    config: Config, model: ModelConfig, gpu: Gpu, counts: Sequence[int], **options: Any
) -> list[Plan]:
    """Strong scaling: the same batch on each number of GPUs among which it divides."""
    plans = []
    for count in counts:
        with suppress(ConfigError):
            plans.append(plan_run(config, model, gpu, count, **options))
    return plans


def plan_family(
    config: Config, preset: str, gpu: Gpu, counts: Sequence[int], **options: Any
) -> dict[str, list[Plan]]:
    """Every preset of a family (gpt2, gpt3, llama2, ...) at its compute-optimal length, with the config's full batch,
    on the numbers of GPUs among which that divides."""
    family, plans = preset.partition("-")[0], {}
    for name, model in PRESETS.items():
        if name.partition("-")[0] == family and config.budget.batch_tokens % model.seq_len == 0:
            sized = replace(config, model=model)
            plans[name] = scale_gpus(
                sized, model, gpu, counts, **options | {"tokens": optimal_tokens(model)}
            )
    return {name: scaled for name, scaled in plans.items() if scaled}


def find_deadline(
    config: Config, model: ModelConfig, gpu: Gpu, hours: float, **options: Any
) -> Plan | None:
    """The fewest GPUs that fit and end within `hours`; None if no number does."""
    seqs, tp = config.batch_seqs, config.machine.tensor_parallel
    counts = [count * tp for count in range(1, seqs + 1) if seqs % count == 0]
    plans = scale_gpus(config, model, gpu, counts, **options)
    return next((plan for plan in plans if plan.fits and plan.hours <= hours), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The model and length with the lowest loss for some FLOPs. loss: nats, by the fitted law."""

    parameters: float
    tokens: float
    loss: float
    flops: float
    law: str
    nearest: str  # preset
    fitting: str  # the nearest preset that fits on these GPUs, whose speed was taken


# Approach 3 of Hoffmann et al. 2022: loss = E + A / parameters^ALPHA + B / tokens^BETA.
E, A, B, ALPHA, BETA = 1.69, 406.4, 410.7, 0.34, 0.28
SMALLEST_FITTED = 44e6  # parameters of their smallest model (table A9)


def fitted_loss(parameters: float, tokens: float) -> float:
    """Loss in nats of a model trained on tokens of MassiveText, by the law of Hoffmann et al. 2022, approach 3."""
    return E + A / math.pow(parameters, ALPHA) + B / math.pow(tokens, BETA)


def split_compute(flops: float, law: str) -> tuple[float, float]:
    """(parameters, tokens) that are optimal for `flops`, which are 6 a parameter and token.

    law: `chinchilla`, 20 tokens a parameter, or `fitted`, the minimum of `fitted_loss`.
    """
    if law == "chinchilla":
        parameters = math.sqrt(flops / 6 / TOKENS_PER_PARAMETER)
    else:
        total = ALPHA + BETA
        parameters = math.pow(ALPHA * A / (BETA * B), 1 / total) * math.pow(flops / 6, BETA / total)
    return parameters, flops / 6 / parameters


def spend_budget(
    config: Config,
    dollars: float,
    gpu: Gpu,
    gpus: int,
    price: float,
    law: str,
    modes: Sequence[str] = CHECKPOINTING,
) -> Optimum:
    """The compute-optimal model and length for `dollars`, at the speed of the nearest GPT-3 that fits.

    Raises ConfigError when no price is known, none of them fits, or the model is smaller than those of the law.
    """
    price = price or gpu.price
    if not price:
        raise ConfigError(
            f"no price of {gpu.name} is known",
            "--budget",
            "give dollars of a GPU-hour: --price 1.99",
        )
    seconds = dollars / price * 3600
    family = {name: model for name, model in PRESETS.items() if name.startswith("gpt3-")}
    plans = {name: plan_preset(config, model, gpu, gpus, modes) for name, model in family.items()}
    if not any(plan.fits for plan in plans.values()):
        raise ConfigError(
            f"no GPT-3 fits on {gpus:,} x {gpu.name}", "--budget", "give more or larger --gpus"
        )
    flops = 0.4 * seconds * gpu.peak_flops("bf16")
    for _ in range(4):  # the speed depends on the size that it decides
        parameters, _ = split_compute(flops, law)
        ratios = {name: count_parameters(model) / parameters for name, model in family.items()}
        nearest = sorted(ratios, key=lambda name: max(ratios[name], 1 / ratios[name]))
        fitting = next(name for name in nearest if plans[name].fits)
        flops = (
            6
            * count_parameters(family[fitting])
            * plans[fitting].tokens_per_second
            / gpus
            * seconds
        )
    parameters, tokens = split_compute(flops, law)
    if parameters < SMALLEST_FITTED:
        exponent = (
            0.5 if law == "chinchilla" else BETA / (ALPHA + BETA)
        )  # of compute, in parameters
        least = dollars * math.pow(SMALLEST_FITTED / parameters, 1 / exponent)
        what = f"${dollars:g} is compute-optimal for {parameters:,.0f} parameters, fewer than the law holds for"
        fix = f"give ${math.ceil(100 * least) / 100:.2f} or more, for {SMALLEST_FITTED:,.0f} parameters and up"
        raise ConfigError(what, "--budget", fix)
    return Optimum(
        parameters=parameters,
        tokens=tokens,
        loss=fitted_loss(parameters, tokens),
        flops=flops,
        law=law,
        nearest=nearest[0],
        fitting=fitting,
    )


def plan_preset(
    config: Config, model: ModelConfig, gpu: Gpu, gpus: int, modes: Sequence[str]
) -> Plan:
    """A plan of another model with about the config's batch, made to divide among the GPUs."""
    tokens_a_step = (
        max(config.budget.batch_tokens // model.seq_len, gpus) // gpus * gpus * model.seq_len
    )
    budget = replace(config.budget, batch_tokens=tokens_a_step)
    sized = replace(config, model=replace(config.model, seq_len=model.seq_len), budget=budget)
    return plan_run(sized, model, gpu, gpus, tokens=optimal_tokens(model), modes=modes)
