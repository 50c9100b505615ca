"""`peers`: our training step next to other GPT-2 implementations.

Each program is a worker process, interleaved with ours, which is the reference.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.arguments import SPEED
from benchmarks.knob import TRAILING_COLUMNS, describe_step, open_step
from benchmarks.rounds import ProbedWorker, measure_workers
from megatoken.base.console import Console
from megatoken.base.errors import ConfigError, PeerError
from megatoken.base.markdown_table import show_rows
from megatoken.base.system.device import Device
from megatoken.base.system.timing import Timing
from megatoken.study.bench.worker import WorkerSpec
from megatoken.study.bench.workload import describe_seconds

# The file of each program's checkout.
FILES = {
    "transformers": "",
    "nanogpt": "model.py",
    "build-nanogpt": "train_gpt2.py",
    "llmc": "train_gpt2.c",
}
COLUMNS = {
    "name": "program",
    "configuration": "configuration",
    **SPEED,
    "ratio": "ours is",
    **TRAILING_COLUMNS,
}


def run_peers(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Compare a default run's step with every program, eager and compiled, in fp32 and fast bf16.

    Raises ConfigError for a program that is missing, PeerError if ours fails.
    """
    sources = find_sources(options)
    ours, device = open_step(options, console)
    ours = replace(ours, micro_batch=options.micro_batch)
    if "llmc" in sources and device.type != "cpu":
        raise ConfigError("llm.c's C trainer runs on a CPU", "--llmc", "add --device cpu")
    precisions = ["fp32", "bf16"] if device.precision == "bf16" else ["fp32"]
    if options.precision:
        precisions = [options.precision]
    compiles = {"off": [False], "on": [True]}.get(options.compile, [False, True])
    specs = [
        spec
        for name, source in sources.items()
        for spec in list_specs(ours, name, source, precisions, compiles)
    ]
    result: dict[str, Any] = {}
    for workers in measure_workers([ours, *specs], options.repeats, console):
        if workers[0].skipped:
            what = f"our own worker failed: {workers[0].skipped}"
            raise PeerError(what, "peers", "use a smaller shape or batch")
        result = describe_step(options, ours) | summarize(workers, device)
        yield result
    show_rows(COLUMNS, result["rows"], console)
    print_ratio(result, console)


def list_specs(
    ours: WorkerSpec, name: str, source: str, precisions: Sequence[str], compiles: Sequence[bool]
) -> list[WorkerSpec]:
    """Return the configurations of a program."""
    options = {"source": source}
    base = replace(ours, name=name, micro_batch=0, prepare_process=False, options=options)
    if name == "llmc":
        builder = "benchmarks.baselines:build_llmc"
        return [replace(base, configuration="fp32 C", builder=builder)]
    return [
        replace(
            base,
            configuration=f"{precision} {'compile' if is_compiled else 'eager'}",
            builder="benchmarks.baselines:build_baseline",
            options={"source": source, "precision": precision, "compile": is_compiled},
        )
        for precision in precisions
        for is_compiled in compiles
    ]


def find_sources(options: argparse.Namespace) -> dict[str, str]:
    """Return the file of each program in --only, else of each that is available."""
    paths = {"nanogpt": options.nanogpt, "build-nanogpt": options.build_nanogpt}
    paths["llmc"] = options.llmc
    available = [name for name, path in paths.items() if path]
    if find_spec("transformers"):
        available.insert(0, "transformers")
    sources: dict[str, str] = {}
    for name in options.only.split(",") if options.only else available:
        if name not in available:
            fix = f"install it or give its checkout; programs: {', '.join(FILES)}"
            raise ConfigError(f"'{name}' is not available", "--only", fix)
        path: Path | None = paths.get(name)
        sources[name] = find_file(name, path) if path else ""
    return sources


def find_file(name: str, path: Path) -> str:
    """Return the program's file; `path` is a checkout or the file. Raises ConfigError."""
    file = path / FILES[name] if path.is_dir() else path
    if not file.is_file():
        raise ConfigError("no such file", str(file), f"give a checkout or its {FILES[name]}")
    return str(file.absolute())


def summarize(workers: Sequence[ProbedWorker], device: Device) -> dict[str, Any]:
    """Return the rows, and how ours (the first) compares.

    ratio, ratios: our median rate divided by each program's best. ratio_spread: our rate divided by
    the rate of the fastest program in the same rounds. ratio_undisturbed: the same for undisturbed
    rounds. They are None if there is no other program.
    """
    rows: list[dict[str, Any]] = [
        {"name": worker.spec.name, "configuration": worker.spec.configuration}
        | worker.describe(device)
        for worker in workers
    ]
    ours = rows[0]["tokens_per_second"]["median"]
    for row in rows:
        rate = row["tokens_per_second"]
        row["ratio"] = ours / rate["median"] if rate else None
    result: dict[str, Any] = {
        "rows": rows,
        "ours": ours,
        "peer": None,
        "best_peer": None,
        "ratio": None,
        "ratio_spread": None,
        "ratio_undisturbed": None,
        "ratios": {},
    }
    measured = [index for index in range(1, len(rows)) if rows[index]["ratio"]]
    if not measured:
        return result
    for index in measured:
        row = rows[index]
        lowest = result["ratios"].get(row["name"], math.inf)
        result["ratios"][row["name"]] = min(row["ratio"], lowest)
    best = min(measured, key=lambda index: rows[index]["ratio"])
    ratios = [1 / ratio for ratio in workers[best].ratios]
    undisturbed = workers[best].select_undisturbed(ratios)
    result["peer"] = rows[best]["tokens_per_second"]["median"]
    result["best_peer"] = {key: rows[best][key] for key in ("name", "configuration")}
    result["ratio"] = rows[best]["ratio"]
    result["ratio_spread"] = describe_seconds(Timing(tuple(ratios)))
    if undisturbed:
        result["ratio_undisturbed"] = describe_seconds(Timing(undisturbed))
    return result


def print_ratio(result: dict[str, Any], console: Console) -> None:
    """Print our speed relative to the fastest program."""
    if result["ratio"] is None:
        return
    fastest = " ".join(result["best_peer"].values())
    spread = result["ratio_spread"]
    console.print(
        f"ours is {result['ratio']:.3g} times as fast as {fastest}, the fastest program; "
        f"by round {spread['median']:.3g} ({spread['low']:.3g} to {spread['high']:.3g})"
    )
    undisturbed = result["ratio_undisturbed"]
    if undisturbed:
        n_rounds = f"{undisturbed['repeats']} of {spread['repeats']}"
        console.print(f"{n_rounds} rounds undisturbed: {undisturbed['median']:.3g}")
