"""`megatoken bench NAME`: measure speeds on this machine."""

import sys
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from megatoken.base.config.presets import PRESETS
from megatoken.base.console import Console
from megatoken.cli import Data
from megatoken.cli.arguments import add_options

HELP = "benchmark training on this machine"
EXAMPLE = "megatoken bench ladder"
DOCS = {
    "ladder": "the training step with one more optimization at a time, from plain PyTorch up",
    "parts": "where the time of a training step goes: matrix products, attention, optimizer ...",
    "processes": "strong and weak scaling over 1, 2, 4, ... GPUs, on a CPU over its cores",
}


def add_arguments(parser: ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, doc in DOCS.items():
        bench = benches.add_parser(name, help=doc, description=doc)
        add_options(bench, section="output", default=SUPPRESS)
        add_common(bench)
        presets = list(PRESETS)
        names = ", ".join(presets)
        add_options(bench, __file__, "preset", presets=presets, names=names, first=presets[0])
        add_options(bench, __file__, name, count=count)


def add_common(parser: ArgumentParser) -> None:
    """Add the options that all benchmarks have."""
    out = Path("runs/bench")
    add_options(parser, __file__, "common", out=out, count=count, record_name=_record_name)


def count(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)


def _record_name(text: str) -> str:
    if Path(text).name != text:
        raise ArgumentTypeError(f"{text!r} is not a file name; use --out for the folder")
    return text


def run(options: Namespace, console: Console) -> Data:
    from megatoken.study.bench.main import BENCHES, run_bench

    command = ["megatoken", *sys.argv[1:]]
    data = run_bench(BENCHES[options.bench], options, console, command)
    options.json = options.json or not sys.stdout.isatty()
    return data
