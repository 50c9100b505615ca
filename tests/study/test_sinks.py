"""A sink gets each row of metrics.jsonl once; a sink that fails stops no run and loses no row."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import urlopen

import pytest

from megatoken.base.config.load import load_config, render
from megatoken.base.console import Console
from megatoken.base.errors import ConfigError, ExitCode
from megatoken.base.system.metrics_log import read_metrics
from megatoken.cli.main import main
from megatoken.distributed.local_launch import find_free_port
from megatoken.study import alerts
from megatoken.study.observers import SinkProcesses, check_sinks
from megatoken.study.prometheus import Prometheus
from megatoken.study.sinks import Sink, SinkRun, check_free_space
from tests.conftest import Call
from tests.processes import wait_until
from tests.tiny_run import tiny_run

Rows = list[tuple[str, int]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Return kind and step of the rows of a sink; its disk is full after a row of step 13."""
    rows = []

    class Recorder(Sink):
        def log(self, row):
            rows.append((row["kind"], row["step"]))

        def flush(self):
            if rows[-2] == ("sample", 13):
                raise OSError(28, "No space left\non device")

    monkeypatch.setattr("megatoken.study.sinks.Trackio", Recorder)
    return rows


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_status(tmp_path, "done", step=4)
    return write_rows(tmp_path, 1, 4)


def write_status(run: Path, state: str, **values: Any) -> None:
    (run / "status.json").write_text(json.dumps({"state": state, **values}))


def write_config(run: Path, *settings: str) -> None:
    resolved = tiny_run(*settings)
    (run / "config.yaml").write_text(render(resolved.config, resolved.origins))


def write_rows(run: Path, first: int, last: int) -> Path:
    """Append train rows of steps first to last, then rows of other kinds."""
    values = {"kind": "train", "mfu": None, "grad_norm": "nan"}
    rows = [{**values, "step": step, "loss": 2.75 - step / 4} for step in range(first, last + 1)]
    rows.append({"kind": "eval", "step": last, "task": "piqa", "acc": 0.5, "stderr": {"acc": 0.1}})
    rows += [{"kind": "event", "step": 1, "what": "spike", "message": "high"}] * 2
    rows.append({"kind": "sample", "step": last, "text": ["thus", "sample-text"]})
    with (run / "metrics.jsonl").open("a") as file:
        for row in rows:
            position = {"tokens": 8 * row["step"], "elapsed_seconds": 1.0}
            file.write(json.dumps(row | position) + "\n")
    return run


def list_rows(first: int, last: int) -> Rows:
    """Return what a sink gets of `write_rows`."""
    rows = [("train", step) for step in range(first, last + 1)]
    return [*rows, ("eval", last), ("event", 1), ("event", 1), ("sample", last)]


END = ("end", 4)


def test_every_row_is_sent_once_also_after_a_resume(run: Path, sent: Rows):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 5, "tok')  # a row that is being written
    assert sync_trackio(run) == ExitCode.DONE
    assert sent == [*list_rows(1, 4), END]
    (run / "metrics.jsonl").unlink()
    write_rows(run, 1, 4)  # a resume has dropped rows and written them again
    write_rows(run, 5, 6)
    assert sync_trackio(run) == ExitCode.DONE
    assert sent == [*list_rows(1, 4), END, *list_rows(5, 6), END]


def sync_trackio(run: Path, option: str = "") -> int:
    return main(f"sync {run} --to trackio {option}".split())


def test_following_sends_rows_as_they_come_until_the_run_ends(
    run: Path, sent: Rows, monkeypatch: pytest.MonkeyPatch
):
    write_status(run, "running")
    starts = iter([5, 7])

    def wait(seconds):
        start = next(starts)
        write_rows(run, start, start + 1)
        if start == 7:
            write_status(run, "stopped", step=4)

    monkeypatch.setattr("time.sleep", wait)
    assert sync_trackio(run, "--follow") == ExitCode.DONE
    assert sent == [*list_rows(1, 4), *list_rows(5, 6), *list_rows(7, 8), END]


def test_rows_of_a_sink_that_fails_are_sent_again(run: Path, sent: Rows, call: Call):
    write_rows(run, 5, 13)
    code, _, error = call(f"sync {run} --to trackio")
    assert (code, error.count("\n")) == (ExitCode.STORAGE, 1)
    assert not (run / "sync/trackio.json").exists()
    sent.clear()
    write_rows(run, 14, 14)
    assert sync_trackio(run) == ExitCode.DONE
    assert sent == [*list_rows(1, 4), *list_rows(5, 13), *list_rows(14, 14), END]


def test_sinks_and_their_room_are_checked_before_a_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    check_free_space(tmp_path / "new")  # by writing
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        check_free_space(Path("/dev/full"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    for setting in ("log.sinks=wandb", "log.alert=$UNSET_WEBHOOK"):
        with pytest.raises(ConfigError):
            check_sinks(load_config("quickstart", setting))


def test_a_sink_process_that_fails_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sinks = SinkProcesses(["nonsense"], tmp_path, Console())
    sinks.start()
    sinks.finish(["nonsense"], 600.0)
    assert "nonsense failed" in capsys.readouterr().out
    assert (tmp_path / "sync-nonsense.log").read_text().startswith("error: ")


def read_tensorboard(run: Path) -> object:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(f"{run}/tensorboard").Reload()
    hparams = events.SummaryMetadata("_hparams_/session_start_info")
    return hparams, events.Tensors("samples"), events.Scalars("train/loss")


def read_wandb(run: Path) -> object:
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    wait_until(lambda: b"train/loss\x82\x01\x041.75" in file.read_bytes())  # by another process
    [table] = run.glob("wandb/offline-run-*/files/media/table/*.json")
    return file.read_bytes(), table.read_text()


def read_mlflow(run: Path) -> object:
    [sample] = run.glob("mlruns/*/*/artifacts/samples/step-00000004.md")
    return sample.read_text(), read_tables(run / "ml.db", "params tags experiments metrics")


def read_trackio(run: Path) -> object:
    return read_tables(run / "own-project.db", "metrics configs")


def read_tables(path: Path, names: str) -> object:
    with sqlite3.connect(path) as data:
        return path, [data.execute(f"select * from {name}").fetchall() for name in names.split()]


@pytest.mark.parametrize("read", [read_tensorboard, read_wandb, read_mlflow, read_trackio])
def test_programs_store_what_they_get(run: Path, read: Callable[[Path], object]):
    name = read.__name__.removeprefix("read_")
    if not find_spec(name):
        pytest.skip(f"{name} is not installed")
    project = "" if name == "wandb" else "log.project=own-project"
    write_config(run, project, "log.group=own-group")
    variables = {
        "WANDB_MODE": "offline",
        "WANDB_PROJECT": "own-project",
        "MLFLOW_TRACKING_URI": "sqlite:///ml.db",
        "TRACKIO_DIR": str(run),
    }
    command = [sys.executable, "-m", "megatoken", "sync", ".", "--to", name]
    subprocess.run(command, check=True, cwd=run, env=os.environ | variables)
    text = str(read(run))
    for expected in ("1.75", "model.d_model", "sample-text", "own-project", "own-group"):
        assert expected in text


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Return the bodies of requests to any host, which go to a proxy on this machine."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever).start()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("urllib.request._opener", None)  # it knows another proxy
        yield bodies
        server.shutdown()


STATES = {"done": "ended", "stopped": "preempted", "failed": "failed", "running": "failed"}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("host", ["hooks.slack.com", "host"])
def test_alerts_are_posted(
    run: Path, host: str, state: str, webhook: list[Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OWN_WEBHOOK", f"http://{host}/secret")
    write_config(run, "log.alert=$OWN_WEBHOOK")
    write_status(run, state, step=4, pid=1 << 23, host=socket.gethostname())  # no such process
    assert main(f"sync {run} --to alert --follow".split()) == ExitCode.DONE
    _, end = webhook  # the first is of both spikes
    assert f"{STATES[state]} at step 4" in end["text"]
    assert end.get("event") == (STATES[state] if host == "host" else None)


def test_a_webhook_that_hangs_is_given_up(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(alerts, "TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(alerts, "PAUSES", (0.0,))
    port = find_free_port()
    monkeypatch.setenv("OWN_WEBHOOK", f"http://127.0.0.1:{port}/secret")
    write_config(run, "log.alert=$OWN_WEBHOOK")
    with socket.create_server(("127.0.0.1", port)):
        assert main(f"sync {run} --to alert".split()) == ExitCode.STORAGE
    output = str(capfd.readouterr())
    assert "timed out" in output
    assert "/secret" not in output


def test_a_stall_is_much_longer_than_the_steps_before():
    silence = alerts.Silence()
    steps = [(0, 1), (20, 2), (219, 2), (221, 2)]
    stalls = [
        silence.find_stall({"state": "running", "step": step}, seconds) for seconds, step in steps
    ]
    assert stalls == [0, 0, 0, 201]


def test_prometheus_gets_the_newest_values(run: Path):
    parser = pytest.importorskip("prometheus_client.parser", reason="no prometheus_client")
    port = find_free_port()
    write_config(run, f"log.metrics_port={port}")
    sink = Prometheus(SinkRun.read(run, {}))
    [*map(sink.log, read_metrics(run))]
    with urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        families = parser.text_string_to_metric_families(response.read().decode())
    sink.close()
    assert 1.75 in [family.samples[0].value for family in families]
