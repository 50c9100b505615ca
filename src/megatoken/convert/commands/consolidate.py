"""`megatoken consolidate CHECKPOINT`: merge the shards of a checkpoint into one file."""

from argparse import ArgumentParser, Namespace

from megatoken.base.console import Console
from megatoken.base.system.atomic_write import local_path
from megatoken.cli import Data

HELP = "merge the shards of a checkpoint into one file"
EXAMPLE = "megatoken consolidate runs/mine --out merged"


def add_arguments(parser: ArgumentParser) -> None:
    doc = "run folder (newest checkpoint), or one of its checkpoints"
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT", type=local_path, help=doc)
    parser.add_argument("--out", required=True, type=local_path, help="folder to write step-N into")


def run(options: Namespace, console: Console) -> Data:
    from megatoken.convert.consolidate import consolidate

    folder = consolidate(options.source, options.out, console.warn)
    console.print(f"written: {folder}")
    return {"folder": str(folder)}
