"""Multiple-choice tasks, asked of a live model: which continuation is the likeliest, by three scores side by side.

In: Examples, a tokenizer, a model, one rank or several. Out: Answers, and what they amount to. acc and acc_norm are
lm-evaluation-harness's, to the choice of every example: context and choice tokenized together and cut off from the
left, log-likelihoods summed, for acc_norm divided by characters. acc_token_mean is build-nanogpt's and llm.c's: the
mean over tokens, of the text that they ask with, tokenized as they do.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.config import Evaluate
from megatoken.data.tokenizer import Tokenizer
from megatoken.device import Device
from megatoken.errors import Exit, Fault
from megatoken.evaluate.rows import read_examples
from megatoken.evaluate.score import Sums, score_trees
from megatoken.evaluate.tasks import Example, Prompt, find_tasks
from megatoken.evaluate.tree import Asked, Tree, build_tree
from megatoken.model.gpt import GPT
from megatoken.parallel.ranks import Ranks

SCORES = {"acc": "pred", "acc_norm": "pred_norm", "acc_token_mean": "pred_token_mean"}


@dataclass(frozen=True, slots=True)
class Question:
    """An Example in tokens. apart: the tree that acc_token_mean is about; None: it is not asked for."""

    tree: Tree
    apart: Tree | None
    lengths: tuple[int, ...]
    gold: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The choice under each score, None under one that is not kept.

    A cloze has one choice: `pred` is 0 when it is what the model would write, else -1; nats: its loss.
    """

    pred: int
    pred_norm: int | None
    pred_token_mean: int | None
    gold: int
    nats: float | None = None


def read_exams(asked: Evaluate, tokenizer: Tokenizer, seq_len: int) -> dict[str, list[Question]]:
    """The questions of every task that a recipe asks for, by name.

    Raises Fault(CONFIG) for an unknown task, Fault(DATA) when its examples are missing or malformed.
    """
    tasks = find_tasks(asked.tasks) if asked.tasks else []
    found = read_examples(tasks, Path(asked.tasks_data) if asked.tasks_data else None, asked.tasks_limit)
    return {name: read_questions(examples, tokenizer, seq_len) for name, examples in found.items()}


def read_questions(
    examples: Sequence[Example], tokenizer: Tokenizer, seq_len: int, *, token_mean: bool = True
) -> list[Question]:
    """Examples in a tokenizer's ids, contexts cut off from the left to fit a model's `seq_len`.

    token_mean: ask for acc_token_mean too; HellaSwag is asked with other text for it, which costs as much again.
    Raises Fault(DATA) when a choice alone is longer than the context, or has no token.
    """
    questions = []
    for example in examples:
        cut = partial(_cut, seq_len=seq_len, place=example.place)
        tree = build_tree([cut(encode_pair(prompt, tokenizer)) for prompt in example.prompts])
        raw = example.raw if token_mean else ()
        apart = build_tree([cut(encode_apart(prompt, tokenizer)) for prompt in raw]) if raw else tree
        questions.append(Question(tree, apart if token_mean else None, example.lengths, example.gold))
    return questions


def encode_pair(prompt: Prompt, tokenizer: Tokenizer) -> Asked:
    """Context and continuation as lm-evaluation-harness tokenizes them: together, so that a token may span both.

    Spaces at the context's end belong to the continuation. An empty context is what begins a text.
    """
    context, continuation = prompt
    kept = context.rstrip()
    opening = tokenizer.opening or ([] if kept else [tokenizer.eot])
    whole = tokenizer.encode(context + continuation)
    return Asked(np.array([*opening, *whole], np.int64), len(whole) - len(tokenizer.encode(kept)))


def encode_apart(prompt: Prompt, tokenizer: Tokenizer) -> Asked:
    """Context and continuation as build-nanogpt and llm.c tokenize them: each by itself."""
    context, continuation = (tokenizer.encode(text) for text in prompt)
    opening = tokenizer.opening or ([] if len(context) else [tokenizer.eot])
    return Asked(np.array([*opening, *context, *continuation], np.int64), len(continuation))


def _cut(asked: Asked, seq_len: int, place: str) -> Asked:
    """The last ids that a model can take: `seq_len` inputs and one more target."""
    if not 0 < asked.count <= seq_len:
        what = f"a choice has {asked.count} tokens, the model's context is {seq_len}"
        raise Fault(Exit.DATA, what, place, "leave the example out")
    return Asked(asked.ids[-(seq_len + 1) :], asked.count)


def answer_questions(model: GPT, questions: Sequence[Question], device: Device, ranks: Ranks) -> list[Answer]:
    """What the model chooses, in the order of `questions`."""
    others = [question.apart for question in questions if question.apart not in (None, question.tree)]
    greedy = any(len(question.tree.askers) and not question.tree.askers[-1] for question in questions)
    sums = score_trees(model, [*(question.tree for question in questions), *others], device, ranks, greedy=greedy)
    apart = iter(sums[len(questions) :])
    answers = []
    for question, own in zip(questions, sums, strict=False):
        other = own if question.apart is question.tree else next(apart) if question.apart else None
        answers.append(_choose(question, own, other))
    return answers


def _choose(question: Question, own: Sums, other: Sums | None) -> Answer:
    """Of equal scores the first wins, as in the harness."""
    several = len(own.log_p) > 1
    lengths = np.array(question.lengths, np.float64)
    return Answer(
        pred=int(own.log_p.argmax()) if several else int(own.greedy[0]) - 1,
        pred_norm=_best(own.log_p, lengths) if len(lengths) else None,
        pred_token_mean=_best(other.log_p, other.counts) if several and other else None,
        gold=question.gold,
        nats=None if several else -float(own.log_p[0]),
    )


def _best(log_p: NDArray[np.float64], sizes: NDArray[Any]) -> int:
    """The likeliest choice for its size; one without any is the unlikeliest."""
    return int(np.where(sizes > 0, log_p / np.maximum(sizes, 1), -np.inf).argmax())


def grade(answers: Sequence[Answer]) -> dict[str, Any]:
    """acc, acc_norm and acc_token_mean (None where not kept), the standard error of each, and n; perplexity of a cloze.

    stderr: the sample's standard deviation over sqrt(n), as in the harness; None for a single example.
    """
    n = len(answers)
    grades: dict[str, Any] = {}
    errors: dict[str, float | None] = {}
    for score, choice in SCORES.items():
        right = [float(getattr(answer, choice) == answer.gold) for answer in answers]
        kept = getattr(answers[0], choice) is not None
        grades[score] = statistics.fmean(right) if kept else None
        errors[score] = statistics.stdev(right) / math.sqrt(n) if kept and n > 1 else None
    losses = [answer.nats for answer in answers if answer.nats is not None]
    cloze = {"perplexity": math.exp(statistics.fmean(losses))} if losses else {}
    return {**grades, "stderr": errors, "n": n, **cloze}


def describe_grades(grades: Mapping[str, Any]) -> str:
    """The scores that were kept, in one line."""
    said = [f"{score} {_show(grades, score)}" for score in SCORES if grades[score] is not None]
    return f"{', '.join(said)} in {grades['n']:,} examples"


def list_cells(grades: Mapping[str, Any]) -> list[str]:
    """Every score for a table, - where there is none."""
    return [_show(grades, score) if grades[score] is not None else "-" for score in SCORES]


def _show(grades: Mapping[str, Any], score: str) -> str:
    error = grades["stderr"][score]
    return f"{grades[score]:.2%}" + ("" if error is None else f" ± {error:.2%}")
