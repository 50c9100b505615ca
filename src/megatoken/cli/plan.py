"""The `megatoken plan` command: what a run will take, in words, tables and a picture. No torch unless it calibrates."""

import argparse
import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatoken.config.fields import parse_time, parse_value
from megatoken.config.load import PREPARE, ResolvedConfig, list_recipes, resolve, resolve_preset
from megatoken.config.model_config import ModelConfig
from megatoken.config.presets import GPT2_VOCABULARY, PRESETS
from megatoken.config.schema import FIELDS, Config
from megatoken.console import Console, format_duration, format_quantity
from megatoken.distributed.memory import USABLE
from megatoken.errors import ConfigError
from megatoken.estimate.plan import (
    CHECKPOINTING,
    GPU_COUNTS,
    MEASURED_SPREAD,
    Optimum,
    Plan,
    budget_tokens,
    find_deadline,
    list_settings,
    measured_factor,
    optimal_tokens,
    plan_family,
    plan_run,
    scale_gpus,
    spend_budget,
)
from megatoken.model.flops import count_parameters, flops_per_token
from megatoken.system.atomic_write import read_object
from megatoken.system.gpus import parse_gpus

MOST_DOLLARS = 1e12
PAIRS = ("dpo", "reward")  # objectives that train on preferences
CALIBRATE_SECONDS = 30.0


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """Plan a recipe or preset; print it, and return what --json prints."""
    resolved, model, is_recipe = resolve_recipe_or_preset(options.recipe, options.overrides)
    config = resolved.config
    price, budget = read_dollars(options.price, "--price"), read_dollars(options.budget, "--budget")
    hours = read_hours(options.deadline)
    tokens = read_tokens(options.tokens, model, is_recipe)
    if is_recipe and options.tokens is None and config.budget.epochs:
        tokens = config.budget.epochs * count_epoch_tokens(config, model.seq_len)
    tokens = tokens or budget_tokens(config)
    if config.objective.name not in ("pretrain", "sft"):
        left_out = (
            "the second answer of each pair"
            if config.objective.name in PAIRS
            else "sampling of answers"
        )
        options.console.print(
            f"note: {left_out}, the reference and whole copies of sharded weights are not counted"
        )
    if options.calibrate:
        return plan_here(options, config, model, tokens, price)
    if options.gpus is None:
        fix = "give a number and a name, as --gpus 8xA100-40GB, or --calibrate for this machine"
        raise ConfigError("no GPUs given", "megatoken plan", fix)
    gpus, gpu = parse_gpus(options.gpus)
    if options.records is not None and not options.records.is_dir():
        raise ConfigError(
            "no such folder",
            str(options.records),
            "give a folder of records of `megatoken bench batch`",
        )
    measured, n_measured = measured_factor(options.records or Path("records"), gpu)
    is_open = resolved.origins["machine.activation_checkpointing"] == "default"
    modes = CHECKPOINTING if is_open else (config.machine.activation_checkpointing,)
    known: dict[str, Any] = {"tokens": tokens, "price": price, "modes": modes, "measured": measured}
    chosen = plan_run(config, model, gpu, gpus, **known)
    met = find_deadline(config, model, gpu, hours, **known) if hours else None
    full = dataclasses.replace(
        config, budget=dataclasses.replace(config.budget, batch_start=0, batch_ramp=0)
    )
    optimum = (
        spend_budget(full, budget, gpu, gpus, price, options.law or "chinchilla", modes)
        if budget
        else None
    )
    counts = sorted({*GPU_COUNTS, gpus})
    divided = scale_gpus(full, model, gpu, counts, **known)
    scaled = [each for each in divided if each.fits]
    family = plan_family(full, model.preset, gpu, [gpus], **known) if model.preset else {}
    settings = list_settings(config, chosen) if chosen.fits else []
    answer = plan_answer(chosen) | {
        "scaling": [plan_answer(each) for each in scaled],
        "family": {name: plan_answer(each) for name, (each,) in family.items()},
        "settings": settings,
    }
    if options.plot:
        from megatoken.estimate.plan_plot import draw_plan

        drawn = plan_family(full, model.preset, gpu, GPU_COUNTS, **known) if model.preset else {}
        answer["picture"] = str(
            draw_plan(f"{options.recipe} on {gpu.name}", scaled, drawn, options.plot)
        )
    console: Console = options.console
    rows = [describe_model(options.recipe, model), *describe_plan(chosen)]
    if settings:
        rows.append(("settings", f"train with {' '.join(settings)}"))
    if not chosen.fits:
        smallest = find_deadline(config, model, gpu, math.inf, **known)
        fewest = (
            smallest.layout.gpus if smallest and smallest.layout.gpus <= GPU_COUNTS[-1] else None
        )
        answer["fewest_gpus"] = fewest
        fitting = f"{fewest:,} x {gpu.name}" if fewest else f"no number up to {GPU_COUNTS[-1]:,}"
        rows.append(("fits on", f"{fitting}, of those among which the batch divides"))
    console.table(rows)
    if n_measured:
        console.print(
            f"{n_measured} measurements of this GPU: {measured:.2f} times the speed of the formula"
        )
    if scaled:
        size = f"{config.budget.batch_tokens:,} tokens{', from the first step on,' if chosen.ramp else ''}"
        console.print(f"\nthe same batch of {size} on other numbers of {gpu.name}")
        alone = scaled[0].tokens_per_second / scaled[0].layout.gpus
        speeds = [
            ((f"{p.layout.gpus:,}", f"{p.tokens_per_second / alone:,.1f}"), p) for p in divided
        ]
        print_costs(console, ("GPUs", "speed-up"), speeds)
        if undivided := set(counts) - {each.layout.gpus for each in divided}:
            numbers = ", ".join(f"{count:,}" for count in sorted(undivided))
            console.print(
                f"left out: {numbers}, among which {config.batch_seqs:,} sequences do not divide"
            )
    if family:
        console.print(f"\nthe family at 20 tokens a parameter on {gpus} x {gpu.name}")
        print_costs(
            console,
            ("model", "tokens"),
            [((n, format_quantity(p.tokens)), p) for n, (p,) in family.items()],
        )
    if hours:
        console.print(f"\ndeadline  {describe_deadline(met, options.deadline, gpu.name)}")
        answer["deadline"] = plan_answer(met) if met else None
    if optimum:
        console.print(f"\nbudget    {describe_optimum(optimum, budget)}")
        answer["budget"] = dataclasses.asdict(optimum)
    if options.plot:
        console.print(f"\npicture   {answer['picture']}")
    return answer


def plan_here(
    options: argparse.Namespace, config: Config, model: ModelConfig, tokens: float, price: float
) -> dict[str, Any]:
    """Measure this machine and plan for it; what --json prints. price: dollars of an hour of it, 0 where unknown."""
    from megatoken.estimate.calibrate import calibrate, count_run_bytes

    console: Console = options.console
    console.print(f"measuring the training step for {CALIBRATE_SECONDS:.0f} s")
    device, measured = calibrate(config, model, CALIBRATE_SECONDS)
    rate = config.budget.batch_tokens / measured.step_seconds(model.n_layer, config.batch_seqs)
    hours = measured.run_seconds(config, model, tokens) / 3600
    memory_bytes, free_bytes = (
        count_run_bytes(measured, config, model, device),
        device.memory_bytes(1),
    )
    fits = not free_bytes or memory_bytes <= free_bytes
    mfu = (
        rate * flops_per_token(model, causal=False) / device.peak_flops
        if device.peak_flops
        else None
    )
    answer = {
        "fits": fits,
        "memory_bytes": memory_bytes,
        "tokens_per_second": rate,
        "mfu": mfu,
        "hours": hours if fits else None,
        "dollars": hours * price if fits and price else None,
        "energy_kwh": None,
        "tokens": tokens,
        "device": device.name,
        "precision": device.precision,
        "micro_batch": measured.micro_batch,
    }
    layers = f"models of {' and '.join(map(str, measured.layers))} layers"
    free = (
        f"{format_quantity(free_bytes, 'B')} free now" if free_bytes else "unknown how much is free"
    )
    needed = f"{format_quantity(memory_bytes, 'B')} with micro-batches of {measured.micro_batch}"
    rows = [
        describe_model(options.recipe, model),
        (
            "on",
            f"{device.name}, {device.precision}, by {layers} with micro-batches of {measured.timed_seqs}",
        ),
        ("memory", f"{'fits' if fits else 'does not fit'}: {needed}, {free}"),
        ("speed", describe_speed(rate, MEASURED_SPREAD, mfu)),
        ("length", describe_length(tokens, model)),
    ]
    if fits:
        cost = f", ${answer['dollars']:,.2f}" if answer["dollars"] else ""
        rows.append(("time", describe_time(hours, MEASURED_SPREAD) + cost))
    console.table(rows)
    return answer


def resolve_recipe_or_preset(
    name: str, overrides: Sequence[str]
) -> tuple[ResolvedConfig, ModelConfig, bool]:
    """A recipe's config, else a preset's, with origins; its model with a vocabulary; whether it is a recipe."""
    is_recipe = name in list_recipes() or name not in PRESETS
    resolved = (
        resolve(name, overrides, tuple(PRESETS)) if is_recipe else resolve_preset(name, overrides)
    )
    if resolved.config.model.init:
        from megatoken.train.initial_state import take_architecture

        resolved = take_architecture(resolved, Path(name))
    return resolved, resolved.config.model.resolve(find_vocabulary(resolved.config)[0]), is_recipe


def count_epoch_tokens(config: Config, seq_len: int) -> int:
    """Tokens that one pass over the dataset trains on; 0 where it is not on this machine."""
    manifest = read_object(Path(config.data.path) / "manifest.json")
    counts, source = manifest.get("tokens"), manifest.get("source")
    if not isinstance(counts, dict) or not isinstance(counts.get("train"), int):
        return 0
    is_rows = (
        isinstance(source, dict) and source.get("kind", "text") != "text"
    )  # of one token more than the context
    return int(counts["train"] // (seq_len + is_rows) * seq_len)


def find_vocabulary(config: Config) -> tuple[int, str]:
    """Ids of a model without model.vocab_size, and whose they are: the dataset's where it is on this machine, else the
    preset's, those of the tokenizer that the recipe's data are prepared with, or GPT-2's."""
    tokenizer = read_object(Path(config.data.path) / "manifest.json").get("tokenizer")
    size = tokenizer.get("vocab_size") if isinstance(tokenizer, dict) else None
    if isinstance(size, int) and size > 0:
        return size, f"that of {config.data.path}"
    if config.model.preset:
        return PRESETS[config.model.preset].vocab_size, "the preset's assumed"
    if trained := re.search(r"--tokenizer (bpe:(\d+))", PREPARE.get(config.data.path, "")):
        return int(trained[2]), f"{trained[1]} assumed"
    return GPT2_VOCABULARY, "GPT-2's assumed"


def read_dollars(value: float | None, option: str) -> float:
    """Dollars above 0; 0 where the option is left out. Raises ConfigError."""
    if value is None:
        return 0.0
    if not 0 < value <= MOST_DOLLARS:
        raise ConfigError(f"{option} is {value:g}", option, "give US dollars above 0: 1.99")
    return value


def read_hours(text: str | None) -> float:
    """Hours of a deadline such as 24h or 2d12h; 0 where it is left out. Raises ConfigError."""
    if text is None:
        return 0.0
    try:
        hours = parse_time(text) / 3600
        if hours and not text.strip()[-1].isdigit():
            return hours
        what = f"a deadline of {text.strip() or 'nothing'}{' without a unit' if hours else ''}"
    except ValueError as wrong:
        what = str(wrong)
    raise ConfigError(what, "--deadline", "write it as 90m, 24h or 2d12h")


def read_tokens(text: str | None, model: ModelConfig, is_recipe: bool) -> float:
    """Training tokens; 0 for the recipe's own budget, which a preset does not have. Raises ConfigError."""
    if text == "chinchilla" or (text is None and not is_recipe):
        return optimal_tokens(model)
    if text is None:
        return 0.0
    what = "no tokens to train on"
    try:
        if tokens := parse_value(FIELDS["budget.tokens"], text):
            return float(tokens)
    except ValueError as wrong:
        what = str(wrong)
    raise ConfigError(what, "--tokens", "give a number such as 10e9 or 10B, or chinchilla")


def describe_model(name: str, model: ModelConfig) -> tuple[str, str]:
    """The first row of a table."""
    return "model", f"{name}: {count_parameters(model):,} parameters, context {model.seq_len:,}"


def describe_plan(plan: Plan) -> list[tuple[str, str]]:
    """Rows of a table: fit, layout, speed, length; where it fits time, price, energy."""
    gpu, layout, memory, step = plan.gpu, plan.layout, plan.memory, plan.step
    usable = USABLE * gpu.memory_bytes
    parts = sorted(dataclasses.asdict(memory).items(), key=lambda part: -part[1])
    share = f"{memory.total_bytes / usable:.0%} of {format_quantity(usable, 'B')} usable"
    times = {
        name: seconds for name, seconds in dataclasses.asdict(step).items() if name != "tokens"
    }
    where = sorted(times.items(), key=lambda part: -part[1])
    shards = f"sharded {layout.sharding}" if layout.sharding != "none" else "not sharded"
    shards += f", tensor parallel {layout.tensor_parallel}" if layout.tensor_parallel > 1 else ""
    recomputed = {"none": "nothing", "gelu": "GELU outputs", "block": "blocks"}[
        layout.checkpointing
    ]
    size = f"{layout.micro_steps} x {layout.micro_batch} sequences a GPU and step"
    fit = f"{'fits' if plan.fits else 'does not fit'}: {format_quantity(memory.total_bytes, 'B')}, {share}"
    rows = [
        ("on", f"{layout.gpus} x {gpu.name}, {layout.precision}, {layout.program}"),
        ("memory", fit),
        (
            "",
            ", ".join(
                f"{name.replace('_', ' ')} {format_quantity(part, 'B')}"
                for name, part in parts
                if part
            ),
        ),
        ("layout", f"{shards}, {size}, recomputed: {recomputed}"),
        ("speed", describe_speed(plan.tokens_per_second, plan.spread, plan.mfu)),
        (
            "",
            ", ".join(f"{name} {seconds / step.seconds:.0%}" for name, seconds in where if seconds),
        ),
        ("length", describe_length(plan.tokens, plan.model) + describe_ramp(plan)),
    ]
    if not plan.fits:
        return rows
    unit, unit_size = time_unit(plan.gpu_hours)
    energy = (
        f"{plan.energy_kwh:,.1f} kWh"
        if plan.energy_kwh >= 1
        else f"{1000 * plan.energy_kwh:,.1f} Wh"
    )
    return [
        *rows,
        (
            "time",
            f"{describe_time(plan.hours, plan.spread)}, {plan.gpu_hours * unit_size:,.1f} GPU-{unit}",
        ),
        ("price", describe_price(plan)),
        ("energy", f"{energy}, estimated: the GPUs alone, at their full {gpu.watts:.0f} W"),
    ]


def describe_speed(rate: float, spread: tuple[float, float], mfu: float | None) -> str:
    """The tokens/s that are expected, their range, MFU where it is known."""
    low, high = (share * rate for share in spread)
    return f"{rate:,.0f} tokens/s ({low:,.0f} to {high:,.0f})" + (f", MFU {mfu:.1%}" if mfu else "")


def describe_length(tokens: float, model: ModelConfig) -> str:
    """The length of a run beside the best one for its model."""
    return f"{format_quantity(tokens)} tokens (compute-optimal: {format_quantity(optimal_tokens(model))})"


def describe_time(hours: float, spread: tuple[float, float]) -> str:
    """The time that is expected, and its range."""
    span = " to ".join(format_duration(3600 * hours / share) for share in reversed(spread))
    return f"{format_duration(3600 * hours)} ({span})"


def describe_ramp(plan: Plan) -> str:
    """The growth of the batch, in words; nothing where it has one size."""
    if not plan.ramp:
        return ""
    return f", batches of {plan.ramp.start:,} to {plan.ramp.full:,} over the first {format_quantity(plan.ramp.length)}"


def describe_price(plan: Plan) -> str:
    """Dollars of a run, and whose price it is."""
    if plan.dollars is None:
        return f"unknown: no price of {plan.gpu.name} here; give dollars of a GPU-hour by --price"
    source = plan.gpu.price_source if plan.price == plan.gpu.price else "--price"
    sum_of_dollars = f"${plan.dollars:,.2f}" if plan.dollars >= 0.01 else "less than $0.01"
    return f"{sum_of_dollars} at ${plan.price:.2f} a GPU-hour ({source})"


def time_unit(hours: float) -> tuple[str, float]:
    """The unit in which a time has digits, and how many of it are an hour."""
    return (
        ("hours", 1.0)
        if hours >= 0.1
        else ("minutes", 60.0)
        if hours >= 0.1 / 60
        else ("seconds", 3600.0)
    )


def with_digits(number: float, decimals: int) -> str:
    """A number with so many decimals, and with two digits where that would be none."""
    return f"{number:,.{decimals}f}" if number >= 10**-decimals else f"{number:.2g}"


def print_costs(
    console: Console, names: tuple[str, str], rows: Sequence[tuple[tuple[str, str], Plan]]
) -> None:
    """Print two cells each, then speed, time, price and layout, of times all in the unit of the middle one."""
    plans = [plan for _, plan in rows if plan.fits]
    middle = len(plans) // 2
    unit, size = time_unit(sorted([plan.hours for plan in plans] or [0])[middle])
    gpu_unit, gpu_size = time_unit(sorted([plan.gpu_hours for plan in plans] or [0])[middle])
    table = [[*names, "tokens/s", "MFU", unit, f"GPU-{gpu_unit}", "dollars", "layout"]]
    for cells, plan in rows:
        layout = plan.layout
        how = ", ".join(word for word in (layout.sharding, layout.checkpointing) if word != "none")
        dollars = "" if plan.dollars is None else with_digits(plan.dollars, 0)
        times = [with_digits(plan.hours * size, 2), with_digits(plan.gpu_hours * gpu_size, 1)]
        costs = [f"{plan.tokens_per_second:,.0f}", f"{plan.mfu:.1%}", *times, dollars]
        layout_cell = f"{layout.micro_steps} x {layout.micro_batch}{', ' + how if how else ''}"
        excess = f"does not fit: {format_quantity(plan.memory.total_bytes, 'B')}"
        table.append([*cells, *costs, layout_cell] if plan.fits else [cells[0], *[""] * 6, excess])
    for line in console.align(table, left=1):
        console.print(line)


def describe_deadline(plan: Plan | None, deadline: str, gpu: str) -> str:
    """The fewest GPUs that meet it, in words."""
    if plan is None:
        return f"{deadline}: no number of {gpu} among which the batch divides is fast enough; raise budget.batch_tokens"
    cost = "" if plan.dollars is None else f", ${plan.dollars:,.2f}"
    return (
        f"{deadline}: {plan.layout.gpus:,} x {gpu}, {describe_time(plan.hours, plan.spread)}{cost}"
    )


def describe_optimum(optimum: Optimum, dollars: float) -> str:
    """The compute-optimal model for a budget, in words."""
    law = "20 tokens a parameter" if optimum.law == "chinchilla" else "the fitted law"
    sizes = f"{format_quantity(optimum.parameters)} parameters on {format_quantity(optimum.tokens)} tokens"
    spent = f"{optimum.flops:.2e} FLOPs for ${dollars:,.2f}, nearest preset {optimum.nearest}"
    if optimum.fitting != optimum.nearest:
        spent += f", which does not fit: at the speed of {optimum.fitting}"
    return f"{sizes} ({law}, Hoffmann et al. 2022): {spent}, predicted loss {optimum.loss:.2f} on their text"


def plan_answer(plan: Plan) -> dict[str, Any]:
    """What --json prints of a plan; rates in tokens/s, sizes in bytes. Without a price where it does not fit."""
    low, high = (share * plan.tokens_per_second for share in plan.spread)
    return {
        "fits": plan.fits,
        "memory_bytes": plan.memory.total_bytes,
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "hours": plan.hours if plan.fits else None,
        "dollars": plan.dollars if plan.fits else None,
        "energy_kwh": plan.energy_kwh if plan.fits else None,
        "tokens": plan.tokens,
        "gpu": plan.gpu.name,
        "gpu_hours": plan.gpu_hours if plan.fits else None,
        "tokens_per_second_low": low,
        "tokens_per_second_high": high,
        **dataclasses.asdict(plan.layout),
    }
