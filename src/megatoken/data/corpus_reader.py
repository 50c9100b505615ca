"""Reads a corpus in chunks of about 1 MiB, in order, from any position on, in bounded memory."""

import codecs
import gzip
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import BinaryIO, NamedTuple, cast

from megatoken.data.documents import (
    CHUNK_BYTES,
    SEPARATOR,
    SPLIT_BYTES,
    PrepareOptions,
    Segment,
    choose_split,
    find_split_point,
    read_documents,
)
from megatoken.data.sources import INSTALL_DATA, File, Source
from megatoken.errors import DataError, MegatokenError

BINARY_BYTES = 8192  # a NUL among the first so many means: not text
LINE_BYTES = 64 * CHUNK_BYTES  # a longer line of JSON is refused
CHUNK_SEGMENTS = 4096
ROWS = 8  # read from parquet at a time: with one dictionary each may be as long as the file


class ReadPosition(NamedTuple):
    """A point in a corpus."""

    file: int = 0  # in the list of files
    offset: int = 0  # bytes (uncompressed) or rows in that file
    line: int = 1
    split: str = ""  # of the long document that goes on there; "" between two documents


@dataclass(frozen=True, slots=True)
class Chunk:
    """Segments to encode together and what was counted on the way."""

    segments: list[Segment]
    next: ReadPosition  # of the next chunk
    done_bytes: int  # of the files on disk, up to the end of this chunk
    counts: dict[str, int]  # binary_files, skipped, seams


_Steps = Iterator[tuple[Segment, ReadPosition, int]]  # with the position after it and the bytes read of the file


def read_chunks(source: Source, options: PrepareOptions, start: ReadPosition) -> Iterator[Chunk]:
    """The corpus from `start` on. Raises DataError, naming the file, for what cannot be read."""
    segments: list[Segment] = []
    counts: Counter[str] = Counter()
    size, done_bytes = 0, sum(file.size for file in source.files[: start.file])
    for index, file in enumerate(source.files[start.file :], start=start.file):
        position = start if index == start.file else ReadPosition(index)
        read = _read_rows if file.format == "rows" else _read_text
        try:
            for segment, next_position, read_bytes in read(source, file, options, position, counts):
                segments.append(segment)
                size += len(segment.data)
                if size >= CHUNK_BYTES // 2 or len(segments) >= CHUNK_SEGMENTS:
                    yield Chunk(segments, next_position, done_bytes + read_bytes, dict(counts))
                    segments, size = [], 0
                    counts.clear()
        except MegatokenError:
            raise
        except Exception as error:  # gzip, zstd, parquet and the network each raise their own exceptions
            reason = getattr(error, "strerror", None) or f"{error}" or type(error).__name__
            fix = "repair or remove the file, check its permissions; a started preparation goes on where it was"
            raise DataError(f"cannot read: {reason:.200}", file.path, fix) from error
        done_bytes += file.size
    yield Chunk(segments, ReadPosition(len(source.files)), done_bytes, dict(counts))


def sample_texts(source: Source, options: PrepareOptions, limit_bytes: int) -> Iterator[str]:
    """At most about `limit_bytes` of text: the beginnings of files, spread evenly over the corpus.

    Bad lines are skipped: `prepare` will report them.
    """
    for chunk in _sample_chunks(source, replace(options, invalid="skip"), limit_bytes):
        for segment in chunk.segments:
            with suppress(MegatokenError):
                yield from read_documents(segment, replace(options, invalid="replace"), Counter())


def _sample_chunks(source: Source, options: PrepareOptions, limit_bytes: int) -> Iterator[Chunk]:
    if source.size_bytes <= limit_bytes and not any(f.compression or f.format == "rows" for f in source.files):
        yield from read_chunks(source, options, ReadPosition())
        return
    n_chunks = max(1, limit_bytes // CHUNK_BYTES)
    ends = list(accumulate(file.size for file in source.files))
    points = (ends[-1] * (2 * at + 1) // (2 * n_chunks) for at in range(n_chunks))
    for index, hits in Counter(min(bisect(ends, point), len(ends) - 1) for point in points).items():
        yield from islice(read_chunks(replace(source, files=(source.files[index],)), options, ReadPosition()), hits)


def _read_text(
    source: Source, file: File, options: PrepareOptions, start: ReadPosition, counts: Counter[str]
) -> _Steps:
    _, offset, line, split = start
    with source.open(file) as raw, decompress(raw, file) as stream:
        _skip_bytes(stream, file, offset)
        buffer, ended = _fill(stream, b"", CHUNK_BYTES)
        if offset == 0 and b"\0" in buffer[:BINARY_BYTES]:
            if source.direct:
                raise DataError("binary file: it holds NUL bytes", file.path, "give text")
            counts["binary_files"] += 1
            return
        if offset == 0 and buffer.startswith(codecs.BOM_UTF8):
            offset = len(codecs.BOM_UTF8)
            buffer = buffer[offset:]
        is_done, is_empty = False, start.offset == 0 and not buffer
        while not is_done:
            size = CHUNK_BYTES
            while file.format == "lines" and not ended and b"\n" not in buffer:
                size *= 2
                if size > LINE_BYTES:
                    if options.invalid != "skip":
                        fix = "is it one JSON object a line? --invalid skip passes over it"
                        raise DataError(f"a line of more than {LINE_BYTES >> 20} MiB", f"{file.path}:{line}", fix)
                    buffer, passed = _skip_line(stream, buffer)
                    offset, line, size = offset + passed, line + 1, CHUNK_BYTES
                    counts["skipped"] += 1
                buffer, ended = _fill(stream, buffer, size)
            length, gap, ends, exact = _find_end(buffer, ended, file, options)
            data, used = buffer[:length], length + gap
            segment = Segment(file.path, line, file.format, split, ends, data)
            counts["seams"] += not exact
            if not split and not ends:
                split = choose_split(data[: 2 * SPLIT_BYTES].decode(errors="replace"), options.val_fraction)
            elif ends:
                split = ""
            offset, line = offset + used, line + data.count(b"\n")
            is_done = ended and used == len(buffer)
            position = ReadPosition(start.file + 1) if is_done else ReadPosition(start.file, offset, line, split)
            if used or is_empty:
                yield segment, position, min(raw.tell(), file.size)
            buffer, ended = _fill(stream, buffer[used:], CHUNK_BYTES)


def _find_end(buffer: bytes, ended: bool, file: File, options: PrepareOptions) -> tuple[int, int, bool, bool]:
    """A segment's length, bytes to pass over after it, whether its last document ends there, whether ids are sure."""
    if ended:
        gap = len(SEPARATOR) if file.format == "separated" and buffer.endswith(SEPARATOR) else 0
        return len(buffer) - gap, gap, True, True
    if file.format == "lines":
        return buffer.rindex(b"\n") + 1, 0, True, True
    if file.format == "separated" and (end := buffer.rfind(SEPARATOR)) >= 0:
        return end, len(SEPARATOR), True, True
    length, exact = find_split_point(buffer, options.split_points)
    return length, 0, False, exact


def _read_rows(
    source: Source, file: File, options: PrepareOptions, start: ReadPosition, counts: Counter[str]
) -> _Steps:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError("parquet needs pyarrow", file.path, INSTALL_DATA) from error
    with source.open(file) as raw:
        table = parquet.ParquetFile(raw)
        names = table.schema_arrow.names
        if options.text_key not in names:
            what = f"no column {options.text_key!r} (there are: {', '.join(names):.200})"
            raise DataError(what, file.path, "name the column that holds the text with --text-key")
        row, total = 0, table.metadata.num_rows
        for batch in table.iter_batches(ROWS, columns=[options.text_key], use_threads=False):
            try:
                texts = batch.column(0).cast(pyarrow.large_binary()).to_pylist()
            except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
                what = f"column {options.text_key!r} holds {batch.schema.field(0).type}, not text"
                raise DataError(what, file.path, "name the column that holds the text with --text-key") from error
            for text in texts:
                row += 1
                if row <= start.offset:
                    continue
                if text is not None:
                    segment = Segment(file.path, row, "rows", "", True, text)
                    yield segment, ReadPosition(start.file, row, row + 1), file.size * row // total
                elif options.invalid == "skip":
                    counts["skipped"] += 1
                else:
                    fix = 'remove the row, or pass over such rows: invalid "skip"'
                    raise DataError(f"no {options.text_key!r} here", f"{file.path}, row {row}", fix)


def _skip_line(stream: BinaryIO, buffer: bytes) -> tuple[bytes, int]:
    """What is read after the line that `buffer` begins, and the bytes of that line."""
    passed, ended = 0, False
    while not ended and b"\n" not in buffer:
        passed += len(buffer)
        buffer, ended = _fill(stream, b"", CHUNK_BYTES)
    length = buffer.find(b"\n") + 1 or len(buffer)
    return buffer[length:], passed + length


def decompress(raw: BinaryIO, file: File) -> BinaryIO:
    if file.compression == "gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if file.compression == "zst":
        try:
            import pyarrow
        except ImportError as error:
            raise DataError(".zst needs pyarrow", file.path, INSTALL_DATA) from error
        # Unlike other readers it detects a file that ends too early.
        return cast(BinaryIO, pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd"))
    return raw


def _skip_bytes(stream: BinaryIO, file: File, offset: int) -> None:
    """Move from the beginning to `offset`, counted in uncompressed bytes."""
    if file.compression != "zst":
        stream.seek(offset)
        return
    while offset and (passed := stream.read(min(offset, CHUNK_BYTES))):
        offset -= len(passed)


def _fill(stream: BinaryIO, buffer: bytes, size: int) -> tuple[bytes, bool]:
    """`buffer` and what follows, up to `size` bytes; and whether the file ended before that."""
    while len(buffer) < size and (part := stream.read(size - len(buffer))):
        buffer += part
    return buffer, len(buffer) < size
