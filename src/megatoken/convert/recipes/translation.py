"""Translate recipes of other programs with a table per program.

A table, NAME.yaml, has these keys. `settings` maps a setting's names to a `Rule`. `effects` holds,
by setting and value, further fields and a `note`. `products` holds fields whose value is a product
of settings. `fixed` holds fields whose value the program hard-codes. `out` names the setting of the
run folder. `ignored` lists patterns of settings that do not affect training. `notes` say what always
differs. Any other setting of a recipe is an error. Recipes are never executed.
"""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatoken.base.config.load import Assignment, ResolvedConfig, resolve_assignments
from megatoken.base.errors import ConfigError

STEPS = "{}steps".format  # optimizer steps as a duration
Functions = Mapping[str, Callable[[Any], Any]]


@dataclass(frozen=True)
class Rule:
    """How to translate one setting.

    default: the program's default; if None, the rule applies only to recipes that have the setting.
    type: name of the value's type; by default, the type of `default`. fields: megatoken's fields to
    set, separated by spaces; empty if the value is only checked, or if the program's module
    translates it. convert: a mapping of the program's values to megatoken's, a list of accepted
    values, or the name of a function that converts the value.
    """

    default: Any = None
    type: str = ""
    fields: str = ""
    convert: Any = None

    def parse(self, text: str) -> Any:
        """Convert the text of a setting to the rule's type. Raises KeyError or ValueError."""
        match self.type or type(self.default).__name__:
            case "str":
                return text
            case "bool":
                return {"true": True, "false": False}[text.lower()]
            case "int" if text.isdecimal():
                return int(text)  # exact above 2**53
            case kind:
                number = float(text)
                if not math.isfinite(number) or (kind == "int" and number != int(number)):
                    raise ValueError
                return int(number) if kind == "int" else number

    def apply(self, value: Any, functions: Functions) -> Any:
        """Convert a parsed value to megatoken's value. Raises KeyError or ValueError."""
        match self.convert:
            case None:
                return value
            case str(name):
                return functions[name](value)
            case list(values):
                return values[values.index(value)]
            case mapping:
                return mapping[value]


class Translation:
    """Another program's recipe as assignments to megatoken's fields, with notes on what differs.

    out: the run folder that the recipe names, if any.
    """

    def __init__(
        self,
        program: str,
        table: Mapping[str, Any],
        settings: Sequence[Assignment],
        functions: Functions | None = None,
    ) -> None:
        """Translate `settings`; if a key is repeated, the last one counts.

        table: of the program, as above. functions: converters of values by name, which the table's rows
        can use in addition to `steps`. Raises ConfigError for a setting that cannot be
        translated.
        """
        self.program = program
        self.name = program
        self.out: Path | None = None
        self.notes: list[str] = [*table["notes"]]
        self.assignments: dict[str, Assignment] = {}
        self._functions = {"steps": STEPS, **(functions or {})}
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        latest = {setting.key: setting for setting in settings}
        for field, value in table["fixed"].items():
            self.set(field, value)
        for names, rule in table["settings"].items():
            written = [latest.pop(name) for name in names.split() if name in latest]
            self._translate(names.split()[0], Rule(**rule), written)
        for key, effects in table["effects"].items():
            for field, value in effects.get(self.get(key), {}).items():
                if field == "note":
                    self.notes.append(value)
                else:
                    self.set(field, value, key)
        for field, keys in table["products"].items():
            factors = [self.get(key) for key in keys]
            if None not in factors:
                self.set(field, math.prod(factors), *keys)
        out = self.get(table["out"])
        if out and "{" not in out:
            self.out = Path(out)
        for setting in latest.values():
            if not any(fnmatchcase(setting.key, pattern) for pattern in table["ignored"]):
                raise self.refuse(setting)
        if latest:
            sections = dict.fromkeys(".".join(key.split(".")[:2]) for key in latest)
            self.notes.append(f"ignored (data, hardware, display, storage): {', '.join(sections)}")

    def _translate(self, key: str, rule: Rule, written: Sequence[Assignment]) -> None:
        """Translate one setting with its rule of the table.

        Stores the value under `key` and sets the rule's fields. written: the recipe's assignments to
        the setting, under any of its names; if there are none, the default applies.
        """
        origin = f"{self.program} {key} {rule.default} (default)"
        value = rule.default
        for setting in written:
            try:
                parsed = rule.parse(setting.text)
                rule.apply(parsed, self._functions)
            except (KeyError, ValueError, OverflowError):
                raise self.refuse(setting) from None
            if setting is not written[0] and parsed != value:
                raise self.refuse(setting, f"make it equal to {written[0].key}")
            value = parsed
            origin = setting.where
        if value is None:
            return
        self._values[key] = value
        self._origins[key] = origin
        for field in rule.fields.split():
            self.set(field, rule.apply(value, self._functions), key)

    def refuse(self, setting: Assignment, fix: str = "change or remove it") -> ConfigError:
        """Build the error for a setting that cannot be translated."""
        what = f"cannot translate {self.program} setting {setting.key[:80]}={setting.text:.80}"
        return ConfigError(what, setting.where, fix)

    def get(self, key: str) -> Any:
        """Return the value of a setting; if the recipe lacks it, the program's default or None.

        key: the first name in the setting's rule.
        """
        return self._values.get(key)

    def where(self, *keys: str) -> str:
        """Return where these settings were made, for messages, such as file:line or "(default)"."""
        return ", ".join(self._origins[key] for key in keys)

    def set(self, field: str, value: Any, *keys: str) -> None:
        """Assign a value to a field of megatoken. keys: the settings from which it is derived."""
        origin = self.where(*keys) if keys else f"{self.program}: fixed"
        self.assignments[field] = Assignment(field, str(value), origin)

    def resolve(self, overrides: list[str]) -> ResolvedConfig:
        """Return the recipe with `overrides`, checked.

        Raises ConfigError that says where a wrong value was set.
        """
        return resolve_assignments(self.name, list(self.assignments.values()), overrides)


def split_arguments(command: str, where: str) -> list[str]:
    """Split a shell command, which may span several lines. Raises ConfigError for an open quote."""
    try:
        return shlex.split(command.replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(f"cannot read the command: {error}", where) from None


def split_program(arguments: list[str], *names: str) -> tuple[list[str], list[str]]:
    """Return the arguments before and after the program's name, which is one of `names`.

    If the name does not occur, the first list is empty and the second has all arguments.
    """
    for index, argument in enumerate(arguments):
        if Path(argument).name in names:
            return arguments[:index], arguments[index + 1 :]
    return [], arguments
