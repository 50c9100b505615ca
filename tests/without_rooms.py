"""Train with copies of the package that lack rooms. Started by tests/test_removal.py as a script.

    python without_rooms.py JSON    a list of {copy, out, settings, kill_at}

It imports torch once and forks a process for each run, which imports the package from the folder
`copy`, trains, is killed at a step if one is given, and else prints its commands in a line of JSON.
"""

import json
import os
import signal
import sys
from pathlib import Path


def train(copy: str, out: str, settings: list[str], kill_at: int) -> None:
    """Train in this process with the package in `copy`."""
    sys.path[:] = [copy, *(path for path in sys.path if not (Path(path) / "megatoken").is_dir())]
    import megatoken
    from megatoken.base.console import Console
    from megatoken.base.rooms import find_rooms, list_entries

    assert megatoken.__file__.startswith(copy)
    if "study" in find_rooms():
        settings.append("log.plots=false")
    if "plan" in find_rooms():
        from megatoken.plan.tuning import peak

        peak.PEAK_SIZES["cpu"] = (64, 128)  # as in tests/ranks.py

    def kill(row):
        if kill_at and (row["kind"], row["step"]) == ("train", kill_at):
            os.kill(os.getpid(), signal.SIGKILL)

    config = megatoken.load_config(*settings)
    megatoken.Trainer(config, out, callbacks=[kill], console=Console(quiet=True)).fit()
    commands = sorted(list_entries("command"))
    if Path(copy, "megatoken", "cli").is_dir():
        from megatoken.cli.main import main

        main(["--help"])  # imports the module of each command
    print(json.dumps(commands), flush=True)


if __name__ == "__main__":
    import filelock  # noqa: F401
    import numpy.random  # noqa: F401
    import torch._dynamo  # noqa: F401
    import yaml  # noqa: F401

    for run in json.loads(sys.argv[1]):
        if child := os.fork():
            os.waitpid(child, 0)
        else:
            train(**run)
            sys.stdout.flush()
            os._exit(0)
