"""Rewards of a model's answers, by rule: a number for (prompt, the model's answer, the right answer).

By name: the rules of REWARDS. Own code is named as module:function, by the command line or from Python only: a recipe
that runs code would be a program. A rule must pay for the whole answer, not for a part of it: `right in answer` pays
for an answer that lists all numbers, `answer in right` for the empty one.
"""

import importlib
import math
import queue
import re
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from threading import Thread

from megatoken.errors import ConfigError, MegatokenError

Reward = Callable[[str, str, str], float]
NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)", re.ASCII)
LIMIT_SECONDS = 10.0  # of one call of a user's reward


def reward_exact(prompt: str, answer: str, right: str) -> float:
    """1 for the right answer alone, without regard to spaces around it."""
    return float(answer.strip() == right.strip())


def reward_number(prompt: str, answer: str, right: str) -> float:
    """Return 1 if the last numbers of both answers are equal: 1,000.0 is 1000."""
    number = last_number(answer)
    return float(number is not None and number == last_number(right))


def reward_gsm8k(prompt: str, answer: str, right: str) -> float:
    """Return 1 if the number after the last #### equals that of the right answer (Cobbe et al. 2021).

    An answer without the mark gets 0. The right answer may be a full solution or just its number.
    """
    _, mark, result = answer.rpartition("####")
    number = NUMBER.match(result.strip().lstrip("$"))
    return float(bool(mark) and number is not None and last_number(number[0]) == last_number(right))


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, or None. A hyphen after a number is not a sign."""
    found = list(NUMBER.finditer(text))
    if not found:
        return None
    number = found[-1][0]
    if number[0] in "+-" and found[-1].start() and text[found[-1].start() - 1].isalnum():
        number = number[1:]
    return Decimal(number.replace(",", ""))


REWARDS: dict[str, Reward] = {"exact": reward_exact, "number": reward_number, "gsm8k": reward_gsm8k}


def load_reward(name: str) -> Reward:
    """A user's reward by module:function; the module is looked for in the working folder, too.

    Raises ConfigError where there is none.
    """
    module, _, function = name.partition(":")
    if not (module and function):
        fix = f"choose one of {', '.join(REWARDS)}, or write your own as module:function"
        raise ConfigError(f"{name!r} names no function", "--reward", fix)
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()  # the file may be newer than what was looked up before
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # of the user's code
        what = f"{name} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(
            what, "--reward", "give a function of (prompt, answer, right) that returns a number"
        ) from error
    finally:
        sys.path.remove(folder)
    if not callable(found):
        raise ConfigError(
            f"{name} is no function", "--reward", "give a function of (prompt, answer, right)"
        )
    reward: Reward = found
    return reward


def score_answers(
    reward: Reward,
    name: str,
    rows: Sequence[tuple[str, str, str]],
    limit_seconds: float = LIMIT_SECONDS,
) -> list[float]:
    """The reward of each (prompt, answer, right).

    Raises ConfigError, which names the row, for a reward that raises, is no finite number or takes longer than the
    limit; the thread in which it hangs is left behind.
    """
    results: queue.SimpleQueue[object] = queue.SimpleQueue()

    def call() -> None:
        for row in rows:
            try:
                results.put(reward(*row))
            except BaseException as error:  # also one that wants to end the program
                results.put(error)
                return

    Thread(target=call, daemon=True, name="megatoken-reward").start()
    rewards: list[float] = []
    for prompt, answer, _ in rows:
        where = f"prompt {_shorten(prompt)}, answer {_shorten(answer)}"
        try:
            value = results.get(timeout=limit_seconds)
        except queue.Empty:
            what = f"reward {name} has not returned within {limit_seconds:g} s"
            raise ConfigError(what, where, "make it faster") from None
        if isinstance(value, MegatokenError):  # a rule's own line
            raise value
        if isinstance(value, BaseException):
            what = f"reward {name} raised {type(value).__name__}: {value}"
            raise ConfigError(
                what, where, "mend it, or catch the error there and return 0"
            ) from value
        try:
            number = float(value)  # type: ignore[arg-type] # whatever a user's code returns
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"reward {name} is {value!r}", where, "return a finite number")
        rewards.append(number)
    return rewards


def _shorten(text: str, length: int = 40) -> str:
    return repr(text if len(text) <= length else text[: length - 3] + "...")
