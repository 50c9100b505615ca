"""`megatoken completion bash|zsh`: a script that completes commands, options, recipes and settings, made by shtab."""

import argparse
from collections.abc import Iterator

from megatoken.cli.arguments import TAKE_OVERRIDES, Parser
from megatoken.config.load import list_recipes
from megatoken.config.presets import PRESETS
from megatoken.config.schema import FIELDS
from megatoken.errors import ConfigError

SHELLS = ("bash", "zsh")
# Functions that shtab's script calls with the word that is being typed; file names are offered, too.
PREAMBLE = {
    "bash": """
_megatoken_recipe() { compgen -W "RECIPES" -- "$1"; compgen -f -- "$1"; }
_megatoken_setting() { compgen -W "SETTINGS" -- "$1"; }
""",
    "zsh": """
_megatoken_recipe() { compadd -- RECIPES; _files; }
_megatoken_setting() { compadd -S '' -- SETTINGS; }
""",
}

# After the script, whose own `complete` it replaces. No blank follows the = of a setting. Where nothing is offered, as
# for a run or after data.path=, file names are.
BASH_END = """
_megatoken() { _shtab_megatoken "$@"; [[ ${COMPREPLY[0]} != *= ]] || compopt -o nospace; }
complete -o bashdefault -o default -F _megatoken megatoken
"""


def write_completion(parser: Parser, shell: str) -> str:
    """The script for a shell, to be evaluated when it starts. Raises ConfigError without shtab."""
    try:
        import shtab
    except ImportError:
        raise ConfigError(
            "completion needs shtab, which is not installed", fix="pip install shtab"
        ) from None
    for command, subparser in list_subparsers(parser):
        for action in subparser._actions:
            if action.dest in ("recipe", "contenders", "preset"):
                action.complete = dict.fromkeys(SHELLS, "_megatoken_recipe")  # type: ignore[attr-defined]
            elif action.type is not None and getattr(action.type, "__name__", "") == "local_path":
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        if command in TAKE_OVERRIDES:
            settings = subparser.add_argument("settings", nargs="*")
            settings.complete = dict.fromkeys(SHELLS, "_megatoken_setting")  # type: ignore[attr-defined]
    words = {"RECIPES": [*list_recipes(), *PRESETS], "SETTINGS": [f"{key}=" for key in FIELDS]}
    preamble = PREAMBLE[shell]
    for name, values in words.items():
        preamble = preamble.replace(name, " ".join(values))
    script = str(shtab.complete(parser, shell, preamble={shell: preamble}))
    return script + BASH_END if shell == "bash" else script


def list_subparsers(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command with its parser, those below another one included."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                yield name, subparser
                yield from list_subparsers(subparser)
