"""Encode a corpus in worker processes, in order.

One process divides the corpus into chunks, and the workers read and encode them. The calling process
only passes chunks and ids on. The ids do not depend on the number of workers.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from megatoken.base.errors import PeerError
from megatoken.base.system.environment import safe_import_path
from megatoken.text.corpus_reader import Chunk, ReadPosition, read_chunks
from megatoken.text.documents import Encoded, PrepareOptions, Segment, encode_segments
from megatoken.text.sources import Source
from megatoken.text.tokenizer import Tokenizer, load_tokenizer

T = TypeVar("T")

READ_AHEAD = 2  # chunks that are asked for before they are needed

_worker: tuple[PrepareOptions, Tokenizer]  # set once in each worker process
_chunks: Iterator[Chunk]  # set once in the reading process


def encode_corpus(
    source: Source, options: PrepareOptions, start: ReadPosition, tokenizer: Tokenizer, workers: int
) -> Generator[tuple[Chunk, Encoded], None, None]:
    """Yield each chunk of the corpus from `start` on, with its ids.

    workers: number of processes that encode; with 1, the calling process does all the work. Holds
    at most two chunks per worker in memory. Raises DataError as `read_chunks` and `encode_segments`
    do, and PeerError if a process dies. Closing the generator stops the processes.
    """
    if workers == 1:
        for each in read_chunks(source, options, start):
            yield each, encode_segments(each.segments, options, tokenizer)
        return
    with (
        safe_import_path(),
        TemporaryDirectory(prefix="megatoken-") as folder,
        ExitStack() as stack,
    ):
        # Pass a folder: if a worker died while starting, sending a long argument would hang.
        tokenizer.vocabulary.save(Path(folder))
        context = multiprocessing.get_context("spawn")  # forking is unsafe with tokenizers' threads
        reader = ProcessPoolExecutor(1, context, _start_process)
        stack.callback(reader.shutdown, cancel_futures=True)
        pool = ProcessPoolExecutor(workers, context, _start_worker, (options, Path(folder)))
        stack.callback(pool.shutdown, cancel_futures=True)
        pending: deque[tuple[Chunk, Future[Encoded]]] = deque()
        try:
            _submit(reader, _start_reading, source, options, start)
            reads = deque(_submit(reader, _read_chunk) for _ in range(READ_AHEAD))
            while (chunk := reads.popleft().result()) is not None:
                reads.append(_submit(reader, _read_chunk))
                pending.append((chunk, _submit(pool, _encode, chunk.segments)))
                if len(pending) > 2 * workers:
                    first, future = pending.popleft()
                    yield first, future.result()
            for first, future in pending:
                yield first, future.result()
        except BrokenProcessPool as error:
            fix = "run the same command again to resume; fewer workers need less memory"
            raise PeerError("a tokenizer worker died", "prepare", fix) from error


def _submit(pool: ProcessPoolExecutor, function: Callable[..., T], *arguments: Any) -> Future[T]:
    try:
        return pool.submit(function, *arguments)
    except (OSError, ValueError) as error:  # a process died while the next was starting
        raise BrokenProcessPool from error


def _start_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _start_worker(options: PrepareOptions, folder: Path) -> None:
    global _worker
    _start_process()
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # the Rust code reads it
    _worker = options, load_tokenizer(str(folder))


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _start_reading(source: Source, options: PrepareOptions, start: ReadPosition) -> None:
    global _chunks
    _chunks = read_chunks(source, options, start)


def _read_chunk() -> Chunk | None:
    return next(_chunks, None)


def _encode(segments: list[Segment]) -> Encoded:
    options, tokenizer = _worker
    return encode_segments(segments, options, tokenizer)
