"""Find the tokenizer of another program's model."""

from pathlib import Path

from megatoken.base.config.presets import GPT2_VOCABULARY
from megatoken.base.errors import CheckpointError
from megatoken.model.gpt import GPT
from megatoken.store.pretrained import Pretrained
from megatoken.text.tokenizer import TOKEN_IDS, find_vocabulary, load_tokenizer


def with_vocabulary(model: GPT, folder: Path, source: str, token_ids: str = "") -> Pretrained:
    """Return a model with the tokenizer in `folder`.

    token_ids: content of TOKEN_IDS, which the folder may lack.
    """
    tokenizer = load_tokenizer(find_tokenizer(folder, model.config.vocab_size))
    if token_ids:
        tokenizer = tokenizer.with_files({TOKEN_IDS: token_ids} | tokenizer.files)
    return Pretrained(model, tokenizer.vocabulary, source)


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
