"""Score completions by rule: a reward is a number for (prompt, completion, answer).

Rules are entries of the kind "reward". A function can also be named as module:function, but only on
the command line or from Python, because a recipe must not run code. A rule should compare the whole
completion: `answer in completion` would reward a list of all numbers, and `completion in answer` an
empty completion.
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
from megatoken.base.rooms import list_entries, load_entry

Reward = Callable[[str, str, str], float]
NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)", re.ASCII)
LIMIT_SECONDS = 10.0  # per call


def reward_exact(prompt: str, completion: str, answer: str) -> float:
    """Return 1 if completion and answer are equal apart from surrounding white space, else 0."""
    return float(completion.strip() == answer.strip())


def reward_number(prompt: str, completion: str, answer: str) -> float:
    """Return 1 if the last numbers in both texts are equal (1,000.0 equals 1000), else 0."""
    number = last_number(completion)
    return float(number is not None and number == last_number(answer))


def reward_gsm8k(prompt: str, completion: str, answer: str) -> float:
    """Return 1 if the number after the last #### is right, else 0 (Cobbe et al. 2021).

    A completion without #### gets 0. The answer may be a full solution or just its number.
    """
    _, separator, text = completion.rpartition("####")
    number = NUMBER.match(text.strip().lstrip("$"))
    if not separator or number is None:
        return 0.0
    return float(last_number(number[0]) == last_number(answer))


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


def load_reward(name: str) -> Reward:
    """Import the rule of this name, or a function named module:function.

    The module may also be in the working folder. Raises ConfigError if the import fails.
    """
    rules = list_entries("reward")
    if name in rules:
        rule: Reward = load_entry("reward", name)
        return rule
    module, _, function = name.partition(":")
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()  # the file may have been written just now
    try:
        reward: Reward = getattr(importlib.import_module(module), function)
    except Exception as error:  # from the user's code
        what = f"cannot import {name}: {type(error).__name__}: {error}"
        fix = f"choose one of {', '.join(rules)}, or write your own as module:function"
        raise ConfigError(what, "--reward", fix) from error
    finally:
        sys.path.remove(folder)
    return reward


def score_completions(
    reward: Reward,
    name: str,
    triples: Sequence[tuple[str, str, str]],
    limit_seconds: float = LIMIT_SECONDS,
) -> list[float]:
    """Return the reward of each (prompt, completion, answer).

    Raises ConfigError if the reward function raises, returns a number that is not finite, or takes
    longer than the limit.
    """
    results: queue.SimpleQueue[float | BaseException] = queue.SimpleQueue()

    def call() -> None:
        for triple in triples:
            try:
                results.put(float(reward(*triple)))
            except BaseException as error:  # including SystemExit
                results.put(error)
                return

    # A daemon thread, so that a reward that hangs does not keep the process alive.
    Thread(target=call, daemon=True, name="megatoken-reward").start()
    rewards: list[float] = []
    for prompt, completion, _ in triples:
        where = f"prompt {prompt[:40]!r}, answer {completion[:40]!r}"
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
