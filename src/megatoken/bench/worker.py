"""A worker process of a bench: builds one training step, then takes as many steps as it is asked for.

stdin: a `WorkerSpec` as one line of JSON, then a number of steps a line. stdout: one line of JSON for each: what was
built; the seconds of each step, the last loss and the peak memory; or {"failed": reason} as the last one. It ends when
stdin does. Process settings must precede torch, so nothing imported here may load torch or numpy.
"""

import json
import os
import sys
from queue import Queue
from threading import Thread

from megatoken.bench.spec import OURS, WorkerSpec
from megatoken.config.model_config import ModelConfig
from megatoken.system.environment import prepare_process


def main() -> None:
    """Serve one spec until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a baseline prints is not an answer
    values = json.loads(sys.stdin.readline() or sys.exit())
    spec = WorkerSpec(**values | {"model_config": ModelConfig(**values["model_config"])})
    lines: Queue[str] = Queue()
    Thread(target=_read_lines, args=(lines,), daemon=True).start()
    if spec.name == OURS and spec.prepared:
        prepare_process()
    try:
        from megatoken.bench.baselines import build_training

        training = build_training(spec)
        answers.write(
            json.dumps({"chosen": training.chosen, "tuning_seconds": training.tuning_seconds})
            + "\n"
        )
        while line := lines.get():
            answers.write(json.dumps(training.run(int(line))) + "\n")
    except Exception as error:  # baselines, compilers and memory fail in many ways
        message = [line.strip() for line in str(error).splitlines() if line.strip()]
        answers.write(
            json.dumps({"failed": ": ".join([type(error).__name__, *message[:1]])}) + "\n"
        )


def _read_lines(lines: "Queue[str]") -> None:
    """Queue the requests. The end of stdin ends the process, also in the middle of a step."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)
