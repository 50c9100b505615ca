"""Errors with a one-line message and an exit code.

Raise a subclass of `MegatokenError` for what a user can cause or fix; use assert for programming
errors. The command line prints `str(error)` and exits with `error.code`; `--debug` shows the
traceback.
"""

from collections.abc import Callable
from enum import IntEnum
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from megatoken.base.redact import redact

Warn = Callable[[str], None]  # called with the text of a warning


class ExitCode(IntEnum):
    """Exit codes of the `megatoken` command, on which schedulers and scripts rely."""

    DONE = 0
    CONFIG = 2
    DATA = 3
    CHECKPOINT = 4
    STORAGE = 5
    NUMERICS = 6
    PEER = 7
    STOPPED = 75  # stopped on request, everything saved: the same command resumes (EX_TEMPFAIL)


class MegatokenError(Exception):
    """An error with a one-line message `what — where — fix`, without secrets.

    Control characters are escaped.

    where: location of the error, such as file:line, a setting's key, a shard and offset, a rank or
    a step. fix: what the user can do about it.
    """

    code: ClassVar[ExitCode]

    def __init__(self, what: str, where: str | Path = "", fix: str = "") -> None:
        parts = [" ".join(str(part).split()) for part in (what, where, fix) if part]
        text = redact(" — ".join(parts))
        super().__init__(
            "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
        )


class ConfigError(MegatokenError):
    """A setting, recipe or argument is wrong, or needs what this machine does not have."""

    code = ExitCode.CONFIG


def import_extra(module: str, extra: str) -> Any:
    """Import a module of an optional dependency. Raises ConfigError that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed", fix=install_extras(extra)) from None


def install_extras(*extras: str) -> str:
    """Return the command that installs optional dependencies."""
    return f'pip install -e ".[{",".join(extras)}]" in the checkout of megatoken'


class DataError(MegatokenError):
    """A dataset, tokenizer or document is missing, damaged or of the wrong kind."""

    code = ExitCode.DATA


class CheckpointError(MegatokenError):
    """A checkpoint or model file is missing, damaged or incompatible."""

    code = ExitCode.CHECKPOINT


class StorageError(MegatokenError):
    """A disk is full, read-only or failing."""

    code = ExitCode.STORAGE


class NumericsError(MegatokenError):
    """A loss, gradient or score is not finite."""

    code = ExitCode.NUMERICS


class PeerError(MegatokenError):
    """Another process of the run has died or hangs."""

    code = ExitCode.PEER


def error_from_code(code: int, message: str) -> MegatokenError:
    """Return an error of the subclass with the exit code `code`, or else a PeerError.

    code: exit code of another process.
    """
    classes: dict[int, type[MegatokenError]] = {
        error.code: error for error in MegatokenError.__subclasses__()
    }
    return classes.get(code, PeerError)(message)
