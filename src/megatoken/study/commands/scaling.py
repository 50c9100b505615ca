"""`megatoken scaling RUN...`: fit a scaling law to runs."""

from argparse import ArgumentParser, Namespace

from megatoken.base.console import Console
from megatoken.base.system.atomic_write import local_path
from megatoken.cli import Data

HELP = "fit a scaling law to runs, and extrapolate"
EXAMPLE = "megatoken scaling runs/size-*"


def add_arguments(parser: ArgumentParser) -> None:
    arg = parser.add_argument
    arg("runs", metavar="RUN", nargs="+", type=local_path)
    doc = "training FLOPs (6 N D) to extrapolate to (default 10 and 100 times the largest run)"
    arg("--flops", type=float, nargs="+", default=[], metavar="C", help=doc)
    arg("--plot", type=local_path, metavar="FILE", help="picture of the runs and the law")


def run(options: Namespace, console: Console) -> Data:
    from megatoken.study.scaling_fit import fit_scaling

    data = fit_scaling(options.runs, options.flops, options.plot, console)
    return data
