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
    "smear",
    "backout",
    "logit_softcap",
    "window",
    "embedding_scale",
    "norm_position",
    "qk_norm_over",
    "bias_in",
    "rope_scaling",
    "nope_interval",
)
GATED = ("swiglu", "geglu")  # MLPs with a gate
ADDED = ("value_head", "lora_rank", "lora_alpha")  # fields that model.init does not set
IF_ROTARY = "model.pos_emb=rotary"
IF_SCALED = "model.rope_factor!=1.0"
# The parts of a model that have biases, by the value of bias_in.
BIASED = {
    "all": ("qkv", "out", "mlp", "norm"),
    "qkv": ("qkv",),
    "attention": ("qkv", "out"),
    "mlp": ("mlp",),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of a model.

    In a config, `vocab_size` and `d_ff` may be 0 until `resolve` fills them in. Two instances are
    equal if they describe the same network, even if their preset or initial weights differ.
    """

    preset: str = config_field(
        "", "published architecture to start from; the fields below override it", compare=False
    )
    n_layer: int = config_field(12, "transformer blocks", low=1, high=100_000)
    n_head: int = config_field(12, "attention heads; must divide d_model if head_dim=0", low=1)
    head_dim: int = config_field(0, "width of a head; 0: d_model / n_head")
    n_kv_head: int = config_field(
        0, "key/value heads, each shared by n_head / n_kv_head queries; 0: n_head"
    )
    d_model: int = config_field(768, "width of the residual stream", low=1)
    d_ff: int = config_field(
        0, "width of the MLP; 0: 4 x d_model, or 8/3 of it (multiple of 256) if gated"
    )
    vocab_size: int = config_field(
        0, "vocabulary size before padding to a multiple of 128; 0: the tokenizer's"
    )
    seq_len: int = config_field(1024, "context length", "tokens", low=1)
    norm: Literal["layernorm", "rmsnorm"] = config_field(
        "layernorm", "normalization: GPT-2's or LLaMA's"
    )
    norm_position: Literal["pre", "post", "both"] = config_field(
        "pre", "norms before attention and MLP, after them (OLMo 2), or both (Gemma 3)"
    )
    norm_eps: float = config_field(1e-5, "added to the variance", open_low=True)
    pos_emb: Literal["learned", "rotary"] = config_field(
        "learned", "position embedding: learned, or rotary on queries and keys"
    )
    rope_theta: float = config_field(
        10000.0, "rotary base", low=1.0, open_low=True, only_if=IF_ROTARY
    )
    rope_local_theta: float = config_field(
        0.0,
        "rotary base of layers with a window, without scaling; 0: as in other layers",
        only_if=IF_ROTARY,
    )
    nope_interval: int = config_field(
        0, "every n-th layer has no rotary embedding; 0: none", "layers", only_if=IF_ROTARY
    )
    rope_scaling: Literal["llama3", "linear", "yarn"] = config_field(
        "llama3", "rotary scaling: LLaMA 3.1's, all wavelengths alike, or YaRN", only_if=IF_SCALED
    )
    rope_factor: float = config_field(
        1.0,
        "rotary scaling: factor of the longest wavelengths; 1: no scaling",
        low=1.0,
        only_if=IF_ROTARY,
    )
    rope_low: float = config_field(
        1.0,
        "rotary scaling: full below this many turns in rope_context",
        "turns",
        only_if=IF_SCALED,
    )
    rope_high: float = config_field(
        4.0,
        "rotary scaling: none above this many turns in rope_context",
        "turns",
        only_if=IF_SCALED,
    )
    rope_context: int = config_field(
        8192, "rotary scaling: context length before scaling", "tokens", low=1, only_if=IF_SCALED
    )
    rope_attention: float = config_field(
        0.0,
        "factor of rotated queries and keys; 0: 1 + 0.1 ln(rope_factor)",
        only_if="model.rope_scaling=yarn",
    )
    mlp: Literal["gelu", "gelu-erf", "relu2", "swiglu", "geglu"] = config_field(
        "gelu",
        "activation: tanh GELU (GPT-2), exact GELU (nanoGPT), squared ReLU, SwiGLU (LLaMA), or "
        "tanh GELU with a gate (Gemma)",
    )
    bias: bool = config_field(True, "biases in linear layers and LayerNorm")
    bias_in: Literal["all", "qkv", "attention", "mlp"] = config_field(
        "all",
        "layers with biases: all, queries, keys and values (Qwen2), all of attention, or the MLP",
        only_if="model.bias=True",
    )
    tie_embeddings: bool = config_field(True, "share the token embedding with the output layer")
    qk_norm: bool = config_field(False, "normalize queries and keys")
    qk_norm_over: Literal["head", "width"] = config_field(
        "head",
        "normalize each head, or all heads of a token together (OLMo 2)",
        only_if="model.qk_norm=True",
    )
    embedding_scale: bool = config_field(
        False, "multiply the token embedding by the square root of d_model (Gemma)"
    )
    embedding_norm: bool = config_field(False, "normalize the embedding before the first block")
    residual_scales: bool = config_field(
        False, "block input: learned mix of the residual stream and the embedding"
    )
    value_embeddings: bool = config_field(
        False, "add gated token embeddings to the values of every other layer"
    )
    smear: bool = config_field(
        False, "add a gated share of the preceding token's embedding to each embedding"
    )
    backout: bool = config_field(
        False, "subtract a learned share of the middle block's output from the last block's"
    )
    logit_softcap: float = config_field(
        0.0, "logits become cap x tanh(logits / cap); 0: no cap", high=1000.0
    )
    window: int = config_field(
        0, "sliding window of S layers, including the query; 0: full attention", "tokens"
    )
    window_pattern: str = config_field(
        "SSSL",
        "layers with a window (S) and without (L): one letter per layer, or repeated until the "
        "last layer, which has none",
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
    lora_rank: int = config_field(
        0, "train only LoRA adapters of this rank in the linear layers of blocks; 0: train all"
    )
    lora_alpha: float = config_field(
        0.0,
        "adapters are scaled by lora_alpha / lora_rank; 0: 2 x lora_rank",
        only_if="model.lora_rank!=0",
    )
    dropout: float = config_field(0.0, "dropout probability in training", high=0.99, compare=False)
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
        """The width of a head."""
        return self.head_dim or self.d_model // self.n_head

    @property
    def attention_width(self) -> int:
        """The total width of the query heads, which the output projection reads."""
        return self.n_head * self.d_head

    @property
    def is_gated(self) -> bool:
        """Whether the MLP is gated, with three matrices instead of two."""
        return self.mlp in GATED

    def has_bias(self, part: str) -> bool:
        """Return whether a part has biases: `qkv`, `out`, `mlp` or `norm`."""
        return self.bias and part in BIASED[self.bias_in]

    @property
    def kv_heads(self) -> int:
        """The number of key/value heads; n_head / kv_heads query heads share each of them."""
        return self.n_kv_head or self.n_head

    @property
    def switched_on(self) -> list[str]:
        """The names of enabled features that neither GPT-2 nor LLaMA has, with the values of text fields."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name in SWITCHES}
        defaults = {f.name: f.default for f in fields(self)}
        return [
            f"{name}={values[name]}" if isinstance(values[name], str) else name
            for name in SWITCHES
            if values[name] != defaults[name]
        ]

    @property
    def windows(self) -> list[int]:
        """The attention window of each layer in tokens; 0 for full attention."""
        pattern = self.window_pattern
        if len(pattern) != self.n_layer:
            pattern = (pattern * self.n_layer)[: self.n_layer - 1] + "L"
        return [self.window * (letter == "S") for letter in pattern]

    @property
    def nope_layers(self) -> range:
        """The indices of layers without rotary embedding."""
        n = self.nope_interval
        return range(n - 1, self.n_layer, n) if n else range(0)

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
    """Return the MLP's default width: 4 * d_model, or with a gate 8/3 * d_model, rounded up.

    A gated MLP has three matrices instead of two. With these widths, both kinds of MLP have about the
    same number of parameters.
    """
    if mlp not in GATED:
        return 4 * d_model
    return -(-(8 * d_model // 3) // SWIGLU_MULTIPLE) * SWIGLU_MULTIPLE


def describe_heads(model: ModelConfig) -> str:
    """Describe the attention heads in words."""
    grouped = f" ({model.kv_heads} key/value)" if model.kv_heads != model.n_head else ""
    return f"{model.n_head} heads{grouped}"


def validate_model(model: ModelConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each conflict between fields as (setting, problem, how to fix it)."""
    if not model.head_dim and model.d_model % model.n_head:
        problem = f"{model.n_head} heads do not divide d_model {model.d_model}"
        fix = f"choose a divisor of {model.d_model}, or set model.head_dim"
        yield "model.n_head", problem, fix
    elif model.pos_emb == "rotary" and model.d_head % 2:
        problem = f"rotary embedding needs an even head size, got {model.d_head}"
        yield "model.n_head", problem, "make d_model / n_head or head_dim even"
    if model.n_head % model.kv_heads:
        problem = f"{model.n_head} heads cannot share {model.n_kv_head} key/value heads evenly"
        yield "model.n_kv_head", problem, f"choose a divisor of {model.n_head}"
    if not re.fullmatch("[SL]+", model.window_pattern):
        yield "model.window_pattern", f"unknown pattern {model.window_pattern!r:.80}", "use S and L"
    is_scaled = model.rope_factor > 1 and model.rope_scaling != "linear"
    if is_scaled and model.rope_low >= model.rope_high:
        problem = f"rope_low {model.rope_low:g} is not below rope_high {model.rope_high:g}"
        yield "model.rope_low", problem, "LLaMA 3.1 has 1 and 4, YaRN 1 and 32"
