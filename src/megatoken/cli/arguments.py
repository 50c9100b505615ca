"""Parse the command line, and define the arguments that several commands share. No torch."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatoken.base.errors import ConfigError
from megatoken.base.suggest import suggest
from megatoken.cli import COMMANDS, load_command

SETTING = re.compile(r"[A-Za-z_][\w.-]*=.*", re.DOTALL)
HOME = re.compile(r"([\w.-]+=)~/")  # a shell expands ~/ only at the start of a word


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises its errors as ConfigError."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**kwargs, allow_abbrev=False)

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        """Parse the text of a number without `type` as the type of its default."""
        if isinstance(action.default, int | float):
            action.type = action.type or type(action.default)
        return super()._get_value(action, text)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices or [value]
        match = None if value in choices else suggest(value, choices)
        if match:
            raise ConfigError(f"no {action.dest} '{value}'", self.prog, f"did you mean {match}?")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, self.prog, f"see `{self.prog} --help`")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line whose first word is the command. Raises ConfigError.

    Settings (`section.field=value`) may be mixed with other arguments. The result also has the
    attributes `command`, its name, and `words`, the command line.
    """
    name = words[0]
    if name not in COMMANDS:
        match = suggest(name, COMMANDS)
        fix = f"did you mean {match}?" if match else "see `megatoken --help`"
        raise ConfigError(f"no command '{name}'", "megatoken", fix)
    parser = build_parser(name)
    expanded = [HOME.sub(lambda match: f"{match[1]}{Path.home()}/", word) for word in words[1:]]
    if name == "bench":  # argparse cannot intermix the arguments of subcommands
        options = parser.parse_args(expanded)
    else:
        others, settings = split_settings(parser, expanded)
        options = parser.parse_intermixed_args(others)
        if settings:
            options.overrides = settings
    options.command = name
    options.words = list(words)
    return options


def build_parser(name: str) -> Parser:
    """Return the parser of a command."""
    command = load_command(name)
    parser = Parser(
        prog=f"megatoken {name}", description=command.HELP, epilog=f"example:\n  {command.EXAMPLE}"
    )
    add_output_arguments(parser, default=False)
    command.add_arguments(parser)
    return parser


def split_settings(parser: Parser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into a list of other arguments and a list of settings.

    A word that is the value of an option is not a setting, even if it contains `=`. If the command
    takes no settings (`add_settings`), the second list is empty.
    """
    if not any(action.dest == "overrides" for action in parser._actions):
        return list(words), []
    with_value = [
        name for action in parser._actions if action.nargs != 0 for name in action.option_strings
    ]
    others: list[str] = []
    settings: list[str] = []
    previous = ""
    for word in words:
        is_setting = SETTING.fullmatch(word) and previous not in with_value
        (settings if is_setting else others).append(word)
        previous = word
    return others, settings


def add_output_arguments(parser: argparse.ArgumentParser, default: Any) -> None:
    """Add --json and --debug, which every command has."""
    doc = "print progress to stderr and one JSON line to stdout"
    parser.add_argument("--json", action="store_true", default=default, help=doc)
    doc = "show the traceback of an error"
    parser.add_argument("--debug", action="store_true", default=default, help=doc)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Let a command take settings, which `parse` stores as the attribute `overrides`, a list."""
    parser.add_argument(
        "overrides",
        metavar="section.field=value",
        nargs="*",
        type=_reject,
        default=[],
        help="settings (see `megatoken train --help`)",
    )


def _reject(word: str) -> NoReturn:
    """Raise ArgumentTypeError, because `split_settings` has already removed all valid settings."""
    raise argparse.ArgumentTypeError(f"not a setting: '{word}'")


def add_sampling_arguments(parser: argparse.ArgumentParser, tokens: int) -> None:
    """Add the options of sampling. tokens: default of --tokens."""
    arg = parser.add_argument
    arg("--tokens", default=tokens, help=f"most new tokens (default {tokens})")
    arg("--temperature", default=0.8, help="0: greedy (default 0.8)")
    arg("--top-k", default=50, help="sample from the top k tokens; 0: all (default 50)")
    arg("--top-p", default=1.0, help="sample from the top-p nucleus (default 1)")
    arg("--seed", default=0, help="random seed (default 0)")


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --device and --precision."""
    doc = "auto, cpu, cuda, cuda:N or mps (default auto)"
    parser.add_argument("--device", default="auto", help=doc)
    choices = ("auto", "fp32", "bf16", "fp16")
    parser.add_argument("--precision", default="fp32", choices=choices, help="default fp32")


def add_address_arguments(parser: argparse.ArgumentParser, port: int, key: str) -> None:
    """Add --host, --port and --api-key. port: default of --port. key: help of --api-key."""
    arg = parser.add_argument
    doc = "address to listen on; others than localhost need a key (default 127.0.0.1)"
    arg("--host", default="127.0.0.1", help=doc)
    arg("--port", default=port, help=f"0: a free port (default {port})")
    arg("--api-key", metavar="KEY", help=key)
