"""Open the files of a corpus as text. JSON arrays, CSV and parquet become JSON, a row per line."""

import codecs
import csv
import gzip
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from megatoken.data.sources import INSTALL_DATA, File, Source
from megatoken.errors import DataError, MegatokenError

HEAD_BYTES = 8192  # read to detect the content of a file
READ_BYTES = 1 << 20
LARGEST_ROW = 64 << 20  # bytes
PARQUET_ROWS = 8  # read at once; with a dictionary each can be as long as the file
_GAP = re.compile(r"[\s,]*")
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

# lines: JSON, a row per line. rows: the same, converted from an array, CSV, TSV or parquet.
TextFormat = Literal["separated", "whole", "lines", "rows"]


class TextFile(NamedTuple):
    """An open file. tell: returns the bytes of the file on disk that were read."""

    stream: BinaryIO
    format: TextFormat
    tell: Callable[[], int]
    is_binary: bool


class _RowStream:
    """The part of BinaryIO that readers need, for an iterator of lines."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines = lines

    def __iter__(self) -> Iterator[bytes]:
        return self._lines

    def seekable(self) -> bool:
        return False

    def read(self, size: int) -> bytes:
        """Return lines of at least `size` bytes, fewer at the end."""
        lines = []
        for line in self._lines:
            lines.append(line)
            size -= len(line)
            if size <= 0:
                break
        return b"".join(lines)


@contextmanager
def open_text(source: Source, file: File, text_key: str = "") -> Iterator[TextFile]:
    """Open a file for reading from its start.

    text_key: the only column to read of a parquet file. Raises DataError, naming the file, for
    every exception inside the `with` block: gzip, zstd, parquet and the network have their own.
    """
    try:
        if file.format == "parquet":
            with source.open(file) as raw:
                lines, tell = _read_parquet(raw, file, text_key)
                yield TextFile(cast(BinaryIO, _RowStream(lines)), "rows", tell, False)
            return
        with source.open(file) as raw:
            head, _ = fill(decompress(raw, file), b"", HEAD_BYTES)
        if head.startswith(_UTF_16):
            raise DataError("UTF-16 text", file.path, "convert it to UTF-8")
        with source.open(file) as raw:
            content = decompress(raw, file)  # closes `raw` when it is deleted
            stream = content
            format = cast(TextFormat, "lines" if file.format == "json" else file.format)
            rows: Iterator[bytes] | None = None
            if file.format in ("csv", "tsv"):
                rows = _read_csv(content, "," if file.format == "csv" else "\t")
            elif file.format == "json" and head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(
                b"["
            ):
                rows = _read_array(content, file.path)
            if rows:
                stream, format = cast(BinaryIO, _RowStream(rows)), "rows"
            yield TextFile(stream, format, lambda: min(raw.tell(), file.size), b"\0" in head)
    except MegatokenError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or f"{error}" or type(error).__name__
        raise DataError(f"cannot read: {reason:.200}", file.path, "fix or remove it") from error


def read_rows(source: Source) -> Iterator[tuple[str, bytes]]:
    """Yield the place (file:line) and the JSON of every row. Raises as `open_text`."""
    for file in source.files:
        with open_text(source, file) as (stream, format, *_):
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    place = f", row {number}" if format == "rows" else f":{number}"
                    yield file.path + place, line


def decompress(raw: BinaryIO, file: File) -> BinaryIO:
    """Return the stream of a file's content."""
    if file.compression == "gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if file.compression == "zst":
        try:
            import pyarrow
        except ImportError as error:
            raise DataError(".zst needs pyarrow", file.path, INSTALL_DATA) from error
        # Unlike other readers, this one detects a truncated file.
        return io.BufferedReader(
            pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
        )
    return raw


def fill(stream: BinaryIO, buffer: bytes, size: int) -> tuple[bytes, bool]:
    """Return `buffer` extended to `size` bytes, and whether the stream ended."""
    while len(buffer) < size:
        part = stream.read(size - len(buffer))
        if not part:
            return buffer, True
        buffer += part
    return buffer, False


def _to_line(row: Any) -> bytes:
    text = json.dumps(row, ensure_ascii=False, default=_spell)
    return text.encode("utf-8", "surrogateescape") + b"\n"


def _spell(value: Any) -> str:
    """Return a value that JSON does not have, such as a date, as text."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def _read_array(stream: BinaryIO, path: str) -> Iterator[bytes]:
    """Yield the elements of a JSON array, a line each. Raises DataError if it is malformed."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    scan = json.JSONDecoder().raw_decode
    text = decoder.decode(stream.read(READ_BYTES))
    start, row, ended = text.index("[") + 1, 1, False
    while True:
        start = cast(re.Match[str], _GAP.match(text, start)).end()
        if text.startswith("]", start):
            rest = text[start + 1 :] + decoder.decode(stream.read(READ_BYTES))
            if rest.strip():
                raise DataError("text follows the array of rows", path, "write one row per line")
            return
        end = 0
        if start < len(text):
            try:
                _, end = scan(text, start)
            except (ValueError, RecursionError) as error:
                if ended or len(text) - start > LARGEST_ROW:
                    what = f"malformed JSON: {error}"
                    raise DataError(what, f"{path}, row {row}", "fix the row") from error
        elif ended:
            raise DataError("the array of rows has no end", path, "copy the file again")
        if end and (ended or end < len(text)):  # a number can continue in the next block
            # In JSON, line breaks are between values only.
            yield re.sub("[\r\n]", " ", text[start:end]).encode("utf-8", "surrogateescape") + b"\n"
            start, row = end, row + 1
            continue
        part = stream.read(max(READ_BYTES, len(text) - start))
        ended = not part
        text, start = text[start:] + decoder.decode(part, ended), 0


def _read_csv(stream: BinaryIO, delimiter: str) -> Iterator[bytes]:
    """Yield rows as objects. A malformed row becomes a list or text, which readers reject."""
    csv.field_size_limit(LARGEST_ROW)
    rows = csv.reader(
        codecs.iterdecode(stream, "utf-8-sig", "surrogateescape"), delimiter=delimiter, strict=True
    )
    names = next(rows, [])
    if len(set(names)) < len(names):
        raise ValueError("two columns have the same name")
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            if f"{error}" == "unexpected end of data":
                raise ValueError("a quoted value has no end") from error
            yield _to_line(f"{error}")
            continue
        if row is None:
            return
        if row:
            yield _to_line(dict(zip(names, row, strict=True)) if len(row) == len(names) else row)


def _read_parquet(
    raw: BinaryIO, file: File, text_key: str
) -> tuple[Iterator[bytes], Callable[[], int]]:
    """Return the rows of a parquet file, and a function that estimates the bytes read."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError("parquet needs pyarrow", file.path, INSTALL_DATA) from error
    table = parquet.ParquetFile(raw)
    columns = [text_key] if text_key in table.schema_arrow.names else None
    n_rows = 0

    def read() -> Iterator[bytes]:
        nonlocal n_rows
        for batch in table.iter_batches(PARQUET_ROWS, columns=columns, use_threads=False):
            columns_in_bytes = [  # they can hold invalid UTF-8
                column.cast(pyarrow.large_binary())
                if column.type in (pyarrow.string(), pyarrow.large_string())
                else column
                for column in batch.columns
            ]
            for row in zip(*(column.to_pylist() for column in columns_in_bytes), strict=True):
                n_rows += 1
                yield _to_line(dict(zip(batch.schema.names, row, strict=True)))

    return read(), lambda: file.size * n_rows // max(1, table.metadata.num_rows)
