"""Read and write llm.c's GPT-2 checkpoints of versions 3 (fp32) and 5 (bf16).

A file holds a header of 256 int32, then the parameters. Each parameter of a block is stored for all
layers before the next parameter follows. Source: write_model in llm.c's train_gpt2.py,
gpt2_write_to_checkpoint in its train_gpt2.cu.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import CheckpointError, ConfigError, Warn
from megatoken.convert.fill_model import AGAIN, fill_model
from megatoken.convert.vocabulary import with_vocabulary
from megatoken.model.gpt import GPT
from megatoken.store.pretrained import Pretrained
from megatoken.text.tokenizer import Tokenizer

MAGIC = 20240326
HEADER_BYTES = 1024
LARGEST_DEPTH = 4096  # layers
VERSIONS = {3: torch.float32, 5: torch.bfloat16}
SIZES = ("seq_len", "vocab_size", "n_layer", "n_head", "d_model")  # then the padded vocabulary
MODULES = ("norm1", "attention.qkv", "attention.out", "norm2", "mlp.up", "mlp.down")
TOKENIZER_MAGIC = 20240328
TOKENIZER_VERSION = 2


def find(path: Path) -> Path | None:
    """Return the file to read, or None if the path holds another format."""
    return path if path.is_file() or path.suffix == ".bin" else None


def load(path: Path, warn: Warn) -> Pretrained:
    """Load the model with the tokenizer in its folder. Raises CheckpointError."""
    return with_vocabulary(read_llmc(path), path.parent, str(path))


def read_header(path: Path) -> tuple[ModelConfig, torch.dtype, int]:
    """Return a checkpoint's architecture, dtype, and number of rows in the padded token embedding.

    Raises CheckpointError for a file that is missing, damaged or not llm.c's.
    """
    try:
        magic, version, *sizes, rows = np.fromfile(path, "<i4", count=8).tolist()
        dtype = VERSIONS[version if magic == MAGIC else -1]
        config = _gpt2_config(sizes)
        n_bytes = path.stat().st_size
    except (OSError, ValueError, KeyError) as error:
        what = f"not an llm.c checkpoint of version 3 or 5: {error}"
        raise CheckpointError(what, path, "use a .bin file of llm.c's train_gpt2.py") from None
    width = config.d_model
    n_params = (rows + config.seq_len) * width + 2 * width
    n_params += config.n_layer * (12 * width + 13) * width
    is_valid = min(sizes) > 0 and width % config.n_head == 0 and rows >= config.vocab_size
    is_valid = is_valid and config.n_layer <= LARGEST_DEPTH
    if not is_valid or n_bytes != HEADER_BYTES + n_params * dtype.itemsize:
        what = f"{n_bytes:,} bytes do not match the header's sizes {sizes}, {rows}"
        raise CheckpointError(what, path, AGAIN)
    return config, dtype, rows


def read_llmc(path: Path) -> GPT:
    """Load the model of a checkpoint on the CPU in fp32. Raises CheckpointError."""
    config, dtype, padded_rows = read_header(path)
    n_values = path.stat().st_size // dtype.itemsize
    values = torch.from_file(str(path), size=n_values, dtype=dtype)  # memory-mapped
    offset = HEADER_BYTES // dtype.itemsize
    tensors = {}
    for name, view in read_content(path)[0]:
        tensors[name] = values[offset : offset + view.numel()].view(view.shape)
        rows = padded_rows if name == "tokens.weight" else len(view)
        offset += rows * view[0].numel()
    return fill_model(config, tensors, _view_params, str(path))


def read_content(path: Path) -> tuple[Iterable[tuple[str, Tensor]], ModelConfig]:
    """Return a checkpoint's parameters and its architecture.

    The parameters are on the meta device, in file order, by megatoken's names.
    """
    config, dtype, _ = read_header(path)
    with torch.device("meta"):
        views = _view_params(dict(GPT(config).named_parameters()), config)
    return ((name, view.to(dtype)) for name, view in views.items()), config


def write_llmc(path: Path, model: GPT, dtype: str) -> None:
    """Write a checkpoint in fp32 or bf16. Raises ConfigError unless the model is a GPT-2."""
    config = model.config
    sizes = [getattr(config, name) for name in SIZES]
    gpt2 = _gpt2_config(sizes).architecture()
    differences = [name for name, value in config.architecture().items() if value != gpt2[name]]
    if differences:
        what = f"llm.c has only GPT-2; this model differs in {', '.join(differences)}"
        raise ConfigError(what, "--to llmc", "use --to hf")
    version = {"fp32": 3, "bf16": 5}[dtype]
    padded_rows = config.padded_vocab_size
    with path.open("wb") as file:
        file.write(_header(MAGIC, version, *sizes, padded_rows))
        for name, view in _view_params(dict(model.named_parameters()), config).items():
            tensor = view.to(VERSIONS[version]).contiguous()
            file.write(tensor.view(torch.uint8).numpy().tobytes())
            if name == "tokens.weight":
                file.write(bytes((padded_rows - len(view)) * tensor[0].nbytes))


def _gpt2_config(sizes: list[int]) -> ModelConfig:
    fields: dict[str, Any] = dict(zip(SIZES, sizes, strict=True))
    return ModelConfig(**fields, d_ff=4 * fields["d_model"])


def _header(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes().ljust(HEADER_BYTES, b"\0")


def _view_params(params: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the parameters in file order, without the rows that pad the vocabulary."""
    names = ["positions.weight"]
    for module in MODULES:
        for kind in ("weight", "bias"):
            names += [f"blocks.{layer}.{module}.{kind}" for layer in range(config.n_layer)]
    names += ["norm.weight", "norm.bias"]
    views = {"tokens.weight": params["tokens.weight"].detach()[: config.vocab_size]}
    return views | {name: params[name].detach() for name in names}


def write_tokenizer(path: Path, tokenizer: Tokenizer) -> None:
    """Write the tokenizer file that llm.c needs to print samples as text.

    For each id, it holds the token's length in one byte, then the token's bytes.
    """
    with path.open("wb") as file:
        file.write(_header(TOKENIZER_MAGIC, TOKENIZER_VERSION, tokenizer.vocab_size, tokenizer.eot))
        for id in range(tokenizer.vocab_size):
            content = tokenizer.decode_bytes(id)[:255] or b"?"  # llm.c requires at least one byte
            file.write(bytes([len(content)]) + content)
