"""Decode requests from asyncio clients in one batch, on a separate thread."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Self

from megatoken.base.system.device import Device
from megatoken.inference.batch import BatchDecoder, Request, Token
from megatoken.inference.protocol import ApiError
from megatoken.model.gpt import GPT


class Stopped(ApiError):
    """Raised in a job that was cancelled, or because the engine has stopped."""

    def __init__(self) -> None:
        super().__init__(503, "the server is stopping", "stopping")


class Job:
    """Submitted requests, whose tokens are read in the event loop that submitted them.

    cancelled: numbers of requests to remove from the batch before the next step.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.cancelled: set[int] = set()
        self._tokens: asyncio.Queue[Token | Exception] = asyncio.Queue()

    def put(self, token: Token | Exception) -> None:
        """Append a token for `read`, or an error that ends the job."""
        self._tokens.put_nowait(token)

    def cancel(self) -> None:
        """End the job."""
        self.cancelled.update(range(len(self.requests)))
        self.put(Stopped())

    async def read(self) -> Token:
        """Wait for the next token, whose `key` is its request's number, or raise the job's error."""
        token = await self._tokens.get()
        if isinstance(token, Exception):
            raise token
        return token


@dataclass(frozen=True)
class _Sequence:
    job: Job
    number: int  # of the request

    @property
    def request(self) -> Request:
        return self.job.requests[self.number]

    @property
    def is_cancelled(self) -> bool:
        return self.number in self.job.cancelled


class Engine:
    """Decodes jobs on a thread, which runs while the engine is used in a `with` block.

    rows: maximum number of jobs in the batch. waiting: maximum number of queued jobs. cache_tokens:
    as in BatchDecoder.
    """

    def __init__(
        self,
        model: GPT,
        device: Device | None = None,
        *,
        rows: int = 8,
        waiting: int = 64,
        cache_tokens: int | None = None,
    ) -> None:
        self.model = model
        self.max_jobs = rows + waiting
        self.cache_tokens = cache_tokens
        self.cached_tokens = 0  # number of tokens that the cache has memory for
        self._build_decoder = partial(
            BatchDecoder, model, rows=rows, cache_tokens=cache_tokens, device=device
        )
        self._changed = threading.Condition()
        self._waiting: list[_Sequence] = []
        self._running: dict[int, _Sequence] = {}
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End all jobs with Stopped and join the thread."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def counts(self) -> tuple[int, int]:
        """The number of running jobs, and of waiting jobs."""
        with self._changed:
            return len(self._running), len(self._waiting)

    def submit(self, requests: Sequence[Request]) -> Job:
        """Queue requests that end together.

        Raises the errors of `Request.check`, and ApiError if the queue is full or the engine has
        stopped.
        """
        for request in requests:
            request.check(self.model.config)
        job = Job(requests)
        self._loop = asyncio.get_running_loop()
        with self._changed:
            if self._is_stopping:
                raise Stopped
            self._drop_cancelled()
            # Running jobs count too, because a job for a free row waits until the next step.
            if len(self._running) + len(self._waiting) + len(requests) > self.max_jobs:
                raise ApiError(429, "too many requests; try again later", "queue_full")
            self._waiting += [_Sequence(job, number) for number in range(len(requests))]
            self._changed.notify_all()
        return job

    def _drop_cancelled(self) -> None:
        self._waiting = [each for each in self._waiting if not each.is_cancelled]

    def _run(self) -> None:
        while not self._is_stopping:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_stopping)
            try:
                with self._build_decoder() as decoder:
                    for tokens in self._decode(decoder):
                        self._dispatch(tokens)
            except Exception as error:  # the next job gets a new decoder
                self._end_jobs(error)
        self._end_jobs(Stopped())

    def _decode(self, decoder: BatchDecoder) -> Iterator[list[Token]]:
        number = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running or self._waiting or self._is_stopping)
                if self._is_stopping:
                    return
                self._drop_cancelled()
                for key in [key for key, each in self._running.items() if each.is_cancelled]:
                    decoder.remove(key)
                    del self._running[key]
                while self._waiting and decoder.fits(self._waiting[0].request):
                    self._running[number] = self._waiting.pop(0)
                    decoder.add(number, self._running[number].request)
                    number += 1
            yield decoder.step()
            self.cached_tokens = decoder.cached_tokens

    def _dispatch(self, tokens: list[Token]) -> None:
        with self._changed:
            messages: list[tuple[Job, Token]] = []
            for token in tokens:
                sequence = self._running[token.key]
                messages.append((sequence.job, token._replace(key=sequence.number)))
                if token.finish_reason:
                    del self._running[token.key]
            self._send(messages)

    def _end_jobs(self, error: Exception) -> None:
        """End the running jobs with `error`.

        The waiting jobs end too if the engine stops, or if no job is running: the decoder could
        then not be built, so they would fail with the same error.
        """
        with self._changed:
            sequences = list(self._running.values())
            if not sequences or isinstance(error, Stopped):
                sequences += self._waiting
                self._waiting.clear()
            self._running.clear()
            self._send([(sequence.job, error) for sequence in sequences])

    def _send(self, messages: Sequence[tuple[Job, Token | Exception]]) -> None:
        """Put tokens or errors into their jobs; wake the event loop only once for all of them."""

        def put_all() -> None:
            for job, message in messages:
                job.put(message)

        if messages:
            with suppress(RuntimeError):  # if the loop is closed
                self._loop.call_soon_threadsafe(put_all)
