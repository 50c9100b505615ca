"""The run folder of a live process: `metrics.jsonl`, `status.json`, and the lock that keeps a second run out.

`metrics.jsonl` holds one object a line: kind, step, tokens, elapsed_seconds, then the values. `status.json` (state,
phase, exit code, step, loss, speed, time left, message, pid, host) is replaced atomically. A log that cannot be written
never stops training: one warning, then the lost rows are counted.
"""

import contextlib
import errno
import json
import math
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Self

from megatoken.config.load import list_runs
from megatoken.errors import DataError, StorageError
from megatoken.redact import redact_values
from megatoken.system.atomic_write import replace_file
from megatoken.system.file_lock import format_now, lock_folder

METRICS = "metrics.jsonl"
STATUS = "status.json"
LONGEST_TAIL = 1 << 23  # bytes of a log that are searched for its last rows: some 30,000 rows
STATUS_SECONDS = 1.0  # between updates of the status by the steps
KINDS = ("train", "val", "eval", "sample", "save", "event")
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsLogger:
    """One run folder, held by this process until `close`. Not thread-safe."""

    def __init__(self, folder: Path, lock: contextlib.ExitStack | None = None) -> None:
        """Use `open`. Without a lock it writes nothing, for processes other than rank 0."""
        self.folder = folder
        self.lost_rows = 0  # rows and status updates that a full or failing disk did not take
        self._lock = lock
        self._status: dict[str, Any] = {
            "state": "running",
            "phase": "setup",
            "exit_code": None,
            "step": 0,
        }
        self._status |= dict.fromkeys(
            ("total_steps", "loss", "tokens_per_second", "eta_seconds")
        ) | {"message": ""}
        self._status_time = -STATUS_SECONDS
        self._file: FileIO | None = None
        self._elapsed_seconds = 0.0  # until the clock was started
        self._clock_start: float | None = None

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Lock a run folder, creating it if need be, and open its log at the end of the last complete line.

        Raises StorageError when another process holds the folder (naming its pid, host and start time) or when the
        folder cannot be written. The kernel frees the lock of a process however it dies.
        """
        lock = contextlib.ExitStack()
        log = cls(folder, lock)
        lock.enter_context(lock_folder(folder, "run"))
        try:
            log._file = FileIO(folder / METRICS, "ab")
            os.truncate(
                folder / METRICS, (folder / METRICS).read_bytes().rfind(b"\n") + 1
            )  # a half-written row
        except OSError as error:
            lock.close()
            raise _unusable_error(folder, error) from error
        return log

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(OSError):
            if (
                kind and self._file and not os.fstat(self._file.fileno()).st_size
            ):  # a start that failed
                (self.folder / METRICS).unlink()
        self.close()

    @property
    def elapsed_seconds(self) -> float:
        """The time of training behind the current weights: since the run's first step, over all of its starts."""
        return self._elapsed_seconds + (
            0.0 if self._clock_start is None else time.monotonic() - self._clock_start
        )

    def start_clock(self) -> None:
        """Count the time from now on."""
        self._clock_start = time.monotonic()

    def rewind(self, step: int, elapsed_seconds: Any = 0.0) -> None:
        """Drop the rows that a resume at `step` will write again: later ones except events, and unreadable lines.

        The clock is set to `elapsed_seconds`, which the checkpoint has kept, or to the last of the rows that stay. The
        file is replaced atomically. Raises StorageError when it cannot be rewritten.
        """
        times, kept = [_read_seconds(elapsed_seconds)], list[bytes]()
        path = self.folder / METRICS
        try:
            lines = path.read_bytes().splitlines(keepends=True) if self._file else []
            for line in lines:
                row = parse_row(line)
                if row is not None and (row["kind"] == "event" or row["step"] <= step):
                    kept.append(line)
                    times += (
                        []
                        if row["kind"] == "event"
                        else [_read_seconds(row.get("elapsed_seconds"))]
                    )
            if self._file and len(kept) < len(lines):
                replace_file(path, b"".join(kept), durable=True)
                self._file.close()
                self._file = FileIO(path, "ab")
        except OSError as error:
            raise _unusable_error(self.folder, error) from error
        self._elapsed_seconds = max(times)
        if self._clock_start is not None:
            self.start_clock()

    def write(self, kind: str, step: int, tokens: int, **values: Any) -> None:
        """Append one row. kind: one of KINDS; tokens: trained on so far; values: JSON and numpy.

        NaN and infinities become the strings "nan", "inf", "-inf", which JSON lacks; read_metrics converts them back.
        Never raises for a full or failing disk.
        """
        assert kind in KINDS, kind
        if self._file is None:
            return
        row = {"kind": kind, "step": step, "tokens": tokens, **values}
        line = (
            json.dumps(_to_json(redact_values(row)), allow_nan=False) + "\n"
        ).encode()  # ASCII: no text can look like a line end
        try:
            written = self._file.write(line)  # one call: a reader never sees half of it
            if written < len(line):
                self._file.truncate(self._file.tell() - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._count_lost(METRICS, error)

    def sync(self) -> None:
        """Make the rows written so far durable; called before a checkpoint that counts on them."""
        if self._file is None:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._count_lost(METRICS, error)

    def progress(self, **values: Any) -> None:
        """`status` of a step, written at most once a second."""
        self._status |= values
        if time.monotonic() - self._status_time >= STATUS_SECONDS:
            self.status()

    def begin(self, phase: str) -> str:
        """Show in the status what the run does from now on: step, validate, save, ...; return what it did before."""
        before: str = self._status["phase"]
        if phase != before:
            self.status(phase=phase)
        return before

    def status(self, **values: Any) -> None:
        """Update status.json by `values`; durable unless the state is `running`. Never raises for a failing disk.

        state: running, done, stopped or failed; with exit_code, step and message.
        """
        self._status |= values
        self._status_time = time.monotonic()
        if self._file is None:
            return
        facts = {
            **self._status,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "updated": format_now(),
        }
        try:
            text = json.dumps(_to_json(redact_values(facts)), indent=1) + "\n"
            replace_file(self.folder / STATUS, text, durable=facts["state"] != "running")
        except OSError as error:
            self._count_lost(STATUS, error)

    def close(self) -> None:
        """Release the folder. Safe to call twice."""
        if self._file is None or self._lock is None:
            return
        self._file.close()
        self._file = None
        self._lock.close()

    def _count_lost(self, name: str, error: OSError) -> None:
        self.lost_rows += 1
        if self.lost_rows == 1:
            text = f"the log cannot be written: {error.strerror} — {self.folder / name} — training goes on without it"
            with contextlib.suppress(OSError):  # of a closed terminal
                print(f"warning: {text}", file=sys.stderr, flush=True)


def read_metrics(
    run: Path | str, warn: Callable[[str], None] = warnings.warn
) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, in the order written; a half-written last line is left out.

    "nan", "inf" and "-inf" of train, val and eval rows become floats again. warn: called with one line where others are
    not rows, which are left out. Raises DataError when there is no log.
    """
    path = Path(run) / METRICS
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        runs = list_runs(Path(run))
        fix = f"name one of its runs: {' '.join(runs[:5])}" if runs else "name the folder of a run"
        raise DataError(f"no metrics to read: {error.strerror}", path, fix) from error
    rows, skipped = [], list[int]()
    for number, line in enumerate(lines, start=1):
        row = parse_row(line)
        if row is None and number == len(lines) and not line.endswith(b"\n"):
            break
        if row is None:
            skipped.append(number)
            continue
        if row["kind"] in ("train", "val", "eval"):
            row = {
                key: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for key, v in row.items()
            }
        rows.append(row)
    if skipped:
        others = f" and {len(skipped) - 1:,} more" if skipped[1:] else ""
        warn(f"left out: not a row of metrics — {path}:{skipped[0]}{others}")
    return rows


def find_last_rows(run: Path, kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The last row of each of some kinds, where there is one, in the last LONGEST_TAIL bytes of a log of any size."""
    found: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(OSError), (run / METRICS).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        for tail in (1 << 16, LONGEST_TAIL):
            file.seek(max(0, size - tail))
            text = file.read()
            for kind in kinds:
                start = text.rfind(b'{"kind": "%s"' % kind.encode())
                if start >= 0 and (row := parse_row(text[start:].partition(b"\n")[0])):
                    found[kind] = row
            if tail >= size or len(found) == len(kinds):
                break
    return found


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A place in a run's metrics.jsonl. inode: of the file, which a resume may replace."""

    inode: int = 0
    offset: int = 0


def read_new_rows(run: Path, position: LogPosition) -> tuple[list[dict[str, Any]], LogPosition]:
    """Return the complete rows after a position, and the position after them. Raises OSError.

    After a resume has replaced the file, return all of its rows; the new position has another inode.
    """
    with (run / METRICS).open("rb") as file:
        inode = os.fstat(file.fileno()).st_ino
        start = position.offset if inode == position.inode else 0
        file.seek(start)
        complete = file.read().rpartition(b"\n")[0]
    end = start + len(complete) + 1 if complete else start
    rows = [row for line in complete.splitlines() if (row := parse_row(line)) is not None]
    return rows, LogPosition(inode, end)


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The row in a line, None if it is not one."""
    with contextlib.suppress(ValueError, RecursionError):
        match row := json.loads(line):
            case {"kind": str(), "step": int(), "tokens": int()}:
                return dict(row)
    return None


def _read_seconds(value: Any) -> float:
    """The value if it is a duration, 0 if it is missing, as in older runs, or anything else."""
    return value if isinstance(value, float) and 0 <= value < math.inf else 0.0


def _to_json(value: Any) -> Any:
    """The value in terms of JSON: non-finite floats as strings, numpy scalars and arrays as numbers and lists."""
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if hasattr(value, "tolist"):
        return _to_json(value.tolist())
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _unusable_error(folder: Path, error: OSError) -> StorageError:
    reason, where = (
        getattr(error, "strerror", None) or error,
        getattr(error, "filename", None) or folder,
    )
    return StorageError(
        f"the run folder cannot be used: {reason}", where, "name a folder you can write"
    )
