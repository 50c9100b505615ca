"""Find GPT-2's 50,000 merges on this machine, or download them once.

This package does not include them.
"""

import hashlib

from megatoken.base.system.environment import megatoken_cache, tiktoken_caches
from megatoken.text.byte_bpe import Merges
from megatoken.text.sources import download

VOCAB_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
VOCAB_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
TIKTOKEN_VOCAB = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"  # its name in tiktoken's cache
_ALTERNATIVE = ", or prepare with --tokenizer bpe:4096"


def find_gpt2_merges() -> Merges:
    """Return GPT-2's merges. Raises DataError if they are missing and cannot be downloaded."""
    merges = find_local_merges()
    if merges is None:
        path = megatoken_cache() / "vocab.bpe"
        merges = _parse_merges(download(VOCAB_URL, path, VOCAB_SHA256, _ALTERNATIVE))
    return merges


def find_local_merges() -> Merges | None:
    """Return GPT-2's merges from megatoken's or tiktoken's cache, or None if neither has them."""
    paths = [folder / TIKTOKEN_VOCAB for folder in tiktoken_caches()]
    for path in (megatoken_cache() / "vocab.bpe", *paths):
        if path.is_file():
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() == VOCAB_SHA256:
                return _parse_merges(data)
    return None


def _parse_merges(data: bytes) -> Merges:
    pairs = (line.split(" ") for line in data.decode().splitlines()[1:])
    return [(left, right) for left, right in pairs]
