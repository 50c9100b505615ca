"""Define the architecture of a model by its sizes and switches, which determine the loss curve."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from megatoken.config.fields import config_field

VOCAB_MULTIPLE = 128  # pads the embedding's rows, so that matrix kernels tile evenly
SWIGLU_MULTIPLE = 256  # LLaMA rounds the width of its MLP up to it
# Features that are off in GPT-2 and LLaMA.
SWITCHES = (
    "qk_norm",
    "embedding_norm",
    "residual_scales",
    "value_embeddings",
    "logit_softcap",
    "window",
)
IF_ROTARY = "model.pos_emb=rotary"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture of a model.

    In a config, `vocab_size` and `d_ff` may be 0 until `resolve` fills them in. Two instances are
    equal if they describe the same network, even if their preset or initial weights differ.
    """

    preset: str = config_field(
        "", "published architecture to start from; the fields below override it", compare=False
    )
    n_layer: int = config_field(12, "transformer blocks", low=1)
    n_head: int = config_field(12, "attention heads; must divide d_model", low=1)
    n_kv_head: int = config_field(
        0, "key/value heads, each shared by n_head / n_kv_head queries; 0: n_head", low=0
    )
    d_model: int = config_field(768, "width of the residual stream", low=1)
    d_ff: int = config_field(
        0, "width of the MLP; 0: 4 x d_model, or 8/3 of it (multiple of 256) for swiglu", low=0
    )
    vocab_size: int = config_field(
        0, "vocabulary size before padding to a multiple of 128; 0: the tokenizer's", low=0
    )
    seq_len: int = config_field(1024, "context length", "tokens", low=1)
    norm: Literal["layernorm", "rmsnorm"] = config_field(
        "layernorm", "normalization: GPT-2's or LLaMA's"
    )
    norm_eps: float = config_field(1e-5, "added to the variance", low=0.0, open_low=True)
    pos_emb: Literal["learned", "rotary"] = config_field(
        "learned", "position embedding: learned, or rotary on queries and keys"
    )
    rope_theta: float = config_field(
        10000.0, "rotary base", low=1.0, open_low=True, only_if=IF_ROTARY
    )
    rope_factor: float = config_field(
        1.0,
        "rotary scaling (LLaMA 3.1): factor of the longest wavelengths",
        low=1.0,
        only_if=IF_ROTARY,
    )
    rope_low: float = config_field(
        1.0, "rotary scaling: full below this many turns in rope_context", "turns", low=0.0
    )
    rope_high: float = config_field(
        4.0, "rotary scaling: none above this many turns in rope_context", "turns", low=0.0
    )
    rope_context: int = config_field(
        8192, "rotary scaling: context length before scaling", "tokens", low=1
    )
    mlp: Literal["gelu", "gelu-erf", "relu2", "swiglu"] = config_field(
        "gelu",
        "activation: tanh GELU (GPT-2), exact GELU (nanoGPT), squared ReLU, or SwiGLU (LLaMA)",
    )
    bias: bool = config_field(True, "biases in linear layers and LayerNorm")
    tie_embeddings: bool = config_field(True, "share the token embedding with the output layer")
    qk_norm: bool = config_field(False, "normalize the queries and keys of each head")
    embedding_norm: bool = config_field(False, "normalize the embedding before the first block")
    residual_scales: bool = config_field(
        False, "block input: learned mix of the residual stream and the embedding"
    )
    value_embeddings: bool = config_field(
        False, "add gated token embeddings to the values of every other layer"
    )
    logit_softcap: float = config_field(
        0.0, "logits become cap x tanh(logits / cap); 0: no cap", low=0.0, high=1000.0
    )
    window: int = config_field(
        0, "sliding window of S layers, including the query; 0: full attention", "tokens", low=0
    )
    window_pattern: str = config_field(
        "SSSL",
        "layers with a window (S) and without (L), repeated; the last layer has none",
        only_if="model.window!=0",
    )
    value_head: bool = config_field(
        False, "a scalar per token: the score of a reward model, the value of ppo; starts at 0"
    )
    zero_init: bool = config_field(
        False,
        "start projections into the residual stream and an untied output layer at 0",
        compare=False,
    )
    dropout: float = config_field(
        0.0, "dropout probability in training", low=0.0, high=0.99, compare=False
    )
    init: str = config_field(
        "", "initial weights: run folder, or Hugging Face folder or name", compare=False
    )
    vocab_multiple: int = VOCAB_MULTIPLE

    def resolve(self, vocab_size: int) -> "ModelConfig":
        """Return the same architecture with values for `vocab_size` and `d_ff` if they are 0."""
        d_ff = self.d_ff or default_d_ff(self.d_model, self.mlp)
        return replace(self, vocab_size=self.vocab_size or vocab_size, d_ff=d_ff)

    def architecture(self) -> dict[str, Any]:
        """Return the fields that define the network, by name; n_kv_head is never 0."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        return values | {"n_kv_head": self.kv_heads}

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_head

    @property
    def kv_heads(self) -> int:
        """The number of key/value heads; n_head / kv_heads query heads share each of them."""
        return self.n_kv_head or self.n_head

    @property
    def switched_on(self) -> list[str]:
        """The names of enabled features that neither GPT-2 nor LLaMA has."""
        return [name for name in SWITCHES if getattr(self, name)]

    @property
    def windows(self) -> list[int]:
        """The attention window of each layer in tokens; 0 for full attention."""
        pattern = self.window_pattern
        layers = range(self.n_layer - 1)
        return [self.window * (pattern[i % len(pattern)] == "S") for i in layers] + [0]

    @property
    def value_embedding_layers(self) -> range:
        """The indices of layers with value embeddings: every other layer, including the last."""
        return range((self.n_layer - 1) % 2, self.n_layer, 2) if self.value_embeddings else range(0)

    @property
    def qkv_rows(self) -> list[int]:
        """The numbers of rows for queries, keys and values in the packed projection."""
        return [heads * self.d_head for heads in (self.n_head, self.kv_heads, self.kv_heads)]

    @property
    def padded_vocab_size(self) -> int:
        """The number of rows of the embedding: `vocab_size` rounded up to `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


def default_d_ff(d_model: int, mlp: str) -> int:
    """Return the MLP's default width: 4 * d_model, or for SwiGLU 8/3 * d_model, rounded up.

    SwiGLU has three matrices instead of two. With these widths, both kinds of MLP have about the
    same number of parameters.
    """
    if mlp != "swiglu":
        return 4 * d_model
    return -(-(8 * d_model // 3) // SWIGLU_MULTIPLE) * SWIGLU_MULTIPLE


def describe_heads(model: ModelConfig) -> str:
    """Describe the attention heads in words."""
    grouped = f" ({model.kv_heads} key/value)" if model.kv_heads != model.n_head else ""
    return f"{model.n_head} heads{grouped}"


def validate_model(model: ModelConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each conflict between fields as (setting, problem, how to fix it)."""
    if model.d_model % model.n_head:
        problem = f"{model.n_head} heads do not divide d_model {model.d_model}"
        yield "model.n_head", problem, f"choose a divisor of {model.d_model}"
    elif model.pos_emb == "rotary" and model.d_head % 2:
        problem = f"rotary embedding needs an even head size, got {model.d_head}"
        yield "model.n_head", problem, "make d_model / n_head even"
    if model.n_head % model.kv_heads:
        problem = f"{model.n_head} heads cannot share {model.n_kv_head} key/value heads evenly"
        yield "model.n_kv_head", problem, f"choose a divisor of {model.n_head}"
    if not re.fullmatch("[SL]+", model.window_pattern):
        yield "model.window_pattern", f"unknown pattern {model.window_pattern!r:.80}", "use S and L"
    if model.rope_factor > 1 and model.rope_low >= model.rope_high:
        problem = f"rope_low {model.rope_low:g} is not below rope_high {model.rope_high:g}"
        yield "model.rope_low", problem, "LLaMA 3.1 has 1 and 4"
