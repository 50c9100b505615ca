"""Sampling: the cache, random draws, settings, streamed text."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import ConfigError
from megatoken.base.system.device import Device
from megatoken.convert.hf.export import write_hf
from megatoken.inference import generate as generate_module
from megatoken.inference.generate import TextStream, generate, generate_ids, prepare_decoding
from megatoken.inference.kv_cache import KeyValueCache
from megatoken.inference.sampling import Sampling, choose_ids, cumulative_sum
from megatoken.model.gpt import GPT
from megatoken.model.native.int8 import Int8Matrix
from megatoken.model.native.selection import find_library
from megatoken.text.tokenizer import load_tokenizer
from tests import tiny_model
from tests.conftest import Call
from tests.convert.models import FAMILIES, draw_model, llama_tokenizer
from tests.tiny_model import enlarge

TINY = ModelConfig(n_layer=3, n_head=4, d_model=32, d_ff=128, vocab_size=50, seq_len=64)
MODELS = {"gpt": TINY} | {
    name: replace(config, n_layer=3, n_head=4, n_kv_head=2, vocab_size=50, seq_len=64)
    for name, config in (
        ("llama", tiny_model.TINY_LLAMA),
        ("modern", tiny_model.TINY_MODERN),
        ("gemma", tiny_model.TINY_GEMMA),
        ("olmo", tiny_model.TINY_OLMO),
    )
}
TINY_LLAMA = MODELS["llama"]
CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


def build(model_config: ModelConfig = TINY, seed: int = 0) -> GPT:
    return enlarge(GPT(model_config, seed=seed)).eval()


@settings(deadline=None, max_examples=15)
@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    rows=st.integers(1, 3),
    model_config=st.sampled_from([*MODELS.values()]),
)
def test_cached_pieces_of_any_size_equal_the_full_forward(
    cuts: list[int], rows: int, model_config: ModelConfig
):
    model = build(model_config)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, TINY.vocab_size, (rows, sum(cuts)), generator=generator)
    pieces = cached_logits(model, ids, cuts)
    torch.testing.assert_close(pieces, model.logits(ids), rtol=1e-5, atol=1e-5)


def cached_logits(model: GPT, ids: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """Return the logits of ids that a model reads in pieces."""
    rows, length = ids.shape
    dtype = model.tokens.weight.dtype
    cache = KeyValueCache(model.config, rows=rows, capacity=length, dtype=dtype, device=CPU)
    with torch.no_grad():
        logits = [model.lm_head(model(piece, cache)) for piece in ids.split(cuts, dim=1)]
    assert cache.length == length
    return torch.cat(logits, dim=1).float()


SMALL = ModelConfig(n_layer=2, n_head=2, d_model=32, d_ff=64, vocab_size=90, seq_len=8)
IDS = torch.arange(8)[None]


def test_decoding_in_the_device_s_precision_is_near_fp32(device: Device):
    plain, prepared = GPT(SMALL), GPT(SMALL)
    expected = plain.logits(IDS)
    prepare_decoding(prepared, device)
    assert prepared.lm_head_weight.dtype == device.dtype
    tolerance = 0.02
    if device.precision == "fp32":  # wide weights are transposed
        tolerance = 1e-5
        assert not prepared.blocks[1].mlp.up.weight.is_contiguous()
        torch.testing.assert_close(prepared.state_dict(), plain.state_dict(), rtol=0, atol=0)
    for logits in (prepared.logits(IDS).float(), cached_logits(prepared, IDS, [1] * 8)):
        torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(find_library() is None, reason="the native kernels are not compiled")
@pytest.mark.parametrize("tied", [False, True])
def test_decoding_in_8_bits_is_near_fp32(tied: bool, device: Device):
    config = replace(SMALL, tie_embeddings=tied)
    low = GPT(config)
    prepare_decoding(low, device, int8=True)
    for weight in (low.blocks[1].mlp.down.weight, low.lm_head_weight):
        assert isinstance(weight, Int8Matrix)
    assert low.tokens.weight.dtype == device.dtype
    expected = GPT(config).logits(IDS)
    error = cached_logits(low, IDS, [1] * 8) - expected
    assert error.square().mean() < 0.02**2 * expected.square().mean()


def test_8_bits_without_kernels_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generate_module, "find_library", lambda: None)
    with pytest.raises(ConfigError):
        prepare_decoding(GPT(TINY), tiny_model.CPU, int8=True)


def slide(ids: list[int], prompt: int, context: int) -> list[int]:
    """Return the ids the model sees: all, until the context is full; then all but a quarter."""
    first = max(prompt - context, 0)
    start = 0
    for end in range(prompt + 1, len(ids) + 1):  # with each new id
        if end - max(first, start) > context:
            start = end - max(3 * context // 4, 1)
    return ids[max(first, start) :]


WINDOWS = [(name, 16, prompt) for name in MODELS for prompt in (5, 25)]


@pytest.mark.parametrize(
    ("name", "context", "prompt"), [*WINDOWS, ("gpt", 7, 3), ("gemma", 2, 1), ("modern", 1, 4)]
)
def test_beyond_the_context_the_window_slides(name: str, context: int, prompt: int):
    model = build(replace(MODELS[name], seq_len=context))
    ids = [(7 * i) % 50 for i in range(prompt)]
    [new_ids] = generate_ids(model, ids, Sampling(max_new_tokens=20, temperature=0))
    for _ in range(20):
        visible = slide(ids, prompt, context)
        assert len(visible) <= context
        with torch.no_grad():
            ids.append(int(model.logits(torch.tensor([visible]))[0, -1].argmax()))
    assert new_ids == ids[prompt:]


def test_a_deterministic_run_adds_probabilities_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    """CUDA's cumsum of floats is not deterministic."""
    devices = []

    def cumsum(x, dim):
        devices.append(x.device.type)
        return torch.cumsum(x, dim)

    monkeypatch.setattr(torch.Tensor, "cumsum", cumsum)
    try:
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            with FakeTensorMode():
                assert cumulative_sum(torch.empty(2, 5, device="cuda")).device.type == "cuda"
    finally:
        torch.use_deterministic_algorithms(False)
    assert devices == ["cuda", "cpu"]


# Temperature, top_k and top_p, and the ids that they keep of 4. 1e-46 and 5e-324 are 0 in fp32.
KEPT = """\
1.0 2 1.0    02
1.0 0 1.0    023
1.0 0 0.6    02
1.0 0 0.5    0
1.0 3 0.9    023
1.0 99 1.0   023
1e-46 0 1.0  0
5e-324 0 1.0 0
1.0 0 1e-46  0
"""


@pytest.mark.parametrize("row", KEPT.splitlines())
def test_top_k_and_top_p_keep_the_likeliest(row: str):
    temperature, top_k, top_p, ids = row.split()
    kept = [*map(int, ids)]
    probabilities = torch.tensor([0.5, 1e-9, 0.3, 0.2])
    expected = torch.zeros(4)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    draws = (torch.arange(8_000) + 0.5) / 8_000
    logits = probabilities.log().expand(8_000, 4)
    chosen = choose_ids(logits, draws, float(temperature), int(top_k), float(top_p))
    torch.testing.assert_close(chosen.bincount(minlength=4) / 8_000, expected, rtol=0, atol=1e-3)


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.05, 50),
    top_k=st.sampled_from([0, 1, 7]),
    top_p=st.sampled_from([1.0, 0.9, 0.1]),
)
def test_any_draw_gives_an_id_with_probability(seed: int, **options: Any):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 33, generator=generator) * 30
    logits[:, ::3] = -torch.inf
    draws = torch.tensor([0.0, 0.5, 1 - 2**-24, float(torch.rand((), generator=generator))])
    ids = choose_ids(logits, draws, **options)
    assert torch.isfinite(logits.gather(1, ids[:, None])).all()


def test_a_training_model_keeps_its_mode_its_random_state_and_its_gradients():
    model = GPT(replace(TINY, dropout=0.5)).train()
    before = torch.get_rng_state()
    first, again = (generate_ids(model, [1], Sampling(10, seed=1)) for _ in range(2))
    assert first == again
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), before)
    model(torch.tensor([[1, 2]])).sum().backward()
    assert model.tokens.weight.grad is not None


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=40).map(str.encode) | st.lists(st.integers(0, 256)))
def test_streamed_text_is_the_text_and_never_a_cut_character(ids: list[int]):
    tokenizer = load_tokenizer("bytes")
    stream, text = TextStream(tokenizer), tokenizer.decode(ids)
    pieces = [stream.push(id) for id in ids]
    assert "".join(pieces) + stream.push(None) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_sentencepiece_keeps_the_space_after_the_prompt_and_begins_with_begin_of_text(
    tmp_path: Path, call: Call
):
    tokenizer = llama_tokenizer()
    config = replace(FAMILIES["llama-untied"], n_kv_head=2, vocab_size=tokenizer.vocab_size)
    model = draw_model(config)
    prompt = tokenizer.encode("the king").tolist()
    their = int(tokenizer.encode("their")[0])
    with torch.no_grad():
        hidden = model(torch.tensor([[1, *prompt]]))[0, -1]
        model.head.weight.zero_()
        model.head.weight[their] = hidden  # the likeliest word after <s> and the prompt
    [ids] = generate_ids(model, [1, *prompt], Sampling(max_new_tokens=4, temperature=0))
    assert ids[0] == their
    expected = tokenizer.decode([*prompt, *ids]).removeprefix("the king")
    assert expected.startswith(" their")
    assert generate(model, tokenizer, "the king", max_new_tokens=4, temperature=0) == expected
    folder = tmp_path / "gpt2"  # also the name of a vocabulary
    folder.mkdir()
    write_hf(folder, model, tokenizer, "fp32")
    with contextlib.chdir(tmp_path):
        out = call("sample gpt2 'the king' --tokens 4 --temperature 0")[1]
    assert out == f"the king{expected}\n"


def test_text_is_the_decoded_ids_and_sample_i_is_the_one_of_seed_plus_i():
    tokenizer = load_tokenizer("bytes")
    model = build(replace(TINY, vocab_size=tokenizer.vocab_size))

    def sample(prompt, seed=4, tokens=9):
        sampling = Sampling(tokens, seed=seed, stop_ids=(tokenizer.eot,))
        return generate_ids(model, prompt, sampling)[0]

    first, second = (sample([*b"cat"], seed) for seed in (4, 5))
    assert first != second
    assert sample([*b"cat"], tokens=6) == first[:6]
    texts = [*map(tokenizer.decode, (first, second))]
    assert generate(model, tokenizer, "cat", max_new_tokens=9, seed=4, num_samples=2) == texts
    assert generate(model, tokenizer, "cat", max_new_tokens=9, seed=4) == texts[0]
    ends = tokenizer.with_files({"generation_config.json": f'{{"eos_token_id": [{first[3]}]}}'})
    ended = generate(model, ends, "cat", max_new_tokens=9, seed=4)
    assert ended == tokenizer.decode(first[: first.index(first[3])])
    text = generate(model, tokenizer, "", max_new_tokens=9, seed=4)
    assert text == tokenizer.decode(sample([tokenizer.eot]))
