"""megatoken doctor: what is good is said, what lacks has a remedy, what breaks is a finding."""

import json
import os
from pathlib import Path

import pytest

from megatoken import doctor
from megatoken.cli import main
from megatoken.errors import Exit, Fault


def test_this_machine_can_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "not" / "there"), "--json"]) == Exit.DONE
    printed = capsys.readouterr()
    findings = {finding["name"]: finding for finding in json.loads(printed.out)["findings"]}
    assert list(findings) == ["versions", "device", "kernels", "compiler", "memory", "disk", "tokenizer", "clock",
                              "launcher", "port", "collective"]  # fmt: skip
    assert findings["collective"]["state"] == "good", findings["collective"]
    assert "two processes" in findings["collective"]["found"]
    assert f"free at {tmp_path}" in findings["disk"]["found"]
    assert all(finding["remedy"] for finding in findings.values() if finding["state"] != "good")
    assert "ok   collective" in printed.err


def test_what_fails_is_bad_and_ends_with_a_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "TALK", "raise SystemExit('no route to host')")
    finding = doctor.check_collective()
    assert (finding.state, finding.found) == ("bad", "no route to host")
    assert finding.remedy
    monkeypatch.setattr(doctor, "check_clock", lambda: 1 / 0)
    assert main(["doctor", str(tmp_path)]) == Exit.CONFIG


def test_silence_is_bad_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TALK", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "COLLECTIVE_SECONDS", 0)
    monkeypatch.setattr(doctor, "START_SECONDS", 0.5)
    finding = doctor.check_collective()
    assert (finding.state, finding.found) == ("bad", "two processes said nothing in 0 s")


def test_lacks_have_remedies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "find_compiler", lambda: "")
    monkeypatch.setattr(doctor, "LITTLE_DISK", 1e30)
    monkeypatch.setattr(doctor, "LITTLE_MEMORY", 1e30)
    for finding in (doctor.check_compiler(), doctor.check_disk(tmp_path), doctor.check_memory()):
        assert finding.state == "lacking"
        assert finding.remedy
    monkeypatch.setattr(doctor.torch, "__version__", "2.9.1+cpu")
    assert doctor.check_versions().remedy == "install torch 2.11 or newer"


def test_processes_that_do_not_meet_say_so_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 looks for rank 0 where nobody is."""
    monkeypatch.setattr(doctor, "COLLECTIVE_SECONDS", 1)
    absent = "import os, sys\nif os.environ['RANK'] == '0':\n    sys.exit()\n"
    monkeypatch.setattr(doctor, "TALK", absent + doctor.TALK)
    finding = doctor.check_collective()
    assert finding.state == "bad"
    assert finding.found.startswith("rank 1 of 2 could not join")
    assert "firewall" in finding.remedy


def test_what_the_launcher_got_wrong_has_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse() -> doctor.Finding:
        raise Fault(Exit.CONFIG, "WORLD_SIZE is not set", "environment", "let torchrun set the ranks")

    monkeypatch.setattr(doctor, "check_launcher", refuse)
    monkeypatch.setattr(doctor, "check_collective", lambda: doctor.Finding(name="collective", state="good", found=""))
    found = {finding.name: finding for finding in doctor.examine(tmp_path)}["launcher"]
    assert (found.state, found.remedy) == ("bad", "let torchrun set the ranks")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions do not hold root")
def test_a_folder_that_cannot_be_written_is_bad(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert doctor.check_disk(tmp_path).state == "bad"
