"""The same command several times on this machine, each process told which one it is.

Signals go to all of them. The first that fails decides the exit code, and the others are told to stop; a failure is
shown by whom it happened to.
"""

import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from types import FrameType

from megatoken.hardware import given_environment
from megatoken.parallel.topology import Topology

PASSED_ON = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
GRACE_SECONDS = 10.0  # for the others after one has failed, and again after they were told


def launch(command: Sequence[str], nproc: int) -> int:
    """Run `command` in `nproc` processes; return 0, or the code of the first that ended with another."""
    port = find_free_port()
    processes = [
        subprocess.Popen(
            command,
            env=given_environment()
            | Topology(rank=rank, world_size=nproc, local_rank=rank, local_world_size=nproc, port=port).variables(),
        )
        for rank in range(nproc)
    ]

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for name in PASSED_ON if (number := getattr(signal, name, None))}
    try:
        return wait_for_all(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for number, handler in previous.items():
            signal.signal(number, handler)


def wait_for_all(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """The first code that is not 0, when all have ended or have had time to."""
    deadline, first, told = float("inf"), 0, False
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed and not first:
            first, deadline = failed[0], time.monotonic() + GRACE_SECONDS
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
