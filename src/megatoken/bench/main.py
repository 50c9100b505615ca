"""Run one bench and write its record."""

import argparse
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from megatoken.bench import compare, data, generate, ladder, profile, report, scoreboard, sweep
from megatoken.bench.report import write_record
from megatoken.config.schema import MachineConfig
from megatoken.console import Console
from megatoken.errors import StorageError
from megatoken.system.device import memory_errors, open_device

BENCHES: dict[str, Callable[[argparse.Namespace, Console], dict[str, Any]]] = {
    "ladder": ladder.run,
    "gemm": sweep.run,
    "attention": sweep.run,
    "batch": sweep.run,
    "size": sweep.run,
    "knob": compare.run_settings,
    "parts": profile.run,
    "loader": data.run_loader,
    "prepare": data.run_prepare,
    "generate": generate.run,
    "peers": compare.run_peers,
}


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure `options.bench`; return its answer, which is also in a record in `options.out`.

    `report` reads records and writes none. Raises StorageError before measuring if the folder cannot be written to.
    """
    if options.bench == "report":
        if len(options.folders) > 1 or options.record or options.plot:
            return scoreboard.run(options, console)
        return report.run(options, console)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.out):
            pass
    except OSError as error:
        raise StorageError(
            f"cannot write there: {error.strerror}", str(options.out), "choose another --out"
        ) from None
    if options.bench == "knob":
        options.name = options.name or f"knob-{options.setting.removeprefix('machine.')}"
    options.name = options.name or options.bench
    with memory_errors(f"bench {options.bench}", "ask for smaller sizes"):
        answer = BENCHES[options.bench](options, console)
    device = open_device(MachineConfig(device=getattr(options, "device", "auto")))
    command = ["megatoken", *sys.argv[1:]]
    console.print(
        f"record: {write_record(options.out, options.name, answer, device.name, command)}"
    )
    return answer
