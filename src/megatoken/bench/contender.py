"""One contender of `bench peers`, in a process of its own: it trains when it is told to and otherwise waits.

In, on stdin: a line that is a `Spec`, then lines `step N`. Out, on stdout: one JSON line for each: what was built; the
seconds of each of the N steps, the last loss and the peak memory; or {"failed": why}, and that is the end. The end of
stdin ends it at once, so nothing outlives the bench. Whatever a peer prints goes to stderr.

Of several processes that train together the first starts the others and hands on what it is told; it alone answers.

Ours is prepared as the command is, before torch is loaded; a peer finds torch as it ships. So this module and what it
imports must load neither torch nor numpy: the training itself is in rivals.py.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from queue import Queue
from threading import Thread
from typing import Any

from megatoken.bench.spec import OURS, Spec
from megatoken.hardware import given_environment, prepare_process
from megatoken.parallel.launch import find_free_port


def main() -> None:
    """Serve one spec until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what others print is no answer

    def answer(values: Mapping[str, Any]) -> None:
        answers.write(json.dumps(values) + "\n")

    first = sys.stdin.readline()
    if not first:
        return
    spec = Spec.from_line(first)
    if spec.nproc > 1 and spec.rank == 0:
        spec = replace(spec, port=find_free_port())
    others = start_others(spec)
    lines: Queue[str] = Queue()
    Thread(target=read_lines, args=(lines,), daemon=True).start()
    if spec.name == OURS and spec.prepared:
        prepare_process()
    try:
        from megatoken.bench.rivals import build_rival

        rival = build_rival(spec)
        answer({"chosen": rival.chosen, "choosing_seconds": rival.choosing_seconds})
        while line := lines.get():
            tell(others, line)
            answer(rival.turn(int(line.removeprefix("step "))))
    except BrokenPipeError:
        return
    except Exception as wrong:  # peers, compilers and memory fail in as many ways as there are of them
        said = [line.strip() for line in str(wrong).splitlines() if line.strip()]
        answer({"failed": ": ".join([type(wrong).__name__, *said[:1]])})


def start_others(spec: Spec) -> list[subprocess.Popen[str]]:
    """The other processes of one that is the first of several; they end when it does."""
    others = []
    for rank in range(1, spec.nproc) if spec.rank == 0 else ():
        command = [sys.executable, "-P", "-m", "megatoken.bench.contender"]
        other = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=given_environment()
        )
        others.append(other)
        tell([other], replace(spec, rank=rank).to_line() + "\n")
    return others


def tell(others: list[subprocess.Popen[str]], line: str) -> None:
    """Hand a line on."""
    for other in others:
        assert other.stdin is not None
        other.stdin.write(line)
        other.stdin.flush()


def read_lines(lines: "Queue[str]") -> None:
    """Hand on what is asked. Whoever asks has gone when stdin ends: then nobody wants the step under way either."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
