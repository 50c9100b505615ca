"""`megatoken export`: a run, a checkpoint or anything else with weights into a folder of another program's form.

The folder is written under another name beside its place, proven to hold the same model, and renamed: half an export
never has the name that was asked for.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatoken.console import Console
from megatoken.data.tokenizer import Tokenizer
from megatoken.errors import Exit, Fault
from megatoken.interop.hf_export import prove_equal, write_hf
from megatoken.interop.llmc_checkpoint import read_checkpoint, write_checkpoint, write_tokenizer
from megatoken.interop.weights import load_weights
from megatoken.model.gpt import GPT

LLMC_MODEL, LLMC_TOKENIZER = "model.bin", "gpt2_tokenizer.bin"


@dataclass(frozen=True, slots=True)
class Proof:
    """What was compared before an export was given its name. difference: of logits, as a share of the largest."""

    verified: bool
    said: str
    difference: float | None = None


Write = Callable[[Path, GPT, Tokenizer, str], Proof]


def export(name: str, to: str, out: Path, dtype: str, console: Console) -> dict[str, Any]:
    """Write the model called `name` to the folder `out`, which must not exist, in the form `to`.

    dtype: of the weights, fp32 or bf16. Returns source, format, out, verified, max_relative_difference, ids_left_out.
    Raises Fault(STORAGE) for a target that exists or cannot be written, Fault(CONFIG) for a model that the form cannot
    hold, Fault(CHECKPOINT) when it cannot be read or does not prove equal.
    """
    _check_target(out)
    loaded = load_weights(name, console.warn)
    model = loaded.model.eval()
    known, more = loaded.tokenizer.vocab_size, model.shape.vocab_size - loaded.tokenizer.vocab_size
    if more:
        console.warn(f"{more:,} ids that no text has are left out; losses of the rest are a little lower")
    _leave_padding(model, known)
    if dtype == "bf16":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())  # what is compared is what is written
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = out.parent / f".{out.name}.{os.getpid()}"
        unfinished.mkdir()
        try:
            proof = FORMATS[to](unfinished, model, loaded.tokenizer, dtype)
            _check_target(out)
            unfinished.rename(out)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        fix = "free some space or choose another --out"
        raise Fault(Exit.STORAGE, f"cannot write the export: {error.strerror}", str(out), fix) from error
    console.say(f"{loaded.source} as {to} in {out}: {proof.said}")
    return {
        "source": loaded.source,
        "format": to,
        "out": str(out),
        "verified": proof.verified,
        "max_relative_difference": proof.difference,
        "ids_left_out": more,
    }


def _leave_padding(model: GPT, vocab_size: int) -> None:
    """Make a model know the ids of its tokenizer and no others: `model.vocab_size` may have asked for more."""
    shape = replace(model.shape, vocab_size=vocab_size)
    for module in (model.tokens, model.head):
        if module is not None:
            module.weight.data = module.weight.data[: shape.padded_vocab_size].clone()
            module.weight.data[vocab_size:] = 0.0
    model.shape = shape


def _check_target(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise Fault(Exit.STORAGE, "the export's target exists", str(out), "choose another --out, or remove it first")


def _export_hf(folder: Path, model: GPT, tokenizer: Tokenizer, dtype: str) -> Proof:
    write_hf(folder, model, tokenizer, dtype)
    difference = prove_equal(folder, model, tokenizer)
    if difference is None:
        return Proof(False, "NOT VERIFIED, because transformers is not installed (pip install megatoken[hf])")
    return Proof(True, f"reloaded in transformers, logits equal to {difference:.1e} of the largest", difference)


def _export_llmc(folder: Path, model: GPT, tokenizer: Tokenizer, dtype: str) -> Proof:
    write_checkpoint(folder / LLMC_MODEL, model, dtype)
    write_tokenizer(folder / LLMC_TOKENIZER, tokenizer)
    tokenizer.save(folder)
    again = read_checkpoint(folder / LLMC_MODEL).state_dict()
    if odd := [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, again[name])]:
        raise Fault(Exit.CHECKPOINT, f"read back differently: {', '.join(odd[:4])}", str(folder), "report it")
    return Proof(True, "read back, every weight equal", 0.0)


FORMATS: dict[str, Write] = {"hf": _export_hf, "llmc": _export_llmc}
