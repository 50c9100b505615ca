"""Small models with random values in every parameter, including biases and norms."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, processors

from megatoken.checkpoint.save import AsyncSave
from megatoken.config.model_config import ModelConfig
from megatoken.convert.llmc import write_llmc
from megatoken.data.tokenizer import Tokenizer, load_tokenizer
from megatoken.model.gpt import GPT
from megatoken.train.state import build_state
from tests.tiny_model import CPU, tiny_config

BYTES = 257  # ids of the byte tokenizer, not a multiple of any tile size
TINY_GPT = ModelConfig(n_layer=2, n_head=2, d_model=32, d_ff=128, vocab_size=BYTES, seq_len=24)
NANOGPT = replace(TINY_GPT, mlp="gelu-erf")
_LLAMA = replace(
    TINY_GPT,
    n_layer=3,
    n_head=4,
    n_kv_head=2,
    d_ff=96,
    norm="rmsnorm",
    norm_eps=1e-6,
    pos_emb="rotary",
    mlp="swiglu",
    bias=False,
)
_GEMMA = replace(
    _LLAMA,
    head_dim=16,
    norm_position="both",
    mlp="geglu",
    qk_norm=True,
    embedding_scale=True,
    logit_softcap=3.0,
)
WINDOWS: dict[str, Any] = {"window": 5, "window_pattern": "LSS"}
YARN: dict[str, Any] = {
    "rope_scaling": "yarn",
    "rope_factor": 4.0,
    "rope_high": 32.0,
    "rope_context": 400,
}
FAMILIES = {
    "gpt2": TINY_GPT,
    "nanogpt": replace(NANOGPT, bias=False),
    "gpt2-untied": replace(TINY_GPT, tie_embeddings=False, norm_eps=1e-6),
    "llama-tied": replace(
        _LLAMA, rope_theta=500.0, rope_factor=8.0, rope_context=12
    ),  # scaled as LLaMA 3.1 is
    "llama-untied": replace(_LLAMA, n_kv_head=1, tie_embeddings=False),
    "llama-biased": replace(_LLAMA, n_kv_head=0, bias=True),
    "qwen3-tied": replace(_LLAMA, qk_norm=True, rope_theta=1e6, rope_factor=8.0, rope_context=12),
    "qwen3-untied": replace(_LLAMA, qk_norm=True, tie_embeddings=False, zero_init=True),
    "qwen3-wide": replace(_LLAMA, qk_norm=True, head_dim=16, **WINDOWS, **YARN),
    "llama-attention-bias": replace(_LLAMA, bias=True, bias_in="attention", head_dim=4),
    "llama-mlp-bias": replace(
        _LLAMA, bias=True, bias_in="mlp", rope_factor=4.0, rope_scaling="linear"
    ),
    "llama-yarn": replace(_LLAMA, **YARN, rope_attention=1.3),
    "llama-geglu": replace(_LLAMA, mlp="geglu"),
    "qwen2": replace(_LLAMA, bias=True, bias_in="qkv"),
    "qwen2-windows": replace(_LLAMA, bias=True, bias_in="qkv", **WINDOWS),
    "mistral": replace(_LLAMA, head_dim=16, window=5, window_pattern="SSS"),
    "smollm3": replace(_LLAMA, nope_interval=2, rope_theta=2e6, **WINDOWS),
    "olmo2": replace(
        _LLAMA, norm_position="post", qk_norm=True, qk_norm_over="width", norm_eps=1e-5
    ),
    "gemma3": replace(_GEMMA, window=5, window_pattern="SLS", rope_local_theta=100.0),
    "gemma3-scaled": replace(
        _GEMMA,
        **WINDOWS,
        rope_local_theta=1e4,
        rope_factor=8.0,
        rope_scaling="linear",
        bias=True,
        bias_in="attention",
    ),
}
# Fixed settings, so that nothing is benchmarked first.
UNCHOSEN = [
    "machine.device=cpu",
    "machine.precision=fp32",
    "machine.gemm_backend=torch",
    "machine.attention=explicit",
    "machine.threads=1",
    "log.plots=false",
]


def draw_model(model_config: ModelConfig = TINY_GPT, seed: int = 0) -> GPT:
    """Return a random model whose padding rows would win every argmax if they were used."""
    model = GPT(model_config, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        for weight in (model.tokens.weight, model.lm_head_weight):
            weight[model_config.vocab_size :] = 100.0
    return model.eval()


def byte_tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


def llama_tokenizer() -> Tokenizer:
    """Return a tokenizer like LLaMA's: U+2581 begins words, <s> a text; decoding drops a space."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {
        f"<0x{byte:02X}>": byte + 3 for byte in range(256)
    }
    merges: list[tuple[str, str]] = []
    for word in ("\u2581the", "\u2581king", "\u2581their"):
        for end in range(1, len(word)):
            vocabulary.setdefault(word[end], len(vocabulary))
            vocabulary.setdefault(word[:end], len(vocabulary))
            merges += [(word[:end], word[end])] if (word[:end], word[end]) not in merges else []
        vocabulary.setdefault(word, len(vocabulary))
    inner = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(inner, "llama", 2)


def save_llmc(folder: Path, model: GPT, tokenizer: Tokenizer | None = None) -> Path:
    """Write a model as llm.c's model.bin, next to its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_tokenizer()).save(folder)
    write_llmc(folder / "model.bin", model, "fp32")
    return folder / "model.bin"


def save_run(folder: Path, model: GPT, tokenizer: Tokenizer | None = None) -> Path:
    """Write a checkpoint as a run would."""
    (tokenizer or byte_tokenizer()).save(folder / "tokenizer")
    (folder / "config.yaml").touch()
    state = build_state(model, tiny_config(), CPU)
    return AsyncSave(
        folder / "checkpoints",
        state,
        config=folder / "config.yaml",
        tokenizer=folder / "tokenizer",
        meta={},
    ).finish()


def read_fields(table: str) -> dict[str, str]:
    """Return the value of each setting of a table."""
    return dict(line.split() for line in table.strip().splitlines())


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest value."""
    return float((actual - expected).detach().abs().max() / expected.detach().abs().max())
