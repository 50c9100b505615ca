"""`megatoken dryrun RECIPE`: estimate memory and traffic per GPU of a large run, without a GPU."""

from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from megatoken.cli import Result, done
from megatoken.cli.arguments import add_settings
from megatoken.cli.recipe import PRESET_HELP, add_recipe_arguments, apply_options, find_model
from megatoken.console import Console

HELP = "estimate the memory and traffic of one GPU of many, without a GPU"
EXAMPLE = "megatoken dryrun gpt2-1558m --gpus 8 --gpu h100"


def add_arguments(parser: ArgumentParser) -> None:
    arg = parser.add_argument
    add_recipe_arguments(parser, PRESET_HELP)
    add_settings(parser)
    arg("--gpus", type=int, default=1, help="processes, one per GPU (default 1)")
    arg("--tp", type=int, help="machine.tensor_parallel=...")
    arg("--shard", help="machine.sharding=...")
    arg("--gpu", default="h100", help="GPU to fit on: a name, or memory in GB (default h100)")


def run(options: Namespace, console: Console) -> Result:
    apply_options(
        options,
        {
            "--tp": ("machine.tensor_parallel", options.tp),
            "--shard": ("machine.sharding", options.shard),
        },
    )
    resolved, model, _ = find_model(options)
    from megatoken.measure.dry_run import check_fit, describe_estimate, dry_run, gpu_memory_bytes

    memory_bytes = gpu_memory_bytes(options.gpu)
    estimate = dry_run(resolved.config, model, options.gpus, memory_bytes)
    fits, advice = check_fit(estimate, resolved.config, options.gpu, memory_bytes)
    name = f"{resolved.name} on {options.gpus:,} x {options.gpu}"
    console.table([("model", name), *describe_estimate(estimate)])
    console.print(advice)
    data = {**asdict(estimate), "gpu": options.gpu, "fits": fits, "advice": advice}
    return done(data)
