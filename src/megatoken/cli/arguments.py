"""Parse the command line, and define the arguments that several commands share. No torch."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from megatoken.base.errors import ConfigError
from megatoken.base.rooms import list_entries, load_entry
from megatoken.base.suggest import suggest
from megatoken.base.system.address import path_or_address, run_folder
from megatoken.base.system.atomic_write import local_path
from megatoken.base.system.table import read_table
from megatoken.cli import COMMANDS, load_command

SETTING = re.compile(r"[A-Za-z_][\w.-]*=.*", re.DOTALL)
HOME = re.compile(r"([\w.-]+=)~/")  # a shell expands ~/ only at the start of an argument


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


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line whose first argument is the command. Raises ConfigError.

    Settings (`section.field=value`) may be mixed with other arguments. The result also has the
    attributes `command`, its name, and `arguments`, the command line.
    """
    name = arguments[0]
    if name not in COMMANDS:
        match = suggest(name, COMMANDS)
        fix = f"did you mean {match}?" if match else "see `megatoken --help`"
        raise ConfigError(f"no command '{name}'", "megatoken", fix)
    parser = build_parser(name)
    expanded = [HOME.sub(lambda match: f"{match[1]}{Path.home()}/", text) for text in arguments[1:]]
    if name == "bench":  # argparse cannot intermix the arguments of subcommands
        options = parser.parse_args(expanded)
    else:
        others, settings = split_settings(parser, expanded)
        options = parser.parse_intermixed_args(others)
        if settings:
            options.overrides = settings
    options.command = name
    options.arguments = list(arguments)
    return options


def build_parser(name: str) -> Parser:
    """Return the parser of a command."""
    command = load_command(name)
    parser = Parser(
        prog=f"megatoken {name}", description=command.HELP, epilog=f"example:\n  {command.EXAMPLE}"
    )
    add_options(parser, section="output", default=False)
    fill_parser(parser, command)
    return parser


def split_settings(parser: Parser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into a list of other arguments and a list of settings.

    The value of an option is not a setting, even if it contains `=`. If the command takes no
    settings, the second list is empty.
    """
    if not any(action.dest == "overrides" for action in parser._actions):
        return list(arguments), []
    with_value = [
        name for action in parser._actions if action.nargs != 0 for name in action.option_strings
    ]
    others: list[str] = []
    settings: list[str] = []
    previous = ""
    for argument in arguments:
        is_setting = SETTING.fullmatch(argument) and previous not in with_value
        (settings if is_setting else others).append(argument)
        previous = argument
    return others, settings


def fill_parser(parser: argparse.ArgumentParser, command: ModuleType) -> None:
    """Add the arguments of a command: by its `add_arguments`, or else those in its table."""
    if hasattr(command, "add_arguments"):
        command.add_arguments(parser)
    else:
        add_options(parser, str(command.__file__))


def add_options(
    parser: argparse.ArgumentParser, module_file: str = __file__, section: str = "", **names: Any
) -> None:
    """Add the arguments that a section of MODULE.toml describes, or the whole file without one.

    The file has a table per argument, with the argument's name and the keyword arguments of
    `add_argument`; `group` is the title of a group in the help. A value "$NAME" is
    replaced by `names[NAME]` or by a type of TYPES; {NAME} in a help text by `names[NAME]`. A table
    named "*SECTION" adds a section of arguments.toml, with the table as its `names`. "*option"
    adds the options of objectives that rooms have.
    """
    names = TYPES | names
    table = read_table(module_file)

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            return names[value[1:]] if value.startswith("$") else value.format_map(names)
        return value

    groups: dict[str, Any] = {"": parser}
    for flags, given in (table[section] if section else table).items():
        if flags == "*option":
            for name in list_entries("option"):
                parser.add_argument(f"--{name}", metavar="NAME", help=load_entry("option", name))
            continue
        if flags.startswith("*"):
            add_options(parser, section=flags[1:], **given)
            continue
        options = {key: fill(value) for key, value in given.items()}
        title = options.pop("group", "")
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(*flags.split(), **options)


def _reject(text: str) -> NoReturn:
    """Raise ArgumentTypeError, because `split_settings` has already removed all valid settings."""
    raise argparse.ArgumentTypeError(f"not a setting: '{text}'")


TYPES: dict[str, Any] = {
    "int": int,
    "float": float,
    "local_path": local_path,
    "path_or_address": path_or_address,
    "run_folder": run_folder,
    "reject": _reject,
}
