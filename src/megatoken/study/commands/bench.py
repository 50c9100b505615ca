"""`megatoken bench NAME`: measure speeds on this machine."""

import sys
from argparse import SUPPRESS, ArgumentParser, Namespace

from megatoken.base.console import Console
from megatoken.cli import Data
from megatoken.cli.arguments import add_options
from megatoken.study.bench.arguments import add_benches

HELP = "benchmark training on this machine"
EXAMPLE = "megatoken bench ladder"


def add_arguments(parser: ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")

    def add(name: str, doc: str) -> ArgumentParser:
        bench = benches.add_parser(name, help=doc, description=doc)
        add_options(bench, section="output", default=SUPPRESS)
        return bench

    add_benches(add)


def run(options: Namespace, console: Console) -> Data:
    from megatoken.study.bench.main import run

    data = run(options, console)
    options.json = options.json or not sys.stdout.isatty()
    return data
