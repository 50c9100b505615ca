"""`megatoken export MODEL`: write a model in the format of another program."""

from argparse import ArgumentParser, Namespace

from megatoken.base.console import Console
from megatoken.cli import Data
from megatoken.cli.arguments import add_options

HELP = "write a model in another program's format"
EXAMPLE = "megatoken export runs/mine --to hf --out models/mine"


DTYPES = ("fp32", "bf16", "fp16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def add_arguments(parser: ArgumentParser) -> None:
    add_options(parser, __file__, dtype=_parse_dtype, dtypes=DTYPES)


def _parse_dtype(name: str) -> str:
    return {"f32": "fp32", "f16": "fp16"}.get(name, name)  # as llama.cpp spells them


def run(options: Namespace, console: Console) -> Data:
    from megatoken.convert.export import export

    arguments = options.model, options.to, options.out, options.dtype
    data = export(*arguments, console, push_to=options.push)
    return data
