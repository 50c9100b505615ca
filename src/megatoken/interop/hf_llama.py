"""LLaMA as transformers has it: LlamaForCausalLM, with queries, keys and values in three products.

Its rotary pairs are channels i and i + D/2 of a head, as ours, so rows keep their order. How positions are turned is
written in two ways: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before); both are read.
"""

import re
from typing import Any

from megatoken.errors import Exit, Fault
from megatoken.interop.hf_layout import Config, Family, Place, check_choices, read_number, read_sizes
from megatoken.presets import Shape

SIZES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "vocab_size": "vocab_size",
    "seq_len": "max_position_embeddings",
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
    "tie_word_embeddings": (False, True),
    "quantization_config": (None,),
}
SCALING = {  # of rope_type llama3
    "rope_factor": "factor",
    "rope_low": "low_freq_factor",
    "rope_high": "high_freq_factor",
    "rope_context": "original_max_position_embeddings",
}


def list_places(shape: Shape) -> dict[str, Place]:
    """Every tensor by its name in the file."""
    d, f, vocabulary = shape.d_model, shape.d_ff, (0, shape.vocab_size)
    places = {
        "model.embed_tokens.weight": Place("tokens.weight", (shape.vocab_size, d), rows=vocabulary),
        "model.norm.weight": Place("norm.weight", (d,)),
    }
    if not shape.tied:
        places["lm_head.weight"] = Place("head.weight", (shape.vocab_size, d), rows=vocabulary)
    q, kv = d, shape.kv_heads * shape.d_head
    products = {
        "self_attn.q_proj": ("attention.qkv", q, d, 0),
        "self_attn.k_proj": ("attention.qkv", kv, d, q),
        "self_attn.v_proj": ("attention.qkv", kv, d, q + kv),
        "self_attn.o_proj": ("attention.out", d, d, 0),
        "mlp.gate_proj": ("mlp.gate", f, d, 0),
        "mlp.up_proj": ("mlp.up", f, d, 0),
        "mlp.down_proj": ("mlp.down", d, f, 0),
    }
    for i in range(shape.n_layer):
        block, own = f"model.layers.{i}", f"blocks.{i}"
        for theirs, ours in (("input_layernorm", "norm1"), ("post_attention_layernorm", "norm2")):
            places[f"{block}.{theirs}.weight"] = Place(f"{own}.{ours}.weight", (d,))
        for theirs, (ours, outer, inner, first) in products.items():
            rows = (first, first + outer)
            places[f"{block}.{theirs}.weight"] = Place(f"{own}.{ours}.weight", (outer, inner), rows=rows)
            if shape.bias:
                places[f"{block}.{theirs}.bias"] = Place(f"{own}.{ours}.bias", (outer,), rows=rows)
    return places


def read_config(config: Config, where: str) -> Shape:
    """The shape in a config.json. Raises Fault(CHECKPOINT) naming `where` for anything that is not computed here."""
    check_choices(config, CHOICES, where)
    bias = config.get("attention_bias", False)
    if config.get("mlp_bias", False) != bias:
        what = "biases in attention and MLP must be both there or both absent"
        raise Fault(Exit.CHECKPOINT, what, where, "supported: attention_bias = mlp_bias")
    if config.get("num_key_value_heads") is None:
        config = {**config, "num_key_value_heads": config.get("num_attention_heads")}
    sizes = read_sizes(config, SIZES, where)
    if sizes["n_head"] % sizes["n_kv_head"]:
        what = f"{sizes['n_head']} heads do not share {sizes['n_kv_head']} of keys and values"
        raise Fault(Exit.CHECKPOINT, what, where, "restore the file")
    if config.get("head_dim") not in (None, sizes["d_model"] // sizes["n_head"]):
        what = f"head_dim {config['head_dim']} is not hidden_size / num_attention_heads"
        raise Fault(Exit.CHECKPOINT, what, where, "supported: heads that make up the width")
    if sizes["n_kv_head"] == sizes["n_head"]:
        sizes["n_kv_head"] = 0
    return Shape(
        **sizes,
        **_read_rope(config, where),
        norm="rmsnorm",
        norm_eps=read_number(config, "rms_norm_eps", 1e-6, where),
        positions="rotary",
        mlp="swiglu",
        bias=bias,
        tied=config.get("tie_word_embeddings", False),
    )


def _read_rope(config: Config, where: str) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise Fault(Exit.CHECKPOINT, f"rope_parameters is {rope!r}", where, "restore the file")
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = read_number(rope if "rope_theta" in rope else config, "rope_theta", 10000.0, where)
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        what = f"rope_type is {kind!r}, which is not computed here"
        raise Fault(Exit.CHECKPOINT, what, where, "supported: default or llama3")
    if absent := [theirs for theirs in SCALING.values() if theirs not in rope]:
        raise Fault(Exit.CHECKPOINT, f"llama3's scaling lacks {', '.join(absent)}", where, "restore the file")
    scaling = {ours: read_number(rope, theirs, 0.0, where) for ours, theirs in SCALING.items()}
    return {"rope_theta": theta, **scaling, "rope_context": int(scaling["rope_context"])}


def write_config(shape: Shape) -> dict[str, Any]:
    """The shape's part of a config.json."""
    scaling = {theirs: getattr(shape, ours) for ours, theirs in SCALING.items()} if shape.rope_factor != 1 else {}
    sizes = {theirs: getattr(shape, ours) for ours, theirs in SIZES.items()}
    return {
        **sizes,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.d_head,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": {"rope_type": "llama3", **scaling} if scaling else None,
        "attention_bias": shape.bias,
        "mlp_bias": shape.bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": shape.tied,
    }


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    buffers=re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
    list_places=list_places,
    read=read_config,
    write=write_config,
)
