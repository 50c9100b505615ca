"""Sequences decoded together equal those decoded alone, whenever others join and leave."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import ConfigError, DataError
from megatoken.base.system.device import Device
from megatoken.inference import batch
from megatoken.inference.batch import BatchDecoder, Completion, Request, generate_batch
from megatoken.inference.generate import generate_ids, prepare_decoding
from megatoken.inference.sampling import Sampling
from megatoken.model.gpt import GPT
from tests.inference.test_generate import MODELS, TINY_LLAMA, build

pytestmark = pytest.mark.usefixtures("one_thread")
# Length of the prompt, which may be beyond the context of 64 or slide it, and its options.
TABLE = """\
5 {"max_new_tokens": 30, "seed": 1}
1 {"max_new_tokens": 12, "temperature": 0, "stop_ids": [7]}
9 {"max_new_tokens": 25, "temperature": 0.7, "top_k": 5, "seed": 2, "stop_ids": [11, 12, 13, 14, 15, 16]}
5 {"max_new_tokens": 8, "top_p": 0.8, "seed": 3}
5 {"max_new_tokens": 20, "temperature": 2, "top_k": 9, "top_p": 0.9, "seed": 18446744073709551621, "stop_ids": [1, 2, 3, 4]}
40 {"max_new_tokens": 50, "seed": 4}
100 {"max_new_tokens": 20, "seed": 6}
1 {"max_new_tokens": 1, "seed": 7}
"""
REQUESTS = [
    Request([7 * i % 50 for i in range(int(length))], Sampling(**json.loads(options)))
    for length, options in (line.split(maxsplit=1) for line in TABLE.splitlines())
]


def complete_alone(model: GPT, request: Request, device: Device | None = None) -> Completion:
    """Return what `generate_ids` without stop ids gives, cut at the first stop id."""
    sampling = replace(request.sampling, stop_ids=())
    [ids] = generate_ids(model, request.prompt_ids, sampling, device=device)
    for i, id in enumerate(ids):
        if id in request.sampling.stop_ids:
            return Completion(ids[:i], [], "stop", id)
    return Completion(ids)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> GPT:
    return build(MODELS[request.param])


def test_each_sequence_is_what_it_is_alone(model: GPT):
    alone = [complete_alone(model, request) for request in REQUESTS]
    assert {each.finish_reason for each in alone} == {"stop", "length"}
    for rows in (3, 64):
        tokens = []
        assert generate_batch(model, REQUESTS, rows=rows, on_token=tokens.append) == alone
        for row, completion in enumerate(alone):
            assert [token.id for token in tokens if token.key == row] == completion.ids


@settings(deadline=None, max_examples=8)
@given(
    config=st.sampled_from(list(MODELS.values())),
    requests=st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=9),
    pauses=st.lists(st.integers(0, 6), min_size=9, max_size=9),
    removed=st.integers(0, 8),
    cache_tokens=st.sampled_from([64, 150, 1000]),
    fixed=st.booleans(),
)
def test_sequences_join_and_leave_at_any_time(
    config: ModelConfig, requests: list[Request], pauses: list[int], removed: int,
    cache_tokens: int, fixed: bool,
):  # fmt: skip
    model = build(config)
    ids = [[] for _ in requests]
    with BatchDecoder(model, rows=4, cache_tokens=cache_tokens) as decoder:
        decoder._is_fixed = fixed  # the steps that graphs capture on CUDA

        def step():
            for token in decoder.step():
                ids[token.key].append(token.id)
            assert decoder.cached_tokens <= decoder._bound

        for number, (request, pause) in enumerate(zip(requests, pauses, strict=False)):
            while not decoder.fits(request):
                step()
            decoder.add(number, request)
            for _ in range(pause):
                step()
            if number == removed:
                decoder.remove(number)
                assert number not in decoder.keys
        while decoder.keys:
            step()
        assert decoder.step() == []
    for number, request in enumerate(requests):
        expected = with_stop(complete_alone(model, request))
        assert ids[number] == (expected[: len(ids[number])] if number == removed else expected)


def with_stop(completion: Completion) -> list[int]:
    """Return the ids with the stop id, if there is one."""
    return completion.ids + ([] if completion.stop_id is None else [completion.stop_id])


@pytest.mark.parametrize("fixed", [False, True])
def test_log_probabilities_are_those_of_the_full_forward(
    model: GPT, fixed: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batch, "supports_graphs", lambda _: fixed)
    requests = [replace(REQUESTS[i], logprobs=i != 1) for i in (2, 1, 0)]
    for request, completion in zip(requests, generate_batch(model, requests), strict=True):
        ids = with_stop(completion)
        with torch.no_grad():
            logits = model.logits(torch.tensor([[*request.prompt_ids, *ids]]))[0]
        logits = logits[len(request.prompt_ids) - 1 : -1] / request.sampling.temperature
        expected = logits.log_softmax(-1)[range(len(ids)), ids].tolist()
        expected = expected if request.logprobs else []
        assert completion.logprobs == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("prepared", [True, False])
def test_in_the_device_s_precision(prepared: bool, device: Device):
    """Also in bf16 with fp32 weights, as in training without a low-precision copy of them."""
    model = build(replace(TINY_LLAMA, n_layer=1))
    if prepared:
        prepare_decoding(model, device)
    requests = [
        replace(request, sampling=replace(request.sampling, max_new_tokens=6))
        for request in REQUESTS[:4]
    ]
    alone = [complete_alone(model, each, device) for each in requests]
    assert generate_batch(model, requests, device=device) == alone


def test_wrong_requests_are_refused_and_the_others_continue(model: GPT):
    assert generate_batch(model, []) == []
    wrong = {(): ConfigError, (1, 50): DataError, (-1,): DataError}
    with BatchDecoder(model, rows=2) as decoder:
        decoder.add(0, Request([1, 2], Sampling(3)))
        for ids, error in wrong.items():
            with pytest.raises(error):
                decoder.add(1, Request([*ids], Sampling(3)))
        assert decoder.keys == [0]
        assert [len(decoder.step()) for _ in range(4)] == [1, 1, 1, 0]
