"""Open the files of a corpus as text. JSON arrays, CSV and parquet become lines of JSON rows."""

import codecs
import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from megatoken.data.sources import File, Source
from megatoken.errors import DataError, MegatokenError

HEAD_BYTES = 8192  # read to detect the content of a file
LARGEST_ROW = 64 << 20  # bytes
PARQUET_ROWS = 8  # read at once; with dictionary encoding, a row can be as long as the file

# lines: JSON, a row per line. rows: the same, converted from an array, CSV, TSV or parquet.
TextFormat = Literal["separated", "whole", "lines", "rows"]


class TextFile(NamedTuple):
    """An open file. tell: returns how many bytes have been read from the file on disk."""

    stream: BinaryIO
    format: TextFormat
    tell: Callable[[], int]
    is_binary: bool


class _RowStream:
    """A binary stream of rows as JSON lines, with only those methods of BinaryIO that are used."""

    def __init__(self, rows: Iterator[Any]) -> None:
        self._lines = (json.dumps(row, default=_to_text).encode() + b"\n" for row in rows)

    def __iter__(self) -> Iterator[bytes]:
        return self._lines

    def seekable(self) -> bool:
        return False

    def read(self, size: int) -> bytes:
        """Return whole lines of at least `size` bytes in total, or fewer at the end."""
        lines = []
        for line in self._lines:
            lines.append(line)
            size -= len(line)
            if size <= 0:
                break
        return b"".join(lines)


def _to_text(value: Any) -> str:
    """Convert a value that JSON cannot hold, such as a date, to text."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


@contextmanager
def open_text(source: Source, file: File, text_key: str = "") -> Iterator[TextFile]:
    """Open a file for reading from its start.

    text_key: the only column to read from a parquet file. Any exception inside the `with` block is
    converted to a DataError that names the file, because gzip, zstd, parquet and network code each
    raise their own types.
    """
    try:
        with source.open(file) as raw:
            stream = io.BufferedReader(cast(io.RawIOBase, _decompress(raw, file)), HEAD_BYTES)
            yield _convert(raw, stream, file, text_key)
    except MegatokenError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or f"{error}" or type(error).__name__
        raise DataError(f"cannot read: {reason:.200}", file.path, "fix or remove it") from error


def _convert(raw: BinaryIO, stream: Any, file: File, text_key: str) -> TextFile:
    def tell() -> int:
        return min(raw.tell(), file.size)

    if file.format == "parquet":
        rows = _read_parquet(raw, text_key)
        return TextFile(cast(BinaryIO, _RowStream(rows)), "rows", tell, False)
    head = stream.peek(HEAD_BYTES)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError("UTF-16 text", file.path, "convert it to UTF-8")
    is_binary = b"\0" in head
    if file.format in ("separated", "whole"):
        return TextFile(stream, file.format, tell, is_binary)
    if file.format in ("csv", "tsv"):
        rows = _read_csv(stream, "," if file.format == "csv" else "\t")
    elif head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        rows = iter(json.loads(stream.read().decode("utf-8-sig", "surrogateescape")))
    else:
        return TextFile(stream, "lines", tell, is_binary)
    return TextFile(cast(BinaryIO, _RowStream(rows)), "rows", tell, is_binary)


def read_rows(source: Source) -> Iterator[tuple[str, bytes]]:
    """Yield (file:line, JSON bytes) for each row. Raises DataError as `open_text` does."""
    for file in source.files:
        with open_text(source, file) as (stream, format, *_):
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    place = f", row {number}" if format == "rows" else f":{number}"
                    yield file.path + place, line


def _decompress(raw: BinaryIO, file: File) -> object:
    if file.compression == "gz":
        return gzip.GzipFile(fileobj=raw)
    if file.compression == "zst":
        import pyarrow

        # Unlike other readers, this one detects a truncated file.
        return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
    return raw


def fill(stream: BinaryIO, buffer: bytes, size: int) -> tuple[bytes, bool]:
    """Return `buffer` extended to `size` bytes, and whether the stream ended."""
    while len(buffer) < size:
        part = stream.read(size - len(buffer))
        if not part:
            return buffer, True
        buffer += part
    return buffer, False


def _read_csv(stream: BinaryIO, delimiter: str) -> Iterator[Any]:
    """Yield rows as dicts.

    A row with too many fields is yielded as a list, so that parsing rejects it.
    """
    csv.field_size_limit(LARGEST_ROW)
    lines = codecs.iterdecode(stream, "utf-8-sig", "surrogateescape")
    for row in csv.DictReader(lines, delimiter=delimiter, strict=True):
        yield list(row.values()) if None in row else row


def _read_parquet(raw: BinaryIO, text_key: str) -> Iterator[Any]:
    from pyarrow import parquet

    table = parquet.ParquetFile(raw)
    if text_key not in table.schema_arrow.names:
        for batch in table.iter_batches(PARQUET_ROWS, use_threads=False):
            yield from batch.to_pylist()
        return
    for batch in table.iter_batches(PARQUET_ROWS, columns=[text_key], use_threads=False):
        for text in batch[0].cast("large_binary").to_pylist():  # may be invalid UTF-8
            yield {text_key: text}
