"""Describe settings (help line, unit, range) and parse their values.

A dataclass field gives the type and the default of a setting, and settings.toml gives the rest. A
room's own settings.toml is next to its `room.py`.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from megatoken.base.rooms import PACKAGE, find_rooms, list_entries, list_own

LARGEST = 1e15  # limit of all numbers: beyond any real run, and exact as a float
NUMBER = re.compile(
    r"([-+]?[\d._]+(?:[eE][-+]?\d+)?)\s*([kKMBT]?)\s*(steps?|tok|tokens|ep|epochs?|dur)?"
)
INTEGER = re.compile(r"[-+]?\d[\d_]*")
PREFIXES = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
UNITS = {"s": "steps", "t": "tok", "e": "ep", "d": "dur"}  # by first letter
Resume = Literal["free", "guarded", "fatal"]
_ROOMS = [PACKAGE / room / "settings.toml" for room in find_rooms()]
SETTINGS: dict[str, dict[str, Any]] = {
    key: row
    for path in (Path(__file__).with_name("settings.toml"), *filter(Path.is_file, _ROOMS))
    for key, row in tomllib.loads(path.read_text(encoding="utf-8")).items()
}
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
TIME = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")


@dataclass(frozen=True)
class Duration:
    """A length of training, such as `20000steps`, `10e9tok`, `3ep` or `0.01dur`.

    `ep` stands for epochs, and `dur` for a fraction of the run.
    """

    value: float
    unit: str = "steps"

    def __str__(self) -> str:
        number = str(int(self.value)) if self.value == int(self.value) else repr(self.value)
        return f"{number}{self.unit}"

    def steps(self, *, batch_tokens: int, epoch_tokens: int = 0, total_steps: int = 0) -> int:
        """Convert to optimizer steps, rounded, but at least 1 unless the duration is 0."""
        return self._count(
            steps=1.0,
            tok=1.0 / batch_tokens,
            ep=epoch_tokens / batch_tokens,
            dur=float(total_steps),
        )

    def tokens(self, *, batch_tokens: int, epoch_tokens: int, total_tokens: int) -> int:
        """Convert to tokens, at least 1 unless the duration is 0.

        A step counts as a full batch, even during a batch ramp.
        """
        return self._count(steps=batch_tokens, tok=1, ep=epoch_tokens, dur=total_tokens)

    def _count(self, **units: float) -> int:
        return max(round(self.value * units[self.unit]), 1) if self.value > 0 else 0


@dataclass(frozen=True)
class ConfigField:
    """The definition of a setting: its default, help line, unit, and range of values.

    open_low: whether `low` itself is excluded from the range.
    only_if: a condition on another setting, such as `optim.name=muon`, `objective.name=grpo|ppo` or
        `model.window!=0`. Unless it holds, this setting has no effect.
    resume: whether a resume may change it (schema.py); None: the same as for its section.
    entries: the kind of room entries (base/rooms.py) whose names are the values, next to the
        default. With the default "", a value may hold several names.
    key: the dotted key, such as `model.n_layer`.
    section: the dataclass that declares it.
    """

    default: Any
    doc: str
    unit: str = ""
    low: float = 0.0
    high: float = LARGEST
    open_low: bool = False
    only_if: str = ""
    resume: Resume | None = None
    entries: str = ""
    key: str = ""
    type: Any = None
    section: Any = None

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that the setting accepts; empty for a setting that is not a choice of names."""
        if self.entries and self.default != "":
            return tuple(dict.fromkeys((self.default, *list_entries(self.entries))))
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    def find_own(self, value: Any) -> list[str]:
        """Return the names of users' entries in a value, which may be several of them."""
        own = list_own(self.entries) if self.entries else {}
        return [name for name in re.split("[=,]", str(value)) if name in own]

    @property
    def value_type(self) -> Any:
        """The type of the setting's values, ignoring `auto`."""
        return (*get_args(self.type), self.type)[0]

    @property
    def expects(self) -> str:
        """A description of the accepted values, for messages."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        names = {
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            str: "text",
            Duration: "a duration such as 100steps, 10e9tok, 3ep or 0.01dur",
        }
        return names[self.value_type] + (" or auto" if self.default == "auto" else "")


def list_fields(section: Any, prefix: str = "") -> Iterator[ConfigField]:
    """Yield every setting in a dataclass, with its dotted key, in order of declaration."""
    for item in fields(section):
        key = prefix + item.name
        if key in SETTINGS:
            row = SETTINGS[key]
            yield ConfigField(item.default, key=key, type=item.type, section=section, **row)


def parse_value(spec: ConfigField, text: str) -> Any:
    """Parse and check a value of a setting. Raises ValueError that says what was expected."""
    try:
        value = _parse(spec, text)
    except (ValueError, OverflowError, KeyError):
        raise ValueError(f"expected {spec.expects}, got {text!r:.80}") from None
    number = value.value if isinstance(value, Duration) else value
    if isinstance(number, str):
        return value
    if spec.low <= number <= spec.high and not (spec.open_low and number == spec.low):
        return value
    low = f"above {spec.low:g}" if spec.open_low else f"at least {spec.low:g}"
    raise ValueError(f"must be {low} and at most {spec.high:g}, got {text:.80}")


def _parse(spec: ConfigField, text: str) -> Any:
    if text in spec.choices or text == "auto" == spec.default:
        return text
    if spec.choices:
        raise ValueError
    if spec.type is str:
        return text
    if spec.type is bool:
        return BOOLEANS[text.lower()]
    if spec.type is float:
        return float(text)
    if spec.value_type is int and INTEGER.fullmatch(text.strip()):
        return int(text)  # exact beyond 2**53
    match = NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError
    number = float(match[1]) * PREFIXES[match[2]]
    unit = UNITS[(match[3] or "steps")[0]]
    is_whole = number == int(number)
    if spec.value_type is Duration:
        if not match[3] and not is_whole:  # probably a share of the run, not a step
            raise ValueError
        return Duration(number, unit)
    if not is_whole or (match[3] and not spec.unit.startswith(unit)):
        raise ValueError
    return int(number)


def parse_time(text: str) -> float:
    """Convert a time such as `90`, `45s`, `90m`, `11h30m` or `2d` to seconds; "" is 0.

    Raises ValueError for other text.
    """
    match = TIME.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected a time such as 45s, 90m, 11h30m or 2d, got {text!r:.80}")
    days, hours, minutes, seconds = [int(count or 0) for count in match.groups()]
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
