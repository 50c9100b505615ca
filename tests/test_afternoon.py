"""docs/afternoon.md at a small size, as a user types it."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatoken.base.system.environment import IMPORT
from megatoken.cli.main import main
from megatoken.distributed.local_launch import COMMAND
from megatoken.store.commit import list_steps
from tests.tiny_run import TINY, newest_step, read_losses, write_shards

PAGE = (Path(__file__).parents[1] / "docs" / "afternoon.md").read_text()


@pytest.mark.long
def test_three_ideas_are_raced_swept_resumed_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("optuna")
    code = re.search(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)[1]  # type: ignore[index]
    assert len(code.splitlines()) <= 60
    (tmp_path / "ideas.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    data = write_shards(tmp_path / "data")
    tiny, ours = str(TINY), ("--import", "ideas")
    ideas = ["machine.attention=softcap", "objective.terms=penalty=1e-4"]
    ideas.append("optim.schedule=exponential")

    def run(*command: str, code: int = 0) -> str:
        monkeypatch.setenv(IMPORT, "")
        assert main(command) == code
        output = capsys.readouterr()
        return output.out + output.err

    race = ["race", tiny, f"{tiny} {' '.join(ideas)}", data, "--tokens", "960", "--seeds", "1"]
    printed = run(*race, "--jobs", "2", "--out", "race", *ours)
    assert len(re.findall(r"seed 1337: step 5, validation loss", printed)) == 2
    weights = "objective.terms=penalty=1e-4|penalty=1e-2"
    run("sweep", tiny, data, weights, "budget.steps=2", "--trials", "1", *ours, "--out", "sweep")
    train = ["train", tiny, data, *ideas, "budget.steps=100", "--out", "mine"]
    monkeypatch.setenv(IMPORT, "")
    killed = subprocess.Popen([*COMMAND, *train, *ours], start_new_session=True)
    while not list_steps(tmp_path / "mine" / "checkpoints"):
        assert killed.poll() is None
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert 0 < newest_step(tmp_path / "mine") < 100
    run(*train, *ours)
    assert len(read_losses(tmp_path / "mine")) == 100
    run("sample", "mine", "1", "--tokens", "4", *ours)
    assert "add --import ideas" in run("sample", "mine", "1", code=4)
    refused = run("export", "mine", "--out", "model", *ours, code=2)
    assert "no format has attention 'softcap'" in refused
    run("plan", "mine", "--gpus", "2xA100-40GB", *ours)
    run("train", tiny, data, ideas[1], "budget.steps=2", "--out", "plain", *ours)
    assert "verified" in run("export", "plain", "--out", "model")
