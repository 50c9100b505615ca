"""The `megatoken` command: one module per subcommand.

A command module defines HELP (one line), EXAMPLE (a command line), `add_arguments(parser)` and
`run(options, console)`. Importing it loads neither torch nor numpy; `run` imports what it needs.
"""

from argparse import ArgumentParser, Namespace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from megatoken.errors import ExitCode

if TYPE_CHECKING:
    from megatoken.console import Console

GROUPS = {  # in the order of `megatoken --help`
    "start": ("quickstart", "doctor", "completion"),
    "data": ("prepare", "verify"),
    "train": ("train", "runs", "sweep", "race", "config", "describe", "plan", "dryrun", "launch"),
    "measure": ("eval", "plot", "report", "sync", "scaling", "bench", "reproduce"),
    "models": ("sample", "chat", "serve", "export", "consolidate"),
}
COMMANDS = tuple(name for names in GROUPS.values() for name in names)


class Result(NamedTuple):
    """The exit code of a command, and the object that --json prints; None prints nothing."""

    exit_code: int
    data: dict[str, Any] | None


def done(data: dict[str, Any] | None) -> Result:
    """Return the result of a command that did what it was asked to."""
    return Result(ExitCode.DONE, data)


class Command(Protocol):
    """The names that a command module must define."""

    HELP: str
    EXAMPLE: str

    def add_arguments(self, parser: ArgumentParser) -> None: ...

    def run(self, options: Namespace, console: "Console") -> Result: ...


def load_command(name: str) -> Command:
    """Import the module of a command in COMMANDS."""
    return cast(Command, import_module(f"megatoken.cli.{name}"))
