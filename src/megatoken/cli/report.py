"""`megatoken report RUN...`: write runs as one HTML page."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatoken.cli import Result
from megatoken.console import Console
from megatoken.errors import ExitCode
from megatoken.system.atomic_write import local_path

HELP = "write runs as one offline HTML page: curves, samples, scores, cost"
EXAMPLE = "megatoken report runs/mine runs/other --out report.html"


def add_arguments(parser: ArgumentParser) -> None:
    arg = parser.add_argument
    arg("runs", metavar="RUN", nargs="+", type=local_path)
    doc = "page to write (default report.html)"
    arg("--out", type=local_path, default=Path("report.html"), metavar="FILE", help=doc)
    doc = "serve the page on this machine while runs continue (default port 8765)"
    arg("--serve", type=int, nargs="?", const=8765, metavar="PORT", help=doc)
    arg("--price", type=float, metavar="DOLLARS", help="per process-hour")
    arg("--ladder", type=local_path, metavar="FILE", help="record of `bench ladder` to show")


def run(options: Namespace, console: Console) -> Result:
    from megatoken.cli.report_page import report

    options.console = console
    return Result(ExitCode.DONE, report(options))
