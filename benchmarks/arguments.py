"""Arguments of benchmarks that time one training step."""

import argparse

from megatoken.study.commands.bench import add_preset, count

SIZES = {
    "n_layer": "transformer blocks",
    "n_head": "attention heads",
    "d_model": "width",
    "vocab_size": "vocabulary before padding",
    "seq_len": "context",
}


def add_step(parser: argparse.ArgumentParser, *, gpt_only: bool = False) -> None:
    """Add --preset, the sizes of the model, and --batch-seqs."""
    add_preset(parser, gpt_only=gpt_only)
    for name, doc in SIZES.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=count, help=f"{doc} (default the preset's)")
    doc = "sequences per step (default 1)"
    parser.add_argument("--batch-seqs", type=count, default=1, help=doc)
