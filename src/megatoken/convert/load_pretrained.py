"""Load a model and its tokenizer by name, whatever program wrote it."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from megatoken.base.config.load import RUN_CONFIG, load_config
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import GPT2_VOCABULARY
from megatoken.base.errors import CheckpointError, Warn
from megatoken.base.system.address import is_address
from megatoken.convert import llmc, nanochat, nanogpt
from megatoken.convert.hf.load import find_folder, load_hf, read_family
from megatoken.convert.hf.peft import BASE, merge_peft, read_base
from megatoken.convert.hf.peft import CONFIG as ADAPTER
from megatoken.convert.nanochat import FILES
from megatoken.convert.nanogpt import CHECKPOINT, SUFFIXES
from megatoken.data.vocabulary import read_vocabulary
from megatoken.model.extensions import load_extensions
from megatoken.model.gpt import GPT
from megatoken.store.commit import find_checkpoint, list_steps
from megatoken.store.load import load_checkpoint_model
from megatoken.store.manifest import decode_model_config
from megatoken.store.mirror import fetch_model
from megatoken.text.tokenizer import (
    TIKTOKEN_NAME,
    TOKEN_IDS,
    Tokenizer,
    find_vocabulary,
    load_tokenizer,
    open_tokenizer,
)

# Formats of one file: functions that return its tensors and architecture, and the model.
READERS = {
    "llmc": (llmc.read_content, llmc.read_llmc),
    "nanogpt": (nanogpt.read_content, nanogpt.read_nanogpt),
    "nanochat": (nanochat.read_content, nanochat.read_nanochat),
}


@dataclass(frozen=True)
class LoadedModel:
    """A model on the CPU in fp32, its tokenizer, and the name to use for it in messages."""

    model: GPT
    tokenizer: Tokenizer
    source: str


def load_pretrained(
    name: str | Path, warn: Warn = warnings.warn, *, merge: bool = True
) -> LoadedModel:
    """Load a model and its tokenizer: a run's newest complete checkpoint, or another model.

    name: a run, a checkpoint, a Hugging Face folder or hub name, which may hold a LoRA adapter of
    PEFT, llm.c's model.bin, nanoGPT's ckpt.pt or nanochat's model_NNNNNN.pt or their folder, or the
    address of a run's mirror. warn: called for each damaged checkpoint that is skipped, for a
    tokenizer that cannot encode all text, and with the GELU of nanoGPT. merge: whether to merge a
    run's LoRA adapters into its weights; if not, the config names their base as `init`. Raises
    CheckpointError if nothing can be loaded or the tokenizer does not fit the model, and DataError
    if the tokenizer is missing.
    """
    kind, path = find_format(name, warn)
    source = str(path if kind in READERS else name)
    if kind == "run":
        folder, model, tokenizer = _load_newest(path, warn)
        if folder != path and not is_address(name):
            source = f"{path} at step {int(folder.name.removeprefix('step-'))}"
        if merge:
            for extension in load_extensions(model.config):
                extension.merge(model)
        else:
            init = load_config(folder / RUN_CONFIG).model.init
            model.config = replace(model.config, init=init)
    else:
        folder, files = path.parent, dict[str, str]()
        if kind == "hf":
            folder = find_folder(str(name))
            if base := read_base(folder):
                try:
                    loaded = load_pretrained(base, warn)
                except CheckpointError as error:
                    fix = "set it to the folder or hub name of an unquantized model"
                    raise CheckpointError(f"{BASE}: {error}", folder / ADAPTER, fix) from error
                merge_peft(loaded.model, folder)
                if not find_vocabulary(folder):
                    return replace(loaded, source=source)
                model, files = loaded.model, loaded.tokenizer.files
            else:
                model, folder = load_hf(str(folder))
        else:
            model = READERS[kind][1](path)
            if kind == "nanogpt":  # the file does not name it
                gelu = "erf, as since June 2023" if model.config.mlp == "gelu-erf" else "tanh"
                warn(f"{path.name}: nanoGPT's GELU is taken as {gelu}")
            if kind == "nanochat" and not (folder / TIKTOKEN_NAME).is_file():
                folder /= "../../tokenizer"  # where nanochat writes it
        tokenizer = load_tokenizer(find_tokenizer(folder, model.config.vocab_size))
        if TOKEN_IDS in files:  # an adapter's folder has no ids
            tokenizer = tokenizer.with_files({TOKEN_IDS: files[TOKEN_IDS]} | tokenizer.files)
    if tokenizer.vocab_size > model.config.vocab_size:
        what = f"tokenizer has {tokenizer.vocab_size} ids, the model {model.config.vocab_size}"
        raise CheckpointError(what, source)
    if tokenizer.drops_unknown:
        warn(f"tokenizer {tokenizer.name} drops characters that it has no token for")
    return LoadedModel(model, tokenizer, source)


def read_model_config(name: str | Path) -> ModelConfig:
    """Return the architecture of a model without loading it.

    Takes the names that `load_pretrained` takes and raises the same errors.
    """
    kind, path = find_format(name, warnings.warn)
    if kind in READERS:
        read_content, _ = READERS[kind]
        return read_content(path)[1]
    if kind == "hf":
        hf_folder = find_folder(str(name))
        base = read_base(hf_folder)
        return read_model_config(base) if base else read_family(hf_folder)[1]
    folder, manifest = find_checkpoint(path, warnings.warn, hashes=lambda _: False)
    return decode_model_config(manifest.meta.get("shape"), folder)


def find_format(name: str | Path, warn: Warn) -> tuple[str, Path]:
    """Return a model's format (run, hf, llmc, nanogpt or nanochat) and its local path.

    A model at an address is fetched first.
    """
    path = fetch_model(str(name), warn) if is_address(name) else Path(name)
    is_run = (path / "checkpoints").is_dir() or (path / "config.yaml").is_file()
    if (path / CHECKPOINT).is_file() and not is_run:  # nanoGPT's out_dir
        path /= CHECKPOINT
    path = max(path.glob(FILES), default=path)
    if path.match(FILES):
        return "nanochat", path
    if path.suffix in SUFFIXES:
        return "nanogpt", path
    if path.is_file() or path.suffix == ".bin":
        return "llmc", path
    return "run" if is_run or list_steps(path) else "hf", path


def _load_newest(path: Path, warn: Warn) -> tuple[Path, GPT, Tokenizer]:
    """Load the newest complete checkpoint; retry if its run deletes it meanwhile.

    Return its folder, the model and the tokenizer.
    """
    while True:
        folder, manifest = find_checkpoint(path, warn)
        try:
            model = load_checkpoint_model(folder, manifest)
            return folder, model, open_tokenizer(read_vocabulary(folder / "tokenizer"))
        except Exception:
            if folder.exists():
                raise


def find_tokenizer(folder: Path, vocab_size: int) -> str:
    """Return what to pass to `load_tokenizer` for another program's model: its folder, or "gpt2".

    Raises CheckpointError if the folder has no tokenizer and the vocabulary is not GPT-2's.
    """
    if find_vocabulary(folder):
        return str(folder.absolute())  # the folder's name may be gpt2
    if vocab_size == GPT2_VOCABULARY:
        return "gpt2"
    what = f"no tokenizer for {vocab_size} token ids"
    raise CheckpointError(what, folder, "copy the model's tokenizer into the folder")
