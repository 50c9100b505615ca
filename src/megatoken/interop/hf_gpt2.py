"""GPT-2 as transformers has it: GPT2LMHeadModel, whose Conv1D keeps weights as (in, out)."""

import re
from typing import Any

from megatoken.interop.hf_layout import Config, Family, Place, check_choices, read_number, read_sizes
from megatoken.presets import Shape

SIZES = {  # our name: theirs; n_inner may be absent or null
    "n_layer": "n_layer",
    "n_head": "n_head",
    "d_model": "n_embd",
    "d_ff": "n_inner",
    "vocab_size": "vocab_size",
    "seq_len": "n_positions",
}
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu-erf"}
CHOICES: dict[str, tuple[Any, ...]] = {  # what is computed here; the first value is GPT-2's default
    "activation_function": tuple(ACTIVATIONS),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True, False),
    "quantization_config": (None,),
}


def list_places(shape: Shape) -> dict[str, Place]:
    """Every tensor by its name in the file."""
    d, f, vocabulary = shape.d_model, shape.d_ff, (0, shape.vocab_size)
    places = {
        "transformer.wte.weight": Place("tokens.weight", (shape.vocab_size, d), rows=vocabulary),
        "transformer.wpe.weight": Place("positions.weight", (shape.seq_len, d)),
        "transformer.ln_f.weight": Place("norm.weight", (d,)),
        "transformer.ln_f.bias": Place("norm.bias", (d,)),
    }
    if not shape.tied:
        places["lm_head.weight"] = Place("head.weight", (shape.vocab_size, d), rows=vocabulary)
    products = {
        "attn.c_attn": ("attention.qkv", d, 3 * d),
        "attn.c_proj": ("attention.out", d, d),
        "mlp.c_fc": ("mlp.up", d, f),
        "mlp.c_proj": ("mlp.down", f, d),
    }
    for i in range(shape.n_layer):
        block, own = f"transformer.h.{i}", f"blocks.{i}"
        for theirs, ours in (("ln_1", "norm1"), ("ln_2", "norm2")):
            places[f"{block}.{theirs}.weight"] = Place(f"{own}.{ours}.weight", (d,))
            places[f"{block}.{theirs}.bias"] = Place(f"{own}.{ours}.bias", (d,))
        for theirs, (ours, inner, outer) in products.items():
            places[f"{block}.{theirs}.weight"] = Place(f"{own}.{ours}.weight", (inner, outer), transposed=True)
            places[f"{block}.{theirs}.bias"] = Place(f"{own}.{ours}.bias", (outer,))
    return places


def read_config(config: Config, where: str) -> Shape:
    """The shape in a config.json. Raises Fault(CHECKPOINT) naming `where` for anything that is not computed here."""
    check_choices(config, CHOICES, where)
    if config.get("n_inner") is None and isinstance(config.get("n_embd"), int):
        config = {**config, "n_inner": 4 * config["n_embd"]}
    return Shape(
        **read_sizes(config, SIZES, where),
        norm_eps=read_number(config, "layer_norm_epsilon", 1e-5, where),
        mlp=ACTIVATIONS[config.get("activation_function", "gelu_new")],
        tied=config.get("tie_word_embeddings", True),
    )


def write_config(shape: Shape) -> dict[str, Any]:
    """The shape's part of a config.json."""
    return {
        **{theirs: getattr(shape, ours) for ours, theirs in SIZES.items()},
        "n_ctx": shape.seq_len,  # an older name of n_positions, by which llama.cpp asks
        "activation_function": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == shape.mlp),
        "layer_norm_epsilon": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        "scale_attn_weights": True,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    buffers=re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"),  # the causal mask
    list_places=list_places,
    read=read_config,
    write=write_config,
)
