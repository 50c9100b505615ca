"""Reads the checkpoints of nanoGPT (ckpt.pt) and build-nanogpt without running code in them."""

import pickletools
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.serialization import safe_globals

from megatoken.config.model_config import ModelConfig
from megatoken.config.presets import GPT2_VOCABULARY
from megatoken.convert.fill_model import HEAD, fill_model
from megatoken.convert.hf.families import GPT2, build_config
from megatoken.errors import CheckpointError
from megatoken.model.gpt import GPT

CHECKPOINT, SUFFIXES = "ckpt.pt", (".pt", ".pth", ".ckpt")
WRAPPERS = re.compile(
    r"^((_orig_mod|module)\.)+"
)  # prefixes of torch.compile and DistributedDataParallel
FIELDS = {
    **{"n_layer": "n_layer", "n_head": "n_head", "d_model": "n_embd"},
    **{"vocab_size": "vocab_size", "seq_len": "block_size", "bias": "bias"},
}
EMBEDDING = "transformer.wte.weight"
PADDED_VOCABULARY = 50304  # GPT-2's rounded up: the last 47 rows belong to no token
# build-nanogpt pickles its sizes as an object of its own class; it is read as plain attributes.
CONFIG_CLASSES: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (SimpleNamespace, f"{module}.GPTConfig") for module in ("__main__", "model", "train_gpt2")
]
# What a pickle may name: containers and tensors. torch would also call what takes memory, such as bytearray(2**40).
NAMED = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)|torch \w+Storage|torch (Size|device)"
    r"|torch (b?float|u?int)\d+|_codecs encode|(__main__|model|train_gpt2) GPTConfig"
)
LARGEST_PICKLE = 16 << 20  # without its tensors
OTHER_FILE = "give a checkpoint of nanoGPT or build-nanogpt"


def read_nanogpt(path: Path) -> GPT:
    """The model of a checkpoint, on the CPU in fp32.

    Raises CheckpointError in one line for a file that is truncated, damaged, asks to run code, or is not nanoGPT's.
    """
    state, config = read_content(path)
    tensors = {WRAPPERS.sub("", name): tensor for name, tensor in state.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not GPT2.buffers.fullmatch(name)}
    if config.vocab_size == GPT2_VOCABULARY:
        tensors |= {
            name: tensors[name][:GPT2_VOCABULARY] for name in (EMBEDDING, HEAD) if name in tensors
        }
    return fill_model(
        config, tensors, replace(GPT2, conv1d=()).view_params, str(path)
    )  # nn.Linear here


def read_content(path: Path) -> tuple[dict[str, Tensor], ModelConfig]:
    """The memory-mapped tensors of a checkpoint by its names, and its architecture. Raises as `read_nanogpt`."""
    content = _load(path)
    build_nanogpt = isinstance(content.get("config"), SimpleNamespace)
    args = vars(content["config"]) if build_nanogpt else content.get("model_args")
    state = content.get("model")
    if (
        not isinstance(state, dict)
        or not all(map(_is_entry, state.items()))
        or not isinstance(args, dict)
    ):
        raise CheckpointError(
            "not nanoGPT's checkpoint: it holds no 'model' with 'model_args'", str(path), OTHER_FILE
        )
    sizes, mlp = {"bias": True, **args}, "gelu" if build_nanogpt else "gelu-erf"
    if str(sizes.get("vocab_size")) == str(PADDED_VOCABULARY):
        sizes["vocab_size"] = GPT2_VOCABULARY
    return state, build_config(sizes, FIELDS, str(path), {"mlp": mlp})


def _is_entry(entry: tuple[Any, Any]) -> bool:
    """Whether it is a name with a plain tensor in memory."""
    name, tensor = entry
    is_plain = (
        isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
    )
    return isinstance(name, str) and is_plain and tensor.ndim > 0


def _list_names(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Iterator[str]:
    """The classes and functions that a pickle names; "?" for a name that it puts together."""
    if entry.file_size > LARGEST_PICKLE:
        raise ValueError(f"{entry.filename} has {entry.file_size:,} bytes")
    for opcode, argument, _ in pickletools.genops(archive.read(entry)):
        if opcode.name in ("GLOBAL", "INST", "STACK_GLOBAL"):
            yield str(argument or "?")


def _load(path: Path) -> Mapping[str, Any]:
    """The values of a file of torch.save; every byte is checked against the checksums, every name before it is used."""
    asked: list[str] = []
    try:
        with zipfile.ZipFile(path) as archive:
            stored = all(
                entry.file_size == entry.compress_size for entry in archive.infolist()
            )  # as torch does
            damaged = archive.testzip() if stored else "its directory"
            for entry in () if damaged else archive.infolist():
                if entry.filename.lower().endswith(".pkl"):
                    asked += [
                        name for name in _list_names(archive, entry) if not NAMED.fullmatch(name)
                    ]
    except Exception as error:  # besides BadZipFile, the module raises many types
        what = f"not a file of torch.save, or truncated: {error}"
        raise CheckpointError(what, str(path), "copy it again") from None
    if damaged:
        raise CheckpointError(
            f"damaged: the checksum of {damaged} is wrong", str(path), "copy it again"
        )
    try:
        if asked:
            raise ValueError(asked)
        with safe_globals(CONFIG_CLASSES):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch and the unpickler raise many types
        what = "its pickle is refused"
        if asked:
            what = f"it asks to run {asked[0]:.80}, and nothing in a checkpoint is run"
        fix = "where you trust it, save the weights alone: torch.save({'model': ..., 'model_args': {...}}, 'ckpt.pt')"
        raise CheckpointError(what, str(path), fix) from error
    return content if isinstance(content, dict) else {}
