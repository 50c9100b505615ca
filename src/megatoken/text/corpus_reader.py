"""Divide a corpus into chunks of about 1 MiB, in order, from any position, in bounded memory.

The segments of a chunk name parts of files, which the process that encodes them reads. Only those
of files that have to be read from the beginning (compressed, CSV, arrays of JSON) hold their text.
"""

import codecs
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from typing import BinaryIO, NamedTuple

from megatoken.base.errors import DataError, MegatokenError
from megatoken.text.documents import (
    DELIMITERS,
    SPLIT_BYTES,
    PrepareOptions,
    Segment,
    choose_split,
    count_lines,
    find_split_point,
    read_documents,
)
from megatoken.text.file_kinds import LARGEST_ROW
from megatoken.text.sources import File, Source
from megatoken.text.text_files import file_errors, fill, open_parquet, open_text, skip

CHUNK_SEGMENTS = 4096


class ReadPosition(NamedTuple):
    """Where to continue reading a corpus."""

    file: int = 0  # its index in the list of files
    offset: int = 0  # position in that file, in uncompressed bytes, or rows of parquet
    split: str = ""  # split of a long document that continues here; "" between documents


@dataclass(frozen=True)
class Chunk:
    """Segments to encode together."""

    segments: list[Segment]
    next: ReadPosition  # start of the next chunk
    done_bytes: int  # bytes of the files on disk up to the end of this chunk
    counts: dict[str, int]  # binary_files, skipped, seams


# A segment, its size in bytes, the position after it, and how many bytes of the file are done.
_Step = tuple[Segment, int, ReadPosition, int]


def read_chunks(
    source: Source, options: PrepareOptions, start: ReadPosition, *, parts: bool = True
) -> Iterator[Chunk]:
    """Yield the corpus in chunks, starting at `start`.

    parts: whether segments can name a part of a file instead of holding it. Raises DataError,
    naming the file, if a file cannot be read.
    """
    segments: list[Segment] = []
    counts: Counter[str] = Counter()
    size = 0
    done_bytes = sum(file.size for file in source.files[: start.file])
    for index, file in enumerate(source.files[start.file :], start=start.file):
        position = start if index == start.file else ReadPosition(index)
        if parts and file.format == "parquet":
            steps = _list_rows(file, options, position)
        else:
            steps = _read_segments(file, options, position, counts, parts)
        for segment, n_bytes, next_position, read_bytes in steps:
            segments.append(segment)
            size += n_bytes
            if size >= options.chunk_bytes // 2 or len(segments) >= CHUNK_SEGMENTS:
                yield Chunk(segments, next_position, done_bytes + read_bytes, dict(counts))
                segments = []
                size = 0
                counts.clear()
        done_bytes += file.size
    yield Chunk(segments, ReadPosition(len(source.files)), done_bytes, dict(counts))


def sample_texts(source: Source, options: PrepareOptions, limit_bytes: int) -> Iterator[str]:
    """Yield about `limit_bytes` of text from all over the corpus.

    Yields everything if the corpus is small, otherwise the beginnings of evenly spread files. Skips
    bad rows; `prepare` reports them later.
    """
    for chunk in _sample_chunks(source, replace(options, invalid="skip"), limit_bytes):
        for segment in chunk.segments:
            with suppress(MegatokenError):
                yield from read_documents(segment, replace(options, invalid="replace"), Counter())


def _sample_chunks(source: Source, options: PrepareOptions, limit_bytes: int) -> Iterator[Chunk]:
    if source.size_bytes <= limit_bytes and not any(f.is_packed for f in source.files):
        yield from read_chunks(source, options, ReadPosition(), parts=False)
        return
    n_chunks = max(1, limit_bytes // options.chunk_bytes)
    ends = list(accumulate(file.size for file in source.files))
    points = (ends[-1] * (2 * number + 1) // (2 * n_chunks) for number in range(n_chunks))
    hits = Counter(min(bisect(ends, point), len(ends) - 1) for point in points)
    for index, count in hits.items():
        part = replace(source, files=(source.files[index],))
        yield from islice(read_chunks(part, options, ReadPosition(), parts=False), count)


def _list_rows(file: File, options: PrepareOptions, start: ReadPosition) -> Iterator[_Step]:
    """Yield a parquet file's segments of about `options.chunk_bytes` each, starting at `start`."""
    val_fraction = 1.0 if file.split == "val" else options.val_fraction
    with file_errors(file):
        table = open_parquet(file, options.text_key)
        n_rows = table.starts[-1]
        for group, (begin, end) in enumerate(pairwise(table.starts)):
            row_bytes = table.count_bytes(group) // max(1, end - begin)
            step = max(1, min(options.chunk_bytes // max(1, row_bytes), CHUNK_SEGMENTS))
            for row in range(max(begin, start.offset), end, step):
                size = min(step, end - row)
                segment = Segment(file, "rows", "", val_fraction, True, row, size, line=row + 1)
                position = ReadPosition(start.file, row + size)
                if row + size == n_rows:
                    position = ReadPosition(start.file + 1)
                yield segment, size * row_bytes, position, file.size * (row + size) // n_rows


def _read_segments(
    file: File, options: PrepareOptions, start: ReadPosition, counts: Counter[str], parts: bool
) -> Iterator[_Step]:
    """Yield a file's segments of about `options.chunk_bytes` each, starting at `start`.

    counts: updated for a binary file, and for each cut inside a document that may change its ids.
    """
    _, offset, split = start
    val_fraction = 1.0 if file.split == "val" else options.val_fraction
    with open_text(file, options.text_key) as (stream, format, tell, is_binary):
        if is_binary:
            counts["binary_files"] += 1
            return
        has_parts = parts and stream.seekable() and not file.is_packed
        if has_parts:
            stream.seek(offset)
        line = 0 if has_parts else 1 + skip(stream, offset)
        buffer, ended = fill(stream, b"", options.chunk_bytes)
        if offset == 0 and buffer.startswith(codecs.BOM_UTF8):
            offset = len(codecs.BOM_UTF8)
            buffer = buffer[offset:]
        is_empty = start.offset == 0 and not buffer
        is_done = False
        delimiter = DELIMITERS.get(format, b"")
        while not is_done:
            if delimiter == b"\n":
                buffer, ended = _read_line(stream, buffer, ended, options.chunk_bytes)
                if not ended and b"\n" not in buffer:
                    what = f"a line of more than {LARGEST_ROW >> 20} MiB"
                    where = f"{file.path}:{line or count_lines(file, offset)}"
                    raise DataError(what, where, "write one JSON object per line")
            length, gap, ends, is_exact = _find_end(buffer, ended, delimiter, options)
            data = None if has_parts else buffer[:length]
            segment = Segment(file, format, split, val_fraction, ends, offset, length, data, line)
            counts["seams"] += not is_exact
            if ends:
                split = ""
            elif not split:
                beginning = buffer[: min(length, 2 * SPLIT_BYTES)].decode(errors="replace")
                split = choose_split(beginning, val_fraction)
            used = length + gap
            offset += used
            line += 0 if has_parts else buffer.count(b"\n", 0, used)
            is_done = ended and used == len(buffer)
            position = ReadPosition(start.file, offset, split)
            if is_done:
                position = ReadPosition(start.file + 1)
            if used or is_empty:
                yield segment, length, position, tell()
            buffer, ended = fill(stream, buffer[used:], options.chunk_bytes)


def _read_line(stream: BinaryIO, buffer: bytes, ended: bool, size: int) -> tuple[bytes, bool]:
    """Extend `buffer` of `size` bytes until it holds the end of a line, to LARGEST_ROW at most.

    Return it, and whether the stream ended.
    """
    while not ended and b"\n" not in buffer and (size := 2 * size) <= LARGEST_ROW:
        buffer, ended = fill(stream, buffer, size)
    return buffer, ended


def _find_end(
    buffer: bytes, ended: bool, delimiter: bytes, options: PrepareOptions
) -> tuple[int, int, bool, bool]:
    """Find where the segment at the start of `buffer` ends.

    Return its length, the number of bytes to skip after it, whether a document ends there, and
    whether cutting the text there is certain to keep the token ids.
    """
    if ended:
        gap = len(delimiter) * buffer.endswith(delimiter)
        return len(buffer) - gap, gap, True, True
    end = buffer.rfind(delimiter) if delimiter else -1
    if end >= 0:
        return end, len(delimiter), True, True
    length, is_exact = find_split_point(buffer, options.split_points)
    return length, 0, False, is_exact
