"""A chat model's own answers: scores, pass@k, stops and lengths."""

import itertools
import math
import statistics
from pathlib import Path

import pytest

from megatoken.base.errors import DataError, ExitCode
from megatoken.inference.answers import (
    AnswerSettings,
    Question,
    estimate_pass_at_k,
    evaluate_answers,
    read_questions,
)
from megatoken.inference.generate import generate_ids
from megatoken.inference.sampling import Sampling
from megatoken.text.chat_template import Message
from megatoken.text.exercises import list_exercises
from megatoken.text.load_pretrained import LoadedModel
from tests.conftest import Ask, Call
from tests.convert.models import TEMPLATE, draw_chat_model, save_run
from tests.inference.reference_scorer import SINGLE
from tests.tiny_run import write_jsonl

MODEL = draw_chat_model()
LOADED = LoadedModel(MODEL, TEMPLATE.tokenizer, "a model")
PROMPTS = ["a", "bb", "say", "2 + 2?", "né", "x y z"]


def answer(prompt: str, seed: int = 0, temperature: float = 0.0) -> list[int]:
    """Return at most 6 new ids up to the stop token."""
    ids = TEMPLATE.encode([Message("user", prompt)], reply=True)[0]
    [new] = generate_ids(MODEL, ids, Sampling(6, temperature=temperature, seed=seed))
    return list(itertools.takewhile(lambda id: id not in TEMPLATE.stop_ids, new))


def reward_length(prompt: str, completion: str, answer: str) -> float:
    return float(len(completion.encode()) > int(answer))


def answer_all(right: str, samples: int = 0, **values: object) -> dict[str, object]:
    questions = [Question([Message("user", prompt)], right, "here") for prompt in PROMPTS]
    sampling = Sampling(6, **values)
    settings = AnswerSettings(reward_length, samples=samples, sampling=sampling, per_example=True)
    return evaluate_answers(LOADED, None, SINGLE, questions, settings)


def test_greedy_answers():
    answers = [answer(prompt) for prompt in PROMPTS]
    texts = [TEMPLATE.tokenizer.decode(ids) for ids in answers]
    lengths = [len(text.encode()) for text in texts]
    middle = sorted(lengths)[2]
    result = answer_all(str(middle))
    scores = [float(length > middle) for length in lengths]
    assert result["score"] == statistics.fmean(scores)
    error = statistics.stdev(scores) / math.sqrt(6)
    assert result["stderr"]["score"] == pytest.approx(error, abs=1e-12)
    assert [row["answer"] for row in result["examples"]] == texts
    assert result["n"] == 6
    assert result["stops"] == statistics.fmean(len(ids) < 6 for ids in answers)
    assert result["tokens"] == statistics.fmean(min(len(ids) + 1, 6) for ids in answers)


def test_pass_at_k_counts_the_right_ones_of_the_sampled():
    result = answer_all("7", samples=5, temperature=1.5, seed=3)
    right = []
    for number, prompt in enumerate(PROMPTS):
        texts = [
            TEMPLATE.tokenizer.decode(answer(prompt, 3 + 5 * number + sample, 1.5))
            for sample in range(5)
        ]
        right.append(sum(reward_length("", text, "7") for text in texts))
    assert [row["n_right"] for row in result["examples"]] == right
    assert 0 < sum(right) < 30
    assert result["pass_at"].keys() == {"1", "2", "4"}
    assert result["pass_at"]["1"] == pytest.approx(sum(right) / 30, abs=1e-12)
    assert answer_all("7", samples=5, temperature=1.5, seed=4)["pass_at"] != result["pass_at"]


def test_pass_at_k_is_the_share_of_all_choices():
    for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if max(c, k) <= n:
            drawn = itertools.combinations([True] * c + [False] * (n - c), k)
            share = statistics.fmean(map(any, drawn))
            assert estimate_pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12)


def test_questions_are_read_from_prompts_conversations_and_exercises(tmp_path: Path):
    roles = ("system", "user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, "sqarb", strict=True)]
    path = tmp_path / "chats.jsonl"
    write_jsonl(path, [{"messages": messages}])
    assert read_questions(str(path), 0) == [
        Question([Message("system", "s"), Message("user", "q")], "a", f"{path}:1")
    ]
    write_jsonl(path, [{"prompt": "q", "answer": 4}, {"prompt": "p", "answer": "5"}])
    assert [question.answer for question in read_questions(str(path), 0)] == ["4", "5"]
    assert len(read_questions(str(path), 1)) == 1
    questions = read_questions("exercises-test", 0)
    assert [(question.messages[0].content, question.answer) for question in questions] == [
        (exercise.question, exercise.answer) for exercise in list_exercises(held_out=True)
    ]
    write_jsonl(path, [{"prompt": "q", "chosen": "a", "rejected": "b"}])
    with pytest.raises(DataError):
        read_questions(str(path), 0)


def test_a_dataset_of_prompts_gives_its_held_out_ones(tmp_path: Path, call: Call):
    path = tmp_path / "rows.jsonl"
    line = f"prepare {path} --tokenizer bytes --context 64 --val-fraction"
    write_jsonl(path, ({"prompt": f"q{n}", "answer": f"a{n}"} for n in range(40)))
    assert call(f"{line} 0.25 --out {tmp_path}/data")[0] == ExitCode.DONE
    questions = read_questions(f"{tmp_path}/data", 0)
    assert 2 < len(questions) < 20
    assert all(question.messages[0].content[1:] == question.answer[1:] for question in questions)
    write_jsonl(path, [{"prompt": "q", "completion": "a"}])
    assert call(f"{line} 0 --out {tmp_path}/chats")[0] == ExitCode.DONE
    with pytest.raises(DataError):
        read_questions(f"{tmp_path}/chats", 0)


def test_the_command(tmp_path: Path, ask: Ask, call: Call):
    checkpoint = save_run(tmp_path, MODEL, TEMPLATE.tokenizer)
    line = f"eval {checkpoint} --chat exercises-test --limit 4 --tokens 5"
    result = ask(f"{line} --samples 2")["chat"]
    assert (result["n"], result["samples"], result["reward"]) == (4, 2, "exact")
    assert call(f"{line} --reward best")[0] == ExitCode.CONFIG
