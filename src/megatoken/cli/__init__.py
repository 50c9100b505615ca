"""The `megatoken` command: one module per subcommand.

A room lists its command modules in its ENTRIES. Each defines HELP (one line), EXAMPLE (a command
line) and `run(options, console)`, which returns what --json prints, or a `Result` with another exit
code than 0. MODULE.toml describes its options, or its `add_arguments(parser)` adds them. Importing
it loads neither torch nor numpy; `run` imports what it needs.
"""

from argparse import Namespace
from types import ModuleType
from typing import Any, NamedTuple

from megatoken.base.errors import ExitCode
from megatoken.base.rooms import list_entries, load_entry

COMMANDS = tuple(list_entries("command"))
Data = dict[str, Any]  # what --json prints


class Result(NamedTuple):
    """The exit code of a command, and the object that --json prints; None prints nothing."""

    exit_code: int
    data: Data | None


def load_command(name: str) -> ModuleType:
    """Import the module of a command in COMMANDS."""
    module = load_entry("command", name)
    assert isinstance(module, ModuleType)
    return module


def run_parsed(options: Namespace, console: Any) -> Result:
    """Run the command that `arguments.parse` found."""
    result = load_command(options.command).run(options, console)
    return result if isinstance(result, Result) else Result(ExitCode.DONE, result)
