"""Score a chat model's answers to questions: reward, pass@k, stop rate, length."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatoken.base.errors import DataError
from megatoken.base.system.device import Device
from megatoken.data.dataset import load_dataset
from megatoken.data.shard_format import MANIFEST_NAME
from megatoken.distributed.comm import Comm
from megatoken.inference.batch import Request, generate_batch
from megatoken.inference.multiple_choice import format_share, standard_error
from megatoken.inference.rewards import Reward, reward_exact, score_completions
from megatoken.inference.sampling import Sampling
from megatoken.text.chat_dataset import answers_name, read_answers
from megatoken.text.chat_formats import read_examples
from megatoken.text.chat_template import ChatTemplate, Message, find_template
from megatoken.text.load_pretrained import LoadedModel
from megatoken.text.sources import find_source

DEFAULT_TOKENS = 256
RIGHT = 1.0  # an answer is right if its reward is at least this
NEEDED_ROWS = "use rows with `prompt` and `answer`, or conversations"


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation to complete, and the right answer.

    where: file:line of its row. options: arguments of ChatTemplate.encode.
    """

    messages: list[Message]
    answer: str
    where: str
    options: dict[str, Any] = field(default_factory=dict)


def read_questions(source: str, limit: int) -> list[Question]:
    """Return questions from the first `limit` rows (0 for all) of prompts or conversations.

    For a conversation, the right answer is its first answer. source: anything that `prepare` reads,
    or a prepared dataset of prompts, whose held-out split is used. Raises DataError for rows
    without a right answer.
    """
    if (Path(source) / MANIFEST_NAME).is_file():
        dataset = load_dataset(Path(source))
        dataset.require_kind("prompt", "--chat")
        split = "val" if len(dataset.val) else "train"
        read_answers(dataset, split)  # checks the hash of its file
        source = str(Path(source) / answers_name(split))
    questions: list[Question] = []
    for file_format, example in read_examples(find_source(source)):
        if file_format.kind in ("preference", "kto"):
            raise DataError("preferences have no right answer", example.where, NEEDED_ROWS)
        if file_format.kind == "prompt":
            answer = str(example.row["answer"])
        else:
            answer = example.conversations[0][len(example.prompt)].content
        questions.append(Question(example.prompt, answer, example.where, example.options))
        if len(questions) == limit:
            break
    if not questions:
        raise DataError("no rows", source, NEEDED_ROWS)
    return questions


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How answers are sampled and scored.

    samples: number of sampled answers per question, for pass@k; 0 for only the greedy answer.
    """

    reward: Reward = reward_exact
    reward_name: str = "exact"
    samples: int = 0
    sampling: Sampling = Sampling(DEFAULT_TOKENS)
    per_example: bool = False


def evaluate_answers(
    loaded: LoadedModel,
    device: Device | None,
    comm: Comm,
    questions: Sequence[Question],
    settings: AnswerSettings,
) -> dict[str, Any]:
    """Answer the questions; return means over them, with their standard errors under `stderr`.

    The means are `score`, the reward of the greedy answer; `stops`, whether it ends with a stop
    token; `tokens`, its length; and, if `settings.samples` is not 0, `pass_at`: for k = 1, 2, 4,
    ..., the probability that at least one of k sampled answers has a reward of 1. The ranks share
    the questions and return the same result. Raises DataError for a prompt longer than the context,
    and ConfigError if the model has no chat template or the reward function fails.
    """
    template, context = find_template(loaded.tokenizer), loaded.model.config.seq_len
    rank, size = comm.dist_env.rank, comm.dist_env.world_size
    local = list(enumerate(questions))[rank::size]

    def answer(n: int, sampling: Sampling) -> list[dict[str, Any]]:
        """Answer each question n times; return one row per answer."""
        asked = [
            (question, number * n + sample) for number, question in local for sample in range(n)
        ]
        requests = [
            _make_request(context, template, question, replace(sampling, seed=sampling.seed + i))
            for question, i in asked
        ]
        rows: list[dict[str, Any]] = []
        completions = generate_batch(loaded.model, requests, device=device)
        for (question, _), completion in zip(asked, completions, strict=True):
            stops = completion.stop_id is not None
            rows.append(
                {
                    "prompt": question.messages[-1].content,
                    "right": question.answer,
                    "where": question.where,
                    "answer": template.tokenizer.decode(completion.ids),
                    "stops": stops,
                    "tokens": len(completion.ids) + stops,
                }
            )
        triples = [(row["prompt"], row["answer"], row["right"]) for row in rows]
        scores = score_completions(settings.reward, settings.reward_name, triples)
        return [row | {"score": score} for row, score in zip(rows, scores, strict=True)]

    rows = answer(1, replace(settings.sampling, temperature=0.0))
    n = settings.samples
    if n > 0:
        sampled = answer(n, settings.sampling)
        for i, row in enumerate(rows):
            row["n_right"] = sum(one["score"] >= RIGHT for one in sampled[i * n : (i + 1) * n])
    parts = comm.gather(rows)
    rows = [parts[number % size][number // size] for number in range(len(questions))]
    return _summarize(rows, settings)


def _summarize(rows: Sequence[Mapping[str, Any]], settings: AnswerSettings) -> dict[str, Any]:
    result: dict[str, Any] = {}
    stderr: dict[str, Any] = {}
    for name in ("score", "stops", "tokens"):
        values = [float(row[name]) for row in rows]
        result[name] = statistics.fmean(values)
        stderr[name] = standard_error(values)
    n = settings.samples
    if n > 0:
        result |= {"pass_at": {}, "samples": n, "temperature": settings.sampling.temperature}
        stderr["pass_at"] = {}
        for k in (2**i for i in range(n.bit_length())):
            values = [estimate_pass_at_k(n, row["n_right"], k) for row in rows]
            result["pass_at"][str(k)] = statistics.fmean(values)
            stderr["pass_at"][str(k)] = standard_error(values)
    result |= {
        "stderr": stderr,
        "n": len(rows),
        "reward": settings.reward_name,
        "max_new_tokens": settings.sampling.max_new_tokens,
    }
    if settings.per_example:
        result["examples"] = rows
    return result


def _make_request(
    context: int, template: ChatTemplate, question: Question, sampling: Sampling
) -> Request:
    ids, _ = template.encode(question.messages, reply=True, **question.options)
    if len(ids) > context:
        what = f"the prompt has {len(ids):,} tokens, the context {context:,}"
        raise DataError(what, question.where, "use a model with a longer context")
    new_tokens = min(sampling.max_new_tokens, context - len(ids) + 1)
    return Request(ids, replace(sampling, max_new_tokens=new_tokens, stop_ids=template.stop_ids))


def estimate_pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of pass@k if c of n samples are right (Chen et al. 2021)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def describe_answers(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Format the result of `evaluate_answers` as (name, value) rows to print."""
    error = result["stderr"]
    score = format_share(result["score"], error["score"])
    stops = format_share(result["stops"], error["stops"])
    rows = [
        (result["reward"], f"{score} of {result['n']:,} greedy answers"),
        ("stops", f"{stops} end with a stop token"),
        ("length", f"{result['tokens']:.1f} of at most {result['max_new_tokens']:,} tokens"),
    ]
    for k, value in result.get("pass_at", {}).items():
        how = f"of {result['samples']} samples at temperature {result['temperature']}"
        rows.append((f"pass@{k}", f"{format_share(value, error['pass_at'][k])}  {how}"))
    return rows
