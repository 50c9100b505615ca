"""Build and train byte-level BPEs with Hugging Face's `tokenizers`.

Ids are the 256 bytes, then one per merge, then <|endoftext|>.
"""

import json
from collections.abc import Iterator, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

EOT = "<|endoftext|>"
LONGEST_TRAINED_WORD = 1024  # bytes; training time is quadratic in a word's length, e.g. of DNA

Merges = list[tuple[str, str]]


def byte_characters() -> list[str]:
    """Return GPT-2's printable character for each of the 256 bytes.

    Printable Latin-1 bytes stand for themselves, the others for U+0100 and up. The sorted
    characters have ids 0 to 255.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_vocabulary() -> dict[str, int]:
    """Return the vocabulary of plain bytes: each byte is its id, and <|endoftext|> is 256."""
    return {character: byte for byte, character in enumerate(byte_characters())} | {EOT: 256}


def build_bpe(merges: Merges, vocab_size: int) -> tokenizers.Tokenizer:
    """Return the BPE of these merges, with ids in GPT-2's order."""
    vocabulary = {character: id for id, character in enumerate(sorted(byte_characters()))}
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    vocabulary[EOT] = vocab_size - 1
    return assemble(vocabulary, merges)


def assemble(vocabulary: dict[str, int], merges: Merges) -> tokenizers.Tokenizer:
    """Return the byte-level BPE of a vocabulary and its merges, which are listed best first."""
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(EOT, special=True, normalized=False)])
    return inner


def train_bpe(vocab_size: int, texts: Iterator[str]) -> tokenizers.Tokenizer:
    """Train a BPE. Ties are broken by id, so the result does not depend on the number of threads.

    If the corpus yields too few merges, the vocabulary is smaller than `vocab_size`.
    """
    inner = tokenizers.Tokenizer(models.BPE())
    long_words = pre_tokenizers.Split(tokenizers.Regex(f".{{{LONGEST_TRAINED_WORD}}}"), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False), long_words]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        initial_alphabet=byte_characters(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer=trainer)
    merges = [split_merge(merge) for merge in json.loads(inner.to_str())["model"]["merges"]]
    return build_bpe(merges, min(vocab_size, 257 + len(merges)))


def split_merge(merge: str | Sequence[str]) -> tuple[str, str]:
    """Return the two halves of a merge, in either format of tokenizer.json."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right
