"""Decoding: the cache, the draws, the settings, text as it comes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.data.tokenizer import load_tokenizer
from megatoken.device import Device
from megatoken.errors import Exit, Fault
from megatoken.model.gpt import GPT, initialize
from megatoken.presets import Shape
from megatoken.sample import KeyValueCache, TextStream, choose_ids, generate

TINY = Shape(n_layer=3, n_head=4, d_model=32, d_ff=128, vocab_size=50, seq_len=64)
TINY_LLAMA = replace(TINY, n_kv_head=2, norm="rmsnorm", positions="rotary", mlp="swiglu", bias=False, tied=False)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Waking a second core costs more than these sizes take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(shape: Shape = TINY, seed: int = 0) -> GPT:
    """A model whose scores differ: initial weights, enlarged."""
    model = GPT(shape)
    initialize(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> GPT:
    return build()


def greedy_by_full_forward(model: GPT, ids: list[int], tokens: int) -> list[int]:
    with torch.no_grad():
        for _ in range(tokens):
            ids = [*ids, int(model.logits(model(torch.tensor([ids])))[0, -1].argmax())]
    return ids[-tokens:]


@settings(deadline=None, max_examples=15)
@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    rows=st.integers(1, 3),
    shape=st.sampled_from([TINY, TINY_LLAMA]),
)
def test_cached_pieces_of_any_size_equal_the_full_forward(cuts: list[int], rows: int, shape: Shape) -> None:
    model = build(shape)
    ids = torch.randint(0, TINY.vocab_size, (rows, sum(cuts)), generator=torch.Generator().manual_seed(1))
    cache = KeyValueCache(shape, rows=rows, capacity=sum(cuts), dtype=torch.float32, place=CPU)
    with torch.no_grad():
        pieces = torch.cat([model(piece, cache) for piece in ids.split(cuts, dim=1)], dim=1)
        whole = model(ids)
    assert cache.length == sum(cuts)
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [TINY, TINY_LLAMA], ids=["gpt", "llama"])
def test_greedy_equals_full_forwards(shape: Shape) -> None:
    model, prompt = build(shape), [3, 1, 4, 1, 5]
    assert generate(model, prompt, tokens=40, temperature=0) == [greedy_by_full_forward(model, prompt, 40)]


def test_the_cache_holds_the_heads_of_keys_and_values_alone() -> None:
    cache = KeyValueCache(TINY_LLAMA, rows=2, capacity=5, dtype=torch.float32, place=CPU)
    keys, values = cache.append(1, *torch.randn(2, 2, 2, 3, 8))
    assert keys.shape == values.shape == (2, 2, 3, 8)


def test_greedy_uses_the_row_product_of_large_layers_too() -> None:
    shape = Shape(n_layer=1, n_head=4, d_model=512, d_ff=2048, vocab_size=600, seq_len=24)
    large = build(shape)
    torch.set_num_threads(2)
    assert generate(large, [7, 8], tokens=16, temperature=0) == [greedy_by_full_forward(large, [7, 8], 16)]


def test_the_whole_context_can_be_filled(model: GPT) -> None:
    [ids] = generate(model, [1], tokens=TINY.seq_len - 1)
    assert len(ids) == TINY.seq_len - 1


def test_same_seed_same_ids_and_sequence_i_is_what_seed_plus_i_gives_alone(model: GPT) -> None:
    together = generate(model, [1, 2], tokens=20, seed=5, n=3)
    assert together == generate(model, [1, 2], tokens=20, seed=5, n=3)
    assert together == [generate(model, [1, 2], tokens=20, seed=5 + i)[0] for i in range(3)]
    assert len({tuple(ids) for ids in together}) == 3
    assert together[0][:8] == generate(model, [1, 2], tokens=8, seed=5)[0]


def test_top_k_one_is_greedy_and_a_small_top_p_too(model: GPT) -> None:
    greedy = generate(model, [9], tokens=12, temperature=0)
    assert generate(model, [9], tokens=12, top_k=1, seed=3) == greedy
    assert generate(model, [9], tokens=12, top_p=1e-6, seed=3) == greedy
    assert generate(model, [9], tokens=12, temperature=1e-4, seed=3) == greedy


def test_shares_of_drawn_ids_are_the_softmax() -> None:
    shares = torch.tensor([0.5, 0.0, 0.3, 0.2])
    draws = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    ids = choose_ids(shares.log().expand(20_000, 4), draws, 1.0, 0, 1.0)
    counted = torch.bincount(ids, minlength=4) / 20_000
    assert counted[1] == 0
    torch.testing.assert_close(counted, shares, rtol=0, atol=0.015)


@pytest.mark.parametrize(
    ("top_k", "top_p", "wanted"),
    [
        (2, 1.0, [0.625, 0.0, 0.375, 0.0]),
        (0, 0.6, [0.625, 0.0, 0.375, 0.0]),  # the fewest ids that hold the share: 0.5 does not, 0.8 does
        (0, 0.5, [1.0, 0.0, 0.0, 0.0]),
        (3, 0.9, [0.5, 0.0, 0.3, 0.2]),
        (99, 1.0, [0.5, 0.0, 0.3, 0.2]),
    ],
)
def test_top_k_and_top_p_keep_the_likeliest(top_k: int, top_p: float, wanted: list[float]) -> None:
    logits = torch.tensor([0.5, 1e-9, 0.3, 0.2]).log().expand(8_000, 4)
    draws = (torch.arange(8_000) + 0.5) / 8_000
    ids = choose_ids(logits, draws, 1.0, top_k, top_p)
    torch.testing.assert_close(torch.bincount(ids, minlength=4) / 8_000, torch.tensor(wanted), rtol=0, atol=1e-3)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32), st.floats(0.05, 50), st.sampled_from([0, 1, 7]), st.sampled_from([1.0, 0.9, 0.1]))
def test_any_draw_gives_an_id_with_probability(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 33, generator=generator) * 30
    logits[:, ::3] = -torch.inf
    draws = torch.tensor([0.0, 0.5, 1 - 2**-24, float(torch.rand((), generator=generator))])
    ids = choose_ids(logits, draws, temperature, top_k, top_p)
    assert torch.isfinite(logits.gather(1, ids[:, None])).all()


def test_padding_ids_are_never_drawn() -> None:
    shape = Shape(n_layer=1, n_head=2, d_model=16, d_ff=32, vocab_size=3, seq_len=256)
    model = build(shape)
    assert model.tokens.weight.shape[0] == 128
    with torch.no_grad():
        model.tokens.weight[3:] = 100.0
    drawn = {id for ids in generate(model, [0], tokens=200, temperature=5.0, n=4) for id in ids}
    assert drawn == {0, 1, 2}


def test_stop_id_ends_a_sequence_and_is_left_out(model: GPT) -> None:
    free = generate(model, [4], tokens=30, seed=2, n=2)
    stop = free[0][6]
    heard: list[list[int | None]] = []
    stopped = generate(model, [4], tokens=30, seed=2, n=2, stop_id=stop, on_tokens=heard.append)
    assert stopped == [ids[: ids.index(stop)] if stop in ids else ids for ids in free]
    assert [[row[i] for row in heard if row[i] is not None] for i in range(2)] == stopped
    assert stop not in stopped[0]


def test_a_training_model_keeps_its_mode_its_random_state_and_its_gradients() -> None:
    model = GPT(TINY, dropout=0.5)
    initialize(model, 0)
    model.train()
    before = torch.get_rng_state()
    first = generate(model, [1], tokens=10, seed=1)
    assert model.training
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), before)
    assert first == generate(model, [1], tokens=10, seed=1)
    assert torch.is_grad_enabled()
    model(torch.tensor([[1, 2]])).sum().backward()
    assert model.tokens.weight.grad is not None


def test_the_mode_comes_back_after_a_failure() -> None:
    model = build().train()
    with torch.no_grad():
        model.norm.bias[0] = torch.nan
    with pytest.raises(Fault, match=r"not finite numbers — position 2") as caught:
        generate(model, [1, 2], tokens=4)
    assert caught.value.code == Exit.NUMERICS
    assert model.training


def test_bf16_decoding_agrees_with_a_bf16_forward(model: GPT) -> None:
    device = Device(place=CPU, name="", precision="bf16", peak_flops=0.0, peak_source="unknown")
    prompt = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    cache = KeyValueCache(TINY, rows=1, capacity=8, dtype=torch.bfloat16, place=CPU)
    with torch.inference_mode(), device.autocast():
        pieces = torch.cat([model(piece, cache) for piece in prompt.split(3, dim=1)], dim=1)
        whole = model(prompt)
    torch.testing.assert_close(pieces, whole, rtol=0.05, atol=0.05)
    [ids] = generate(model, prompt[0].tolist(), tokens=5, temperature=0, device=device)
    assert len(ids) == 5


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"tokens": 0}, "tokens is 0"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"n": 0}, "n is 0"),
        ({"tokens": 62}, "prompt of 3 and 62 new tokens need 65, the model's context is 64 — .* at most 61 new"),
    ],
)
def test_settings_out_of_range(model: GPT, knobs: dict[str, float], said: str) -> None:
    with pytest.raises(Fault, match=said) as caught:
        generate(model, [1, 2, 3], **{"tokens": 5} | knobs)  # type: ignore[arg-type]
    assert caught.value.code == Exit.CONFIG


def test_prompts_that_cannot_be_continued(model: GPT) -> None:
    for ids, said, code in (
        ([], "prompt holds no tokens", Exit.CONFIG),
        ([1] * 64, "shorten the prompt to 63 tokens", Exit.CONFIG),
        ([1, 50], "token id 50 is outside the model's vocabulary of 50 — prompt position 1", Exit.DATA),
        ([-1], "token id -1", Exit.DATA),
    ):
        with pytest.raises(Fault, match=said) as caught:
            generate(model, ids, tokens=1)
        assert caught.value.code == code


@settings(deadline=None, max_examples=40)
@given(st.text(max_size=40))
def test_streamed_text_is_the_text_and_never_a_cut_character(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    stream = TextStream(tokenizer)
    ids = tokenizer.encode(text).tolist()
    pieces = [stream.push(id) for id in ids]
    assert "".join(pieces) + stream.finish() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_streamed_garbage_is_shown_like_the_whole() -> None:
    tokenizer = load_tokenizer("bytes")
    ids = np.random.default_rng(0).integers(0, 257, 400).tolist()
    stream = TextStream(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)


@dataclass
class Words:
    """A decoder that drops the space before the first word, as SentencePiece's does."""

    table: tuple[str, ...] = (" one", " two", " three")

    def decode(self, ids: list[int]) -> str:
        return "".join(self.table[id] for id in ids).removeprefix(" ")


def test_a_decoder_that_strips_the_first_space_keeps_the_others() -> None:
    stream = TextStream(Words())  # type: ignore[arg-type]
    assert "".join([stream.push(0), stream.push(1), stream.push(2), stream.finish()]) == "one two three"
