"""Translates the recipes of other programs."""

from argparse import Namespace
from pathlib import Path

from megatoken.convert.recipes.composer import translate_composer
from megatoken.convert.recipes.llmc import translate_llmc
from megatoken.convert.recipes.nanogpt import translate_nanogpt
from megatoken.convert.recipes.translation import Translation


def translate(options: Namespace) -> Translation:
    """The recipe of --llmc, --nanogpt or --composer. Raises ConfigError naming what cannot be honoured."""
    if options.llmc is not None:
        return translate_llmc(options.llmc, options.nproc)
    return (
        translate_composer(Path(options.composer))
        if options.nanogpt is None
        else translate_nanogpt(options.nanogpt)
    )
