"""Sums and spelling, made on this machine: conversations to fine-tune on, prompts with answers, and held-out ones.

The same bytes everywhere: what is held out, every order and every wording follow from hashes. A sum and its reverse,
and every wording of a problem, are on the same side of the split.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xxhash

HELD_OUT = 0.1  # share of the problems that `exercises-test` alone has
SUMS_BELOW = 100
WORDS = 10_000  # drawn, of which some are equal
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
SUM_WORDINGS = ("What is {a} + {b}?", "{a} + {b}", "{a}+{b}=?", "Add {a} and {b}.")
SPELLING_WORDINGS = ("Spell {word}.", "How do you spell {word}?", "spell {word}")
SMALL_TALK = (
    ("Hello.", "Hello. Give me a sum, or a word to spell."),
    ("Who are you?", "A small model that adds and spells."),
    ("What can you do?", "I add numbers below 100 and spell short words."),
    ("Thank you.", "You are welcome."),
)
TALK_EVERY = 8  # conversations
LONGEST = 3  # problems in a conversation


@dataclass(frozen=True, slots=True)
class Exercise:
    """A question in one of its wordings, its answer, and what it is about: the same for every wording."""

    key: str
    question: str
    answer: str


def list_exercises(*, held_out: bool) -> list[Exercise]:
    """All problems of one side of the split, in an order of their own."""
    kept = (
        each
        for each in itertools.chain(_make_sums(), _make_spellings())
        if is_held_out(each.key) == held_out
    )
    return sorted(kept, key=lambda each: (_hash(each.question, 1), each.question))


def is_held_out(key: str) -> bool:
    """Whether a problem is one of `exercises-test`."""
    return _hash(key) < HELD_OUT * 2**64


def write_conversations() -> bytes:
    """Lines of JSON with `messages`: one to LONGEST problems each, some behind a word of small talk."""
    exercises, rows = list_exercises(held_out=False), list[dict[str, object]]()
    start = 0
    while start < len(exercises):
        order = _hash(exercises[start].question, 2)
        turns = [
            (each.question, each.answer) for each in exercises[start : start + 1 + order % LONGEST]
        ]
        start += len(turns)
        if len(rows) % TALK_EVERY == 0:
            turns.insert(0, SMALL_TALK[order // LONGEST % len(SMALL_TALK)])
        pairs = (
            ({"role": "user", "content": q}, {"role": "assistant", "content": a}) for q, a in turns
        )
        rows.append({"messages": list(itertools.chain.from_iterable(pairs))})
    return _to_lines(rows)


def write_prompts(*, held_out: bool) -> bytes:
    """Lines of JSON with `prompt` and `answer`, of the problems to learn from or of the others."""
    return _to_lines(
        [
            {"prompt": each.question, "answer": each.answer}
            for each in list_exercises(held_out=held_out)
        ]
    )


# By the name of a source: data/sources.py.
EXERCISES: dict[str, Callable[[], bytes]] = {
    "exercises": write_conversations,
    "exercises-prompts": lambda: write_prompts(held_out=False),
    "exercises-test": lambda: write_prompts(held_out=True),
}


def _make_sums() -> Iterator[Exercise]:
    for a, b in itertools.product(range(SUMS_BELOW), repeat=2):
        wording = SUM_WORDINGS[_hash(f"{a} {b}", 3) % len(SUM_WORDINGS)]
        yield Exercise(f"{min(a, b)}+{max(a, b)}", wording.format(a=a, b=b), str(a + b))


def _make_spellings() -> Iterator[Exercise]:
    for word in dict.fromkeys(_draw_word(number) for number in range(WORDS)):
        wording = SPELLING_WORDINGS[_hash(word, 3) % len(SPELLING_WORDINGS)]
        yield Exercise(word, wording.format(word=word), " ".join(word))


def _draw_word(number: int) -> str:
    """Two or three syllables, three of four times three."""
    draw = _hash(str(number), 4)
    return "".join(
        SYLLABLES[draw // len(SYLLABLES) ** place % len(SYLLABLES)]
        for place in range(3 - (draw >> 62 == 0))
    )


def _hash(text: str, seed: int = 0) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(), seed)


def _to_lines(rows: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
