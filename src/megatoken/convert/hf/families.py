"""GPT2LMHeadModel, LlamaForCausalLM and Qwen3ForCausalLM of transformers as tables: names and config.json's fields."""

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
LARGEST_SIZE = 10**15  # of any number in a config.json
LLAMA3_SCALING = {
    "rope_factor": "factor",
    "rope_low": "low_freq_factor",
    "rope_high": "high_freq_factor",
    "rope_context": "original_max_position_embeddings",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model type of transformers.

    modules: its module names to ours, `{}` for the layer; `/q` names a part of our fused query/key/value matrix.
    prefix: of every tensor but the output layer's; files of the bare model lack it. conv1d: modules with (in, out)
    weights. buffers: tensors that old versions saved besides weights. switches: our fields that all its models share.
    fields: our field to its key in config.json, defaults: values where it is absent. activation: the key of the MLP's.
    choices: values that we compute, transformers' default first. write: the other keys of a config.json.
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
        """Our parameters, or their gradients, as the tensors of a model file: views, with the file's shapes."""
        q, kv = config.d_model, config.kv_heads * config.d_head
        rows = {"q": slice(q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}
        rows |= dict.fromkeys(("tokens", "head"), slice(config.vocab_size))
        views = {}
        for hf_module, own_module in self.modules.items():
            module, _, part = own_module.partition("/")
            for layer in range(config.n_layer if "{}" in hf_module else 1):
                for kind in ("weight", "bias"):
                    if (param := params.get(f"{module.format(layer)}.{kind}")) is not None:
                        view = param.detach()[rows.get(part or module, slice(None))]
                        transposed = kind == "weight" and hf_module.endswith(self.conv1d)
                        views[f"{hf_module.format(layer)}.{kind}"] = view.T if transposed else view
        return views

    def read_config(self, config: Json, where: str) -> ModelConfig:
        """The architecture in a config.json. Raises CheckpointError naming `where` for unsupported values."""
        rope = (
            config.get("rope_parameters") or config.get("rope_scaling") or {}
        )  # in transformers 5, and before
        rope = (
            {"rope_type": rope.get("type"), **rope}
            if isinstance(rope, dict)
            else {"rope_type": rope}
        )
        given = {key: allowed[0] for key, allowed in self.choices.items()} | dict(self.defaults)
        given |= {key: value for key, value in {**config, **rope}.items() if value is not None}
        for key, allowed in self.choices.items():
            if given[key] not in allowed:
                fix = f"supported: {' or '.join(map(str, allowed))}"
                raise CheckpointError(
                    f"{key} is {given[key]!r:.80}, which is not supported", where, fix
                )
        scaling = LLAMA3_SCALING if given.get("rope_type") == "llama3" else {}
        switches = {**self.switches, "mlp": ACTIVATIONS[given[self.activation]]}
        built = build_config(given, {**self.fields, **scaling}, where, switches)
        if (head_dim := given.get("head_dim", built.d_head)) != built.d_head:
            what = f"head_dim is {head_dim!r:.80}: {built.n_head} heads of it do not fill the width {built.d_model}"
            raise CheckpointError(what, where, "choose a model whose heads fill its width")
        return built

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """The architecture as fields of a config.json."""
        values = {key: getattr(config, field) for field, key in self.fields.items()}
        activation = next(name for name, mlp in ACTIVATIONS.items() if mlp == config.mlp)
        return {**values, self.activation: activation, **self.write(config)}


def build_config(
    given: Json, names: Mapping[str, str], where: str, switches: Mapping[str, Any]
) -> ModelConfig:
    """An architecture from another program's values. names: our field to the key of `given`.

    Raises CheckpointError naming `where` and the key of a value that is missing or out of range.
    """
    values = dict(switches)
    for field, key in names.items():
        value = given.get(key)
        if isinstance(value, int) and abs(value) > LARGEST_SIZE:
            value = "too large"
        try:
            values[field] = parse_value(FIELDS[f"model.{field}"], str(value))
        except ValueError as error:
            raise CheckpointError(
                f"{key} is {value!r:.80}: {error!s:.200}", where, "restore the file"
            ) from None
    config = ModelConfig(**values)
    for _, what, _ in validate_model(config):
        raise CheckpointError(what, where, "restore the file")
    return replace(
        config.resolve(0), n_kv_head=0 if config.kv_heads == config.n_head else config.n_kv_head
    )


def find_family(config: Json, where: str) -> Family:
    """The family named in a config.json. Raises CheckpointError naming `where` for an unknown one."""
    if (model_type := config.get("model_type")) not in FAMILIES:
        what = f"model_type {model_type!r:.80} is not supported"
        raise CheckpointError(what, where, f"supported: {' and '.join(FAMILIES)}")
    return FAMILIES[model_type]


def choose_family(config: ModelConfig) -> Family:
    """The family that computes this architecture. Raises ConfigError when no model of transformers has this mix."""
    switched_on = config.switched_on
    if (config.norm, config.pos_emb, config.mlp) == ("rmsnorm", "rotary", "swiglu"):
        if not switched_on:
            return LLAMA
        if switched_on == ["qk_norm"] and not config.bias:
            return QWEN3
    is_gpt2 = (config.norm, config.pos_emb, config.kv_heads) == (
        "layernorm",
        "learned",
        config.n_head,
    )
    if is_gpt2 and config.mlp in ("gelu", "gelu-erf") and not switched_on:
        return GPT2
    switches = [
        config.norm,
        f"{config.pos_emb} positions",
        config.mlp,
        *switched_on,
        *["biases"] * config.bias,
    ]
    what = f"no model of transformers has {', '.join(switches)} and {config.kv_heads} key/value heads together"
    raise ConfigError(
        what, "--to hf", "switches of GPT-2, LLaMA and Qwen3 (modern-hf presets) can be exported"
    )


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
LLAMA = (
    Family(  # its rotary pairs are channels i and i + d_head / 2, as ours, so rows keep their order
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
            **{"num_key_value_heads": 0, "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
            **{"attention_bias": False, "tie_word_embeddings": False},
        },
        activation="hidden_act",
        choices={"hidden_act": ("silu",), "rope_type": ("default", "llama3")},
        write=_write_llama,
    )
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
