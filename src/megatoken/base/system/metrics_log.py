"""Write the metrics log and status of a run, hold its folder's lock, and read metrics logs.

`metrics.jsonl` holds one object per line: kind, step, tokens, elapsed_seconds and the row's values.
`status.json` (state, phase, exit code, step, loss, speed, time left, message, pid, host) is
replaced atomically. Failing to write the log never stops training: the logger warns once and counts
the lost rows.
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
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Self

from megatoken.base.config.load import list_runs
from megatoken.base.errors import DataError, Warn
from megatoken.base.redact import redact_values
from megatoken.base.system.atomic_write import replace_file, storage_errors
from megatoken.base.system.file_lock import format_now, lock_folder

Row = dict[str, Any]  # of metrics.jsonl
METRICS = "metrics.jsonl"
STATUS = "status.json"
LONGEST_TAIL = 1 << 23  # bytes of a log that are searched for its last rows: some 30,000 rows
STATUS_SECONDS = 1.0  # between updates of the status after steps
KINDS = ("train", "val", "eval", "sample", "save", "event")
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
UNUSABLE = "the run folder cannot be used"
OTHER_FOLDER = "name a folder you can write"


class MetricsLogger:
    """Writes the metrics log and status of a run, and holds the folder's lock until `close`.

    Not thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        """Make a logger that writes nothing, for ranks other than 0. For rank 0, use `open`."""
        self.folder = folder
        self.lost_rows = 0  # rows and status updates that could not be written
        self._lock = contextlib.ExitStack()
        self._status: Row = {
            "state": "running",
            "phase": "setup",
            "exit_code": None,
            "step": 0,
            "total_steps": None,
            "loss": None,
            "tokens_per_second": None,
            "eta_seconds": None,
            "message": "",
        }
        self._status_time = -STATUS_SECONDS
        self._file: FileIO | None = None
        self._elapsed_seconds = 0.0  # until the clock was started
        self._clock_start: float | None = None

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Lock a run folder, creating it if needed, and open its log to append rows.

        An incomplete last line is cut off. Raises StorageError if another process holds the lock or
        the folder is not writable. The kernel releases the lock of a process that dies.
        """
        log = cls(folder)
        with contextlib.ExitStack() as lock:
            lock.enter_context(lock_folder(folder, "run"))
            with storage_errors(folder, what=UNUSABLE, fix=OTHER_FOLDER):
                path = folder / METRICS
                log._file = FileIO(path, "ab")
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # a half-written row
            log._lock = lock.pop_all()  # keep it locked
        return log

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(OSError):
            is_empty = self._file is not None and not os.fstat(self._file.fileno()).st_size
            if kind and is_empty:  # the start failed
                (self.folder / METRICS).unlink()
        self.close()

    @property
    def elapsed_seconds(self) -> float:
        """Seconds of training that led to the current weights, over all starts of the run."""
        if self._clock_start is None:
            return self._elapsed_seconds
        return self._elapsed_seconds + time.monotonic() - self._clock_start

    def start_clock(self) -> None:
        """Start counting training time."""
        self._clock_start = time.monotonic()

    def rewind(self, step: int, elapsed_seconds: float = 0.0) -> None:
        """Remove unreadable lines from the log, and all rows after `step` except events.

        The clock goes back to `elapsed_seconds`, which the checkpoint holds, or to the time of the
        last remaining row if that is later. Raises StorageError if the file cannot be rewritten.
        """
        self._elapsed_seconds = elapsed_seconds
        if self._clock_start is not None:
            self.start_clock()
        if self._file is None:
            return
        path = self.folder / METRICS
        remaining = []
        with storage_errors(self.folder, what=UNUSABLE, fix=OTHER_FOLDER):
            lines = path.read_bytes().splitlines(keepends=True)
            for line in lines:
                row = parse_row(line)
                if row is None or (row["kind"] != "event" and row["step"] > step):
                    continue
                remaining.append(line)
                if row["kind"] != "event":
                    seconds = row.get("elapsed_seconds", 0.0)
                    self._elapsed_seconds = max(self._elapsed_seconds, seconds)
            if len(remaining) < len(lines):
                replace_file(path, b"".join(remaining), durable=True)
                self._file.close()
                self._file = FileIO(path, "ab")

    def write(self, kind: str, step: int, tokens: int, **values: Any) -> None:
        """Append a row to the log. Errors of a full or failing disk are not raised.

        NaN and infinities become the strings "nan", "inf" and "-inf".

        kind: one of KINDS. tokens: tokens trained on so far. values: JSON or NumPy values.
        """
        assert kind in KINDS, kind
        if self._file is None:
            return
        row = {"kind": kind, "step": step, "tokens": tokens, **values}
        text = json.dumps(_to_json(redact_values(row)), allow_nan=False)  # ASCII, without newlines
        line = f"{text}\n".encode()
        try:
            n_written = self._file.write(line)  # one call: a reader never sees half of it
            if n_written < len(line):
                self._file.truncate(self._file.tell() - n_written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._count_lost(METRICS, error)

    def sync(self) -> None:
        """Fsync the log, which is required before a checkpoint is written."""
        if self._file is None:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._count_lost(METRICS, error)

    def progress(self, **values: Any) -> None:
        """Add a step's values to status.json, written at most once per STATUS_SECONDS."""
        self._status |= values
        if time.monotonic() - self._status_time >= STATUS_SECONDS:
            self.status()

    def begin(self, phase: str) -> str:
        """Set the phase in status.json (step, validate, save, ...), and return the previous one."""
        previous: str = self._status["phase"]
        if phase != previous:
            self.status(phase=phase)
        return previous

    def status(self, **values: Any) -> None:
        """Update status.json, with an fsync unless the state is `running`. Disk errors are ignored.

        values: entries to change, such as `state` (running, done, stopped or failed), exit_code,
            step and message.
        """
        self._status |= values
        self._status_time = time.monotonic()
        if self._file is None:
            return
        status = {
            **self._status,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "updated": format_now(),
        }
        try:
            text = json.dumps(_to_json(redact_values(status)), indent=1) + "\n"
            replace_file(self.folder / STATUS, text, durable=status["state"] != "running")
        except OSError as error:
            self._count_lost(STATUS, error)

    def close(self) -> None:
        """Close the log and release the folder's lock. Safe to call twice."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        self._lock.close()

    def _count_lost(self, name: str, error: OSError) -> None:
        self.lost_rows += 1
        if self.lost_rows == 1:
            text = f"cannot write the log: {error.strerror} — {self.folder / name}; continuing"
            with contextlib.suppress(OSError):  # the terminal is closed
                print(f"warning: {text}", file=sys.stderr, flush=True)


def read_metrics(run: Path | str, warn: Warn = warnings.warn) -> list[Row]:
    """Return the rows of a run's metrics.jsonl in order, without an incomplete last line.

    The strings "nan", "inf" and "-inf" in train, val and eval rows become floats. Lines that are
    not rows are skipped. Raises DataError if there is no log.

    warn: called with one message if lines were skipped.
    """
    path = Path(run) / METRICS
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        runs = list_runs(Path(run))
        fix = f"name one of its runs: {' '.join(runs[:5])}" if runs else "name the folder of a run"
        raise DataError(f"no metrics to read: {error.strerror}", path, fix) from error
    if lines and not lines[-1].endswith(b"\n") and parse_row(lines[-1]) is None:
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        row = parse_row(line)
        if row is None:
            warn(f"skipped: not a row of metrics — {path}:{number}")
            continue
        if row["kind"] in ("train", "val", "eval"):
            for key, value in row.items():
                if isinstance(value, str):
                    row[key] = NOT_FINITE.get(value, value)
        rows.append(row)
    return rows


def of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    """Return the rows of a kind."""
    return [row for row in rows if row["kind"] == kind]


def find_last_rows(run: Path, kinds: Sequence[str]) -> dict[str, Row]:
    """Return the last row of each kind, by kind, in the last LONGEST_TAIL bytes of a run's log."""
    rows: dict[str, Row] = {}
    with contextlib.suppress(OSError), (run / METRICS).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        for tail in (1 << 16, LONGEST_TAIL):
            file.seek(max(0, size - tail))
            text = file.read()
            for kind in kinds:
                start = text.rfind(b'{"kind": "%s"' % kind.encode())
                row = parse_row(text[start:].partition(b"\n")[0]) if start >= 0 else None
                if row is not None:
                    rows[kind] = row
            if tail >= size or len(rows) == len(kinds):
                break
    return rows


# A position in a metrics.jsonl: the inode, because a resume may replace the file, and the offset.
LogPosition = tuple[int, int]
START: LogPosition = (0, 0)


def read_new_rows(run: Path, position: LogPosition) -> tuple[list[Row], LogPosition]:
    """Return the complete rows after a position, and the new position. Raises OSError.

    If a resume has replaced the file, returns all rows of the new file, and a position with its
    inode.
    """
    with (run / METRICS).open("rb") as file:
        inode = os.fstat(file.fileno()).st_ino
        start = position[1] if inode == position[0] else 0
        file.seek(start)
        complete = file.read().rpartition(b"\n")[0]
    end = start + len(complete) + 1 if complete else start
    rows = [parse_row(line) for line in complete.splitlines()]
    return [row for row in rows if row is not None], (inode, end)


def parse_row(line: bytes) -> Row | None:
    """Parse a line of metrics.jsonl; return None if it is not a row."""
    with contextlib.suppress(ValueError, RecursionError):
        match row := json.loads(line):
            case {"kind": str(), "step": int(), "tokens": int()}:
                return dict(row)
    return None


def _to_json(value: Any) -> Any:
    """Convert non-finite floats to strings, and NumPy scalars and arrays to numbers and lists."""
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if hasattr(value, "tolist"):
        return _to_json(value.tolist())
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
