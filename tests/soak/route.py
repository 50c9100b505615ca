"""What a model of ours becomes in another program: the same numbers, greedy text and tokens there, or not."""

import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatoken.interop.weights import Loaded
from megatoken.sample import generate

TEXT = "ROMEO: why, they're 12 cafés\n\nAnd the   rest — is silence.\n"
PROMPT, NEW = 4, 24


def take_ids(loaded: Loaded) -> list[int]:
    """The text's ids, of which the first PROMPT are a prompt; NEW more fit into the context."""
    return loaded.tokenizer.encode(TEXT).tolist()[: loaded.model.shape.seq_len - NEW]


def report(
    loaded: Loaded, found: Tensor, expected: Tensor, greedy: Sequence[int], tokens: Sequence[int], **facts: Any
) -> None:
    """Print the comparison as one line of JSON; AssertionError where they differ. found, expected: of the same ids."""
    ids = take_ids(loaded)
    answer = {
        "model": loaded.source,
        "tokens": len(ids),
        "max_relative_difference": float((found - expected).abs().max() / expected.abs().max()),
        "same_greedy_text": list(greedy) == generate(loaded.model, ids[:PROMPT], tokens=NEW, temperature=0)[0],
        "same_tokens": list(tokens) == loaded.tokenizer.encode(TEXT).tolist(),
        **facts,
    }
    print(json.dumps(answer))
    assert answer["max_relative_difference"] < 1e-4
    assert answer["same_greedy_text"]
    assert answer["same_tokens"]
