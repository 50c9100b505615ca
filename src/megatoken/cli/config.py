"""`megatoken config RECIPE`: print a resolved recipe."""

from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from megatoken.base.console import Console
from megatoken.base.redact import redact
from megatoken.cli import Data
from megatoken.cli.arguments import add_options
from megatoken.cli.recipe import add_recipe_arguments, find_recipe, render_with_notes

HELP = "print every setting of a recipe and its origin"
EXAMPLE = "megatoken config gpt2-124m optim.lr=1e-3"


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe_arguments(parser)
    add_options(parser, section="settings")


def run(options: Namespace, console: Console) -> Data:
    resolved, _ = find_recipe(options)
    if not options.json:
        print(redact(render_with_notes(resolved)), end="")
    data = {"values": asdict(resolved.config), "origins": resolved.origins}
    return data
