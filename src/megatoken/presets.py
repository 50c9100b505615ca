"""Model shapes by name: pure data, no torch.

GPT-2: Radford et al. 2019 and the released weights (the paper's table misprints the smallest as 117M).
GPT-3: Brown et al. 2020, table 2.1. Two entries of that table cannot be built as printed and are resolved
here: XL (1.3B) lists 24 heads of 128 at width 2048 (24 x 128 = 3072), taken as 16 heads of 128; 13B lists
width 5140 with 40 heads of 128 (= 5120), taken as 5120. Absent: GPT-3's alternating banded sparse attention
(every layer is dense here, as in every open reproduction).
LLaMA: Touvron et al. 2023 (2), Dubey et al. 2024 (3, 3.1), the released configurations (3.2). llama-15m, 42m and 110m
are the shapes of llama2.c's stories; llama-5m, with grouped queries and a vocabulary of its own, is ours.
"""

from dataclasses import dataclass

GPT2_VOCABULARY = 50257
LLAMA2_VOCABULARY = 32000
LLAMA3_VOCABULARY = 128256
VOCAB_MULTIPLE = 128  # rows of the embedding are padded to it
GATED_MULTIPLE = 256  # LLaMA rounds the width of its MLP up to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What defines a network; vocab_size counts real tokens, before padding. What is not said is as in GPT-2."""

    n_layer: int
    n_head: int
    d_model: int
    d_ff: int
    vocab_size: int
    seq_len: int
    vocab_multiple: int = VOCAB_MULTIPLE
    n_kv_head: int = 0  # heads of keys and values; 0: n_head
    norm: str = "layernorm"  # or rmsnorm
    norm_eps: float = 1e-5
    positions: str = "learned"  # or rotary
    rope_theta: float = 10000.0
    rope_factor: float = 1.0  # 1: no scaling
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_context: int = 8192
    mlp: str = "gelu"  # its tanh form, or gelu-erf, the exact one, or swiglu
    bias: bool = True
    tied: bool = True  # the output layer is the token embedding

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_head

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values, each shared by as many query heads as any other."""
        return self.n_kv_head or self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the next multiple of `vocab_multiple`, so that matrix kernels tile evenly."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


def describe_heads(shape: Shape) -> str:
    """The heads of attention, for people."""
    shared = f" over {shape.kv_heads} of keys and values" if shape.kv_heads != shape.n_head else ""
    return f"{shape.n_head} heads{shared}"


def usual_d_ff(d_model: int, mlp: str) -> int:
    """Width of the MLP where nothing is said: four times the model's, or two thirds of that for each of a pair."""
    if mlp != "swiglu":
        return 4 * d_model
    return -(-(8 * d_model // 3) // GATED_MULTIPLE) * GATED_MULTIPLE


def _gpt(n_layer: int, n_head: int, d_model: int, seq_len: int) -> Shape:
    return Shape(
        n_layer=n_layer,
        n_head=n_head,
        d_model=d_model,
        d_ff=4 * d_model,
        vocab_size=GPT2_VOCABULARY,
        seq_len=seq_len,
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
    tied: bool = False,
    rope_theta: float = 10000.0,
    rope_factor: float = 1.0,
) -> Shape:
    return Shape(
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=0 if n_kv_head == n_head else n_kv_head,
        d_model=d_model,
        d_ff=d_ff,
        vocab_size=vocab_size,
        seq_len=seq_len,
        norm="rmsnorm",
        positions="rotary",
        rope_theta=rope_theta,
        rope_factor=rope_factor,
        mlp="swiglu",
        bias=False,
        tied=tied,
    )


_V2, _V3 = LLAMA2_VOCABULARY, LLAMA3_VOCABULARY
_ROPE3 = 500000.0  # LLaMA 3's base; what it scales by, but for the factor, are the defaults of Shape
PRESETS: dict[str, Shape] = {
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
    "llama-5m": _llama(5, 4, 2, 256, 768, 4096, 512, tied=True),
    "llama-15m": _llama(6, 6, 6, 288, 768, _V2, 256, tied=True),
    "llama-42m": _llama(8, 8, 8, 512, 1376, _V2, 1024, tied=True),
    "llama-110m": _llama(12, 12, 12, 768, 2048, _V2, 1024, tied=True),
    "llama2-7b": _llama(32, 32, 32, 4096, 11008, _V2, 4096),
    "llama2-13b": _llama(40, 40, 40, 5120, 13824, _V2, 4096),
    "llama2-70b": _llama(80, 64, 8, 8192, 28672, _V2, 4096),
    "llama3-8b": _llama(32, 32, 8, 4096, 14336, _V3, 8192, rope_theta=_ROPE3),
    "llama3-70b": _llama(80, 64, 8, 8192, 28672, _V3, 8192, rope_theta=_ROPE3),
    "llama3.1-405b": _llama(126, 128, 8, 16384, 53248, _V3, 131072, rope_theta=_ROPE3, rope_factor=8.0),
    "llama3.2-1b": _llama(16, 32, 8, 2048, 8192, _V3, 131072, rope_theta=_ROPE3, rope_factor=32.0, tied=True),
    "llama3.2-3b": _llama(28, 24, 8, 3072, 8192, _V3, 131072, rope_theta=_ROPE3, rope_factor=32.0, tied=True),
}
