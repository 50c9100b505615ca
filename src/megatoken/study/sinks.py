"""The programs that get a run's rows: TensorBoard, Weights & Biases, MLflow and Trackio.

study/commands/sync.py sends the rows. A room adds a sink by an entry of the kind `sink`, a subclass
of `Sink`.
"""

import math
import os
import tempfile
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatoken.base.config.schema import flatten
from megatoken.base.errors import MegatokenError
from megatoken.base.redact import redact
from megatoken.base.system.metrics_log import METRICS, Row, find_last_rows
from megatoken.store.run_state import read_config
from megatoken.study.settings import ReportConfig, split_names

PROJECT = "megatoken"  # unless log.project or a variable of the program names another
PROBE_BYTES = 64 << 10
MAX_BATCH = 100  # params that MLflow takes at once; of metrics, 1,000
POSITION = ("step", "tokens", "elapsed_seconds")  # numbers of a row that are not metrics
ENDS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "dead": "FAILED"}


@dataclass(frozen=True, kw_only=True)
class SinkRun:
    """The run that a sink gets the rows of.

    settings: the run's settings by key, without secrets; {} if its config cannot be read.
    log: its settings of this room. start: the Unix time at which it would have started if it had
    trained without pauses. state: JSON values that the sink keeps for later syncs.
    """

    folder: Path
    settings: Mapping[str, bool | float | str]
    log: ReportConfig
    start: float
    state: Row

    @classmethod
    def read(cls, folder: Path, state: Row) -> "SinkRun":
        """Read a run's settings. state: what RUN/sync/NAME.json holds."""
        last = find_last_rows(folder, ["train"]).get("train", {})
        modified = (folder / METRICS).stat().st_mtime
        start = state.setdefault("start", modified - last.get("elapsed_seconds", 0.0))
        settings: dict[str, bool | float | str] = {}
        log = ReportConfig()
        with suppress(MegatokenError):
            config = read_config(folder)
            log = config.section(ReportConfig)
            for key, value in flatten(config).items():
                is_plain = isinstance(value, bool | int | float)
                settings[key] = value if is_plain else redact(str(value))
        return cls(folder=folder, settings=settings, log=log, start=start, state=state)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def time_of(self, row: Row) -> float:
        """Return the Unix time of a row, so that differences are training time without pauses."""
        return self.start + float(row.get("elapsed_seconds", 0.0))


class Sink:
    """A program that gets the rows of a run. Its exceptions end the sync, but not the run.

    package: a module that must be installed.
    """

    package = ""

    def __init__(self, run: SinkRun) -> None:
        self.run = run

    def log(self, row: Row) -> None:
        """Take a row of metrics.jsonl.

        After the rows of a run that has ended, one of kind `end` follows. Its `state` is done,
        stopped, failed or dead; its `message` is the reason.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Write out the rows taken so far, if the program supports it.

        Called about once a second. Rows are sent again if it raises.
        """

    def close(self) -> None:
        """Release what was opened."""


class TensorBoard(Sink):
    """Writes event files to RUN/tensorboard, for `tensorboard --logdir runs`."""

    package = "tensorboard"

    def __init__(self, run: SinkRun) -> None:
        super().__init__(run)
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._text = text_pb
        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        if not run.state["sent"]:
            start: Row = {"step": 0}
            text = "\n".join(f"{key}: {value}" for key, value in run.settings.items())
            self._add(start, text_pb("settings", quote(text)))
            self._add(start, hparams_pb(run.settings, run.name, run.start))

    def log(self, row: Row) -> None:
        if row["kind"] == "sample":
            self._add(row, self._text("samples", quote(*row["text"])))
        if numbers := read_numbers(row):
            values = [self._summary.Value(tag=name, simple_value=numbers[name]) for name in numbers]
            self._add(row, self._summary(value=values))

    def _add(self, row: Row, summary: object) -> None:
        moment = self.run.time_of(row)
        self._writer.add_event(self._event(step=row["step"], wall_time=moment, summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB(Sink):
    """Logs to W&B, or to RUN/wandb without an API key or if WANDB_MODE says so."""

    package = "wandb"

    def __init__(self, run: SinkRun) -> None:
        super().__init__(run)
        import wandb

        has_key = wandb.login(prompt=False, verify=False)
        variables = wandb.setup().settings
        self._table = wandb.Table
        self._run = wandb.init(
            project=run.log.project or variables.project or PROJECT,
            group=run.log.group or None,
            tags=split_names(run.log.tags) or None,
            name=variables.run_name or run.name,
            id=run.state.setdefault("id", f"{run.name}-{os.urandom(4).hex()}"),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
            mode=None if has_key else "offline",
        )
        self._run.define_metric("*", step_metric="step")
        self._exit_code = 0

    def log(self, row: Row) -> None:
        values: Row = dict(read_numbers(row))
        if row["kind"] == "sample":
            values["samples"] = self._table(["text"], [[text] for text in row["text"]])
        if row["kind"] == "end":
            self._exit_code = int(ENDS[row["state"]] == "FAILED")
        elif values:
            self._run.log({**values, "step": row["step"], "tokens": row["tokens"]})

    def flush(self) -> None:
        check_free_space(Path(self._run.dir))

    def close(self) -> None:
        self._run.finish(self._exit_code)


class MLflow(Sink):
    """Logs to MLFLOW_TRACKING_URI, or to where MLflow does by default: the current folder."""

    package = "mlflow"

    def __init__(self, run: SinkRun) -> None:
        super().__init__(run)
        import mlflow
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        self._mlflow = mlflow
        self._metrics: list[object] = []
        self._status = "FINISHED"
        mlflow.set_experiment(run.log.project or MLFLOW_EXPERIMENT_NAME.get() or PROJECT)
        tags = dict.fromkeys(split_names(run.log.tags), "")
        if run.log.group:
            tags["group"] = run.log.group
        is_new = "id" not in run.state
        active = mlflow.start_run(run.state.get("id"), run_name=run.name, tags=tags)
        run.state["id"] = self._id = active.info.run_id
        self._client = mlflow.MlflowClient()
        if is_new:  # MLflow refuses other values
            params = [mlflow.entities.Param(key, str(run.settings[key])) for key in run.settings]
            for first in range(0, len(params), MAX_BATCH):
                self._client.log_batch(self._id, params=params[first : first + MAX_BATCH])

    def log(self, row: Row) -> None:
        milliseconds = int(1000 * self.run.time_of(row))
        for name, value in read_numbers(row).items():
            metric = self._mlflow.entities.Metric(name, value, milliseconds, row["step"])
            self._metrics.append(metric)
        if row["kind"] == "sample":
            path = f"samples/step-{row['step']:08d}.md"
            self._client.log_text(self._id, quote(*row["text"]), path)
        if row["kind"] == "end":
            self._status = ENDS[row["state"]]

    def flush(self) -> None:
        for first in range(0, len(self._metrics), MAX_BATCH):
            self._client.log_batch(self._id, metrics=self._metrics[first : first + MAX_BATCH])
        self._metrics.clear()

    def close(self) -> None:
        self._mlflow.end_run(self._status)


class Trackio(Sink):
    """Logs to Trackio: its local database, or the server that its variables name."""

    package = "trackio"

    def __init__(self, run: SinkRun) -> None:
        super().__init__(run)
        import trackio

        self._trackio = trackio
        trackio.init(
            project=run.log.project or PROJECT,
            name=run.name,
            group=run.log.group or None,
            config=dict(run.settings),
            resume="allow",
        )

    def log(self, row: Row) -> None:
        values: Row = dict(read_numbers(row))
        if row["kind"] == "sample":
            values["samples"] = self._trackio.Markdown(quote(*row["text"]))
        if values:
            self._trackio.log(values, step=row["step"])

    def flush(self) -> None:
        check_free_space(Path(self._trackio.TRACKIO_DIR))

    def close(self) -> None:
        self._trackio.finish()


def read_numbers(row: Row) -> dict[str, float]:
    """Return the finite numbers in a train, val or eval row, named like train/loss.

    Numbers of an eval row are named like eval/hellaswag/acc_norm. Other rows have none.
    """
    if row["kind"] not in ("train", "val", "eval"):
        return {}
    return {
        f"{name_source(row)}/{key}": float(value)
        for key, value in row.items()
        if key not in POSITION and isinstance(value, int | float) and math.isfinite(value)
    }


def name_source(row: Row) -> str:
    """Return the kind of a row, such as train or val; eval/TASK for a task's."""
    return f"eval/{row['task']}" if row["kind"] == "eval" else str(row["kind"])


def quote(*texts: str) -> str:
    """Format texts as blocks of code in Markdown, with a rule between two of them."""
    return "\n\n---\n\n".join(textwrap.indent(text, "    ") for text in texts)


def check_free_space(folder: Path) -> None:
    """Raise OSError if the disk of `folder` is full, which W&B and Trackio do not report."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0" * PROBE_BYTES)
