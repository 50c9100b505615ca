"""Arguments of `megatoken bench NAME`. Does not import torch, so that help appears quickly."""

import argparse
from collections.abc import Callable
from pathlib import Path

from megatoken.base.config.presets import PRESETS
from megatoken.base.system.atomic_write import local_path

DOCS = {
    "ladder": "the training step with one more optimization at a time, from plain PyTorch up",
    "parts": "where the time of a training step goes: matrix products, attention, optimizer ...",
    "processes": "strong and weak scaling over 1, 2, 4, ... GPUs, on a CPU over its cores",
}


def add_benches(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add a parser with its options for each benchmark.

    add: a function (name, doc) that creates the parser of a benchmark.
    """
    parsers = {name: add(name, doc) for name, doc in DOCS.items()}
    for parser in parsers.values():
        add_common(parser)
        add_preset(parser)
    for name in ("ladder", "processes"):
        doc = "tokens per step and process, in a ladder at its end (default 4096, on cuda 65536)"
        parsers[name].add_argument("--batch-tokens", type=count, help=doc)
    doc = "run only these rungs, counted from 1 (default all)"
    parsers["ladder"].add_argument("--rungs", default="", metavar="N,...", help=doc)
    arg = parsers["parts"].add_argument
    arg("--batch-tokens", type=count, default=1024, help="tokens per step (default 1024)")
    doc = "context (default the preset's, at most --batch-tokens)"
    arg("--seq-len", type=count, help=doc)
    choices = ("auto", "fp32", "bf16", "fp16")
    arg("--precision", choices=choices, default="auto", help="machine.precision")
    doc = "settings of `machine`, such as machine.fp8=all, machine.micro_batch=8"
    arg("overrides", metavar="section.field=value", nargs="*", help=doc)
    doc = "write the last profiled step to OUT/trace.json, for Perfetto"
    arg("--trace", action="store_true", help=doc)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options that all benchmarks have."""
    doc = "auto, cpu, cuda, cuda:N or mps (default auto)"
    parser.add_argument("--device", default="auto", help=doc)
    doc = "timed repeats of each measurement (default 5)"
    parser.add_argument("--repeats", type=count, default=5, help=doc)
    doc = "folder for the record (default runs/bench)"
    parser.add_argument("--out", type=local_path, default=Path("runs/bench"), help=doc)
    doc = "name of the record (default the benchmark's)"
    parser.add_argument("--name", type=_record_name, help=doc)


def add_preset(parser: argparse.ArgumentParser, *, gpt_only: bool = False) -> None:
    """Add --preset. gpt_only: whether to offer only GPT-2 and GPT-3 models."""
    presets = [
        name for name, config in PRESETS.items() if config.pos_emb == "learned" or not gpt_only
    ]
    doc = f"{', '.join(presets)} (default {presets[0]})"
    parser.add_argument("--preset", default=presets[0], choices=presets, metavar="PRESET", help=doc)


def count(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)


def _record_name(text: str) -> str:
    if Path(text).name != text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a file name; use --out for the folder")
    return text
