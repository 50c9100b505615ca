"""Segments of files to documents, documents to token ids: the work that runs in parallel."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatoken.data.text_files import TextFormat
from megatoken.data.tokenizer import EOT, SplitPoints, Tokenizer
from megatoken.errors import DataError

Ids = NDArray[np.uint16] | NDArray[np.uint32]
Invalid = Literal["replace", "skip", "fail"]

SEPARATOR = EOT.encode()  # between the documents of a .txt file, as in TinyStories
CHUNK_BYTES = (
    1 << 20
)  # longest text encoded at once: `tokenizers` takes 200 bytes of memory per byte of text
SPLIT_BYTES = (
    4096  # of a document's beginning are hashed for its split, so duplicates land in the same split
)

# A visible character before white space: no word of GPT-2 reaches across. The upper bytes are those in which no
# Unicode white space ends (U+0085, U+00A0, U+1680, U+2000..200A, U+2028, U+2029, U+202F, U+205F, U+3000).
_LAST_WORD_END = re.compile(rb".*[!-~\x8b-\x9e\xa1-\xa7\xaa-\xae\xb0-\xbf](?=[\t\n\r ])", re.DOTALL)
FIX_ROW = "fix it, or skip all such rows and documents with --invalid skip"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """What turns bytes into documents and decides their split."""

    invalid: Invalid = "replace"  # policy for bytes that are not UTF-8
    text_key: str = "text"  # the key or column of a row that holds the text
    val_fraction: float = 0.0
    split_points: SplitPoints = (
        "nowhere"  # where the tokenizer allows a long document to be split, ids unchanged
    )


@dataclass(frozen=True, slots=True)
class Segment:
    """Some documents of a file, or a part of a long one."""

    file: str  # for messages
    line: int  # number of its first line, or of its row; from 1
    format: TextFormat
    split: str  # of the long document that goes on at its beginning; "" where a document begins
    ends: bool  # its last document ends here
    data: bytes


@dataclass(slots=True)
class Encoded:
    """Ids of a chunk, <|endoftext|> before each document that begins in it.

    counts: train, val (documents), empty, replaced, skipped (documents), seams (splits that may have changed ids).
    """

    train: Ids
    val: Ids
    counts: dict[str, int]


def encode_segments(
    segments: list[Segment], options: PrepareOptions, tokenizer: Tokenizer
) -> Encoded:
    """Token ids of the documents of `segments`, by split, in `token_dtype`. Raises as `read_documents`."""
    dtype = token_dtype(tokenizer.vocab_size)
    counts: Counter[str] = Counter()
    eot, none = np.array([tokenizer.eot], dtype), np.zeros(0, dtype)
    ids: dict[str, list[NDArray[Any]]] = {"train": [none], "val": [none]}
    for segment in segments:
        split = segment.split
        for text in read_documents(segment, options, counts):
            if not split:
                split = choose_split(text, options.val_fraction)
                counts[split] += 1
                ids[split].append(eot)
            ids[split] += (
                tokenizer.encode(part).astype(dtype) for part in _split_text(text, options, counts)
            )
            split = ""
    return Encoded(np.concatenate(ids["train"]), np.concatenate(ids["val"]), dict(counts))


def token_dtype(vocab_size: int) -> str:
    """The smallest token type of a shard that holds ids below `vocab_size`."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def choose_split(text: str, val_fraction: float) -> str:
    """train or val for the document that begins with `text`: by hash, so independent of all other documents."""
    beginning = text[:SPLIT_BYTES].encode()[:SPLIT_BYTES]
    return "val" if xxhash.xxh3_64_intdigest(beginning) < val_fraction * 2**64 else "train"


def read_documents(
    segment: Segment, options: PrepareOptions, counts: Counter[str]
) -> Iterator[str]:
    """The texts of `segment` in order, policies applied and counted in `counts`; white space alone is dropped.

    Raises DataError, naming file and line, for bytes that are not UTF-8 under the policy "fail" and for lines that hold
    no text; "skip" counts these instead, and replaces what is invalid in a part of a long document.
    """
    is_lines = segment.format in ("lines", "rows")
    separator = b"\n" if is_lines else SEPARATOR
    pieces = (
        segment.data.split(separator)
        if is_lines or segment.format == "separated"
        else [segment.data]
    )
    line = segment.line
    for number, data in enumerate(pieces, start=1):
        first_line, line = line, line + data.count(b"\n") + is_lines
        is_whole = (segment.ends or number < len(pieces)) and not (segment.split and number == 1)
        if is_lines and not data.strip():
            continue
        policy = options.invalid if is_whole or options.invalid == "fail" else "replace"
        try:
            text, replaced = (
                _parse_line(data, policy, options.text_key) if is_lines else _decode(data, policy)
            )
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            if policy == "skip":
                counts["skipped"] += 1
                continue
            bad_line = first_line + data.count(b"\n", 0, getattr(error, "start", 0))
            where = (
                f"{segment.file}, row {first_line}"
                if segment.format == "rows"
                else f"{segment.file}:{bad_line}"
            )
            raise DataError(f"bad text: {error}", where, FIX_ROW) from error
        if is_whole and (not text or text.isspace()):
            counts["empty"] += 1
            continue
        counts["replaced"] += replaced
        yield text


def find_split_point(data: bytes, split_points: SplitPoints) -> tuple[int, bool]:
    """Where to split a text of which only `data` is known, and whether that is sure to change no id.

    split_points "words": before white space, which GPT-2's words never reach across. Otherwise, and where there is
    none, between two characters, and never inside a SEPARATOR.
    """
    if split_points != "anywhere":
        for start in (max(0, len(data) - 4096), 0):
            if match := _LAST_WORD_END.match(data, start):
                return match.end(), split_points == "words"
    last = end = len(data) - 1
    while end > last - 3 and data[end] & 0xC0 == 0x80:  # the middle of a character
        end -= 1
    if data[end] & 0xC0 == 0x80:  # four in a row: the last of them belongs to no character
        end = last
    bracket = data.rfind(b"<", max(1, end - len(SEPARATOR)), end)
    if bracket > 0 and SEPARATOR.startswith(data[bracket:end]):
        end = bracket
    return end, split_points == "anywhere"


def _split_text(text: str, options: PrepareOptions, counts: Counter[str]) -> Iterator[str]:
    """A text in parts of at most CHUNK_BYTES."""
    data, start = text.encode(), 0
    while len(data) - start > CHUNK_BYTES:
        length, exact = find_split_point(data[start : start + CHUNK_BYTES], options.split_points)
        counts["seams"] += not exact
        yield data[start : start + length].decode()
        start += length
    yield data[start:].decode() if start else text


def _decode(data: bytes, policy: Invalid) -> tuple[str, bool]:
    """The text, and whether any of it was replaced."""
    try:
        return data.decode(), False
    except UnicodeDecodeError:
        if policy != "replace":
            raise
        return data.decode(errors="replace"), True


def _parse_line(line: bytes, policy: Invalid, text_key: str) -> tuple[str, bool]:
    """The text in a line of JSON, and whether any of it was replaced. Raises ValueError when there is none."""
    content, replaced = _decode(line, policy)
    row = json.loads(content)
    if not isinstance(row, dict):
        raise ValueError(f"a row must be an object with named values, not {content.strip():.60}")
    if text_key not in row:
        raise ValueError(f"no key {text_key!r} (it has: {', '.join(sorted(row)):.200})")
    text = row[text_key]
    if not isinstance(text, str):
        raise ValueError(f"{text_key!r} is {json.dumps(text):.40}, not a string")
    if b"\\u" in line and _SURROGATE.search(text):  # half of a pair, which no UTF-8 can hold
        if policy != "replace":
            raise ValueError("lone surrogate")
        text, replaced = _SURROGATE.sub("\ufffd", text), True
    return text, replaced
