"""The growing cache: bounded memory, and prompts that begin with an earlier sequence."""

from dataclasses import replace

import pytest
import torch

from megatoken.inference.batch import BatchDecoder, Request, Token
from megatoken.inference.kv_cache import PrefixStore, token_bytes
from megatoken.inference.sampling import Sampling
from tests.inference.test_batch import complete_alone
from tests.inference.test_generate import MODELS, TINY_LLAMA, build

pytestmark = pytest.mark.usefixtures("one_thread")


def finish(decoder: BatchDecoder) -> list[Token]:
    """Return the tokens of the sequences that are left."""
    tokens = []
    while decoder.keys:
        tokens += decoder.step()
    return tokens


def test_sequences_within_the_bound_are_decoded_at_once():
    requests = [Request([3, 1, 4 + i], Sampling(12 + i, temperature=i / 4)) for i in range(7)]
    n_at_once = []
    with BatchDecoder(build(TINY_LLAMA), rows=7, cache_tokens=48) as decoder:
        for key, request in enumerate(requests):
            while not decoder.fits(request):
                last = decoder.step()[0]
            decoder.add(key, request)
            n_at_once.append(len(decoder.keys))
    assert n_at_once == [1, 2, 3, 2, 2, 2, 2]
    assert last.finish_reason == "length"


@pytest.mark.parametrize("name", MODELS)
def test_second_turn_reuses_the_first(name: str):
    model = build(MODELS[name])
    prompt = [3, 1, 4, 1, 5]
    with BatchDecoder(model, rows=2, cache_tokens=200) as decoder:

        def decode(ids, cached):
            request = Request(ids, Sampling(6, temperature=0))
            decoder.add(1, request)
            tokens = finish(decoder)
            assert tokens[0].cached == cached
            new_ids = [token.id for token in tokens]
            assert new_ids == complete_alone(model, request).ids
            return new_ids

        turn = [*prompt, *decode(prompt, 0), 7, 8]
        # The last token of an answer was not fed to the model, nor is a prompt's last reused.
        for ids, cached in ((turn, 10), (turn, 12), ([*turn[:8], 40], 8), (prompt, 4)):
            decode(ids, cached)


def test_cache_grows_with_the_tokens_and_is_freed():
    model = build(replace(TINY_LLAMA, seq_len=4096))
    with BatchDecoder(model, rows=64) as decoder:
        assert decoder.cached_tokens == 0
        decoder.add(0, Request([1] * 10, Sampling(600)))
        for _ in range(590):
            decoder.step()
            assert decoder.cached_tokens <= 2 * (10 + 600)
        for key in range(1, 33):
            decoder.add(key, Request([1], Sampling(2)))
        decoder.step()
        assert decoder.cached_tokens <= 1.5 * 33 * (600 + 256)
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
    for size in (10, 0):
        store.shrink(size)
        assert store.tokens == size


def test_token_bytes_are_those_of_the_tensors():
    with BatchDecoder(build(TINY_LLAMA), rows=1) as decoder:
        decoder.add(0, Request([1, 2], Sampling(3)))
        decoder.step()
        n_bytes = sum(layer.nbytes for layer in decoder._cache._layers)
        _, rows, _, capacity, _ = decoder._cache._layers[0].shape
    assert n_bytes == token_bytes(TINY_LLAMA, torch.float32) * rows * capacity
