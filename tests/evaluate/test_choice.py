"""The scorer against its plain twin: the same choice in every example, whatever is batched, cut, compiled or shared."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatoken.config import Evaluate
from megatoken.data.tokenizer import load_tokenizer
from megatoken.errors import Exit, Fault
from megatoken.evaluate.choice import answer_questions, encode_pair, grade, read_exams, read_questions
from megatoken.evaluate.rows import read_examples
from megatoken.evaluate.score import plan_batches, score_trees
from megatoken.evaluate.tasks import Example, find_tasks
from megatoken.evaluate.tree import Asked, build_tree
from megatoken.model.gpt import GPT, initialize
from megatoken.parallel.ranks import Ranks
from megatoken.parallel.topology import Topology
from megatoken.presets import Shape
from tests.evaluate.plain import ALONE, CPU, choose, harness_ids, log_probabilities

BYTES = load_tokenizer("bytes")


LLAMA = {"n_kv_head": 1, "norm": "rmsnorm", "positions": "rotary", "mlp": "swiglu", "bias": False, "tied": False}


def make_model(vocab_size: int = 257, seq_len: int = 256, **switches: Any) -> GPT:
    """Weights large enough that choices differ clearly."""
    shape = Shape(n_layer=2, n_head=2, d_model=16, d_ff=32, vocab_size=vocab_size, seq_len=seq_len, **switches)
    model = GPT(shape)
    initialize(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0 if parameter.dim() > 1 else 1.0)
    return model


@pytest.fixture(scope="module")
def sample(real_data: Path) -> list[Example]:
    return read_examples(find_tasks("hellaswag"), real_data / "hellaswag_val_sample.jsonl")["hellaswag"]


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_all_choices_are_those_of_the_rules(sample: list[Example], count: int) -> None:
    sample = sample[:count]
    tokenizer = load_tokenizer("bpe:900", lambda: (context for example in sample for context, _ in example.prompts))
    model = make_model(tokenizer.vocab_size, seq_len=180)
    answers = answer_questions(model, read_questions(sample, tokenizer, 180), CPU, ALONE)
    expected = [choose(model, tokenizer, example) for example in sample]
    assert len(answers) == count
    assert [(answer.pred, answer.pred_norm, answer.pred_token_mean) for answer in answers] == expected
    lengths = [len(tokenizer.encode("".join(example.prompts[0]))) for example in sample]
    assert sum(length > 181 for length in lengths) > count / 25  # and these were cut off from the left
    assert len(set(expected)) > 20


def test_choices_under_gpt2s_vocabulary(
    sample: list[Example], real_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(real_data / "tiktoken"))
    tokenizer, model = load_tokenizer("gpt2"), make_model(50257)
    answers = answer_questions(model, read_questions(sample[:12], tokenizer, 256), CPU, ALONE)
    expected = [choose(model, tokenizer, example) for example in sample[:12]]
    assert [(answer.pred, answer.pred_norm, answer.pred_token_mean) for answer in answers] == expected


EXAMPLES = [
    Example((("to be or", " not to be"), ("to be or", " that"), ("to be or", " not to see")), 1, (9, 4, 10)),
    Example((("a context with spaces  ", " x"), ("a context with spaces  ", " yes")), 0, (1, 3)),
    Example((("", " nothing before"), ("", " it")), 1, (14, 2)),
    Example((("long " * 40, " end"), ("long " * 40, " of it all")), 1, (3, 9)),
]


def sums_of(model: GPT, examples: list[Example], ranks: Ranks = ALONE) -> list[list[float]]:
    trees = [question.tree for question in read_questions(examples, BYTES, model.shape.seq_len)]
    return [sums.log_p.tolist() for sums in score_trees(model, trees, CPU, ranks)]


@pytest.mark.parametrize("switches", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("seq_len", [256, 48])
def test_log_likelihoods_are_those_of_single_sequences(seq_len: int, switches: dict[str, Any]) -> None:
    model = make_model(seq_len=seq_len, **switches)
    for example, sums in zip(EXAMPLES, sums_of(model, EXAMPLES), strict=True):
        for prompt, log_p in zip(example.prompts, sums, strict=True):
            context, continuation = harness_ids(prompt, BYTES) if prompt[0] else ([BYTES.eot], [*prompt[1].encode()])
            assert log_p == pytest.approx(float(log_probabilities(model, context, continuation).sum()), rel=1e-5)


def test_equal_choices_are_equal_to_the_bit_and_the_first_wins() -> None:
    twice = [Example((("say", " this"), ("say", " thing"), ("say", " this")), 2, (4, 5, 4)), *EXAMPLES]
    model = make_model()
    assert sums_of(model, twice)[0][0] == sums_of(model, twice)[0][2]
    answer = answer_questions(model, read_questions(twice, BYTES, 256), CPU, ALONE)[0]
    assert 2 not in (answer.pred, answer.pred_norm, answer.pred_token_mean)


def test_an_empty_choice_is_never_the_best_by_characters() -> None:
    example = Example((("say", " "), ("say", " something long")), 1, (0, 14))
    assert answer_questions(make_model(), read_questions([example], BYTES, 64), CPU, ALONE)[0].pred_norm == 1


def test_tokens_may_span_context_and_choice() -> None:
    tokenizer = load_tokenizer("bpe:300", lambda: iter(["lower lowest low " * 50]))
    asked = encode_pair(("low", "est"), tokenizer)
    assert asked.ids.tolist() == tokenizer.encode("lowest").tolist()
    assert asked.count == len(asked.ids) - len(tokenizer.encode("low"))


def test_a_tokenizer_that_opens_texts_does_so_here(tmp_path: Path) -> None:
    """As LLaMA's, whose begin-of-text Hugging Face's programs and the harness put before every text."""
    inner = json.loads(BYTES.to_json())
    inner["added_tokens"].append({**inner["added_tokens"][0], "id": 257, "content": "<s>"})
    piece = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<s>": {"id": "<s>", "ids": [257], "tokens": ["<s>"]}}
    inner["post_processor"] = {"type": "TemplateProcessing", "single": piece, "pair": piece, "special_tokens": special}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(inner))
    opening = load_tokenizer(str(path))
    assert (opening.opening, BYTES.opening) == ([257], [])
    assert encode_pair(("ab", " c"), opening).ids.tolist() == [257, *b"ab c"]
    assert encode_pair(("ab", " c"), opening).count == 2
    assert encode_pair(("", "c"), opening).ids.tolist() == [257, *b"c"]


def test_a_choice_longer_than_the_context_is_refused() -> None:
    with pytest.raises(Fault, match=r"a choice has 10 tokens, the model's context is 8 — tasks\.jsonl:1") as caught:
        read_questions([replace(EXAMPLES[0], place="tasks.jsonl:1")], BYTES, 8)
    assert caught.value.code == Exit.DATA


class Pretend(Ranks):
    """One of several ranks whose sums are left for the test to add."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(Topology())
        self.topology = Topology(rank=rank, world_size=world_size)

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_share_the_work_and_the_sum_is_the_same_to_the_bit(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("megatoken.evaluate.score").evaluate.score.BATCH_NODES, "cpu", 64)
    model = make_model(seq_len=48)
    parts = [sums_of(model, EXAMPLES, Pretend(rank, world_size)) for rank in range(world_size)]
    total = [np.sum([part[i] for part in parts], axis=0).tolist() for i in range(len(EXAMPLES))]
    assert total == sums_of(model, EXAMPLES)


def test_batches_hold_every_tree_once_and_stay_small() -> None:
    sizes = [5, 100, 7, 7, 90, 30, 1, 400]
    batches = plan_batches(sizes, 128)
    assert sorted(i for batch in batches for i in batch) == list(range(8))
    assert batches[0] == [7]  # larger than a batch: alone
    assert all(len(batch) * max(sizes[i] for i in batch) <= 128 for batch in batches[1:])
    assert plan_batches([], 128) == []


@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_a_compiled_model_is_scored_without_its_compiler(how: str) -> None:
    model = make_model(seq_len=48)
    expected = sums_of(model, EXAMPLES)

    def explode(*_: object) -> None:
        raise AssertionError("compiled")

    if how == "whole":
        assert sums_of(torch.compile(model, backend=explode), EXAMPLES) == expected  # type: ignore[arg-type]
    else:
        for block in model.blocks:
            block.compile(backend=explode)
        assert sums_of(model, EXAMPLES) == expected


def test_the_mode_of_the_model_is_left_as_it_was() -> None:
    model = GPT(replace(make_model().shape, seq_len=48), dropout=0.5)
    initialize(model, 0)
    first = sums_of(model, EXAMPLES)
    assert model.training
    assert sums_of(model, EXAMPLES) == first


def test_padding_ids_have_no_probability() -> None:
    model = make_model()
    before = sums_of(model, EXAMPLES)
    with torch.no_grad():
        model.tokens.weight[257:] = 100.0
    assert sums_of(model, EXAMPLES) == before


def test_a_cloze_is_right_when_it_is_what_the_model_would_write(tmp_path: Path) -> None:
    model = make_model()
    context = "the word"
    ids = [*context.encode(), 32]
    with torch.no_grad():
        model.eval()
        likeliest = int(model.logits(model(torch.tensor([ids])))[0, -1, :127].argmax())
    (tmp_path / "lambada.jsonl").write_text(
        "".join(json.dumps({"text": f"{context} {chr(id)}"}) + "\n" for id in (likeliest, likeliest ^ 1))
    )
    questions = read_exams(Evaluate(tasks="lambada", tasks_data=str(tmp_path)), BYTES, 256)["lambada"]
    trees = [build_tree([Asked(np.array([*ids, id]), 1)]) for id in (likeliest, likeliest ^ 1)]
    sums = score_trees(model, trees, CPU, ALONE, greedy=True)
    with torch.no_grad():
        scores = model.logits(model(torch.tensor([ids])))[0, -1]
    assert [bool(one.greedy[0]) for one in sums] == [int(scores.argmax()) == likeliest, False]
    answers = answer_questions(model, questions, CPU, ALONE)
    assert {answer.pred for answer in answers} <= {0, -1}
    assert answers[0].pred_norm is None
    losses = [
        -float(log_probabilities(model, [*context.encode()], [32, id]).sum()) for id in (likeliest, likeliest ^ 1)
    ]
    assert grade(answers)["perplexity"] == pytest.approx(float(np.exp(np.mean(losses))), rel=1e-5)


def test_grades_and_their_standard_errors() -> None:
    answers = answer_questions(make_model(), read_questions(EXAMPLES * 5, BYTES, 256), CPU, ALONE)
    grades = grade(answers)
    right = np.array([answer.pred == answer.gold for answer in answers], float)
    assert grades["acc"] == right.mean()
    assert grades["stderr"]["acc"] == pytest.approx(right.std(ddof=1) / np.sqrt(20))
    assert grades["n"] == 20
    assert grade(answers[:1])["stderr"] == {"acc": None, "acc_norm": None, "acc_token_mean": None}


def test_token_means_can_be_left_out() -> None:
    model = make_model()
    whole = answer_questions(model, read_questions(EXAMPLES, BYTES, 256), CPU, ALONE)
    less = answer_questions(model, read_questions(EXAMPLES, BYTES, 256, token_mean=False), CPU, ALONE)
    assert [replace(answer, pred_token_mean=None) for answer in whole] == less
    assert grade(less)["acc_token_mean"] is None
