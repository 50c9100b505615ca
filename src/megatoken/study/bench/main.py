"""Run a benchmark and write its record."""

import argparse
import tempfile
from collections.abc import Callable, Iterator

from megatoken.base.config.schema import MachineConfig
from megatoken.base.console import Console
from megatoken.base.system.atomic_write import storage_errors
from megatoken.base.system.device import memory_errors, open_device
from megatoken.base.system.metrics_log import Row
from megatoken.study.bench import ladder, parts
from megatoken.study.bench.report import write_record

Bench = Callable[[argparse.Namespace, Console], Iterator[Row]]
BENCHES: dict[str, Bench] = {"ladder": ladder.run, "parts": parts.run, "processes": ladder.run}


def run_bench(
    bench: Bench, options: argparse.Namespace, console: Console, command: list[str]
) -> Row:
    """Run a benchmark and return its result, the last one that it yields.

    Each result is written to the record in `options.out` at once, marked as unfinished until the
    benchmark ends.

    Raises StorageError if the folder is not writable, before anything is measured.
    """
    with storage_errors(options.out, fix="choose another --out"):
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.out):
            pass
    options.name = options.name or options.bench
    device = open_device(MachineConfig(device=options.device)).name
    result: Row = {}
    with memory_errors(f"bench {options.bench}", "use smaller sizes"):
        for result in bench(options, console):
            unfinished = result | {"unfinished": True}
            write_record(options.out, options.name, unfinished, device, command)
    record = write_record(options.out, options.name, result, device, command)
    console.print(f"record: {record}")
    return result
