"""What each rule pays, what it does not pay for, and users' own code that fails."""

import threading
from pathlib import Path

import pytest

from megatoken.errors import ConfigError
from megatoken.eval.rewards import REWARDS, load_reward, score_answers


@pytest.mark.parametrize(
    ("name", "answer", "right", "reward"),
    [
        ("exact", " 42\n", "42", 1.0),
        ("exact", "", "42", 0.0),
        ("exact", "42 or 43", "42", 0.0),
        ("number", "It is 1,000.0.", "1000", 1.0),
        ("number", "17+25=42", "42", 1.0),
        ("number", "17-42", "42", 1.0),
        ("number", "17 - -42", "-42", 1.0),
        ("number", "the minus sign: -42", "42", 0.0),
        (
            "number",
            "42, 43",
            "42",
            0.0,
        ),  # the last one counts, so a list of all numbers is not paid
        ("number", "4,2", "42", 0.0),
        ("number", "1.50", "1.5", 1.0),
        ("number", "no number", "42", 0.0),
        ("number", "9" * 6000, "9" * 6000, 1.0),
        ("gsm8k", "17 and 25 are 42\n#### 42", "so it is 42\n#### 42", 1.0),
        ("gsm8k", "#### $1,234", "1234", 1.0),
        ("gsm8k", "42", "#### 42", 0.0),
        ("gsm8k", "#### 41 #### 42", "42", 1.0),
        ("gsm8k", "#### the answer is 42", "42", 0.0),
        ("gsm8k", "", "42", 0.0),
    ],
)
def test_what_a_rule_pays(name: str, answer: str, right: str, reward: float):
    assert REWARDS[name]("", answer, right) == reward


def test_own_code_is_found_by_module_and_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_reward_of_length.py").write_text(
        "def reward(prompt, answer, right):\n    return len(answer)\n"
    )
    monkeypatch.chdir(tmp_path)
    reward = load_reward("my_reward_of_length:reward")
    assert score_answers(reward, "mine", [("p", "abc", ""), ("p", "", "")]) == [3.0, 0.0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("exact", "'exact' names no function"),
        ("no_such_module:reward", "cannot be imported: ModuleNotFoundError"),
        ("math:no_such_function", "cannot be imported: AttributeError"),
        ("math:pi", "is no function"),
    ],
)
def test_a_name_without_a_function(name: str, text: str):
    with pytest.raises(ConfigError, match=text):
        load_reward(name)


def test_a_reward_that_fails_names_its_answer():
    def divide(prompt: str, answer: str, right: str) -> float:
        return 1 / len(answer)

    with pytest.raises(
        ConfigError, match=r"reward m:f raised ZeroDivisionError: .*prompt 'p', answer ''.*return 0"
    ):
        score_answers(divide, "m:f", [("p", "a", ""), ("p", "", "")])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "one"])
def test_a_reward_is_a_finite_number(value: object):
    with pytest.raises(ConfigError, match=r"reward m:f is .*return a finite number"):
        score_answers(lambda *row: value, "m:f", [("p", "a" * 50, "")])


def test_a_reward_that_hangs():
    released = threading.Event()
    try:
        with pytest.raises(
            ConfigError,
            match=r"reward m:f has not returned within 0.05 s — prompt 'p', answer 'slow'",
        ):
            score_answers(
                lambda *row: released.wait(), "m:f", [("p", "slow", "")], limit_seconds=0.05
            )
    finally:
        released.set()
