"""CORE (Li et al. 2024, DataComp-LM): 22 tasks in context, with the prompts of nanochat's bundle.

A bundle is a folder with core.yaml, which lists the tasks; eval_meta_data.csv, which holds the
accuracy of random answers; and eval_data with the rows of each task. A task's accuracy is rescaled
so that random answers score 0; CORE is the mean over the tasks.
"""

import csv
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatoken.base.errors import ConfigError, DataError
from megatoken.base.system.atomic_write import MALFORMED, read_small_file
from megatoken.base.system.metrics_log import Row
from megatoken.inference.multiple_choice import EncodedExample
from megatoken.inference.scorer import ScoredSequence, build_tree, count_shared
from megatoken.inference.tasks import CORE, Example, Task, read_examples
from megatoken.text.tokenizer import Tokenizer

SHUFFLE_SEED = 1337
SHOTS_SEED = 1234  # plus the index of the example


KINDS: dict[str, Callable[[Row], Example]] = {
    "multiple_choice": lambda row: Example(
        tuple((row["query"], choice) for choice in row["choices"]), row["gold"]
    ),
    "schema": lambda row: Example(
        tuple((context, row["continuation"]) for context in row["context_options"]), row["gold"]
    ),
    "language_modeling": lambda row: Example(((row["context"].strip(), row["continuation"]),), 0),
}


@dataclass(frozen=True)
class CoreTask:
    """A task of CORE. baseline: accuracy of random answers in percent."""

    kind: str
    n_shots: int
    delimiter: str  # between context and continuation
    baseline: float
    examples: Sequence[Example]


def read_bundle(folder: Path | None, limit: int = 0) -> dict[str, CoreTask]:
    """Return the tasks of a bundle by name, each with `limit` examples (0 for all), shuffled.

    Raises ConfigError if `limit` leaves too few examples to draw few-shot examples from, and
    DataError for missing or malformed files.
    """
    fix = "unpack nanochat's eval_bundle.zip and give its folder with --data"
    if folder is None:
        raise ConfigError(f"{CORE} needs its bundle of tasks", "--data", fix)
    tasks = {}
    try:
        table = read_small_file(folder / "eval_meta_data.csv").decode().splitlines()
        baselines = {row["Eval Task"]: row["Random baseline"] for row in csv.DictReader(table)}
        for row in yaml.safe_load(read_small_file(folder / "core.yaml"))["icl_tasks"]:
            name, kind, n_shots = row["label"], row["icl_task_type"], row["num_fewshot"][0]
            if 0 < limit <= n_shots:
                raise ConfigError(f"{name} has {n_shots} shots", "--limit", "raise it")
            delimiter = row.get("continuation_delimiter", " ")
            task = Task(name, KINDS[kind], "the bundle", None, "")
            examples = read_examples([task], folder / "eval_data" / row["dataset_uri"])[name]
            random.Random(SHUFFLE_SEED).shuffle(examples)
            baseline = float(baselines[name])
            tasks[name] = CoreTask(kind, n_shots, delimiter, baseline, examples[: limit or None])
    except (*MALFORMED, OSError, yaml.YAMLError) as error:
        raise DataError(f"not a bundle of {CORE}: {error!r:.200}", folder, fix) from error
    return tasks


def encode_core_task(task: CoreTask, tokenizer: Tokenizer, seq_len: int) -> list[EncodedExample]:
    """Encode the examples of a task, each after few-shot examples drawn from the others.

    A prompt begins with begin-of-text, or end-of-text if the tokenizer has none, and is truncated
    from the left to `seq_len` ids. Its targets are the ids after the prefix that all choices share,
    or, in a schema, the suffix that they share.
    """
    start = tokenizer.bos_ids or [tokenizer.eot]

    def encode(text: str) -> list[int]:
        return [*start, *tokenizer.encode(text).tolist()]

    encoded = []
    n_others = len(task.examples) - 1
    for i, example in enumerate(task.examples):
        drawn = random.Random(SHOTS_SEED + i).sample(range(n_others), task.n_shots)
        shots = [task.examples[j + (j >= i)] for j in drawn]
        prompts = [*(shot.prompts[shot.gold] for shot in shots), *example.prompts]
        texts = [f"{context}{task.delimiter}{continuation}" for context, continuation in prompts]
        lead = "".join(f"{text}\n\n" for text in texts[: task.n_shots])
        sequences = compared = [encode(lead + text) for text in texts[task.n_shots :]]
        if task.kind == "language_modeling":
            context = encode(f"{lead}{prompts[-1][0]}{task.delimiter}".strip())
            compared = [context, *sequences]
        if task.kind == "schema":
            counts = [count_shared([ids[::-1] for ids in sequences])] * len(sequences)
        else:
            counts = [len(ids) - count_shared(compared) for ids in sequences]
        scored = [
            ScoredSequence(ids[-seq_len:], min(count, len(ids) - 1, seq_len - 1))
            for ids, count in zip(sequences, counts, strict=True)
        ]
        tree = build_tree(scored)
        # nanochat's mean over no tokens is NaN, which argmin takes only if it comes first.
        means = tree if counts[0] else build_tree(scored[:1])
        encoded.append(EncodedExample(tree, means, (), example.gold, max(counts) >= seq_len))
    return encoded


def center_accuracy(task: CoreTask, metrics: Mapping[str, Any]) -> float:
    """Return a task's accuracy, rescaled so that random answers score 0 and perfect ones 1.

    The accuracy is acc_token_mean, or acc for language modeling, which has no choices.
    """
    accuracy = metrics["acc" if metrics["acc_token_mean"] is None else "acc_token_mean"]
    baseline = task.baseline / 100
    return float((accuracy - baseline) / (1 - baseline))
