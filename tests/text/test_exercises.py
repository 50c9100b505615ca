"""The exercises: right answers, the same bytes everywhere, and nothing held out in what a model learns from."""

import json
import re

import pytest
import xxhash

from megatoken.text.exercises import SMALL_TALK, list_exercises, write_conversations
from megatoken.text.sources import find_source

DIGESTS = {
    "exercises": "077ce2e6e98ad47f1626e9b2b0635f4a",
    "exercises-prompts": "cf912a5eacb73a3dbe250fcb2e1f294c",
    "exercises-test": "17cce70d48e2d4315eccc43116282c5b",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_bytes_are_the_same_everywhere(name: str):
    source = find_source(name)
    with source.files[0].opener(source.files[0]) as stream:
        lines = stream.read()
    assert len(lines) == source.size_bytes
    assert xxhash.xxh3_128_hexdigest(lines) == DIGESTS[name]


def test_every_answer_is_right():
    for exercise in (*list_exercises(held_out=True), *list_exercises(held_out=False)):
        if "+" in exercise.key:
            expected = str(sum(map(int, exercise.key.split("+"))))
            assert all(number in exercise.question for number in exercise.key.split("+"))
        else:
            expected = " ".join(exercise.key)
            assert exercise.key in exercise.question
        assert exercise.answer == expected


def test_nothing_held_out_is_learned():
    test, others = (list_exercises(held_out=held_out) for held_out in (True, False))
    assert 0.09 < len(test) / (len(test) + len(others)) < 0.11
    rows = [json.loads(line) for line in write_conversations().splitlines()]
    asked = {
        message["content"]
        for row in rows
        for message in row["messages"]
        if message["role"] == "user"
    }
    assert {exercise.question for exercise in others} < asked
    asked -= {question for question, _ in SMALL_TALK}
    keys = {
        f"{min(pair)}+{max(pair)}"
        for text in asked
        if len(pair := [*map(int, re.findall(r"[0-9]+", text))]) == 2
    }
    keys |= {text.rstrip("?.").split()[-1] for text in asked if "pell" in text}
    assert len(keys) == len({exercise.key for exercise in others})
    assert keys.isdisjoint(exercise.key for exercise in test)
