"""List the names, shapes and dtypes of a model file's tensors without reading their values."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import Warn
from megatoken.convert.hf.load import find_folder, open_tensors
from megatoken.convert.load_pretrained import READERS, find_format
from megatoken.model.gpt import GPT
from megatoken.store.commit import find_checkpoint
from megatoken.store.tensor_files import MODEL, TensorReader


class TensorInfo(NamedTuple):
    """A tensor in a file. dtype: as torch names it, such as "float32"."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def list_tensors(name: str, warn: Warn) -> list[TensorInfo]:
    """Return a model's tensors in the order of its file.

    name, warn: as in `load_pretrained`, which raises the same errors.
    """
    kind, path = find_format(name, warn)
    if kind == "run":
        folder, manifest = find_checkpoint(path, warn)
        reader = TensorReader(folder, manifest, MODEL)
        return [
            TensorInfo(name, shape, str(reader.dtype(name)).removeprefix("torch."))
            for name, shape in reader.shapes.items()
        ]
    if kind in READERS:
        read_content, _ = READERS[kind]
        return _describe(read_content(path)[0].items())
    tensors = open_tensors(find_folder(name))
    return _describe((tensor, file.get_tensor(tensor)) for tensor, file in tensors)  # memory-mapped


def list_parameters(config: ModelConfig) -> list[TensorInfo]:
    """Return an architecture's parameters; embeddings include the rows that pad the vocabulary."""
    with torch.device("meta"):
        return _describe(GPT(config, seed=None).named_parameters())


def _describe(tensors: Iterable[tuple[str, Tensor]]) -> list[TensorInfo]:
    return [
        TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors
    ]
