"""Tables of tensor names and config.json fields of transformers' model types."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from megatoken.config.fields import parse_value
from megatoken.config.model_config import VOCAB_MULTIPLE, ModelConfig, validate_model
from megatoken.config.schema import FIELDS, Config, is_ignored
from megatoken.errors import CheckpointError, ConfigError

Json = Mapping[str, Any]
GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu-erf"}
GATES = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
FULL, SLIDING = "full_attention", "sliding_attention"
LETTERS = {FULL: "L", SLIDING: "S"}  # of window_pattern
BIASES = {(True, True): "all", (True, False): "attention", (False, True): "mlp"}
SCALINGS = {
    "llama3": {
        "rope_factor": "factor",
        "rope_low": "low_freq_factor",
        "rope_high": "high_freq_factor",
        "rope_context": "original_max_position_embeddings",
    },
    "linear": {"rope_factor": "factor"},
    "yarn": {
        "rope_factor": "factor",
        "rope_low": "beta_slow",
        "rope_high": "beta_fast",
        "rope_context": "original_max_position_embeddings",
        "rope_attention": "attention_factor",
    },
}
# Keys that change the network, and their supported values.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "use_bidirectional_attention": (False,),
    "partial_rotary_factor": (1.0,),
    "rope_type": ("default", *SCALINGS),
    "mscale": (None,),
    "truncate": (True,),
}
FIX = "use GPT-2, LLaMA, Mistral, Qwen2, Qwen3, SmolLM3, OLMo 2 or Gemma 3 (text)"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model type of transformers, and how its names map to megatoken's.

    modules: transformers' module name -> megatoken's, with {} for the layer number; /q, /k or /v
    selects rows of the fused query/key/value matrix. prefix: how all tensor names begin except the
    output layer's; files without the output layer have no prefix. buffers: tensors that old
    versions saved although they are not weights. conv1d: ends of the names of modules that store
    weights as (in, out). norm_offset: what the model adds to the saved weights of norms. switches:
    megatoken's fields that are the same for all models of this type. fields: megatoken's field ->
    config.json key. defaults: values of keys that a config.json leaves out. activation: the
    config.json key of the MLP's activation. activations: its values -> megatoken's `mlp`. choices:
    config.json key -> supported values, transformers' default first. has_window: a function of
    (architecture, config.json, layer) that returns whether the layer has the window; used without
    layer_types. keys: keys of `list_keys` to write. constants: other keys to write.
    """

    model_type: str
    architecture: str
    modules: Mapping[str, str]
    prefix: str
    buffers: re.Pattern[str]
    conv1d: tuple[str, ...] = ()
    norm_offset: float = 0.0
    switches: Mapping[str, Any]
    fields: Mapping[str, str]
    defaults: Mapping[str, Any]
    activation: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=lambda: GATES)
    choices: Mapping[str, tuple[Any, ...]]
    has_window: Callable[[ModelConfig, Json, int], bool] = lambda *_: False
    keys: tuple[str, ...] = ()
    constants: Mapping[str, Any]

    def view_params(self, params: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        """Return megatoken's parameters (or gradients) as views named and shaped as in a file."""
        q, kv, _ = config.qkv_rows
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

    def get_norm_offset(self, name: str) -> float:
        """Return what the model adds to a saved tensor of this name."""
        return self.norm_offset if name.endswith("norm.weight") else 0.0

    def read_config(self, config: Json, where: str) -> ModelConfig:
        """Return the architecture that a config.json describes.

        Raises CheckpointError, naming `where`, for unsupported values.
        """
        choices = {self.activation: (*self.activations,), **self.choices}
        values = {key: supported[0] for key, supported in choices.items()}
        values |= self.defaults
        for source in (config, _read_rope(config, where)):
            values |= {key: value for key, value in source.items() if value is not None}
        for key, supported in choices.items():
            if values[key] not in supported:
                raise _refuse(key, values[key], where)
        names = dict(self.fields)
        switches = {"mlp": self.activations[values[self.activation]], **self.switches}
        if "rope_theta" in names:
            biases = bool(values["attention_bias"]), bool(values["mlp_bias"])
            switches = {"bias": any(biases), "bias_in": BIASES.get(biases, "all"), **switches}
            values.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
            if values["rope_type"] in SCALINGS:
                switches["rope_scaling"] = values["rope_type"]
                names |= SCALINGS[values["rope_type"]]
        if not values.get("use_sliding_window", True) or config.get("sliding_window", 0) is None:
            values["sliding_window"] = 0
        model_config = build_config(values, names, where, switches)
        scalar = values.get("query_pre_attn_scalar", model_config.d_head)
        if scalar != model_config.d_head:
            raise _refuse("query_pre_attn_scalar", scalar, where)
        return self._read_layers(model_config, values, where)

    def _read_layers(self, config: ModelConfig, values: Json, where: str) -> ModelConfig:
        """Add what differs between layers: windows, and rotary embedding."""
        layers = range(config.n_layer)
        interval = values.get("no_rope_layer_interval")
        if interval:
            flags = values.get("no_rope_layers") or [(i + 1) % interval for i in layers]
            nope = [i for i in layers if not flags[i]]
            config = replace(config, nope_interval=nope[0] + 1 if nope else 0)
            if nope != [*config.nope_layers]:
                raise _refuse("no_rope_layers", flags, where)
        types = values.get("layer_types")
        if set(types or ()) - set(LETTERS):
            raise _refuse("layer_types", types, where)
        pattern = ""
        if config.window:
            types = types or [(FULL, SLIDING)[self.has_window(config, values, i)] for i in layers]
            pattern = "".join(LETTERS[layer_type] for layer_type in types)
        if "S" not in pattern:
            return replace(config, window=0, rope_local_theta=0.0)
        if len(pattern) != config.n_layer:
            raise _refuse("layer_types", types, where)
        return replace(config, window_pattern=pattern)

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """Return the fields of a config.json that describe the architecture."""
        values = {key: getattr(config, name) for name, key in self.fields.items()}
        values |= dict.fromkeys(self.keys)
        values |= {key: value for key, value in list_keys(config).items() if key in values}
        names = [name for name, mlp in self.activations.items() if mlp == config.mlp]
        return {**values, self.activation: "".join(names[:1]), **self.constants}


def _refuse(key: str, value: Any, where: str) -> CheckpointError:
    return CheckpointError(f"{key} {value!r:.80} is not supported", where, FIX)


def _read_rope(config: Json, where: str) -> dict[str, Any]:
    """Return the settings of rotary embedding in one level, with the keys of transformers 4."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # v5, v4
    if rope.keys() & {FULL, SLIDING}:
        local = rope.get(SLIDING) or {}
        if local.get("rope_type", "default") != "default":
            raise _refuse("rope_type", local["rope_type"], where)
        rope = {**(rope.get(FULL) or {}), "rope_local_base_freq": local.get("rope_theta")}
    return {"rope_type": rope.get("type"), **rope}


def list_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json keys whose values are not just a field of the architecture."""
    scaling = SCALINGS[config.rope_scaling].items()
    rope = {key: getattr(config, name) for name, key in scaling if name != "rope_attention"}
    if config.rope_attention:
        rope["attention_factor"] = config.rope_attention
    return {
        "n_ctx": config.seq_len,  # llama.cpp reads it
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.d_head,
        "query_pre_attn_scalar": config.d_head,
        "rope_scaling": None
        if config.rope_factor == 1
        else {"rope_type": config.rope_scaling} | rope,
        "rope_local_base_freq": config.rope_local_theta or config.rope_theta,
        "attention_bias": config.has_bias("out"),
        "mlp_bias": config.has_bias("mlp"),
        "final_logit_softcapping": config.logit_softcap or None,
        "sliding_window": config.window or None,
        "use_sliding_window": bool(config.window),
        "layer_types": [(FULL, SLIDING)[window > 0] for window in config.windows],
        "no_rope_layers": [int(i not in config.nope_layers) for i in range(config.n_layer)],
        "no_rope_layer_interval": config.nope_interval or config.n_layer + 1,
    }


def build_config(
    values: Json, names: Mapping[str, str], where: str, switches: Mapping[str, Any]
) -> ModelConfig:
    """Build an architecture from another program's settings.

    values: the settings. names: for each field of ModelConfig to read, its key in `values`.
    switches: the other fields, which are fixed. Raises CheckpointError, naming `where`, for a value
    that is missing or wrong.
    """
    parsed = dict(switches)
    for name, key in names.items():
        try:
            parsed[name] = parse_value(FIELDS[f"model.{name}"], str(values.get(key)))
        except ValueError as error:
            raise CheckpointError(f"{key}: {error}", where, FIX) from None
    config = ModelConfig(**parsed)
    problems = [problem for _, problem, _ in validate_model(config)]
    if problems:
        raise CheckpointError(problems[0], where, FIX)
    return _simplify(config.resolve(0))


def _simplify(config: ModelConfig) -> ModelConfig:
    """Return the same network with the defaults of all fields that have no effect."""
    whole = Config(model=config)
    keys = {key: spec for key, spec in FIELDS.items() if key.startswith("model.")}
    unused: dict[str, Any] = {
        key.removeprefix("model."): spec.default
        for key, spec in keys.items()
        if is_ignored(whole, key)
    }
    config = replace(config, **unused)
    if config.window:
        pattern = "".join("S" if window else "L" for window in config.windows)
        config = replace(config, window_pattern=pattern)
    return replace(
        config,
        n_kv_head=0 if config.kv_heads == config.n_head else config.n_kv_head,
        head_dim=0 if config.attention_width == config.d_model else config.head_dim,
        value_head=False,
        vocab_multiple=VOCAB_MULTIPLE,
    )


def choose_family(config: ModelConfig) -> Family:
    """Return the family that can hold this architecture. Raises ConfigError if no family can."""
    for family in FAMILIES.values():
        biased = family is GPT2 and not config.bias  # transformers' GPT-2 always has biases
        expected = _simplify(replace(config, bias=True) if biased else config)
        try:
            if family.read_config(family.write_config(config), "config.json") == expected:
                return family
        except CheckpointError:
            continue
    parts = [config.norm, f"{config.pos_emb} positions", config.mlp, *config.switched_on]
    what = f"transformers has no model with {', '.join(parts)}, bias={config.bias}"
    raise ConfigError(what, "--to hf", FIX)


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
    activations=GELUS,
    choices={
        "quantization_config": (None,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
    keys=("n_ctx",),
    constants={
        "scale_attn_weights": True,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    },
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
        "head_dim": "head_dim",
        "d_model": "hidden_size",
        "d_ff": "intermediate_size",
        "vocab_size": "vocab_size",
        "seq_len": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "rope_theta": "rope_theta",
        "tie_embeddings": "tie_word_embeddings",
    },
    defaults={
        "num_key_value_heads": 0,
        "head_dim": 0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "beta_slow": 1.0,
        "beta_fast": 32.0,
        "attention_factor": 0.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    choices=SUPPORTED,
    keys=("rope_scaling", "attention_bias", "mlp_bias"),
    constants={"attention_dropout": 0.0, "pad_token_id": None},  # as some defaults are not ids
)
QK_NORMS = {
    "model.layers.{}.self_attn.q_norm": "blocks.{}.attention.q_norm",
    "model.layers.{}.self_attn.k_norm": "blocks.{}.attention.k_norm",
}
NORMS = {
    "model.layers.{}.input_layernorm": "blocks.{}.norm1",
    "model.layers.{}.post_attention_layernorm": "blocks.{}.post_norm1",
    "model.layers.{}.pre_feedforward_layernorm": "blocks.{}.norm2",
    "model.layers.{}.post_feedforward_layernorm": "blocks.{}.post_norm2",
}
WINDOW_FIELDS = {**LLAMA.fields, "window": "sliding_window"}
WINDOW_KEYS = (*LLAMA.keys, "use_sliding_window", "layer_types")
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    switches={**LLAMA.switches, "bias": True, "bias_in": "qkv"},
    fields=WINDOW_FIELDS,
    defaults={
        **LLAMA.defaults,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    has_window=lambda _, values, layer: layer >= values["max_window_layers"],
    keys=WINDOW_KEYS,
)
QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    modules={**LLAMA.modules, **QK_NORMS},
    switches={**LLAMA.switches, "qk_norm": True},
    defaults={**QWEN2.defaults, "head_dim": 128},
    choices={**SUPPORTED, "mlp_bias": (False,)},
)
MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=WINDOW_FIELDS,
    defaults={**LLAMA.defaults, "sliding_window": 4096},
    choices={
        **SUPPORTED,
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "layer_types": (None,),  # transformers ignores them
    },
    has_window=lambda *_: True,
)
SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    fields=WINDOW_FIELDS,
    defaults={
        **LLAMA.defaults,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "sliding_window": 0,
    },
    has_window=lambda config, _, layer: layer in config.nope_layers,
    keys=(*WINDOW_KEYS, "no_rope_layers", "no_rope_layer_interval"),
)
OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    modules={
        name: module
        for name, module in {**LLAMA.modules, **QK_NORMS, **NORMS}.items()
        if not name.endswith(("input_layernorm", "pre_feedforward_layernorm"))
    },
    switches={**LLAMA.switches, "norm_position": "post", "qk_norm": True, "qk_norm_over": "width"},
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    choices={**SUPPORTED, "mlp_bias": (False,)},
)
GEMMA3 = replace(
    LLAMA,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    modules={**LLAMA.modules, **QK_NORMS, **NORMS},
    norm_offset=1.0,
    switches={**LLAMA.switches, "norm_position": "both", "qk_norm": True, "embedding_scale": True},
    fields={
        **WINDOW_FIELDS,
        "rope_local_theta": "rope_local_base_freq",
        "logit_softcap": "final_logit_softcapping",
    },
    defaults={
        **LLAMA.defaults,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "final_logit_softcapping": 0.0,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    activation="hidden_activation",
    choices={**SUPPORTED, "mlp_bias": (False,)},
    has_window=lambda _, values, layer: (layer + 1) % values["sliding_window_pattern"] != 0,
    keys=(*LLAMA.keys, "layer_types", "query_pre_attn_scalar"),
)
FAMILIES = {
    family.model_type: family
    for family in (GPT2, LLAMA, QWEN2, QWEN3, MISTRAL, SMOLLM3, OLMO2, GEMMA3)
}
