"""Tasks of reasoning-gym: which are refused, with and without the package; that prompts repeat and answers are paid."""

import ast
import importlib
import inspect
import json
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from megatoken.data.gym import REFUSED, VERSION, import_gym, score_entry, write_prompts
from megatoken.data.sources import find_source
from megatoken.errors import ConfigError, DataError, MegatokenError
from megatoken.eval.rewards import REWARDS, find_rule, score_answers
from megatoken.objectives.batch_source import check_reward


@pytest.fixture
def gym(recwarn: pytest.WarningsRecorder) -> Any:
    """The library, whose own packages warn as they are imported."""
    pytest.importorskip("reasoning_gym", reason="needs the extra gym")
    return import_gym()


def read_rows(spec: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in write_prompts(spec).splitlines()]


@pytest.mark.parametrize("task", sorted(REFUSED))
def test_a_task_is_refused_before_anything_is_imported(task: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    for call in (lambda: write_prompts(f"gym:{task}"), lambda: score_entry("1", json.dumps({"task": task}))):
        with pytest.raises(ConfigError, match=f"the task {task} is refused: .*gym:{task}"):
            call()


@pytest.mark.parametrize("call", [lambda: find_source("gym:chain_sum"), lambda: find_rule("gym"), import_gym])
def test_without_the_package_it_is_named(call: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r'pip install "megatoken\[gym\]"'):
        call()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", sys)
    monkeypatch.setattr(metadata, "version", lambda _: "9.9")
    with pytest.raises(ConfigError, match=rf"reasoning-gym 9\.9 is here, scorers are known of {VERSION} alone"):
        import_gym()


def test_the_extra_is_of_the_version_whose_scorers_were_read():
    assert f'gym = ["reasoning-gym=={VERSION}"]' in Path("pyproject.toml").read_text()


def test_a_reward_with_a_task_is_told_what_to_write():
    with pytest.raises(ConfigError, match=r"reward gym:chain_sum — objective.reward — write gym: each prompt"):
        check_reward("gym:chain_sum", None)


@pytest.mark.parametrize("spec", ["gym:chain_sum:", "gym:chain_sum:5:6:7", "gym:chain_sum:many", "gym:chain_sum:-1"])
def test_words_that_name_no_prompts(spec: str):
    with pytest.raises(ConfigError, match="write gym:TASK, gym:TASK:COUNT or gym:TASK:COUNT:SEED"):
        find_source(spec)


@pytest.mark.parametrize("right", ["42", "", "[1]", "{}", '"task"'])
def test_a_right_answer_that_is_no_entry_ends_it_with_one_line(right: str):
    with pytest.raises(DataError, match=r"no task of reasoning-gym is beside the prompt.*take another reward"):
        score_answers(REWARDS["gym"], "gym", [("What is 40 + 2?", "42", right)])


def test_prompts_repeat_and_seeds_share_none(gym: Any):
    rows = read_rows("gym:chain_sum:30")
    assert len({row["prompt"] for row in rows}) == len(rows) == 30
    write_prompts.cache_clear()
    assert rows == read_rows("gym:chain_sum:30:0")
    assert rows[:20] == read_rows("gym:chain_sum:20:0")
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in read_rows("gym:chain_sum:30:1")}


def test_the_library_pays(gym: Any):
    right = read_rows("gym:chain_sum:1")[0]["answer"]
    result = json.loads(right)["answer"]
    assert score_entry(f" +{result}.0\n", right) == 1.0
    assert score_entry(f"I add them: <answer>{result}</answer>", right) == 1.0
    assert score_entry(f"{result}{'x' * len(result)}", right) == 0.5  # a part, by the length
    assert score_entry("", right) == score_entry("no", right) == 0.0


def test_an_answer_that_a_scorer_fails_on_gets_nothing(gym: Any):
    right = read_rows("gym:prime_factorization:1")[0]["answer"]
    with pytest.raises(ValueError, match="invalid literal"):
        gym.get_score_answer_fn("prime_factorization")("two", json.loads(right))
    assert score_entry("two", right) == 0.0
    assert score_entry(json.loads(right)["answer"], right) == 1.0


def test_unknown_tasks_and_counts(gym: Any):
    with pytest.raises(ConfigError, match="unknown task — gym:chain_sun — did you mean chain_sum"):
        write_prompts("gym:chain_sun")
    with pytest.raises(MegatokenError, match="unknown task"):
        score_entry("1", json.dumps({"task": "chain_sun"}))


def test_no_other_scorer_runs_text_as_python(gym: Any):
    """In the classes and the functions of their modules; what generators run is their own text."""
    running = {"eval", "exec", "parse_expr", "sympify"}
    found = set()
    for task, (dataset, _) in gym.factory.DATASETS.items():
        module = importlib.import_module(dataset.score_answer.__module__)
        helpers = [value for value in vars(module).values() if inspect.isfunction(value)]
        code = [dataset, *(each for each in helpers if each.__module__ == module.__name__)]
        calls = {
            getattr(node.func, "attr", getattr(node.func, "id", ""))
            for each in code
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(each))))
            if isinstance(node, ast.Call)
        }
        if calls & running:
            found.add(task)
    assert found - {"basic_arithmetic"} <= set(REFUSED)  # its generator's sums
    assert {"countdown", "n_queens", "bitwise_arithmetic"} <= found
