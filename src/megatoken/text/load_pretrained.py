"""Load a model together with its tokenizer."""

import warnings
from dataclasses import dataclass
from pathlib import Path

from megatoken.base.errors import Warn
from megatoken.model.gpt import GPT
from megatoken.store.pretrained import load_weights
from megatoken.text.tokenizer import Tokenizer, open_tokenizer


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
    address of a run's mirror. warn: as in `load_weights`; also called for a tokenizer that cannot
    encode all text. merge: as in `load_weights`, which raises the same errors.
    """
    loaded = load_weights(name, warn, merge=merge)
    tokenizer = open_tokenizer(loaded.vocabulary)
    if tokenizer.drops_unknown:
        warn(f"tokenizer {tokenizer.name} drops characters that it has no token for")
    return LoadedModel(loaded.model, tokenizer, loaded.source)
