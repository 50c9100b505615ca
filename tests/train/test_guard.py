import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.errors import Exit
from megatoken.train.guard import Guard

LOOP = """
import sys, time
from megatoken.train.guard import Guard
with Guard() as guard:
    print("ready", flush=True)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if guard.stop_requested and "save" not in sys.argv:
            print(guard.stop_requested, flush=True)
            sys.exit(3)
        if guard.stop_requested:
            print("saving", flush=True)
            time.sleep(1.0 if sys.argv[1] == "short" else 20)
            print("saved", flush=True)
            sys.exit(3)
        time.sleep(0.01)
"""


def start(*arguments: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen([sys.executable, "-c", LOOP, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_is_a_reason_and_the_old_handlers_come_back(name: str) -> None:
    number = getattr(signal, name)
    before = {other: signal.getsignal(other) for other in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    with Guard() as guard:
        assert guard.stop_requested == ""
        os.kill(os.getpid(), number)
        assert guard.stop_requested == name
        os.kill(os.getpid(), signal.SIGUSR1)
        assert guard.stop_requested == name
    assert {other: signal.getsignal(other) for other in before} == before


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_process_ends_by_itself_after_a_signal(name: str) -> None:
    process = start()
    process.send_signal(getattr(signal, name))
    out, _ = process.communicate(timeout=10)
    assert (out, process.returncode) == (f"{name}\n", 3)


def test_a_second_signal_ends_the_process_at_once() -> None:
    process = start("long", "save")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "saving\n"
    time.sleep(0.6)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert time.monotonic() - begun < 1
    assert (out, process.returncode) == ("", Exit.STOPPED)


def test_copies_of_one_signal_and_a_scheduler_s_warning_do_not_cut_a_save_short() -> None:
    process = start("short", "save")
    process.send_signal(signal.SIGUSR1)
    assert process.stdout is not None
    assert process.stdout.readline() == "saving\n"
    time.sleep(0.6)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=10)
    assert (out, process.returncode) == ("saved\n", 3)


def test_outside_the_main_thread_only_the_limit_works() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def run() -> None:
        with Guard(time_limit_seconds=0.0) as guard:
            seen.append(signal.getsignal(signal.SIGTERM))
            seen.append(guard.stop_requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before, "time limit 0s"]


def test_without_a_limit_there_is_always_time() -> None:
    guard = Guard()
    guard.observe(1e9, save_seconds=1e9)
    assert guard.stop_requested == ""
    assert guard.remaining_seconds == float("inf")


def test_the_limit_leaves_room_for_a_step_and_a_save() -> None:
    guard = Guard(time_limit_seconds=100)
    assert guard.reserve_seconds == 1.5 * 5
    guard.observe(10, save_seconds=20)
    guard.observe(30)
    guard.observe(save_seconds=2)
    assert guard.reserve_seconds == 1.5 * (30 + 20)
    assert guard.stop_requested == ""
    assert 99 < guard.remaining_seconds <= 100
    for _ in range(16):
        guard.observe(1)
    assert guard.reserve_seconds == 1.5 * (1 + 20)
    guard.observe(50)
    assert guard.stop_requested == "time limit 1m40s"
    for _ in range(16):
        guard.observe(1)
    assert guard.stop_requested == "time limit 1m40s"


def test_a_loop_ends_before_the_limit() -> None:
    begun = time.monotonic()
    guard = Guard(time_limit_seconds=0.5)
    guard.observe(save_seconds=0.1)
    while not guard.stop_requested:
        time.sleep(0.02)
        guard.observe(0.02)
    assert 0.2 < time.monotonic() - begun < 0.4


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 400_000))
def test_reasons_spell_the_limit(seconds: int) -> None:
    guard = Guard(time_limit_seconds=seconds)
    guard.observe(seconds)
    spelled = guard.stop_requested.removeprefix("time limit ")
    total, number = 0, ""
    for character in spelled:
        if character.isdigit():
            number += character
        else:
            total, number = total + int(number) * {"h": 3600, "m": 60, "s": 1}[character], ""
    assert total == seconds


@pytest.mark.parametrize(("seconds", "words"), [(7200, "2h"), (5400, "1h30m"), (45, "45s"), (0.5, "0.5s")])
def test_reasons_read_as_people_say_it(seconds: float, words: str) -> None:
    guard = Guard(time_limit_seconds=seconds)
    guard.observe(seconds)
    assert guard.stop_requested == f"time limit {words}"
