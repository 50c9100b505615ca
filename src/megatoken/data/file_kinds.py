"""Recognize a file by its name and first bytes: its format, its compression and its split."""

import gzip
import io
import json
import re
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

# separated: documents with <|endoftext|> between them; whole: one document; the others: rows with
# named fields.
Format = Literal["separated", "whole", "json", "csv", "tsv", "parquet"]
Compression = Literal["", "gz", "zst"]

HEAD_BYTES = 8192  # read to detect the content of a file
LARGEST_ROW = 64 << 20  # bytes
FORMATS: dict[str, Format] = {
    ".txt": "separated",
    ".md": "whole",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".json": "json",  # a row per line, one array of rows, or one row
    ".jsonl": "json",
    ".ndjson": "json",
}
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".gzip": "gz", ".zst": "zst", ".zstd": "zst"}
# The words, as in `datasets`, that name the split of a file or folder. "eval" is for validation.
_SPLIT = re.compile(
    r"(?<![^\W\d_])(?:(?P<train>train|training)|(?P<test>test|testing)"
    r"|(?P<val>val|valid|validation|dev|eval|evaluation|held[-_]?out))(?![^\W\d_])",
    re.IGNORECASE,
)


def find_split(name: str) -> str:
    """Return the split that a relative path names: "train", "val", "test", or "" for none.

    A folder with such a name decides first, then words in the file's name, then words in the names
    of folders, innermost first.
    """
    parts = name.split("/")
    folders = filter(_SPLIT.fullmatch, parts[:-1])
    matches = [match for part in (*folders, *reversed(parts)) for match in _SPLIT.finditer(part)]
    return str(matches[0].lastgroup) if matches else ""


def recognize(path: Path) -> tuple[Format | None, Compression]:
    """Return a file's format, or None if neither its suffix nor its content is known.

    Content in JSON lines is recognized under any name but that of another format of rows.
    """
    suffixes = ["", *(suffix.lower() for suffix in path.suffixes)]
    compression = COMPRESSIONS.get(suffixes[-1], "")
    file_format = FORMATS.get(suffixes[-2 if compression else -1])
    if file_format in (None, "separated", "whole") and _starts_with_rows(path, compression):
        return "json", compression
    return file_format, compression


def decompress(raw: BinaryIO, compression: Compression) -> io.BufferedReader:
    """Return a buffered stream of a file's content."""
    stream: Any = raw
    if compression == "gz":
        stream = gzip.GzipFile(fileobj=raw)
    elif compression == "zst":
        import pyarrow

        # Unlike other readers, this one detects a truncated file.
        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
    return io.BufferedReader(stream, HEAD_BYTES)


def _starts_with_rows(path: Path, compression: Compression) -> bool:
    """Return whether the first two lines that are not blank are JSON objects with a common key.

    A single line is enough if it has the key "text".
    """
    try:
        with path.open("rb") as raw, decompress(raw, compression) as stream:
            lines = filter(bytes.strip, iter(partial(stream.readline, LARGEST_ROW), b""))
            texts = [line.decode("utf-8-sig", "replace") for line in islice(lines, 2)]
        keys = [json.loads(text).keys() for text in texts]
        return bool(keys[0] & (keys[1:] or [{"text"}])[0])
    except Exception:  # `open_text` names what is wrong with the file
        return False
