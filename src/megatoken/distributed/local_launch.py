"""Start the ranks of one machine, watch them, restart them after a failure, and forward signals.

Used by `--nproc` and `Trainer(nproc=...)`. With several machines, torchrun or srun starts the
command with `--nproc` once on each.
"""

import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

from megatoken.base.errors import ExitCode, PeerError
from megatoken.base.system.environment import HEARTBEAT, python_command
from megatoken.base.system.process import Child
from megatoken.distributed.env import DistEnv
from megatoken.distributed.signals import FORWARDED, RepeatedSignal, handle_signals
from megatoken.distributed.watchdog import Watchdog

# The `megatoken` command; its arguments follow.
COMMAND = python_command(
    "sys.argv[0] = 'megatoken'; from megatoken.__main__ import main; sys.exit(main())"
)
RESTARTS = 3  # default of how many restarts in a row may make no progress
GRACE_SECONDS = 10.0  # for other ranks to exit after one failed, and again after SIGTERM
LOST_SECONDS = 2.0  # for other ranks to exit after one was killed
POLL_SECONDS = 0.05


def launch(
    command: Sequence[str], nproc: int, restarts: int = 0, machine: DistEnv | None = None
) -> int:
    """Run `command` in `nproc` processes; return 0, or the exit code of the first that failed.

    Signals are forwarded to all processes, and a second SIGTERM or SIGINT kills them. If one of the
    processes is killed, hangs or loses a peer, all are ended and restarted. If this process is
    killed, they save and stop.

    restarts: how many times in a row to restart without progress before giving up.
    machine: this machine's rank among several. If one of its processes is lost, all of its
        processes are ended and not restarted. The result is then 7, after which torchrun or Slurm
        restarts all machines.
    """
    machine = machine or DistEnv()
    if machine.world_size > 1:
        restarts = 0
    where = f"{nproc * machine.world_size} ranks"
    children: dict[int, Child] = {}
    forwarded: list[int] = []
    repeated = RepeatedSignal()

    def forward(number: int, _frame: FrameType | None) -> None:
        forwarded.append(signal.SIGKILL if repeated.is_repeated(number) else number)
        for child in list(children.values()):
            child.send(forwarded[-1])

    furthest_step = -1
    failures = 0
    with handle_signals(FORWARDED, forward):
        while True:
            code, lost, step = run_ranks(command, nproc, machine, children, forwarded)
            if not lost and not (restarts and code == ExitCode.PEER):
                return code
            if -code in forwarded:
                return 128 + signal.SIGINT if -code == signal.SIGINT else ExitCode.STOPPED
            what = lost or "a rank lost another"
            failures = 1 if step > furthest_step else failures + 1
            furthest_step = max(furthest_step, step)
            if failures > restarts or forwarded:
                break
            fix = f"restarting from the newest checkpoint ({failures} of {restarts})"
            _print(f"warning: {PeerError(what, where, fix)}\n")
            children.clear()
    if failures > restarts > 0:
        what += f", and {restarts} restarts made no progress"
    fix = "rerun the command to resume; if memory ran out, lower machine.micro_batch"
    _print(f"error: {PeerError(what, where, fix)}\n")
    return ExitCode.PEER


def run_ranks(
    command: Sequence[str],
    nproc: int,
    machine: DistEnv,
    children: dict[int, Child],
    forwarded: Sequence[int],
) -> tuple[int, str, int]:
    """Start the ranks of a machine, print their errors, and wait for all of them.

    Returns the exit code, or -number for a signal; how a rank was killed or hung, or ""; and the
    latest step that any rank reported.

    children: filled with the processes by rank. forwarded: signals received so far, which are also
    sent to ranks that start later.
    """
    world_size = nproc * machine.world_size
    first_rank = nproc * machine.rank
    # torchrun kills this process if its ranks do not stop in time, and then no rank may survive.
    death_signal = signal.SIGTERM if machine.world_size == 1 else signal.SIGKILL
    errors: dict[int, list[str]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="megatoken-", ignore_cleanup_errors=True) as folder,
        reserve_port() as port,
    ):
        shared = replace(machine, world_size=world_size, local_world_size=nproc)
        if machine.world_size == 1:
            shared = replace(shared, port=port)
        watchdog = Watchdog(Path(folder), range(first_rank, first_rank + nproc), world_size)
        try:
            for rank, heartbeat in watchdog.files.items():
                variables = replace(shared, rank=rank, local_rank=rank - first_rank).variables()
                variables[HEARTBEAT] = str(heartbeat)
                errors[rank] = []
                children[rank] = Child(
                    command,
                    # The first rank may draw on the terminal.
                    stderr=None if rank == first_rank else partial(relay_line, errors[rank]),
                    env=variables,
                    death_signal=death_signal,
                )
            for number in set(forwarded):
                for child in children.values():
                    child.send(number)
            code, lost = wait_for_all(children, watchdog)
            codes = {rank: child.wait() or 0 for rank, child in children.items()}
            print_errors(codes, errors)
        finally:
            for child in children.values():
                child.send(signal.SIGKILL)
        last_step = max(watchdog.read(rank)[1] for rank in children)
        return code, lost, last_step


def relay_line(errors: list[str], line: str) -> None:
    """Print a line of a rank's stderr, or collect it in `errors` for `print_errors`."""
    if "error: " in line[:20]:
        errors.append(line)
    else:
        _print(line)


def print_errors(codes: Mapping[int, int], errors: Mapping[int, Sequence[str]]) -> None:
    """For each exit code, print the errors of the first rank that ended with it.

    The first rank's code is left out, because that rank has printed its errors itself. Errors about
    a lost peer are left out if another rank reported the cause.

    codes, errors: exit code and error lines by rank.
    """
    printed = {next(iter(codes.values()))}
    if any(0 < code != ExitCode.PEER for code in codes.values()):
        printed.add(ExitCode.PEER)
    for rank, code in codes.items():
        if code not in printed:
            _print("".join(errors[rank]))
            printed.add(code)


def _print(text: str) -> None:
    """Write to stderr, which may be a closed terminal."""
    with suppress(OSError):
        print(text, end="", file=sys.stderr, flush=True)


def wait_for_all(children: Mapping[int, Child], watchdog: Watchdog) -> tuple[int, str]:
    """Wait for all ranks; if one fails or all hang, end the others.

    After a failure, the others have GRACE_SECONDS to exit, then get SIGTERM and have GRACE_SECONDS
    again. If a rank was killed or hangs, they get SIGKILL, because they could not save anyway.

    Returns an exit code, and how a rank was lost, or "". The code is that of the first rank that
    failed, or -number if a signal killed it. It is ExitCode.PEER only if no rank failed with
    another code, or if all ranks hang.
    """
    deadline = float("inf")
    first_failed: int | None = None
    terminated = False
    lost = ""
    while True:
        codes = {rank: child.poll() for rank, child in children.items()}
        running = {rank: children[rank] for rank, code in codes.items() if code is None}
        failed = sorted((code == ExitCode.PEER, rank) for rank, code in codes.items() if code)
        can_change = first_failed is None or codes[first_failed] == ExitCode.PEER
        if failed and not terminated and can_change:
            first_failed = failed[0][1]
            was_killed = (codes[first_failed] or 0) < 0
            seconds = LOST_SECONDS if was_killed else GRACE_SECONDS
            deadline = min(deadline, time.monotonic() + seconds)
            if was_killed:
                name = signal.Signals(-(codes[first_failed] or 0)).name
                lost = f"rank {first_failed} was killed by {name}{watchdog.describe(first_failed)}"
        if not running:
            break
        hangs = watchdog.all_silent(running) and first_failed is None
        if hangs or time.monotonic() > deadline:
            is_peer_failure = first_failed is not None and codes[first_failed] == ExitCode.PEER
            if not terminated and (hangs or is_peer_failure):
                lost, stacks = watchdog.find_hung(running)
                _print(stacks)
            can_save = not lost and not terminated
            for child in running.values():
                # A rank that waits inside a library for a lost peer reacts only to SIGKILL.
                child.send(signal.SIGTERM if can_save else signal.SIGKILL)
            terminated = True
            deadline = time.monotonic() + GRACE_SECONDS
        time.sleep(POLL_SECONDS)
    if first_failed is not None:
        return codes[first_failed] or 0, lost
    return (ExitCode.PEER if lost else ExitCode.DONE), lost


@contextmanager
def reserve_port() -> Iterator[int]:
    """Reserve a free TCP port inside the context; on macOS, find one.

    A socket with SO_REUSEADDR, such as that of torch's TCPStore, can still listen on it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":  # others refuse connections to the address of an idle socket
            holder.close()
        yield port


def find_free_port() -> int:
    """Return a TCP port that is free at the moment."""
    with reserve_port() as port:
        return port
