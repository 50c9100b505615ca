"""Translates the recipes of other programs: an engine for tables of (their settings, our fields, conversion).

A setting that is neither in the table nor listed as without effect on training is an error. Nothing is run.
"""

import difflib
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatoken.config.load import Assignment, ResolvedConfig, resolve_assignments
from megatoken.errors import ConfigError

TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false"}
STEPS = "{}steps".format  # a number of optimizer steps as a duration


@dataclass(frozen=True, slots=True)
class Row:
    """How one setting of another program is translated.

    default: the program's; a type where it has none, and the row then applies only to a setting that is given.
    fields: ours, separated by spaces; none: the value is only checked, or used by the translator's own code.
    convert: their values to ours, or a function, which raises ValueError for a value that cannot be honoured.
    """

    default: Any
    fields: str = ""
    convert: Mapping[Any, Any] | Callable[[Any], Any] = lambda value: value


def only(*supported: Any) -> dict[Any, Any]:
    """A conversion that accepts these values alone."""
    return dict(zip(supported, supported, strict=True))


class Translation:
    """The recipe of another program as assignments of ours, each with its origin, and notes on what differs.

    out: the run folder that the recipe names, if any.
    """

    def __init__(
        self,
        program: str,
        table: Mapping[str, Row],
        given: Sequence[Assignment],
        ignored: str,
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        """Apply the table, in which a key may be several names of one setting.

        given: their settings; the last of equal ones counts. ignored: patterns, separated by spaces, of settings
        without effect on training. fixed: values of our fields that the program has no setting for. Raises ConfigError
        for an unknown setting and for a value that cannot be honoured.
        """
        self.name = program
        self.out: Path | None = None
        self.notes: list[str] = []
        self.assignments: dict[str, Assignment] = {}
        rows = {names.split()[0]: row for names, row in table.items()}
        self._values = {
            key: (row.default, f"{program} {key} {row.default} (default)")
            for key, row in rows.items()
            if not isinstance(row.default, type)
        }
        known = {name: names.split()[0] for names in table for name in names.split()}
        seen: dict[str, str] = {}
        left_out: list[str] = []
        for setting in {setting.key: setting for setting in given}.values():
            if key := known.get(setting.key):
                value = _parse(setting, rows[key].default)
                if key in seen and value != self.get(key):
                    what = f"{setting.key} is {value}, {seen[key]} is {self.get(key)} at {self.where(key)}"
                    raise ConfigError(
                        f"{what}: here they are one setting",
                        setting.where,
                        "give them the same value",
                    )
                seen[key] = setting.key
                self._values[key] = value, setting.where
            elif any(fnmatchcase(setting.key, pattern) for pattern in ignored.split()):
                left_out.append(".".join(setting.key.split(".")[:2]))
            else:
                name = setting.key[:80]
                near = " or ".join(difflib.get_close_matches(name, known, n=3, cutoff=0.0))
                fix = f"did you mean {near}? remove it if it does not affect training"
                raise ConfigError(f"{program} setting {name} is not understood", setting.where, fix)
        for field, value in (fixed or {}).items():
            self.set(field, value, f"{program}: fixed")
        for key, row in rows.items():
            if key not in self._values:
                continue
            (value, where), convert = self._values[key], row.convert
            try:
                converted = convert[value] if isinstance(convert, Mapping) else convert(value)
            except (KeyError, ValueError, OverflowError) as error:
                fix = str(error)
                if isinstance(convert, Mapping):
                    fix = f"supported: {', '.join(map(str, convert)) or 'none, remove it'}"
                raise ConfigError(f"{key} {value!s:.80} is not supported", where, fix) from None
            for field in row.fields.split():
                self.set(field, converted, where)
        if left_out:
            self.notes.append(
                f"left out (data, hardware, display or storage): {', '.join(dict.fromkeys(left_out))}"
            )

    def get(self, key: str) -> Any:
        """The value given, or the program's default, or None where it has none."""
        return self._values[key][0] if key in self._values else None

    def where(self, *keys: str) -> str:
        """The origin of some settings."""
        return ", ".join(self._values[key][1] for key in keys)

    def set(self, field: str, value: Any, where: str) -> None:
        """Assign a value to one of our fields, or replace it. where: its origin."""
        self.assignments[field] = Assignment(field, format_value(value), where)

    def resolve(self, overrides: list[str]) -> ResolvedConfig:
        """The checked recipe. Raises ConfigError naming the origin of a wrong value."""
        return resolve_assignments(self.name, list(self.assignments.values()), overrides)


def _parse(setting: Assignment, default: Any) -> Any:
    """The value of a setting, of the type of its default. Raises ConfigError."""
    kind = default if isinstance(default, type) else type(default)
    if kind is str:
        return setting.text
    try:
        if kind is bool:
            return {"true": True, "false": False}[setting.text.lower()]
        if kind is int and re.fullmatch(
            r"[-+]?\d{1,18}", setting.text
        ):  # floats are exact up to 2**53 only
            return int(setting.text)
        number = float(setting.text)
        if not math.isfinite(number) or kind(number) != number:
            raise ValueError
        return kind(number)
    except (KeyError, ValueError):
        what = f"{setting.key} is {setting.text!r:.80}, not {TYPE_NAMES[kind]}"
        fix = "correct it" if kind is default else f"its default is {default}"
        raise ConfigError(what, setting.where, fix) from None


def format_value(value: Any) -> str:
    """A value as it is written in a recipe: numbers are read back exactly, whole ones without `.0`."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value == int(value) else str(value)


def split_words(command: str, where: str) -> list[str]:
    """The words of a shell command of one or several lines. Raises ConfigError for an open quotation."""
    try:
        return shlex.split(command.replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(f"cannot read the command: {error}", where, "check its quotes") from None
