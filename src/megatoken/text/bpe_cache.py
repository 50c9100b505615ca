"""Encode text with GPT-2's byte-level BPE and a cache of word ids.

GPT-2 splits text into words before any merge (`'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+|
?[^\\s\\p{L}\\p{N}]+| \\s+(?!\\S)|\\s+`, Radford et al. 2019, encoder.py), so the ids of a text are
the ids of its words in order.

Python's `re` has no \\p{L}, and libraries disagree about new Unicode characters. Therefore, a word
is split off here only if it and the next character are ASCII. Any other text, up to the next white
space, goes to the tokenizer as if it were one word. The ids stay exact, because a word of GPT-2
contains no white space except one leading space.
"""

import re
from array import array

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megatoken.text.byte_bpe import byte_characters

Ids = NDArray[np.uint32]

_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_OTHER = (
    r"\x00-\x08\x0e-\x1f!-/:-@\[-`{-~\x7f"  # ASCII that is neither letter nor digit nor white space
)
_ASCII_NEXT = r"(?![^\x00-\x7f])"
_WORD = re.compile(
    rf" ?[A-Za-z]++{_ASCII_NEXT}"
    r"|'(?:[sdmt]|ll|ve|re)"
    rf"| ?[{_OTHER}]++{_ASCII_NEXT}"
    rf"| ?[0-9]++{_ASCII_NEXT}"
    rf"|[{_SPACE}]+(?![^{_SPACE}])"
    rf"| ?[^{_SPACE}]+"
    rf"|[{_SPACE}]"
)

CACHE_WORDS = 1 << 17  # about 30 MB
LONGEST_WORD = 64  # characters; longer words are rare and not cached


class BpeCache(dict[str, bytes]):
    """A cache that maps a word to its ids, stored as the bytes of a native uint32 array.

    A missing word is encoded when it is first looked up.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._inner = inner
        self._model = inner.model
        self._spell = dict(enumerate(byte_characters()))

    def __missing__(self, word: str) -> bytes:
        if word.isascii():  # one word; without the pre-tokenizer, this takes a third of the time
            numbers = [token.id for token in self._model.tokenize(word.translate(self._spell))]
        else:
            numbers = self._inner.encode(word, add_special_tokens=False).ids
        ids = array("I", numbers).tobytes()
        if len(self) < CACHE_WORDS and len(word) <= LONGEST_WORD:
            self[word] = ids
        return ids

    def encode(self, text: str) -> Ids:
        """Return the ids (n,) of `text`."""
        ids = b"".join(map(self.__getitem__, _WORD.findall(text)))
        return np.frombuffer(ids, dtype=np.uint32)
