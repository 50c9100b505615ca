"""Prefix trees hold each shared prefix once, and score as single sequences do."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.inference.multiple_choice import encode_examples
from megatoken.inference.scorer import (
    ScoredSequence,
    Tree,
    build_tree,
    plan_batches,
    score_trees,
    stack_trees,
)
from megatoken.inference.tasks import Example
from megatoken.model.gpt import GPT
from megatoken.text.tokenizer import load_tokenizer
from tests.inference.reference_scorer import CPU, SINGLE, harness_ids, log_probabilities, make_model

BYTES = load_tokenizer("bytes")
LLAMA = {"n_kv_head": 1, "norm": "rmsnorm", "pos_emb": "rotary", "mlp": "swiglu", "bias": False}
EXAMPLES = [
    Example(tuple((context, choice) for choice in choices.split("|")), gold, lengths)
    for context, choices, gold, lengths in (
        ("to be or", " not to be| that| not to see", 1, (9, 4, 10)),
        ("a context with spaces  ", " x| yes", 0, (1, 3)),
        ("", " nothing before| it", 1, (14, 2)),
        ("long " * 40, " end| of it all", 1, (3, 9)),
    )
]


def make_tree(*sequences: tuple[list[int], int]) -> Tree:
    return build_tree([ScoredSequence(ids, count) for ids, count in sequences])


def score(model: GPT, examples: list[Example]) -> list[list[float]]:
    trees = [example.tree for example in encode_examples(examples, BYTES, model.config.seq_len)]
    return [scores.log_p.tolist() for scores in score_trees(model, trees, CPU, SINGLE)]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=7), min_size=1, max_size=6),
    st.integers(1, 6),
)
def test_path_to_a_node_is_its_sequence(sequences: list[list[int]], count: int):
    counts = [min(count, len(ids) - 1) for ids in sequences]
    tree = make_tree(*zip(sequences, counts, strict=True))
    mask = stack_trees([tree], CPU.torch_device)[1].attn_mask[0, 0].numpy()
    ends = [
        (ids, -back) for ids, n in zip(sequences, counts, strict=True) for back in range(n, 0, -1)
    ]
    for (ids, end), node, target in zip(ends, tree.parents, tree.targets, strict=True):
        path = np.flatnonzero(mask[node])
        assert target == ids[end]
        assert tree.ids[path].tolist() == ids[:end]
        assert tree.positions[path].tolist() == list(range(len(ids) + end))
    prefixes = {tuple(ids[:length]) for ids in sequences for length in range(1, len(ids))}
    assert len(tree.ids) == len(prefixes)


@pytest.mark.parametrize("fields", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("seq_len", [256, 48])
def test_log_likelihoods_equal_those_of_single_sequences(seq_len: int, fields: dict[str, Any]):
    model = make_model(seq_len=seq_len, **fields)
    for example, scores in zip(EXAMPLES, score(model, EXAMPLES), strict=True):
        for (context, choice), log_p in zip(example.prompts, scores, strict=True):
            ids = harness_ids((context, choice), BYTES)
            ids = ids if context else ([BYTES.eot], [*choice.encode()])
            assert log_p == pytest.approx(float(log_probabilities(model, *ids).sum()), rel=1e-5)


def test_batches_hold_at_most_max_nodes():
    assert plan_batches([5, 100, 7, 90, 30, 400], 128) == [[5], [1], [3], [4, 2, 0]]


def test_compiled_model_is_scored_uncompiled():
    model = make_model(seq_len=48)
    expected = score(model, EXAMPLES)

    for block in model.blocks:
        block.compile(backend=pytest.fail)
    assert score(torch.compile(model, backend=pytest.fail), EXAMPLES) == expected  # type: ignore[arg-type]


def test_dropout_is_off_and_training_mode_is_restored():
    model = make_model(seq_len=48, dropout=0.5)
    first = score(model, EXAMPLES)
    assert model.training
    assert score(model, EXAMPLES) == first


def test_greedy_and_sequences_without_targets():
    model = make_model().eval()
    ids = [*b"the word "]
    argmax = int(model.logits(torch.tensor([ids]))[0, -1].argmax())
    choices = ([*ids, argmax], 1), ([*ids, argmax ^ 1], 1), ([*ids[:-1], 0, argmax], 2), (ids, 0)
    (scores,) = score_trees(model, [make_tree(*choices)], CPU, SINGLE)
    assert scores.greedy.tolist() == [True, False, False, True]
    assert scores.log_p[3] == 0.0


def test_padding_attends_to_itself_only():
    trees = [make_tree(([5, 8, 9, 0], 2)), make_tree(([1, 2], 1))]
    mask = stack_trees(trees, CPU.torch_device)[1].attn_mask
    assert mask[1, 0].int().tolist() == torch.eye(3).tolist()
