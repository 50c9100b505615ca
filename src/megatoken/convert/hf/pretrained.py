"""Read a Hugging Face folder or hub name, which may hold a LoRA adapter of PEFT."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import CheckpointError, Warn
from megatoken.convert.hf import peft
from megatoken.convert.hf.load import (
    WEIGHTS,
    find_folder,
    load_hf,
    open_tensors,
    read_family,
    refuse_missing_path,
)
from megatoken.convert.vocabulary import with_vocabulary
from megatoken.store.pretrained import Pretrained, load_weights, read_architecture
from megatoken.text.tokenizer import TOKEN_IDS, find_vocabulary


def find(path: Path) -> Path:
    """Return the path: one that does not exist may be a hub name. Raises CheckpointError if not."""
    refuse_missing_path(str(path))
    return path


def read_content(path: Path) -> tuple[Iterable[tuple[str, Tensor]], ModelConfig]:
    """Return the tensors by name, memory-mapped, and the architecture. Raises CheckpointError."""
    folder = find_folder(str(path))
    base = peft.read_base(folder)
    config = read_architecture(base) if base else read_family(folder)[1]
    tensors = open_tensors(folder, peft.WEIGHTS if base else WEIGHTS)
    return ((name, file.get_tensor(name)) for name, file in tensors), config


def load(path: Path, warn: Warn) -> Pretrained:
    """Load the model; an adapter is merged into its base. Raises CheckpointError."""
    source, folder = str(path), find_folder(str(path))
    base = peft.read_base(folder)
    if not base:
        model, folder = load_hf(str(folder))
        return with_vocabulary(model, folder, source)
    try:
        loaded = load_weights(base, warn)
    except CheckpointError as error:
        fix = "set it to the folder or hub name of an unquantized model"
        raise CheckpointError(f"{peft.BASE}: {error}", folder / peft.CONFIG, fix) from error
    peft.merge_peft(loaded.model, folder)
    if not find_vocabulary(folder):
        return replace(loaded, source=source)
    return with_vocabulary(loaded.model, folder, source, loaded.vocabulary.files.get(TOKEN_IDS, ""))
