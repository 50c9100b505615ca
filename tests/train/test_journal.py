import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.errors import Exit, Fault
from megatoken.train.journal import Journal, read_metrics

HOLD = """
import sys, time
from pathlib import Path
from megatoken.errors import Fault
from megatoken.train.journal import Journal
started = time.monotonic()
try:
    journal = Journal.open(Path(sys.argv[1]))
except Fault as fault:
    print(f"{time.monotonic() - started:.3f} {fault}", flush=True)
    sys.exit(fault.code)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
journal.close()
"""


def start(folder: Path, seconds: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", HOLD, str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def rows_of(folder: Path) -> list[tuple[str, int]]:
    return [(row["kind"], row["step"]) for row in read_metrics(folder)]


def test_rows_are_one_object_a_line_with_kind_step_tokens_first(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "deep" / "run") as journal:
        journal.write("train", 1, 4096, loss=0.1 + 0.2, grad_norm=numpy.float32(0.5), lr=6e-05)
        journal.write("sample", 1, 4096, text="naïve\nline\u2028\udc80", path=Path("a") / "b", ids=numpy.arange(3))
    assert (tmp_path / "deep" / "run" / "metrics.jsonl").read_bytes() == (
        b'{"kind": "train", "step": 1, "tokens": 4096, "loss": 0.30000000000000004, "grad_norm": 0.5, "lr": 6e-05}\n'
        b'{"kind": "sample", "step": 1, "tokens": 4096, "text": "na\\u00efve\\nline\\u2028\\udc80", "path": "a/b", '
        b'"ids": [0, 1, 2]}\n'
    )


def test_what_is_not_finite_is_valid_json_and_comes_back(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        journal.write("train", 1, 2, loss=math.nan, grad_norm=math.inf, lr=-math.inf, mfu=None)
        journal.write("sample", 1, 2, text="nan")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert first["loss"] == "nan"
    train, sample = read_metrics(tmp_path)
    assert math.isnan(train["loss"])
    assert (train["grad_norm"], train["lr"], train["mfu"]) == (math.inf, -math.inf, None)
    assert sample["text"] == "nan"


@settings(deadline=None, max_examples=50)
@given(st.floats(), st.text(), st.lists(st.integers()))
def test_values_survive_bit_for_bit(number: float, text: str, ids: list[int]) -> None:
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"megatoken-journal-{os.getpid()}"
    try:
        with Journal.open(folder) as journal:
            journal.write("eval", 3, 4, loss=number, ids=ids)
            journal.write("sample", 3, 4, text=text)
        row, sample = read_metrics(folder)
        assert repr(row["loss"]) == repr(number)
        assert row["ids"] == ids
        assert sample["text"] == text
    finally:
        shutil.rmtree(folder)


def test_rewind_drops_what_will_be_done_again(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        for step in (1, 2, 3):
            for kind in ("train", "val", "eval", "sample", "save", "event"):
                journal.write(kind, step, step * 10)
    kept = [(kind, step) for step in (1, 2) for kind in ("train", "val", "eval", "sample", "save", "event")]
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with Journal.open(tmp_path) as journal:
        journal.rewind(3)
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        journal.rewind(2)
        assert rows_of(tmp_path) == [*kept, ("event", 3)]
        journal.write("train", 3, 30)
    assert rows_of(tmp_path) == [*kept, ("event", 3), ("train", 3)]
    assert not list(tmp_path.glob("*.tmp"))


def test_half_a_last_line_is_left_out_and_cut_off(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        journal.write("train", 1, 10, loss=1.5)
        journal.write("train", 2, 20, loss=1.25)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        complete = length == len(whole) - 1  # all but the end of the line
        assert len(read_metrics(tmp_path)) == (2 if complete else 1)
        Journal.open(tmp_path).close()
        assert path.read_bytes() == (whole if complete else whole[:first])


def test_a_garbled_line_is_named_and_a_resume_drops_it(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        journal.write("train", 1, 10)
        journal.write("train", 2, 20)
    path = tmp_path / "metrics.jsonl"
    good = path.read_bytes().splitlines(keepends=True)
    for garbage in (
        b"{'a'}\n",
        b"\0\0\0\n",
        b"[]\n",
        b'{"kind": "train", "step": 1.5, "tokens": 1}\n',
        b"\xff\n",
        b"\n",
    ):
        path.write_bytes(good[0] + garbage + good[1])
        with pytest.raises(Fault, match=re.escape(f"not a row of metrics — {path}:2 — ")) as caught:
            read_metrics(tmp_path)
        assert caught.value.code == Exit.DATA
        with Journal.open(tmp_path) as journal:
            journal.rewind(2)
        assert rows_of(tmp_path) == [("train", 1), ("train", 2), ("event", 2)]
        assert read_metrics(tmp_path)[2]["lines"] == 1


def test_no_log_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(Fault, match="no metrics to read: No such file") as caught:
        read_metrics(tmp_path)
    assert caught.value.code == Exit.DATA


def test_a_full_disk_under_the_log_warns_once_and_goes_on(tmp_path: Path) -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("no /dev/full")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    warnings: list[str] = []
    with Journal.open(tmp_path, warn=warnings.append) as journal:
        journal.rewind(5)
        for step in range(7):
            journal.write("train", step, step)
        journal.sync()
        assert journal.lost_rows == 7
    where = tmp_path / "metrics.jsonl"
    assert warnings == [f"the log cannot be written: No space left on device — {where} — training goes on without it"]
    assert Path("/dev/full").is_char_device()


def test_half_a_row_never_stays_in_the_log(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys; from pathlib import Path; from megatoken.train.journal import Journal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "journal = Journal.open(Path(sys.argv[1]), warn=lambda text: print(text))\n"
        "for step in range(40): journal.write('train', step, step, loss=1.0)\n"
        "journal.status(state='running', message='x' * 2000)\n"
        "print(journal.lost_rows)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    warning, lost = done.stdout.splitlines()
    assert warning.startswith("the log cannot be written: No space left on device — ")
    steps = [row["step"] for row in read_metrics(tmp_path)]
    assert len(steps) + int(lost) == 41
    assert steps == list(range(len(steps)))
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")


def test_status_is_replaced_whole_and_remembers(tmp_path: Path) -> None:
    def read() -> dict[str, Any]:
        return dict(json.loads((tmp_path / "status.json").read_text()))

    with Journal.open(tmp_path) as journal:
        journal.status(step=3)
        assert {key: read()[key] for key in ("state", "exit_code", "step", "message", "pid")} == {
            "state": "running",
            "exit_code": None,
            "step": 3,
            "message": "",
            "pid": os.getpid(),
        }
        journal.status(state="failed", exit_code=Exit.STORAGE, message="disk full")
        assert (read()["state"], read()["exit_code"], read()["step"]) == ("failed", 5, 3)
        with pytest.raises(AssertionError):
            journal.status(state="tired")
        with pytest.raises(AssertionError):
            journal.write("tired", 1, 1)


def test_a_second_run_is_refused_at_once_naming_the_first(tmp_path: Path) -> None:
    first = start(tmp_path, 30)
    try:
        assert first_line(first) == "held\n"
        begun = time.monotonic()
        with pytest.raises(Fault) as caught:
            Journal.open(tmp_path)
        assert time.monotonic() - begun < 2
        assert caught.value.code == Exit.STORAGE
        host = os.uname().nodename
        assert re.search(rf"pid {first.pid} on {re.escape(host)} since 20\d\d-\d\d-\d\dT", str(caught.value))
        assert str(tmp_path) in str(caught.value)
        first.kill()
        first.wait()
        Journal.open(tmp_path).close()
    finally:
        end(first)


def test_the_same_process_cannot_open_twice_and_can_after_closing(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    with pytest.raises(Fault, match=f"another run is using this folder: pid {os.getpid()} on "):
        Journal.open(tmp_path)
    journal.close()
    journal.close()
    Journal.open(tmp_path).close()


def test_of_runs_started_together_one_wins_and_the_others_name_it(tmp_path: Path) -> None:
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        processes = [start(folder, 30) for _ in range(3)]
        try:
            lines = {process.pid: first_line(process) for process in processes}
            winners = [pid for pid, line in lines.items() if line == "held\n"]
            assert len(winners) == 1
            for pid, line in lines.items():
                if pid != winners[0]:
                    assert float(line.split()[0]) < 2
                    assert f"pid {winners[0]} on " in line
        finally:
            for process in processes:
                end(process)


def test_a_leftover_owner_is_not_blamed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    journal = Journal.open(tmp_path)
    owner = tmp_path / ".owner.json"
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"pid": gone.pid}))
    begun = time.monotonic()
    with pytest.raises(Fault, match="another run is using this folder"):
        Journal.open(tmp_path)
    assert 0.5 < time.monotonic() - begun < 2
    journal.close()
    assert not owner.exists()


def test_unusable_folders_are_storage_faults(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(Fault, match="the run folder cannot be used: ") as caught:
            Journal.open(folder)
        assert caught.value.code == Exit.STORAGE
        assert str(tmp_path / "file") in str(caught.value)
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(Fault, match="Is a directory"):
        Journal.open(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").rmdir()
    Journal.open(tmp_path / "run").close()


def test_a_folder_without_permission_is_a_storage_fault(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user may write everywhere")
        with pytest.raises(Fault, match="Permission denied") as caught:
            Journal.open(tmp_path / "run")
        assert caught.value.code == Exit.STORAGE
    finally:
        tmp_path.chmod(0o755)


def test_a_read_only_disk_is_a_storage_fault(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a read-only disk here")
    try:
        with pytest.raises(Fault, match="the run folder cannot be used: Read-only file system") as caught:
            Journal.open(tmp_path / "run")
        assert caught.value.code == Exit.STORAGE
        with pytest.raises(Fault, match="Read-only file system"):
            Journal.open(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
