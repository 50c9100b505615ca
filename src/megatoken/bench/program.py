"""Run one bench: check what every bench shares, measure, keep the record, say where it is."""

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatoken.bench import attention, batch, gemm, generate, knob, ladder, loader, parts, peers, prepare, report, size
from megatoken.bench.record import write_record
from megatoken.config import Machine
from megatoken.console import Console
from megatoken.device import open_device
from megatoken.errors import Exit, Fault

BENCHES: dict[str, Callable[[argparse.Namespace, Console], dict[str, Any]]] = {
    "ladder": ladder.run,
    "gemm": gemm.run,
    "attention": attention.run,
    "batch": batch.run,
    "size": size.run,
    "knob": knob.run,
    "parts": parts.run,
    "loader": loader.run,
    "prepare": prepare.run,
    "generate": generate.run,
    "peers": peers.run,
}


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure `options.bench` and return its answer; the record is in `options.out`.

    `report` measures nothing: it reads records, needs no device and leaves none.
    """
    if options.bench == "report":
        return report.run(options, console)
    if options.repeats < 1:
        raise Fault(Exit.CONFIG, f"{options.repeats} repeats measure nothing", "--repeats", "give at least 1")
    name = options.name or options.bench
    if not re.fullmatch(r"[\w.-]+", name):
        raise Fault(Exit.CONFIG, f"'{name}' is no name of a file", "--name", "use letters, digits, - and _")
    made = not options.out.exists()
    check_folder(options.out)
    try:
        answer = BENCHES[options.bench](options, console)
    except Fault:
        if made:
            with suppress(OSError):  # something was written to it: it stays
                options.out.rmdir()
        raise
    device = open_device(Machine(device=getattr(options, "device", "auto")))
    record = write_record(options.out, name, answer, device, ["megatoken", *sys.argv[1:]])
    console.say(f"record: {record}")
    return answer


def check_folder(folder: Path) -> None:
    """Raise Fault(STORAGE), before anything is measured, unless files can be written to `folder`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as wrong:
        fix = "choose another --out"
        raise Fault(Exit.STORAGE, f"cannot write there: {wrong.strerror}", str(folder), fix) from None
