"""Open the files of a corpus as bytes of text. JSON arrays, CSV and parquet are read as JSON, one row per line."""

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

HEAD_BYTES = 8192  # of a file that decide what it holds
READ_BYTES = 1 << 20
LARGEST_ROW = 64 << 20  # bytes
PARQUET_ROWS = 8  # read at a time: with one dictionary each may be as long as the file
_GAP = re.compile(r"[\s,]*")
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

# lines: JSON, one row per line; rows: the same, converted from an array, CSV, TSV or parquet.
TextFormat = Literal["separated", "whole", "lines", "rows"]


class TextFile(NamedTuple):
    """An open file. tell: bytes of the file on disk that have been read."""

    stream: BinaryIO
    format: TextFormat
    tell: Callable[[], int]
    is_binary: bool


class _RowStream:
    """The part of BinaryIO that readers need, on top of an iterator of lines."""

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

    text_key: the only column of a parquet file that is needed. Raises DataError, naming the file, for anything that
    cannot be read inside the `with` block: gzip, zstd, parquet and the network each raise their own exceptions.
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
            raise DataError(
                "UTF-16 text", file.path, "convert it to UTF-8: iconv -f UTF-16 -t UTF-8"
            )
        with source.open(file) as raw:
            stream = content = decompress(raw, file)  # kept: it closes `raw` when it is deleted
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
        fix = "repair or remove the file, check its permissions; a started preparation resumes where it was"
        raise DataError(f"cannot read: {reason:.200}", file.path, fix) from error


def read_rows(source: Source) -> Iterator[tuple[str, bytes]]:
    """Yield the place (file:line) and the JSON of every row. Raises DataError for files that cannot be read."""
    for file in source.files:
        with open_text(source, file) as (stream, format, *_):
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield (
                        f"{file.path}, row {number}"
                        if format == "rows"
                        else f"{file.path}:{number}",
                        line,
                    )


def decompress(raw: BinaryIO, file: File) -> BinaryIO:
    """Return the stream of a file's content."""
    if file.compression == "gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if file.compression == "zst":
        try:
            import pyarrow
        except ImportError as error:
            raise DataError(".zst needs pyarrow", file.path, INSTALL_DATA) from error
        # Unlike other readers it detects a file that ends too early.
        return io.BufferedReader(
            pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
        )
    return raw


def fill(stream: BinaryIO, buffer: bytes, size: int) -> tuple[bytes, bool]:
    """Return `buffer` extended to `size` bytes, and whether the stream ended before that."""
    while len(buffer) < size and (part := stream.read(size - len(buffer))):
        buffer += part
    return buffer, len(buffer) < size


def _to_line(row: Any) -> bytes:
    return (
        json.dumps(row, ensure_ascii=False, default=_spell).encode("utf-8", "surrogateescape")
        + b"\n"
    )


def _spell(value: Any) -> str:
    """Return a value of parquet that JSON does not have as text, such as a date."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def _read_array(stream: BinaryIO, path: str) -> Iterator[bytes]:
    """Yield the elements of an array of JSON, each on one line. Raises DataError where it is malformed."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    scan = json.JSONDecoder().raw_decode
    text = decoder.decode(stream.read(READ_BYTES))
    start, row, ended = text.index("[") + 1, 1, False
    while True:
        start = cast(re.Match[str], _GAP.match(text, start)).end()
        if text.startswith("]", start):
            rest = text[start + 1 :] + decoder.decode(stream.read(READ_BYTES))
            if rest.strip():
                raise DataError(
                    "text follows the array of rows", path, "write one array, or one row per line"
                )
            return
        end = 0
        if start < len(text):
            try:
                _, end = scan(text, start)
            except (ValueError, RecursionError) as error:
                if ended or len(text) - start > LARGEST_ROW:
                    raise DataError(
                        f"malformed JSON: {error}", f"{path}, row {row}", "fix the row"
                    ) from error
        elif ended:
            raise DataError("the array of rows has no end", path, "copy the file again")
        if end and (ended or end < len(text)):  # a number may continue in the next block
            # JSON has line breaks between values only.
            yield re.sub("[\r\n]", " ", text[start:end]).encode("utf-8", "surrogateescape") + b"\n"
            start, row = end, row + 1
            continue
        part = stream.read(max(READ_BYTES, len(text) - start))
        ended = not part
        text, start = text[start:] + decoder.decode(part, ended), 0


def _read_csv(stream: BinaryIO, delimiter: str) -> Iterator[bytes]:
    """Yield rows as objects named by the header. A malformed row is yielded as a list or text, which is no object."""
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
    """Return the rows of a parquet file, and a function for the bytes read, estimated from the share of its rows."""
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
            columns_in_bytes = [  # which may hold invalid UTF-8
                column.cast(pyarrow.large_binary())
                if column.type in (pyarrow.string(), pyarrow.large_string())
                else column
                for column in batch.columns
            ]
            for row in zip(*(column.to_pylist() for column in columns_in_bytes), strict=True):
                n_rows += 1
                yield _to_line(dict(zip(batch.schema.names, row, strict=True)))

    return read(), lambda: file.size * n_rows // max(1, table.metadata.num_rows)
