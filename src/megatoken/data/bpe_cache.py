"""GPT-2's byte-level BPE with a cache of word ids.

GPT-2's rule splits text into words before any merge (`'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+|
?[^\\s\\p{L}\\p{N}]+| \\s+(?!\\S)|\\s+`, Radford et al. 2019, encoder.py), so the ids of a text are the ids of its
words, one after the other.

Python's `re` has no \\p{L}, and libraries disagree about characters that Unicode added lately. So a word is split off
here only when it and the character after it are ASCII; otherwise everything up to the next white space goes to the
tokenizer as one word, which is exact too: a word never reaches across a white space, save the single space in front of
it. White space is Unicode's property of that name, fixed since 2013.
"""

import re
from array import array

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megatoken.data.byte_bpe import byte_characters

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

CACHE_WORDS = 1 << 17  # about 30 MB; further words are encoded each time
LONGEST_WORD = 64  # longer ones hardly ever repeat


class BpeCache(dict[str, bytes]):
    """Maps a word to its ids (native uint32), encoding it at its first use."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._inner = inner
        self._model = inner.model
        self._spell = dict(enumerate(byte_characters()))

    def __missing__(self, word: str) -> bytes:
        if (
            word.isascii()
        ):  # exactly one word: merge it at once, a third of the time of the whole machinery
            numbers = [token.id for token in self._model.tokenize(word.translate(self._spell))]
        else:
            numbers = self._inner.encode(word, add_special_tokens=False).ids
        ids = array("I", numbers).tobytes()
        if len(self) < CACHE_WORDS and len(word) <= LONGEST_WORD:
            self[word] = ids
        return ids

    def encode(self, text: str) -> Ids:
        """Ids of `text`, uint32."""
        ids = b"".join(map(self.__getitem__, _WORD.findall(text)))
        return np.frombuffer(ids, dtype=np.uint32)
