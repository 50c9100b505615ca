"""Run the `megatoken` command."""

import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

from megatoken import __version__
from megatoken.base.console import Console
from megatoken.base.errors import ExitCode, MegatokenError, StorageError
from megatoken.base.redact import RedactedStream, redact_values
from megatoken.base.system.environment import import_modules, prepare_process
from megatoken.cli import run_parsed
from megatoken.cli.arguments import Parser, parse
from megatoken.cli.help import format_overview
from megatoken.distributed.env import read_dist_env


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    prepare_streams()
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    try:
        prepare_process()
        if not arguments or arguments[0] in ("-h", "--help"):
            print(format_overview())
            return ExitCode.DONE
        if arguments[0] == "--version":
            print(f"megatoken {__version__}")
            return ExitCode.DONE
        return run_command(arguments)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except (MegatokenError, OSError) as raised:
        error = raised if isinstance(raised, MegatokenError) else convert_os_error(raised)
        with suppress(OSError):  # the terminal was closed
            if "--debug" in arguments:
                traceback.print_exc()
            # One write, so that the lines of ranks do not mix.
            sys.stderr.write(f"{_rank_prefix()}error: {error}\n")
        return int(error.code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def run_command(arguments: Sequence[str]) -> int:
    """Parse and run one command, and print its JSON line."""
    import_modules(find_imports(arguments))
    options = parse(arguments)
    result = run_parsed(options, Console(to_stderr=options.json))
    if options.json and result.data is not None:
        try:
            print(json.dumps(redact_values(result.data)), flush=True)
        except OSError:
            if options.command != "train":  # the run is saved; report its exit code
                raise
    return int(result.exit_code)


def find_imports(arguments: Sequence[str]) -> list[str]:
    """Return the modules given to --import, whose entries other arguments may name."""
    parser = Parser(add_help=False)
    parser.add_argument("--import", dest="modules", action="append", default=[])
    found: list[str] = parser.parse_known_args(arguments)[0].modules
    return found


def prepare_streams() -> None:
    """Replace missing standard streams, escape what stdout cannot encode, redact stderr."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open until exit)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if not isinstance(sys.stderr, RedactedStream):
        sys.stderr = RedactedStream(sys.stderr)


def convert_os_error(error: OSError) -> StorageError:
    """Convert an OSError to an error with a one-line message."""
    where = error.filename or "standard output"
    return StorageError(error.strerror or str(error), where, "check the path and its permissions")


def _rank_prefix() -> str:
    try:
        rank = read_dist_env().rank
    except MegatokenError:  # the error being reported
        return ""
    return f"[rank {rank}] " if rank else ""
