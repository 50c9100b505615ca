import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatoken.base.errors import ExitCode
from megatoken.distributed.preemption import PreemptionHandler
from megatoken.distributed.signals import FORWARDED, not_ignored, stop_at_once
from tests.processes import HANG_SECONDS

LOOP = """
import time
from megatoken.distributed.preemption import PreemptionHandler
with PreemptionHandler() as handler:
    print("ready", flush=True)
    while not handler.stop_reason:
        time.sleep(0.01)
    print(handler.stop_reason, flush=True)
    time.sleep(3000)
"""


@pytest.fixture(autouse=True)
def not_in_background() -> Iterator[None]:
    """Shells start background jobs with SIGINT ignored, which tests would inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, which the test sets."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


@pytest.mark.fault(12, 16)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"])
def test_signal_sets_the_reason_and_handlers_are_restored(name: str):
    handled = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
    before = [*map(signal.getsignal, handled)]
    with PreemptionHandler() as handler:
        assert handler.stop_reason == ""
        for number in (getattr(signal, name), signal.SIGUSR1):
            signal.raise_signal(number)
            assert handler.stop_reason == name
    assert [*map(signal.getsignal, handled)] == before


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_ignored_signals_stay_ignored():
    """nohup ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_at_once(), PreemptionHandler() as handler:
            signal.raise_signal(signal.SIGHUP)
            assert handler.stop_reason == ""
            assert "SIGHUP" not in not_ignored(FORWARDED)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.fault(14)
def test_second_signal_exits_immediately():
    program = [sys.executable, "-c", LOOP]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "SIGTERM\n"
        time.sleep(0.6)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_SECONDS) == ExitCode.STOPPED


def test_duplicate_signals_do_not_interrupt_a_save(now: list[float]):
    with PreemptionHandler() as handler:
        for name, seconds in (("SIGUSR1", 1.0), ("SIGTERM", 0.4), ("SIGTERM", 9.0), ("SIGUSR1", 0)):
            signal.raise_signal(getattr(signal, name))
            now[0] += seconds
        assert handler.stop_reason == "SIGUSR1"


@pytest.mark.fault(15)
def test_a_rank_leaves_the_second_signal_to_its_launcher(
    now: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A copy of the first signal may be handled only after a long call."""
    monkeypatch.setenv("MEGATOKEN_HEARTBEAT", f"{tmp_path}/rank-0")
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"ended with {code}"))
    with PreemptionHandler() as handler:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
            now[0] += 3.0
        assert handler.stop_reason == "SIGTERM"


def test_outside_the_main_thread_only_the_time_limit_works():
    def run():
        with PreemptionHandler(time_limit_seconds=0.0) as handler:
            return signal.getsignal(signal.SIGTERM), handler.stop_reason

    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(run).result()
    assert found == (signal.getsignal(signal.SIGTERM), "time limit 0s")


@pytest.mark.usefixtures("now")
def test_time_limit_reserves_steps_a_save_and_what_comes_next():
    def observe(handler, count):
        for _ in range(count):
            handler.observe(1.0)

    handler = PreemptionHandler(time_limit_seconds=100)
    assert handler.reserve_seconds == 1.5 * 5
    handler.observe(10, save_seconds=20)
    handler.observe(30)
    handler.observe(save_seconds=2)
    assert (handler.reserve_seconds, handler.stop_reason) == (1.5 * (30 + 20), "")
    observe(handler, 16)
    assert handler.reserve_seconds == 1.5 * (1 + 20)
    assert handler.stop_before(44) == ""  # 1.5 * (1 + 20 + 44) = 97.5
    assert handler.stop_before(46) == "time limit 1m40s"
    observe(handler, 16)
    assert handler.stop_reason == "time limit 1m40s"
    in_groups = PreemptionHandler(time_limit_seconds=100, steps=20)
    in_groups.observe(2.0, save_seconds=10)
    observe(in_groups, 19)  # the longest, at which completions were sampled, is not forgotten
    assert in_groups.reserve_seconds == 1.5 * (20 * 2 + 10)
    in_groups.observe(50)
    assert in_groups.stop_reason == "time limit 1m40s"
