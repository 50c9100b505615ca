"""Fork the worker processes of benchmarks from one that has loaded torch."""

from types import SimpleNamespace

import pytest

from megatoken.base.config.presets import PRESETS
from megatoken.study.bench import runner
from tests.ranks import FORKS, make_process
from tests.tiny_model import TINY_GPT


@pytest.fixture(autouse=True)
def small_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(Pipe=FORKS.Pipe, Process=make_process)
    monkeypatch.setattr(runner, "SPAWN", context)
    monkeypatch.setattr(runner, "MOST_STEPS", 3)
    monkeypatch.setitem(PRESETS, "tiny", TINY_GPT)
