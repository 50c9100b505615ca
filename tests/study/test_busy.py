"""busy: shares of the quiet speed and of the fair share."""

import pytest

from benchmarks.busy import Contender, describe
from megatoken.study.bench.runner import Worker
from tests.study.test_ladder import FIRST


def test_shares_compare_turns_of_the_same_round(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.busy.cpu_count", lambda: 2)
    contender = Contender(
        worker=Worker(spec=FIRST),
        rates={0: [1000.0, 400.0], 2: [300.0, 200.0]},
        cpu_shares={0: [1.0, 1.0], 2: [0.5, 0.5]},
    )
    row = describe(contender, 2)
    assert row["share_of_quiet"] == {"median": 0.4, "low": 0.3, "high": 0.5, "repeats": 2}
    assert (row["fair_share"], row["share_of_fair_share"]) == (0.5, 0.8)
