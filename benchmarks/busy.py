"""`busy`: the training step next to 0, 1, 2 and 4 busy single-threaded processes.

Each contender is a worker process: megatoken, other checkouts of it (--source) and nanoGPT's model
of the same size, compiled in bf16. In each round, at each load, every contender runs whole steps in
its turn. All start on the quiet machine and stay alive for all rounds.

The fair share of N cores next to B busy processes is N / (N + B) of the speed on a quiet machine.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.peers import find_file, list_specs
from benchmarks.rounds import probe_flops
from megatoken.base.config.load import resolve
from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import Config, MachineConfig, OptimConfig
from megatoken.base.console import Console
from megatoken.base.errors import PeerError
from megatoken.base.markdown_table import show_rows
from megatoken.base.system.device import open_device
from megatoken.base.system.machine import cpu_count
from megatoken.base.system.timing import Timing
from megatoken.study.bench import workload
from megatoken.study.bench.runner import Worker, count_steps
from megatoken.study.bench.training import Training, build_training
from megatoken.study.bench.worker import WorkerSpec
from megatoken.study.bench.workload import describe_seconds

BUSY_LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(10**6):
        pass
"""
VOCABULARY = 4096  # the quickstart's
SETTLE_SECONDS = 0.5  # from the start of the busy processes to the first step
MOST_WAITING = 0.05  # CPU time per second that a contender may use while another has its turn


@dataclass(slots=True, kw_only=True)
class Contender:
    """A worker. Tokens/s and CPU time (share of all cores) by load, one value per round."""

    worker: Worker
    source: Path | None = None
    rates: dict[int, list[float]] = field(default_factory=dict)
    cpu_shares: dict[int, list[float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.worker.spec.name

    def cpu_seconds(self) -> float:
        """Return the CPU time of all threads of the process so far."""
        stat = Path(f"/proc/{self.worker.processes[0].pid}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def start(self) -> None:
        """Start the process and run its first steps. Raises PeerError."""
        paths = [str(self.source.absolute())] if self.source else []
        with patch.object(sys, "path", paths + sys.path):
            self.worker.warm_up()
        self.raise_failure()

    def run_steps(self, seconds: float) -> float:
        """Run whole steps for at least `seconds`, after an untimed one; return tokens/s."""
        steps = 1
        taken = self.worker.run_round(steps)
        done = 0
        spent = 0.0
        while taken and spent < seconds:
            steps = count_steps(taken)
            taken = self.worker.run_round(steps)
            done += steps
            spent += steps * (taken or 0.0)
        self.raise_failure()
        return done * self.worker.spec.batch_tokens / spent

    def raise_failure(self) -> None:
        if self.worker.skipped:
            fix = "see its own output"
            raise PeerError(f"{self.name} failed: {self.worker.skipped}", "busy", fix)


def run_busy(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Measure each contender at each load; return the result for the record. Raises PeerError."""
    from megatoken.model.native.selection import find_library  # older sources do not have it

    device = open_device(MachineConfig(device=options.device))
    contenders = list_contenders(options, str(device.torch_device))
    probes: list[float] = []
    with ExitStack() as stack:
        stack.callback(console.close)
        for contender in contenders:
            stack.callback(contender.worker.close)
            console.step(f"{contender.name}: first steps")
            contender.start()
        for number in range(options.repeats):
            time.sleep(SETTLE_SECONDS)
            probes.append(probe_flops(device))
            for load in options.loads:
                with busy_processes(load):
                    for contender in contenders:
                        console.step(f"round {number + 1}, {load} busy: {contender.name}")
                        take_turn(contender, contenders, load, options.turn)
                rates = [f"{turn.name} {turn.rates[load][-1]:,.0f}" for turn in contenders]
                console.print(f"round {number + 1}, {load} busy: {', '.join(rates)} tokens/s")
    rows = [describe(turn, load) for load in options.loads for turn in contenders]
    show_table(rows, console)
    library = find_library()
    yield {
        "case": options.case,
        "optimizer": options.optimizer,
        "batch_seqs": contenders[0].worker.spec.batch_seqs,
        "turn_seconds": options.turn,
        "instruction_set": library.instruction_set if library else "",
        "probe_flops": describe_seconds(Timing(tuple(probes))),
        "rows": rows,
    }


def list_contenders(options: argparse.Namespace, device: str) -> list[Contender]:
    """Return megatoken, its other checkouts, and nanoGPT if --nanogpt is given."""
    model_config, batch_seqs = PRESETS["gpt2-124m"], options.batch_seqs
    if options.case == "quickstart":
        config = resolve("quickstart").config
        model_config = config.model.resolve(VOCABULARY)
        batch_seqs = config.budget.batch_tokens // model_config.seq_len
    ours = WorkerSpec(
        model_config=model_config,
        batch_seqs=batch_seqs,
        device=device,
        builder="benchmarks.busy:build_optimizer_training",
        options={"optimizer": options.optimizer},
    )
    contenders = [Contender(worker=Worker(spec=ours))]
    for text in options.source:
        path, _, name = text.partition(":")
        spec = replace(ours, name=name or Path(path).name)
        contenders.append(Contender(worker=Worker(spec=spec), source=Path(path)))
    if options.nanogpt:
        source = find_file("nanogpt", options.nanogpt)
        [spec] = list_specs(ours, "nanogpt", source, ["bf16"], [True])
        contenders.append(Contender(worker=Worker(spec=spec)))
    return contenders


def build_optimizer_training(spec: WorkerSpec, stack: ExitStack) -> Training:
    """Build a run's training step with the optimizer that the spec's options name."""
    optim = OptimConfig(name=spec.options["optimizer"])
    with patch.object(workload, "Config", partial(Config, optim=optim)):
        return build_training(spec, stack)


@contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep `count` single-threaded processes busy inside the context."""
    command = [sys.executable, "-S", "-c", BUSY_LOOP]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        time.sleep(SETTLE_SECONDS)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def take_turn(
    contender: Contender, contenders: Sequence[Contender], load: int, seconds: float
) -> None:
    """Measure a contender once. Raises PeerError if another one is not asleep meanwhile."""
    before = [each.cpu_seconds() for each in contenders]
    start = time.perf_counter()
    contender.rates.setdefault(load, []).append(contender.run_steps(seconds))
    elapsed = time.perf_counter() - start
    for each, cpu_seconds in zip(contenders, before, strict=True):
        used = (each.cpu_seconds() - cpu_seconds) / elapsed
        if each is contender:
            contender.cpu_shares.setdefault(load, []).append(used / cpu_count())
        elif used > MOST_WAITING:
            what = f"{each.name} used {used:.0%} of a core while {contender.name} had its turn"
            raise PeerError(what, "busy", "let its threads sleep between steps")


def describe(contender: Contender, load: int) -> dict[str, Any]:
    """Return a row of the record. Shares compare the load with no load in the same rounds."""
    rates = contender.rates[load]
    fair_share = cpu_count() / (cpu_count() + load)
    shares = [rate / quiet for rate, quiet in zip(rates, contender.rates.get(0, []), strict=False)]
    figure = describe_seconds(Timing(tuple(shares))) if shares else None
    return {
        "name": contender.name,
        "busy": load,
        "tokens_per_second": describe_seconds(Timing(tuple(rates))),
        "share_of_quiet": figure,
        "fair_share": fair_share,
        "share_of_fair_share": figure and figure["median"] / fair_share,
        "cpu_share": describe_seconds(Timing(tuple(contender.cpu_shares[load]))),
        "chosen": contender.worker.chosen,
    }


def show_table(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print one line per load, with columns for each contender."""
    columns = {"busy": "busy", "fair_share": "fair share"}
    lines: dict[int, dict[str, Any]] = {}
    for row in rows:
        line = lines.setdefault(row["busy"], {key: row[key] for key in ("busy", "fair_share")})
        name = row["name"]
        headings = {
            "tokens_per_second": f"{name} tokens/s",
            "share_of_quiet": "of quiet",
            "share_of_fair_share": "of fair share",
            "cpu_share": "CPU time",
        }
        line |= {f"{name} {key}": row[key] for key in headings}
        columns |= {f"{name} {key}": heading for key, heading in headings.items()}
    show_rows(columns, list(lines.values()), console)
