"""`megatoken plot RUN...`: plot the curves of runs, and pictures of weights."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatoken.base.console import Console
from megatoken.base.redact import redact
from megatoken.base.system.metrics_log import METRICS
from megatoken.cli import Data
from megatoken.cli.arguments import add_options

HELP = "plot the curves of runs in one picture"
EXAMPLE = "megatoken plot runs/mine runs/other"


def add_arguments(parser: ArgumentParser) -> None:
    add_options(parser, __file__, channels=lambda text: [*map(int, text.split(","))])


def run(options: Namespace, console: Console) -> Data:
    from megatoken.study.plots import draw_curves, draw_weights

    first: Path = options.runs[0]
    if options.pictures and len(options.runs) == 1 and not (first / METRICS).is_file():
        pictures = draw_weights(
            first, options.out or Path("plots") / first.stem, options.channels, options.block
        )
    else:
        target = options.out or first / "plots" / "curves.png"
        if target.is_dir() or (options.pictures and not target.suffix):
            target /= "curves.png"
        pictures = [draw_curves(options.runs, target, options.x, Console(to_stderr=True).warn)]
        if options.pictures:
            pictures += draw_weights(first, target.parent, options.channels, options.block)
    names = [str(path) for path in pictures]
    if not options.json:
        print(redact("\n".join(names)))
    return {"pictures": names}
