"""Read checkpoints of nanoGPT (ckpt.pt) and build-nanogpt without running code in them."""

import pickletools
import re
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.serialization import safe_globals

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import GPT2_VOCABULARY
from megatoken.base.errors import CheckpointError, Warn
from megatoken.convert.fill_model import AGAIN, HEAD, fill_model
from megatoken.convert.hf.families import OTHERS, Family, build_config
from megatoken.convert.vocabulary import with_vocabulary
from megatoken.model.gpt import GPT
from megatoken.store.pretrained import Pretrained

CHECKPOINT = "ckpt.pt"
SUFFIXES = (".pt", ".pth", ".ckpt")
WRAPPERS = re.compile(r"^((_orig_mod|module)\.)+")
FAMILY = OTHERS["nanogpt"]
EMBEDDING = "transformer.wte.weight"
PADDED_VOCABULARY = 50304  # GPT-2's rounded up: the last 47 rows have no token
# build-nanogpt pickles its sizes as an instance of its GPTConfig; read plain attributes.
CONFIG_CLASSES: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (SimpleNamespace, f"{module}.GPTConfig") for module in ("__main__", "model", "train_gpt2")
]
# Names allowed in a pickle: containers and tensors. torch would also allow bytearray(2**40).
ALLOWED = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)|torch \w+Storage"
    r"|torch (Size|device)|torch (b?float|u?int)\d+|_codecs encode"
    r"|(__main__|model|train_gpt2) GPTConfig"
)


def find(path: Path) -> Path | None:
    """Return the file to read, or None if the path holds another format."""
    path = path / CHECKPOINT if (path / CHECKPOINT).is_file() else path  # nanoGPT's out_dir
    return path if path.suffix in SUFFIXES else None


def load(path: Path, warn: Warn) -> Pretrained:
    """Load the model with the tokenizer in its folder. Raises CheckpointError."""
    model = read_nanogpt(path)  # the file does not name the GELU
    gelu = "erf, as since June 2023" if model.config.mlp == "gelu-erf" else "tanh"
    warn(f"{path.name}: nanoGPT's GELU is taken as {gelu}")
    return with_vocabulary(model, path.parent, str(path))


def read_nanogpt(path: Path) -> GPT:
    """Load the model of a checkpoint on the CPU in fp32.

    Raises CheckpointError for a file that is damaged, would run code, or is not nanoGPT's.
    """
    state, config = read_content(path)
    tensors = select_weights(state, FAMILY, config.vocab_size)
    return fill_model(config, tensors, FAMILY.view_params, str(path))


def select_weights(
    state: Iterable[tuple[str, Tensor]], family: Family, vocab_size: int
) -> dict[str, Tensor]:
    """Return a checkpoint's weights without the rows that pad the vocabulary.

    Removes what torch.compile and DistributedDataParallel prepend to their names.
    """
    tensors = {WRAPPERS.sub("", name): tensor for name, tensor in state}
    return {
        name: tensor[:vocab_size] if name in (EMBEDDING, HEAD) and tensor.ndim else tensor
        for name, tensor in tensors.items()
        if not re.fullmatch(family.buffers, name)
    }


def read_content(path: Path) -> tuple[Iterable[tuple[str, Tensor]], ModelConfig]:
    """Return a checkpoint's tensors by name, memory-mapped, and its architecture.

    Raises CheckpointError.
    """
    content = load_archive(path)
    state: Any = content.get("model")
    config = content.get("config")
    is_build_nanogpt = isinstance(config, SimpleNamespace)
    args = vars(config) if is_build_nanogpt else content.get("model_args")
    # A tensor that is not contiguous can be much larger than its data in the file.
    is_state = isinstance(state, dict) and all(
        isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.is_contiguous()
        for tensor in state.values()
    )
    if not is_state or not isinstance(args, dict):
        what = "not a nanoGPT checkpoint: no 'model' with 'model_args'"
        raise CheckpointError(what, path, "give a checkpoint of nanoGPT or build-nanogpt")
    sizes = {"bias": True, **args}
    if sizes.get("vocab_size") == PADDED_VOCABULARY:
        sizes["vocab_size"] = GPT2_VOCABULARY
    # Before 2023-01-27, model_args had no bias, and until 2023-01-14 the output layer was not tied.
    # Until 2023-06-14, the GELU was tanh; that was before PyTorch's attention replaced the mask.
    is_old = "bias" not in args
    has_mask = any(re.search(FAMILY.buffers, name) for name in state)
    mlp = "gelu" if is_build_nanogpt or is_old or has_mask else "gelu-erf"
    config = build_config(sizes, FAMILY.fields, str(path), {"mlp": mlp})
    weights = select_weights(state.items(), FAMILY, config.vocab_size)
    if is_old and HEAD in weights:
        is_tied = torch.equal(weights[HEAD], weights.get(EMBEDDING, weights[HEAD]))
        config = replace(config, tie_embeddings=is_tied)
    return state.items(), config


def load_archive(path: Path) -> dict[str, Any]:
    """Return the content of a torch.save file, after checking its checksums and pickles.

    Tensors are memory-mapped. Raises CheckpointError.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check_archive(archive)
        with safe_globals(CONFIG_CLASSES):
            return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    except Exception as error:  # zipfile, torch and the unpickler raise many types
        what = f"cannot read a checkpoint of plain tensors: {str(error)[:200]}"
        raise CheckpointError(what, path, AGAIN) from error


def _check_archive(archive: zipfile.ZipFile) -> None:
    """Raise ValueError if an entry is damaged, or a pickle uses a name that ALLOWED rejects."""
    entries = archive.infolist()
    if any(entry.file_size != entry.compress_size for entry in entries) or archive.testzip():
        raise ValueError("damaged archive")
    for entry in entries:
        if not entry.filename.lower().endswith(".pkl"):
            continue
        for opcode, argument, _ in pickletools.genops(archive.read(entry)):
            is_name = opcode.name in ("GLOBAL", "INST", "STACK_GLOBAL")
            if is_name and not ALLOWED.fullmatch(str(argument)):  # None for STACK_GLOBAL
                raise ValueError(f"it calls {argument!s:.80}")
