"""GPT-2's vocabulary: 50,000 merges, found on this machine or downloaded once; not shipped with this package.

The merges in order decide every id: 256 bytes, one id per merge, <|endoftext|>.
"""

import hashlib

from megatoken.data.sources import download
from megatoken.system.environment import megatoken_cache, tiktoken_caches

Merges = list[tuple[str, str]]

INSTEAD = ", or prepare with --tokenizer bpe:4096, trained on your text, or bytes"
VOCAB_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
VOCAB_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
TIKTOKEN_VOCAB = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"  # tiktoken's name of the file: the sha1 of its address


def byte_characters() -> list[str]:
    """The printable character for each of the 256 bytes in GPT-2's files; sorted, they are its first 256 ids.

    Printable Latin-1 bytes stand for themselves, the others are U+0100 and on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def find_gpt2_merges() -> Merges:
    """GPT-2's merges from this machine, else downloaded. Raises DataError, naming the file that is needed."""
    if (merges := find_local_merges()) is not None:
        return merges
    return _parse_merges(
        download(VOCAB_URL, megatoken_cache() / "vocab.bpe", VOCAB_SHA256, INSTEAD)
    )


def find_local_merges() -> Merges | None:
    """GPT-2's merges from our cache or tiktoken's; None if neither holds a file with the right sha256."""
    for path in (
        megatoken_cache() / "vocab.bpe",
        *(folder / TIKTOKEN_VOCAB for folder in tiktoken_caches()),
    ):
        if path.is_file() and hashlib.sha256(data := path.read_bytes()).hexdigest() == VOCAB_SHA256:
            return _parse_merges(data)
    return None


def _parse_merges(data: bytes) -> Merges:
    pairs = (line.split(" ") for line in data.decode().splitlines()[1:])
    return [(left, right) for left, right in pairs]
