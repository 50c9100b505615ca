"""Encode chunks of a corpus in worker processes, in order.

The ids do not depend on the number of workers.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from tempfile import TemporaryDirectory

from megatoken.base.errors import PeerError
from megatoken.base.system.environment import safe_import_path
from megatoken.text.corpus_reader import Chunk
from megatoken.text.documents import Encoded, PrepareOptions, Segment, encode_segments
from megatoken.text.tokenizer import Tokenizer, load_tokenizer

_worker: tuple[PrepareOptions, Tokenizer]  # set once in each worker process


def encode_chunks(
    chunks: Iterator[Chunk], options: PrepareOptions, tokenizer: Tokenizer, workers: int
) -> Generator[tuple[Chunk, Encoded], None, None]:
    """Yield each chunk with its ids, in the order of `chunks`.

    workers: number of processes; with 1, the calling process does the work. Holds at most two
    chunks per worker in memory. Raises DataError as `encode_segments` does, and PeerError if a
    worker dies. Closing the generator stops the workers.
    """
    if workers == 1:
        for chunk in chunks:
            yield chunk, encode_segments(chunk.segments, options, tokenizer)
        return
    with safe_import_path(), TemporaryDirectory(prefix="megatoken-") as folder:
        # Pass a folder: if a worker died while starting, sending a long argument would hang.
        tokenizer.vocabulary.save(Path(folder))
        pool = ProcessPoolExecutor(
            workers,
            multiprocessing.get_context("spawn"),  # forking is unsafe with the tokenizer's threads
            _start_worker,
            (options, Path(folder)),
        )
        pending: deque[tuple[Chunk, Future[Encoded]]] = deque()
        try:
            for chunk in chunks:
                try:
                    future = pool.submit(_encode, chunk.segments)
                except (OSError, ValueError) as error:  # a worker died while the next was starting
                    raise BrokenProcessPool from error
                pending.append((chunk, future))
                if len(pending) > 2 * workers:
                    first, future = pending.popleft()
                    yield first, future.result()
            for first, future in pending:
                yield first, future.result()
        except BrokenProcessPool as error:
            fix = "run the same command again to resume; fewer workers need less memory"
            raise PeerError("a tokenizer worker died", "prepare", fix) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker(options: PrepareOptions, folder: Path) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # the Rust code reads it
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker = options, load_tokenizer(str(folder))


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(segments: list[Segment]) -> Encoded:
    options, tokenizer = _worker
    return encode_segments(segments, options, tokenizer)
