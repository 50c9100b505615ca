"""Translate recipes of other programs by a table of settings, our fields and conversions.

Nothing is executed. A setting that is neither in the table nor ignored is an error.
"""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatoken.config.load import Assignment, ResolvedConfig, resolve_assignments
from megatoken.errors import ConfigError

STEPS = "{}steps".format  # optimizer steps as a duration


@dataclass(frozen=True, slots=True)
class Row:
    """How to translate one setting.

    default: the program's default, or a type if there is none; the row then applies only if the
        recipe has the setting.
    fields: our fields, separated by spaces; empty if the translator reads the value itself or only
        checks it.
    convert: maps their values to ours; raises KeyError or ValueError for values we lack.
    """

    default: Any
    fields: str = ""
    convert: Mapping[Any, Any] | Callable[[Any], Any] = lambda value: value

    def parse(self, text: str) -> Any:
        """Return the value in the type of the default. Raises KeyError or ValueError."""
        kind = self.default if isinstance(self.default, type) else type(self.default)
        if kind is str:
            return text
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if kind is int and text.isdecimal():
            return int(text)  # exact above 2**53
        number = float(text)
        if not math.isfinite(number) or kind(number) != number:
            raise ValueError
        return kind(number)

    def apply(self, value: Any) -> Any:
        """Convert a parsed value to ours. Raises KeyError or ValueError."""
        return self.convert[value] if isinstance(self.convert, Mapping) else self.convert(value)


def only(*supported: Any) -> dict[Any, Any]:
    """Return a conversion that accepts just these values."""
    return {value: value for value in supported}


class Translation:
    """Another program's recipe as assignments to our fields, with notes on what differs.

    out: the run folder named by the recipe, if any.
    """

    def __init__(
        self,
        program: str,
        table: Mapping[str, Row],
        settings: Sequence[Assignment],
        ignored: str,
        fixed: Mapping[str, Any],
    ) -> None:
        """Translate `settings`; the last one of a key counts.

        A key of `table` holds all names of a setting, separated by spaces; `get` takes the first.
        ignored: patterns of settings that do not affect training, separated by spaces. fixed:
        values of our fields that the program hard-codes. Raises ConfigError for a setting that
        cannot be translated.
        """
        self.program = program
        self.name = program
        self.out: Path | None = None
        self.notes: list[str] = []
        self.assignments: dict[str, Assignment] = {}
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        latest = {setting.key: setting for setting in settings}
        for field, value in fixed.items():
            self.set(field, value)
        for names, row in table.items():
            written = [latest.pop(name) for name in names.split() if name in latest]
            self._translate(names.split()[0], row, written)
        for setting in latest.values():
            if not any(fnmatchcase(setting.key, pattern) for pattern in ignored.split()):
                raise self.refuse(setting)
        if latest:
            sections = dict.fromkeys(".".join(key.split(".")[:2]) for key in latest)
            self.notes.append(f"ignored (data, hardware, display, storage): {', '.join(sections)}")

    def _translate(self, key: str, row: Row, written: Sequence[Assignment]) -> None:
        """Set the value and the fields of one row from its settings."""
        origin = f"{self.program} {key} {row.default} (default)"
        value = row.default
        for setting in written:
            try:
                parsed = row.parse(setting.text)
                row.apply(parsed)
            except (KeyError, ValueError, OverflowError):
                raise self.refuse(setting) from None
            if setting is not written[0] and parsed != value:
                raise self.refuse(setting, f"make it equal to {written[0].key}")
            value = parsed
            origin = setting.where
        if isinstance(value, type):
            return
        self._values[key] = value
        self._origins[key] = origin
        for field in row.fields.split():
            self.set(field, row.apply(value), key)

    def refuse(self, setting: Assignment, fix: str = "change or remove it") -> ConfigError:
        """Return the error for a setting that cannot be translated."""
        what = f"cannot translate {self.program} setting {setting.key[:80]}={setting.text:.80}"
        return ConfigError(what, setting.where, fix)

    def get(self, key: str) -> Any:
        """Return the value of a setting, or the program's default, or None."""
        return self._values.get(key)

    def where(self, *keys: str) -> str:
        """Return the origins of these settings."""
        return ", ".join(self._origins[key] for key in keys)

    def set(self, field: str, value: Any, *keys: str) -> None:
        """Assign a value to one of our fields. keys: the settings that it comes from."""
        origin = self.where(*keys) if keys else f"{self.program}: fixed"
        self.assignments[field] = Assignment(field, str(value), origin)

    def resolve(self, overrides: list[str]) -> ResolvedConfig:
        """Return the checked recipe. Raises ConfigError naming the origin of a wrong value."""
        return resolve_assignments(self.name, list(self.assignments.values()), overrides)


def split_words(command: str, where: str) -> list[str]:
    """Split a shell command, possibly of several lines. Raises ConfigError for an open quote."""
    try:
        return shlex.split(command.replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(f"cannot read the command: {error}", where) from None


def split_program(words: list[str], *names: str) -> tuple[list[str], list[str]]:
    """Return the words before and after the program of one of these names."""
    for index, word in enumerate(words):
        if Path(word).name in names:
            return words[:index], words[index + 1 :]
    return [], words
