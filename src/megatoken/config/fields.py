"""What a configuration field is (a help line, a unit, a range) and how its value is parsed from text."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin

NUMBER = re.compile(
    r"([-+]?[\d._]+(?:[eE][-+]?\d+)?)\s*([kKMBT]?)\s*(steps?|tok|tokens|ep|epochs?|dur)?"
)
LARGEST = 1e15  # of any number: beyond every run, and exact as a float
UNITS = {"s": "steps", "t": "tok", "e": "ep", "d": "dur"}
TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
PREFIXES = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True)
class Duration:
    """A length of training: `20000steps`, `10e9tok`, `3ep` (epochs), `0.01dur` (a share of the run)."""

    value: float
    unit: str = "steps"

    def __str__(self) -> str:
        number = str(int(self.value)) if self.value == int(self.value) else repr(self.value)
        return f"{number}{self.unit}"

    def steps(self, *, batch_tokens: int, epoch_tokens: int = 0, total_steps: int = 0) -> int:
        """Length in optimizer steps, rounded to the nearest; anything above zero is at least one step."""
        return self._count(
            steps=1.0,
            tok=1.0 / batch_tokens,
            ep=epoch_tokens / batch_tokens,
            dur=float(total_steps),
        )

    def tokens(self, *, batch_tokens: int, epoch_tokens: int, total_tokens: int) -> int:
        """Length in tokens, steps as full batches; anything above zero is at least one token."""
        return self._count(steps=batch_tokens, tok=1, ep=epoch_tokens, dur=total_tokens)

    def _count(self, **units: float) -> int:
        return max(round(self.value * units[self.unit]), 1) if self.value > 0 else 0


@dataclass(frozen=True, slots=True)
class ConfigField:
    """A field: its default, one line of help, its unit and the range it must lie in (open_low: above `low`).

    alias: the name that earlier versions gave it, still accepted; alias_values: what its values were called then.
    """

    default: Any
    doc: str
    unit: str = ""
    low: float = -LARGEST
    high: float = LARGEST
    open_low: bool = False
    alias: str = ""
    alias_values: Mapping[str, str] | None = None
    key: str = ""
    type: Any = None

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a field that is one of several names; empty for others."""
        return (
            (*get_args(self.type), *_REGISTERED.get(self.key, ()))
            if get_origin(self.type) is Literal
            else ()
        )

    def is_registered(self, value: Any) -> bool:
        """Whether the value was added by `register_choice`."""
        return value in _REGISTERED.get(self.key, ())

    @property
    def is_duration(self) -> bool:
        """Whether its values are durations, or such and `auto`."""
        return Duration in (self.type, *get_args(self.type))

    @property
    def expects(self) -> str:
        """The accepted values, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        words[Duration] = "a duration such as 100steps, 10e9tok, 3ep or 0.01dur"
        return words.get(self.type) or (
            "a duration, or auto" if self.is_duration else "a whole number or auto"
        )


def config_field(
    default: Any, doc: str, unit: str = "", *, compare: bool = True, **options: Any
) -> Any:
    """A field of a section. options: of `ConfigField`."""
    return field(
        default=default,
        metadata={"spec": ConfigField(default, doc, unit, **options)},
        compare=compare,
    )


_REGISTERED: dict[str, list[str]] = {}  # names that Python code added to a field's choices


def register_choice(key: str, name: str) -> None:
    """Accept `name` as a value of the field `key`, for what is registered from Python (an optimizer, an attention)."""
    names = _REGISTERED.setdefault(key, [])
    names += [] if name in names else [name]


def list_fields(section: Any, prefix: str = "") -> Iterator[ConfigField]:
    """Every field of a dataclass of sections by dotted key, in the order of declaration."""
    for each in fields(section):
        if each.metadata:
            yield replace(each.metadata["spec"], key=prefix + each.name, type=each.type)
        elif is_dataclass(each.type):
            yield from list_fields(each.type, f"{each.name}.")


def parse_value(spec: ConfigField, text: str) -> Any:
    """The value that `text` means for this field.

    Raises ValueError, whose message says what was expected, on another type or a value out of range.
    """
    try:
        value = _parse(spec, text)
    except (ValueError, OverflowError, KeyError):
        raise ValueError(f"expected {spec.expects}, got {text!r:.80}") from None
    number = value.value if isinstance(value, Duration) else value
    if isinstance(number, str) or (
        spec.low <= number <= spec.high and not (spec.open_low and number == spec.low)
    ):
        return value
    low = f"above {spec.low:g}" if spec.open_low else f"at least {spec.low:g}"
    high = "" if spec.high == LARGEST >= number else f" and at most {spec.high:g}"
    raise ValueError(f"must be {low}{high}, got {text:.80}")


def _parse(spec: ConfigField, text: str) -> Any:
    if spec.type is str or text in spec.choices or text == "auto" == spec.default:
        return text
    if spec.type is bool:
        return TRUTHS[text.lower()]
    if spec.choices:
        raise ValueError
    if spec.type is float:
        return _finite(text)
    match = NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError
    digits, prefix, unit = match[1], match[2].upper(), UNITS[(match[3] or "steps")[0]]
    number = _finite(digits) * PREFIXES[prefix]
    if spec.is_duration:
        if not match[3] and number != int(
            number
        ):  # a share of the run is meant, and would be one step
            raise ValueError
        return Duration(number, unit)
    if number != int(number) or (match[3] and not spec.unit.startswith(unit)):
        raise ValueError
    return (
        int(digits)
        if digits.lstrip("-+").replace("_", "").isdigit() and not prefix
        else int(number)
    )


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def parse_time(text: str) -> float:
    """Seconds in a wall-clock time such as `90`, `45s`, `90m`, `11h30m` or `2d`; 0 for an empty text.

    Raises ValueError on anything else.
    """
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text.strip())
    if not match:
        raise ValueError(f"expected a time such as 90m or 11h30m, got {text!r}")
    return float(
        sum(
            int(part or 0) * size
            for part, size in zip(match.groups(), (86400, 3600, 60, 1), strict=True)
        )
    )
