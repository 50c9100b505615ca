"""List the names, shapes and dtypes of a model file's tensors without reading their values."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

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
        return [_describe(name, shape, file.dtypes[name]) for name, shape in file.shapes.items()]
    return [_describe(name, each.shape, each.dtype) for name, each in reader.read_content(path)[0]]


def list_parameters(config: ModelConfig) -> list[TensorInfo]:
    """Return an architecture's parameters; embeddings include the rows that pad the vocabulary."""
    with torch.device("meta"):
        params = GPT(config, seed=None).named_parameters()
    return [_describe(name, param.shape, param.dtype) for name, param in params]


def _describe(name: str, shape: Sequence[int], dtype: torch.dtype) -> TensorInfo:
    return TensorInfo(name, tuple(shape), str(dtype).removeprefix("torch."))
