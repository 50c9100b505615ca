"""Compares a model in another program with ours: numbers, greedy text, tokens."""

import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatoken.convert.load_pretrained import LoadedModel
from megatoken.sampling.generate import generate_ids

TEXT = "ROMEO: why, they're 12 cafés\n\nAnd the   rest — is silence.\n"
PROMPT, NEW = 4, 24


def take_ids(loaded: LoadedModel) -> list[int]:
    """The text's ids, of which the first PROMPT are a prompt; NEW more fit into the context."""
    return loaded.tokenizer.encode(TEXT).tolist()[: loaded.model.config.seq_len - NEW]


def report(
    loaded: LoadedModel, found: Tensor, expected: Tensor, greedy: Sequence[int], tokens: Sequence[int], **facts: Any
) -> None:
    """Print the comparison as a line of JSON; AssertionError when they differ. found and expected: for the same ids."""
    ids = take_ids(loaded)
    answer = {
        "model": loaded.source,
        "tokens": len(ids),
        "max_relative_difference": float((found - expected).abs().max() / expected.abs().max()),
        "same_greedy_text": list(greedy)
        == generate_ids(loaded.model, ids[:PROMPT], max_new_tokens=NEW, temperature=0)[0],
        "same_tokens": list(tokens) == loaded.tokenizer.encode(TEXT).tolist(),
        **facts,
    }
    print(json.dumps(answer))
    assert answer["max_relative_difference"] < 1e-4
    assert answer["same_greedy_text"]
    assert answer["same_tokens"]
