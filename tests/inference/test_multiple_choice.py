"""Multiple-choice predictions equal the reference scorer's."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatoken.base.errors import ConfigError, DataError
from megatoken.inference.multiple_choice import (
    ExampleResult,
    compute_metrics,
    encode_examples,
    encode_prompt,
    read_tasks,
    score_examples,
)
from megatoken.inference.settings import TasksConfig
from megatoken.inference.tasks import Example, find_tasks, read_examples
from megatoken.text.tokenizer import load_tokenizer
from tests.convert.models import llama_tokenizer
from tests.inference.reference_scorer import CPU, SINGLE, log_probabilities, make_model, predict
from tests.inference.test_scorer import EXAMPLES
from tests.tiny_run import write_jsonl

BYTES = load_tokenizer("bytes")


def list_predictions(results: list[ExampleResult]) -> list[tuple[int | None, ...]]:
    return [(result.pred, result.pred_norm, result.pred_token_mean) for result in results]


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_predictions_equal_the_reference(real_data: Path, count: int):
    path = real_data / "hellaswag_val_sample.jsonl"
    sample = read_examples(find_tasks("hellaswag"), path)["hellaswag"][:count]
    contexts = [context for example in sample for context, _ in example.prompts]
    tokenizer = load_tokenizer("bpe:900", lambda: iter(contexts))
    model = make_model(tokenizer.vocab_size, seq_len=180)
    results = score_examples(model, encode_examples(sample, tokenizer, 180), CPU, SINGLE)
    expected = [predict(model, tokenizer, example) for example in sample]
    assert list_predictions(results) == expected
    lengths = [len(tokenizer.encode("".join(example.prompts[0]))) for example in sample]
    assert sum(length > 181 for length in lengths) > count / 25  # truncated from the left
    assert len(set(expected)) > 20


def test_first_of_equal_choices_wins_and_an_empty_choice_never_does():
    equal = Example((("say", " this"), ("say", " thing"), ("say", " this")), 2, (4, 5, 4))
    empty = Example((("say", " "), ("say", " something long")), 1, (0, 14))
    encoded = encode_examples([equal, empty], BYTES, 256)
    results = score_examples(make_model(), encoded, CPU, SINGLE)
    assert 2 not in list_predictions(results)[0]
    assert results[1].pred_norm == 1


def test_token_may_span_context_and_choice():
    tokenizer = load_tokenizer("bpe:300", lambda: iter(["lower lowest low " * 50]))
    lo, west, lowest = (tokenizer.encode(word).tolist() for word in ("lo", "west", "lowest"))
    assert lowest[: len(lo)] != lo
    for together, ids, n_targets in (
        (True, lowest, len(lowest) - len(lo)),
        (False, lo + west, len(west)),
    ):
        encoded = encode_prompt(("lo", "west"), tokenizer, 64, together=together)
        assert (encoded.ids, encoded.n_targets) == (ids, n_targets)


@pytest.mark.parametrize("together", [True, False])
def test_begin_of_text_is_added_if_the_tokenizer_has_one(together: bool):
    tokenizer = llama_tokenizer()
    assert (tokenizer.bos_ids, BYTES.bos_ids) == ([1], [])
    encoded = encode_prompt(("the", " king"), tokenizer, 64, together=together)
    prefix = [1, *tokenizer.encode("the")]
    assert encoded.ids[: len(prefix)] == prefix
    assert encoded.n_targets == len(encoded.ids) - len(prefix)
    assert encode_prompt(("", "king"), tokenizer, 64, together=together).ids[0] == 1


def test_choice_longer_than_the_context_is_cut_from_the_left_and_counted():
    fits = Example((("ab", " c"), ("ab", " d")), gold=0, lengths=(2, 2))
    encoded = encode_examples([EXAMPLES[0], fits], BYTES, 8)
    results = score_examples(make_model(seq_len=8), encoded, CPU, SINGLE)
    assert [result.cut for result in results] == [True, False]
    ending = "".join(EXAMPLES[0].prompts[0]).encode()[-8:]
    assert encoded[0].tree.n_targets[0] == 8
    assert encoded[0].tree.targets[:8].tolist() == [*ending]
    metrics, alone = compute_metrics(results), compute_metrics(results[1:])
    assert (metrics["n"], metrics["n_cut"], alone["n"]) == (2, 1, 1)
    assert "n_cut" not in alone
    assert alone["stderr"]["acc"] is None
    with pytest.raises(DataError, match=r"tasks\.jsonl:1"):
        encode_examples([replace(fits, prompts=(("ab", ""),), where="tasks.jsonl:1")], BYTES, 8)


def test_a_task_with_a_question_mark_may_lack_examples(tmp_path: Path):
    write_jsonl(tmp_path / "lambada.jsonl", [{"text": "the word"}])
    warnings = []

    def read(tasks):
        config = TasksConfig(tasks=tasks, tasks_data=str(tmp_path))
        return [*read_tasks(config, BYTES, 256, warnings.append)]

    assert read("hellaswag?, lambada") == ["lambada"]
    assert len(warnings) == 1
    for tasks, error in ("hellaswag,lambada?", DataError), ("helaswag?", ConfigError):
        with pytest.raises(error):
            read(tasks)
    assert len(warnings) == 1


def test_cloze_is_correct_if_greedy_decoding_writes_it(tmp_path: Path):
    model = make_model()
    with torch.no_grad():
        likeliest = int(model.logits(torch.tensor([[*b"the word "]]))[0, -1, :127].argmax())
    words = (likeliest, likeliest ^ 1)
    write_jsonl(tmp_path / "lambada.jsonl", [{"text": f"the word {chr(id)}"} for id in words])
    config = TasksConfig(tasks="lambada", tasks_data=str(tmp_path))
    examples = read_tasks(config, BYTES, 256, pytest.fail)["lambada"]
    results = score_examples(model, examples, CPU, SINGLE)
    assert {result.pred for result in results} <= {0, -1}
    assert (results[0].pred_norm, results[0].pred_token_mean) == (None, None)
    losses = [-float(log_probabilities(model, [*b"the word"], [32, id]).sum()) for id in words]
    assert [result.loss for result in results] == pytest.approx(losses, rel=1e-5)
    perplexity = math.exp(sum(losses) / 2)
    assert compute_metrics(results)["perplexity"] == pytest.approx(perplexity, rel=1e-5)
