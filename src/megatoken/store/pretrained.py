"""Load a model to start from: a run, a checkpoint or, through a room, another program's file.

An entry "weights" is a module that reads one format. `find(path)` returns the file or folder to
read, or None if it holds another format; `read_content(path)` the file's tensors by name and the
architecture; `load(path, warn)` a Pretrained.
"""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatoken.base.config.load import RUN_CONFIG, is_resumable, load_config
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import CheckpointError, Warn
from megatoken.base.rooms import list_entries, load_entry
from megatoken.base.system.address import is_address
from megatoken.data.vocabulary import Vocabulary, read_vocabulary
from megatoken.model.extensions import load_extensions
from megatoken.model.gpt import GPT
from megatoken.store.commit import find_checkpoint, list_steps
from megatoken.store.load import load_checkpoint_model
from megatoken.store.manifest import decode_model_config


@dataclass(frozen=True)
class Pretrained:
    """A model on the CPU in fp32, its vocabulary, and the name to use for it in messages."""

    model: GPT
    vocabulary: Vocabulary
    source: str


def load_weights(name: str | Path, warn: Warn = warnings.warn, *, merge: bool = True) -> Pretrained:
    """Load a model by name: a run's newest complete checkpoint, or another model.

    name: a run, a checkpoint, the address of a run's mirror, or what a room can read. warn: called
    for each damaged checkpoint that is skipped, and for what a file leaves open. merge: whether to
    merge a run's extensions into its weights; if not, the config names their base as `init`. Raises
    CheckpointError if nothing can be loaded or the tokenizer does not fit the model, and DataError
    if the tokenizer is missing.
    """
    path, reader = find_weights(name, warn)
    loaded = reader.load(path, warn) if reader else _load_newest(path, str(name), warn, merge=merge)
    n_ids, vocab_size = loaded.vocabulary.vocab_size, loaded.model.config.vocab_size
    if n_ids > vocab_size:
        what = f"tokenizer has {n_ids} ids, the model {vocab_size}"
        raise CheckpointError(what, loaded.source)
    return loaded


def read_architecture(name: str | Path) -> ModelConfig:
    """Return the architecture of a model without loading it.

    Takes the names that `load_weights` takes and raises the same errors.
    """
    path, reader = find_weights(name, warnings.warn)
    if reader:
        _, config = reader.read_content(path)
        return config  # type: ignore[no-any-return]
    folder, manifest = find_checkpoint(path, warnings.warn, hashes=lambda _: False)
    return decode_model_config(manifest.meta, folder)


def find_weights(name: str | Path, warn: Warn) -> tuple[Path, Any]:
    """Return the local path of a model, and the entry that reads it or None for a run.

    A model at an address is fetched first.
    """
    path = Path(name)
    if is_address(name):
        path = load_entry("address", "model")(str(name), warn)
    if is_resumable(path) or (path.is_dir() and list_steps(path)):
        return path, None
    for entry in list_entries("weights"):
        reader = load_entry("weights", entry)
        if found := reader.find(path):
            return found, reader
    raise CheckpointError("no checkpoints", name, "give a run folder")


def _load_newest(path: Path, name: str, warn: Warn, *, merge: bool) -> Pretrained:
    """Load the newest complete checkpoint; retry if its run deletes it meanwhile."""
    while True:
        folder, manifest = find_checkpoint(path, warn)
        try:
            model = load_checkpoint_model(folder, manifest)
            vocabulary = read_vocabulary(folder / "tokenizer")
            init = "" if merge else load_config(folder / RUN_CONFIG).model.init
            break
        except Exception:
            if folder.exists():
                raise
    if merge:
        for extension in load_extensions(model.config):
            extension.merge(model)
    model.config = replace(model.config, init=init)
    if folder == path or is_address(name):
        return Pretrained(model, vocabulary, name)
    step = int(folder.name.removeprefix("step-"))
    return Pretrained(model, vocabulary, f"{path} at step {step}")
