"""Arguments and columns of benchmarks that time one training step."""

import argparse

from megatoken.base.config.presets import PRESETS
from megatoken.cli.arguments import add_options
from megatoken.study.commands import bench
from megatoken.study.commands.bench import count

SIZES = {
    "n_layer": "transformer blocks",
    "n_head": "attention heads",
    "d_model": "width",
    "vocab_size": "vocabulary before padding",
    "seq_len": "context",
}
SPEED = {
    "tokens_per_second": "tokens/s",
    "mfu": "MFU",
    "mfu_causal": "MFU causal",
    "peak_memory_bytes": "peak memory",
}


def add_preset(parser: argparse.ArgumentParser, *, gpt_only: bool) -> None:
    """Add --preset. gpt_only: whether to offer only GPT-2 and GPT-3 models."""
    presets = [
        name for name, config in PRESETS.items() if config.pos_emb == "learned" or not gpt_only
    ]
    names = ", ".join(presets)
    add_options(parser, bench.__file__, "preset", presets=presets, names=names, first=presets[0])


def add_step(parser: argparse.ArgumentParser, *, gpt_only: bool = False) -> None:
    """Add --preset, the sizes of the model, and --batch-seqs."""
    add_preset(parser, gpt_only=gpt_only)
    for name, doc in SIZES.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=count, help=f"{doc} (default the preset's)")
    doc = "sequences per step (default 1)"
    parser.add_argument("--batch-seqs", type=count, default=1, help=doc)
