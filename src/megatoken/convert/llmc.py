"""Reads and writes llm.c's GPT-2 checkpoints: a header of 256 int32, then each tensor of all layers side by side.

Versions 3 (fp32) and 5 (bf16). Source: write_model of llm.c's train_gpt2.py, gpt2_write_to_checkpoint of its
train_gpt2.cu.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatoken.config.model_config import ModelConfig
from megatoken.convert.fill_model import fill_model
from megatoken.data.byte_bpe import byte_characters
from megatoken.data.tokenizer import Tokenizer
from megatoken.errors import CheckpointError, ConfigError
from megatoken.model.gpt import GPT

MAGIC, HEADER_BYTES = 20240326, 1024
LARGEST_DEPTH = 4096  # layers; a header may claim millions that are 1 wide
VERSIONS = {
    3: torch.float32,
    5: torch.bfloat16,
}  # with a padded vocabulary; llm.c itself no longer reads 1 and 2
# In the header's order; the padded vocabulary follows.
SIZES = ("seq_len", "vocab_size", "n_layer", "n_head", "d_model")
MODULES = ("norm1", "attention.qkv", "attention.out", "norm2", "mlp.up", "mlp.down")
TOKENIZER_MAGIC, TOKENIZER_VERSION = 20240328, 2


def read_header(path: Path) -> tuple[ModelConfig, torch.dtype, int]:
    """The architecture, the dtype and the rows of the padded vocabulary.

    Raises CheckpointError for a file that is missing, not llm.c's, of another version, or not as long as it should be.
    """
    try:
        magic, version, *values = np.fromfile(path, "<i4", count=8).tolist()
        sizes = dict(zip((*SIZES, "padded_vocab_size"), values, strict=True))
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        what = f"cannot read llm.c's checkpoint: {getattr(error, 'strerror', 'shorter than its header')}"
        raise CheckpointError(what, str(path), "check the path") from None
    if magic != MAGIC or version not in VERSIONS:
        what = f"not llm.c's checkpoint of version 3 (fp32) or 5 (bf16): magic number {magic}, version {version}"
        raise CheckpointError(
            what, str(path), "give a model_*.bin or gpt2_*.bin that llm.c's train_gpt2.py wrote"
        )
    rows, width = sizes.pop("padded_vocab_size"), sizes["d_model"]
    numbers = (
        (rows + sizes["seq_len"]) * width + sizes["n_layer"] * (12 * width + 13) * width + 2 * width
    )
    expected = HEADER_BYTES + numbers * VERSIONS[version].itemsize
    is_possible = (
        min(values) >= 1 and sizes["n_layer"] <= LARGEST_DEPTH and rows >= sizes["vocab_size"]
    )
    if not is_possible or width % sizes["n_head"] or size != expected:
        described = ", ".join(f"{name} {value}" for name, value in sizes.items())
        what = (
            f"damaged: {size:,} bytes, its header says {expected:,} ({described}, padded to {rows})"
        )
        raise CheckpointError(
            what, str(path), "copy it again, or write it again with llm.c's train_gpt2.py"
        )
    return _gpt2_config(**sizes), VERSIONS[version], rows


def read_llmc(path: Path) -> GPT:
    """The model of a checkpoint, on the CPU in fp32. Raises CheckpointError naming the file and what is wrong."""
    config, dtype, padded_rows = read_header(path)
    views = list_llmc_params(path)
    values = torch.from_file(
        str(path), size=path.stat().st_size // dtype.itemsize, dtype=dtype
    )  # memory-mapped
    values, tensors = values[HEADER_BYTES // dtype.itemsize :], {}
    for name, view in views.items():
        tensors[name] = values[: view.numel()].view(view.shape)
        rows = padded_rows if name == "tokens.weight" else len(view)
        values = values[rows * view[0].numel() :]
    return fill_model(config, tensors, _view_params, str(path))


def list_llmc_params(path: Path) -> dict[str, Tensor]:
    """The parameters of a checkpoint by our names, in its order, on the meta device. Raises as `read_llmc`."""
    config, dtype, _ = read_header(path)
    with torch.device("meta"):
        views = _view_params(dict(GPT(config).named_parameters()), config)
    return {name: view.to(dtype) for name, view in views.items()}


def write_llmc(path: Path, model: GPT, dtype: str) -> None:
    """Write a checkpoint. dtype: fp32 (version 3) or bf16 (version 5). Raises ConfigError unless the model is GPT-2."""
    config = model.config
    found = config.architecture()
    wanted = _gpt2_config(**{name: found[name] for name in SIZES}).architecture()
    if odd := [
        f"{name} {value}, not {wanted[name]}"
        for name, value in found.items()
        if value != wanted[name]
    ]:
        what = f"llm.c computes GPT-2 alone, this model has {'; '.join(odd)}"
        raise ConfigError(what, "--to llmc", "export it with --to hf")
    version = {"fp32": 3, "bf16": 5}[dtype]
    padding = (
        (config.padded_vocab_size - config.vocab_size) * config.d_model * VERSIONS[version].itemsize
    )
    with path.open("wb") as file:
        file.write(
            _header(MAGIC, version, *(found[name] for name in SIZES), config.padded_vocab_size)
        )
        for name, view in _view_params(dict(model.named_parameters()), config).items():
            tensor = view.to(VERSIONS[version]).contiguous()
            file.write(tensor.view(torch.uint8).numpy().tobytes())
            if name == "tokens.weight":
                file.write(bytes(padding))


def _gpt2_config(**sizes: int) -> ModelConfig:
    return ModelConfig(**sizes, d_ff=4 * sizes["d_model"])  # type: ignore[arg-type]


def _header(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes().ljust(HEADER_BYTES, b"\0")


def _view_params(params: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our parameters in the order of the file, without the rows that pad the vocabulary."""
    names = ["tokens.weight", "positions.weight"]
    for module in MODULES:
        for kind in ("weight", "bias"):
            names += [f"blocks.{layer}.{module}.{kind}" for layer in range(config.n_layer)]
    names += ["norm.weight", "norm.bias"]
    return {
        name: params[name].detach()[: config.vocab_size if name == "tokens.weight" else None]
        for name in names
    }


def write_tokenizer(path: Path, tokenizer: Tokenizer) -> None:
    """Write the file with which llm.c prints its samples: for each id one byte with a length, then so many bytes."""
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    tokens = {id: token for token, id in json.loads(tokenizer.to_json())["model"]["vocab"].items()}
    with path.open("wb") as file:
        file.write(_header(TOKENIZER_MAGIC, TOKENIZER_VERSION, tokenizer.vocab_size, tokenizer.eot))
        for id in range(tokenizer.vocab_size):
            token = tokens.get(id, "?")  # llm.c wants at least one byte, for unused ids too
            is_bytes = all(character in byte_of for character in token)
            text = (
                bytes(byte_of[character] for character in token) if is_bytes else token.encode()
            )[:255]
            file.write(bytes([len(text)]) + text)
