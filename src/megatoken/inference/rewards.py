"""Score a model's answers by rule: a reward is a number for (prompt, answer, right answer).

REWARDS lists the built-in rules. A user's own function is named as module:function, but only on the
command line or from Python, because a recipe must not run code. A rule should compare the complete
answer: `right in answer` would reward a list of all numbers, and `answer in right` an empty answer.
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

from megatoken.base.errors import ConfigError

Reward = Callable[[str, str, str], float]
NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)", re.ASCII)
LIMIT_SECONDS = 10.0  # per call


def reward_exact(prompt: str, answer: str, right: str) -> float:
    """Return 1 if both answers are equal apart from surrounding white space, else 0."""
    return float(answer.strip() == right.strip())


def reward_number(prompt: str, answer: str, right: str) -> float:
    """Return 1 if the last numbers in both answers are equal (1,000.0 equals 1000), else 0."""
    number = last_number(answer)
    return float(number is not None and number == last_number(right))


def reward_gsm8k(prompt: str, answer: str, right: str) -> float:
    """Return 1 if the number after the last #### is the right one, else 0 (Cobbe et al. 2021).

    An answer without #### gets 0. The right answer may be a full solution or just its number.
    """
    _, mark, result = answer.rpartition("####")
    number = NUMBER.match(result.strip().lstrip("$"))
    return float(bool(mark) and number is not None and last_number(number[0]) == last_number(right))


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, or None.

    A hyphen or plus after a letter or digit is not a sign.
    """
    matches = list(NUMBER.finditer(text))
    if not matches:
        return None
    last = matches[-1]
    number = last[0].replace(",", "")
    if last.start() and text[last.start() - 1].isalnum():
        number = number.lstrip("+-")
    return Decimal(number)


REWARDS: dict[str, Reward] = {"exact": reward_exact, "number": reward_number, "gsm8k": reward_gsm8k}


def load_reward(name: str) -> Reward:
    """Import a user's reward function, named module:function.

    The module may also be in the working folder. Raises ConfigError if the import fails.
    """
    module, _, function = name.partition(":")
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()  # the file may have been written just now
    try:
        reward: Reward = getattr(importlib.import_module(module), function)
    except Exception as error:  # from the user's code
        what = f"cannot import {name}: {type(error).__name__}: {error}"
        fix = f"choose one of {', '.join(REWARDS)}, or write your own as module:function"
        raise ConfigError(what, "--reward", fix) from error
    finally:
        sys.path.remove(folder)
    return reward


def score_answers(
    reward: Reward,
    name: str,
    rows: Sequence[tuple[str, str, str]],
    limit_seconds: float = LIMIT_SECONDS,
) -> list[float]:
    """Return the reward of each row (prompt, answer, right answer).

    Raises ConfigError if the reward function raises, returns a number that is not finite, or takes
    longer than the limit.
    """
    results: queue.SimpleQueue[float | BaseException] = queue.SimpleQueue()

    def call() -> None:
        for row in rows:
            try:
                results.put(float(reward(*row)))
            except BaseException as error:  # including SystemExit
                results.put(error)
                return

    # A daemon thread, so that a reward that hangs does not keep the process alive.
    Thread(target=call, daemon=True, name="megatoken-reward").start()
    rewards: list[float] = []
    for prompt, answer, _ in rows:
        where = f"prompt {prompt[:40]!r}, answer {answer[:40]!r}"
        try:
            value = results.get(timeout=limit_seconds)
        except queue.Empty:
            what = f"reward {name} took longer than {limit_seconds:g} s"
            raise ConfigError(what, where) from None
        if isinstance(value, BaseException):
            what = f"reward {name} raised {type(value).__name__}: {value}"
            raise ConfigError(what, where) from value
        if not math.isfinite(value):
            raise ConfigError(f"reward {name} is {value}", where, "return a finite number")
        rewards.append(value)
    return rewards
