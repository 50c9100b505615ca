"""The journal: owns a run folder while the process lives and writes down what happens.

In: facts about steps. Out: `metrics.jsonl` (one object a line: kind, step, tokens, then the values), `status.json`
(replaced atomically: state, exit code, step, message, pid, host) and the lock that keeps a second run out.
A log that cannot be written never stops training: one warning, then the lost rows are counted.
Absent on purpose: rendering (the console reads the rows), checkpoints, torch.
"""

import contextlib
import errno
import json
import math
import os
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from megatoken.errors import Exit, Fault

METRICS = "metrics.jsonl"
STATUS = "status.json"
KINDS = ("train", "val", "eval", "sample", "save", "event")
STATES = ("running", "done", "stopped", "failed")
_LOCK = ".lock"
_OWNER = ".owner.json"
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_OWNER_WAIT_SECONDS = 1.0  # between taking the lock and writing who took it


def _say(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


class Journal:
    """One run folder, held by this process until `close`. Not for use from several threads at once."""

    def __init__(self, folder: Path, lock: FileLock | None, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self.lost_rows = 0  # rows and status updates that a full or failing disk swallowed
        self._lock = lock
        self._warn = warn
        self._status: dict[str, Any] = {"state": "running", "exit_code": None, "step": 0, "message": ""}
        self._log = -1

    @classmethod
    def open(cls, folder: Path, warn: Callable[[str], None] = _say) -> Self:
        """Take a run folder, creating it if need be, and open its log at a whole last line.

        `warn` hears once of a log that cannot be written. Fault(STORAGE) when another process holds the folder
        (naming its pid, host and start; within 2 s) or when the folder cannot be written. The kernel frees the
        lock of a process however it dies.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / _LOCK, timeout=0, thread_local=False)
            lock.acquire()
        except Timeout:
            raise _held(folder) from None
        except (OSError, NotImplementedError) as failure:
            raise _unusable(folder, failure) from failure
        journal = cls(folder, lock, warn)
        try:
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": _now()}
            replace_file(folder / _OWNER, json.dumps(owner) + "\n", durable=False)
            _mend(folder / METRICS)
            journal._open_log()
        except BaseException as failure:
            lock.release()
            if isinstance(failure, OSError):
                raise _unusable(folder, failure) from failure
            raise
        return journal

    @classmethod
    def silent(cls, folder: Path) -> Self:
        """A journal of a run whose folder another process holds: it writes nothing."""
        return cls(folder, None, _say)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rewind(self, step: int) -> None:
        """Forget what a resume at `step` will do again: rows later than it, except events, and unreadable lines.

        The file is replaced atomically. Unreadable lines are dropped with an event row that counts them.
        Fault(STORAGE) when the file cannot be rewritten.
        """
        if self._lock is None:
            return
        path = self.folder / METRICS
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                return
            lines = path.read_bytes().splitlines(keepends=True)
            rows = [_parse(line) for line in lines]
            kept = [
                line
                for line, row in zip(lines, rows, strict=True)
                if row is not None and (row["kind"] == "event" or row["step"] <= step)
            ]
            if len(kept) < len(lines):
                replace_file(path, b"".join(kept).decode(), durable=True)
                os.close(self._log)
                self._open_log()
        except OSError as failure:
            raise _unusable(self.folder, failure) from failure
        if dropped := rows.count(None):
            self.write("event", step, 0, what="unreadable lines dropped from the log", lines=dropped)

    def write(self, kind: str, step: int, tokens: int, **values: Any) -> None:
        """Append one row. kind: one of KINDS; tokens: trained on so far; values: JSON, numpy and paths.

        NaN and infinities become the strings "nan", "inf", "-inf" (JSON has no such numbers; read_metrics turns
        them back). Never raises for a full or failing disk.
        """
        assert kind in KINDS, kind
        if self._lock is None:
            return
        row = {"kind": kind, "step": step, "tokens": tokens, **values}
        line = (json.dumps(_plain(row), allow_nan=False) + "\n").encode()  # ASCII: no text can look like a line end
        try:
            written = os.write(self._log, line)  # one call: a reader never sees half of it
            if written < len(line):
                os.ftruncate(self._log, os.fstat(self._log).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as failure:
            self._lose(METRICS, failure)

    def sync(self) -> None:
        """Make the rows written so far durable; call before a checkpoint that counts on them."""
        if self._lock is None:
            return
        try:
            os.fsync(self._log)
        except OSError as failure:
            if failure.errno != errno.EINVAL:  # what a log that is a device says
                self._lose(METRICS, failure)

    def status(self, **values: Any) -> None:
        """Replace status.json: what was said before, updated by `values` (state, exit_code, step, message, ...).

        Durable when the state is a final one. Never raises for a full or failing disk.
        """
        self._status |= values
        assert self._status["state"] in STATES, self._status["state"]
        if self._lock is None:
            return
        facts = {**self._status, "pid": os.getpid(), "host": socket.gethostname(), "updated": _now()}
        try:
            text = json.dumps(_plain(facts), allow_nan=False, indent=1) + "\n"
            replace_file(self.folder / STATUS, text, durable=facts["state"] != "running")
        except OSError as failure:
            self._lose(STATUS, failure)

    def close(self) -> None:
        """Give the folder back. Safe to call twice."""
        if self._log < 0 or self._lock is None:
            return
        with contextlib.suppress(OSError):
            os.close(self._log)
        self._log = -1
        with contextlib.suppress(OSError):
            (self.folder / _OWNER).unlink()
        self._lock.release()

    def _open_log(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        self._log = os.open(self.folder / METRICS, flags, 0o666)

    def _lose(self, name: str, failure: OSError) -> None:
        self.lost_rows += 1
        if self.lost_rows == 1:
            where = self.folder / name
            self._warn(f"the log cannot be written: {failure.strerror} — {where} — training goes on without it")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, in the order written; a half-written last line is left out.

    "nan", "inf" and "-inf" of train, val and eval rows become floats again. Fault(DATA) with the line number for a
    line that is no row, and when there is no log.
    """
    path = folder / METRICS
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as failure:
        what = f"no metrics to read: {failure.strerror}"
        raise Fault(Exit.DATA, what, str(path), "name the folder of a run") from failure
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is None and number == len(lines) and not line.endswith(b"\n"):
            break
        if row is None:
            raise Fault(Exit.DATA, "not a row of metrics", f"{path}:{number}", "repair or delete that line")
        if row["kind"] in ("train", "val", "eval"):
            row = {key: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for key, v in row.items()}
        rows.append(row)
    return rows


def _parse(line: bytes) -> dict[str, Any] | None:
    """The row in a line, None if there is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match row:
        case {"kind": str(), "step": int(), "tokens": int()}:
            return dict(row)
    return None


def _plain(value: Any) -> Any:
    """The value in terms of JSON: non-finite floats as strings, numpy scalars and arrays as numbers and lists."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)


def _mend(path: Path) -> None:
    """Make a log end with a whole line: complete a last one that lacks only its end, cut off half of one."""
    if not path.exists() or not stat.S_ISREG(path.stat().st_mode):
        return
    with path.open("rb+") as file:
        tail = file.read().rpartition(b"\n")[2]
        if tail and _parse(tail) is not None:
            file.write(b"\n")
        elif tail:
            file.truncate(file.tell() - len(tail))


def replace_file(path: Path, text: str, *, durable: bool = False) -> None:
    """Give a file new content in one move; durable: on the disk when this returns."""
    temporary = path.with_name(f".{path.name.lstrip('.')}.tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary.replace(path)
    if durable and os.name != "nt":
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _held(folder: Path) -> Fault:
    """The Fault for a folder that another run holds, as soon as that run has said who it is."""
    until = time.monotonic() + _OWNER_WAIT_SECONDS
    owner: dict[str, Any] = {}
    while not _may_live(owner) and time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((folder / _OWNER).read_text(encoding="utf-8"))
            owner = found if isinstance(found, dict) else {}
        if not _may_live(owner):
            time.sleep(0.02)
    who = f"pid {owner.get('pid', '?')} on {owner.get('host', '?')} since {owner.get('started', '?')}"
    return Fault(Exit.STORAGE, f"another run is using this folder: {who}", str(folder), "wait for it, or end it first")


def _may_live(owner: dict[str, Any]) -> bool:
    """Whether the process in an owner file can be the holder: not a leftover of one that is gone."""
    pid = owner.get("pid")
    if not isinstance(pid, int):
        return False
    if owner.get("host") != socket.gethostname() or os.name == "nt":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _unusable(folder: Path, failure: OSError | NotImplementedError) -> Fault:
    reason = (isinstance(failure, OSError) and failure.strerror) or str(failure)
    where = (isinstance(failure, OSError) and failure.filename) or folder
    return Fault(Exit.STORAGE, f"the run folder cannot be used: {reason}", str(where), "name a folder you can write")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
