"""Tasks of reasoning-gym: prompts made on this machine, and what the library pays for an answer to them.

The source gym:TASK[:COUNT[:SEED]] gives rows of `prompt` and `answer`, which is the library's entry as JSON with its
task, since many tasks have more than one right answer. An entry may come from anybody and an answer from a model:
tasks that run either as Python are refused, before anything is imported.
"""

import json
import math
from collections.abc import Callable
from functools import cache, lru_cache
from importlib import metadata
from typing import Any

import xxhash

from megatoken.config.words import suggest_choice
from megatoken.errors import ConfigError, DataError

PREFIX = "gym:"
COUNT = 1_000  # prompts, where a source names no number
VERSION = "0.1.25"  # whose scorers were read; a later one may do anything: read them again, then change REFUSED
INSTALL = 'pip install "megatoken[gym]"'
REFUSED = {  # task -> why
    task: why
    for why, tasks in {
        "its scorer runs the model's answer as Python": "binary_matrix countdown intermediate_integration n_queens "
        "polynomial_multiplication puzzle24 simple_integration spiral_matrix string_insertion",
        "it runs text of its entries as Python": "bitwise_arithmetic codeio number_sorting",
        "a short answer can keep its scorer busy for ever": "coin_flip propositional_logic rubiks_cube rush_hour",
        "its scorer pays for a wrong answer": "complex_arithmetic game_of_life_halting",
        "its entries do not pass through JSON": "arc_agi rearc",
        "it needs options": "composite",
    }.items()
    for task in tasks.split()
}


def import_gym() -> Any:
    """The library. Raises ConfigError without it, and for another version than the one whose scorers were read."""
    try:
        import reasoning_gym

        found = metadata.version("reasoning-gym")
    except ImportError as error:
        raise ConfigError("tasks of reasoning-gym need the package", "gym", INSTALL) from error
    if found != VERSION:
        raise ConfigError(f"reasoning-gym {found} is here, scorers are known of {VERSION} alone", "gym", INSTALL)
    return reasoning_gym


@lru_cache(1)  # a command asks several times
def write_prompts(spec: str) -> bytes:
    """Lines of JSON with `prompt` and `answer` of gym:TASK[:COUNT[:SEED]], the same bytes for the same words.

    Raises ConfigError for other words, a task that is refused, and without the library.
    """
    task, *numbers = spec.removeprefix(PREFIX).split(":")
    if len(numbers) > 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise ConfigError("no task of reasoning-gym", spec, "write gym:TASK, gym:TASK:COUNT or gym:TASK:COUNT:SEED")
    count, seed = (*map(int, numbers), *(COUNT, 0)[len(numbers) :])
    gym = _import_task(task)
    # An entry is drawn by the library's seed + its number: entries of seeds 0 and 1 would be the same but for one.
    far_apart = xxhash.xxh3_64_intdigest(str(seed).encode()) >> 34
    try:
        entries = gym.create_dataset(task, size=count, seed=far_apart)
        rows = [{"task": task, **entries[number]} for number in range(count)]
    except Exception as error:  # of the library
        what = f"reasoning-gym cannot make it: {type(error).__name__}: {error}"
        raise ConfigError(what, spec, "give another count or task") from error
    return "".join(json.dumps({"prompt": row["question"], "answer": json.dumps(row)}) + "\n" for row in rows).encode()


def score_entry(answer: str, entry_json: str) -> float:
    """What the library pays for an answer, or for what is in its last <answer>; 0 where its scorer fails on it.

    Raises DataError for what is no entry of `write_prompts`, ConfigError for a task that is refused.
    """
    try:
        entry = json.loads(entry_json)
        task = entry["task"]
    except (ValueError, TypeError, KeyError) as error:
        fix = "take another reward, or prepare prompts of gym:TASK"
        raise DataError("no task of reasoning-gym is beside the prompt", f"{entry_json!r:.60}", fix) from error
    score, find_marked = _find_scorer(str(task))
    try:
        value = float(score(find_marked(answer) or answer.strip(), entry))
    except Exception:  # of the library, about an answer that it cannot read
        return 0.0
    return value if math.isfinite(value) else 0.0


@cache
def _find_scorer(task: str) -> tuple[Callable[[str, dict[str, Any]], float], Callable[[str], str | None]]:
    gym = _import_task(task)
    return gym.get_score_answer_fn(task), gym.utils.extract_answer


def _import_task(task: str) -> Any:
    """The library, which has this task. Raises ConfigError."""
    if task in REFUSED:
        raise ConfigError(f"the task {task} is refused: {REFUSED[task]}", PREFIX + task, "choose another")
    gym = import_gym()
    if task not in gym.factory.DATASETS:
        near = suggest_choice(task, gym.factory.DATASETS)
        raise ConfigError(
            "unknown task", PREFIX + task, f"did you mean {near}?" if near else "see reasoning-gym's list"
        )
    return gym
