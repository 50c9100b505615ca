"""What a knob is: a field with a help line, a unit and a range; how its value is read from text.

In: text of a recipe or a command line. Out: values, or a ValueError that says what was expected. Absent: the knobs
themselves (config.py).
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin


@dataclass(frozen=True, slots=True)
class Duration:
    """A length of training as people say it: `20000steps`, `10e9tok`, `3ep`, `0.01dur` (a share of the run)."""

    value: float
    unit: Literal["steps", "tok", "ep", "dur"] = "steps"

    def __str__(self) -> str:
        number = str(int(self.value)) if self.value == int(self.value) else repr(self.value)
        return f"{number}{self.unit}"

    def steps(self, *, batch_tokens: int, epoch_tokens: int = 0, total_steps: int = 0) -> int:
        """Length in optimizer steps, rounded to the nearest; anything above zero is at least one step."""
        whole = {
            "steps": 1.0,
            "tok": 1.0 / batch_tokens,
            "ep": epoch_tokens / batch_tokens,
            "dur": float(total_steps),
        }
        steps = round(self.value * whole[self.unit])
        return max(steps, 1) if self.value > 0 else 0


def knob(
    default: Any, doc: str, unit: str = "", low: float | None = None, high: float | None = None, open_low: bool = False
) -> Any:
    """A documented field: its default, one line of help, its unit and the closed range it must lie in."""
    return field(default=default, metadata=dict(doc=doc, unit=unit, low=low, high=high, open_low=open_low))


@dataclass(frozen=True, slots=True)
class Knob:
    """One field as the reader of recipes and the help page see it."""

    key: str
    type: Any
    default: Any
    doc: str
    unit: str
    low: float | None
    high: float | None
    open_low: bool

    @property
    def expects(self) -> str:
        """What may be written here, in words."""
        if get_origin(self.type) is Literal:
            return "one of " + ", ".join(get_args(self.type))
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        words[Duration] = "a duration such as 100steps, 10e9tok, 3ep or 0.01dur"
        return words.get(self.type, "a whole number or auto")


def list_knobs(whole: Any) -> Iterator[Knob]:
    """Every field of a dataclass of sections by dotted key, in the order of declaration."""
    for top in fields(whole):
        if is_dataclass(top.type):
            for inner in fields(top.type):
                yield Knob(f"{top.name}.{inner.name}", inner.type, inner.default, **inner.metadata)
        else:
            yield Knob(top.name, top.type, top.default, **top.metadata)


def parse_value(knob: Knob, text: str) -> Any:
    """The value that `text` means for this field.

    Raises ValueError, whose message says what was expected, on another type or a value out of range.
    """
    kind = knob.type
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise ValueError(f"expected {knob.expects}, got {text!r}")
        return text
    try:
        value = _parse_number(kind, text) if kind not in (str, bool) else _parse_word(kind, text)
    except ValueError:
        raise ValueError(f"expected {knob.expects}, got {text!r}") from None
    number = value.value if isinstance(value, Duration) else value
    if isinstance(number, int | float):
        _check_range(knob, number)
    return value


def _parse_word(kind: type, text: str) -> str | bool:
    if kind is str:
        return text
    meaning = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if text.lower() not in meaning:
        raise ValueError
    return meaning[text.lower()]


def _parse_number(kind: Any, text: str) -> int | float | str | Duration:
    if kind is Duration:
        match = re.fullmatch(r"\s*([-+0-9._eE]+)\s*(steps?|tok|tokens|ep|epochs?|dur)?\s*", text)
        if not match:
            raise ValueError
        unit = {"s": "steps", "t": "tok", "e": "ep", "d": "dur"}[(match[2] or "steps")[0]]
        return Duration(_finite(match[1]), unit)  # type: ignore[arg-type]
    if kind is float:
        return _finite(text)
    if kind is not int and text == "auto":
        return text
    match = re.fullmatch(r"\s*([-+]?[\d._]+(?:[eE][-+]?\d+)?)\s*([kKMBT]?)\s*(?:steps?|tok|tokens)?\s*", text)
    if not match:
        raise ValueError
    if match[1].lstrip("-+").replace("_", "").isdigit() and not match[2]:
        return int(match[1])  # exact where a float would round
    number = _finite(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2].upper()]
    if number != int(number):
        raise ValueError
    return int(number)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def _check_range(knob: Knob, value: float) -> None:
    too_low = knob.low is not None and (value < knob.low or (knob.open_low and value == knob.low))
    if too_low or (knob.high is not None and value > knob.high):
        low = f"above {knob.low:g}" if knob.open_low else f"at least {knob.low:g}"
        high = "" if knob.high is None else f" and at most {knob.high:g}"
        raise ValueError(f"must be {low}{high}, got {value:g}")


def parse_time(text: str) -> float:
    """Seconds in a wall-clock time such as `90`, `45s`, `90m`, `11h30m` or `2d`; 0 for an empty text.

    Raises ValueError on anything else.
    """
    if not text:
        return 0.0
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text.strip())
    if not match or not any(match.groups()):
        raise ValueError(f"expected a time such as 90m or 11h30m, got {text!r}")
    return float(sum(int(part or 0) * size for part, size in zip(match.groups(), (86400, 3600, 60, 1), strict=True)))
