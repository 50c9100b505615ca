"""Sampling: the cache, random draws, settings, streamed text."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megatoken.cli.main import main
from megatoken.config.model_config import ModelConfig
from megatoken.convert.hf.export import write_hf
from megatoken.data.tokenizer import load_tokenizer
from megatoken.errors import ConfigError
from megatoken.model.gpt import GPT
from megatoken.model.kv_cache import KeyValueCache
from megatoken.native.int8 import Int8Matrix
from megatoken.native.selection import find_library
from megatoken.sampling import generate as generate_module
from megatoken.sampling.choose import Sampling, choose_ids, cumulative_sum
from megatoken.sampling.generate import TextStream, generate, generate_ids, prepare_decoding
from megatoken.system.device import Device
from tests import tiny_model
from tests.convert.models import FAMILIES, draw_model, llama_tokenizer

TINY = ModelConfig(n_layer=3, n_head=4, d_model=32, d_ff=128, vocab_size=50, seq_len=64)
TINY_LLAMA = replace(
    TINY, n_kv_head=2, norm="rmsnorm", pos_emb="rotary", mlp="swiglu", bias=False, tie_embeddings=False
)  # fmt: skip
TINY_MODERN, TINY_GEMMA, TINY_OLMO = (
    replace(config, n_layer=3, n_head=4, n_kv_head=2, vocab_size=50, seq_len=64)
    for config in (tiny_model.TINY_MODERN, tiny_model.TINY_GEMMA, tiny_model.TINY_OLMO)
)
MODELS = {"gpt": TINY, "llama": TINY_LLAMA, "modern": TINY_MODERN}
MODELS |= {"gemma": TINY_GEMMA, "olmo": TINY_OLMO}
CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


def build(model_config: ModelConfig = TINY, seed: int = 0) -> GPT:
    """Return a model with enlarged initial weights, so that logits differ."""
    model = GPT(model_config, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    return model.eval()


def build_cache(
    config: ModelConfig, rows: int = 1, capacity: int = 8, dtype: torch.dtype = torch.float32
) -> KeyValueCache:
    return KeyValueCache(config, rows=rows, capacity=capacity, dtype=dtype, device=CPU)


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
    cache = build_cache(model_config, rows=rows, capacity=sum(cuts))
    with torch.no_grad():
        pieces = torch.cat([model(piece, cache) for piece in ids.split(cuts, dim=1)], dim=1)
        full = model(ids)
    assert cache.length == sum(cuts)
    torch.testing.assert_close(pieces, full, rtol=1e-5, atol=1e-5)


SMALL = ModelConfig(n_layer=2, n_head=2, d_model=32, d_ff=64, vocab_size=90, seq_len=8)


def test_decoding_in_fp32_transposes_wide_weights():
    plain = GPT(SMALL)
    column_major = GPT(SMALL)
    prepare_decoding(column_major, tiny_model.CPU)
    assert not column_major.blocks[1].mlp.up.weight.is_contiguous()
    torch.testing.assert_close(column_major.state_dict(), plain.state_dict(), rtol=0, atol=0)
    ids = torch.arange(8)[None]
    torch.testing.assert_close(column_major(ids), plain(ids), rtol=1e-5, atol=1e-6)


def decode_one_by_one(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    cache = build_cache(model.config, dtype=model.tokens.weight.dtype)
    logits = [model.lm_head(model(id, cache)) for id in ids.split(1, 1)]
    return torch.cat(logits, 1).float()


def test_decoding_in_bf16_is_near_fp32():
    plain = GPT(SMALL)
    low = GPT(SMALL)
    prepare_decoding(low, replace(tiny_model.CPU, precision="bf16"))
    assert low.lm_head_weight.dtype == torch.bfloat16
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        expected = plain.logits(ids)
        for logits in (low.logits(ids).float(), decode_one_by_one(low, ids)):
            torch.testing.assert_close(logits, expected, rtol=0.02, atol=0.02)


@pytest.mark.skipif(find_library() is None, reason="the native kernels are not compiled")
def test_decoding_in_8_bits_is_near_fp32(device: Device):
    for tied in (False, True):
        config = replace(SMALL, tie_embeddings=tied)
        low = GPT(config)
        prepare_decoding(low, device, int8=True)
        assert isinstance(low.blocks[1].mlp.down.weight, Int8Matrix)
        assert isinstance(low.lm_head_weight, Int8Matrix)
        assert low.tokens.weight.dtype == device.dtype
        ids = torch.arange(8)[None]
        with torch.inference_mode():
            expected = GPT(config).logits(ids)
            error = decode_one_by_one(low, ids) - expected
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
    expected = list(ids)
    for _ in range(30):
        visible = slide(expected, prompt, context)
        assert len(visible) <= context
        with torch.no_grad():
            expected.append(int(model.logits(torch.tensor([visible]))[0, -1].argmax()))
    [new_ids] = generate_ids(model, ids, Sampling(max_new_tokens=30, temperature=0))
    assert new_ids == expected[prompt:]


def test_note_on_tokens_beyond_the_context():
    tokenizer = load_tokenizer("bytes")
    model = build(replace(TINY, vocab_size=257))
    with pytest.warns(UserWarning, match="65"):
        text = generate(model, tokenizer, "a" + "b" * 64, max_new_tokens=3, temperature=0)
    assert text == generate(model, tokenizer, "b" * 64, max_new_tokens=3, temperature=0)


def test_a_deterministic_run_adds_probabilities_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    """CUDA's cumsum of floats is not deterministic."""
    devices: list[str] = []
    cumsum = torch.Tensor.cumsum
    monkeypatch.setattr(
        torch.Tensor, "cumsum", lambda x, dim: (devices.append(x.device.type), cumsum(x, dim))[1]
    )
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            with FakeTensorMode():
                assert cumulative_sum(torch.empty(2, 5, device="cuda")).device.type == "cuda"
        finally:
            torch.use_deterministic_algorithms(False)
    assert devices == ["cuda", "cpu"]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "expected"),
    [
        (1.0, 2, 1.0, [0.625, 0.0, 0.375, 0.0]),
        (1.0, 0, 1.0, [0.5, 0.0, 0.3, 0.2]),
        (1.0, 0, 0.6, [0.625, 0.0, 0.375, 0.0]),
        (1.0, 0, 0.5, [1.0, 0.0, 0.0, 0.0]),
        (1.0, 3, 0.9, [0.5, 0.0, 0.3, 0.2]),
        (1.0, 99, 1.0, [0.5, 0.0, 0.3, 0.2]),
        *((tiny, 0, 1.0, [1.0, 0.0, 0.0, 0.0]) for tiny in (1e-46, 5e-324)),  # 0 in fp32
        (1.0, 0, 1e-46, [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_top_k_and_top_p_keep_the_likeliest(
    temperature: float, top_k: int, top_p: float, expected: list[float]
):
    logits = torch.tensor([0.5, 1e-9, 0.3, 0.2]).log().expand(8_000, 4)
    draws = (torch.arange(8_000) + 0.5) / 8_000
    shares = (
        torch.bincount(choose_ids(logits, draws, temperature, top_k, top_p), minlength=4) / 8_000
    )
    torch.testing.assert_close(shares, torch.tensor(expected), rtol=0, atol=1e-3)


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
    model = GPT(replace(TINY, dropout=0.5))
    model.train()
    before = torch.get_rng_state()
    first = generate_ids(model, [1], Sampling(max_new_tokens=10, seed=1))
    assert model.training
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), before)
    assert first == generate_ids(model, [1], Sampling(max_new_tokens=10, seed=1))
    assert torch.is_grad_enabled()
    model(torch.tensor([[1, 2]])).sum().backward()
    assert model.tokens.weight.grad is not None


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}]
)
def test_settings_out_of_range(options: dict[str, float]):
    with pytest.raises(ConfigError):
        Sampling(**options)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=40).map(str.encode) | st.lists(st.integers(0, 256)))
def test_streamed_text_is_the_text_and_never_a_cut_character(ids: list[int]):
    tokenizer = load_tokenizer("bytes")
    stream, text = TextStream(tokenizer), tokenizer.decode(ids)
    pieces = [stream.push(id) for id in ids]
    assert "".join(pieces) + stream.push(None) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_sentencepiece_keeps_the_space_after_the_prompt_and_begins_with_begin_of_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    ids = generate_ids(model, [1, *prompt], Sampling(max_new_tokens=4, temperature=0))[0]
    assert ids[0] == their
    expected = tokenizer.decode([*prompt, *ids]).removeprefix("the king")
    assert expected.startswith(" their")
    assert generate(model, tokenizer, "the king", max_new_tokens=4, temperature=0) == expected
    folder = tmp_path / "gpt2"  # also the name of a vocabulary
    folder.mkdir()
    write_hf(folder, model, tokenizer, "fp32")
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        assert (content["bos_token_id"], content["eos_token_id"]) == (1, 2)
    with contextlib.chdir(tmp_path):
        assert main(["sample", "gpt2", "the king", "--tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == f"the king{expected}\n"


def test_text_is_the_decoded_ids_and_sample_i_is_the_one_of_seed_plus_i():
    tokenizer = load_tokenizer("bytes")
    model = build(replace(TINY, vocab_size=tokenizer.vocab_size))

    def sample(prompt: list[int], seed: int, tokens: int = 9) -> list[int]:
        return generate_ids(model, prompt, Sampling(tokens, seed=seed, stop_ids=(tokenizer.eot,)))[
            0
        ]

    samples = [sample([*b"cat"], seed) for seed in (4, 5)]
    assert samples[0] != samples[1]
    assert sample([*b"cat"], 4, tokens=6) == samples[0][:6]
    texts = [tokenizer.decode(ids) for ids in samples]
    assert generate(model, tokenizer, "cat", max_new_tokens=9, seed=4, num_samples=2) == texts
    assert generate(model, tokenizer, "cat", max_new_tokens=9, seed=4) == texts[0]
    text = generate(model, tokenizer, "", max_new_tokens=9, seed=4)
    assert text == tokenizer.decode(sample([tokenizer.eot], 4))
