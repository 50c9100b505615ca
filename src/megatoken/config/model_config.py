"""The architecture of a network: sizes, and the switches of GPT-2, LLaMA and later ones. All of it is run-defining."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from megatoken.config.fields import config_field

VOCAB_MULTIPLE = 128  # rows of the embedding are padded to it, so that matrix kernels tile evenly
SWIGLU_MULTIPLE = 256  # LLaMA rounds the width of its MLP up to it
SWITCHES = (
    "qk_norm",
    "embedding_norm",
    "residual_scales",
    "value_embeddings",
    "logit_softcap",
    "window",
)  # off in GPT-2 and LLaMA


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture of the network.

    As a section of a config, `vocab_size` and `d_ff` may be 0; `resolve` fills them in. Two configs are equal when
    they describe the same network, whatever preset or weights they start from.
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
        0, "width of the MLP; 0: 4 x d_model, with swiglu 8/3 of it up to a multiple of 256", low=0
    )
    vocab_size: int = config_field(
        0, "token ids the model knows, before padding to 128; 0: the tokenizer's", low=0
    )
    seq_len: int = config_field(1024, "context length", "tokens", low=1)
    norm: Literal["layernorm", "rmsnorm"] = config_field("layernorm", "GPT-2's or LLaMA's")
    norm_eps: float = config_field(1e-5, "added to the variance", low=0.0, open_low=True)
    pos_emb: Literal["learned", "rotary"] = config_field(
        "learned", "position embedding: learned, or rotary on queries and keys", alias="positions"
    )
    rope_theta: float = config_field(
        10000.0, "rotary: base of the wavelengths", low=1.0, open_low=True
    )
    rope_factor: float = config_field(
        1.0, "rotary scaling: how much longer the longest wavelengths become", low=1.0
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
        "GPT-2's tanh GELU, the exact GELU of nanoGPT, squared ReLU, or LLaMA's SwiGLU (three matrices)",
    )
    bias: bool = config_field(True, "biases in linear layers and LayerNorm")
    tie_embeddings: bool = config_field(
        True, "the output layer is the token embedding", alias="tied"
    )
    qk_norm: bool = config_field(False, "normalize the queries and keys of each head")
    embedding_norm: bool = config_field(False, "normalize the embedding before the first block")
    residual_scales: bool = config_field(
        False,
        "each block's input is a learned multiple of the residual stream plus one of the embedding",
    )
    value_embeddings: bool = config_field(
        False,
        "every other layer adds an embedding of the token to its values, by a learned gate for each head",
    )
    logit_softcap: float = config_field(
        0.0, "bound on logits: x becomes bound tanh(x / bound); 0: none", low=0.0, high=1000.0
    )
    window: int = config_field(
        0,
        "tokens that a query sees in layers with a window, itself among them; 0: all in every layer",
        "tokens",
        low=0,
    )
    window_pattern: str = config_field(
        "SSSL", "layers with a window (S) and without (L), repeated; the last has none"
    )
    value_head: bool = config_field(
        False,
        "a number for every token: the score of a reward model, the expected reward of ppo; starts at 0",
    )
    zero_init: bool = config_field(
        False,
        "projections into the residual stream, and an output layer of its own, start at 0",
        compare=False,
    )
    dropout: float = config_field(
        0.0, "dropout probability in training", low=0.0, high=0.99, compare=False
    )
    init: str = config_field(
        "", "start from the weights of this run or Hugging Face folder or name", compare=False
    )
    vocab_multiple: int = VOCAB_MULTIPLE

    def resolve(self, vocab_size: int) -> "ModelConfig":
        """The same architecture with every size known, for a tokenizer of `vocab_size` ids."""
        d_ff = self.d_ff or default_d_ff(self.d_model, self.mlp)
        return replace(self, vocab_size=self.vocab_size or vocab_size, d_ff=d_ff)

    def architecture(self) -> dict[str, Any]:
        """The fields that define the network, by name; the default number of key/value heads spelled out."""
        names = [f.name for f in fields(self) if f.compare]
        return {name: value for name, value in asdict(self).items() if name in names} | {
            "n_kv_head": self.kv_heads
        }

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_head

    @property
    def kv_heads(self) -> int:
        """Key/value heads; each is shared by n_head / kv_heads query heads (grouped-query attention)."""
        return self.n_kv_head or self.n_head

    @property
    def switched_on(self) -> list[str]:
        """The names of what GPT-2 and LLaMA do not compute."""
        return [name for name in SWITCHES if getattr(self, name)]

    @property
    def windows(self) -> list[int]:
        """The window of each layer, 0 for none."""
        short = [
            self.window_pattern[layer % len(self.window_pattern)] == "S"
            for layer in range(self.n_layer - 1)
        ]
        return [*(self.window * is_short for is_short in short), 0]

    @property
    def value_embedding_layers(self) -> range:
        """The layers with value embeddings: every other one, the last among them."""
        return range((self.n_layer - 1) % 2, self.n_layer, 2) if self.value_embeddings else range(0)

    @property
    def qkv_rows(self) -> list[int]:
        """Rows of the queries, keys and values that one projection packs."""
        return [heads * self.d_head for heads in (self.n_head, self.kv_heads, self.kv_heads)]

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the next multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


def default_d_ff(d_model: int, mlp: str) -> int:
    """Width of the MLP where none is given: 4 x d_model, or 8/3 of it (rounded up) for SwiGLU's three matrices."""
    if mlp != "swiglu":
        return 4 * d_model
    return -(-(8 * d_model // 3) // SWIGLU_MULTIPLE) * SWIGLU_MULTIPLE


def describe_heads(model: ModelConfig) -> str:
    """The attention heads in words."""
    shared = f" over {model.kv_heads} of keys and values" if model.kv_heads != model.n_head else ""
    return f"{model.n_head} heads{shared}"


def validate_model(model: ModelConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (key, what is wrong, what to do) for each rule between the fields that is broken."""
    if model.d_model % model.n_head:
        what = f"{model.n_head} heads do not divide d_model {model.d_model}"
        yield (
            "model.n_head",
            what,
            f"nearest that do: {nearest_divisors(model.n_head, model.d_model)}",
        )
    elif model.pos_emb == "rotary" and model.d_model // model.n_head % 2:
        what = f"rotary embedding needs an even head size, got {model.d_model // model.n_head}"
        yield "model.n_head", what, "make d_model / n_head even, or set model.pos_emb=learned"
    if model.n_kv_head and model.n_head % model.n_kv_head:
        what = f"{model.n_head} heads cannot share {model.n_kv_head} of keys and values evenly"
        yield (
            "model.n_kv_head",
            what,
            f"nearest that divide: {nearest_divisors(model.n_kv_head, model.n_head)}",
        )
    if not re.fullmatch("[SL]+", model.window_pattern):
        what = f"window_pattern {model.window_pattern!r:.80} is not made of S and L"
        yield (
            "model.window_pattern",
            what,
            "write it as SSSL: three layers with a window, one without",
        )
    if model.rope_factor > 1 and model.rope_low >= model.rope_high:
        what = f"rope_low {model.rope_low:g} is not below rope_high {model.rope_high:g}"
        yield "model.rope_low", what, "LLaMA 3.1 has 1 and 4"


def nearest_divisors(value: int, whole: int, low: int = 1) -> str:
    """The three divisors of `whole`, from `low` on, nearest to `value`, in words; empty where there is none."""
    divisors = [d for d in range(low, min(whole, 1 << 20) + 1) if whole % d == 0]
    return ", ".join(map(str, sorted(sorted(divisors, key=lambda d: abs(d - value))[:3])))
