"""Encode chunks in several processes, in order; the ids do not depend on the number of processes.

Not `multiprocessing`: its spawned children import the caller's __main__, possibly with torch, and outlive a killed
parent. These import numpy and tokenizers only, exchange pickles over two pipes and end when those close.
"""

import os
import pickle
import signal
import subprocess
import traceback
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from queue import SimpleQueue

from megatoken.data.corpus_reader import Chunk
from megatoken.data.documents import Encoded, PrepareOptions, Segment, encode_segments
from megatoken.data.tokenizer import Tokenizer
from megatoken.errors import MegatokenError, PeerError
from megatoken.system.environment import python_command

WAKE_SECONDS = (
    5.0  # without an answer, then children that somebody stopped (SIGSTOP) are told to go on
)
_PROGRAM = "from megatoken.data.encode_workers import serve; serve()"


def encode_chunks(
    chunks: Iterator[Chunk], options: PrepareOptions, tokenizer: Tokenizer, workers: int
) -> Generator[tuple[Chunk, Encoded], None, None]:
    """Each chunk with its ids, in order; about three chunks per process are in memory. One worker is this process.

    Raises DataError as `encode_segments`, PeerError when a process dies. Closing the iterator ends the processes.
    """
    if workers == 1:
        for chunk in chunks:
            yield chunk, encode_segments(chunk.segments, options, tokenizer)
        return
    command = python_command(_PROGRAM)
    setup = pickle.dumps((options, tokenizer.to_json(), tokenizer.name, tokenizer.eot))
    children: list[subprocess.Popen[bytes]] = []
    idle: SimpleQueue[tuple[subprocess.Popen[bytes], bytes]] = (
        SimpleQueue()
    )  # and what it has not been sent yet
    threads = ThreadPoolExecutor(workers)

    def encode(chunk: Chunk) -> Encoded:
        child, unsent = idle.get()
        try:
            return _ask(child, unsent + pickle.dumps(chunk.segments))
        finally:
            idle.put((child, b""))

    try:
        for _ in range(workers):
            children.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            idle.put((children[-1], setup))
        pending: deque[tuple[Chunk, Future[Encoded]]] = deque()
        for chunk in chunks:
            pending.append((chunk, threads.submit(encode, chunk)))
            if len(pending) > 2 * workers:
                first, future = pending.popleft()
                yield first, _wait(future, children)
        for first, future in pending:
            yield first, _wait(future, children)
    finally:
        for child in children:
            child.kill()  # the threads that wait for its answer wake up
        threads.shutdown(cancel_futures=True)
        for child in children:
            child.communicate()  # closes the pipes and waits


def _wait(future: Future[Encoded], children: list[subprocess.Popen[bytes]]) -> Encoded:
    while not wait([future], WAKE_SECONDS).done:
        for child in children if hasattr(signal, "SIGCONT") else ():
            child.send_signal(signal.SIGCONT)  # nothing happens to one that runs
    return future.result()


def _ask(child: subprocess.Popen[bytes], request: bytes) -> Encoded:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(request)
        child.stdin.flush()
        answer = pickle.load(child.stdout)
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        code = child.wait()
        what = (
            f"a tokenizing process ended ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
        )
        fix = "run the same command again to go on; fewer workers need less memory"
        raise PeerError(what, f"process {child.pid}", fix) from error
    if isinstance(answer, Exception):
        raise answer
    assert isinstance(answer, Encoded)
    return answer


def serve() -> None:
    """The child process: reads options and tokenizer, then answers lists of segments until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, signal.SIG_IGN
        )  # sent to the whole process group; this process ends with its parent
    os.putenv(
        "TOKENIZERS_PARALLELISM", "false"
    )  # one thread per process; read by the Rust side only
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print must not land in the pipe
    with suppress(EOFError, BrokenPipeError):
        options, tokenizer_json, name, eot = pickle.load(requests)
        tokenizer = Tokenizer(tokenizer_json, name, eot)
        while True:
            pickle.dump(_answer(pickle.load(requests), options, tokenizer), answers)
            answers.flush()


def _answer(
    segments: list[Segment], options: PrepareOptions, tokenizer: Tokenizer
) -> Encoded | Exception:
    try:
        return encode_segments(segments, options, tokenizer)
    except MegatokenError as error:
        return error
    except Exception:
        return RuntimeError(f"in a tokenizing process:\n{traceback.format_exc()}")
