"""Published architectures by name.

GPT-2: Radford et al. 2019 and the released weights (the paper misprints the smallest as 117M).
GPT-3: Brown et al. 2020, table 2.1. Two rows cannot be built as printed: XL (1.3B) has 24 heads of
128 at width 2048, and here gets 16 heads; 13B has 40 heads of 128 at width 5140, and here gets
width 5120. All attention is dense, without GPT-3's alternating banded sparse layers, as in every
open reproduction.
LLaMA: Touvron et al. 2023 (2), Dubey et al. 2024 (3, 3.1), the released configurations (3.2).
llama-15m, 42m and 110m have the sizes of llama2.c's stories models; llama-5m, with grouped-query
attention and its own vocabulary, is ours.
Mistral: Jiang et al. 2023 (v0.1). Qwen2.5, Qwen3, SmolLM2, SmolLM3, OLMo 2 and Gemma 3: the
released configurations, with their longest context.
Modern: our own models with all switches of model/gpt.py. Their names count only weights that are
multiplied; value embeddings, which are looked up, give modern-124m many more parameters. modern-hf
uses only features that Qwen3 (Yang et al. 2025) has as well, so that the transformers library can
load it.
"""

from typing import Any

from megatoken.config.model_config import ModelConfig
from megatoken.suggest import suggest

GPT2_VOCABULARY = 50257


def _gpt(n_layer: int, n_head: int, d_model: int, seq_len: int) -> ModelConfig:
    return ModelConfig(
        n_layer=n_layer,
        n_head=n_head,
        d_model=d_model,
        d_ff=4 * d_model,
        seq_len=seq_len,
        vocab_size=GPT2_VOCABULARY,
    )


def _llama(
    n_layer: int,
    n_head: int,
    n_kv_head: int,
    d_model: int,
    d_ff: int,
    vocab_size: int,
    seq_len: int,
    *,
    mlp: Any = "swiglu",
    bias: bool = False,
    tie_embeddings: bool = False,
    **others: Any,
) -> ModelConfig:
    return ModelConfig(
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=0 if n_kv_head == n_head else n_kv_head,
        d_model=d_model,
        d_ff=d_ff,
        vocab_size=vocab_size,
        seq_len=seq_len,
        norm="rmsnorm",
        pos_emb="rotary",
        mlp=mlp,
        bias=bias,
        tie_embeddings=tie_embeddings,
        **others,
    )


def _modern(
    n_layer: int, n_head: int, d_model: int, seq_len: int, vocab_size: int = GPT2_VOCABULARY
) -> ModelConfig:
    return _llama(
        n_layer,
        n_head,
        n_head,
        d_model,
        4 * d_model,
        vocab_size,
        seq_len,
        mlp="relu2",
        qk_norm=True,
        embedding_norm=True,
        residual_scales=True,
        value_embeddings=True,
        zero_init=True,
        logit_softcap=15.0,
    )


def _qwen(*sizes: int) -> ModelConfig:
    return _llama(*sizes, qk_norm=True, zero_init=True)


# Names on the Hugging Face Hub.
PUBLISHED = {
    "gpt2": "gpt2-124m",
    "gpt2-medium": "gpt2-355m",
    "gpt2-large": "gpt2-774m",
    "gpt2-xl": "gpt2-1558m",
}
_V2, _V3 = 32000, 128256  # vocabularies of LLaMA 2 and 3
_VQ, _VS, _VO, _VG = 151936, 49152, 100352, 262144  # of Qwen, SmolLM2, OLMo 2 and Gemma 3
_QWEN2: dict[str, Any] = {"bias": True, "bias_in": "qkv", "rope_theta": 1e6, "norm_eps": 1e-6}
_QWEN3: dict[str, Any] = {"qk_norm": True, "head_dim": 128, "rope_theta": 1e6, "norm_eps": 1e-6}
_OLMO2: dict[str, Any] = {
    "norm_position": "post",
    "qk_norm": True,
    "qk_norm_over": "width",
    "norm_eps": 1e-6,
}
_GEMMA3: dict[str, Any] = {
    "head_dim": 256,
    "norm_position": "both",
    "norm_eps": 1e-6,
    "qk_norm": True,
    "mlp": "geglu",
    "embedding_scale": True,
    "tie_embeddings": True,
    "rope_theta": 1e6,
    "rope_local_theta": 1e4,
    "window": 512,
}
_ROPE3 = 500000.0  # LLaMA 3's base; its other scaling parameters are the defaults
PRESETS: dict[str, ModelConfig] = {
    "gpt2-124m": _gpt(12, 12, 768, 1024),
    "gpt2-355m": _gpt(24, 16, 1024, 1024),
    "gpt2-774m": _gpt(36, 20, 1280, 1024),
    "gpt2-1558m": _gpt(48, 25, 1600, 1024),
    "gpt3-125m": _gpt(12, 12, 768, 2048),
    "gpt3-350m": _gpt(24, 16, 1024, 2048),
    "gpt3-760m": _gpt(24, 16, 1536, 2048),
    "gpt3-1.3b": _gpt(24, 16, 2048, 2048),
    "gpt3-2.7b": _gpt(32, 32, 2560, 2048),
    "gpt3-6.7b": _gpt(32, 32, 4096, 2048),
    "gpt3-13b": _gpt(40, 40, 5120, 2048),
    "gpt3-175b": _gpt(96, 96, 12288, 2048),
    "llama-5m": _llama(5, 4, 2, 256, 768, 4096, 512, tie_embeddings=True),
    "llama-15m": _llama(6, 6, 6, 288, 768, _V2, 256, tie_embeddings=True),
    "llama-42m": _llama(8, 8, 8, 512, 1376, _V2, 1024, tie_embeddings=True),
    "llama-110m": _llama(12, 12, 12, 768, 2048, _V2, 1024, tie_embeddings=True),
    "llama2-7b": _llama(32, 32, 32, 4096, 11008, _V2, 4096),
    "llama2-13b": _llama(40, 40, 40, 5120, 13824, _V2, 4096),
    "llama2-70b": _llama(80, 64, 8, 8192, 28672, _V2, 4096),
    "llama3-8b": _llama(32, 32, 8, 4096, 14336, _V3, 8192, rope_theta=_ROPE3),
    "llama3-70b": _llama(80, 64, 8, 8192, 28672, _V3, 8192, rope_theta=_ROPE3),
    "llama3.1-405b": _llama(
        126, 128, 8, 16384, 53248, _V3, 131072, rope_theta=_ROPE3, rope_factor=8.0
    ),
    "llama3.2-1b": _llama(
        16, 32, 8, 2048, 8192, _V3, 131072, rope_theta=_ROPE3, rope_factor=32.0, tie_embeddings=True
    ),
    "llama3.2-3b": _llama(
        28, 24, 8, 3072, 8192, _V3, 131072, rope_theta=_ROPE3, rope_factor=32.0, tie_embeddings=True
    ),
    "mistral-7b": _llama(32, 32, 8, 4096, 14336, _V2, 32768, window=4096, window_pattern="S" * 32),
    "qwen2.5-0.5b": _llama(24, 14, 2, 896, 4864, _VQ, 32768, tie_embeddings=True, **_QWEN2),
    "qwen2.5-1.5b": _llama(28, 12, 2, 1536, 8960, _VQ, 131072, tie_embeddings=True, **_QWEN2),
    "qwen2.5-7b": _llama(28, 28, 4, 3584, 18944, 152064, 131072, **_QWEN2),
    "qwen3-0.6b": _llama(28, 16, 8, 1024, 3072, _VQ, 40960, tie_embeddings=True, **_QWEN3),
    "qwen3-1.7b": _llama(28, 16, 8, 2048, 6144, _VQ, 40960, tie_embeddings=True, **_QWEN3),
    "qwen3-4b": _llama(36, 32, 8, 2560, 9728, _VQ, 40960, tie_embeddings=True, **_QWEN3),
    "qwen3-8b": _llama(36, 32, 8, 4096, 12288, _VQ, 40960, **_QWEN3),
    "smollm2-135m": _llama(30, 9, 3, 576, 1536, _VS, 8192, tie_embeddings=True, rope_theta=1e5),
    "smollm2-360m": _llama(32, 15, 5, 960, 2560, _VS, 8192, tie_embeddings=True, rope_theta=1e5),
    "smollm2-1.7b": _llama(
        24, 32, 32, 2048, 8192, _VS, 8192, tie_embeddings=True, rope_theta=130000.0
    ),
    "smollm3-3b": _llama(
        36,
        16,
        4,
        2048,
        11008,
        _V3,
        65536,
        tie_embeddings=True,
        rope_theta=5e6,
        norm_eps=1e-6,
        nope_interval=4,
    ),
    "olmo2-1b": _llama(16, 16, 16, 2048, 8192, _VO, 4096, rope_theta=_ROPE3, **_OLMO2),
    "olmo2-7b": _llama(32, 32, 32, 4096, 11008, _VO, 4096, rope_theta=_ROPE3, **_OLMO2),
    "gemma3-270m": _llama(18, 4, 1, 640, 2048, _VG, 32768, window_pattern="SSSSSL" * 3, **_GEMMA3),
    "gemma3-1b": _llama(
        26, 4, 1, 1152, 6912, _VG, 32768, window_pattern="SSSSSL" * 4 + "SS", **_GEMMA3
    ),
    "modern-5m": _modern(5, 4, 256, 512, 4096),
    "modern-124m": _modern(12, 6, 768, 1024),
    "modern-355m": _modern(24, 8, 1024, 1024),
    "modern-hf-5m": _qwen(5, 4, 2, 256, 768, 4096, 512),
    "modern-hf-124m": _qwen(12, 6, 3, 768, 2304, GPT2_VOCABULARY, 1024),
    "modern-hf-355m": _qwen(24, 8, 4, 1024, 3072, GPT2_VOCABULARY, 1024),
}


def suggest_preset(name: str) -> str | None:
    """Return the preset that is closest to an unknown name, or None if none is close."""
    return PUBLISHED.get(name.lower()) or suggest(name, PRESETS)
