"""Blocks to ids in several processes, in order and the same bytes for any number of them.

In: blocks as they are read. Out: each block with its ids, strictly in order; at most three blocks a process are
in memory. Deliberately absent: `multiprocessing`. Its spawned children import the caller's __main__, which
here may mean torch in every one of them, and they outlive a parent that is killed. These are started afresh
with nothing but numpy and tokenizers, speak over their own two pipes and end when those close.
"""

import json
import os
import signal
import struct
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, astuple
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import numpy as np

from megatoken.data.blocks import Block
from megatoken.data.documents import Encoded, Piece, Rules, encode_pieces, token_dtype
from megatoken.data.tokenizer import Tokenizer, read_tokenizer
from megatoken.errors import Exit, Fault

_LENGTHS = struct.Struct("<QQ")  # of a frame: its JSON and the bytes after it


def encode_blocks(
    blocks: Iterator[Block], rules: Rules, tokenizer: Tokenizer, workers: int
) -> Generator[tuple[Block, Encoded], None, None]:
    """Each block with its ids, in order. One worker means this process.

    Fault(Exit.DATA) as `encode_pieces`, Fault(Exit.PEER) when a process dies. Close the iterator (or exhaust
    it) to end the processes.
    """
    if workers == 1:
        for block in blocks:
            yield block, encode_pieces(block.pieces, rules, tokenizer)
        return
    processes: list[_Process] = []
    idle: SimpleQueue[_Process] = SimpleQueue()
    threads = ThreadPoolExecutor(workers)
    try:
        for _ in range(workers):
            processes.append(_Process(rules, tokenizer))
            idle.put(processes[-1])

        def encode(block: Block) -> Encoded:
            process = idle.get()
            try:
                return process.encode(block.pieces)
            finally:
                idle.put(process)

        pending: deque[tuple[Block, Future[Encoded]]] = deque()
        for block in blocks:
            pending.append((block, threads.submit(encode, block)))
            if len(pending) > 2 * workers:
                first, future = pending.popleft()
                yield first, future.result()
        for first, future in pending:
            yield first, future.result()
    finally:
        for process in processes:
            process.kill()  # they hold nothing; the threads that wait for them wake up
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.close()


class _Process:
    """A child that turns pieces into ids, one frame in and one frame out at a time."""

    def __init__(self, rules: Rules, tokenizer: Tokenizer) -> None:
        package = str(Path(__file__).parents[2])
        program = f"import sys; sys.path.append({package!r}); from megatoken.data.workers import serve; serve()"
        self._child = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._dtype = token_dtype(tokenizer.vocab_size)
        setup = {"rules": asdict(rules), "name": tokenizer.name, "eot": tokenizer.eot}
        self._unsent: list[tuple[dict[str, Any], list[bytes]]] = [(setup, [tokenizer.to_json().encode()])]

    def encode(self, pieces: list[Piece]) -> Encoded:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        rows = [(*astuple(piece)[:-1], len(piece.data)) for piece in pieces]
        try:
            self._unsent.append(({"pieces": rows}, [piece.data for piece in pieces]))
            while self._unsent:
                _send(self._child.stdin, *self._unsent.pop(0))
            header, payload = _receive(self._child.stdout)
        except (OSError, EOFError) as error:
            code = self._child.wait()
            what = f"a tokenizing process ended ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
            fix = "run the same command again to go on; fewer workers need less memory"
            raise Fault(Exit.PEER, what, f"process {self._child.pid}", fix) from error
        if "fault" in header:
            raise Fault(Exit(header["code"]), header["fault"])
        if "bug" in header:
            raise RuntimeError(f"in a tokenizing process:\n{header['bug']}")
        fields: dict[str, Any] = header
        for name, length in header.pop("lengths").items():
            fields[name] = np.frombuffer(payload[:length], dtype=self._dtype)
            payload = payload[length:]
        return Encoded(**fields)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()

    def close(self) -> None:
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe:
                pipe.close()


def serve() -> None:
    """The child's life: a first frame with rules and tokenizer, then pieces in, ids out, until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group; the parent decides, and its end is ours
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # one thread a process; read by the Rust side only
    source, sink = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # a stray print must not land in the pipe
    try:
        header, payload = _receive(source)
        rules = Rules(**header["rules"])
        tokenizer = read_tokenizer(bytes(payload).decode(), header["name"], header["eot"])
        while True:
            header, payload = _receive(source)
            _send(sink, *_answer(header["pieces"], payload, rules, tokenizer))
    except (EOFError, BrokenPipeError):
        return


def _answer(
    rows: list[list[Any]], payload: memoryview, rules: Rules, tokenizer: Tokenizer
) -> tuple[dict[str, Any], list[Any]]:
    pieces, start = [], 0
    for file, line, form, begins, ends, length in rows:
        pieces.append(Piece(file, line, form, begins, ends, bytes(payload[start : start + length])))
        start += length
    try:
        encoded = encode_pieces(pieces, rules, tokenizer)
    except Fault as fault:
        return {"fault": str(fault), "code": int(fault.code)}, []
    except Exception:
        return {"bug": traceback.format_exc()}, []
    header = {name: getattr(encoded, name) for name in ("open", "open_replaced", "carried_replaced", "counts")}
    ids = {name: getattr(encoded, name) for name in ("carried", "train", "val")}
    return header | {"lengths": {name: part.nbytes for name, part in ids.items()}}, list(ids.values())


def _send(pipe: IO[bytes], header: dict[str, Any], payload: list[Any]) -> None:
    text = json.dumps(header).encode()
    body = b"".join(payload)
    frame = memoryview(_LENGTHS.pack(len(text), len(body)) + text + body)
    while frame:
        frame = frame[pipe.write(frame) :]


def _receive(pipe: IO[bytes]) -> tuple[dict[str, Any], memoryview]:
    text_length, body_length = _LENGTHS.unpack(_read(pipe, _LENGTHS.size))
    header: dict[str, Any] = json.loads(bytes(_read(pipe, text_length)))
    return header, _read(pipe, body_length)


def _read(pipe: IO[bytes], length: int) -> memoryview:
    data = memoryview(bytearray(length))
    have = 0
    while have < length:
        got = pipe.readinto(data[have:])  # type: ignore[attr-defined]
        if not got:
            raise EOFError
        have += got
    return data
