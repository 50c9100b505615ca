"""The same command several times on this machine, each process told which one it is.

Signals go to all of them. The first that fails decides the exit code, and the others are told to stop. A failure that
all have in common is said once, by rank 0; one that rank 0 does not share is said by whom it happened to. A process
that is killed is a lost peer; when this one is killed, the others stop and save.
"""

import ctypes
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from types import FrameType
from typing import IO

from megatoken.errors import Exit, Fault
from megatoken.hardware import given_environment
from megatoken.parallel.topology import Topology

PASSED_ON = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
GRACE_SECONDS = 10.0  # for the others after one has failed, and again after they were told
RELAY_SECONDS = 1.0  # for what a process left unread in its pipe
ERROR = b"error: "
PR_SET_PDEATHSIG = 1  # of Linux's prctl


def launch(command: Sequence[str], nproc: int) -> int:
    """Run `command` in `nproc` processes; return 0, or the code of the first that ended with another."""
    port = find_free_port()
    processes: list[subprocess.Popen[bytes]] = []
    passed: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        passed.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for name in PASSED_ON if (number := getattr(signal, name, None))}
    try:
        for rank in range(nproc):
            one = Topology(rank=rank, world_size=nproc, local_rank=rank, local_world_size=nproc, port=port)
            processes.append(
                subprocess.Popen(
                    command,
                    env=given_environment() | one.variables(),
                    stderr=subprocess.PIPE if rank else None,  # rank 0 may draw on the terminal
                    preexec_fn=find_bond(),
                )
            )
            for number in passed:
                processes[-1].send_signal(number)
        relays = [Relay(process.stderr) for process in processes if process.stderr]
        code = wait_for_all(processes)
        say_errors([process.returncode for process in processes], relays)
        return code if code >= 0 else name_killed(-code, passed, processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for number, handler in previous.items():
            signal.signal(number, handler)


class Relay(Thread):
    """Passes on what a rank says, as it comes, but keeps its error back."""

    def __init__(self, said: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self.said = said
        self.errors: list[bytes] = []
        self.start()

    def run(self) -> None:
        with self.said:
            for line in self.said:
                if ERROR in line[:20]:
                    self.errors.append(line)
                else:
                    sys.stderr.buffer.write(line)
                    sys.stderr.buffer.flush()


def say_errors(codes: Sequence[int], relays: Sequence[Relay]) -> None:
    """Show the errors of ranks from 1 on, one for each code that rank 0 did not end with.

    That a peer is lost is no news where another says why.
    """
    shown = {codes[0], Exit.PEER} if any(0 < code != Exit.PEER for code in codes) else {codes[0]}
    for code, relay in zip(codes[1:], relays, strict=True):
        relay.join(RELAY_SECONDS)
        if code not in shown:
            sys.stderr.buffer.write(b"".join(relay.errors))
            shown.add(code)
    sys.stderr.buffer.flush()


def wait_for_all(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """The first code that is not 0, when all have ended or have had time to; a lost peer is no one's own failure.

    Negative: the signal that ended it.
    """
    deadline, first, told = float("inf"), 0, False
    while True:
        codes = [process.poll() for process in processes]
        failed = sorted((code for code in codes if code), key=lambda code: code == Exit.PEER)
        if failed and not told and first in (0, Exit.PEER):
            first, deadline = failed[0], min(deadline, time.monotonic() + GRACE_SECONDS)
        if all(code is not None for code in codes):
            break
        if time.monotonic() > deadline:
            for process in processes:
                # Who waits inside a library for a rank that will not come hears no signal but the last.
                (process.kill if told else process.terminate)()
            told = True
            deadline = time.monotonic() + GRACE_SECONDS
        time.sleep(0.05)
    return first


def find_bond() -> Callable[[], object] | None:
    """What a new process calls to hear SIGTERM when this one dies, where the system has that."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    return partial(prctl, PR_SET_PDEATHSIG, signal.SIGTERM) if prctl else None


def name_killed(number: int, passed: Sequence[int], processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """The exit code when a process was ended by a signal: a stop where that was passed on before anybody could heed it,
    as when they were starting; else a lost peer, which is named."""
    if number in passed:
        return Exit.STOPPED if number != signal.SIGINT else 128 + number
    rank = next(rank for rank, process in enumerate(processes) if process.returncode == -number)
    what = f"rank {rank} was killed by {signal.Signals(number).name}"
    fix = "see whether memory ran out; the same command goes on from the newest checkpoint"
    sys.stderr.write(f"error: {Fault(Exit.PEER, what, f'{len(processes)} ranks', fix)}\n")
    return Exit.PEER


def find_free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
