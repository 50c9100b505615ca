"""Hugging Face's side of a model: names and sizes of its tensors, and config.json, both ways.

In: a Shape, or the content of a config.json. Out: where each tensor of the file belongs in ours, and the other of the
two. Source: the files that transformers' save_pretrained writes for GPT2LMHeadModel, whose Conv1D keeps weights as
(in, out). Absent: files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatoken.errors import Exit, Fault
from megatoken.presets import Shape

SIZES = {  # our name: theirs; n_inner may be absent or null
    "n_layer": "n_layer",
    "n_head": "n_head",
    "d_model": "n_embd",
    "d_ff": "n_inner",
    "vocab_size": "vocab_size",
    "seq_len": "n_positions",
}
# What our GPT computes; a folder that says otherwise holds another model. The first value is GPT-2's default.
CHOICES: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "quantization_config": (None,),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of a file belongs: our parameter, its sizes in the file, and whether the file has it transposed.

    rows: first and one past the last row of ours that it is; None: to the end.
    """

    ours: str
    sizes: tuple[int, ...]
    transposed: bool = False
    rows: tuple[int, int | None] = (0, None)

    def put(self, tensor: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copy a file's tensor into ours."""
        parameters[self.ours].data[slice(*self.rows)] = tensor.T if self.transposed else tensor

    def take(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """A file's tensor out of ours: contiguous, with storage of its own."""
        tensor = parameters[self.ours].detach()[slice(*self.rows)]
        return (tensor.T if self.transposed else tensor).clone(memory_format=torch.contiguous_format)


def list_places(shape: Shape) -> dict[str, Place]:
    """Every tensor of a model of this shape by Hugging Face's name, without the prefix of the language model."""
    d, f = shape.d_model, shape.d_ff
    places = {
        "wte.weight": Place("tokens.weight", (shape.vocab_size, d), rows=(0, shape.vocab_size)),
        "wpe.weight": Place("positions.weight", (shape.seq_len, d)),
        "ln_f.weight": Place("norm.weight", (d,)),
        "ln_f.bias": Place("norm.bias", (d,)),
    }
    products = {
        "attn.c_attn": ("attention.qkv", d, 3 * d),
        "attn.c_proj": ("attention.out", d, d),
        "mlp.c_fc": ("mlp.up", d, f),
        "mlp.c_proj": ("mlp.down", f, d),
    }
    for i in range(shape.n_layer):
        for theirs, ours in (("ln_1", "norm1"), ("ln_2", "norm2")):
            places[f"h.{i}.{theirs}.weight"] = Place(f"blocks.{i}.{ours}.weight", (d,))
            places[f"h.{i}.{theirs}.bias"] = Place(f"blocks.{i}.{ours}.bias", (d,))
        for theirs, (ours, inner, outer) in products.items():
            place = Place(f"blocks.{i}.{ours}.weight", (inner, outer), transposed=True)
            places[f"h.{i}.{theirs}.weight"] = place
            places[f"h.{i}.{theirs}.bias"] = Place(f"blocks.{i}.{ours}.bias", (outer,))
    return places


def read_config(config: Mapping[str, Any], where: str) -> Shape:
    """The sizes in a config.json. Raises Fault(CHECKPOINT) naming `where` for anything our GPT does not compute."""
    kind = config.get("model_type")
    if kind != "gpt2":
        raise Fault(Exit.CHECKPOINT, f"model_type {kind!r} is not supported", where, "supported: gpt2")
    for key, allowed in CHOICES.items():
        if (value := config.get(key, allowed[0])) not in allowed:
            fix = f"supported: {' or '.join(map(str, allowed))}"
            raise Fault(Exit.CHECKPOINT, f"{key} is {value!r}, which this GPT-2 does not compute", where, fix)
    sizes = {field: config.get(key) for field, key in SIZES.items()}
    if sizes["d_ff"] is None and isinstance(sizes["d_model"], int):
        sizes["d_ff"] = 4 * sizes["d_model"]
    numbers = {field: value for field, value in sizes.items() if type(value) is int and value >= 1}
    if odd := [f"{SIZES[field]} is {value!r}" for field, value in sizes.items() if field not in numbers]:
        raise Fault(Exit.CHECKPOINT, f"no size: {', '.join(odd)}", where, "restore the file")
    shape = Shape(**numbers)
    if shape.d_model % shape.n_head:
        what = f"n_embd {shape.d_model} does not divide into {shape.n_head} heads"
        raise Fault(Exit.CHECKPOINT, what, where, "restore the file")
    return shape


def write_config(shape: Shape, *, eot: int, dtype: str) -> dict[str, Any]:
    """The config.json of a shape. eot: id that begins and ends a text; dtype: of the weights, in torch's word."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(shape, ours) for ours, theirs in SIZES.items()},
        **{key: allowed[0] for key, allowed in CHOICES.items() if key != "quantization_config"},
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "use_cache": True,
        "dtype": dtype,
    }
