"""The `megatoken` command: one module per subcommand.

A command module defines HELP (one line), EXAMPLE (a command line), `add_arguments(parser)` and
`run(options, console)`, which returns what --json prints, or a `Result` with another exit code than
0. Importing it loads neither torch nor numpy; `run` imports what it needs.
"""

from argparse import Namespace
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from megatoken.errors import ExitCode

GROUPS = {  # in the order of `megatoken --help`
    "start": ("quickstart", "doctor", "completion"),
    "data": ("prepare", "verify"),
    "train": ("train", "runs", "sweep", "race", "config", "describe", "plan", "dryrun", "launch"),
    "measure": ("eval", "plot", "report", "sync", "scaling", "bench", "reproduce"),
    "models": ("sample", "chat", "serve", "export", "consolidate"),
}
COMMANDS = tuple(name for names in GROUPS.values() for name in names)


Data = dict[str, Any]  # what --json prints


class Result(NamedTuple):
    """The exit code of a command, and the object that --json prints; None prints nothing."""

    exit_code: int
    data: Data | None


def done(data: Data | None) -> Result:
    """Return the result of a command that did what it was asked to."""
    return Result(ExitCode.DONE, data)


def load_command(name: str) -> ModuleType:
    """Import the module of a command in COMMANDS."""
    return import_module(f"megatoken.cli.{name}")


def run_parsed(options: Namespace, console: Any) -> Result:
    """Run the command of `arguments.parse`."""
    answer = load_command(options.command).run(options, console)
    return answer if isinstance(answer, Result) else Result(ExitCode.DONE, answer)
