"""A model and its tokenizer by name.

A run folder, one of its checkpoints, a Hugging Face folder or hub name, llm.c's model.bin, nanoGPT's ckpt.pt.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatoken.checkpoint.restore import load_checkpoint_model
from megatoken.checkpoint.store import find_checkpoint, steps
from megatoken.data.tokenizer import Tokenizer, load_saved_tokenizer, load_tokenizer
from megatoken.errors import Exit, Fault
from megatoken.interop.hf import hf_tokenizer_spec, load_hf
from megatoken.interop.llmc_checkpoint import read_checkpoint
from megatoken.interop.nanogpt_checkpoint import NAME, SUFFIXES, read_nanogpt
from megatoken.model.gpt import GPT
from megatoken.presets import GPT2_VOCABULARY


@dataclass(frozen=True, slots=True)
class Loaded:
    """A plain model on the CPU in fp32, its tokenizer, and where it came from in words."""

    model: GPT
    tokenizer: Tokenizer
    source: str


def is_run(folder: Path) -> bool:
    """Whether a folder was made by `megatoken train`: a run, or one of its checkpoints."""
    return (folder / "checkpoints").is_dir() or (folder / "config.yaml").is_file()


def load_weights(name: str, warn: Callable[[str], None]) -> Loaded:
    """Load from a run folder, or one of checkpoints, the newest whole one (`warn` hears of damaged ones), or from
    another program's.

    Raises Fault(CHECKPOINT) when there is nothing whole to load, Fault(DATA) when the tokenizer is missing.
    """
    folder = Path(name)
    if (folder / NAME).is_file() and not is_run(folder):  # nanoGPT's out_dir
        return _load_file(folder / NAME)
    if folder.is_file() or folder.suffix in (".bin", *SUFFIXES):
        return _load_file(folder)
    if not is_run(folder) and not steps(folder):
        model, hf_folder = load_hf(name)
        tokenizer = load_tokenizer(hf_tokenizer_spec(hf_folder))
        _check_vocabulary(tokenizer, model, name)
        return Loaded(model, tokenizer, name)
    found = find_checkpoint(folder, warn)
    if found is None:
        fix = "train it first, or give a Hugging Face folder"
        raise Fault(Exit.CHECKPOINT, "run folder holds no whole checkpoint", str(folder), fix)
    path, manifest = found
    model, tokenizer = load_checkpoint_model(path, manifest), load_saved_tokenizer(path / "tokenizer")
    _check_vocabulary(tokenizer, model, str(path))
    return Loaded(model, tokenizer, name if path == folder else f"{folder} at step {manifest.step}")


def _load_file(path: Path) -> Loaded:
    """A model in one file of llm.c's or nanoGPT's, and the tokenizer beside it or, without one, GPT-2's."""
    model = read_nanogpt(path) if path.suffix in SUFFIXES else read_checkpoint(path)
    if (path.parent / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(str(path.parent))
    elif model.shape.vocab_size == GPT2_VOCABULARY:
        tokenizer = load_tokenizer("gpt2")
    else:
        what = f"no tokenizer beside a model with {model.shape.vocab_size} token ids"
        raise Fault(Exit.CHECKPOINT, what, str(path), "put its tokenizer.json beside the file")
    _check_vocabulary(tokenizer, model, str(path))
    return Loaded(model, tokenizer, str(path))


def _check_vocabulary(tokenizer: Tokenizer, model: GPT, where: str) -> None:
    if tokenizer.vocab_size > model.shape.vocab_size:
        what = f"tokenizer has {tokenizer.vocab_size} ids, the model only {model.shape.vocab_size}"
        raise Fault(Exit.CHECKPOINT, what, where, "use the tokenizer the model was trained with")
