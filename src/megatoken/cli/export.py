"""`megatoken export MODEL`: write a model in the format of another program."""

from argparse import ArgumentParser, Namespace

from megatoken.cli import Result, done
from megatoken.console import Console
from megatoken.system.atomic_write import local_path

HELP = "write a model in another program's format"
EXAMPLE = "megatoken export runs/mine --to hf --out models/mine"


def add_arguments(parser: ArgumentParser) -> None:
    arg = parser.add_argument
    arg("model", metavar="RUN_OR_CHECKPOINT", help="any MODEL of `sample`")
    doc = "hf: transformers, vLLM, llama.cpp; llmc: llm.c (default hf)"
    arg("--to", choices=("hf", "llmc"), default="hf", help=doc)
    arg("--out", type=local_path, required=True, metavar="DIR", help="new folder to write")
    arg("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (default fp32)")


def run(options: Namespace, console: Console) -> Result:
    from megatoken.convert.export import export

    data = export(options.model, options.to, options.out, options.dtype, console)
    return done(data)
