"""One kind of failure for people: what is wrong, where, what to do, and the exit code.

Raise `Fault` for anything a user can cause or mend; use assert for what only a programmer can.
The command line prints `str(fault)` on one line and exits with `fault.code`; `--debug` shows the traceback.
"""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes that schedulers and scripts rely on."""

    DONE = 0
    CONFIG = 2
    DATA = 3
    CHECKPOINT = 4
    STORAGE = 5
    NUMERICS = 6
    PEER = 7
    STOPPED = 75  # stopped on request with everything saved: start again to go on (EX_TEMPFAIL)


class Fault(Exception):
    """A failure with a one-line message: `what — where — fix`.

    where: file:line, key, shard and offset, rank, step; fix: what the reader can do next.
    """

    def __init__(self, code: Exit, what: str, where: str = "", fix: str = "") -> None:
        self.code = code
        super().__init__(" — ".join(" ".join(part.split()) for part in (what, where, fix) if part))
