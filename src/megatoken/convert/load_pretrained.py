"""Loads a model and its tokenizer by name, whatever program wrote it."""

import shlex
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatoken.checkpoint.commit import find_checkpoint, list_steps
from megatoken.checkpoint.load import load_checkpoint_model
from megatoken.checkpoint.manifest import decode_model_config
from megatoken.checkpoint.mirror import fetch_model
from megatoken.config.model_config import ModelConfig
from megatoken.config.presets import GPT2_VOCABULARY
from megatoken.convert.hf.load import find_folder, load_hf, read_family
from megatoken.convert.llmc import read_header, read_llmc
from megatoken.convert.nanogpt import CHECKPOINT, SUFFIXES, read_content, read_nanogpt
from megatoken.data.sources import IN_FOLDERS
from megatoken.data.tokenizer import Tokenizer, load_saved_tokenizer, load_tokenizer, read_end_ids
from megatoken.errors import CheckpointError
from megatoken.model.gpt import GPT
from megatoken.system.object_store import is_address

TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A plain model on the CPU in fp32, its tokenizer, and what it was loaded from, for messages."""

    model: GPT
    tokenizer: Tokenizer
    source: str


def load_pretrained(name: str | Path, warn: Callable[[str], None] = warnings.warn) -> LoadedModel:
    """Load a run folder (its newest complete checkpoint), one checkpoint, a Hugging Face folder or hub name, llm.c's
    model.bin, nanoGPT's ckpt.pt (or the folder that holds it), or the copy of a run at an address (save.mirror).

    warn: called with a line for each damaged checkpoint that is skipped, and for a tokenizer that loses text. Raises
    CheckpointError when nothing can be loaded or the tokenizer does not fit, DataError when the tokenizer is missing.
    """
    kind, path = find_format(name, warn)
    source = str(path if kind == "nanogpt" else name)
    if kind == "run":
        folder, model, tokenizer = _load_newest(path, warn)
        source = (
            source
            if folder == path or is_address(name)
            else f"{path} at step {int(folder.name.removeprefix('step-'))}"
        )
    else:
        if kind == "hf":
            model, folder = load_hf(str(name))
        else:
            model, folder = (read_nanogpt if kind == "nanogpt" else read_llmc)(path), path.parent
        tokenizer = load_tokenizer(find_tokenizer(folder, model.config.vocab_size))
        tokenizer.end_ids = read_end_ids(folder, model.config.vocab_size)
    if tokenizer.vocab_size > model.config.vocab_size:
        what = f"tokenizer has {tokenizer.vocab_size} ids, the model only {model.config.vocab_size}"
        raise CheckpointError(what, source, "use the tokenizer the model was trained with")
    if tokenizer.drops_unknown:
        warn(
            f"tokenizer {tokenizer.name} has neither all bytes nor an unk token: other characters are left out of texts"
        )
    return LoadedModel(model, tokenizer, source)


def read_model_config(name: str | Path, warn: Callable[[str], None] = warnings.warn) -> ModelConfig:
    """Read the architecture of a model that `load_pretrained` loads, not its weights. Raises as that does."""
    kind, path = find_format(name, warn)
    if kind == "llmc":
        return read_header(path)[0]
    if kind == "nanogpt":
        return read_content(path)[1]
    if kind == "hf":
        return read_family(find_folder(str(name)))[1]
    folder, manifest = find_checkpoint(path, warn, hashes=lambda _: False)
    return decode_model_config(manifest.meta.get("shape"), folder)


def find_format(name: str | Path, warn: Callable[[str], None]) -> tuple[str, Path]:
    """What a model's name stands for, run, hf, llmc or nanogpt, and its local path: of nanoGPT's out_dir that of the
    file, of an address that of a copy."""
    path = fetch_model(str(name), warn) if is_address(name) else Path(name)
    if path.suffix in IN_FOLDERS and not path.is_dir():
        fix = f"give a run; to train one on the text: megatoken quickstart --data {shlex.quote(str(name))}"
        raise CheckpointError("text, not a model", str(name), fix)
    if path.suffix == ".safetensors" and path.is_file():
        raise CheckpointError(
            "weights without their sizes and tokenizer",
            str(name),
            f"give the folder: {path.parent}",
        )
    is_run = (path / "checkpoints").is_dir() or (path / "config.yaml").is_file()
    if (path / CHECKPOINT).is_file() and not is_run:  # nanoGPT's out_dir
        path /= CHECKPOINT
    if path.is_file() or path.suffix in (".bin", *SUFFIXES):
        return "nanogpt" if path.suffix in SUFFIXES else "llmc", path
    return "run" if is_run or list_steps(path) else "hf", path


def _load_newest(path: Path, warn: Callable[[str], None]) -> tuple[Path, GPT, Tokenizer]:
    while True:
        folder, manifest = find_checkpoint(path, warn)
        try:
            return (
                folder,
                load_checkpoint_model(folder, manifest),
                load_saved_tokenizer(folder / "tokenizer"),
            )
        except Exception:
            if (
                folder.exists()
            ):  # else the run, which trains, has removed it meanwhile and has a newer one
                raise


def find_tokenizer(folder: Path, vocab_size: int) -> str:
    """The argument of load_tokenizer for a model of another program: its folder if that holds a tokenizer, or "gpt2".

    Raises CheckpointError when there is no tokenizer and the vocabulary is not GPT-2's.
    """
    if any(all((folder / name).is_file() for name in files) for files in TOKENIZER_FILES):
        return str(folder.absolute())  # a folder may be called gpt2, which alone names a vocabulary
    if vocab_size == GPT2_VOCABULARY:
        return "gpt2"
    what = f"no tokenizer beside a model with {vocab_size} token ids"
    raise CheckpointError(what, str(folder), "copy the model's tokenizer.json into the folder")
