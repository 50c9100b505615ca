"""Start the processes of `--nproc`. No torch."""

import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from megatoken.base.config.load import ResolvedConfig, render
from megatoken.base.config.schema import Config
from megatoken.base.errors import ConfigError
from megatoken.distributed.env import DistEnv, read_dist_env
from megatoken.distributed.local_launch import COMMAND, RESTARTS, launch
from megatoken.distributed.parallel_dims import fit_batch


def launch_ranks(options: Namespace, restarts: int = 0, config: Config | None = None) -> int | None:
    """Run this command again in --nproc processes, and return their exit code.

    Returns None if this process must run the command itself, because it is one of these processes
    or --nproc is 1.

    config: config of a run, whose batch must divide among the processes; None for other commands.
    """
    dist_env = read_dist_env()
    nproc = options.nproc
    if restarts < 0 or nproc < 1:
        raise ConfigError("not a positive number", "--nproc, --restarts", "give 1 or more")
    if nproc > 1 and dist_env.local_world_size == 1:
        if config is not None and not config.model.init:
            world = DistEnv(world_size=dist_env.world_size * nproc, local_world_size=nproc)
            fit_batch(config, world, "--nproc")
        return launch([*COMMAND, *options.arguments], nproc, restarts, dist_env)
    if nproc not in (1, dist_env.local_world_size):
        what = f"--nproc {nproc} in one of {dist_env.local_world_size} processes of this machine"
        fix = "let torchrun or srun start one process on each machine, or leave it out"
        raise ConfigError(what, "--nproc", fix)
    return None


def train_in_processes(
    resolved: ResolvedConfig, out: Path, nproc: int, options: Mapping[str, object]
) -> int:
    """Train by the `megatoken` command in `nproc` processes, and return its exit code.

    options: values by name; True for a switch; None and False are left out.
    """
    with tempfile.TemporaryDirectory(prefix="megatoken-") as folder:
        recipe = Path(folder) / f"{resolved.name}.yaml"
        recipe.write_text(render(resolved.config, resolved.origins), encoding="utf-8")
        command = [*COMMAND, "train", str(recipe), "--out", str(out)]
        for name, value in options.items():
            if value is not None and value is not False:
                command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return launch(command, nproc, RESTARTS)
