"""`megatoken completion SHELL`: print a script that completes commands, recipes and settings."""

from argparse import ArgumentParser, Namespace
from typing import Any

from megatoken.base.config.load import list_recipes
from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import FIELDS
from megatoken.base.console import Console
from megatoken.base.errors import import_extra
from megatoken.cli import COMMANDS, Data, load_command
from megatoken.cli.arguments import fill_parser
from megatoken.cli.recipe import PRESET_HELP

HELP = "print a shell completion script"
EXAMPLE = 'eval "$(megatoken completion bash)"'
# Functions that shtab's script calls with the current word. Recipes may also be files.
PREAMBLE = {
    "bash": """
_megatoken_recipe() {{ compgen -W "{recipes}" -- "$1"; compgen -f -- "$1"; }}
_megatoken_preset() {{ compgen -W "{presets}" -- "$1"; _megatoken_recipe "$1"; }}
_megatoken_setting() {{ compgen -W "{settings}" -- "$1"; }}
""",
    "zsh": """
_megatoken_recipe() {{ compadd -- {recipes}; _files; }}
_megatoken_preset() {{ compadd -- {presets}; _megatoken_recipe; }}
_megatoken_setting() {{ compadd -S '' -- {settings}; }}
""",
}
# Replaces shtab's own `complete`: adds no space after the = of a setting, and completes file names.
BASH_END = """
_megatoken() { _shtab_megatoken "$@"; [[ ${COMPREPLY[0]} != *= ]] || compopt -o nospace; }
complete -o bashdefault -o default -F _megatoken megatoken
"""


def run(options: Namespace, console: Console) -> Data:
    script = write_completion(options.shell)
    if not options.json:
        print(script, end="")
    return {"script": script}


def write_completion(shell: str) -> str:
    """Return the script for a shell. Raises ConfigError without shtab."""
    shtab = import_extra("shtab", "shell")
    names = {
        "recipes": " ".join(list_recipes()),
        "presets": " ".join(PRESETS),
        "settings": " ".join(f"{key}=" for key in FIELDS),
    }
    preamble = {shell: PREAMBLE[shell].format(**names)}
    script = str(shtab.complete(build_full_parser(shtab.FILE), shell, preamble=preamble))
    return script + BASH_END if shell == "bash" else script


def build_full_parser(file: Any) -> ArgumentParser:
    """Return a parser of all commands, with shtab's completers. file: shtab's path completer."""
    root = ArgumentParser(prog="megatoken")
    commands = root.add_subparsers()
    for name in COMMANDS:
        command = load_command(name)
        parser = commands.add_parser(name, help=command.HELP)
        fill_parser(parser, command)
        for action in parser._actions:
            if action.dest in ("recipe", "contenders"):
                kind = "preset" if str(action.help).startswith(PRESET_HELP) else "recipe"
                completer = dict.fromkeys(PREAMBLE, f"_megatoken_{kind}")
            elif action.dest == "overrides":
                completer = dict.fromkeys(PREAMBLE, "_megatoken_setting")
            elif getattr(action.type, "__name__", "") == "local_path":
                completer = file
            else:
                continue
            action.complete = completer  # type: ignore[attr-defined]
    return root
