"""Rewards by rule, and user rewards that fail."""

import json
import threading
from pathlib import Path

import pytest

from megatoken.base.errors import ConfigError
from megatoken.inference.rewards import Reward, load_reward, score_completions

# Reward, completion, answer and score.
RULES = r"""
["exact", " 42\n", "42", 1]
["exact", "", "42", 0]
["number", "It is 1,000.0.", "1000", 1]
["number", "17-42", "42", 1]
["number", "17 - -42", "-42", 1]
["number", "the minus sign: -42", "42", 0]
["number", "4,2", "42", 0]
["number", "no number", "42", 0]
["gsm8k", "17 and 25 are 42\n#### 42", "so it is 42\n#### 42", 1]
["gsm8k", "#### $1,234", "1234", 1]
["gsm8k", "42", "#### 42", 0]
["gsm8k", "#### 41 #### 42", "42", 1]
["gsm8k", "#### the answer is 42", "42", 0]
"""


@pytest.mark.parametrize("row", RULES.strip().splitlines())
def test_rule(row: str):
    name, completion, answer, score = json.loads(row)
    assert load_reward(name)("", completion, answer) == score


def test_numbers_may_be_long():
    assert load_reward("number")("", "9" * 6000, "9" * 6000) == 1.0


def test_user_reward_is_imported_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "my_reward_of_length.py").write_text(
        "def reward(prompt, completion, answer):\n    return len(completion)\n"
    )
    monkeypatch.chdir(tmp_path)
    reward = load_reward("my_reward_of_length:reward")
    assert score_completions(reward, "mine", [("p", "abc", ""), ("p", "", "")]) == [3.0, 0.0]


@pytest.mark.parametrize(
    "reward", [lambda *row: 1 / len(row[1]), lambda *row: float("nan"), lambda *row: None]
)
def test_failing_reward_names_its_row(reward: Reward):
    with pytest.raises(ConfigError, match=r"m:f.*'question'"):
        score_completions(reward, "m:f", [("question", "", "")])


def test_hanging_reward():
    released = threading.Event()
    try:
        with pytest.raises(ConfigError, match=r"m:f.*'slow'"):
            score_completions(
                lambda *row: released.wait(), "m:f", [("p", "slow", "")], limit_seconds=0.05
            )
    finally:
        released.set()
