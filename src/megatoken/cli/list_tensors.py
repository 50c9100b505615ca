"""List the names, shapes and dtypes of a model file's tensors without reading their values."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import Warn
from megatoken.model.gpt import GPT
from megatoken.store.commit import find_checkpoint
from megatoken.store.pretrained import find_weights
from megatoken.store.tensor_files import MODEL, TensorReader


class TensorInfo(NamedTuple):
    """A tensor in a file. dtype: as torch names it, such as "float32"."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def list_tensors(name: str, warn: Warn) -> list[TensorInfo]:
    """Return a model's tensors in the order of its file.

    name, warn: as in `load_weights`, which raises the same errors.
    """
    path, reader = find_weights(name, warn)
    if reader is None:
        folder, manifest = find_checkpoint(path, warn)
        file = TensorReader(folder, manifest, MODEL)
        return [
            TensorInfo(name, shape, str(file.dtype(name)).removeprefix("torch."))
            for name, shape in file.shapes.items()
        ]
    return _describe(reader.read_content(path)[0])


def list_parameters(config: ModelConfig) -> list[TensorInfo]:
    """Return an architecture's parameters; embeddings include the rows that pad the vocabulary."""
    with torch.device("meta"):
        return _describe(GPT(config, seed=None).named_parameters())


def _describe(tensors: Iterable[tuple[str, Tensor]]) -> list[TensorInfo]:
    return [
        TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors
    ]
