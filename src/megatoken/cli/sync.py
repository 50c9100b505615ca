"""`megatoken sync RUN --to tensorboard,wandb,trackio`: sends a run's metrics.jsonl to other programs.

A separate process reads the log, so no sink can stop a run or lose a row. `log.sinks=...` starts one
per run with --follow (train/sinks.py), which sends rows as they arrive and ends after the run.
RUN/sync/NAME.json holds the last step sent of each kind, so a later call sends the rest, and no row of
a resumed run twice.
"""

import json
import math
import os
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from megatoken.cli import Result
from megatoken.cli.runs import read_config, read_run
from megatoken.config.load import format_value
from megatoken.config.schema import SINKS, flatten, split_sinks
from megatoken.console import Console
from megatoken.errors import ConfigError, ExitCode, MegatokenError, StorageError
from megatoken.redact import redact
from megatoken.system.atomic_write import local_path, read_object, replace_file, storage_errors
from megatoken.system.file_lock import LockedError, lock_folder
from megatoken.system.metrics_log import METRICS, parse_row

POLL_SECONDS = 1.0
PROBE_BYTES = 64 << 10
SENT_KINDS = ("train", "val", "eval")
PLACE = ("kind", "step", "tokens", "elapsed_seconds", "task")
Row = dict[str, Any]


class Sink(Protocol):
    """A program that shows numbers over steps. Any exception ends the sync, never the run."""

    def log(self, values: dict[str, float], row: Row) -> None:
        """Take the numbers of one row, by name such as `train/loss`."""

    def flush(self) -> None:
        """Write what was logged, as far as this program lets us; raises where there is no room."""

    def close(self) -> None:
        """Write or send what is left."""


class TensorBoard:
    """Event files in RUN/tensorboard, for `tensorboard --logdir runs`."""

    def __init__(self, run: Path, state: Row) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run / "tensorboard"))

    def log(self, values: dict[str, float], row: Row) -> None:
        scalars = [
            self._summary.Value(tag=name, simple_value=value) for name, value in values.items()
        ]
        # Its "relative" axis then shows the time of training, without pauses.
        seconds = float(row.get("elapsed_seconds") or 0)
        event = self._event(
            step=row["step"], wall_time=seconds, summary=self._summary(value=scalars)
        )
        self._writer.add_event(event)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def is_logged_in(wandb: Any) -> bool:
    """Whether W&B has an API key in the environment or in netrc; no prompt, no request."""
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # older versions always ask
        return bool(wandb.api.api_key)


class WandB:
    """A run of the project `megatoken`; offline, in RUN/wandb, where this user has not logged in, or by WANDB_MODE."""

    def __init__(self, run: Path, state: Row) -> None:
        import wandb

        self._run = wandb.init(
            project="megatoken",
            name=run.resolve().name,
            id=state.setdefault("id", f"{run.resolve().name}-{os.urandom(4).hex()}"),
            resume="allow",
            dir=str(run),
            config=read_settings(run),
            mode=None if is_logged_in(wandb) else "offline",
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, float], row: Row) -> None:
        self._run.log({**values, "step": row["step"], "tokens": row["tokens"]})

    def flush(self) -> None:
        check_room(Path(self._run.dir))

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of the project `megatoken` in trackio's local database."""

    def __init__(self, run: Path, state: Row) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(
            project="megatoken", name=run.resolve().name, config=read_settings(run), resume="allow"
        )

    def log(self, values: dict[str, float], row: Row) -> None:
        self._trackio.log(values, step=row["step"])

    def flush(self) -> None:
        check_room(Path(self._trackio.TRACKIO_DIR))

    def close(self) -> None:
        self._trackio.finish()


CLASSES: dict[str, type[TensorBoard] | type[WandB] | type[Trackio]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}


def check_room(folder: Path) -> None:
    """Write and remove a file in a sink's folder: W&B and trackio raise no error on a full disk. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0" * PROBE_BYTES)


def read_settings(run: Path) -> dict[str, str]:
    """Every setting of a run by its key; none where its config cannot be read."""
    try:
        return {
            key: redact(format_value(value)) for key, value in flatten(read_config(run)).items()
        }
    except MegatokenError:
        return {}


def sync(options: Namespace) -> dict[str, Any]:
    """Send the rows that each sink has not had yet. Raises ConfigError for a sink that is not installed or fails,
    DataError and StorageError for a folder that is no run or cannot be written."""
    run: Path = options.run
    names = split_sinks(options.to)
    if not names:
        raise ConfigError("no sink given", "--to", f"choose of {', '.join(SINKS)}")
    for name in names:
        if name not in SINKS:
            raise ConfigError(f"unknown sink {name!r}", "--to", f"choose of {', '.join(SINKS)}")
    if not (run / METRICS).is_file():
        raise ConfigError("no metrics to send", str(run / METRICS), "name the folder of a run")
    counts = {}
    with storage_errors(run / "sync", fix="free some space, then sync again"):
        (run / "sync").mkdir(exist_ok=True)
        for name in names:
            counts[name] = send(run, name, follow=options.follow and len(names) == 1)
            options.console.print(f"{name}: {counts[name]:,} rows")
    return {"rows": counts}


def send(run: Path, name: str, *, follow: bool) -> int:
    """Send a sink the rows it lacks; follow: until the run has ended. Returns how many; none beside another sync."""
    count = 0
    try:
        with lock_folder(run / "sync" / name, "sync"):
            state = read_object(run / "sync" / f"{name}.json")
            sent = {
                str(kind): step
                for kind, step in state.get("sent", {}).items()
                if isinstance(step, int)
            }
            sink: Sink = CLASSES[name](run, state)
            try:
                for row in read_rows(run, follow=follow):
                    if row is None:  # all that is there has been sent
                        sink.flush()
                        replace_file(
                            run / "sync" / f"{name}.json",
                            json.dumps({**state, "sent": sent}, indent=1) + "\n",
                        )
                    elif row["kind"] in SENT_KINDS and row["step"] > sent.get(name_source(row), -1):
                        sink.log(read_numbers(row), row)
                        sent[name_source(row)] = row["step"]
                        count += 1
            finally:
                sink.close()
    except LockedError:
        pass
    except ImportError:
        raise ConfigError(f"{name} is not installed", fix=f"pip install {name}") from None
    except MegatokenError:
        raise
    except Exception as error:  # of a program that is not ours
        what = f"{name} failed: {type(error).__name__}: {' '.join(str(error).split()):.300}"
        raise StorageError(
            what, str(run), f"the run has lost nothing; later: megatoken sync {run} --to {name}"
        ) from error
    return count


def name_source(row: Row) -> str:
    """Where numbers of a row come from: train, val, eval/hellaswag."""
    return f"{row['kind']}/{row.get('task')}" if row["kind"] == "eval" else str(row["kind"])


def read_numbers(row: Row) -> dict[str, float]:
    """The finite numbers of a row by name: train/loss, val/loss, eval/hellaswag/acc_norm."""
    found = {
        key: value
        for key, value in row.items()
        if key not in PLACE and isinstance(value, int | float)
    }
    return {
        f"{name_source(row)}/{key}": float(value)
        for key, value in found.items()
        if math.isfinite(value)
    }


def read_rows(run: Path, *, follow: bool) -> Iterator[Row | None]:
    """The rows of a log in order, then None; follow: also those that come, until the run has ended.

    A log that was replaced (a resume drops rows) is read again from its beginning.
    """
    ended = not follow or has_ended(run)  # asked before the last rows are read
    while True:
        inode = (run / METRICS).stat().st_ino
        with (run / METRICS).open("rb") as file:
            while True:
                line = file.readline()
                if line.endswith(b"\n"):
                    if row := parse_row(line):
                        yield row
                    continue
                file.seek(-len(line), os.SEEK_CUR)  # a row that is being written
                yield None
                if ended:
                    return
                time.sleep(POLL_SECONDS)
                ended = has_ended(run)
                status = (run / METRICS).stat()
                if status.st_ino != inode or status.st_size < file.tell():
                    break


def has_ended(run: Path) -> bool:
    return read_run(run)["state"] not in ("running", "broken", "copy")


HELP = "send the metrics of a run to tensorboard, wandb or trackio"
EXAMPLE = "megatoken sync runs/mine --to tensorboard"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=local_path)
    doc = "comma-separated: tensorboard, wandb, trackio"
    parser.add_argument("--to", required=True, metavar="SINKS", help=doc)
    doc = "keep sending until the run ends (one sink)"
    parser.add_argument("--follow", action="store_true", help=doc)


def run(options: Namespace, console: Console) -> Result:
    options.console = console
    return Result(ExitCode.DONE, sync(options))
