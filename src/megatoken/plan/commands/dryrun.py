"""`megatoken dryrun RECIPE`: estimate memory and traffic per GPU of a large run, without a GPU."""

from argparse import ArgumentParser, Namespace
from dataclasses import asdict, replace
from typing import Any

from megatoken.base.console import Console
from megatoken.base.errors import ConfigError
from megatoken.base.system.gpus import GPUS, Gpu, find_gpu
from megatoken.cli import Data
from megatoken.cli.arguments import add_options
from megatoken.cli.recipe import PRESET_HELP, add_recipe_arguments, apply_options, find_model
from megatoken.plan.estimate import open_modes, plan_run

HELP = "estimate the memory and traffic of one GPU of many, without a GPU"
EXAMPLE = "megatoken dryrun gpt2-1558m --gpus 8 --gpu h100"


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe_arguments(parser, PRESET_HELP)
    add_options(parser, __file__)


def run(options: Namespace, console: Console) -> Data:
    apply_options(
        options,
        {
            "--tp": ("machine.tensor_parallel", options.tp),
            "--shard": ("machine.sharding", options.shard),
        },
    )
    resolved, model, _ = find_model(options)
    config = replace(resolved.config, model=model)
    gpu = find_card(options.gpu)
    if options.gpus < 1:
        raise ConfigError(f"{options.gpus} GPUs", "--gpus", "give at least 1")
    modes = open_modes(resolved)
    plan = plan_run(config, gpu, options.gpus, modes=modes)
    layout, step = plan.layout, plan.step
    chosen: dict[str, Any] = {
        "precision": layout.precision.replace("tf32", "fp32"),
        "micro_batch": layout.micro_batch,
        "sharding": layout.sharding,
        "activation_checkpointing": layout.checkpointing,
    }
    config = replace(config, machine=replace(config.machine, **chosen))
    settings = " ".join(f"machine.{key}={value}" for key, value in chosen.items())
    from megatoken.plan.dry_run import check_fit, describe_estimate, dry_run

    estimate = dry_run(config, options.gpus)
    fits, advice = check_fit(estimate, options.gpu, gpu.memory_bytes)
    name = f"{resolved.name} on {options.gpus:,} x {options.gpu}"
    rows = [("model", name), ("settings", settings), *describe_estimate(estimate)]
    if options.gpus > 1:
        rows.append(("", f"{step.describe_communication()} (estimated)"))
    console.table(rows)
    console.print(advice)
    step.warn(console)
    times = {"computing_seconds": step.computing, "communication_seconds": step.sent}
    return {**asdict(estimate), **times, "gpu": options.gpu, "fits": fits, "advice": advice}


def find_card(text: str) -> Gpu:
    """Return the GPU of a name, or an H100 with the given memory in GB, such as "80" or "80gb"."""
    size = text.strip().lower().removesuffix("gb")
    if size.isdigit() and len(size) < 4:  # 4090 is a name
        return replace(GPUS["H100"], memory_gib=int(size) * 1e9 / 2**30)
    return find_gpu(text, "--gpu")
