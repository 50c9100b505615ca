"""nanoGPT's ckpt.pt, and build-nanogpt's: a model's weights out of a file that torch.save wrote.

In: a file. Out: a GPT in fp32. Nothing in the file is run: torch reads tensors and plain values only, and refuses what
else a pickle may ask for. Absent: the optimizer's state, and writing.
"""

import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.serialization import safe_globals

from megatoken.errors import Exit, Fault
from megatoken.interop.hf_gpt2 import GPT2
from megatoken.interop.tensors import build_empty, check_numbers
from megatoken.model.gpt import GPT
from megatoken.presets import GPT2_VOCABULARY, Shape

NAME, SUFFIXES = "ckpt.pt", (".pt", ".pth", ".ckpt")
WRAPPERS = re.compile(r"^((_orig_mod|module)\.)+")  # torch.compile's and DistributedDataParallel's prefixes
SIZES = {
    "n_layer": "n_layer",
    "n_head": "n_head",
    "d_model": "n_embd",
    "seq_len": "block_size",
    "vocab_size": "vocab_size",
}
EMBEDDING = "transformer.wte.weight"
PADDED_VOCABULARY = 50304  # GPT-2's, rounded up: the last 47 rows stand for nothing
# build-nanogpt keeps its sizes as an object of a class of its own; it is read as bare values.
CONFIGS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (SimpleNamespace, f"{module}.GPTConfig") for module in ("__main__", "model", "train_gpt2")
]


def read_nanogpt(path: Path) -> GPT:
    """The model of a ckpt.pt, on the CPU in fp32.

    Raises Fault(CHECKPOINT) in one line for a file that is truncated, damaged, asks to run code, or is not nanoGPT's.
    """
    content = _load(path)
    sizes, mlp = _find_sizes(content, path)
    shape = _read_shape(sizes, mlp, path)
    tensors = {WRAPPERS.sub("", name): tensor for name, tensor in content["model"].items()}
    model = build_empty(shape)
    parameters = dict(model.named_parameters())
    head = tensors.pop("lm_head.weight", None)
    with torch.no_grad():
        for name, place in GPT2.list_places(shape).items():
            if place.ours not in parameters:
                continue  # a bias that this model does not have
            tensor = tensors.pop(name, None)
            wanted = place.sizes[:: -1 if place.transposed else 1]
            if name == EMBEDDING:
                wanted = (sizes["vocab_size"], shape.d_model)
            if not isinstance(tensor, Tensor) or tuple(tensor.shape) != wanted:
                found = tuple(tensor.shape) if isinstance(tensor, Tensor) else "missing"
                what = f"{name} is {found}, its sizes say {wanted}"
                raise Fault(Exit.CHECKPOINT, what, str(path), "give a checkpoint of nanoGPT or build-nanogpt")
            rows = slice(*place.rows)
            parameters[place.ours][rows] = check_numbers(tensor, name, path)[rows]
            if name == EMBEDDING and head is not None and not torch.equal(head, tensor):
                what = "lm_head.weight differs from the token embedding: the output layer is not tied"
                raise Fault(Exit.CHECKPOINT, what, str(path), "nanoGPT ties them")
    if odd := [name for name in tensors if not name.endswith((".attn.bias", ".attn.masked_bias"))]:
        what = f"{odd[0]} is unexpected"
        raise Fault(Exit.CHECKPOINT, what, str(path), "give a checkpoint of nanoGPT or build-nanogpt")
    return model


def _load(path: Path) -> Mapping[str, Any]:
    """The values of a file of torch.save, every byte of it checked against its checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        what = f"not a file of torch.save, or truncated: {error}"
        raise Fault(Exit.CHECKPOINT, what, str(path), "copy it again") from None
    if damaged:
        raise Fault(Exit.CHECKPOINT, f"damaged: the checksum of {damaged} is wrong", str(path), "copy it again")
    try:
        with safe_globals(CONFIGS):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch and the pickle machinery raise many kinds: the answer is the same
        asked = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it asks to run {asked[1]}, and nothing in a checkpoint is run" if asked else "its pickle is refused"
        fix = "where you trust it, save the weights alone: torch.save({'model': ..., 'model_args': {...}}, 'ckpt.pt')"
        raise Fault(Exit.CHECKPOINT, what, str(path), fix) from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        what = "not nanoGPT's checkpoint: it holds no 'model'"
        raise Fault(Exit.CHECKPOINT, what, str(path), "give the ckpt.pt of nanoGPT's train.py")
    return content


def _find_sizes(content: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], str]:
    """nanoGPT's model_args, or the fields of build-nanogpt's config; and the kind of GELU that each computes."""
    config = content.get("config")
    if isinstance(config, SimpleNamespace):
        return vars(config), "gelu"
    sizes = content.get("model_args")
    if not isinstance(sizes, dict):
        what = "not nanoGPT's checkpoint: it holds no 'model_args'"
        raise Fault(Exit.CHECKPOINT, what, str(path), "give the ckpt.pt of nanoGPT's train.py")
    return sizes, "gelu-erf"


def _read_shape(sizes: Mapping[str, Any], mlp: str, path: Path) -> Shape:
    values = {ours: sizes.get(theirs) for ours, theirs in SIZES.items()}
    numbers: dict[str, Any] = {ours: value for ours, value in values.items() if type(value) is int and value >= 1}
    if odd := [f"{SIZES[ours]} is {value!r}" for ours, value in values.items() if ours not in numbers]:
        raise Fault(Exit.CHECKPOINT, f"no size: {', '.join(odd)}", str(path), "restore the file")
    if numbers["d_model"] % numbers["n_head"]:
        what = f"n_embd {numbers['d_model']} does not divide into {numbers['n_head']} heads"
        raise Fault(Exit.CHECKPOINT, what, str(path), "restore the file")
    if numbers["vocab_size"] == PADDED_VOCABULARY:
        numbers["vocab_size"] = GPT2_VOCABULARY
    bias = sizes.get("bias", True) is not False
    return Shape(**numbers, d_ff=4 * numbers["d_model"], mlp=mlp, bias=bias)
