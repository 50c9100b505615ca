"""GPT-2's vocabulary, found on this machine or downloaded once; never shipped with this package.

In: the places where other tools keep it. Out: the 50,000 merges in order; every id follows from that order:
256 bytes, then one id a merge, then <|endoftext|>. Deliberately absent: encoding (tokenizer.py).

Whatever the origin, the merges are written back as OpenAI's vocab.bpe and its sha256 is compared, so a
vocabulary that differs in one character is passed over.
"""

import base64
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from megatoken.data.download import download, read_if_right
from megatoken.errors import Exit, Fault
from megatoken.hardware import huggingface_cache, megatoken_cache, tiktoken_caches

Merges = list[tuple[str, str]]

VOCAB_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
VOCAB_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
# tiktoken names a cached file by the sha1 of its address.
TIKTOKEN_VOCAB = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"
TIKTOKEN_RANKS = "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4"


def byte_characters() -> list[str]:
    """The printable character by which GPT-2's files write each of the 256 bytes.

    Printable Latin-1 bytes stand for themselves, the others for U+0100 and on. Sorted, these characters are
    GPT-2's first 256 ids.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def find_gpt2_merges() -> Merges:
    """GPT-2's merges from this machine (see find_local_merges), else a download.

    Fault(Exit.DATA), naming the one file that is needed and its place, when there is none.
    """
    if (merges := find_local_merges()) is not None:
        return merges
    target = megatoken_cache() / "vocab.bpe"
    try:
        return _read_merges(download(VOCAB_URL, target, VOCAB_SHA256).decode())
    except Fault as fault:
        what = "GPT-2's vocabulary is not on this machine (looked in the caches of Hugging Face and tiktoken and in "
        what += f"openai-whisper) and could not be downloaded from {VOCAB_URL}"
        fix = f"place that file (456,318 bytes, sha256 {VOCAB_SHA256}) there, or pip install --no-deps openai-whisper"
        raise Fault(Exit.DATA, what, str(target), fix) from fault


def find_local_merges() -> Merges | None:
    """GPT-2's merges from Hugging Face's cache, tiktoken's, an installed openai-whisper or our own; None without."""
    for path, read in _candidates():
        merges = read(path) if path.is_file() else None
        if merges is not None and _is_gpt2(merges):
            return merges
    return None


def _candidates() -> Iterator[tuple[Path, Callable[[Path], Merges | None]]]:
    for repository in ("models--gpt2", "models--openai-community--gpt2"):
        for snapshot in sorted((huggingface_cache() / repository / "snapshots").glob("*")):
            yield snapshot / "merges.txt", _from_vocab_file
            yield snapshot / "tokenizer.json", _from_tokenizer_json
    for folder in tiktoken_caches():
        yield folder / TIKTOKEN_VOCAB, _from_vocab_file
        yield folder / TIKTOKEN_RANKS, _from_rank_file
    whisper = importlib.util.find_spec("whisper")  # finds a top-level package without running it
    for place in (whisper and whisper.submodule_search_locations) or ():
        yield Path(place) / "assets" / "gpt2.tiktoken", _from_rank_file
    yield megatoken_cache() / "vocab.bpe", _from_vocab_file


def _from_vocab_file(path: Path) -> Merges | None:
    data = read_if_right(path, VOCAB_SHA256)
    return None if data is None else _read_merges(data.decode())


def _from_rank_file(path: Path) -> Merges | None:
    data = read_if_right(path, RANKS_SHA256)
    return None if data is None else _merges_from_ranks(data)


def _from_tokenizer_json(path: Path) -> Merges | None:
    try:
        merges = json.loads(path.read_bytes())["model"]["merges"]
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in merges)
        return [(left, right) for left, right in pairs]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_gpt2(merges: Merges) -> bool:
    text = "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges)
    return hashlib.sha256(text.encode()).hexdigest() == VOCAB_SHA256


def _read_merges(text: str) -> Merges:
    pairs = (line.split(" ") for line in text.splitlines()[1:])
    return [(left, right) for left, right in pairs]


def _merges_from_ranks(data: bytes) -> Merges:
    """The merge that made each token, from tiktoken's `base64 rank` lines.

    A token of rank r was made by joining the two parts that all merges below r leave of its bytes.
    """
    rows = (line.split() for line in data.splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in rows}
    characters = byte_characters()
    spelled = ["".join(characters[byte] for byte in token) for token in ranks]
    merges = []
    for (token, rank), spelling in zip(ranks.items(), spelled, strict=True):
        if len(token) > 1:
            cut = _last_seam(token, ranks, rank)
            merges.append((rank, spelling[:cut], spelling[cut:]))
    return [(left, right) for _, left, right in sorted(merges)]


def _last_seam(token: bytes, ranks: dict[bytes, int], limit: int) -> int:
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joins = [(ranks.get(a + b, limit), at) for at, (a, b) in enumerate(pairwise(parts))]
        _, at = min(joins)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return len(parts[0])
