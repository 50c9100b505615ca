"""Export a model to another program's format, and check the export before publishing it."""

import copy
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatoken.base.console import Console
from megatoken.base.errors import CheckpointError, ConfigError, StorageError, Warn
from megatoken.base.rooms import list_own
from megatoken.base.system.atomic_write import local_path, storage_errors
from megatoken.convert.gguf import compare_llama, write_gguf
from megatoken.convert.hf.chat_files import GGUF
from megatoken.convert.hf.export import (
    TOLERANCE,
    compare_logits,
    compute_check_logits,
    measure_difference,
    write_hf,
)
from megatoken.convert.hf.peft import write_peft
from megatoken.convert.llmc import read_llmc, write_llmc, write_tokenizer
from megatoken.convert.model_card import write_card
from megatoken.convert.push import push
from megatoken.model.gpt import GPT
from megatoken.text.load_pretrained import LoadedModel, load_pretrained
from megatoken.text.tokenizer import Tokenizer


def export(
    model: str | Path | LoadedModel,
    to: str,
    out: str | Path,
    dtype: str = "fp32",
    console: Console | None = None,
    push_to: str = "",
) -> dict[str, Any]:
    """Write a model, its tokenizer and a model card to the new folder `out`.

    model: a loaded model, or a name for load_pretrained. to: `hf`, `peft`, `gguf` or `llmc`. out:
    for `gguf`, it can also be a new file whose name ends with .gguf. dtype: of the written weights,
    fp32 or bf16; for `gguf`, also fp16, q8_0, q5_1, q5_0, q4_1 or q4_0. push_to: a repository on the
    Hugging Face hub, to which the export is uploaded.

    Returns a dict with source, format, out, verified, max_relative_difference (of the logits),
    ids_left_out and pushed_to, an address or "". Raises StorageError if `out` exists or cannot be
    written, or if the upload fails, ConfigError if the format cannot hold the model, and
    CheckpointError if the model cannot be read or the exported model computes other logits.
    """
    out = local_path(out)
    warn = console.warn if console else warnings.warn
    if os.path.lexists(out):
        raise StorageError("it already exists", out, "choose another --out")
    chosen = FORMATS[to]
    if not chosen.quantizes and dtype not in ("fp32", "bf16"):
        raise ConfigError(f"--to {to} has no {dtype}", "--dtype", "use fp32 or bf16, or --to gguf")
    if isinstance(model, LoadedModel):
        loaded = model
    else:
        loaded = load_pretrained(model, warn, merge=chosen.merges_adapters)
    loaded = copy.deepcopy(loaded)
    n_unused = _prepare(loaded, warn)
    source = None if isinstance(model, LoadedModel) else Path(model)
    card = partial(write_card, name=push_to or out.stem, source=source, to=to)
    difference = _write(loaded, to, out, dtype, card)
    if console:
        verdict = f"NOT VERIFIED: pip install {chosen.verifier}"
        if difference is not None:
            verdict = f"verified, logits within {difference:.1e} of the largest"
        console.print(f"{loaded.source} as {to} in {out}: {verdict}")
    address = push(out, push_to) if push_to else ""
    if console and address:
        console.print(f"pushed to {address}")
    return {
        "source": loaded.source,
        "format": to,
        "out": str(out),
        "verified": difference is not None,
        "max_relative_difference": difference,
        "ids_left_out": n_unused,
        "pushed_to": address,
    }


def _write(
    loaded: LoadedModel, to: str, out: Path, dtype: str, write_card: Callable[..., None]
) -> float | None:
    """Write the export and its card; return the largest difference of logits, if compared."""
    with storage_errors(out.parent, what="cannot write the export"):
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = out.parent / f".{out.name}.{os.getpid()}"
        unfinished.mkdir()
        try:
            difference = FORMATS[to].write(unfinished, loaded.model, loaded.tokenizer, dtype)
            write_card(unfinished, config=loaded.model.config)
            is_file = to == "gguf" and out.suffix == ".gguf"
            (unfinished / GGUF if is_file else unfinished).rename(out)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return difference


def _prepare(loaded: LoadedModel, warn: Warn) -> int:
    """Modify the model for export; return how many ids were dropped.

    Removes ids that have no token, and the value head, which no format supports.
    """
    model = loaded.model.eval()
    if model.attention_name in list_own("attention"):
        raise ConfigError(f"no format has attention {model.attention_name!r}", "export")
    vocab_size = loaded.tokenizer.vocab_size
    n_unused = model.config.vocab_size - vocab_size
    if n_unused:
        warn(f"{n_unused:,} ids without a token are dropped; losses decrease slightly")
    if model.config.value_head:
        warn("the value head (reward model, PPO) is dropped")
        del model.value_head
    model.config = replace(model.config, vocab_size=vocab_size, value_head=False)
    for module in (model.tokens, model.head):
        if module is not None:
            module.weight.data = module.weight.data[: model.config.padded_vocab_size].clone()
            module.weight.data[vocab_size:] = 0.0
    return n_unused


def _round(model: GPT, dtype: str) -> None:
    """Round the trained weights to `dtype`, so that the export is compared with what is written."""
    if dtype == "bf16":
        for param in model.parameters():
            if param.requires_grad:  # not the frozen base of adapters
                param.data.copy_(param.bfloat16())


def _export_hf(folder: Path, model: GPT, tokenizer: Tokenizer, dtype: str) -> float | None:
    write_hf(folder, model, tokenizer, dtype)
    return compare_logits(folder, model, tokenizer)


def _export_gguf(folder: Path, model: GPT, tokenizer: Tokenizer, dtype: str) -> float | None:
    write_gguf(folder, model, tokenizer, dtype)
    return compare_llama(folder / GGUF, model, tokenizer, dtype)


@torch.no_grad()
def _export_peft(folder: Path, model: GPT, tokenizer: Tokenizer, dtype: str) -> float:
    _round(model, dtype)
    write_peft(folder, model, dtype)
    base = model.config.init
    read = load_pretrained(folder).model  # the base with the adapters, as PEFT would load them
    ids, expected = compute_check_logits(model)
    if read.config.vocab_size >= model.config.vocab_size:
        logits = read.eval().logits(ids)[..., : model.config.vocab_size]
        difference = measure_difference(logits, expected)
        if difference <= TOLERANCE:
            return difference
    what = f"{base} with the adapters is another model, as after adding tokens to its vocabulary"
    raise CheckpointError(what, "--to peft", "use --to hf")


def _export_llmc(folder: Path, model: GPT, tokenizer: Tokenizer, dtype: str) -> float:
    _round(model, dtype)
    write_llmc(folder / "model.bin", model, dtype)
    write_tokenizer(folder / "gpt2_tokenizer.bin", tokenizer)
    tokenizer.vocabulary.save(folder)
    written = read_llmc(folder / "model.bin").state_dict()
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor, written[name]):
            raise CheckpointError(f"{name} reads back differently", folder, "report this bug")
    return 0.0


class ExportFormat(NamedTuple):
    """A format of exports.

    write: a function that writes a folder and returns the largest difference of logits, or None if
    `verifier`, the package to compare with, is not installed. quantizes: whether it has dtypes other
    than fp32 and bf16. merges_adapters: whether LoRA adapters are merged into the weights first.
    """

    write: Callable[[Path, GPT, Tokenizer, str], float | None]
    verifier: str = ""
    quantizes: bool = False
    merges_adapters: bool = True


FORMATS = {
    "hf": ExportFormat(_export_hf, "transformers"),
    "gguf": ExportFormat(_export_gguf, "llama-cpp-python", quantizes=True),
    "peft": ExportFormat(_export_peft, merges_adapters=False),
    "llmc": ExportFormat(_export_llmc),
}
