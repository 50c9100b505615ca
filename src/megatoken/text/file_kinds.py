"""Recognize a file by its name and first bytes: its format, its compression and its split."""

import gzip
import io
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

from megatoken.base.errors import DataError
from megatoken.base.system.table import read_table

FileFormat = Literal["separated", "whole", "json", "csv", "tsv", "parquet"]  # see file_kinds.toml

HEAD_BYTES = 8192  # read to detect the content of a file
LARGEST_ROW = 64 << 20  # bytes
_TABLE = read_table(__file__)
FORMATS: dict[str, FileFormat] = _TABLE["formats"]  # by suffix
FOREIGN: dict[str, dict[str, Any]] = _TABLE["foreign"]  # that are not read, by name
# Words in the name of a file or folder that tell its split, as in the library `datasets`.
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


def find_compression(name: str) -> str:
    """Return "gz", "zst" or "" for none, by a file's name."""
    return str(_TABLE["compressions"].get(Path(name.lower()).suffix, ""))


def find_format(path: Path) -> FileFormat | None:
    """Return a file's format, or None if neither its suffix nor its content is known.

    JSON lines are recognized by their content, unless the name tells another format of rows.
    """
    name = path.stem if find_compression(path.name) else path.name
    file_format = FORMATS.get(Path(name.lower()).suffix)
    is_text = file_format in (None, "separated", "whole")
    return "json" if is_text and _starts_with_rows(path) else file_format


def decompress(raw: BinaryIO, name: str) -> io.BufferedReader:
    """Return a buffered stream of the content of the file `name`."""
    stream: Any = raw
    compression = find_compression(name)
    if compression == "gz":
        stream = gzip.GzipFile(fileobj=raw)
    elif compression == "zst":
        import pyarrow

        # Unlike other readers, this one detects a truncated file.
        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
    return io.BufferedReader(stream, HEAD_BYTES)


def _starts_with_rows(path: Path) -> bool:
    """Return whether the first two lines that are not blank are JSON objects with a common key.

    A single line is enough if it has the key "text".
    """
    try:
        with path.open("rb") as raw, decompress(raw, path.name) as stream:
            if not re.match(rb"(?:\xef\xbb\xbf)?\s*\{", stream.peek(HEAD_BYTES)):
                return False
            lines = [stream.readline(LARGEST_ROW) for _ in range(4)]
        texts = [line.decode("utf-8-sig", "replace") for line in lines if line.strip()]
        keys = [json.loads(text).keys() for text in texts[:2]]
        return bool(keys[0] & (keys[1:] or [{"text"}])[0])
    except Exception:  # `open_text` names what is wrong with the file
        return False


def find_foreign(path: Path) -> DataError | None:
    """Return an error that names the format of `path`, if that is one of FOREIGN.

    path: a file, a dataset's folder, or the folder above its splits; for Megatron-LM, also the
    common name of its files without a suffix.
    """
    index = Path(f"{path}.idx")
    path = index if index.is_file() else path
    is_folder = path.is_dir()
    start = ""
    if path.is_file():
        with suppress(OSError), path.open("rb") as file:
            start = file.read(16).decode("latin-1")
    for folder in [path, *path.glob("*/")] if is_folder else [path.parent]:
        for name, row in FOREIGN.items():
            markers = row["markers"]
            is_match = len(markers) > 1 if is_folder else any(map(path.match, markers))
            has_all = is_match and all(any(folder.glob(marker)) for marker in markers)
            if has_all and re.match(row.get("start", ""), start):
                fix = row["fix"].replace("DIR", str(folder)).replace("FILE", str(path))
                return DataError(f"{name} is not read", path, fix)
    return None
