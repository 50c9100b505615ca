"""`megatoken sync RUN --to tensorboard,wandb`: send a run's metrics to other programs.

This process only reads the log, so a failing sink can neither stop a run nor lose rows. With
`log.sinks=...`, a run starts one such process per sink with --follow (study/observers.py), which
sends rows as they are written and ends after the run. RUN/sync/NAME.json records the last step sent
for each kind of row, so that a later call sends only the rest, even after a resume.
"""

import json
import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path

from megatoken.base.console import Console
from megatoken.base.errors import ConfigError, MegatokenError, StorageError
from megatoken.base.rooms import list_entries, load_entry
from megatoken.base.system.atomic_write import local_path, read_object, replace_file
from megatoken.base.system.file_lock import LockedError, lock_folder
from megatoken.base.system.metrics_log import METRICS, START, STATUS, Row, read_new_rows
from megatoken.cli import Data
from megatoken.store.run_state import find_state
from megatoken.study.settings import split_names
from megatoken.study.sinks import ENDS, Sink, SinkRun, name_source

HELP = "send the metrics of a run to W&B, TensorBoard, MLflow or other programs"
EXAMPLE = "megatoken sync runs/mine --to tensorboard"
POLL_SECONDS = 1.0
KILLED = "its process is gone: killed, or out of memory"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=local_path)
    doc = f"comma-separated: {', '.join(list_entries('sink'))}"
    parser.add_argument("--to", required=True, metavar="SINKS", type=split_names, help=doc)
    doc = "keep sending until the run ends (one sink)"
    parser.add_argument("--follow", action="store_true", help=doc)


def run(options: Namespace, console: Console) -> Data:
    known = list_entries("sink")
    unknown = set(options.to).difference(known)
    if unknown or not options.to:
        raise ConfigError(
            f"unknown sink {', '.join(unknown)}", "--to", f"choose from {', '.join(known)}"
        )
    if not (options.run / METRICS).is_file():
        raise ConfigError("no metrics", options.run / METRICS, "name the folder of a run")
    counts = {}
    for name in options.to:
        counts[name] = send(options.run, name, follow=options.follow and len(options.to) == 1)
        console.print(f"{name}: {counts[name]:,} rows")
    return {"rows": counts}


def send(run: Path, name: str, *, follow: bool) -> int:
    """Send a sink the rows that it does not have yet, and return their number.

    Does nothing if another process is already sending to the sink. Raises ConfigError if the sink
    is not installed, and StorageError if it fails.

    follow: whether to wait for more rows until the run ends.
    """
    try:
        with suppress(LockedError), lock_folder(run / "sync" / name, "sync"):
            return send_rows(run, name, follow=follow)
    except ImportError as error:
        raise ConfigError(f"{name} is not installed: {error}", fix=f"pip install {name}") from None
    except MegatokenError:
        raise
    except Exception as error:  # raised by the sink
        what = f"{name} failed: {type(error).__name__}: {error!s:.300}"
        fix = f"the run has lost nothing; later: megatoken sync {run} --to {name}"
        raise StorageError(what, run, fix) from error
    return 0


def send_rows(run: Path, name: str, *, follow: bool) -> int:
    """Send rows after those recorded in RUN/sync/NAME.json, in order, and update the file.

    Returns their number. follow: as in `send`.
    """
    path = run / "sync" / f"{name}.json"
    state = {"sent": {}, **read_object(path)}
    sink: Sink = load_entry("sink", name)(SinkRun.read(run, state))
    position = START
    count = n_events = 0
    try:
        while True:
            status = read_object(run / STATUS)
            run_state = find_state(run, status)
            rows, (inode, end) = read_new_rows(run, position)
            n_events *= inode == position[0]  # else the log is read again from its start
            position = inode, end
            for row in rows:
                source = name_source(row)
                n_events += source == "event"
                number = n_events if source == "event" else row["step"]
                if number > state["sent"].get(source, -1):
                    sink.log(row)
                    state["sent"][source] = number
                    count += 1
            if run_state in ENDS:
                sink.log(build_end(run_state, status))
            sink.flush()
            replace_file(path, json.dumps(state, indent=1) + "\n")
            if run_state in ENDS or not follow:
                return count
            time.sleep(POLL_SECONDS)
    finally:
        sink.close()


def build_end(run_state: str, status: Row) -> Row:
    """Build the last row that a sink gets from the status of a run that has ended."""
    message = KILLED if run_state == "dead" else status.get("message", "")
    step = status.get("step", 0)
    return {"kind": "end", "state": run_state, "step": step, "message": message}
