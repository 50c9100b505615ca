"""Tables of tensor names and config.json fields of transformers' GPT-2, LLaMA and Qwen3."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatoken.config.fields import parse_value
from megatoken.config.model_config import ModelConfig, validate_model
from megatoken.config.schema import FIELDS
from megatoken.errors import CheckpointError, ConfigError

Json = Mapping[str, Any]
ACTIVATIONS: dict[str, Any] = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu-erf",
    "silu": "swiglu",
}
LLAMA3_SCALING = {
    "rope_factor": "factor",
    "rope_low": "low_freq_factor",
    "rope_high": "high_freq_factor",
    "rope_context": "original_max_position_embeddings",
}
FIX = "use a GPT-2, LLaMA or Qwen3 model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model type of transformers, and how its names map to megatoken's.

    modules: transformers' module name -> megatoken's, with {} for the layer number; /q, /k or /v
    selects rows of the fused query/key/value matrix. prefix: how all tensor names begin except the
    output layer's; files without the output layer have no prefix. buffers: tensors that old
    versions saved although they are not weights. conv1d: ends of the names of modules that store
    weights as (in, out). switches: megatoken's fields that are the same for all models of this
    type. fields: megatoken's field -> config.json key. defaults: values of keys that a config.json
    leaves out. activation: the config.json key of the MLP's activation. choices: config.json key ->
    supported values, transformers' default first. write: a function that returns the other keys of
    a config.json.
    """

    model_type: str
    architecture: str
    modules: Mapping[str, str]
    prefix: str
    buffers: re.Pattern[str]
    conv1d: tuple[str, ...] = ()
    switches: Mapping[str, Any]
    fields: Mapping[str, str]
    defaults: Mapping[str, Any]
    activation: str
    choices: Mapping[str, tuple[Any, ...]]
    write: Callable[[ModelConfig], dict[str, Any]]

    def view_params(self, params: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        """Return megatoken's parameters (or gradients) as views named and shaped as in a file."""
        q = config.d_model
        kv = config.kv_heads * config.d_head
        rows = {
            "q": slice(q),
            "k": slice(q, q + kv),
            "v": slice(q + kv, q + 2 * kv),
            "tokens": slice(config.vocab_size),
            "head": slice(config.vocab_size),
        }
        views = {}
        for hf_module, our_module in self.modules.items():
            module, _, part = our_module.partition("/")
            for layer in range(config.n_layer if "{}" in hf_module else 1):
                for kind in ("weight", "bias"):
                    param = params.get(f"{module.format(layer)}.{kind}")
                    if param is None:
                        continue
                    view = param.detach()[rows.get(part or module, slice(None))]
                    if kind == "weight" and hf_module.endswith(self.conv1d):
                        view = view.T
                    views[f"{hf_module.format(layer)}.{kind}"] = view
        return views

    def read_config(self, config: Json, where: str) -> ModelConfig:
        """Return the architecture that a config.json describes.

        Raises CheckpointError, naming `where`, for unsupported values.
        """
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # v5, v4
        rope = {"rope_type": rope.get("type"), **rope}
        values = {key: supported[0] for key, supported in self.choices.items()}
        values |= self.defaults
        values |= {key: value for key, value in {**config, **rope}.items() if value is not None}
        for key, supported in self.choices.items():
            if values[key] not in supported:
                raise CheckpointError(f"{key} {values[key]!r:.80} is not supported", where, FIX)
        fields = dict(self.fields)
        if values.get("rope_type") == "llama3":
            fields |= LLAMA3_SCALING
        switches = {**self.switches, "mlp": ACTIVATIONS[values[self.activation]]}
        model_config = build_config(values, fields, where, switches)
        if values.get("head_dim", model_config.d_head) != model_config.d_head:
            raise CheckpointError("head_dim is not hidden_size / heads", where, FIX)
        return model_config

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """Return the fields of a config.json that describe the architecture."""
        values = {key: getattr(config, field) for field, key in self.fields.items()}
        names = [name for name, mlp in ACTIVATIONS.items() if mlp == config.mlp]
        return {**values, self.activation: names[0], **self.write(config)}


def build_config(
    values: Json, names: Mapping[str, str], where: str, switches: Mapping[str, Any]
) -> ModelConfig:
    """Build an architecture from another program's settings.

    values: the settings. names: for each field of ModelConfig to read, its key in `values`.
    switches: the other fields, which are fixed. Raises CheckpointError, naming `where`, for a value
    that is missing or wrong.
    """
    fields = dict(switches)
    for field, key in names.items():
        try:
            fields[field] = parse_value(FIELDS[f"model.{field}"], str(values.get(key)))
        except ValueError as error:
            raise CheckpointError(f"{key}: {error}", where, FIX) from None
    config = ModelConfig(**fields)
    problems = [problem for _, problem, _ in validate_model(config)]
    if problems:
        raise CheckpointError(problems[0], where, FIX)
    n_kv_head = 0 if config.kv_heads == config.n_head else config.n_kv_head
    return replace(config.resolve(0), n_kv_head=n_kv_head)


def choose_family(config: ModelConfig) -> Family:
    """Return the family that can hold this architecture. Raises ConfigError if no family can."""
    switches = config.switched_on
    if (config.norm, config.pos_emb, config.mlp) == ("rmsnorm", "rotary", "swiglu"):
        if not switches:
            return LLAMA
        if switches == ["qk_norm"] and not config.bias:
            return QWEN3
    is_gpt2 = config.norm == "layernorm" and config.pos_emb == "learned"
    is_gpt2 &= config.mlp in ("gelu", "gelu-erf") and config.kv_heads == config.n_head
    if is_gpt2 and not switches:
        return GPT2
    parts = [config.norm, f"{config.pos_emb} positions", config.mlp, *switches]
    what = f"transformers has no model with {', '.join(parts)}, bias={config.bias}"
    raise ConfigError(what, "--to hf", "only GPT-2, LLaMA and Qwen3 can be exported (modern-hf)")


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return {"n_ctx": config.seq_len, "scale_attn_weights": True, **dropout}  # llama.cpp reads n_ctx


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    scaling = {key: getattr(config, field) for field, key in LLAMA3_SCALING.items()}
    return {
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.d_head,
        "rope_scaling": {"rope_type": "llama3", **scaling} if config.rope_factor != 1 else None,
        "mlp_bias": config.bias,
        "attention_dropout": 0.0,
    }


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return {**_write_llama(config), "attention_bias": False, "use_sliding_window": False}


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    modules={
        "transformer.wte": "tokens",
        "transformer.wpe": "positions",
        "transformer.h.{}.ln_1": "blocks.{}.norm1",
        "transformer.h.{}.attn.c_attn": "blocks.{}.attention.qkv",
        "transformer.h.{}.attn.c_proj": "blocks.{}.attention.out",
        "transformer.h.{}.ln_2": "blocks.{}.norm2",
        "transformer.h.{}.mlp.c_fc": "blocks.{}.mlp.up",
        "transformer.h.{}.mlp.c_proj": "blocks.{}.mlp.down",
        "transformer.ln_f": "norm",
        "lm_head": "head",
    },
    prefix="transformer.",
    buffers=re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"),  # the causal mask
    conv1d=("c_attn", "c_proj", "c_fc"),
    switches={},
    fields={
        "n_layer": "n_layer",
        "n_head": "n_head",
        "d_model": "n_embd",
        "d_ff": "n_inner",
        "vocab_size": "vocab_size",
        "seq_len": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "tie_embeddings": "tie_word_embeddings",
    },
    defaults={"n_inner": 0, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    activation="activation_function",
    choices={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
    write=_write_gpt2,
)
# Rotary pairs are channels i and i + d_head / 2, as in megatoken, so rows keep their order.
LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    modules={
        "model.embed_tokens": "tokens",
        "model.layers.{}.input_layernorm": "blocks.{}.norm1",
        "model.layers.{}.self_attn.q_proj": "blocks.{}.attention.qkv/q",
        "model.layers.{}.self_attn.k_proj": "blocks.{}.attention.qkv/k",
        "model.layers.{}.self_attn.v_proj": "blocks.{}.attention.qkv/v",
        "model.layers.{}.self_attn.o_proj": "blocks.{}.attention.out",
        "model.layers.{}.post_attention_layernorm": "blocks.{}.norm2",
        "model.layers.{}.mlp.gate_proj": "blocks.{}.mlp.gate",
        "model.layers.{}.mlp.up_proj": "blocks.{}.mlp.up",
        "model.layers.{}.mlp.down_proj": "blocks.{}.mlp.down",
        "model.norm": "norm",
        "lm_head": "head",
    },
    prefix="model.",
    buffers=re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
    switches={"norm": "rmsnorm", "pos_emb": "rotary"},
    fields={
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_kv_head": "num_key_value_heads",
        "d_model": "hidden_size",
        "d_ff": "intermediate_size",
        "vocab_size": "vocab_size",
        "seq_len": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "rope_theta": "rope_theta",
        "bias": "attention_bias",
        "tie_embeddings": "tie_word_embeddings",
    },
    defaults={
        "num_key_value_heads": 0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
    activation="hidden_act",
    choices={"hidden_act": ("silu",), "rope_type": ("default", "llama3")},
    write=_write_llama,
)
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    modules={
        **LLAMA.modules,
        "model.layers.{}.self_attn.q_norm": "blocks.{}.attention.q_norm",
        "model.layers.{}.self_attn.k_norm": "blocks.{}.attention.k_norm",
    },
    switches={**LLAMA.switches, "qk_norm": True, "bias": False},
    fields={field: key for field, key in LLAMA.fields.items() if field != "bias"},
    defaults={**LLAMA.defaults, "head_dim": 128},
    choices={**LLAMA.choices, "attention_bias": (False,), "use_sliding_window": (False,)},
    write=_write_qwen3,
)
FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, QWEN3)}
