"""Scores of a chat model's own answers to held-out prompts: the share that is right, pass@k, how they end, how long.

Answers are sampled, not chosen among given ones: greedily for the score, with a temperature for pass@k.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatoken.data.chat_dataset import answers_name, read_answers, require_kind
from megatoken.data.chat_formats import read_examples
from megatoken.data.chat_template import ChatTemplate, Message
from megatoken.data.dataset import load_dataset
from megatoken.data.shard_format import MANIFEST_NAME
from megatoken.data.sources import find_source
from megatoken.distributed.comm import Comm
from megatoken.errors import ConfigError, DataError
from megatoken.eval.rewards import Reward, score_answers
from megatoken.model.gpt import GPT
from megatoken.sampling.batch import Request, generate_batch
from megatoken.system.device import Device

DEFAULT_TOKENS = 256
RIGHT = 1.0  # the reward from which on an answer counts as right


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation for the model to answer, and the right answer. where: file:line."""

    messages: list[Message]
    right: str
    where: str


def read_questions(source: str, limit: int) -> list[Question]:
    """The first `limit` (0: all) rows of prompts with answers, or of conversations, whose first answer counts.

    source: a file, folder, pattern or corpus of `prepare`; of a dataset of prompts its held-out ones. Raises DataError
    for rows without a right answer.
    """
    if (Path(source) / MANIFEST_NAME).is_file():
        dataset = load_dataset(Path(source))
        require_kind(dataset, "prompt", "--chat")
        split = "val" if len(dataset.val) else "train"
        read_answers(dataset, split)  # against their hash
        source = str(Path(source) / answers_name(split))
    questions: list[Question] = []
    for found, example in read_examples(find_source(source)):
        if found.kind == "preference":
            what = "preferences have no right answer"
            raise DataError(
                what, example.where, "give rows with `prompt` and `answer`, or conversations"
            )
        right = (
            example.row["answer"]
            if found.kind == "prompt"
            else example.answers[0][len(example.prompt)].content
        )
        questions.append(Question(example.prompt, str(right), example.where))
        if len(questions) == limit:
            break
    if not questions:
        raise DataError("no rows", source, "give rows with `prompt` and `answer`, or conversations")
    return questions


def evaluate_answers(
    model: GPT,
    template: ChatTemplate,
    questions: Sequence[Question],
    *,
    reward: Reward,
    reward_name: str = "exact",
    samples: int = 0,
    temperature: float = 1.0,
    max_new_tokens: int = DEFAULT_TOKENS,
    seed: int = 0,
    per_example: bool = False,
    device: Device | None = None,
    comm: Comm | None = None,
) -> dict[str, Any]:
    """Means over the questions, each with its standard error under `stderr`.

    `score`: reward of the greedy answer; `stops`: share of these that end by a stop token; `tokens`: their length. With
    `samples`: `pass_at`, for k = 1, 2, 4, ... up to samples the probability that one of k answers sampled with
    `temperature` gets a reward of 1. comm: ranks that share the questions and all return the same. Raises DataError for
    a prompt that fills the context, ConfigError for a reward that fails.
    """
    rank, size = (comm.dist_env.rank, comm.dist_env.world_size) if comm else (0, 1)
    rows: list[dict[str, Any]] = [
        {"prompt": question.messages[-1].content, "right": question.right, "where": question.where}
        for question in questions[rank::size]
    ]
    for count, heat in ((1, 0.0), (samples, temperature)):
        requests = [
            _make_request(
                model,
                template,
                question,
                max_new_tokens,
                heat,
                seed + (rank + size * number) * count + sample,
            )
            for number, question in enumerate(questions[rank::size])
            for sample in range(count)
        ]
        completions = generate_batch(model, requests, device=device)
        texts = [template.tokenizer.decode(each.ids) for each in completions]
        asked = [(row["prompt"], row["right"]) for row in rows for _ in range(count)]
        triples = [
            (prompt, text, right) for (prompt, right), text in zip(asked, texts, strict=True)
        ]
        scores = score_answers(reward, reward_name, triples)
        for number, row in enumerate(rows):
            if heat:
                row["n_right"] = sum(
                    score >= RIGHT for score in scores[number * count : (number + 1) * count]
                )
            else:
                stops = completions[number].stop_id is not None
                length = (
                    len(completions[number].ids) + stops
                )  # the stop token is one of the answer's
                row |= {
                    "answer": texts[number],
                    "score": scores[number],
                    "stops": stops,
                    "tokens": length,
                }
    if comm:
        parts = comm.gather(rows)
        rows = [parts[number % size][number // size] for number in range(len(questions))]
    values = {name: [float(row[name]) for row in rows] for name in ("score", "stops", "tokens")}
    result: dict[str, Any] = {name: statistics.fmean(each) for name, each in values.items()}
    stderr: dict[str, Any] = {name: standard_error(each) for name, each in values.items()}
    if samples:
        passes = {
            2**i: [estimate_pass_at_k(samples, row["n_right"], 2**i) for row in rows]
            for i in range(samples.bit_length())
        }
        result["pass_at"] = {str(k): statistics.fmean(each) for k, each in passes.items()}
        stderr["pass_at"] = {str(k): standard_error(each) for k, each in passes.items()}
        result |= {"samples": samples, "temperature": temperature}
    result |= {
        "stderr": stderr,
        "n": len(rows),
        "reward": reward_name,
        "max_new_tokens": max_new_tokens,
    }
    return result | ({"examples": rows} if per_example else {})


def _make_request(
    model: GPT,
    template: ChatTemplate,
    question: Question,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> Request:
    context, (ids, _) = model.config.seq_len, template.encode(question.messages, reply=True)
    if len(ids) > context:
        what = f"the prompt makes {len(ids):,} tokens, the context is {context:,}"
        raise DataError(what, question.where, "leave it out, or use a model with a longer context")
    room = min(max_new_tokens, context - len(ids) + 1)
    return Request(ids, room, temperature, seed=seed, stop_ids=template.stop_ids)


def estimate_pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that one of k answers is right, of n sampled ones of which c are: unbiased (Chen et al. 2021)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def standard_error(values: Sequence[float]) -> float | None:
    """The sample's standard deviation over √n; None for one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def describe_answers(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Lines (name, value) for people."""

    def share(value: float, error: float | None) -> str:
        return f"{100 * value:.2f}%" + ("" if error is None else f" ±{100 * error:.2f}")

    error = result["stderr"]
    length = f"{result['tokens']:.1f} tokens of at most {result['max_new_tokens']:,}"
    rows = [
        (
            result["reward"],
            f"{share(result['score'], error['score'])} of {result['n']:,} greedy answers",
        ),
        ("stops", f"{share(result['stops'], error['stops'])} end by themselves"),
        ("length", length),
    ]
    drawn = f"  of {result.get('samples')} at temperature {result.get('temperature')}"
    for k, value in result.get("pass_at", {}).items():
        rows.append((f"pass@{k}", share(value, error["pass_at"][k]) + drawn))
    return rows


def check_samples(samples: int, temperature: float, max_new_tokens: int) -> None:
    """Raise ConfigError for a number out of range."""
    for flag, value, valid, expected in (
        ("--samples", samples, samples >= 0, "0 (greedy answers alone) or more"),
        ("--temperature", temperature, 0 < temperature < math.inf, "a number above 0"),
        ("--tokens", max_new_tokens, max_new_tokens >= 1, "1 or more"),
    ):
        if not valid:
            raise ConfigError(f"{flag} is {value}", "megatoken eval", f"give {expected}")
