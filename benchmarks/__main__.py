"""`python -m benchmarks NAME`: run one benchmark and write its record, as `megatoken bench` does.

`report` shows records, compares them with older records or with records of other machines.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.arguments import add_preset, add_step
from megatoken.base.console import Console
from megatoken.base.errors import MegatokenError
from megatoken.study.bench.main import run_bench
from megatoken.study.commands.bench import add_common, count

ROOT = Path(__file__).parents[1]
MODULES = {
    "knob": "benchmarks.knob",
    "batch": "benchmarks.batch",
    "gemm": "benchmarks.sweep",
    "products": "benchmarks.products",
    "attention": "benchmarks.sweep",
    "size": "benchmarks.sweep",
    "peers": "benchmarks.peers",
    "busy": "benchmarks.busy",
    "loader": "benchmarks.data",
    "scale": "benchmarks.data",
    "prepare": "benchmarks.data",
    "generate": "benchmarks.generate",
    "report": "benchmarks.report",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    benches = parser.add_subparsers(dest="bench", required=True, metavar="NAME")

    def add(name: str, doc: str) -> Callable[..., Any]:
        bench = benches.add_parser(name, help=doc, description=doc)
        add_common(bench)
        if name == "peers":
            add_step(bench, gpt_only=True)
        if name == "knob":
            add_step(bench)
        if name in ("products", "attention", "generate", "batch"):
            add_preset(bench, gpt_only=name != "batch")
        return bench.add_argument

    arg = add("knob", "the training step with each value of a machine setting")
    doc = "a field of `machine`, such as compile or attention"
    arg("setting", metavar="SETTING", help=doc)
    doc = "values to compare (default all of a setting with named values)"
    arg("--values", default="", metavar="VALUE,...", help=doc)
    arg("--micro-batch", type=count, help="sequences per micro-batch (default the full batch)")
    arg = add("batch", "tokens/s, MFU and memory by micro-batch size, until out of memory")
    arg("--seq-len", type=count, help="context (default the preset's)")
    doc = "largest micro-batch (default what fits on cuda, elsewhere 8192 tokens)"
    arg("--largest", type=count, help=doc)
    arg = add("gemm", "FLOP/s of matrix products, square and as in layers; the best is the peak")
    arg("--largest", type=count, help="largest square (default by device)")
    arg = add("products", "every matrix product of a training step, by each BLAS library")
    arg("--batch-tokens", type=count, help="tokens per step (default 1024, on cuda 65536)")
    arg = add("attention", "time and memory of each attention implementation by context")
    arg("--longest", type=count, help="longest context (default by device)")
    arg("--seqs", type=count, default=1, help="sequences per batch (default 1)")
    arg = add("size", "time per token by model size and by context")
    arg("--batch-tokens", type=count, help="tokens per step (default 1024, on cuda 8192)")
    arg = add("peers", "the training step of other GPT-2 implementations, next to ours")
    arg("--nanogpt", type=Path, help="checkout of nanoGPT, or its model.py")
    arg("--build-nanogpt", type=Path, help="checkout of build-nanogpt, or its train_gpt2.py")
    arg("--llmc", type=Path, help="checkout of llm.c, whose C trainer is built and timed in fp32")
    arg("--only", metavar="NAME,...", help="transformers, nanogpt, build-nanogpt, llmc")
    arg("--compile", choices=("on", "off"), help="compile the programs or not (default both)")
    arg("--micro-batch", type=count, default=0, help="sequences of our micro-batch (default tuned)")
    arg("--precision", choices=("fp32", "bf16"), help="default: both if bf16 is fast")
    arg = add("busy", "tokens/s of the training step next to busy processes")
    arg("--case", choices=("quickstart", "124m"), default="quickstart", help="model and batch")
    arg("--optimizer", choices=("adamw", "muon"), default="adamw", help="ours (default adamw)")
    arg("--batch-seqs", type=int, default=1, help="sequences per step of 124m (default 1)")
    arg("--loads", type=counts, default=[0, 1, 2, 4], help="busy processes (default 0,1,2,4)")
    arg("--turn", type=float, default=4.0, help="seconds per turn, or a step (default 4)")
    doc = "the src folder of another checkout of megatoken to time as NAME"
    arg("--source", action="append", default=[], metavar="PATH:NAME", help=doc)
    arg("--nanogpt", type=Path, help="checkout of nanoGPT, or its model.py")
    arg = add("loader", "tokens/s of the data loader on one core, in the first epoch and later")
    arg("--shards", type=count, default=4, help="shards of random ids (default 4)")
    arg("--shard-tokens", type=count, default=12_500_000, help="tokens per shard")
    arg = add("scale", "opening and reading a dataset of many shards, on sparse files")
    arg("--tokens", type=float, default=15e12, help="in all (default 15e12)")
    arg = add("prepare", "MB/s of `prepare`, and of the tokenizers library alone")
    arg("--megabytes", type=count, default=20, help="text to prepare (default 20)")
    arg("--tokenizer", help="gpt2, bytes, bpe:N or a tokenizer.json")
    arg = add("generate", "tokens/s of greedy decoding, next to transformers")
    arg("--tokens", type=count, default=256, help="new tokens (default 256)")
    arg("--prompt-tokens", type=count, default=16, help="tokens of the prompt (default 16)")
    arg = add("report", "records as a table; records of several machines as a scoreboard")
    arg("folders", metavar="FOLDER", nargs="*", type=Path, default=[Path("records")])
    arg("--against", metavar="FOLDER", type=Path, help="older records to compare with")
    arg("--record", metavar="NAME", help="show all speeds of this record")
    arg("--plot", metavar="FILE", type=Path, help="picture of the scoreboard")
    arg("--pictures", action="store_true", help="draw the folder's pictures again from its records")
    return parser


def counts(text: str) -> list[int]:
    """Parse integers separated by commas."""
    return [int(size) for size in text.split(",")]


def main() -> int:
    """Run the benchmark of the command line and print its result as a JSON line."""
    options = build_parser().parse_args()
    # Workers import the builders of this folder.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if options.bench == "busy":
        options.name = options.name or f"busy-{options.case}"
    if options.bench == "knob":
        options.name = options.name or f"knob-{options.setting.removeprefix('machine.')}"
    console = Console()
    module = import_module(MODULES[options.bench])
    run = getattr(module, f"run_{options.bench}")
    try:
        if options.bench == "report":
            result = run(options, console)
        else:
            command = ["python", "-m", "benchmarks", *sys.argv[1:]]
            result = run_bench(run, options, console, command)
    except MegatokenError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.code)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
