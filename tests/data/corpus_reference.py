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

SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLITS |= dict.fromkeys(("val", "valid", "validation", "dev", "eval", "heldout"), "val")


def name_split(name: str) -> str:
    *folders, file = name.lower().split("/")
    words = folders + re.findall(r"[^\W\d_]+", " ".join([file, *reversed(folders)]))
    return next((SPLITS[word] for word in words if word in SPLITS), "")


def read_documents(path: Path, key: str) -> list[str | None]:
    """Return the documents, with a surrogate for each invalid byte; None for a row without text."""
    data, name, packing = path.read_bytes(), path.name.lower(), path.suffix.lower()
    if packing in (".gz", ".gzip"):
        data = gzip.decompress(data)
    elif packing in (".zst", ".zstd"):
        data = pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "zstd").read()
    suffix = Path(re.sub(r"\.(gz|gzip|zst|zstd)$", "", name)).suffix
    if suffix in (".parquet", ".pq"):
        return [find_text(row, key) for row in parquet.read_table(io.BytesIO(data)).to_pylist()]
    text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    if suffix in (".txt", ".md") and not text.lstrip().startswith("{"):
        return [*text.split("<|endoftext|>")] if suffix == ".txt" else [text]
    if suffix in (".csv", ".tsv"):
        is_semicolon = ";" in text.partition("\n")[0]
        rows = read_csv(text, "\t" if suffix == ".tsv" else ";" if is_semicolon else ",")
    else:
        is_whole = text.startswith("[") or re.match(r"\{\s*\n", text)
        rows = json.loads(text) if is_whole else map(parse, text.split("\n"))
        rows = [rows] if isinstance(rows, dict) else rows
    return [find_text(row, key) for row in rows if row != ""]


def parse(line: str) -> Any:
    try:
        return json.loads(line) if line.strip() else ""
    except ValueError:
        return None


def read_csv(text: str, delimiter: str) -> list[Any]:
    """Return the rows as dicts; None for a row with too many fields, or a line of no row."""
    lines, rows = io.StringIO(text, newline="\n").readlines(), []
    while lines:
        for length in range(1, len(lines) + 1):
            try:
                rows += csv.reader(lines[:length], delimiter=delimiter, strict=True)
                del lines[:length]
                break
            except csv.Error as error:
                if length == len(lines) or "end of data" not in str(error):
                    rows.append(None)
                    del lines[0]
                    break
    header, *rows = [row for row in rows if row != []] or [[]]
    return [
        row and len(row) <= len(header) and dict(zip(header, row, strict=False)) for row in rows
    ]


def find_text(row: Any, key: str) -> str | None:
    value = row.get(key) if isinstance(row, dict) else None
    if isinstance(value, list):
        turn = "<|im_start|>{role}\n{content}<|im_end|>\n"
        return "".join(turn.format_map(message) for message in value)
    value = value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
    return value if isinstance(value, str) else None
