"""Generate exercises in sums and spelling: conversations, prompts with answers, held-out prompts.

Hashes decide the order, the wording and what is held out, so the output is the same on every
machine. All wordings of a problem are on the same side of the split, and so are a + b and b + a.
"""

import io
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

import xxhash

from megatoken.text.sources import File, Source

HELD_OUT = 0.1  # share of the problems that are only in `exercises-test`
SUMS_BELOW = 100
WORDS = 10_000  # number of draws; some give the same word
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
SUM_WORDINGS = ("What is {a} + {b}?", "{a} + {b}", "{a}+{b}=?", "Add {a} and {b}.")
SPELLING_WORDINGS = ("Spell {word}.", "How do you spell {word}?", "spell {word}")
SMALL_TALK = (
    ("Hello.", "Hello. Give me a sum, or a word to spell."),
    ("Who are you?", "A small model that adds and spells."),
    ("What can you do?", "I add numbers below 100 and spell short words."),
    ("Thank you.", "You are welcome."),
)
TALK_EVERY = 8  # one conversation in this many begins with small talk
LONGEST = 3  # most problems in a conversation


@dataclass(frozen=True)
class Exercise:
    """A question, its answer, and a key that is the same for all wordings."""

    key: str
    question: str
    answer: str


def list_exercises(*, held_out: bool) -> list[Exercise]:
    """Return the held-out problems, or all others, in shuffled order."""
    problems = itertools.chain(_make_sums(), _make_spellings())
    limit = HELD_OUT * 2**64
    exercises = [problem for problem in problems if (_hash(problem.key) < limit) == held_out]
    return sorted(exercises, key=lambda problem: (_hash(problem.question, 1), problem.question))


def write_conversations() -> bytes:
    """Return JSON lines of conversations with 1 to LONGEST problems each, some after small talk."""
    exercises = list_exercises(held_out=False)
    rows: list[dict[str, object]] = []
    start = 0
    while start < len(exercises):
        order = _hash(exercises[start].question, 2)
        problems = exercises[start : start + 1 + order % LONGEST]
        turns = [(problem.question, problem.answer) for problem in problems]
        start += len(turns)
        if len(rows) % TALK_EVERY == 0:
            turns.insert(0, SMALL_TALK[order // LONGEST % len(SMALL_TALK)])
        messages = []
        for question, answer in turns:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        rows.append({"messages": messages})
    return _to_lines(rows)


def write_prompts(*, held_out: bool) -> bytes:
    """Return JSON lines with `prompt` and `answer` for the held-out problems, or for all others."""
    exercises = list_exercises(held_out=held_out)
    return _to_lines([{"prompt": it.question, "answer": it.answer} for it in exercises])


def find_exercises(name: str, _: Path | None = None) -> Source:
    """Return the corpus exercises, exercises-prompts or exercises-test."""
    size = len(_write_corpus(name))
    return Source(name, (File(f"{name}.jsonl", name, size, 0, "json", open_exercises),))


def open_exercises(file: File) -> BinaryIO:
    """Open the corpus that `find_exercises` returned."""
    return io.BytesIO(_write_corpus(file.path))


@cache
def _write_corpus(name: str) -> bytes:
    if name == "exercises":
        return write_conversations()
    return write_prompts(held_out=name.endswith("test"))


def _make_sums() -> Iterator[Exercise]:
    for a, b in itertools.product(range(SUMS_BELOW), repeat=2):
        wording = SUM_WORDINGS[_hash(f"{a} {b}", 3) % len(SUM_WORDINGS)]
        yield Exercise(f"{min(a, b)}+{max(a, b)}", wording.format(a=a, b=b), str(a + b))


def _make_spellings() -> Iterator[Exercise]:
    for word in dict.fromkeys(_draw_word(number) for number in range(WORDS)):
        wording = SPELLING_WORDINGS[_hash(word, 3) % len(SPELLING_WORDINGS)]
        yield Exercise(word, wording.format(word=word), " ".join(word))


def _draw_word(number: int) -> str:
    """Return word `number`, which has three syllables, or two in a quarter of the cases."""
    draw = _hash(str(number), 4)
    n_syllables = 2 if draw >> 62 == 0 else 3
    base = len(SYLLABLES)
    return "".join(SYLLABLES[draw // base**place % base] for place in range(n_syllables))


def _hash(text: str, seed: int = 0) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(), seed)


def _to_lines(rows: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
