"""`megatoken export MODEL`: write a model in the format of another program."""

from argparse import ArgumentParser, Namespace

from megatoken.base.console import Console
from megatoken.base.system.atomic_write import local_path
from megatoken.cli import Data

HELP = "write a model in another program's format"
EXAMPLE = "megatoken export runs/mine --to hf --out models/mine"


DTYPES = ("fp32", "bf16", "fp16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def add_arguments(parser: ArgumentParser) -> None:
    arg = parser.add_argument
    arg("model", metavar="RUN_OR_CHECKPOINT", help="any MODEL of `sample`")
    doc = "hf: transformers, vLLM; peft: LoRA adapters; gguf: llama.cpp, ollama; llmc: llm.c"
    arg("--to", choices=("hf", "peft", "gguf", "llmc"), default="hf", help=f"{doc} (default hf)")
    doc = "new folder to write, or new FILE.gguf"
    arg("--out", type=local_path, required=True, metavar="DIR", help=doc)
    doc = "of the weights (default fp32); hf, peft and llmc: fp32 or bf16"
    arg("--dtype", "--quantize", choices=DTYPES, type=_parse_dtype, default="fp32", help=doc)


def _parse_dtype(name: str) -> str:
    return {"f32": "fp32", "f16": "fp16"}.get(name, name)  # as llama.cpp spells them


def run(options: Namespace, console: Console) -> Data:
    from megatoken.convert.export import export

    data = export(options.model, options.to, options.out, options.dtype, console)
    return data
