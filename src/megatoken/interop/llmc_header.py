"""The header of llm.c's checkpoint: 256 little-endian int32. Source: gpt2_write_to_checkpoint of its train_gpt2.cu."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatoken.errors import Exit, Fault

MAGIC, HEADER_BYTES = 20240326, 1024
VERSIONS = {3: "fp32", 5: "bf16"}  # with a padded vocabulary; 1 and 2 are forms that llm.c itself reads no more
ITEM_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointHeader:
    """What a checkpoint says of itself. dtype: of every tensor, fp32 or bf16; d_ff is 4 x d_model."""

    dtype: str
    seq_len: int
    vocab_size: int
    n_layer: int
    n_head: int
    d_model: int
    padded_vocab_size: int

    @property
    def parameters(self) -> int:
        """Values that follow the header: embeddings, 12 C^2 + 13 C a block, the last norm."""
        rows, c = self.padded_vocab_size + self.seq_len, self.d_model
        return rows * c + self.n_layer * (12 * c * c + 13 * c) + 2 * c


def is_checkpoint(path: Path) -> bool:
    """Whether a file begins as llm.c's checkpoints do."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC.to_bytes(4, "little")
    except OSError:
        return False


def read_checkpoint_header(path: Path) -> CheckpointHeader:
    """The header of a checkpoint whose file is as long as it says.

    Raises Fault(CHECKPOINT) naming what is wrong: absent, foreign, another version, no sizes, truncated.
    """
    again = "copy it again, or write it again with llm.c's train_gpt2.py"
    try:
        with path.open("rb") as file:
            raw = file.read(HEADER_BYTES)
        size = path.stat().st_size
    except OSError as error:
        what = f"cannot read llm.c's checkpoint: {error.strerror}"
        raise Fault(Exit.CHECKPOINT, what, str(path), "check the path") from None
    if len(raw) < HEADER_BYTES:
        what = f"not llm.c's checkpoint: {len(raw)} bytes, less than its header of {HEADER_BYTES}"
        raise Fault(Exit.CHECKPOINT, what, str(path), again)
    magic, version, *sizes = (int(value) for value in np.frombuffer(raw, dtype="<i4", count=8))
    if magic != MAGIC:
        what = f"not llm.c's checkpoint: its magic number is {magic}, not {MAGIC}"
        raise Fault(Exit.CHECKPOINT, what, str(path), "give a model_*.bin or gpt2_*.bin of llm.c")
    if version not in VERSIONS:
        fix = "versions 3 (fp32) and 5 (bf16) are read; write it again with llm.c's train_gpt2.py"
        raise Fault(Exit.CHECKPOINT, f"llm.c's checkpoint is of version {version}", str(path), fix)
    names = ("seq_len", "vocab_size", "n_layer", "n_head", "d_model", "padded_vocab_size")
    named = dict(zip(names, sizes, strict=True))
    header = CheckpointHeader(dtype=VERSIONS[version], **named)
    if min(sizes) < 1 or header.padded_vocab_size < header.vocab_size or header.d_model % header.n_head:
        what = f"the header makes no sense: {', '.join(f'{name} {value}' for name, value in named.items())}"
        raise Fault(Exit.CHECKPOINT, what, str(path), again)
    expected = HEADER_BYTES + header.parameters * ITEM_BYTES[header.dtype]
    if size != expected:
        reason = "truncated" if size < expected else "longer than its header says"
        raise Fault(Exit.CHECKPOINT, f"{reason}: {size:,} bytes, expected {expected:,}", str(path), again)
    return header


def write_checkpoint_header(header: CheckpointHeader) -> bytes:
    """The 1,024 bytes before the tensors."""
    values = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    version = next(number for number, dtype in VERSIONS.items() if dtype == header.dtype)
    sizes = (header.seq_len, header.vocab_size, header.n_layer, header.n_head, header.d_model)
    values[:8] = (MAGIC, version, *sizes, header.padded_vocab_size)
    return values.tobytes()
