"""Multiple-choice scores: acc and acc_norm as in lm-evaluation-harness, acc_token_mean as in llm.c.

Each score is the share of examples in which the predicted choice is the right one. acc predicts the
choice with the largest log-likelihood, and acc_norm the choice with the largest log-likelihood per
character; both tokenize the context and a choice together. acc_token_mean predicts the choice with
the largest mean log-likelihood per token, with the text and tokens of build-nanogpt and llm.c.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatoken.base.errors import DataError, Warn
from megatoken.base.system.device import Device
from megatoken.distributed.comm import Comm
from megatoken.inference.scorer import ScoredSequence, Tree, build_tree, score_trees
from megatoken.inference.settings import TasksConfig
from megatoken.inference.tasks import SCORES, Example, Prompt, find_tasks, read_examples
from megatoken.model.gpt import GPT
from megatoken.text.tokenizer import Tokenizer
from megatoken.train.val_loss import perplexity


@dataclass(frozen=True)
class EncodedExample:
    """An `Example` as token ids.

    tree: the prompts, for acc and acc_norm. raw_tree: the prompts for acc_token_mean, often the
    same object as `tree`; None if this score is not computed. cut: whether a choice is longer than
    the context, so that only its end is scored.
    """

    tree: Tree
    raw_tree: Tree | None
    lengths: tuple[int, ...]
    gold: int
    cut: bool


@dataclass(frozen=True)
class ExampleResult:
    """The choice predicted under each score, or None for a score that the task does not have.

    For a cloze, which has only one choice, `pred` is 0 if greedy decoding produces it and else -1,
    and `loss` is its loss in nats.
    """

    pred: int
    pred_norm: int | None
    pred_token_mean: int | None
    gold: int
    loss: float | None
    cut: bool


def read_tasks(
    config: TasksConfig, tokenizer: Tokenizer, seq_len: int, warn: Warn
) -> dict[str, list[EncodedExample]]:
    """Return the encoded examples of every task in a config, by task name.

    A task whose name ends with `?` is skipped with a warning if its examples cannot be read. Raises
    ConfigError for an unknown task, and DataError for missing or malformed examples.
    """
    data = Path(config.tasks_data) if config.tasks_data else None
    encoded = {}
    for name in config.task_names:
        (task,) = find_tasks(name.removesuffix("?"))
        try:
            examples = read_examples([task], data, config.tasks_limit)[task.name]
        except DataError as error:
            if not name.endswith("?"):
                raise
            warn(f"{task.name} is not scored: {error}")
            continue
        encoded[task.name] = encode_examples(examples, tokenizer, seq_len)
    return encoded


def encode_examples(
    examples: Sequence[Example], tokenizer: Tokenizer, seq_len: int, *, token_mean: bool = True
) -> list[EncodedExample]:
    """Encode examples, truncated from the left to fit `seq_len` as in lm-evaluation-harness.

    token_mean: whether to encode for acc_token_mean as well. This score uses different text in
    HellaSwag, which doubles the cost of that task. Raises DataError for a choice without tokens.
    """

    def encode(prompts: Sequence[Prompt], where: str, *, together: bool) -> tuple[Tree, bool]:
        sequences = [
            encode_prompt(prompt, tokenizer, seq_len, together=together) for prompt in prompts
        ]
        counts = [sequence.n_targets for sequence in sequences]
        if min(counts) < 1:
            raise DataError("a choice has no tokens", where)
        tree = build_tree(
            [
                sequence._replace(n_targets=min(sequence.n_targets, seq_len))
                for sequence in sequences
            ]
        )
        return tree, max(counts) > seq_len

    encoded = []
    for example in examples:
        tree, cut = encode(example.prompts, example.where, together=True)
        raw_tree = tree if token_mean else None
        raw_cut = False
        if token_mean and example.raw_prompts:
            raw_tree, raw_cut = encode(example.raw_prompts, example.where, together=False)
        encoded.append(
            EncodedExample(tree, raw_tree, example.lengths, example.gold, cut or raw_cut)
        )
    return encoded


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer, seq_len: int, *, together: bool
) -> ScoredSequence:
    """Return a prompt's token ids, after begin-of-text if there is one, truncated from the left.

    The last seq_len + 1 ids are kept; n_targets is the number of targets before this truncation.
    together: whether to encode context and continuation as one text, as lm-evaluation-harness does;
    a token may then span both, and trailing spaces of the context count as continuation. Otherwise,
    the two are encoded separately, as in build-nanogpt and llm.c. An empty context becomes the
    end-of-text token.
    """
    context, continuation = prompt
    prefix = tokenizer.encode(context.rstrip() if together else context)
    if together:
        ids = tokenizer.encode(context + continuation).tolist()
    else:
        ids = [*prefix.tolist(), *tokenizer.encode(continuation).tolist()]
    bos = tokenizer.bos_ids or ([] if len(prefix) else [tokenizer.eot])
    return ScoredSequence([*bos, *ids][-(seq_len + 1) :], len(ids) - len(prefix))


def score_examples(
    model: GPT,
    examples: Sequence[EncodedExample],
    device: Device,
    comm: Comm,
    on_batch: Callable[[], None] | None = None,
) -> list[ExampleResult]:
    """Score all examples; return the results on every rank. on_batch: as in `score_trees`."""
    raw_trees = [example.raw_tree for example in examples if example.raw_tree]
    trees = list(dict.fromkeys([*(example.tree for example in examples), *raw_trees]))
    scores = dict(zip(trees, score_trees(model, trees, device, comm, on_batch), strict=True))
    results = []
    for example in examples:
        log_p, greedy = scores[example.tree]
        raw = example.raw_tree
        pred = int(log_p.argmax())
        pred_norm = pred_token_mean = loss = None
        if example.lengths:
            pred_norm = _argmax_per_unit(log_p, example.lengths)
        if len(log_p) == 1:
            pred = 0 if greedy[0] else -1
            loss = -float(log_p[0])
        elif raw:
            pred_token_mean = _argmax_per_unit(scores[raw].log_p, raw.n_targets)
        results.append(
            ExampleResult(pred, pred_norm, pred_token_mean, example.gold, loss, example.cut)
        )
    return results


def _argmax_per_unit(log_p: NDArray[np.float64], sizes: ArrayLike) -> int:
    """Return the choice with the largest log-likelihood divided by size, the first one if tied.

    A choice of size 0 is never returned.
    """
    sizes = np.asarray(sizes)
    return int(np.where(sizes > 0, log_p / np.maximum(sizes, 1), -np.inf).argmax())


def compute_metrics(results: Sequence[ExampleResult]) -> dict[str, Any]:
    """Return a task's acc, acc_norm, acc_token_mean, stderr, n and, for a cloze, perplexity.

    A score that the task does not have is None. If a choice is longer than the context, only its
    end is scored; the number of examples with such a choice is then returned as n_cut.
    """
    metrics: dict[str, Any] = dict.fromkeys(SCORES)
    stderr: dict[str, float | None] = dict.fromkeys(SCORES)
    for score, pred in SCORES.items():
        if getattr(results[0], pred) is not None:
            correct = [float(getattr(result, pred) == result.gold) for result in results]
            metrics[score] = statistics.fmean(correct)
            stderr[score] = standard_error(correct)
    metrics |= {"stderr": stderr, "n": len(results)}
    losses = [result.loss for result in results if result.loss is not None]
    if losses:
        metrics["perplexity"] = perplexity(statistics.fmean(losses))
    n_cut = sum(result.cut for result in results)
    if n_cut:
        metrics["n_cut"] = n_cut
    return metrics


def standard_error(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation divided by √n, as lm-evaluation-harness does.

    Returns None for a single value.
    """
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """Format the scores of a task in one line."""
    scores = [
        f"{score} {format_score(metrics, score)}" for score in SCORES if metrics[score] is not None
    ]
    return f"{', '.join(scores)} in {metrics['n']:,} examples{describe_cut(metrics)}"


def describe_cut(metrics: Mapping[str, Any]) -> str:
    """Return a remark on examples with a truncated choice, or "" if there are none."""
    if "n_cut" not in metrics:
        return ""
    return f", {metrics['n_cut']:,} with a choice longer than the context (only its end is scored)"


def format_score(metrics: Mapping[str, Any], score: str) -> str:
    """Format a score in percent with its standard error; "-" if the task does not have it."""
    if metrics[score] is None:
        return "-"
    return format_share(metrics[score], metrics["stderr"][score])


def format_share(share: float, error: float | None) -> str:
    return f"{share:.2%}" + ("" if error is None else f" ± {error:.2%}")
