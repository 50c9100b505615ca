"""The same command several times on this machine, each process told which one it is.

Signals go to all of them. The first that fails decides the exit code, and the others are told to stop. A failure that
all have in common is said once, by rank 0; one that rank 0 does not share is said by whom it happened to.
"""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from threading import Thread
from types import FrameType
from typing import IO

from megatoken.errors import Exit
from megatoken.hardware import given_environment
from megatoken.parallel.topology import Topology

PASSED_ON = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
GRACE_SECONDS = 10.0  # for the others after one has failed, and again after they were told
RELAY_SECONDS = 1.0  # for what a process left unread in its pipe
ERROR = b"error: "


def launch(command: Sequence[str], nproc: int) -> int:
    """Run `command` in `nproc` processes; return 0, or the code of the first that ended with another."""
    port = find_free_port()
    processes = [
        subprocess.Popen(
            command,
            env=given_environment()
            | Topology(rank=rank, world_size=nproc, local_rank=rank, local_world_size=nproc, port=port).variables(),
            stderr=subprocess.PIPE if rank else None,  # rank 0 may draw on the terminal
        )
        for rank in range(nproc)
    ]
    relays = [Relay(process.stderr) for process in processes if process.stderr]

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for name in PASSED_ON if (number := getattr(signal, name, None))}
    try:
        code = wait_for_all(processes)
        say_errors([process.returncode for process in processes], relays)
        return code
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
    """The first code that is not 0, when all have ended or have had time to; a lost peer is no one's own failure."""
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
    return first if first >= 0 else 128 - first


def find_free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
