"""Read a corpus in chunks of about 1 MiB, in order, from any position, in bounded memory."""

import codecs
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import BinaryIO, NamedTuple

from megatoken.base.errors import DataError, MegatokenError
from megatoken.text.documents import (
    CHUNK_BYTES,
    DELIMITERS,
    SPLIT_BYTES,
    PrepareOptions,
    Segment,
    choose_split,
    find_split_point,
    read_documents,
)
from megatoken.text.file_kinds import LARGEST_ROW
from megatoken.text.sources import File, Source
from megatoken.text.text_files import fill, open_text

CHUNK_SEGMENTS = 4096


class ReadPosition(NamedTuple):
    """Where to continue reading a corpus."""

    file: int = 0  # its index in the list of files
    offset: int = 0  # position in that file, in uncompressed bytes or rows
    line: int = 1
    split: str = ""  # split of a long document that continues here; "" between documents


@dataclass(frozen=True)
class Chunk:
    """Segments to encode together."""

    segments: list[Segment]
    next: ReadPosition  # start of the next chunk
    done_bytes: int  # bytes of the files on disk up to the end of this chunk
    counts: dict[str, int]  # binary_files, skipped, seams


_Step = tuple[Segment, ReadPosition, int]  # segment, position after it, bytes of the file read


def read_chunks(source: Source, options: PrepareOptions, start: ReadPosition) -> Iterator[Chunk]:
    """Yield the corpus in chunks, starting at `start`.

    Raises DataError, naming the file, if a file cannot be read.
    """
    segments: list[Segment] = []
    counts: Counter[str] = Counter()
    size = 0
    done_bytes = sum(file.size for file in source.files[: start.file])
    for index, file in enumerate(source.files[start.file :], start=start.file):
        position = start if index == start.file else ReadPosition(index)
        for segment, next_position, read_bytes in _read_segments(file, options, position, counts):
            segments.append(segment)
            size += len(segment.data)
            if size >= CHUNK_BYTES // 2 or len(segments) >= CHUNK_SEGMENTS:
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
        yield from read_chunks(source, options, ReadPosition())
        return
    n_chunks = max(1, limit_bytes // CHUNK_BYTES)
    ends = list(accumulate(file.size for file in source.files))
    points = (ends[-1] * (2 * number + 1) // (2 * n_chunks) for number in range(n_chunks))
    hits = Counter(min(bisect(ends, point), len(ends) - 1) for point in points)
    for index, count in hits.items():
        part = replace(source, files=(source.files[index],))
        yield from islice(read_chunks(part, options, ReadPosition()), count)


def _read_segments(
    file: File, options: PrepareOptions, start: ReadPosition, counts: Counter[str]
) -> Iterator[_Step]:
    """Yield a file's segments of about CHUNK_BYTES each, starting at `start`.

    counts: updated for a binary file, and for each cut inside a document that may change its ids.
    """
    _, offset, line, split = start
    val_fraction = 1.0 if file.split == "val" else options.val_fraction
    with open_text(file, options.text_key) as (stream, format, tell, is_binary):
        if is_binary:
            counts["binary_files"] += 1
            return
        _skip_bytes(stream, offset)
        buffer, ended = fill(stream, b"", CHUNK_BYTES)
        if offset == 0 and buffer.startswith(codecs.BOM_UTF8):
            offset = len(codecs.BOM_UTF8)
            buffer = buffer[offset:]
        is_empty = start.offset == 0 and not buffer
        is_done = False
        delimiter = DELIMITERS.get(format, b"")
        while not is_done:
            if delimiter == b"\n":
                buffer, ended = _read_line(stream, buffer, ended, f"{file.path}:{line}")
            length, gap, ends, is_exact = _find_end(buffer, ended, delimiter, options)
            data = buffer[:length]
            segment = Segment(file.path, line, format, split, val_fraction, ends, data)
            counts["seams"] += not is_exact
            if ends:
                split = ""
            elif not split:
                beginning = data[: 2 * SPLIT_BYTES].decode(errors="replace")
                split = choose_split(beginning, val_fraction)
            used = length + gap
            offset += used
            line += buffer.count(b"\n", 0, used)
            is_done = ended and used == len(buffer)
            position = ReadPosition(start.file, offset, line, split)
            if is_done:
                position = ReadPosition(start.file + 1)
            if used or is_empty:
                yield segment, position, tell()
            buffer, ended = fill(stream, buffer[used:], CHUNK_BYTES)


def _read_line(stream: BinaryIO, buffer: bytes, ended: bool, where: str) -> tuple[bytes, bool]:
    """Extend `buffer` until it holds the end of a line. Return it, and whether the stream ended."""
    size = CHUNK_BYTES
    while not ended and b"\n" not in buffer:
        size *= 2
        if size > LARGEST_ROW:
            what = f"a line of more than {LARGEST_ROW >> 20} MiB"
            raise DataError(what, where, "write one JSON object per line")
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


def _skip_bytes(stream: BinaryIO, offset: int) -> None:
    """Advance a stream from its start to `offset`, in uncompressed bytes."""
    if stream.seekable():
        stream.seek(offset)
        return
    while offset:
        part = stream.read(min(offset, CHUNK_BYTES))
        if not part:
            return
        offset -= len(part)
