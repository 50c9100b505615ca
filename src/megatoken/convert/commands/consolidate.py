"""`megatoken consolidate CHECKPOINT`: merge the shards of a checkpoint into one file."""

from argparse import Namespace

from megatoken.base.console import Console
from megatoken.cli import Data

HELP = "merge the shards of a checkpoint into one file"
EXAMPLE = "megatoken consolidate runs/mine --out merged"


def run(options: Namespace, console: Console) -> Data:
    from megatoken.convert.consolidate import consolidate

    folder = consolidate(options.source, options.out, console.warn)
    console.print(f"written: {folder}")
    return {"folder": str(folder)}
