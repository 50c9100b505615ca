"""Read files as `megatoken prepare` documents it, with none of its code: an oracle in 60 lines."""

import csv
import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from tests.tables import read_table

SPLITS = read_table("""
train train
training train
test test
testing test
val val
valid val
validation val
dev val
eval val
heldout val
""")


def name_split(name: str) -> str:
    *folders, file = name.lower().split("/")
    words = folders + re.findall(r"[^\W\d_]+", " ".join([file, *reversed(folders)]))
    return next((SPLITS[word] for word in words if word in SPLITS), "")


def read_documents(path: Path, key: str) -> list[str | None]:
    """Return the documents, with a surrogate for each invalid byte; None for a row without text."""
    data, name = path.read_bytes(), path.name.lower()
    if name.endswith((".gz", ".gzip")):
        data = gzip.decompress(data)
    elif name.endswith((".zst", ".zstd")):
        data = pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "zstd").read()
    suffix = Path(re.sub(r"\.(gz|gzip|zst|zstd)$", "", name)).suffix
    if suffix in (".parquet", ".pq"):
        return [find_text(row, key) for row in parquet.read_table(io.BytesIO(data)).to_pylist()]
    text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    if suffix in (".txt", ".md") and not text.lstrip(" \t\r\n\v\f").startswith("{"):
        return [*text.split("<|endoftext|>")] if suffix == ".txt" else [text]
    if suffix in (".csv", ".tsv"):
        delimiter = "\t" if suffix == ".tsv" else ";" if ";" in text.partition("\n")[0] else ","
        return [find_text(row, key) for row in read_csv(text, delimiter)]
    if text.startswith("[") or re.match(r"\{\s*\n", text):
        return [find_text(row, key) for row in json.loads(f"[{text}]" if text[0] == "{" else text)]
    return [find_text(line, key) for line in text.split("\n") if line.strip()]


def read_csv(text: str, delimiter: str) -> list[Any]:
    """Return the rows as dicts; None for a row with too many fields, or a line of no row."""
    lines, rows, length = io.StringIO(text, newline="\n").readlines(), [], 1
    while lines:
        try:
            rows += csv.reader(lines[:length], delimiter=delimiter, strict=True)
        except csv.Error as error:
            if length < len(lines) and "end of data" in str(error):
                length += 1
                continue
            rows, length = [*rows, None], 1
        lines, length = lines[length:], 1
    header, *rows = [row for row in rows if row != []] or [[]]
    return [row and len(row) <= len(header) and dict(zip(header, row)) for row in rows]  # noqa: B905


def find_text(row: Any, key: str) -> str | None:
    """Return a row's text or, for messages, their ChatML. row: as parsed, or a line of JSON."""
    try:
        row = json.loads(row) if isinstance(row, str) else row
        value = row[key]
        turn = "<|im_start|>{role}\n{content}<|im_end|>\n"
        value = "".join(map(turn.format_map, value)) if isinstance(value, list) else value
        return str(value, "utf-8", "surrogateescape") if isinstance(value, bytes) else value
    except (ValueError, TypeError, KeyError):
        return None
