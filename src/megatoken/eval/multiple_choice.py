"""Multiple-choice scores: acc and acc_norm as lm-evaluation-harness computes them, acc_token_mean as llm.c does.

acc, acc_norm: context and choice tokenized together, truncated from the left; the largest log-likelihood, or the
largest per character. acc_token_mean: the largest mean per token, on the text and tokens of build-nanogpt and llm.c.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatoken.config.schema import EvalConfig
from megatoken.data.tokenizer import Tokenizer
from megatoken.distributed.comm import Comm
from megatoken.errors import DataError, MegatokenError
from megatoken.eval.scorer import ScoredSequence, Tree, build_tree, score_trees
from megatoken.eval.tasks import SCORES, Example, Prompt, find_tasks, read_examples
from megatoken.eval.val_loss import perplexity
from megatoken.model.gpt import GPT
from megatoken.system.device import Device


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """An Example in token ids. raw_tree: for acc_token_mean, often `tree` itself; None: without this score.

    cut: a choice alone is longer than the context, so only its end is scored.
    """

    tree: Tree
    raw_tree: Tree | None
    lengths: tuple[int, ...]
    gold: int
    cut: bool


@dataclass(frozen=True, slots=True)
class ExampleResult:
    """The predicted choice under each score, None for a score that the task does not have.

    In a cloze, `pred` is 0 if greedy decoding gives the only choice, else -1; `loss` is its loss in nats.
    """

    pred: int
    pred_norm: int | None
    pred_token_mean: int | None
    gold: int
    loss: float | None = None
    cut: bool = False


def read_tasks(
    config: EvalConfig, tokenizer: Tokenizer, seq_len: int, warn: Callable[[str], None]
) -> dict[str, list[EncodedExample]]:
    """The encoded examples of every task of a config, by name.

    warn: told of each task with a `?` that is left out because its examples cannot be read. Raises ConfigError for an
    unknown task, DataError when the examples of another one are missing or malformed.
    """
    names = [name.strip() for name in config.tasks.split(",")] if config.tasks else []
    data = Path(config.tasks_data) if config.tasks_data else None
    needed = [name for name in names if not name.endswith("?")]
    examples = read_examples(find_tasks(needed) if needed else [], data, config.tasks_limit)
    for task in [task for name in names if name.endswith("?") for task in find_tasks(name[:-1])]:
        try:
            examples |= read_examples([task], data, config.tasks_limit)
        except MegatokenError as error:
            warn(f"{task.name} is not scored: {error}")
    return {name: encode_examples(examples[name], tokenizer, seq_len) for name in examples}


def encode_examples(
    examples: Sequence[Example], tokenizer: Tokenizer, seq_len: int, *, token_mean: bool = True
) -> list[EncodedExample]:
    """Encode examples. Contexts and choices are truncated from the left to `seq_len`, as in lm-eval.

    token_mean: include acc_token_mean, whose different text doubles the cost of HellaSwag. Raises
    DataError for a choice without tokens.
    """

    def encode(prompts: Sequence[Prompt], where: str, *, together: bool) -> tuple[Tree, bool]:
        given = [
            encode_prompt(each, tokenizer, seq_len, together=together, where=where)
            for each in prompts
        ]
        sequences = [each._replace(n_targets=min(each.n_targets, seq_len)) for each in given]
        return build_tree(sequences), sequences != given

    encoded = []
    for example in examples:
        tree, cut = encode(example.prompts, example.where, together=True)
        raw_tree, raw_cut = tree if token_mean else None, False
        if token_mean and example.raw_prompts:
            raw_tree, raw_cut = encode(example.raw_prompts, example.where, together=False)
        encoded.append(
            EncodedExample(tree, raw_tree, example.lengths, example.gold, cut or raw_cut)
        )
    return encoded


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer, seq_len: int, *, together: bool, where: str = ""
) -> ScoredSequence:
    """Context and continuation as token ids, after begin-of-text if the tokenizer has one, truncated from the left.
    `n_targets` counts the whole continuation.

    together (lm-evaluation-harness): as one text, so that a token may span both; spaces at the context's end belong to
    the continuation. Otherwise (build-nanogpt, llm.c) each by itself. An empty context is the end-of-text token.
    """
    context, continuation = prompt
    prefix = tokenizer.encode(context.rstrip() if together else context)
    ids = (
        tokenizer.encode(context + continuation)
        if together
        else [*prefix, *tokenizer.encode(continuation)]
    )
    bos = tokenizer.bos_ids or ([] if len(prefix) else [tokenizer.eot])
    n_targets = len(ids) - len(prefix)
    if n_targets < 1:
        raise DataError("a choice has no tokens", where, "leave the example out")
    return ScoredSequence([*bos, *map(int, ids)][-(seq_len + 1) :], n_targets)


def score_examples(
    model: GPT,
    examples: Sequence[EncodedExample],
    device: Device,
    comm: Comm,
    on_batch: Callable[[], None] | None = None,
) -> list[ExampleResult]:
    """The result of every example, in order, on every rank. on_batch: as in `score_trees`."""
    raw_trees = [example.raw_tree for example in examples if example.raw_tree]
    trees = list(dict.fromkeys([*(example.tree for example in examples), *raw_trees]))
    scores = dict(zip(trees, score_trees(model, trees, device, comm, on_batch), strict=True))
    results = []
    for example in examples:
        (log_p, greedy), raw = scores[example.tree], example.raw_tree
        pred, pred_norm, pred_token_mean, loss = int(log_p.argmax()), None, None, None
        if example.lengths:
            pred_norm = _best(log_p, example.lengths)
        if len(log_p) == 1:
            pred, loss = 0 if greedy[0] else -1, -float(log_p[0])
        elif raw:
            pred_token_mean = _best(scores[raw].log_p, raw.n_targets)
        results.append(
            ExampleResult(pred, pred_norm, pred_token_mean, example.gold, loss, example.cut)
        )
    return results


def _best(log_p: NDArray[np.float64], sizes: ArrayLike) -> int:
    """The first choice with the largest log-likelihood per size; never one of size 0."""
    sizes = np.asarray(sizes)
    return int(np.where(sizes > 0, log_p / np.maximum(sizes, 1), -np.inf).argmax())


def compute_metrics(results: Sequence[ExampleResult]) -> dict[str, Any]:
    """Return acc, acc_norm, acc_token_mean (None if the task lacks it), their stderr, n, and perplexity.

    stderr: sample standard deviation / sqrt(n), as in lm-eval; None for a single example. n_cut, if
    any: examples with a choice longer than the context, scored on its end only.
    """
    n = len(results)
    metrics: dict[str, Any] = dict.fromkeys(SCORES)
    stderr: dict[str, float | None] = dict.fromkeys(SCORES)
    for score, pred in SCORES.items():
        if getattr(results[0], pred) is not None:
            correct = [float(getattr(result, pred) == result.gold) for result in results]
            metrics[score] = statistics.fmean(correct)
            stderr[score] = statistics.stdev(correct) / math.sqrt(n) if n > 1 else None
    metrics |= {"stderr": stderr, "n": n}
    if losses := [result.loss for result in results if result.loss is not None]:
        metrics["perplexity"] = perplexity(statistics.fmean(losses))
    if n_cut := sum(result.cut for result in results):
        metrics["n_cut"] = n_cut
    return metrics


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """The scores of a task in one line."""
    scores = [
        f"{score} {format_score(metrics, score)}" for score in SCORES if metrics[score] is not None
    ]
    return f"{', '.join(scores)} in {metrics['n']:,} examples{describe_cut(metrics)}"


def describe_cut(metrics: Mapping[str, Any]) -> str:
    """How many examples could not be asked as a whole, in words; empty if none."""
    n_cut = metrics.get("n_cut")
    return (
        f", {n_cut:,} with a choice longer than the context, of which the end is scored"
        if n_cut
        else ""
    )


def format_score(metrics: Mapping[str, Any], score: str) -> str:
    """A score in percent with its standard error; - if the task does not have it."""
    if metrics[score] is None:
        return "-"
    error = metrics["stderr"][score]
    return f"{metrics[score]:.2%}" + ("" if error is None else f" ± {error:.2%}")
