"""Names, shapes and dtypes of a model's tensors as its file has them, without reading the numbers."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatoken.checkpoint.commit import find_checkpoint
from megatoken.checkpoint.tensor_files import MODEL, TensorReader
from megatoken.config.model_config import ModelConfig
from megatoken.convert.hf.load import find_folder, open_tensors
from megatoken.convert.llmc import list_llmc_params
from megatoken.convert.load_pretrained import find_format
from megatoken.convert.nanogpt import read_content
from megatoken.model.gpt import GPT

NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # of safetensors


class TensorInfo(NamedTuple):
    """A tensor in a file. dtype: torch's name, or of one that torch lacks the file's."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def list_tensors(name: str, warn: Callable[[str], None]) -> list[TensorInfo]:
    """The tensors of any model that `load_pretrained` reads, in the order of its file; raises as that does."""
    kind, path = find_format(name, warn)
    if kind == "run":
        folder, manifest = find_checkpoint(path, warn)
        reader = TensorReader(folder, manifest, MODEL)
        return [
            TensorInfo(name, shape, str(reader.dtype(name)).removeprefix("torch."))
            for name, shape in reader.shapes.items()
        ]
    if kind == "llmc":
        return [_describe(name, tensor) for name, tensor in list_llmc_params(path).items()]
    if kind == "nanogpt":
        return [_describe(name, tensor) for name, tensor in read_content(path)[0].items()]
    found = []
    for tensor, file in open_tensors(find_folder(name)):
        values = file.get_slice(tensor)
        found.append(
            TensorInfo(
                tensor, tuple(values.get_shape()), NAMES.get(dtype := values.get_dtype(), dtype)
            )
        )
    return found


def list_parameters(config: ModelConfig) -> list[TensorInfo]:
    """The parameters that a model of this architecture has, those that pad its vocabulary with them."""
    with torch.device("meta"):
        return [
            _describe(name, parameter)
            for name, parameter in GPT(config, seed=None).named_parameters()
        ]


def _describe(name: str, tensor: Tensor) -> TensorInfo:
    return TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
