"""`megatoken plan RECIPE`: predict time, cost and memory of a run. Uses torch only to calibrate."""

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatoken.base.config.fields import parse_time, parse_value
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import FIELDS, Config
from megatoken.base.console import (
    Console,
    format_count,
    format_duration,
    format_memory,
    format_quantity,
)
from megatoken.base.errors import ConfigError
from megatoken.base.system.atomic_write import read_object
from megatoken.base.system.gpus import GPUS, parse_gpus
from megatoken.cli import Data
from megatoken.cli.arguments import add_options
from megatoken.cli.recipe import PRESET_HELP, TRANSLATED, add_recipe_arguments, find_model
from megatoken.distributed.memory import ERROR, USABLE
from megatoken.model.flops import describe_parameters, flops_per_token
from megatoken.plan.compute_optimal import Optimum, spend_budget
from megatoken.plan.estimate import (
    GPU_COUNTS,
    MEASURED_SPREAD,
    Plan,
    budget_tokens,
    find_deadline,
    list_settings,
    measured_factor,
    open_modes,
    optimal_tokens,
    plan_family,
    plan_run,
    scale_gpus,
)
from megatoken.plan.switches import list_rungs, plan_rungs

HELP = "plan a run on given GPUs: does it fit, how fast, how long, how much"
EXAMPLE = "megatoken plan gpt3-1.3b --gpus 8xH100 --tokens chinchilla --deadline 24h"
CALIBRATE_SECONDS = 30.0
LADDER_COLUMNS = {
    "name": "rung",
    "tokens_per_second": "tokens/s",
    "speedup": "speed-up",
    "step_seconds": "step",
    "mfu": "MFU",
    "memory_bytes": "memory",
    "published": "published",
}
PLAN_COLUMNS = [
    "model",
    "tokens",
    "GPUs",
    "speed-up",
    "tokens/s",
    "MFU",
    "time",
    "GPU-hours",
    "dollars",
    "layout",
]
PROGRAMS = {"eager": "not compiled", "compiled": "compiled", "fused": "compiled, weights in bf16"}
NAMES = {  # of parts of memory and time
    "gathered": "gathered parameters",
    "low_precision": "low-precision weights",
    "products": "matrix products",
    "elements": "elementwise operations",
}
RECOMPUTED = {"none": "", "gelu": ", GELU recomputed", "block": ", blocks recomputed"}


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe_arguments(parser, PRESET_HELP)
    names: dict[str, Any] = {"prices": _prices, "hours": _hours, "dollars": _dollars}
    add_options(parser, __file__, seconds=CALIBRATE_SECONDS, **names)


def _dollars(text: str) -> float:
    dollars = float(text)
    if not 0 < dollars < math.inf:
        raise ArgumentTypeError("give US dollars above 0")
    return dollars


def _prices(text: str) -> list[float]:
    return sorted(_dollars(price) for price in text.split(","))


def _hours(text: str) -> float:
    try:
        hours = parse_time(text) / 3600
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    if not hours or text.strip()[-1].isdigit():
        raise ArgumentTypeError("give a time such as 90m, 24h or 2d12h")
    return hours


def run(options: Namespace, console: Console) -> Data:
    if options.gpus == "list":
        return list_gpus(console)
    if options.gpus:
        options.nproc = parse_gpus(options.gpus)[0][0]
    if options.budget and not any(getattr(options, name) for name in ("recipe", *TRANSLATED)):
        fix = f"name one, such as: megatoken plan gpt3-1.3b --budget {options.budget:g} ..."
        raise ConfigError("--budget needs a recipe, for its batch", "megatoken plan", fix)
    resolved, model, is_recipe = find_model(options)
    options.recipe = resolved.name
    config = replace(resolved.config, model=model)
    tokens = choose_tokens(options, config, is_recipe)
    if config.objective.name != "pretrain":
        extra = "second answers, generation, the reference model and gathered weights"
        console.print(f"note: excludes {extra}")
    if options.calibrate:
        return plan_here(options, config, tokens, console)
    if options.gpus is None:
        fix = "give a number and a name, as --gpus 8xA100-40GB, or --calibrate for this machine"
        raise ConfigError("no GPUs given", "megatoken plan", fix)
    if options.ladder:
        return plan_ladder(options, config, console)
    return plan_gpus(options, config, tokens, open_modes(resolved), console)


def list_gpus(console: Console) -> Data:
    """Print the known GPUs."""
    rows = [["GPU", "architecture", "TFLOP/s", "memory", "bandwidth", "power", "$/hour"]]
    for gpu in GPUS.values():
        peaks = ", ".join(f"{name} {peak / 1e12:g}" for name, peak in gpu.peaks.items())
        rates = f"{gpu.memory_rate / 1e9:,.0f} GB/s", f"{gpu.watts} W", f"{gpu.price or ''}"
        memory = format_memory(gpu.memory_bytes)
        rows.append([gpu.name, gpu.architecture, peaks, memory, *rates])
    console.table(rows, left=3)
    return {"gpus": [asdict(gpu) for gpu in GPUS.values()]}


def plan_ladder(options: Namespace, config: Config, console: Console) -> Data:
    """Predict and print the software ladder on one kind of GPU."""
    from megatoken.base.markdown_table import show_rows
    from megatoken.plan.plot import draw_ladder

    _, gpu = parse_gpus(options.gpus)
    rungs = plan_rungs(config, gpu, list_rungs(gpu))
    show_rows(LADDER_COLUMNS, rungs, console)
    if options.plot:
        title = f"{options.recipe} on {gpu.name}"
        console.print(f"picture: {draw_ladder(title, rungs, options.plot)}")
    return {"ladder": rungs}


def plan_gpus(
    options: Namespace, config: Config, tokens: float, modes: Sequence[str], console: Console
) -> Data:
    """Plan for --gpus, for other GPU counts and other models, and if given a deadline or budget."""
    counts, gpu = parse_gpus(options.gpus)
    factor, n_measured = measured_factor(options.records, gpu)
    common: dict[str, Any] = {"prices": options.price, "modes": modes, "measured": factor}
    full = replace(config, budget=replace(config.budget, batch_start=0, batch_ramp=0))
    is_fixed = options.tokens not in (None, "chinchilla")
    length = f"{format_quantity(tokens)} tokens" if is_fixed else "20 tokens per parameter"
    others = sorted({*GPU_COUNTS, *counts})
    family = plan_family(full, gpu, others, tokens=is_fixed * tokens, **common)
    common["tokens"] = tokens
    plan = plan_run(config, gpu, counts[0], **common)
    scaled = scale_gpus(full, gpu, others, **common)
    fitting = [each for each in scaled if each.fits]
    data = plan_data(plan)
    data["scaling"] = [plan_data(each) for each in fitting]
    data["family"] = {
        name: [plan_data(each) for each in plans if each.layout.gpus in counts]
        for name, plans in family.items()
    }
    data["settings"] = list_settings(config, plan) if plan.fits else []
    (constant,) = (each for each in scaled if each.layout.gpus == counts[0])
    rows = [describe_model(options.recipe, config.model), *describe_plan(plan, constant.hours)]
    if data["settings"]:
        rows.append(("settings", f"train with {' '.join(data['settings'])}"))
    if not plan.fits:
        smallest = find_deadline(config, gpu, math.inf, **common)
        data["fewest_gpus"] = smallest and smallest.layout.gpus
        rows.append(("fits on", f"{data['fewest_gpus'] or 'no number of'} x {gpu.name}"))
    if n_measured:
        rows.append(("measured", f"{factor:.2f} times the formula ({n_measured} records)"))
    if options.deadline:
        met = find_deadline(config, gpu, options.deadline, **common)
        data["deadline"] = plan_data(met) if met else None
        rows.append(("deadline", describe_deadline(met, options.deadline, gpu.name)))
    if options.budget:
        optimum = spend_budget(full, options.budget, plan, options.law, modes)
        data["budget"] = asdict(optimum)
        rows.append(("budget", describe_optimum(optimum, options.budget)))
    if options.plot and fitting:
        from megatoken.plan.plot import draw_plan

        title = f"{options.recipe} on {gpu.name}"
        data["picture"] = str(draw_plan(title, fitting, family, length, options.plot))
        rows.append(("picture", data["picture"]))
    console.table(rows)
    plan.step.warn(console)
    ramp = " (no ramp)" if plan.ramp else ""
    title = f"by number of GPUs, at a constant batch of {config.batch_seqs:,} sequences{ramp}"
    print_plans(console, title, {options.recipe: scaled}, others)
    print_plans(console, f"the family on {gpu.name}, for {length}", family, counts)
    return data


def plan_here(options: Namespace, config: Config, tokens: float, console: Console) -> Data:
    """Measure this machine, plan for it, and print the plan. --price is its price per hour."""
    from megatoken.plan.calibrate import calibrate
    from megatoken.plan.calibration import count_run_bytes

    model = config.model
    console.print(f"measuring the training step for {CALIBRATE_SECONDS:.0f} s")
    device, measured = calibrate(config, CALIBRATE_SECONDS)
    rate = config.budget.batch_tokens / measured.step_seconds(model.n_layer, config.batch_seqs)
    hours = measured.run_seconds(config, tokens) / 3600
    memory_bytes = count_run_bytes(measured, config, device)
    free_bytes = device.memory_bytes(1)
    fits = not free_bytes or memory_bytes <= free_bytes
    mfu = None
    if device.peak_flops:
        mfu = rate * flops_per_token(model, causal=False) / device.peak_flops
    dollars = [hours * price for price in options.price] if fits else []
    data = {
        "fits": fits,
        "memory_bytes": memory_bytes,
        "tokens_per_second": rate,
        "mfu": mfu,
        "hours": hours if fits else None,
        "dollars": dollars[0] if dollars else None,
        "energy_kwh": None,
        "tokens": tokens,
        "device": device.name,
        "precision": device.precision,
        "micro_batch": measured.micro_batch,
    }
    layers = " and ".join(map(str, measured.layers))
    free = f"{format_memory(free_bytes)} free" if free_bytes else "free memory unknown"
    needed = f"{format_memory(memory_bytes)} with micro-batches of {measured.micro_batch}"
    rows = [
        describe_model(options.recipe, model),
        ("on", f"{device.name}, {device.precision}, measured with {layers} layers"),
        ("memory", f"{'fits' if fits else 'does not fit'}: {needed}, {free}"),
        ("speed", describe_speed(rate, MEASURED_SPREAD, mfu)),
        ("length", describe_length(tokens, model)),
    ]
    if fits:
        cost = f", ${format_dollars(dollars)}" if dollars else ""
        rows.append(("time", describe_time(hours, MEASURED_SPREAD) + cost))
    console.table(rows)
    return data


def choose_tokens(options: Namespace, config: Config, is_recipe: bool) -> float:
    """Return the number of training tokens from --tokens or else from the recipe; 0 if unknown.

    `--tokens chinchilla` means the compute-optimal number, which is also the default of a preset,
    because a preset has no length. Raises ConfigError if it is unknown but needed.
    """
    text = options.tokens
    if text == "chinchilla" or (text is None and not is_recipe):
        return optimal_tokens(config.model)
    if text is None:
        tokens = config.budget.epochs * count_epoch_tokens(config)
        tokens = tokens or budget_tokens(config)
        if not tokens and (options.deadline or options.calibrate):
            fix = "give the tokens: --tokens 10e9 or chinchilla"
            raise ConfigError("the recipe's length is in epochs", "--tokens", fix)
        return tokens
    try:
        tokens = parse_value(FIELDS["budget.tokens"], text)
    except ValueError as error:
        raise ConfigError(str(error), "--tokens", "give a number such as 10e9") from None
    if not tokens:
        raise ConfigError("no tokens to train on", "--tokens", "give a number such as 10e9")
    return float(tokens)


def count_epoch_tokens(config: Config) -> int:
    """Return the training tokens in one epoch; 0 if the dataset is not on this machine."""
    manifest = read_object(Path(config.data.path) / "manifest.json")
    is_rows = manifest.get("source", {}).get("kind", "text") != "text"
    seq_len = config.model.seq_len
    row_len = seq_len + is_rows  # rows also hold the last target
    return int(manifest.get("tokens", {}).get("train", 0) // row_len * seq_len)


def describe_model(name: str, model: ModelConfig) -> tuple[str, str]:
    """Return the row of the printed table that describes the model: its name, size and context."""
    return "model", f"{name}: {describe_parameters(model)}, context {model.seq_len:,}"


def describe_plan(plan: Plan, constant_hours: float) -> list[tuple[str, str]]:
    """Return the (name, value) rows of the printed table.

    The rows tell the GPUs, memory, layout, speed and length, and if the model fits also time, price
    and energy. constant_hours: hours without the batch ramp.
    """
    layout = plan.layout
    usable = format_memory(USABLE * plan.gpu.memory_bytes)
    fit = "fits" if plan.fits else "does not fit"
    share = plan.memory.usable_share(plan.gpu.memory_bytes)
    room = f"{ERROR:.0%} more for error is {share:.0%} of {usable} usable ({USABLE:.0%} of the GPU)"
    ramp = plan.ramp
    parallel = f", tensor parallel {layout.tensor_parallel}" if layout.tensor_parallel > 1 else ""
    size = format_count(layout.micro_steps, "micro-batch", "micro-batches")
    size += f" of {format_count(layout.micro_batch, 'sequence')} per step"
    recomputed = RECOMPUTED[layout.checkpointing]
    emulated = "" if layout.precision in plan.gpu.peaks else " (not supported: emulated in fp32)"
    program = f"{layout.precision}{emulated}, {PROGRAMS[layout.program]}"
    rows = [
        ("on", f"{layout.gpus} x {plan.gpu.name}, {program}"),
        ("memory", f"{fit}: {format_memory(plan.memory.total_bytes)}; {room}"),
        ("", describe_parts(asdict(plan.memory), format_memory)),
        ("layout", f"sharding {layout.sharding}{parallel}, {size}{recomputed}"),
        ("speed", describe_speed(plan.tokens_per_second, plan.spread, plan.mfu)),
        ("", describe_parts(plan.step.parts, lambda part: f"{part / plan.step.seconds:.0%}")),
        *[("sent", plan.step.describe_communication())] * (layout.gpus > 1),
    ]
    if not plan.tokens:
        return [*rows, ("length", "unknown without the dataset; for hours, give --tokens")]
    batches = f", batches of {ramp.start:,} to {ramp.full:,}" if ramp else ""
    rows.append(("length", describe_length(plan.tokens, plan.model) + batches))
    if plan.fits:
        time = describe_time(plan.hours, plan.spread)
        if ramp:
            time = f"{format_duration(3600 * constant_hours)}, with the batch ramp {time}"
        energy = format_quantity(1000 * plan.energy_kwh, "Wh")
        price = f"no price of {plan.gpu.name} known; give --price"
        if plan.prices:
            source = plan.gpu.price_source if plan.prices == [plan.gpu.price] else "--price"
            each = format_dollars(plan.prices)
            price = f"${format_dollars(plan.dollars)} at ${each} per GPU-hour ({source})"
        rows += [
            ("time", f"{time}, {format_digits(plan.gpu_hours)} GPU-hours"),
            ("price", price),
            ("energy", f"{energy}, GPUs only, at {plan.gpu.watts:.0f} W"),
        ]
    return rows


def describe_parts(parts: Mapping[str, float], describe: Callable[[float], str]) -> str:
    """Format the nonzero terms of a sum with their names, largest first."""
    names = sorted((name for name in parts if parts[name]), key=lambda name: -parts[name])
    return ", ".join(f"{NAMES.get(name, name)} {describe(parts[name])}" for name in names)


def describe_speed(rate: float, spread: tuple[float, float], mfu: float | None) -> str:
    """Format the expected tokens/s with its range (low, high), and the MFU if known."""
    low, high = (share * rate for share in spread)
    return f"{rate:,.0f} tokens/s ({low:,.0f} to {high:,.0f})" + (f", MFU {mfu:.1%}" if mfu else "")


def describe_length(tokens: float, model: ModelConfig) -> str:
    """Format the length of a run and, for comparison, the compute-optimal length."""
    optimal = format_quantity(optimal_tokens(model))
    return f"{format_quantity(tokens)} tokens (compute-optimal: {optimal})"


def describe_time(hours: float, spread: tuple[float, float]) -> str:
    """Format the expected time and its range (low, high) in hours."""
    low, high = (format_duration(3600 * hours / share) for share in reversed(spread))
    return f"{format_duration(3600 * hours)} ({low} to {high})"


def format_digits(number: float) -> str:
    """Format a number with three significant digits."""
    rounded = float(f"{number:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:#.3g}"


def print_plans(
    console: Console, title: str, models: Mapping[str, Sequence[Plan]], counts: Sequence[int]
) -> None:
    """Print a table of plans with speed, time, price and layout.

    Speed-ups are relative to the smallest number of GPUs that fits, counted as linear. models:
    plans by model. counts: numbers of GPUs to print.
    """
    rows = [PLAN_COLUMNS]
    for name, plans in models.items():
        base = next((plan.tokens_per_second / plan.layout.gpus for plan in plans if plan.fits), 0)
        leads = [name, format_quantity(plans[0].tokens) if plans[0].tokens else ""]
        for plan in plans:
            layout = plan.layout
            if layout.gpus not in counts:
                continue
            row = [*leads, f"{layout.gpus:,}"]
            leads = ["", ""]
            if plan.fits:
                rate = plan.tokens_per_second
                row += [f"{rate / base:,.1f}", f"{rate:,.0f}", f"{plan.mfu:.1%}"]
                costs = [format_duration(3600 * plan.hours), format_digits(plan.gpu_hours)]
                costs.append(format_dollars(plan.dollars))
                sharding = f", {layout.sharding}" if layout.sharding != "none" else ""
                size = f"{layout.micro_steps} x {layout.micro_batch}"
                row += costs if plan.tokens else [""] * 3
                row += [f"{size}{sharding}{RECOMPUTED[layout.checkpointing]}"]
            else:
                size = format_memory(plan.memory.total_bytes)
                row += [*[""] * 6, f"does not fit: {size}"]
            rows.append(row)
    if len(rows) > 1:
        console.print(f"\n{title}; layout: micro-batches x sequences")
        console.table(rows, left=1)


def format_dollars(dollars: Sequence[float]) -> str:
    """Format the costs at one or two prices."""
    return " to ".join(map(format_digits, dollars))


def describe_deadline(plan: Plan | None, hours: float, gpu: str) -> str:
    """Format the plan with the fewest GPUs that meets a deadline.

    plan: None if no number of GPUs meets it.
    """
    deadline = format_duration(3600 * hours)
    if plan is None:
        return f"{deadline}: not met by any number of {gpu}; raise budget.batch_tokens"
    cost = f", ${format_dollars(plan.dollars)}" if plan.prices else ""
    time = describe_time(plan.hours, plan.spread)
    return f"{deadline}: {plan.layout.gpus:,} x {gpu}, {time}{cost}"


def describe_optimum(optimum: Optimum, dollars: float) -> str:
    """Format the compute-optimal model size and tokens for a budget."""
    parameters = format_quantity(optimum.parameters)
    tokens = format_quantity(optimum.tokens)
    cost = f"{optimum.flops:.2e} FLOPs for ${dollars:,.2f}"
    speed = ""
    if optimum.fitting != optimum.nearest:
        speed = f", which does not fit: at the speed of {optimum.fitting}"
    return (
        f"{parameters} parameters on {tokens} tokens ({optimum.law} law, Hoffmann et al. 2022): "
        f"{cost}, nearest preset {optimum.nearest}{speed}, predicted loss {optimum.loss:.2f}"
    )


def plan_data(plan: Plan) -> dict[str, Any]:
    """Return a plan as the object that --json prints.

    Rates are in tokens/s, memory in bytes, times in hours. A plan that does not fit has no costs.
    """
    low, high = (share * plan.tokens_per_second for share in plan.spread)
    data = {
        "fits": plan.fits,
        "memory_bytes": plan.memory.total_bytes,
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "computing_seconds": plan.step.computing,
        "communication_seconds": plan.step.sent,
        "hours": plan.hours,
        "dollars": plan.dollars[0] if plan.prices else None,
        "energy_kwh": plan.energy_kwh,
        "tokens": plan.tokens or None,
        "gpu": plan.gpu.name,
        "gpu_hours": plan.gpu_hours,
        "tokens_per_second_low": low,
        "tokens_per_second_high": high,
        **asdict(plan.layout),
    }
    if not (plan.fits and plan.tokens):
        data |= dict.fromkeys(("hours", "dollars", "energy_kwh", "gpu_hours"))
    return data
