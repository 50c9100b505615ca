"""Read the pickle of a tiktoken encoding, such as nanochat's tokenizer.pkl, without unpickling it."""

import itertools
import pickletools
import re
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from megatoken.text.byte_bpe import byte_characters

LITERAL = re.compile(r"(SHORT_)?BIN(UNICODE|BYTES|INT)\d*")
BOS = "<|bos|>"


def read_tiktoken(pickle: bytes) -> tokenizers.Tokenizer:
    """Return the BPE of an encoding, with <|bos|> before every text.

    Only the literals in the pickle are read: a pattern that splits text, the rank of each token,
    and the ids of special tokens. Two tokens are merged if they form a third; the lowest rank is
    merged first. Raises ValueError or LookupError if these are not there.
    """
    literals: list[Any] = [
        value for opcode, value, _ in pickletools.genops(pickle) if LITERAL.fullmatch(opcode.name)
    ]
    pairs = [(a, b) for a, b in itertools.pairwise(literals) if isinstance(b, int)]
    ranks = {token: id for token, id in pairs if isinstance(token, bytes)}
    special = {token: id for token, id in pairs if isinstance(token, str)}
    characters = byte_characters()
    text = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = [
        (text[token[:end]], text[token[end:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for end in range(1, len(token))
        if token[:end] in ranks and token[end:] in ranks
    ]
    vocabulary = {text[token]: id for token, id in ranks.items()}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    pattern = tokenizers.Regex(literals[literals.index("pat_str") + 1])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), byte_level]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(special))
    inner.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, special[BOS])]
    )
    return inner
