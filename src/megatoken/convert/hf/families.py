"""Read and write the config.json and tensor names of transformers' model types (families.yaml)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatoken.base.config.fields import parse_value
from megatoken.base.config.model_config import VOCAB_MULTIPLE, ModelConfig, validate_model
from megatoken.base.config.schema import FIELDS, Config, is_ignored
from megatoken.base.errors import CheckpointError, ConfigError
from megatoken.base.system.table import read_table

Json = Mapping[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
LETTERS = {FULL: "L", SLIDING: "S"}  # of window_pattern
BIASES = {(True, True): "all", (True, False): "attention", (False, True): "mlp"}
TABLE = read_table(__file__)
SCALINGS: Mapping[str, Mapping[str, str]] = TABLE["scalings"]
FIX = "use GPT-2, LLaMA, Mistral, Qwen2, Qwen3, SmolLM3, OLMo 2 or Gemma 3 (text)"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model type of transformers, and how its names map to megatoken's.

    In `modules`, {} stands for the layer's number, and /q, /k or /v selects rows of the fused
    query/key/value matrix.
    """

    model_type: str
    architecture: str
    modules: Mapping[str, str]  # transformers' name of a module -> megatoken's
    prefix: str  # of all tensors but the output layer; files without that layer leave it out
    buffers: str  # pattern of tensors in old files that are not weights
    conv1d: Sequence[str] = ()  # ends of the names of modules with weights (in, out)
    norm_offset: float = 0.0  # what the model adds to the saved weights of norms
    switches: Mapping[str, Any]  # megatoken's fields with one value in all models of this type
    fields: Mapping[str, str]  # megatoken's field -> config.json key
    defaults: Mapping[str, Any]  # values of keys that a config.json leaves out
    activation: str  # config.json key of the MLP's activation
    activations: Mapping[str, str]  # its values -> megatoken's `mlp`
    choices: Mapping[str, Sequence[Any]]  # other keys -> supported values, the default first
    keys: Sequence[str]  # of `list_keys`, to write
    constants: Mapping[str, Any]  # other keys to write, with their values

    def view_params(self, params: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        """Return megatoken's parameters (or gradients) as views named and shaped as in a file."""
        q, kv, _ = config.qkv_rows
        rows = {
            "q": slice(q),
            "k": slice(q, q + kv),
            "v": slice(q + kv, q + 2 * kv),
            "tokens": slice(config.vocab_size),
            "head": slice(config.vocab_size),
            "blocks.{}.attention.value_tokens": slice(config.vocab_size),
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
                    if kind == "weight" and hf_module.endswith(tuple(self.conv1d)):
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
        choices = {self.activation: [*self.activations], **self.choices}
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
            types = types or [(FULL, SLIDING)[_has_window(config, values, i)] for i in layers]
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


def _has_window(config: ModelConfig, values: Json, layer: int) -> bool:
    """Return whether a layer has a window in a config.json without `layer_types`."""
    if "no_rope_layer_interval" in values:  # SmolLM3
        return layer in config.nope_layers
    if "sliding_window_pattern" in values:  # Gemma 3
        return (layer + 1) % int(values["sliding_window_pattern"]) != 0
    return layer >= int(values.get("max_window_layers", 0))  # Qwen; all layers of Mistral


def _refuse(key: str, value: Any, where: str) -> CheckpointError:
    return CheckpointError(f"{key} {value!r:.80} is not supported", where, FIX)


def _read_rope(config: Json, where: str) -> dict[str, Any]:
    """Return the settings of rotary embedding as one flat dict, with the keys of transformers 4."""
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
    rope = {
        key: getattr(config, name)
        for name, key in scaling
        if name != "rope_attention" or config.rope_attention
    }
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
        biased = (
            family.model_type == "gpt2" and not config.bias
        )  # transformers' GPT-2 always has biases
        expected = _simplify(replace(config, bias=True) if biased else config)
        try:
            if family.read_config(family.write_config(config), "config.json") == expected:
                return family
        except CheckpointError:
            continue
    parts = [config.norm, f"{config.pos_emb} positions", config.mlp, *config.switched_on]
    what = f"transformers has no model with {', '.join(parts)}, bias={config.bias}"
    raise ConfigError(what, "--to hf", FIX)


FAMILIES, OTHERS = (
    {name: Family(model_type=name, **row) for name, row in TABLE[kind].items()}
    for kind in ("transformers", "others")
)
