"""llm.c's model checkpoints, both ways: GPT-2 in one file, all blocks' tensors of a kind side by side.

In: a file of version 3 (fp32) or 5 (bf16). Out: a GPT in fp32; and back. Source: write_model of llm.c's train_gpt2.py
and gpt2_build_from_checkpoint of its train_gpt2.cu. The optimizer's state files are not read.
"""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatoken.data.gpt2_vocabulary import byte_characters
from megatoken.data.tokenizer import Tokenizer
from megatoken.errors import Exit, Fault
from megatoken.interop.llmc_header import (
    HEADER_BYTES,
    CheckpointHeader,
    read_checkpoint_header,
    write_checkpoint_header,
)
from megatoken.interop.tensors import build_empty, check_numbers
from megatoken.model.gpt import GPT
from megatoken.presets import Shape

PARTS = ("norm1", "attention.qkv", "attention.out", "norm2", "mlp.up", "mlp.down")
TOKENIZER_MAGIC, TOKENIZER_VERSION = 20240328, 2


def _list_names(n_layer: int) -> Iterator[str]:
    """Our names of its tensors, in the order of the file."""
    yield from ("tokens.weight", "positions.weight")
    for part in PARTS:
        for kind in ("weight", "bias"):
            yield from (f"blocks.{i}.{part}.{kind}" for i in range(n_layer))
    yield from ("norm.weight", "norm.bias")


def read_checkpoint(path: Path) -> GPT:
    """The model of a checkpoint, on the CPU in fp32. Raises Fault(CHECKPOINT) naming the file and what is wrong."""
    header = read_checkpoint_header(path)
    shape = Shape(
        n_layer=header.n_layer,
        n_head=header.n_head,
        d_model=header.d_model,
        d_ff=4 * header.d_model,
        vocab_size=header.vocab_size,
        seq_len=header.seq_len,
    )
    model = build_empty(shape)
    parameters = dict(model.named_parameters())
    kind = np.dtype("<f4" if header.dtype == "fp32" else "<i2")  # numpy has no bf16: torch reads its bits
    offset = HEADER_BYTES
    with torch.no_grad():
        for name in _list_names(header.n_layer):
            target = parameters[name]
            sizes = (header.padded_vocab_size, header.d_model) if name == "tokens.weight" else tuple(target.shape)
            values = torch.from_numpy(np.fromfile(path, dtype=kind, count=int(np.prod(sizes)), offset=offset))
            offset += values.numel() * kind.itemsize
            tensor = check_numbers(values if header.dtype == "fp32" else values.view(torch.bfloat16), name, path)
            rows = header.vocab_size if name == "tokens.weight" else len(target)
            target[:rows] = tensor.view(sizes)[:rows]
    return model


def write_checkpoint(path: Path, model: GPT, dtype: str) -> None:
    """Write a model as llm.c does. dtype: fp32 (version 3) or bf16 (version 5).

    Raises Fault(CONFIG) for a model that is not GPT-2's: llm.c has one architecture.
    """
    shape = model.shape
    sizes = ("n_layer", "n_head", "d_model", "vocab_size", "seq_len")
    only = Shape(**{name: getattr(shape, name) for name in sizes}, d_ff=4 * shape.d_model)
    pairs = {f.name: (getattr(shape, f.name), getattr(only, f.name)) for f in fields(Shape)}
    if odd := [f"{name} {mine}, not {theirs}" for name, (mine, theirs) in pairs.items() if mine != theirs]:
        what = f"llm.c computes GPT-2 alone, this model has {'; '.join(odd)}"
        raise Fault(Exit.CONFIG, what, "--to llmc", "export it with --to hf")
    header = CheckpointHeader(
        dtype=dtype,
        seq_len=shape.seq_len,
        vocab_size=shape.vocab_size,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        d_model=shape.d_model,
        padded_vocab_size=shape.padded_vocab_size,
    )
    parameters = dict(model.named_parameters())
    with path.open("wb") as file:
        file.write(write_checkpoint_header(header))
        for name in _list_names(shape.n_layer):
            tensor = parameters[name].detach()
            if name == "tokens.weight":
                tensor = tensor.clone()
                tensor[shape.vocab_size :] = 0.0
            file.write(_bytes_of(tensor, dtype))


def _bytes_of(tensor: Tensor, dtype: str) -> bytes:
    if dtype == "fp32":
        return tensor.float().contiguous().numpy().astype("<f4", copy=False).tobytes()
    return tensor.bfloat16().contiguous().view(torch.int16).numpy().astype("<i2", copy=False).tobytes()


def write_tokenizer(path: Path, tokenizer: Tokenizer) -> None:
    """The file from which llm.c prints what it samples: for each id a byte with a length, then so many bytes."""
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    spelled = {id: token for token, id in json.loads(tokenizer.to_json())["model"]["vocab"].items()}
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:4] = (TOKENIZER_MAGIC, TOKENIZER_VERSION, tokenizer.vocab_size, tokenizer.eot)
    with path.open("wb") as file:
        file.write(header.tobytes())
        for id in range(tokenizer.vocab_size):
            token = spelled.get(id, "?")  # llm.c wants at least one byte of ids that nothing uses, too
            known = all(character in byte_of for character in token)
            piece = (bytes(byte_of[character] for character in token) if known else token.encode())[:255]
            file.write(bytes([len(piece)]) + piece)
