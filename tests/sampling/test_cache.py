"""The growing cache: bounded memory, and prompts that begin with an earlier sequence."""

import math
from dataclasses import replace

import pytest
import torch

from megatoken.model.kv_cache import PrefixStore, token_bytes
from megatoken.sampling.batch import BatchDecoder, Request, Token
from megatoken.sampling.choose import Sampling
from tests.sampling.test_batch import MODELS, complete_alone
from tests.sampling.test_generate import TINY_LLAMA, build

pytestmark = pytest.mark.usefixtures("one_thread")


def step(decoder: BatchDecoder, tokens: dict[int, list[Token]]) -> None:
    """Append each sequence's next token; check the bound."""
    for token in decoder.step():
        tokens.setdefault(token.row, []).append(token)
    assert decoder.cached_tokens <= decoder._bound


def finish(decoder: BatchDecoder) -> dict[int, list[Token]]:
    """Return each sequence's tokens."""
    tokens: dict[int, list[Token]] = {}
    while decoder.rows:
        step(decoder, tokens)
    return tokens


@pytest.mark.parametrize("name", MODELS)
def test_sequences_within_the_bound_end_as_alone(name: str):
    model = build(MODELS[name])
    requests = [Request([3, 1, 4 + i], Sampling(12 + i, temperature=i / 4)) for i in range(7)]
    tokens: dict[int, list[Token]] = {}
    n_at_once = []
    with BatchDecoder(model, rows=7, cache_tokens=48) as decoder:
        for key, request in enumerate(requests):
            while not decoder.fits(request):
                step(decoder, tokens)
            decoder.add(key, request)
            n_at_once.append(len(decoder.rows))
        while decoder.rows:
            step(decoder, tokens)
    assert n_at_once == [1, 2, 3, 2, 2, 2, 2]
    for key, request in enumerate(requests):
        ids = [token.id for token in tokens[key]]
        assert ids == complete_alone(model, request).ids
        assert [token.finish_reason for token in tokens[key]][-1] == "length"


@pytest.mark.parametrize("name", MODELS)
def test_second_turn_reuses_the_first(name: str):
    model = build(MODELS[name])
    prompt = [3, 1, 4, 1, 5]
    greedy = Sampling(6, temperature=0)
    with BatchDecoder(model, rows=2, cache_tokens=200) as decoder:
        decoder.add(0, Request(prompt, greedy))
        first = finish(decoder)[0]
        assert [token.cached for token in first] == [0] * 6
        turn = [*prompt, *(token.id for token in first), 7, 8]
        other = [*turn[:8], 40]
        for key, ids in enumerate((turn, turn, other, prompt), start=1):
            decoder.add(key, Request(ids, greedy))
            [tokens] = finish(decoder).values()
            # The last token of an answer was not fed to the model, nor is a prompt's last reused.
            assert tokens[0].cached == [10, 12, 8, 4][key - 1]
            expected = complete_alone(model, Request(ids, greedy))
            assert [token.id for token in tokens] == expected.ids


def test_cache_grows_with_the_tokens_and_is_freed():
    model = build(replace(TINY_LLAMA, seq_len=4096))
    with BatchDecoder(model, rows=64) as decoder:
        assert decoder.cached_tokens == 0
        decoder.add(0, Request([1] * 10, Sampling(600)))
        for _ in range(590):
            decoder.step()
            assert decoder.cached_tokens <= 2 * (10 + 600)
        rows = [decoder.add(key, Request([1], Sampling(2))) for key in range(1, 33)]
        decoder.step()
        assert decoder.cached_tokens <= 1.5 * (1 + len(rows)) * (600 + 256)
        finish(decoder)
        assert decoder.cached_tokens == 0


def test_least_recently_used_sequence_is_dropped_first():
    store = PrefixStore()
    for start in (10, 20, 30):
        store.add([start, 1, 2, 3], torch.zeros(1))
    assert store.find([10, 1, 9])[0] == 2
    store.shrink(8)
    assert [store.find([start, 1, 2, 3, 4])[0] for start in (10, 20, 30)] == [4, 0, 4]
    store.add([30, 1, 2, 3, 4, 5], torch.zeros(1))  # replaces its beginning
    assert store.tokens == 10
    store.shrink(0)
    assert store.tokens == 0


def test_token_bytes_are_those_of_the_tensors():
    model = build(TINY_LLAMA)
    with BatchDecoder(model, rows=1) as decoder:
        decoder.add(0, Request([1, 2], Sampling(3)))
        decoder.step()
        tensors = decoder._cache._layers
    n_bytes = sum(tensor.nbytes for tensor in tensors)
    assert n_bytes == token_bytes(TINY_LLAMA, torch.float32) * math.prod(tensors[0].shape[1:4:2])
