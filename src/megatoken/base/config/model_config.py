"""Define the architecture of a model by its sizes and switches, which determine the loss curve."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

VOCAB_MULTIPLE = 128  # pads the embedding's rows, so that matrix kernels tile evenly
SWIGLU_MULTIPLE = 256  # LLaMA rounds the width of its MLP up to it
# Features that are off in GPT-2 and LLaMA.
SWITCHES = (
    "block",
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
EXTENSIONS = ("lora_rank", "value_head")  # fields that select a part of another room
EXTENSION_FIELDS = (*EXTENSIONS, "lora_alpha")  # which model.init does not set
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

    preset: str = field(default="", compare=False)
    n_layer: int = 12
    n_head: int = 12
    head_dim: int = 0
    n_kv_head: int = 0
    d_model: int = 768
    d_ff: int = 0
    vocab_size: int = 0
    seq_len: int = 1024
    norm: str = "layernorm"
    norm_position: Literal["pre", "post", "both"] = "pre"
    norm_eps: float = 1e-5
    pos_emb: Literal["learned", "rotary"] = "learned"
    rope_theta: float = 10000.0
    rope_local_theta: float = 0.0
    nope_interval: int = 0
    rope_scaling: Literal["llama3", "linear", "yarn"] = "llama3"
    rope_factor: float = 1.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_context: int = 8192
    rope_attention: float = 0.0
    mlp: str = "gelu"
    block: str = "standard"
    bias: bool = True
    bias_in: Literal["all", "qkv", "attention", "mlp"] = "all"
    tie_embeddings: bool = True
    qk_norm: bool = False
    qk_norm_over: Literal["head", "width"] = "head"
    embedding_scale: bool = False
    embedding_norm: bool = False
    residual_scales: bool = False
    value_embeddings: bool = False
    smear: bool = False
    backout: bool = False
    logit_softcap: float = 0.0
    window: int = 0
    window_pattern: str = "SSSL"
    value_head: bool = False
    zero_init: bool = field(default=False, compare=False)
    lora_rank: int = 0
    lora_alpha: float = 0.0
    dropout: float = field(default=0.0, compare=False)
    init: str = field(default="", compare=False)
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
    def is_unread(self) -> bool:
        """Whether the sizes are still to be read from `init`."""
        default = ModelConfig(**{name: getattr(self, name) for name in EXTENSION_FIELDS})
        return bool(self.init) and self.architecture() == default.architecture()

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
    def extensions(self) -> list[str]:
        """The fields in EXTENSIONS that are set."""
        return [name for name in EXTENSIONS if getattr(self, name)]

    @property
    def switched_on(self) -> list[str]:
        """Enabled features that neither GPT-2 nor LLaMA has: names, with the values of texts."""
        values = [(name, getattr(self, name)) for name in SWITCHES]
        return [
            f"{name}={value}" if isinstance(value, str) else name
            for name, value in values
            if value != getattr(ModelConfig, name)  # the default
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

    A gated MLP has three matrices instead of two. With these widths, both have about as many
    parameters.
    """
    if mlp not in GATED:
        return 4 * d_model
    return -(-(8 * d_model // 3) // SWIGLU_MULTIPLE) * SWIGLU_MULTIPLE


def describe_heads(model: ModelConfig) -> str:
    """Return the numbers of attention heads as text."""
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
