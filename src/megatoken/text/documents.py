"""Split file segments into documents and encode them. This part of `prepare` runs in parallel."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatoken.base.errors import DataError
from megatoken.data.vocabulary import Ids
from megatoken.text.byte_bpe import EOT
from megatoken.text.sources import File
from megatoken.text.text_files import TextFormat, open_text, read_part, skip
from megatoken.text.tokenizer import SplitPoints, Tokenizer

Invalid = Literal["replace", "skip", "fail"]

SEPARATOR = EOT.encode()  # between the documents of a .txt file, as in TinyStories
DELIMITERS = {"separated": SEPARATOR, "lines": b"\n", "rows": b"\n"}  # by TextFormat
SPLIT_BYTES = 4096  # hashed to choose a document's split, so duplicates share a split

# A visible character before white space: no word of GPT-2 spans both. The upper bytes are those
# that no Unicode white space ends with (U+0085, U+00A0, U+1680, U+2000..200A, U+2028, U+2029,
# U+202F, U+205F, U+3000).
_LAST_WORD_END = re.compile(rb".*[!-~\x8b-\x9e\xa1-\xa7\xaa-\xae\xb0-\xbf](?=[\t\n\r ])", re.DOTALL)
FIX_ROW = "fix it, or skip bad rows and documents with --invalid skip"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class PrepareOptions:
    """How to turn bytes into documents, and how to divide documents into train and val."""

    invalid: Invalid = "replace"  # what to do with bytes that are not UTF-8
    text_key: str = "text"  # key or column that holds the text of rows
    val_fraction: float = 0.0  # of the documents of files without a split
    split_points: SplitPoints = "nowhere"  # the tokenizer's
    chunk_bytes: int = 1 << 20  # longest text encoded at once; that takes 200 times its memory


@dataclass(frozen=True)
class Segment:
    """Consecutive documents of a file, or a part of one long document.

    start, size: where it is in the file, in bytes or rows of parquet. data: its content if the file
    has to be read from the beginning, or else None. line: number of its first line or row, from 1,
    or 0 if it was not counted.
    """

    file: File
    format: TextFormat
    split: str  # split of the long document that it continues, "" if it starts a document
    val_fraction: float  # share of documents for val
    ends: bool  # its last document ends here
    start: int
    size: int
    data: bytes | None = None
    line: int = 0

    def read(self, text_key: str) -> bytes:
        """Return the content. Raises DataError if the file cannot be read."""
        if self.data is not None:
            return self.data
        return read_part(self.file, self.start, self.size, text_key)

    def find_line(self) -> int:
        """Return the number of its first line or row, from 1. Raises DataError as `read` does."""
        return self.line or count_lines(self.file, self.start)


@dataclass
class Encoded:
    """Token ids of a chunk, with <|endoftext|> before each document that begins in it.

    counts: how many documents are in "train" and "val", were "empty" or "skipped", and had invalid
    bytes "replaced"; "seams", how many cuts inside documents may have changed ids; "train_text",
    "val_lost", ..., what `Tokenizer.measure_text` returns for each split.
    """

    train: Ids
    val: Ids
    counts: dict[str, int]


def encode_segments(
    segments: list[Segment], options: PrepareOptions, tokenizer: Tokenizer
) -> Encoded:
    """Encode the documents of `segments`, divided into train and val.

    Raises DataError as `read_documents` does.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    counts: Counter[str] = Counter()
    eot = np.array([tokenizer.eot], dtype)
    empty = np.zeros(0, dtype)
    ids: dict[str, list[NDArray[Any]]] = {"train": [empty], "val": [empty]}
    for segment in segments:
        split = segment.split
        for text in read_documents(segment, options, counts):
            if not split:
                split = choose_split(text, segment.val_fraction)
                counts[split] += 1
                ids[split].append(eot)
            for part in _split_text(text, options, counts):
                encoded = tokenizer.encode(part)
                ids[split].append(encoded.astype(dtype))
                for name, size in tokenizer.measure_text(part, encoded).items():
                    counts[f"{split}_{name}"] += size
            split = ""
    return Encoded(np.concatenate(ids["train"]), np.concatenate(ids["val"]), dict(counts))


def token_dtype(vocab_size: int) -> str:
    """Return the smallest dtype that holds ids below `vocab_size`."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def choose_split(text: str, val_fraction: float) -> str:
    """Return "train" or "val" for a document, by a hash of its first SPLIT_BYTES.

    text: the document or its beginning.
    """
    beginning = text[:SPLIT_BYTES].encode()[:SPLIT_BYTES]
    return "val" if xxhash.xxh3_64_intdigest(beginning) < val_fraction * 2**64 else "train"


def read_documents(
    segment: Segment, options: PrepareOptions, counts: Counter[str]
) -> Iterator[str]:
    """Yield the texts of a segment's documents in order, without blank ones.

    Blank documents are counted as empty. If `options.invalid` is "skip", rows without text and
    documents with invalid UTF-8 are dropped and counted, but a document that continues in another
    segment gets its invalid bytes replaced. Otherwise, raises DataError, naming file and line, for
    a row without text, and for invalid UTF-8 if `options.invalid` is "fail".
    """
    is_lines = segment.format in ("lines", "rows")
    delimiter = DELIMITERS.get(segment.format)
    content = segment.read(options.text_key)
    pieces = content.split(delimiter) if delimiter else [content]
    for number, data in enumerate(pieces, start=1):
        if is_lines and not data.strip():
            continue
        begins = number > 1 or not segment.split
        is_complete = begins and (segment.ends or number < len(pieces))
        policy = options.invalid if is_complete or options.invalid == "fail" else "replace"
        try:
            if is_lines:
                text, replaced = _parse_line(data, policy, options.text_key)
            else:
                text, replaced = _decode(data, policy)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            if policy == "skip":
                counts["skipped"] += 1
                continue
            line = segment.find_line()
            line += (
                number - 1 if is_lines else sum(each.count(b"\n") for each in pieces[: number - 1])
            )
            line += data.count(b"\n", 0, getattr(error, "start", 0))
            where = f", row {line}" if segment.format == "rows" else f":{line}"
            raise DataError(f"bad text: {error}", segment.file.path + where, FIX_ROW) from error
        if is_complete and (not text or text.isspace()):
            counts["empty"] += 1
            continue
        counts["replaced"] += replaced
        yield text


def count_lines(file: File, offset: int) -> int:
    """Return the number of the line, from 1, at byte `offset` of a file."""
    with open_text(file) as (stream, *_):
        return 1 + skip(stream, offset)


def find_split_point(data: bytes, split_points: SplitPoints) -> tuple[int, bool]:
    """Return the byte at which to split a long text, and whether the token ids stay the same.

    data: the beginning of the text. Prefers to split before white space, because no word of GPT-2
    contains both a visible character and the white space after it. If there is none, or if
    `split_points` is "anywhere", splits between two characters, but never inside a SEPARATOR.
    """
    if split_points != "anywhere":
        for start in (max(0, len(data) - 4096), 0):
            match = _LAST_WORD_END.match(data, start)
            if match:
                return match.end(), split_points == "words"
    last = len(data) - 1
    end = last
    while end > last - 3 and data[end] & 0xC0 == 0x80:  # the middle of a character
        end -= 1
    if data[end] & 0xC0 == 0x80:  # invalid: a character has at most three such bytes
        end = last
    bracket = data.rfind(b"<", max(1, end - len(SEPARATOR)), end)
    if bracket > 0 and SEPARATOR.startswith(data[bracket:end]):
        end = bracket
    return end, split_points == "anywhere"


def _split_text(text: str, options: PrepareOptions, counts: Counter[str]) -> Iterator[str]:
    """Yield a text in pieces of at most `options.chunk_bytes`."""
    data = text.encode()
    while len(data) > options.chunk_bytes:
        length, is_exact = find_split_point(data[: options.chunk_bytes], options.split_points)
        counts["seams"] += not is_exact
        yield data[:length].decode()
        data = data[length:]
    yield data.decode()


def _decode(data: bytes, policy: Invalid) -> tuple[str, bool]:
    """Return the text, and whether invalid bytes were replaced."""
    try:
        return data.decode(), False
    except UnicodeDecodeError:
        if policy != "replace":
            raise
        return data.decode(errors="replace"), True


def _parse_line(line: bytes, policy: Invalid, text_key: str) -> tuple[str, bool]:
    """Return a row's text, and whether invalid bytes were replaced.

    Raises ValueError if the row has no text.
    """
    content, replaced = _decode(line, policy)
    row = json.loads(content)
    text = row.get(text_key) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise ValueError(_explain_row(row, text_key))
    if _SURROGATE.search(text):  # half of a pair, which UTF-8 cannot hold
        if policy != "replace":
            raise ValueError("lone surrogate")
        return _SURROGATE.sub("\ufffd", text), True
    return text, replaced


def _explain_row(row: Any, text_key: str) -> str:
    """Say why a row has no text."""
    fields = row if isinstance(row, dict) else {"not an object": None}
    if isinstance(fields.get(text_key), (dict, list)):
        return "columns, as pandas writes them; write to_json(orient='records', lines=True)"
    for key, value in fields.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            if value[0].keys() & {"role", "from"}:
                return "a conversation; prepare conversations and text in separate folders"
            return f"one JSON object, not rows; write its list {key!r} as rows"
    return f"no text under {text_key!r} (--text-key) in this row ({', '.join(sorted(fields)):.200})"
