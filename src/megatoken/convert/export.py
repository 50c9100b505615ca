"""Exports a model to the files of another program, and checks them before the folder gets its name."""

import copy
import errno
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from megatoken.console import Console
from megatoken.convert.hf.export import compare_logits, write_hf
from megatoken.convert.llmc import read_llmc, write_llmc, write_tokenizer
from megatoken.convert.load_pretrained import LoadedModel, load_pretrained
from megatoken.data.tokenizer import Tokenizer
from megatoken.errors import CheckpointError, ConfigError, StorageError
from megatoken.model.gpt import GPT
from megatoken.model.kernels.attention import BUILT_IN
from megatoken.system.atomic_write import error_number, local_path


def export(
    model: str | Path | LoadedModel,
    to: str,
    out: str | Path,
    dtype: str = "fp32",
    console: Console | None = None,
) -> dict[str, Any]:
    """Write a model and its tokenizer to the folder `out`, which must not exist.

    model: loaded, or a name for load_pretrained. to: `hf` or `llmc`. dtype: of the weights, fp32 or bf16.
    Returns source, format, out, verified, max_relative_difference (of logits), ids_left_out.
    Raises StorageError for a target that exists or cannot be written, ConfigError for a model that the format cannot
    hold, CheckpointError when the model cannot be read or the export does not compute the same.
    """
    if to not in FORMATS:
        raise ConfigError(f"unknown format {to!r}", "export", f"choose one of {', '.join(FORMATS)}")
    if dtype not in DTYPES:
        raise ConfigError(
            f"unknown dtype {dtype!r}", "export", f"choose one of {', '.join(DTYPES)}"
        )
    out, warn = local_path(out), console.warn if console else warnings.warn
    if os.path.lexists(out):
        raise StorageError(
            "the export's target exists", str(out), "choose another --out, or remove it first"
        )
    loaded = (
        copy.deepcopy(model) if isinstance(model, LoadedModel) else load_pretrained(model, warn)
    )
    if (attention := loaded.model.attention_name) not in BUILT_IN:
        raise ConfigError(
            f"the model computes with attention {attention!r}", to, "other programs do not have it"
        )
    gpt, tokenizer = loaded.model.eval(), loaded.tokenizer
    if unused := gpt.config.vocab_size - tokenizer.vocab_size:
        warn(f"{unused:,} ids that no text has are left out; losses of the rest are a little lower")
    if gpt.value_head is not None:
        warn("the value head, of a reward model or of PPO, is left out: the format has none")
        gpt.value_head, gpt.config = None, replace(gpt.config, value_head=False)
    _trim_vocabulary(gpt, tokenizer.vocab_size)
    if dtype == "bf16":
        for param in gpt.parameters():
            param.data.copy_(param.bfloat16())  # so that the comparison is with the written values
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = out.parent / f".{out.name}.{os.getpid()}"
        unfinished.mkdir()
        try:
            difference = FORMATS[to](unfinished, gpt, tokenizer, dtype)
            unfinished.rename(out)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except (
        OSError,
        SafetensorError,
    ) as error:  # safetensors has an error of its own for a full disk
        is_full = error_number(error) in (errno.ENOSPC, errno.EDQUOT)
        fix = (
            "free some space or choose another --out"
            if is_full
            else "choose an --out that can be written"
        )
        what = f"cannot write the export: {getattr(error, 'strerror', None) or error}"
        name = getattr(
            error, "filename", None
        )  # of a folder above, say, or of a file in the unfinished one
        raise StorageError(
            what, name if name and out.is_relative_to(name) else str(out), fix
        ) from error
    if console:
        verdict = "NOT VERIFIED, because transformers is not installed (pip install megatoken[hf])"
        if difference is not None:
            verdict = f"read back, its logits equal to {difference:.1e} of the largest"
        console.print(f"{loaded.source} as {to} in {out}: {verdict}")
    return {
        "source": loaded.source,
        "format": to,
        "out": str(out),
        "verified": difference is not None,
        "max_relative_difference": difference,
        "ids_left_out": unused,
    }


def _trim_vocabulary(model: GPT, vocab_size: int) -> None:
    """Keep the rows of the tokenizer's ids: `model.vocab_size` may have asked for more."""
    config = replace(model.config, vocab_size=vocab_size)
    for module in (model.tokens, model.head):
        if module is not None:
            module.weight.data = module.weight.data[: config.padded_vocab_size].clone()
            module.weight.data[vocab_size:] = 0.0
    model.config = config


def _export_hf(folder: Path, model: GPT, tokenizer: Tokenizer, dtype: str) -> float | None:
    write_hf(folder, model, tokenizer, dtype)
    return compare_logits(folder, model, tokenizer)


def _export_llmc(folder: Path, model: GPT, tokenizer: Tokenizer, dtype: str) -> float:
    write_llmc(folder / "model.bin", model, dtype)
    write_tokenizer(folder / "gpt2_tokenizer.bin", tokenizer)
    tokenizer.save(folder)
    again = read_llmc(folder / "model.bin").state_dict()
    if differing := [
        name for name, tensor in model.state_dict().items() if not torch.equal(tensor, again[name])
    ]:
        raise CheckpointError(
            f"read back differently: {', '.join(differing[:4])}", str(folder), "report it"
        )
    return 0.0


# Each writes the folder, and returns the largest difference of logits found; None: not compared.
DTYPES = ("fp32", "bf16")
FORMATS: dict[str, Callable[[Path, GPT, Tokenizer, str], float | None]] = {
    "hf": _export_hf,
    "llmc": _export_llmc,
}
