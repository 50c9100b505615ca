"""Starts a command several times on this machine, each process with its rank in the environment; handles signals.

Used by `--nproc` and `Trainer(nproc=...)`, alone or once on each of several machines (torchrun, srun): it finds ranks
that hang, returns the run's own exit code and prints an error shared by all ranks once.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import FrameType

from megatoken.distributed.env import DistEnv
from megatoken.errors import ExitCode, PeerError
from megatoken.launch.heartbeat import Watchdog
from megatoken.system.environment import HEARTBEAT, given_environment, python_command

STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")  # not SIGINT: Ctrl-C stays an interrupt
FORWARDED = (*STOP_SIGNALS, "SIGINT")
# `megatoken`, for its arguments
COMMAND = python_command(
    "sys.argv[0] = 'megatoken'; from megatoken.__main__ import main; sys.exit(main())"
)
RESTARTS = 3  # in a row without progress
GRACE_SECONDS = 10.0  # for the others after one has failed, and again after SIGTERM
LOST_SECONDS = 2.0  # for the others after one was killed
DRAIN_SECONDS = 1.0  # to read the rest of a rank's messages
END_WHEN_REPEATED = ("SIGTERM", "SIGINT")
SAME_REQUEST_SECONDS = (
    0.5  # copies of a signal, from launchers that signal a process as well as its group
)
PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2  # of Linux's prctl
PARENT = os.getppid()

Process = subprocess.Popen[str]


def not_ignored(names: Sequence[str]) -> list[str]:
    """The signals that this system has and this process does not ignore, as `nohup` makes it ignore SIGHUP."""
    return [
        name
        for name in names
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) != signal.SIG_IGN
    ]


@contextmanager
def handle_signals(
    names: Sequence[str], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Context with a handler for `not_ignored(names)`; in the main thread, where Python allows handlers."""
    in_main = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in not_ignored(names) if in_main]
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, signal.SIG_DFL if old_handler is None else old_handler)


class RepeatedSignal:
    """Tells a second SIGTERM or SIGINT, which ends a process at once, from copies of the first."""

    def __init__(self) -> None:
        self._first_at: float | None = None

    def is_repeated(self, number: int) -> bool:
        """Note a signal; return whether it is a second one."""
        if signal.Signals(number).name not in END_WHEN_REPEATED:
            return False
        now = time.monotonic()
        self._first_at = now if self._first_at is None else self._first_at
        return now - self._first_at >= SAME_REQUEST_SECONDS


@contextmanager
def stop_at_once(marker: Path | None = None) -> Iterator[None]:
    """Until train/preemption.py handles these signals, end the process as stopped: there is nothing to save yet."""

    def stop(number: int, _frame: FrameType | None) -> None:
        with suppress(OSError):
            os.write(
                2,
                f"stopped by {name_cause(number)} before the run began; nothing to save\n".encode(),
            )
        os._exit(write_stop_marker(marker))

    with handle_signals(STOP_SIGNALS, stop):
        yield


def write_stop_marker(marker: Path | None) -> ExitCode:
    """Exit code of a stop; with a marker file the code is written there and 0 returned, or torchrun would restart."""
    if marker is None:
        return ExitCode.STOPPED
    marker.write_text(str(int(ExitCode.STOPPED)))
    return ExitCode.DONE


def at_parent_death(number: signal.Signals) -> Callable[[], object] | None:
    """A call by which a process asks for a signal when the one that started it dies, however it does; Linux only."""
    return (
        partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, number)
        if sys.platform == "linux"
        else None
    )


def name_cause(number: int) -> str:
    """The name of a signal that this process has received, or that its launcher died, if that sent it."""
    if sys.platform == "linux" and os.getppid() != PARENT:
        asked = ctypes.c_int()
        ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(asked))
        if asked.value == number:
            return "the death of its launcher"
    return signal.Signals(number).name


def launch(
    command: Sequence[str], nproc: int, restarts: int = 0, machine: DistEnv | None = None
) -> int:
    """Run `command` in `nproc` processes; return 0, or the exit code of the first that failed.

    Signals are forwarded to all processes; a second SIGTERM or SIGINT kills them. When a process was killed, hangs
    (heartbeat.py) or lost another, all are ended and started again, at most `restarts` times without progress in
    between. When this process is killed, the others get SIGTERM, stop and save (Linux).

    machine: the rank of this process where several machines run one each. Then a lost process ends the others of the
    machine with code 7, for torchrun or Slurm to start all machines again.
    """
    machine = machine or DistEnv()
    if machine.world_size > 1:
        restarts = 0
    processes: dict[int, Process] = {}
    forwarded: list[int] = []
    furthest, failures, repeated = -1, 0, RepeatedSignal()
    where = f"{nproc * machine.world_size} ranks"

    def forward(number: int, _frame: FrameType | None) -> None:
        forwarded.append(signal.SIGKILL if repeated.is_repeated(number) else number)
        for process in list(processes.values()):
            process.send_signal(forwarded[-1])

    with handle_signals(FORWARDED, forward):
        while True:
            result = run_ranks(command, nproc, machine, processes, forwarded)
            if not result.lost and not (restarts and result.code == ExitCode.PEER):
                return result.code
            if -result.code in forwarded:
                return ExitCode.STOPPED if -result.code != signal.SIGINT else 128 + signal.SIGINT
            what = result.lost or "a rank lost another"
            failures = 1 if result.step > furthest else failures + 1
            furthest = max(furthest, result.step)
            if failures > restarts or forwarded:
                break
            fix = f"starting again from the newest checkpoint (restart {failures} of {restarts} without progress)"
            _print(f"warning: {PeerError(what, where, fix)}\n")
            processes.clear()
    what += f", and {restarts} restarts brought no progress" if failures > restarts > 0 else ""
    fix = "if memory ran out, set machine.micro_batch to a smaller number"
    _print(
        f"error: {PeerError(what, where, f'{fix}; the same command goes on from the newest checkpoint')}\n"
    )
    return ExitCode.PEER


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """How processes ended. code: negative for a signal. lost: what happened to a rank that a restart may mend, else "".
    step: how far they came."""

    code: int
    lost: str
    step: int


def run_ranks(
    command: Sequence[str],
    nproc: int,
    machine: DistEnv,
    processes: dict[int, Process],
    forwarded: Sequence[int],
) -> LaunchResult:
    """Start the ranks of a machine, adding them to `processes`, relay what they print, and wait for all.

    forwarded: signals that came while a rank was not there yet.
    """
    world_size, first = nproc * machine.world_size, nproc * machine.rank
    shared = replace(machine, world_size=world_size, local_world_size=nproc)
    # torchrun kills this process when it waits for a rank for too long: no rank may be left then.
    on_start = at_parent_death(signal.SIGTERM if machine.world_size == 1 else signal.SIGKILL)
    errors: list[list[str]] = [[] for _ in range(nproc)]
    with (
        tempfile.TemporaryDirectory(prefix="megatoken-", ignore_cleanup_errors=True) as folder,
        reserve_port() as port,
    ):
        if machine.world_size == 1:
            shared = replace(shared, port=port)
        watchdog = Watchdog(Path(folder), range(first, first + nproc), world_size)
        try:
            for rank in watchdog.files:
                dist_env = replace(shared, rank=rank, local_rank=rank - first)
                environment = given_environment() | dist_env.variables()
                if hasattr(signal, "SIGQUIT"):  # not on Windows
                    environment[HEARTBEAT] = str(watchdog.files[rank])
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stderr=subprocess.PIPE
                    if rank > first
                    else None,  # rank 0 may draw on the terminal
                    text=True,
                    errors="replace",
                    preexec_fn=on_start,
                )
                processes[rank] = process
            for number, process in product(set(forwarded), processes.values()):
                process.send_signal(number)
            pairs = zip(processes.values(), errors, strict=True)
            relays = [threading.Thread(target=relay, args=pair, daemon=True) for pair in pairs]
            for thread in relays:
                thread.start()
            code, lost = wait_for_all(processes, watchdog)
            for thread in relays:
                thread.join(DRAIN_SECONDS)
            print_errors([process.returncode for process in processes.values()], errors)
        finally:
            for process in processes.values():
                process.kill()
        return LaunchResult(
            code=code, lost=lost, step=max(watchdog.read(rank)[1] for rank in processes)
        )


def relay(process: Process, errors: list[str]) -> None:
    """Copy the stderr of a rank line by line; its errors are kept for `print_errors`."""
    with process.stderr or nullcontext(()) as lines:
        for line in lines:
            if "error: " in line[:20]:
                errors.append(line)
            else:
                _print(line)


def print_errors(codes: Sequence[int], errors: Sequence[Sequence[str]]) -> None:
    """Print the errors of ranks other than 0, one for each exit code that rank 0 did not end with.

    'Peer lost' errors are hidden when another rank reported the cause.
    """
    has_cause = any(0 < code != ExitCode.PEER for code in codes)
    printed = {codes[0], ExitCode.PEER} if has_cause else {codes[0]}
    for code, lines in zip(codes, errors, strict=True):
        if code not in printed:
            _print("".join(lines))
            printed.add(code)


def _print(text: str) -> None:
    """Write to stderr, which may be a terminal that has been closed."""
    with suppress(OSError):
        print(text, end="", file=sys.stderr, flush=True)


def wait_for_all(processes: Mapping[int, Process], watchdog: Watchdog) -> tuple[int, str]:
    """Wait for all processes, and end them when one has failed or hangs.

    After a failure the others get GRACE_SECONDS, and again after SIGTERM. Without a rank that was killed or hangs they
    can save nothing, and get SIGKILL. Returns the first exit code other than 0, a lost peer's only if there is no other
    (negative: the signal), and what happened to a lost rank.
    """
    deadline, first, terminated, lost = float("inf"), -1, False, ""
    while True:
        codes = {rank: process.poll() for rank, process in processes.items()}
        failed = sorted((code == ExitCode.PEER, rank) for rank, code in codes.items() if code)
        if failed and not terminated and (first < 0 or codes[first] == ExitCode.PEER):
            first = failed[0][1]
            code = codes[first] or 0
            deadline = min(
                deadline, time.monotonic() + (GRACE_SECONDS if code > 0 else LOST_SECONDS)
            )
            if code < 0:
                lost = f"rank {first} was killed by {signal.Signals(-code).name}{watchdog.describe(first)}"
        running = {rank: processes[rank] for rank, code in codes.items() if code is None}
        if not running:
            break
        hangs = watchdog.all_silent(running) and first < 0
        if hangs or time.monotonic() > deadline:
            if not terminated and (hangs or codes[first] == ExitCode.PEER):
                lost, stacks = watchdog.find_hung(running)
                _print(stacks)
            can_save = not lost and not terminated
            for process in running.values():
                # A process that waits inside a library for a lost rank reacts to SIGKILL only.
                (process.terminate if can_save else process.kill)()
            terminated = True
            deadline = time.monotonic() + GRACE_SECONDS
        time.sleep(0.05)
    if first >= 0:
        return codes[first] or 0, lost
    return (ExitCode.PEER if lost else ExitCode.DONE), lost


@contextmanager
def reserve_port() -> Iterator[int]:
    """Context with a TCP port that no other process is assigned meanwhile. A socket with SO_REUSEADDR, such as that of
    torch's TCPStore, can listen on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def find_free_port() -> int:
    """A TCP port that is free now."""
    with reserve_port() as port:
        return port
