"""`megatoken launch ENGINE RECIPE`: write a script that trains on many machines."""

from argparse import ArgumentParser, Namespace
from dataclasses import fields
from operator import methodcaller
from pathlib import Path
from typing import Any

from megatoken.base.console import Console
from megatoken.base.errors import ConfigError
from megatoken.base.redact import redact
from megatoken.base.system.address import run_folder
from megatoken.base.system.atomic_write import local_path, storage_errors
from megatoken.cli import Result, done
from megatoken.cli.arguments import add_settings
from megatoken.cli.recipe import TRANSLATED, add_recipe_arguments, check_init, find_recipe
from megatoken.distributed.env import DistEnv
from megatoken.distributed.parallel_dims import fit_batch
from megatoken.plan.scripts import ENGINES, GPU, TIME, WORK, Job, name_job, write_script

HELP = "write a script that trains on many machines"
EXAMPLE = "megatoken launch slurm gpt2-1558m --nodes 4 --write job.sh"


def add_arguments(parser: ArgumentParser) -> None:
    arg = parser.add_argument
    arg("engine", choices=list(ENGINES), help="torchrun (any machines), slurm, k8s or skypilot")
    add_recipe_arguments(parser)
    add_settings(parser)
    arg("--nodes", type=int, default=1, help="machines (default 1)")
    arg("--nproc", type=int, default=8, help="processes per machine, one per GPU (default 8)")
    arg("--out", type=run_folder, help="run folder on a shared file system (default runs/RECIPE)")
    arg("--write", type=local_path, metavar="FILE", help="script file (default stdout)")
    doc = f"skypilot: GPU type (default {GPU}); any engine: none for CPUs"
    arg("--gpus", default=GPU, help=doc)
    arg("--time", default=TIME, help=f"slurm: time limit (default {TIME})")
    arg("--partition", default="", help="slurm: partition")
    arg("--account", default="", help="slurm: account")
    doc = "slurm: sbatch option, such as qos=high or exclusive; repeatable"
    remove_dashes = methodcaller("removeprefix", "--")
    arg("--sbatch", action="append", type=remove_dashes, default=[], metavar="NAME=VALUE", help=doc)
    doc = "slurm, torchrun, skypilot: shell line before the run, such as 'module load cuda'; "
    arg("--setup", action="append", default=[], metavar="LINE", help=f"{doc}repeatable")
    doc = "skypilot: spot machines, which may be taken away at any time"
    arg("--spot", action="store_const", const="use_spot: true", default="", help=doc)
    doc = "k8s, skypilot: container image with megatoken (k8s: default megatoken:cuda)"
    arg("--image", default="", help=doc)
    arg("--namespace", default="", help="k8s: namespace")


def run(options: Namespace, console: Console) -> Result:
    resolved, named_out = find_recipe(options)
    out = options.out or named_out or Path("runs") / resolved.name
    check_init(options.recipe, resolved.config, out)
    recipe = [f"--{name}={value}" for name in TRANSLATED if (value := getattr(options, name))]
    given: dict[str, Any] = {
        field.name: getattr(options, field.name, None) for field in fields(Job)
    }
    given["name"] = name_job(resolved.name)
    if min(options.nodes, options.nproc) < 1:
        raise ConfigError("a job needs processes", "--nodes, --nproc", "give at least 1")
    dist_env = DistEnv(world_size=options.nodes * options.nproc, local_world_size=options.nproc)
    config = fit_batch(resolved.config, dist_env, "--nodes, --nproc")
    overrides = [*options.overrides]
    if config != resolved.config:  # as `plan` does
        overrides.append(f"budget.batch_start={config.budget.batch_start}")
        note = f"note: added {overrides[-1]}, which divides among the processes"
        Console(to_stderr=True).print(note)
    given["train_args"] = [*(recipe or [options.recipe]), "--out", str(out), *overrides]
    is_stored = "://" in config.save.mirror and "://" in config.data.path
    # Several machines need one run folder, and a new machine an old one's.
    given["volume"] = "" if is_stored and options.nodes == 1 else WORK
    script = redact(write_script(options.engine, Job(**given)))
    if options.write:
        write_file(options.write, script)
        console.print(f"written: {options.write}")
    elif not options.json:
        print(script, end="")
    return done({"script": script, "processes": dist_env.world_size})


def write_file(path: Path, script: str) -> None:
    """Write a script to a file. Raises ConfigError if the file exists with different content."""
    with storage_errors(path.parent, fix="choose another file"):
        if path.exists() and path.read_text("utf-8", "replace") != script:
            raise ConfigError("the file exists", path, "remove it, or choose another file")
        path.write_text(script, encoding="utf-8")
