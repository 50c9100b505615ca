"""Reads a corpus in chunks of about 1 MiB, in order, from any position on, in bounded memory."""

import codecs
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import BinaryIO, NamedTuple

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
from megatoken.data.sources import File, Source
from megatoken.data.text_files import LARGEST_ROW, TextFormat, fill, open_text
from megatoken.errors import DataError, MegatokenError

CHUNK_SEGMENTS = 4096


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


_Steps = Iterator[
    tuple[Segment, ReadPosition, int]
]  # with the position after it and the bytes read of the file


def read_chunks(source: Source, options: PrepareOptions, start: ReadPosition) -> Iterator[Chunk]:
    """The corpus from `start` on. Raises DataError, naming the file, for what cannot be read."""
    segments: list[Segment] = []
    counts: Counter[str] = Counter()
    size, done_bytes = 0, sum(file.size for file in source.files[: start.file])
    for index, file in enumerate(source.files[start.file :], start=start.file):
        position = start if index == start.file else ReadPosition(index)
        for segment, next_position, read_bytes in _read_segments(
            source, file, options, position, counts
        ):
            segments.append(segment)
            size += len(segment.data)
            if size >= CHUNK_BYTES // 2 or len(segments) >= CHUNK_SEGMENTS:
                yield Chunk(segments, next_position, done_bytes + read_bytes, dict(counts))
                segments, size = [], 0
                counts.clear()
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
    if source.size_bytes <= limit_bytes and not any(f.is_packed for f in source.files):
        yield from read_chunks(source, options, ReadPosition())
        return
    n_chunks = max(1, limit_bytes // CHUNK_BYTES)
    ends = list(accumulate(file.size for file in source.files))
    points = (ends[-1] * (2 * at + 1) // (2 * n_chunks) for at in range(n_chunks))
    for index, hits in Counter(min(bisect(ends, point), len(ends) - 1) for point in points).items():
        yield from islice(
            read_chunks(replace(source, files=(source.files[index],)), options, ReadPosition()),
            hits,
        )


def _read_segments(
    source: Source, file: File, options: PrepareOptions, start: ReadPosition, counts: Counter[str]
) -> _Steps:
    _, offset, line, split = start
    with open_text(source, file, options.text_key) as (stream, format, tell, is_binary):
        if is_binary:
            if source.direct:
                raise DataError("binary file: it holds NUL bytes", file.path, "give text")
            counts["binary_files"] += 1
            return
        _skip_bytes(stream, offset)
        buffer, ended = fill(stream, b"", CHUNK_BYTES)
        if offset == 0 and buffer.startswith(codecs.BOM_UTF8):
            offset = len(codecs.BOM_UTF8)
            buffer = buffer[offset:]
        is_done, is_empty = False, start.offset == 0 and not buffer
        while not is_done:
            size = CHUNK_BYTES
            while format in ("lines", "rows") and not ended and b"\n" not in buffer:
                size *= 2
                if size > LARGEST_ROW:
                    if options.invalid != "skip":
                        fix = "is it one JSON object per line? --invalid skip skips it"
                        raise DataError(
                            f"a line of more than {LARGEST_ROW >> 20} MiB",
                            f"{file.path}:{line}",
                            fix,
                        )
                    buffer, passed = _skip_line(stream, buffer)
                    offset, line, size = offset + passed, line + 1, CHUNK_BYTES
                    counts["skipped"] += 1
                buffer, ended = fill(stream, buffer, size)
            length, gap, ends, exact = _find_end(buffer, ended, format, options)
            data, used = buffer[:length], length + gap
            segment = Segment(file.path, line, format, split, ends, data)
            counts["seams"] += not exact
            if not split and not ends:
                split = choose_split(
                    data[: 2 * SPLIT_BYTES].decode(errors="replace"), options.val_fraction
                )
            elif ends:
                split = ""
            offset, line = offset + used, line + data.count(b"\n")
            is_done = ended and used == len(buffer)
            position = (
                ReadPosition(start.file + 1)
                if is_done
                else ReadPosition(start.file, offset, line, split)
            )
            if used or is_empty:
                yield segment, position, tell()
            buffer, ended = fill(stream, buffer[used:], CHUNK_BYTES)


def _find_end(
    buffer: bytes, ended: bool, format: TextFormat, options: PrepareOptions
) -> tuple[int, int, bool, bool]:
    """A segment's length, bytes to pass over after it, whether its last document ends there, whether ids are sure."""
    if ended:
        gap = len(SEPARATOR) if format == "separated" and buffer.endswith(SEPARATOR) else 0
        return len(buffer) - gap, gap, True, True
    if format in ("lines", "rows"):
        return buffer.rindex(b"\n") + 1, 0, True, True
    if format == "separated" and (end := buffer.rfind(SEPARATOR)) >= 0:
        return end, len(SEPARATOR), True, True
    length, exact = find_split_point(buffer, options.split_points)
    return length, 0, False, exact


def _skip_line(stream: BinaryIO, buffer: bytes) -> tuple[bytes, int]:
    """What is read after the line that `buffer` begins, and the bytes of that line."""
    passed, ended = 0, False
    while not ended and b"\n" not in buffer:
        passed += len(buffer)
        buffer, ended = fill(stream, b"", CHUNK_BYTES)
    length = buffer.find(b"\n") + 1 or len(buffer)
    return buffer[length:], passed + length


def _skip_bytes(stream: BinaryIO, offset: int) -> None:
    """Move from the start to `offset`, counted in uncompressed bytes."""
    if stream.seekable():
        stream.seek(offset)
        return
    while offset and (part := stream.read(min(offset, CHUNK_BYTES))):
        offset -= len(part)
