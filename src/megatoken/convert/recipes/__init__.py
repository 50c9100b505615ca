"""Translate recipes of nanoGPT, llm.c and Composer."""

from argparse import Namespace
from pathlib import Path

from megatoken.convert.recipes.composer import translate_composer
from megatoken.convert.recipes.llmc import translate_llmc
from megatoken.convert.recipes.nanogpt import translate_nanogpt
from megatoken.convert.recipes.translation import Translation


def translate(options: Namespace) -> Translation:
    """Translate the recipe given by --llmc, --nanogpt or --composer. Raises ConfigError."""
    if options.llmc is not None:
        return translate_llmc(options.llmc, options.nproc)
    if options.nanogpt is not None:
        return translate_nanogpt(options.nanogpt)
    return translate_composer(Path(options.composer))
