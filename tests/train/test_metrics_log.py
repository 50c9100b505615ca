import json
import math
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing.queues import Queue
from pathlib import Path

import numpy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatoken.base.errors import DataError, MegatokenError, StorageError
from megatoken.base.system.atomic_write import replace_file
from megatoken.base.system.metrics_log import START, MetricsLogger, read_metrics, read_new_rows
from tests.processes import HANG_SECONDS
from tests.ranks import FORKS, start_process


def hold(folder: Path, owners: "Queue[str]") -> None:
    """Lock a folder until this process is killed."""
    try:
        with MetricsLogger.open(folder):
            owners.put(str(os.getpid()))
            time.sleep(HANG_SECONDS)
    except MegatokenError:
        owners.put("refused")


def test_row_format(tmp_path: Path):
    with MetricsLogger.open(tmp_path / "deep/run") as log:
        log.write("train", 1, 4096, loss=0.1 + 0.2, grad_norm=numpy.float32(0.5), lr=6e-05)
        log.write("sample", 1, 4096, text="naïve\nline\u2028\udc80", ids=numpy.arange(3))
    assert (tmp_path / "deep/run/metrics.jsonl").read_bytes() == (
        b'{"kind": "train", "step": 1, "tokens": 4096, "loss": 0.30000000000000004, "grad_norm": 0.5, "lr": 6e-05}\n'
        b'{"kind": "sample", "step": 1, "tokens": 4096, "text": "na\\u00efve\\nline\\u2028\\udc80", '
        b'"ids": [0, 1, 2]}\n'
    )


@settings(deadline=None, max_examples=50)
@given(st.floats(), st.text(), st.lists(st.integers()))
@example(math.nan, "nan", [])
@example(-math.inf, "null", [])
def test_values_round_trip_exactly(number: float, text: str, ids: list[int]):
    with tempfile.TemporaryDirectory() as folder:
        with MetricsLogger.open(Path(folder)) as log:
            log.write("eval", 3, 4, loss=number, ids=ids, mfu=None)
            log.write("sample", 3, 4, text=text)
        row, sample = read_metrics(folder)
        for line in Path(folder, "metrics.jsonl").read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)
    assert repr(row["loss"]) == repr(number)
    assert (row["ids"], row["mfu"], sample["text"]) == (ids, None, text)


def test_lines_that_are_half_written_or_unreadable_are_dropped(tmp_path: Path):
    """The first at the next start, the others at a resume; they are reported until then."""
    with MetricsLogger.open(tmp_path) as log:
        log.write("train", 1, 10, loss=1.5)
        log.write("train", 2, 20, loss=1.25)
    path = tmp_path / "metrics.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    for length in range(len(second)):
        path.write_bytes(first + second[:length])
        is_complete = length == len(second) - 1  # all but the end of the line
        assert len(read_metrics(tmp_path)) == 1 + is_complete
        MetricsLogger.open(tmp_path).close()
        assert path.read_bytes() == first
    fractional = b'{"kind": "train", "step": 1.5, "tokens": 1}\n'
    for garbage in (b"{'a'}\n", b"\0\0\0\n", b"[]\n", fractional, b"\xff\n", b"\n"):
        path.write_bytes(first + garbage + second)
        warned = []
        assert [row["step"] for row in read_metrics(tmp_path, warned.append)] == [1, 2]
        assert len(warned) == 1
        with MetricsLogger.open(tmp_path) as log:
            log.rewind(2)
        assert path.read_bytes() == first + second


def test_missing_log_is_a_data_error_and_unusable_folders_are_storage_errors(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DataError):
        read_metrics(tmp_path)
    for folder in (file, file / "run"):
        with pytest.raises(StorageError):
            MetricsLogger.open(folder)


@pytest.mark.fault(21)
def test_partial_write_is_removed(tmp_path: Path):
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from megatoken.base.system.metrics_log import MetricsLogger\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "log = MetricsLogger.open(Path(sys.argv[1]))\n"
        "for step in range(40): log.write('train', step, step, loss=1.0)\n"
        "log.status(state='running', message='x' * 2000)\n"
        "print(log.lost_rows)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True
    )
    steps = [row["step"] for row in read_metrics(tmp_path)]
    assert len(steps) + int(done.stdout) == 41
    assert steps == list(range(len(steps)))
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")


def test_progress_is_written_about_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now, seen = 100.0, []
    monkeypatch.setattr("megatoken.base.system.metrics_log.time.monotonic", lambda: now)
    with MetricsLogger.open(tmp_path) as log:
        log.status(state="running", step=0)
        for step in range(1, 8):
            now += 0.4
            log.progress(step=step, loss=math.inf if step == 6 else 10.0 - step)
            status = json.loads((tmp_path / "status.json").read_text())
            seen.append((status["state"], status["step"], status["loss"]))
    written = [("running", 0, None), ("running", 3, 7.0), ("running", 6, "inf")]
    assert seen == [*2 * written[:1], *3 * written[1:2], *2 * written[2:]]


@pytest.mark.long
@pytest.mark.fault(22)
def test_a_folder_is_locked_until_its_owner_ends(tmp_path: Path):
    owners = FORKS.Queue()
    processes = [start_process(hold, tmp_path, owners) for _ in range(3)]
    try:
        (owner,) = {owners.get(timeout=HANG_SECONDS) for _ in processes} - {"refused"}
        with pytest.raises(StorageError, match=f"pid {owner} on "):
            MetricsLogger.open(tmp_path)
        (tmp_path / ".owner.json").unlink()
        with pytest.raises(StorageError):
            MetricsLogger.open(tmp_path)
    finally:
        for process in processes:
            process.kill()
            process.join()
    log = MetricsLogger.open(tmp_path)
    log.close()
    log.close()
    MetricsLogger.open(tmp_path).close()


def test_a_reader_continues_where_it_stopped(tmp_path: Path):
    log = tmp_path / "metrics.jsonl"
    rows = [{"kind": "train", "step": step, "tokens": step} for step in range(5)]
    lines = [json.dumps(row) + "\n" for row in rows]
    half, position = lines[0] + lines[1] + lines[2][:9], START
    for text, expected in ((half, rows[:2]), (half, []), ("".join(lines[:4]), rows[2:4])):
        log.write_text(text)
        new, position = read_new_rows(tmp_path, position)
        assert new == expected
    replace_file(log, "".join(lines[3:]))  # by a resume
    new, replaced = read_new_rows(tmp_path, position)
    assert new == rows[3:]
    assert replaced[0] != position[0]
