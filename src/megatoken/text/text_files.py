"""Open the files of a corpus as text. JSON arrays, CSV and parquet become lines of JSON rows."""

import codecs
import csv
import json
import re
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from megatoken.base.errors import DataError, MegatokenError
from megatoken.text.file_kinds import HEAD_BYTES, LARGEST_ROW, decompress
from megatoken.text.sources import File, Source

PARQUET_BUFFER = 1 << 20  # bytes
SMALL_GROUP = 2 << 20  # bytes; writers limit dictionaries to 1 MiB by default
PARQUET_ROWS = 8  # read at once; with dictionary encoding, a row can be as long as the file

# The start of a JSON file that is not a row per line: an array or, in group 1, an object.
_WHOLE_JSON = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\[|(\{\s*\n\s*\"))")
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
def file_errors(file: File) -> Iterator[None]:
    """Convert any exception to a DataError that names the file.

    gzip, zstd, parquet and network code each raise their own types.
    """
    try:
        yield
    except MegatokenError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or f"{error}" or type(error).__name__
        raise DataError(f"cannot read: {reason:.200}", file.path, "fix or remove it") from error


@contextmanager
def open_text(file: File, text_key: str = "") -> Iterator[TextFile]:
    """Open a file for reading from its start.

    text_key: the only column to read from a parquet file. Raises DataError, also for any exception
    inside the `with` block.
    """
    with file_errors(file):
        if file.format == "parquet":
            table = open_parquet(file, text_key)
            rows = cast(BinaryIO, _RowStream(table.read(0, table.starts[-1])))
            yield TextFile(rows, "rows", lambda: file.size, False)
            return
        with file.opener(file) as raw:
            stream = decompress(raw, file.name)  # closes `raw` when it is collected
            yield _convert(raw, stream, file)


def read_part(file: File, start: int, size: int, text_key: str) -> bytes:
    """Return `size` bytes of a file from byte `start` on, or rows of parquet as lines of JSON.

    Raises DataError as `open_text` does.
    """
    with file_errors(file):
        if file.format == "parquet":
            rows = open_parquet(file, text_key).read(start, start + size)
            return b"".join(_RowStream(rows))
        with file.opener(file) as raw:
            raw.seek(start)
            return raw.read(size)


class ParquetRows:
    """The rows of an open parquet file.

    text_key: the only column to read, if there is one of that name. starts: the number of rows
    before each row group, and the number of all rows.
    """

    def __init__(self, file: File, text_key: str) -> None:
        from pyarrow import parquet

        raw = file.opener(file)
        weakref.finalize(self, raw.close)
        # Without a buffer, a row group is held in memory, by each worker.
        self._table = parquet.ParquetFile(raw, buffer_size=PARQUET_BUFFER)
        self._raw = raw
        self._key = text_key if text_key in self._table.schema_arrow.names else ""
        groups = map(self._table.metadata.row_group, range(self._table.num_row_groups))
        self.starts = [0, *accumulate(group.num_rows for group in groups)]
        self._group = -1  # of `_batches`
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None  # the last one that was read
        self._start = 0  # number of its first row

    def count_bytes(self, group: int) -> int:
        """Return the bytes in a row group that `read` reads.

        In a large group, a value that is repeated counts once. A small one may consist of a few
        long values, repeated many times, so its values are measured.
        """
        columns = self._table.metadata.row_group(group)
        paths = [self._table.schema.column(index).path for index in range(columns.num_columns)]
        if self._key not in paths:
            return int(columns.total_byte_size)
        size = int(columns.column(paths.index(self._key)).total_uncompressed_size)
        return self._measure(group) if size < SMALL_GROUP else size

    def _measure(self, group: int) -> int:
        from pyarrow import DictionaryArray, compute, parquet

        metadata = self._table.metadata
        table = parquet.ParquetFile(self._raw, metadata=metadata, read_dictionary=[self._key])
        size = 0
        for chunk in table.read_row_group(group, [self._key], use_threads=False)[0].chunks:
            if isinstance(chunk, DictionaryArray):
                lengths = compute.binary_length(chunk.dictionary)
                size += compute.sum(compute.take(lengths, chunk.indices)).as_py() or 0
            else:  # not text
                size += chunk.nbytes
        return size

    def read(self, first: int, end: int) -> Iterator[Any]:
        """Yield rows [first, end), each a dict. Fastest if `first` is not before the last `end`."""
        while first < end:
            group = bisect_right(self.starts, first) - 1
            if group != self._group or first < self._start:
                columns = [self._key] if self._key else None
                self._batches = self._table.iter_batches(
                    PARQUET_ROWS, row_groups=[group], columns=columns, use_threads=False
                )
                self._group = -1  # in case of an error
                self._batch = next(self._batches)
                self._group, self._start = group, self.starts[group]
            while first >= self._start + self._batch.num_rows:
                batch = next(self._batches)
                self._start += self._batch.num_rows
                self._batch = batch
            batch = self._batch[first - self._start : end - self._start]
            first += batch.num_rows
            if self._key:  # may be invalid UTF-8
                texts = batch[0].cast("large_binary").to_pylist()
                yield from ({self._key: text} for text in texts)
            else:
                yield from batch.to_pylist()


open_parquet = lru_cache(1)(ParquetRows)  # for the parts of a file


def _convert(raw: BinaryIO, stream: Any, file: File) -> TextFile:
    def tell() -> int:
        return min(raw.tell(), file.size)

    head = stream.peek(HEAD_BYTES)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError("UTF-16 text", file.path, "convert it to UTF-8")
    is_binary = b"\0" in head
    if file.format in ("separated", "whole"):
        return TextFile(stream, file.format, tell, is_binary)
    if file.format in ("csv", "tsv"):
        rows = _read_csv(stream, _find_delimiter(head) if file.format == "csv" else "\t")
    elif match := _WHOLE_JSON.match(head):
        content = json.loads(stream.read().decode("utf-8-sig", "surrogateescape"))
        rows = iter([content] if match[1] else content)
    else:
        return TextFile(stream, "lines", tell, is_binary)
    return TextFile(cast(BinaryIO, _RowStream(rows)), "rows", tell, is_binary)


def read_rows(source: Source) -> Iterator[tuple[str, bytes, str]]:
    """Yield (file:line, JSON bytes, split of the file) for each row. Raises DataError as `open_text` does."""
    for file in source.files:
        with open_text(file) as (stream, format, *_):
            for number, line in enumerate(stream, start=1):
                if line.removeprefix(codecs.BOM_UTF8).strip():
                    where = f", row {number}" if format == "rows" else f":{number}"
                    yield file.path + where, line, file.split


def fill(stream: BinaryIO, buffer: bytes, size: int) -> tuple[bytes, bool]:
    """Return `buffer` extended to `size` bytes, and whether the stream ended."""
    while len(buffer) < size:
        part = stream.read(size - len(buffer))
        if not part:
            return buffer, True
        buffer += part
    return buffer, False


def skip(stream: BinaryIO, size: int) -> int:
    """Read `size` bytes, or fewer if the stream ends before, and return how many lines ended."""
    lines = 0
    while size and (part := stream.read(min(size, 1 << 20))):
        size -= len(part)
        lines += part.count(b"\n")
    return lines


def _find_delimiter(head: bytes) -> str:
    """Return the delimiter of a CSV file, judged by the names of its columns."""
    names = head.partition(b"\n")[0]
    return ";" if b";" in names and b"," not in names else ","


def _read_csv(stream: BinaryIO, delimiter: str) -> Iterator[Any]:
    """Yield rows as dicts.

    A row with too many fields is yielded as a list, and a line that no row can begin with as a row
    without text. Parsing rejects both. Reading continues with the next line.
    """
    csv.field_size_limit(LARGEST_ROW)
    lines = codecs.iterdecode(stream, "utf-8-sig", "surrogateescape")
    again: deque[str] = deque()  # lines to read a second time
    row_lines: list[str] = []

    def read_lines() -> Iterator[str]:
        while line := again.popleft() if again else next(lines, ""):
            if row_lines or line.strip():
                row_lines.append(line)
            yield line

    names = None
    while True:
        reader = csv.DictReader(read_lines(), names, delimiter=delimiter, strict=True)
        names = reader.fieldnames
        row_lines.clear()
        try:
            for row in reader:
                row_lines.clear()
                yield list(row.values()) if None in row else row
            return
        except csv.Error as error:
            yield {str(error): None}
            again.extendleft(reversed(row_lines[1:]))
