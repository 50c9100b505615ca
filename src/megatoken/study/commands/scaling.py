"""`megatoken scaling RUN...`: fit a scaling law to runs."""

from argparse import Namespace

from megatoken.base.console import Console
from megatoken.cli import Data

HELP = "fit a scaling law to runs, and extrapolate"
EXAMPLE = "megatoken scaling runs/size-*"


def run(options: Namespace, console: Console) -> Data:
    from megatoken.study.scaling_fit import fit_scaling

    return fit_scaling(options.runs, options.flops, options.plot, console)
