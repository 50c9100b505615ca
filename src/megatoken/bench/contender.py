"""One contender of `bench peers`, in a process of its own: it trains when it is told to and otherwise waits.

In, on stdin: a line that is a `Spec`, then lines `step N`. Out, on stdout: one JSON line for each: what was built; the
seconds of each of the N steps, the last loss and the peak memory; or {"failed": why}, and that is the end. The end of
stdin ends it at once, so nothing outlives the bench. Whatever a peer prints goes to stderr.

Ours is prepared as the command is, before torch is loaded; a peer finds torch as it ships. So this module and what it
imports must load neither torch nor numpy: the training itself is in rivals.py.
"""

import json
import os
import sys
from collections.abc import Mapping
from queue import Queue
from threading import Thread
from typing import Any

from megatoken.bench.spec import OURS, Spec
from megatoken.hardware import prepare_process


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
    lines: Queue[str] = Queue()
    Thread(target=read_lines, args=(lines,), daemon=True).start()
    if spec.name == OURS and spec.prepared:
        prepare_process()
    try:
        from megatoken.bench.rivals import build_rival

        rival = build_rival(spec)
        answer({"chosen": rival.chosen, "choosing_seconds": rival.choosing_seconds})
        while line := lines.get():
            answer(rival.turn(int(line.removeprefix("step "))))
    except BrokenPipeError:
        return
    except Exception as wrong:  # peers, compilers and memory fail in as many ways as there are of them
        said = [line.strip() for line in str(wrong).splitlines() if line.strip()]
        answer({"failed": ": ".join([type(wrong).__name__, *said[:1]])})


def read_lines(lines: "Queue[str]") -> None:
    """Hand on what is asked. Whoever asks has gone when stdin ends: then nobody wants the step under way either."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
