"""Build and train byte-level BPEs with Hugging Face's `tokenizers`.

Ids 0 to 255 stand for the single bytes, the next ids for the merges, and the last id for
<|endoftext|>.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

EOT = "<|endoftext|>"
LONGEST_TRAINED_WORD = 1024  # bytes; training time is quadratic in a word's length, e.g. of DNA

Merges = list[tuple[str, str]]


@cache
def byte_characters() -> list[str]:
    """Return GPT-2's printable character for each of the 256 bytes.

    A byte that is a printable Latin-1 character maps to that character, the others to U+0100 and
    up. GPT-2 sorts these characters to number them, so its ids 0 to 255 are not in byte order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_vocabulary() -> dict[str, int]:
    """Return a vocabulary without merges: ids 0 to 255 are the bytes, and 256 is <|endoftext|>."""
    return {character: byte for byte, character in enumerate(byte_characters())} | {EOT: 256}


def build_bpe(merges: Merges, vocab_size: int) -> tokenizers.Tokenizer:
    """Return a byte-level BPE with these merges and ids in GPT-2's order.

    Ids 0 to 255 are the `byte_characters` in sorted order. Then come the merges, and last
    <|endoftext|>.
    """
    vocabulary = {character: id for id, character in enumerate(sorted(byte_characters()))}
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    vocabulary[EOT] = vocab_size - 1
    return assemble(vocabulary, merges)


def assemble(
    vocabulary: dict[str, int], merges: Merges, special: Sequence[str] = (EOT,)
) -> tokenizers.Tokenizer:
    """Return a byte-level BPE. merges: in order of priority. special: its special tokens."""
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([*special])
    return inner


def train_bpe(vocab_size: int, texts: Iterator[str]) -> tokenizers.Tokenizer:
    """Train a byte-level BPE with at most `vocab_size` ids.

    It has fewer if the corpus yields too few merges. Ties between merges are broken by id, so the
    result does not depend on the number of threads.
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
    """Return a merge's two tokens, which tokenizer.json stores as a pair or as one string."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right
