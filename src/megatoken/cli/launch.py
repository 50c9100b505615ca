"""`megatoken launch ENGINE RECIPE`: write a script that trains on many machines."""

from argparse import ArgumentParser, Namespace
from dataclasses import fields
from operator import methodcaller
from pathlib import Path
from typing import Any

from megatoken.cli import Result, done
from megatoken.cli.arguments import add_settings
from megatoken.cli.recipe import TRANSLATED, add_recipe_arguments, check_init, find_recipe
from megatoken.console import Console
from megatoken.errors import ConfigError
from megatoken.launch.scripts import ENGINES, GPU, TIME, Job, check_batch, name_job, write_script
from megatoken.redact import redact
from megatoken.system.atomic_write import local_path, storage_errors
from megatoken.system.object_store import run_folder

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
    doc = "k8s, skypilot: container image with megatoken (k8s: default megatoken)"
    arg("--image", default="", help=doc)
    arg("--namespace", default="", help="k8s: namespace")


def run(options: Namespace, console: Console) -> Result:
    resolved, named_out = find_recipe(options)
    out = options.out or named_out or Path("runs") / resolved.name
    check_init(options.recipe, resolved.config, out)
    translated = {name: getattr(options, name) for name in TRANSLATED}
    recipe = [f"--{name}={value}" for name, value in translated.items() if value]
    given: dict[str, Any] = {
        field.name: getattr(options, field.name, None) for field in fields(Job)
    }
    given["name"] = name_job(resolved.name)
    given["train_args"] = [*(recipe or [options.recipe]), "--out", str(out), *options.overrides]
    job = Job(**given)
    if min(job.nodes, job.nproc) < 1:
        raise ConfigError("a job needs processes", "--nodes, --nproc", "give at least 1")
    check_batch(resolved.config, job.nodes, job.nproc, "--nodes, --nproc")
    script = redact(write_script(options.engine, job))
    if options.write:
        write_file(options.write, script)
        console.print(f"written: {options.write}")
    elif not options.json:
        print(script, end="")
    return done({"script": script, "processes": job.nodes * job.nproc})


def write_file(path: Path, script: str) -> None:
    """Write a script to a file. Raises ConfigError if the file exists with different content."""
    with storage_errors(path.parent, fix="choose another file"):
        if path.exists() and path.read_text("utf-8", "replace") != script:
            raise ConfigError("the file exists", path, "remove it, or choose another file")
        path.write_text(script, encoding="utf-8")
