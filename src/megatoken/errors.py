"""Errors with a one-line message for users and an exit code.

Raise a subclass of `MegatokenError` for anything a user can cause or fix; use assert for programming errors. The
command line prints `str(error)` on one line and exits with `error.code`; `--debug` shows the traceback.
"""

from enum import IntEnum
from pathlib import Path
from typing import ClassVar

from megatoken.redact import redact


class ExitCode(IntEnum):
    """Exit codes that schedulers and scripts rely on."""

    DONE = 0
    CONFIG = 2
    DATA = 3
    CHECKPOINT = 4
    STORAGE = 5
    NUMERICS = 6
    PEER = 7
    STOPPED = 75  # stopped on request with everything saved: the same command resumes (EX_TEMPFAIL)


class MegatokenError(Exception):
    """An error with a one-line message, `what — where — fix`.

    where: file:line, key, shard and offset, rank, step; fix: what the reader can do next. Control characters, which a
    name in a file may hold, are spelled out.
    """

    code: ClassVar[ExitCode]

    def __init__(self, what: str, where: str | Path = "", fix: str = "") -> None:
        text = redact(
            " — ".join(" ".join(str(part).split()) for part in (what, where, fix) if part)
        )
        super().__init__(
            "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
        )


class ConfigError(MegatokenError):
    """A setting, recipe or argument is wrong, or asks for what this machine does not have."""

    code = ExitCode.CONFIG


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
    """Another process of the run is gone."""

    code = ExitCode.PEER


def error_from_code(code: int, message: str) -> MegatokenError:
    """The error of an exit code that another process reported."""
    classes = {error.code: error for error in MegatokenError.__subclasses__()}
    return classes[ExitCode(code)](message)
