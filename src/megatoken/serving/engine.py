"""One model for many threads: what they ask waits in one queue and is decoded in one batch by one thread."""

import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from megatoken.errors import MegatokenError
from megatoken.model.gpt import GPT
from megatoken.sampling.batch import BatchDecoder, Request, Token
from megatoken.system.device import Device


class QueueFull(Exception):
    """As many requests wait as may."""


class Stopped(Exception):
    """The engine has been stopped."""


class Job:
    """A request on its way. `cancel` frees its row before the next token."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.is_cancelled = False
        self._answers: SimpleQueue[Token | Exception] = SimpleQueue()

    def put(self, answer: Token | Exception) -> None:
        """A token, or the error that ends the job."""
        self._answers.put(answer)

    def cancel(self) -> None:
        """Ask for no more tokens."""
        self.is_cancelled = True

    def read(self, timeout: float) -> list[Token]:
        """All tokens that are there, after waiting for one; none where `timeout` seconds have passed.

        Raises what ended the job: a MegatokenError of the model, Stopped.
        """
        tokens: list[Token] = []
        try:
            while True:
                answer = (
                    self._answers.get_nowait() if tokens else self._answers.get(timeout=timeout)
                )
                if isinstance(answer, Exception):
                    raise answer
                tokens.append(answer)
        except Empty:
            return tokens


class Engine:
    """Decodes in a thread of its own inside `with`. rows: sequences at once; waiting: how many may wait."""

    def __init__(
        self, model: GPT, device: Device | None = None, *, rows: int = 8, waiting: int = 64
    ) -> None:
        self.model, self._device = model, device
        self._max_rows, self.max_jobs = rows, rows + waiting
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._running: dict[int, Job] = {}
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all jobs with Stopped, and the thread."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def counts(self) -> tuple[int, int]:
        """Jobs that are being decoded, and that wait."""
        with self._changed:
            return len(self._running), len(self._waiting)

    def submit(self, request: Request) -> Job:
        """Queue a request. Raises as `Request.check`, QueueFull, Stopped."""
        request.check(self.model.config)
        job = Job(request)
        with self._changed:
            if self._is_stopping:
                raise Stopped
            self._forget_cancelled()
            # With those that are decoded: what comes to a free row waits for the next step, too.
            if len(self._running) + len(self._waiting) >= self.max_jobs:
                raise QueueFull
            self._waiting.append(job)
            self._changed.notify_all()
        return job

    def _forget_cancelled(self) -> None:
        self._waiting = [job for job in self._waiting if not job.is_cancelled]

    def _run(self) -> None:
        while not self._is_stopping:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_stopping)
            try:
                with BatchDecoder(self.model, rows=self._max_rows, device=self._device) as decoder:
                    for tokens in self._decode(decoder):
                        self._hand_out(tokens)
            except (
                Exception
            ) as error:  # of the model, or of the device: the next job finds a new decoder
                self._end_all(
                    error if isinstance(error, MegatokenError) else RuntimeError("decoding failed")
                )
        self._end_all(Stopped())

    def _decode(self, decoder: BatchDecoder) -> Iterator[list[Token]]:
        number = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running or self._waiting or self._is_stopping)
                if self._is_stopping:
                    return
                self._forget_cancelled()
                for key in [key for key, job in self._running.items() if job.is_cancelled]:
                    decoder.remove(key)
                    del self._running[key]
                while decoder.free_rows and self._waiting:
                    job = self._waiting.pop(0)
                    self._running[number] = job
                    decoder.add(number, job.request)
                    number += 1
                self._changed.notify_all()
            yield decoder.step()

    def _hand_out(self, tokens: list[Token]) -> None:
        with self._changed:
            for token in tokens:
                self._running[token.row].put(token)
                if token.finish_reason:
                    del self._running[token.row]
            self._changed.notify_all()

    def _end_all(self, error: Exception) -> None:
        """End the jobs that are decoded; those that wait, if the engine has stopped or no decoder could be built."""
        with self._changed:
            ended = list(self._running.values())
            if not ended or isinstance(error, Stopped):
                ended += self._waiting
                self._waiting.clear()
            self._running.clear()
            for job in ended:
                job.put(error)
            self._changed.notify_all()
