"""megatoken doctor: good findings, remedies for others, and failures that are findings."""

import os
import tomllib
from pathlib import Path

import pytest

from megatoken.base.errors import ExitCode
from megatoken.cli import doctor
from tests.conftest import Ask, Call
from tests.processes import HANG_SECONDS

HERE = Path()


def test_this_machine_can_train(tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "JOIN_SECONDS", HANG_SECONDS)
    findings = {row["name"]: row for row in ask(f"doctor {tmp_path}/not/there")["findings"]}
    assert list(findings) == [*doctor.CHECKS]
    assert findings["collective"]["state"] == "good", findings["collective"]
    assert f"free at {tmp_path}" in findings["disk"]["found"]
    for finding in findings.values():
        assert bool(finding["remedy"]) == (finding["state"] != "good")


def test_a_network_that_gloo_cannot_use_is_bad(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none")
    assert doctor.check_collective(HERE)[0::2] == ("bad", doctor.NETWORK_REMEDY)


def test_every_extra_for_users_is_checked(monkeypatch: pytest.MonkeyPatch):
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {*doctor.EXTRAS, "dev", "docs", "s3-test"} == {*extras}
    for name, packages in doctor.EXTRAS.items():
        assert len(packages.split()) == len(extras[name])
    monkeypatch.setattr(doctor, "EXTRAS", {"a": "sys none", "b": "sys", "c": "none"})
    assert '".[a,c]"' in doctor.check_extras(HERE).remedy


def test_errors_are_findings_and_set_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: Call
):
    monkeypatch.setenv("MEGATOKEN_INSTRUCTION_SET", "sse9")
    for check, word in ((doctor.check_device, "sse9"), (lambda _: 1 / 0, "zero")):
        monkeypatch.setattr(doctor, "CHECKS", {"one": check})
        code, printed, _ = call(f"doctor {tmp_path}")
        assert (code, word in printed) == (ExitCode.CONFIG, True)


def test_too_small_a_disk_is_lacking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "MIN_DISK", 1e30)
    assert doctor.check_disk(tmp_path)[0] == "lacking"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions do not hold root")
def test_a_folder_that_cannot_be_written_is_bad(tmp_path: Path):
    tmp_path.chmod(0o500)
    assert doctor.check_disk(tmp_path)[0] == "bad"
