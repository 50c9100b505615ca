"""Raw pieces of files to documents, and documents to token ids: the work that runs in parallel.

In: pieces of bytes that know their file and line. Out: the ids of their documents, sorted into train and val,
`<|endoftext|>` before each document, and exact counts of what the policies did. Deliberately absent: reading
files (blocks.py) and everything that depends on what came before; the caller drops the first `<|endoftext|>`
of a split and remembers the split of a document that goes on in the next block.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatoken.data.sources import Form
from megatoken.data.tokenizer import EOT, Tokenizer
from megatoken.errors import Exit, Fault

Ids = NDArray[np.uint16] | NDArray[np.uint32]
Invalid = Literal["replace", "skip", "fail"]
Cuts = Literal["anywhere", "words", "nowhere"]

SEPARATOR = EOT.encode()  # what parts the documents of a .txt file, as in TinyStories
BLOCK_BYTES = 1 << 20  # longest text encoded at once: `tokenizers` takes 200 bytes of memory a byte of text
SPLIT_BYTES = 4096  # of a document's beginning decide its split, so duplicates land on the same side

# A visible character before white space: no word of GPT-2 reaches across. The upper bytes are those in which no
# Unicode white space ends (U+0085, U+00A0, U+1680, U+2000..200A, U+2028, U+2029, U+202F, U+205F, U+3000).
_LAST_SEAM = re.compile(rb".*[!-~\x8b-\x9e\xa1-\xa7\xaa-\xae\xb0-\xbf](?=[\t\n\r ])", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Rules:
    """What turns bytes into documents and decides their split."""

    invalid: Invalid = "replace"  # what becomes of bytes that are no UTF-8
    text_key: str = "text"  # the key (jsonl) or column (parquet) that holds the text
    val_fraction: float = 0.0
    cuts: Cuts = "nowhere"  # where the tokenizer allows a long document to be cut without changing an id


@dataclass(frozen=True, slots=True)
class Piece:
    """Some documents of a file, one document, or a part of one."""

    file: str  # for messages
    line: int  # number of its first line, or of its row; from 1
    form: Form
    begins: bool  # its first document begins here
    ends: bool  # its last document ends here
    data: bytes


@dataclass(slots=True)
class Document:
    """Text of a document or, where that is long, of a part of it."""

    text: str
    begins: bool
    ends: bool
    replaced: bool  # it held bytes that are no UTF-8


@dataclass(slots=True)
class Encoded:
    """Ids of some pieces; `carried` belongs to the document that an earlier block left open.

    counts: train, val (documents), empty, replaced, skipped (documents), seams (cuts that may have changed ids).
    """

    carried: Ids
    train: Ids
    val: Ids
    open: str  # the side of the document left open at the end: carried, train, val; "" if none
    open_replaced: bool  # bytes of that document were replaced
    carried_replaced: bool  # bytes of the carried document were replaced; the caller counts it once
    counts: dict[str, int]


def encode_pieces(pieces: list[Piece], rules: Rules, tokenizer: Tokenizer) -> Encoded:
    """Ids of the documents of `pieces`, sorted into splits; uint16 when the vocabulary allows, else uint32.

    Fault(Exit.DATA) as `read_documents`.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    counts: Counter[str] = Counter()
    ids: dict[str, list[NDArray[Any]]] = {"carried": [], "train": [], "val": []}
    eot = np.array([tokenizer.eot], dtype=dtype)
    side, is_open, replaced, carried_replaced = "carried", bool(pieces) and not pieces[0].begins, False, False
    for document in (document for piece in pieces for document in read_documents(piece, rules, counts)):
        if document.begins:
            side, replaced = choose_split(document.text, rules.val_fraction), False
            counts[side] += 1
            ids[side].append(eot)
        if document.replaced and not replaced:
            replaced = True
            carried_replaced |= side == "carried"
            counts["replaced"] += side != "carried"
        is_open = not document.ends
        ids[side].append(tokenizer.encode(document.text).astype(dtype))
    none = [np.zeros(0, dtype=dtype)]
    return Encoded(
        carried=np.concatenate(ids["carried"] or none),
        train=np.concatenate(ids["train"] or none),
        val=np.concatenate(ids["val"] or none),
        open=side if is_open else "",
        open_replaced=replaced and is_open,
        carried_replaced=carried_replaced,
        counts=dict(counts),
    )


def token_dtype(vocab_size: int) -> str:
    """The smallest token type of a shard that holds ids below `vocab_size`."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def choose_split(text: str, val_fraction: float) -> str:
    """train or val for the document that begins with `text`: by hash, so the same in any order and company."""
    beginning = text[:SPLIT_BYTES].encode()[:SPLIT_BYTES]
    return "val" if xxhash.xxh3_64_intdigest(beginning) < val_fraction * 2**64 else "train"


def read_documents(piece: Piece, rules: Rules, counts: Counter[str]) -> Iterator[Document]:
    """The documents of `piece` in order, long ones in parts, policies applied and counted in `counts`.

    Documents of nothing but white space are dropped. Fault(Exit.DATA), naming file and line, for bytes that
    are no UTF-8 under the policy "fail" and for lines that hold no text; "skip" counts these instead.
    """
    if piece.form == "lines":
        yield from _read_lines(piece, rules, counts)
        return
    texts = piece.data.split(SEPARATOR) if piece.form == "separated" else [piece.data]
    line = piece.line
    for number, data in enumerate(texts, start=1):
        begins = piece.begins or number > 1
        ends = piece.ends or number < len(texts)
        yield from _read_document(data, begins, ends, (piece, line), rules, counts)
        line += data.count(b"\n")


def find_seam(data: bytes, cuts: Cuts) -> tuple[int, bool]:
    """Where to cut a text of which only `data` is at hand, and whether that surely changes no id.

    cuts "words": before white space, which GPT-2's words never reach across. Otherwise, and where there is
    none, between two characters, and never inside a SEPARATOR.
    """
    if cuts != "anywhere":
        for start in (max(0, len(data) - 4096), 0):
            if seam := _LAST_SEAM.match(data, start):
                return seam.end(), cuts == "words"
    last = end = len(data) - 1
    while end > last - 3 and data[end] & 0xC0 == 0x80:  # the middle of a character
        end -= 1
    if data[end] & 0xC0 == 0x80:  # four in a row: the last of them belongs to no character
        end = last
    bracket = data.rfind(b"<", max(1, end - len(SEPARATOR)), end)
    if bracket > 0 and SEPARATOR.startswith(data[bracket:end]):
        end = bracket
    return end, cuts == "anywhere"


def _read_document(
    data: bytes, begins: bool, ends: bool, place: tuple[Piece, int], rules: Rules, counts: Counter[str]
) -> Iterator[Document]:
    """One document, in parts of at most BLOCK_BYTES."""
    replaced = False
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if rules.invalid == "skip":
            counts["skipped"] += 1
            return
        piece, line = place
        if rules.invalid == "fail":
            line += 0 if piece.form == "rows" else data.count(b"\n", 0, error.start)
            what = f"not UTF-8: byte 0x{data[error.start]:02x} ({error.reason})"
            raise Fault(Exit.DATA, what, _where(piece, line), _INVALID) from error
        text, replaced = data.decode(errors="replace"), True
    if begins and ends and (not text or text.isspace()):
        counts["empty"] += 1
    elif len(data) <= BLOCK_BYTES:
        yield Document(text, begins, ends, replaced)
    else:
        start = 0
        while len(data) - start > BLOCK_BYTES:
            length, exact = find_seam(data[start : start + BLOCK_BYTES], rules.cuts)
            counts["seams"] += not exact
            yield Document(data[start : start + length].decode(errors="replace"), begins, False, replaced)
            start, begins = start + length, False
        yield Document(data[start:].decode(errors="replace"), False, ends, replaced)


def _read_lines(piece: Piece, rules: Rules, counts: Counter[str]) -> Iterator[Document]:
    for number, line in enumerate(piece.data.split(b"\n"), start=piece.line):
        if not line or line.isspace():
            continue
        try:
            text, replaced = _read_line(line, rules)
        except (ValueError, RecursionError) as error:
            if rules.invalid != "skip":
                reason = "not UTF-8" if isinstance(error, UnicodeError) else str(error)
                raise Fault(Exit.DATA, f"bad line: {reason}", _where(piece, number), _INVALID) from error
            counts["skipped"] += 1
            continue
        for document in _read_document(text.encode(), True, True, (piece, number), rules, counts):
            document.replaced |= replaced
            yield document


def _read_line(line: bytes, rules: Rules) -> tuple[str, bool]:
    """The text in a line of JSON, and whether any of it had to be replaced. ValueError when there is none."""
    replaced = False
    try:
        content = line.decode()
    except UnicodeDecodeError:
        if rules.invalid != "replace":
            raise
        content, replaced = line.decode(errors="replace"), True
    row = json.loads(content)
    if not isinstance(row, dict):
        raise ValueError("a line must be a JSON object")
    if rules.text_key not in row:
        keys = ", ".join(sorted(row)) or "none"
        raise ValueError(f"no key {rules.text_key!r} (it has: {keys:.200})")
    text = row[rules.text_key]
    if not isinstance(text, str):
        raise ValueError(f"{rules.text_key!r} is {json.dumps(text):.40}, not a string")
    if b"\\u" in line and _SURROGATE.search(text):  # half of a pair, which no UTF-8 can hold
        if rules.invalid != "replace":
            raise UnicodeError("lone surrogate")
        text, replaced = _SURROGATE.sub("\ufffd", text), True
    return text, replaced


def _where(piece: Piece, line: int) -> str:
    return f"{piece.file}:{line}" if piece.form != "rows" else f"{piece.file}, row {line}"


_INVALID = "mend it, or pass over such lines and documents with --invalid skip"
