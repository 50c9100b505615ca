"""Files to blocks of about 1 MiB: the one place where a corpus is read, in order and from any point on.

In: a Source and a Cursor. Out: Blocks; each knows the Cursor at which the next one begins, so that reading can
stop and go on anywhere with the same pieces. Memory is a few blocks whatever the size of a file.
Deliberately absent: what the bytes mean (documents.py).
"""

import codecs
import gzip
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import BinaryIO, NamedTuple, cast

from megatoken.data.documents import BLOCK_BYTES, SEPARATOR, Piece, Rules, find_seam, read_documents
from megatoken.data.sources import File, Source
from megatoken.errors import Exit, Fault

BINARY_BYTES = 8192  # a NUL among the first so many means: not text
LINE_BYTES = 64 * BLOCK_BYTES  # a longer line of JSON is refused
BLOCK_PIECES = 4096
ROWS = 256  # read from parquet at a time


class Cursor(NamedTuple):
    """A point in a corpus."""

    file: int = 0  # in the list of files
    offset: int = 0  # bytes (uncompressed) or rows in that file
    line: int = 1
    open: bool = False  # in the middle of a document


@dataclass(frozen=True, slots=True)
class Block:
    """Pieces to encode together, where the next block begins, and what was counted on the way."""

    pieces: list[Piece]
    cursor: Cursor
    done_bytes: int  # of the files on disk, up to the end of this block
    counts: dict[str, int]  # binary_files, skipped, seams


@dataclass(frozen=True, slots=True)
class _Step:
    piece: Piece | None
    cursor: Cursor
    done_bytes: int
    count: str = ""


def read_blocks(source: Source, rules: Rules, start: Cursor) -> Iterator[Block]:
    """The corpus from `start` on. Fault(Exit.DATA), naming the file, for what cannot be read."""
    pieces: list[Piece] = []
    counts: Counter[str] = Counter()
    size, step = 0, None
    for step in _read_steps(source, rules, start):
        if step.piece:
            pieces.append(step.piece)
            size += len(step.piece.data)
        if step.count:
            counts[step.count] += 1
        if size >= BLOCK_BYTES // 2 or len(pieces) >= BLOCK_PIECES:
            yield Block(pieces, step.cursor, step.done_bytes, dict(counts))
            pieces, counts, size = [], Counter(), 0
    if step and (pieces or counts):
        yield Block(pieces, step.cursor, step.done_bytes, dict(counts))


def sample_texts(source: Source, rules: Rules, limit_bytes: int) -> Iterator[str]:
    """At most about `limit_bytes` of text from blocks spread evenly over the corpus, the same ones every time.

    Compressed files and parquet give their beginnings. Bad lines are passed over: preparation will name them.
    """
    rules = replace(rules, invalid="replace")
    for block in _sample_blocks(source, rules, limit_bytes):
        for piece in block.pieces:
            with suppress(Fault):
                yield from (document.text for document in read_documents(piece, rules, Counter()))


def _sample_blocks(source: Source, rules: Rules, limit_bytes: int) -> Iterator[Block]:
    plain = [not file.compression and file.form != "rows" for file in source.files]
    if all(plain) and source.size_bytes <= limit_bytes:
        yield from read_blocks(source, rules, Cursor())
        return
    number = max(1, limit_bytes // BLOCK_BYTES)
    ends = list(accumulate(file.size for file in source.files))
    points = (ends[-1] * (2 * at + 1) // (2 * number) for at in range(number))
    for index, hits in Counter(min(bisect(ends, point), len(ends) - 1) for point in points).items():
        file = source.files[index]
        if not plain[index] or file.size <= BLOCK_BYTES:
            yield from islice(read_blocks(source, rules, Cursor(index)), hits if not plain[index] else 1)
            continue
        for offset in sorted({file.size * at // hits for at in range(hits)}):
            start = Cursor(index, _next_line(source, file, offset))
            yield from islice(read_blocks(source, rules, start), 1)


def _next_line(source: Source, file: File, offset: int) -> int:
    if offset == 0:
        return 0
    with source.open(file) as stream:
        stream.seek(offset)
        return offset + len(stream.readline(LINE_BYTES if file.form == "lines" else 4096))


def _read_steps(source: Source, rules: Rules, start: Cursor) -> Iterator[_Step]:
    before = sum(file.size for file in source.files[: start.file])
    for index in range(start.file, len(source.files)):
        file = source.files[index]
        cursor = start if index == start.file else Cursor(index)
        read = _read_rows if file.form == "rows" else _read_text
        try:
            for step in read(source, file, rules, cursor):
                yield replace(step, done_bytes=before + step.done_bytes)
        except Fault:
            raise
        except Exception as error:  # gzip, zstd, parquet and the network each raise their own kinds
            reason = getattr(error, "strerror", None) or f"{error}" or type(error).__name__
            fix = "repair or remove the file, check its permissions; a started preparation goes on where it was"
            raise Fault(Exit.DATA, f"cannot read: {reason:.200}", file.path, fix) from error
        before += file.size


def _read_text(source: Source, file: File, rules: Rules, cursor: Cursor) -> Iterator[_Step]:
    following = Cursor(cursor.file + 1)
    with source.open(file) as raw, _decompress(raw, file) as stream:
        _advance(stream, file, 0, cursor.offset)
        buffer, ended = _fill(stream, b"", BLOCK_BYTES)
        if cursor.offset == 0:
            if b"\0" in buffer[:BINARY_BYTES]:
                if source.direct:
                    raise Fault(Exit.DATA, "binary file: it holds NUL bytes", file.path, "give text")
                yield _Step(None, following, file.size, "binary_files")
                return
            if buffer.startswith(codecs.BOM_UTF8):
                buffer, cursor = buffer[len(codecs.BOM_UTF8) :], cursor._replace(offset=len(codecs.BOM_UTF8))
        while True:
            if file.form == "lines":
                buffer, ended = _complete_line(stream, buffer, ended, file, cursor)
            length, gap, ends, exact = _find_end(buffer, ended, file, rules)
            if not ends and not cursor.open and rules.invalid == "skip":
                skipped, lines = _measure_invalid(source, file, cursor.offset)
                if skipped:
                    here = cursor.offset + len(buffer)
                    cursor = cursor._replace(offset=cursor.offset + skipped, line=cursor.line + lines)
                    yield _Step(None, cursor, _place(raw, file, cursor), "skipped")
                    _advance(stream, file, here, max(here, cursor.offset))
                    buffer, ended = _fill(stream, buffer[skipped:], BLOCK_BYTES)
                    continue
            data = buffer[:length]
            piece = Piece(file.path, cursor.line, file.form, not cursor.open, ends, data)
            if ended and length + gap == len(buffer):
                some = data or gap or cursor.open or cursor.offset <= len(codecs.BOM_UTF8)
                yield _Step(piece if some else None, following, file.size)
                return
            offset = cursor.offset + length + gap
            cursor = Cursor(cursor.file, offset, cursor.line + data.count(b"\n"), not ends)
            yield _Step(piece, cursor, _place(raw, file, cursor), "" if exact else "seams")
            buffer, ended = _fill(stream, buffer[length + gap :], BLOCK_BYTES)


def _find_end(buffer: bytes, ended: bool, file: File, rules: Rules) -> tuple[int, int, bool, bool]:
    """Where a piece ends: its length, bytes to pass over, whether its last document ends, whether no id changes."""
    if ended:
        gap = len(SEPARATOR) if file.form == "separated" and buffer.endswith(SEPARATOR) else 0
        return len(buffer) - gap, gap, True, True
    if file.form == "lines":
        return buffer.rindex(b"\n") + 1, 0, True, True
    if file.form == "separated" and (end := buffer.rfind(SEPARATOR)) >= 0:
        return end, len(SEPARATOR), True, True
    length, exact = find_seam(buffer, rules.cuts)
    return length, 0, False, exact


def _complete_line(stream: BinaryIO, buffer: bytes, ended: bool, file: File, cursor: Cursor) -> tuple[bytes, bool]:
    size = BLOCK_BYTES
    while not ended and b"\n" not in buffer:
        size *= 2
        if size > LINE_BYTES:
            what = f"a line of more than {LINE_BYTES >> 20} MiB"
            raise Fault(Exit.DATA, what, f"{file.path}:{cursor.line}", "is it one JSON object a line?")
        buffer, ended = _fill(stream, buffer, size)
    return buffer, ended


def _measure_invalid(source: Source, file: File, offset: int) -> tuple[int, int]:
    """Bytes and lines of the long document at `offset` if any of it is no UTF-8; (0, 0) when it is sound.

    Looked at before its first part is encoded: a document is kept or skipped as a whole.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    separator = SEPARATOR if file.form == "separated" else b""
    length, lines, valid, pending = 0, 0, True, b""
    with source.open(file) as raw, _decompress(raw, file) as stream:
        _advance(stream, file, 0, offset)
        while True:
            chunk, _ = _fill(stream, b"", BLOCK_BYTES)
            pending += chunk
            end = pending.find(separator) if separator else -1
            last = end >= 0 or not chunk
            keep = 0 if last or not separator else len(separator) - 1
            body = pending[: end if end >= 0 else max(0, len(pending) - keep)]
            try:
                decoder.decode(body, final=last)
            except UnicodeDecodeError:
                decoder.reset()
                valid = False
            length, lines, pending = length + len(body), lines + body.count(b"\n"), pending[len(body) :]
            if last:
                return (0, 0) if valid else (length + (len(separator) if end >= 0 else 0), lines)


def _read_rows(source: Source, file: File, rules: Rules, cursor: Cursor) -> Iterator[_Step]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise Fault(Exit.DATA, "parquet needs pyarrow", file.path, _INSTALL) from error
    with source.open(file) as raw:
        table = parquet.ParquetFile(raw)
        names = table.schema_arrow.names
        if rules.text_key not in names:
            what = f"no column {rules.text_key!r} (there are: {', '.join(names):.200})"
            raise Fault(Exit.DATA, what, file.path, "name the column that holds the text with --text-key")
        row, total = 0, table.metadata.num_rows
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if row + rows <= cursor.offset:
                row += rows
                continue
            batches = table.iter_batches(ROWS, row_groups=[group], columns=[rules.text_key], use_threads=False)
            for batch in batches:
                for text in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                    row += 1
                    if row <= cursor.offset:
                        continue
                    here, done = Cursor(cursor.file, row, row + 1), file.size * row // total
                    if text is None and rules.invalid != "skip":
                        fix = 'remove the row, or pass over such rows: invalid "skip"'
                        raise Fault(Exit.DATA, f"no {rules.text_key!r} here", f"{file.path}, row {row}", fix)
                    piece = None if text is None else Piece(file.path, row, "rows", True, True, text)
                    yield _Step(piece, here, done, "" if piece else "skipped")
        yield _Step(None, Cursor(cursor.file + 1), file.size)


_INSTALL = 'pip install "megatoken[data]"'


def _decompress(raw: BinaryIO, file: File) -> BinaryIO:
    if file.compression == "gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if file.compression == "zst":
        try:
            import pyarrow
        except ImportError as error:
            raise Fault(Exit.DATA, ".zst needs pyarrow", file.path, _INSTALL) from error
        # Unlike other readers it notices a file that ends too early.
        return cast(BinaryIO, pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd"))
    return raw


def _advance(stream: BinaryIO, file: File, here: int, offset: int) -> None:
    """Moves forward from `here` to `offset`, both counted in uncompressed bytes."""
    if not file.compression:
        stream.seek(offset)
        return
    while here < offset and (passed := stream.read(min(offset - here, BLOCK_BYTES))):
        here += len(passed)


def _fill(stream: BinaryIO, buffer: bytes, size: int) -> tuple[bytes, bool]:
    """`buffer` and what follows, up to `size` bytes; and whether the file ended before that."""
    parts, have = [buffer], len(buffer)
    while have < size:
        part = stream.read(size - have)
        if not part:
            return b"".join(parts), True
        parts.append(part)
        have += len(part)
    return b"".join(parts), False


def _place(raw: BinaryIO, file: File, cursor: Cursor) -> int:
    return min(raw.tell(), file.size) if file.compression else cursor.offset
