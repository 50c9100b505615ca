"""A short chaos: three faults in one process, and the end of a run without any."""

from pathlib import Path

import pytest

from tests.soak.chaos_soak import WORDS, Chaos
from tests.soak.tiny_job import Layout, kill_group

SETTINGS = f"{WORDS} save.every=5 log.every=1 evaluate.every=20 sample.every=20"
NAMES = ["SIGKILL to all at a save", "SIGTERM", "bit flipped in the newest checkpoint"]


@pytest.mark.slow
@pytest.mark.fault(56)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_three_faults_change_nothing(tmp_path: Path):
    chaos = Chaos(tmp_path / "chaos", [Layout(1, "none")], seed=0, words=SETTINGS, disk=False)
    try:
        chaos.disturb(seconds=1e9, number=len(NAMES), pause=0.0, names=NAMES)
    finally:
        kill_group(chaos.process)
    answer = chaos.compare()
    assert chaos.faults == dict.fromkeys(NAMES, 1)
    assert answer["same_weights_and_moments"]
    assert answer["same_rows"]
    assert answer["rows"] > answer["steps"] >= 20
    assert answer["rows_lost_on_a_full_disk"] == 0
