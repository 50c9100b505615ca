"""`megatoken sync RUN --to tensorboard,wandb,trackio`: send a run's metrics to other programs.

This process only reads the log, so a failing sink can neither stop a run nor lose rows. With
`log.sinks=...`, a run starts one such process per sink with --follow (study/observers.py), which
sends rows as they are written and ends after the run. RUN/sync/NAME.json records the last step sent
for each kind of row, so that a later call sends only the rest, even after a resume.
"""

import json
import math
import os
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megatoken.base.config.load import format_value
from megatoken.base.config.schema import flatten
from megatoken.base.console import Console
from megatoken.base.errors import ConfigError, MegatokenError, StorageError
from megatoken.base.redact import redact
from megatoken.base.system.atomic_write import local_path, read_object, replace_file
from megatoken.base.system.file_lock import LockedError, lock_folder
from megatoken.base.system.metrics_log import (
    METRICS,
    START,
    STATUS,
    Row,
    find_last_rows,
    read_new_rows,
)
from megatoken.cli import Data
from megatoken.store.run_state import find_state, read_config
from megatoken.study.settings import SINKS, split_sinks

HELP = "send the metrics of a run to tensorboard, wandb or trackio"
EXAMPLE = "megatoken sync runs/mine --to tensorboard"
POLL_SECONDS = 1.0
PROBE_BYTES = 64 << 10
SENT_KINDS = ("train", "val", "eval")
POSITION = ("step", "tokens", "elapsed_seconds")  # numbers of a row that are not metrics


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=local_path)
    doc = "comma-separated: tensorboard, wandb, trackio"
    parser.add_argument("--to", required=True, metavar="SINKS", type=split_sinks, help=doc)
    doc = "keep sending until the run ends (one sink)"
    parser.add_argument("--follow", action="store_true", help=doc)


def run(options: Namespace, console: Console) -> Data:
    unknown = set(options.to).difference(SINKS)
    if unknown or not options.to:
        raise ConfigError(
            f"unknown sink {', '.join(unknown)}", "--to", f"choose from {', '.join(SINKS)}"
        )
    if not (options.run / METRICS).is_file():
        raise ConfigError("no metrics", options.run / METRICS, "name the folder of a run")
    counts = {}
    for name in options.to:
        counts[name] = send(options.run, name, follow=options.follow and len(options.to) == 1)
        console.print(f"{name}: {counts[name]:,} rows")
    return {"rows": counts}


class Sink(NamedTuple):
    """A program that shows metrics over steps. Its exceptions end the sync, but not the run.

    log: function of the numbers of a row, in a dict by names such as `train/loss`, and the row
    itself.
    flush: writes out what was logged, if the program supports it. Raises OSError on a full disk.
    """

    log: Callable[[dict[str, float], Row], object]
    flush: Callable[[], object]
    close: Callable[[], object]


def open_tensorboard(run: Path, state: Row) -> Sink:
    """Return a sink that writes event files to RUN/tensorboard, for `tensorboard --logdir runs`.

    state: what RUN/sync/NAME.json holds.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(run / "tensorboard"))
    if "start" not in state:
        last = find_last_rows(run, ["train"]).get("train", {})
        state["start"] = (run / METRICS).stat().st_mtime - last.get("elapsed_seconds", 0.0)
        lines = [f"    {key}: {value}" for key, value in read_settings(run).items()]
        text = text_pb("settings", "\n".join(lines))
        writer.add_event(Event(wall_time=state["start"], summary=text))

    def log(values: dict[str, float], row: Row) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        # TensorBoard's "relative" axis then shows training time, without pauses.
        moment = state["start"] + row.get("elapsed_seconds", 0.0)
        summary = Summary(value=scalars)
        writer.add_event(Event(step=row["step"], wall_time=moment, summary=summary))

    return Sink(log, writer.flush, writer.close)


def open_wandb(run: Path, state: Row) -> Sink:
    """Return a sink that logs to the W&B project `megatoken`, or that of WANDB_PROJECT.

    Without an API key, or if WANDB_MODE says so, it logs to RUN/wandb instead.
    """
    import wandb

    name = run.resolve().name
    has_key = wandb.login(prompt=False, verify=False)
    wandb_run = wandb.init(
        project=wandb.setup().settings.project or "megatoken",
        name=name,
        id=state.setdefault("id", f"{name}-{os.urandom(4).hex()}"),
        resume="allow",
        dir=str(run),
        config=read_settings(run),
        mode=None if has_key else "offline",
    )
    wandb_run.define_metric("*", step_metric="step")

    def log(values: dict[str, float], row: Row) -> None:
        wandb_run.log({**values, "step": row["step"], "tokens": row["tokens"]})

    return Sink(log, partial(check_free_space, Path(wandb_run.dir)), wandb_run.finish)


def open_trackio(run: Path, state: Row) -> Sink:
    """Return a sink that logs to the project `megatoken` in trackio's local database."""
    import trackio

    name = run.resolve().name
    trackio.init(project="megatoken", name=name, config=read_settings(run), resume="allow")

    def log(values: dict[str, float], row: Row) -> None:
        trackio.log(values, step=row["step"])

    return Sink(log, partial(check_free_space, Path(trackio.TRACKIO_DIR)), trackio.finish)


OPENERS = {"tensorboard": open_tensorboard, "wandb": open_wandb, "trackio": open_trackio}


def check_free_space(folder: Path) -> None:
    """Raise OSError if the disk of `folder` is full, which W&B and trackio do not report."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0" * PROBE_BYTES)


def read_settings(run: Path) -> dict[str, str]:
    """Return every setting of a run as text by key, or {} if its config cannot be read."""
    with suppress(MegatokenError):
        settings = flatten(read_config(run))
        return {key: redact(format_value(value)) for key, value in settings.items()}
    return {}


def send(run: Path, name: str, *, follow: bool) -> int:
    """Send a sink the rows that it does not have yet, and return their number.

    Does nothing if another process is already sending to the sink. Raises ConfigError if the sink
    is not installed, and StorageError if it fails.

    follow: whether to wait for more rows until the run ends.
    """
    try:
        with suppress(LockedError), lock_folder(run / "sync" / name, "sync"):
            return send_rows(run, name, follow=follow)
    except ImportError:
        raise ConfigError(f"{name} is not installed", fix=f"pip install {name}") from None
    except MegatokenError:
        raise
    except Exception as error:  # raised by the sink
        what = f"{name} failed: {type(error).__name__}: {error!s:.300}"
        fix = f"the run has lost nothing; later: megatoken sync {run} --to {name}"
        raise StorageError(what, run, fix) from error
    return 0


def send_rows(run: Path, name: str, *, follow: bool) -> int:
    """Send rows after the steps recorded in RUN/sync/NAME.json, in order, and update the file.

    Returns their number. follow: as in `send`.
    """
    path = run / "sync" / f"{name}.json"
    state = {"sent": {}, **read_object(path)}
    sink = OPENERS[name](run, state)
    position = START
    count = 0
    try:
        while True:
            run_state = find_state(run, read_object(run / STATUS))
            is_last = not follow or run_state not in ("running", "broken", "copy")
            rows, position = read_new_rows(run, position)
            for row in rows:
                source = name_source(row)
                if row["kind"] in SENT_KINDS and row["step"] > state["sent"].get(source, -1):
                    sink.log(read_numbers(row), row)
                    state["sent"][source] = row["step"]
                    count += 1
            sink.flush()
            replace_file(path, json.dumps(state, indent=1) + "\n")
            if is_last:
                return count
            time.sleep(POLL_SECONDS)
    finally:
        sink.close()


def name_source(row: Row) -> str:
    """Return the prefix for the names of a row's numbers, such as train, val or eval/hellaswag."""
    return f"eval/{row['task']}" if row["kind"] == "eval" else row["kind"]


def read_numbers(row: Row) -> dict[str, float]:
    """Return the finite numbers in a row, named like train/loss or eval/hellaswag/acc_norm."""
    return {
        f"{name_source(row)}/{key}": float(value)
        for key, value in row.items()
        if key not in POSITION and isinstance(value, int | float) and math.isfinite(value)
    }
