"""A recipe by the name people gave it: one of ours, or another program's command or file."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from megatoken.interop.composer import translate_composer
from megatoken.interop.llmc import translate_llmc
from megatoken.interop.nanogpt import translate_nanogpt
from megatoken.interop.translation import Translation

TRANSLATORS: dict[str, Callable[[Namespace], Translation]] = {
    "llmc": lambda options: translate_llmc(options.llmc, options.nproc),
    "nanogpt": lambda options: translate_nanogpt(options.nanogpt),
    "composer": lambda options: translate_composer(Path(options.composer)),
}


def translate(options: Namespace) -> Translation:
    """The recipe that --llmc, --nanogpt or --composer gives. Raises Fault(CONFIG) naming what cannot be told."""
    return next(tell(options) for name, tell in TRANSLATORS.items() if getattr(options, name) is not None)
