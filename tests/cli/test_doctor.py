"""megatoken doctor: good findings, remedies for others, and failures that are findings."""

import os
from pathlib import Path

import pytest

from megatoken.base.errors import ExitCode
from megatoken.cli import doctor
from tests.conftest import Ask, Call
from tests.processes import HANG_SECONDS

HERE = Path()


@pytest.mark.long
def test_this_machine_can_train(tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "MEET_SECONDS", HANG_SECONDS)
    patient = doctor.PROGRAM.replace("JOIN_SECONDS = 30", f"JOIN_SECONDS = {HANG_SECONDS}")
    monkeypatch.setattr(doctor, "PROGRAM", patient)
    findings = {row["name"]: row for row in ask(f"doctor {tmp_path}/not/there")["findings"]}
    assert list(findings) == [*doctor.CHECKS]
    assert findings["collective"]["state"] == "good", findings["collective"]
    assert f"free at {tmp_path}" in findings["disk"]["found"]
    for finding in findings.values():
        assert bool(finding["remedy"]) == (finding["state"] != "good")


def test_processes_that_fail_or_hang_are_bad(monkeypatch: pytest.MonkeyPatch):
    fail = r"sys.stderr.write('no route to host\n'); sys.exit(1)"
    hang = f"import time; time.sleep({HANG_SECONDS})"
    leave = "import os, sys\nif os.environ['RANK'] == '0':\n    sys.exit()\n"
    join = doctor.PROGRAM.replace("JOIN_SECONDS = 30", "JOIN_SECONDS = 1")
    for program, seconds, reason, advice in (
        (fail, HANG_SECONDS, "no route to host", "firewall"),
        (hang, 0.4, "two processes did not meet", "load"),
        (leave + join, HANG_SECONDS, "rank 1 of 2 could not join", "firewall"),  # of rank 0
    ):
        monkeypatch.setattr(doctor, "PROGRAM", program)
        monkeypatch.setattr(doctor, "MEET_SECONDS", seconds)
        finding = doctor.check_collective(HERE)
        assert (finding.state, finding.found[: len(reason)]) == ("bad", reason)
        assert advice in finding.remedy


def test_a_failed_check_sets_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: Call
):
    monkeypatch.setattr(doctor, "CHECKS", {"disk": lambda _: 1 / 0})
    assert call(f"doctor {tmp_path}")[0] == ExitCode.CONFIG


def test_too_small_a_disk_is_lacking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "MIN_DISK", 1e30)
    assert doctor.check_disk(tmp_path)[0] == "lacking"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions do not hold root")
def test_a_folder_that_cannot_be_written_is_bad(tmp_path: Path):
    tmp_path.chmod(0o500)
    assert doctor.check_disk(tmp_path)[0] == "bad"


def test_our_own_errors_are_findings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEGATOKEN_INSTRUCTION_SET", "sse9")
    finding = doctor.run_check(doctor.check_device, HERE)
    assert (finding.state, "sse9" in finding.found) == ("bad", True)
