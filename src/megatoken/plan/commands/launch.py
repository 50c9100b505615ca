"""`megatoken launch ENGINE RECIPE`: write a script that trains on many machines."""

import shlex
from argparse import ArgumentParser, Namespace
from dataclasses import fields
from operator import methodcaller
from pathlib import Path
from typing import Any

from megatoken.base.console import Console
from megatoken.base.errors import ConfigError
from megatoken.base.redact import redact
from megatoken.base.system.atomic_write import storage_errors
from megatoken.base.system.environment import imported_modules
from megatoken.cli import Data
from megatoken.cli.arguments import add_options, parse
from megatoken.cli.recipe import TRANSLATED, add_recipe_arguments, check_init, find_recipe
from megatoken.distributed.env import DistEnv
from megatoken.distributed.parallel_dims import fit_batch
from megatoken.plan.scripts import ENGINES, WORK, Job, name_job, write_script

HELP = "write a script that trains on many machines"
EXAMPLE = "megatoken launch slurm gpt2-1558m --nodes 4 --write job.sh"


def add_arguments(parser: ArgumentParser) -> None:
    doc = "torchrun (any machines), slurm, k8s or skypilot"
    parser.add_argument("engine", choices=list(ENGINES), help=doc)
    add_recipe_arguments(parser)
    remove_dashes = methodcaller("removeprefix", "--")
    add_options(parser, __file__, remove_dashes=remove_dashes)


def run(options: Namespace, console: Console) -> Data:
    if options.prepare is not None:
        return write_prepare(options, console)
    resolved, named_out = find_recipe(options)
    out = options.out or named_out or Path("runs") / resolved.name
    check_init(options.recipe, resolved.config, out)
    recipe = [f"--{name}={value}" for name in TRANSLATED if (value := getattr(options, name))]
    given: dict[str, Any] = {
        field.name: getattr(options, field.name, None) for field in fields(Job)
    }
    given |= {"name": name_job(resolved.name), "prepare": (), "out": ""}
    if min(options.nodes, options.nproc) < 1:
        raise ConfigError("a job needs processes", "--nodes, --nproc", "give at least 1")
    dist_env = DistEnv(world_size=options.nodes * options.nproc, local_world_size=options.nproc)
    config = fit_batch(resolved.config, dist_env, "--nodes, --nproc")
    overrides = [*options.overrides]
    if config != resolved.config:  # as `plan` does
        overrides.append(f"budget.batch_start={config.budget.batch_start}")
        note = f"note: added {overrides[-1]}, which divides among the processes"
        Console(to_stderr=True).print(note)
    if modules := ",".join(imported_modules()):
        overrides += ["--import", modules]
    given["train_args"] = [*(recipe or [options.recipe]), "--out", str(out), *overrides]
    is_stored = "://" in config.save.mirror and "://" in config.data.path
    # Several machines need one run folder, and a new machine an old one's.
    given["volume"] = "" if is_stored and options.nodes == 1 else WORK
    return write_job(options, Job(**given), console)


def write_prepare(options: Namespace, console: Console) -> Data:
    """Write a script that prepares a dataset on --nodes machines. Raises ConfigError."""
    words = shlex.split(options.prepare)
    parsed = parse(["prepare", *words])
    where = "--prepare"
    if parsed.out is None or parsed.part or parsed.join:
        raise ConfigError("not a preparation", where, "write 'SOURCE --out OUT', and other options")
    if parsed.tokenizer.startswith("bpe:"):
        fix = f"prepare a sample with --tokenizer {parsed.tokenizer}, then name that dataset"
        raise ConfigError("the parts need a trained tokenizer", where, fix)
    fields = ("nodes", "nproc", "gpus", "time", "setup", "partition", "account", "sbatch")
    given = {name: getattr(options, name) for name in fields}
    job = Job(name="prepare", prepare=words, out=str(parsed.out), **given)
    return write_job(options, job, console)


def write_job(options: Namespace, job: Job, console: Console) -> Data:
    """Write the script of a job to --write, or print it."""
    script = redact(write_script(options.engine, job))
    if options.write:
        write_file(options.write, script)
        console.print(f"written: {options.write}")
    elif not options.json:
        print(script, end="")
    return {"script": script, "processes": job.nodes * job.nproc}


def write_file(path: Path, script: str) -> None:
    """Write a script to a file. Raises ConfigError if the file exists with different content."""
    with storage_errors(path.parent, fix="choose another file"):
        if path.exists() and path.read_text("utf-8", "replace") != script:
            raise ConfigError("the file exists", path, "remove it, or choose another file")
        path.write_text(script, encoding="utf-8")
