"""docs/afternoon.md at a small size, as a user types it."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatoken.base.system.environment import IMPORT
from megatoken.distributed.local_launch import COMMAND
from megatoken.store.commit import list_steps
from tests.conftest import Call
from tests.tiny_run import TINY, newest_step, read_losses, write_shards

PAGE = (Path(__file__).parents[1] / "docs/afternoon.md").read_text()


@pytest.mark.long
def test_three_ideas_are_raced_swept_resumed_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
):
    pytest.importorskip("optuna")
    code = re.search(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)[1]  # type: ignore[index]
    assert len(code.splitlines()) <= 60
    (tmp_path / "ideas.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    tiny = f"{TINY} {write_shards(tmp_path / 'data')}"
    penalty = "objective.terms=penalty=1e-4"
    ideas = f"machine.attention=softcap {penalty} optim.schedule=exponential"

    def run(line):
        monkeypatch.setenv(IMPORT, "")
        code, *printed = call(line)
        assert code == 0
        return "".join(printed)

    race = f"race {tiny} '{TINY} {ideas}' --tokens 960 --seeds 1 --jobs 2 --out race"
    printed = run(f"{race} --import ideas")
    assert len(re.findall(r"seed 1337: step 5, validation loss", printed)) == 2
    weights = "'objective.terms=penalty=1e-4|penalty=1e-2' budget.steps=2"
    run(f"sweep {tiny} {weights} --trials 1 --import ideas --out sweep")
    train = f"train {tiny} {ideas} budget.steps=100 --out mine --import ideas"
    monkeypatch.setenv(IMPORT, "")
    killed = subprocess.Popen([*COMMAND, *train.split()], start_new_session=True)
    while not list_steps(tmp_path / "mine/checkpoints"):
        assert killed.poll() is None
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert 0 < newest_step(tmp_path / "mine") < 100
    run(train)
    assert len(read_losses(tmp_path / "mine")) == 100
    run("sample mine 1 --tokens 4 --import ideas")
    run("plan mine --gpus 2xA100-40GB --import ideas")
    run(f"train {tiny} {penalty} budget.steps=2 --out plain --import ideas")
    assert "verified" in run("export plain --out model")
