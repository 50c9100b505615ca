"""megatoken doctor: good findings, remedies for others, and failures that are findings."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatoken.cli import doctor
from megatoken.cli.main import main
from megatoken.errors import ExitCode

HERE = Path()


def test_this_machine_can_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", f"{tmp_path}/not/there", "--json"]) == ExitCode.DONE
    printed = capsys.readouterr()
    findings = {finding["name"]: finding for finding in json.loads(printed.out)["findings"]}
    assert list(findings) == [
        "versions",
        "device",
        "compiler",
        "native",
        "disk",
        "tokenizer",
        "extras",
        "collective",
    ]
    assert findings["collective"]["state"] == "good", findings["collective"]
    assert "two processes" in findings["collective"]["found"]
    assert f"free at {tmp_path}" in findings["disk"]["found"]
    assert all(
        bool(finding["remedy"]) == (finding["state"] != "good") for finding in findings.values()
    )
    assert "two processes" in printed.err


def test_a_failed_check_is_bad_and_sets_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(
        doctor, "PROGRAM", r"import sys; sys.stderr.write('no route to host\n'); sys.exit(1)"
    )
    state, found, remedy = doctor.check_collective(HERE)
    assert (state, found) == ("bad", "no route to host")
    assert remedy
    monkeypatch.setitem(doctor.CHECKS, "disk", lambda _: 1 / 0)
    assert main(["doctor", str(tmp_path)]) == ExitCode.CONFIG


def test_processes_that_do_not_answer_are_bad(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "PROGRAM", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "MEET_SECONDS", 0.4)
    assert doctor.check_collective(HERE)[:2] == ("bad", "two processes did not meet in 0 s")


def test_lacking_findings_have_remedies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "find_compiler", lambda: "")
    monkeypatch.setattr(doctor, "MIN_DISK", 1e30)
    for check in (doctor.check_compiler, doctor.check_disk):
        state, _, remedy = check(tmp_path)
        assert state == "lacking"
        assert remedy


def test_processes_that_do_not_join_fail_in_time(monkeypatch: pytest.MonkeyPatch):
    """Rank 1 connects to rank 0, which has exited."""
    program = doctor.PROGRAM.replace("JOIN_SECONDS = 30", "JOIN_SECONDS = 1")
    monkeypatch.setattr(
        doctor,
        "PROGRAM",
        "import os, sys\nif os.environ['RANK'] == '0':\n    sys.exit()\n" + program,
    )
    state, found, remedy = doctor.check_collective(HERE)
    assert state == "bad"
    assert found.startswith("rank 1 of 2 could not join")
    assert "firewall" in remedy


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions do not hold root")
def test_a_folder_that_cannot_be_written_is_bad(tmp_path: Path):
    tmp_path.chmod(0o500)
    assert doctor.check_disk(tmp_path)[0] == "bad"


def test_amx_is_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    library, fault = SimpleNamespace(instruction_set="amx"), ""
    monkeypatch.setattr("megatoken.native.selection.find_library", lambda: library)
    monkeypatch.setattr("megatoken.native.selection.find_amx_fault", lambda: fault)
    state, found, _ = doctor.check_native(HERE)
    assert state == "good"
    assert "amx, which passed" in found
    library, fault = SimpleNamespace(instruction_set="avx512_bf16"), "at matmul"
    state, found, remedy = doctor.check_native(HERE)
    assert state == "lacking"
    assert "avx512_bf16" in found
    assert found.endswith("at matmul")
    assert remedy


def test_missing_native_kernels_and_our_own_errors_have_their_remedies(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("megatoken.native.selection.find_library", lambda: None)
    assert doctor.check_native(HERE)[0] == "lacking"
    monkeypatch.undo()
    monkeypatch.setenv("MEGATOKEN_INSTRUCTION_SET", "sse9")
    finding = doctor.run_check(doctor.check_device, HERE)
    assert finding.state == "bad"
    assert "sse9" in finding.found
