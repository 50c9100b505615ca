"""Decode requests from asyncio clients in one batch, on a separate thread."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from megatoken.model.gpt import GPT
from megatoken.sampling.batch import BatchDecoder, Request, Token
from megatoken.serving.protocol import ApiError
from megatoken.system.device import Device

TOTALS = (
    *("prompt_tokens_total", "cached_prompt_tokens_total", "generation_tokens_total"),
    *("time_to_first_token_seconds_sum", "time_to_first_token_seconds_count"),
    *("time_per_output_token_seconds_sum", "time_per_output_token_seconds_count"),
)


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
        """Wait for the next token, whose `row` is its request's number, or raise the job's error."""
        token = await self._tokens.get()
        if isinstance(token, Exception):
            raise token
        return token


@dataclass(eq=False)
class _Sequence:
    job: Job
    number: int  # of the request
    time: float = field(default_factory=time.perf_counter)  # of submission or the last token
    n_tokens: int = 0

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
        self._cached_tokens = 0
        self._device = device
        self._decoder_options: dict[str, Any] = {"rows": rows, "cache_tokens": cache_tokens}
        self._changed = threading.Condition()
        self._waiting: list[_Sequence] = []
        self._running: dict[int, _Sequence] = {}
        self._totals = dict.fromkeys(TOTALS, 0.0)
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

    def read_metrics(self) -> dict[str, float]:
        """Return the values of metrics by name."""
        running, waiting = self.counts
        gauges = {
            **{"requests_running": running, "requests_waiting": waiting},
            "cache_tokens": self._cached_tokens,
        }
        return gauges | {"cache_tokens_bound": self.cache_tokens or 0} | self._totals

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
                with BatchDecoder(
                    self.model, device=self._device, **self._decoder_options
                ) as decoder:
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
                while decoder.free_rows and self._waiting:
                    sequence = self._waiting.pop(0)
                    self._running[number] = sequence
                    decoder.add(number, sequence.job.requests[sequence.number])
                    number += 1
            yield decoder.step()
            self._cached_tokens = decoder.cached_tokens

    def _dispatch(self, tokens: list[Token]) -> None:
        with self._changed:
            messages: list[tuple[Job, Token]] = []
            for token in tokens:
                sequence = self._running[token.row]
                self._count(sequence, token)
                messages.append((sequence.job, token._replace(row=sequence.number)))
                if token.finish_reason:
                    del self._running[token.row]
            self._send(messages)

    def _count(self, sequence: _Sequence, token: Token) -> None:
        name = "time_per_output_token" if sequence.n_tokens else "time_to_first_token"
        now = time.perf_counter()
        changes = {f"{name}_seconds_sum": now - sequence.time, f"{name}_seconds_count": 1}
        changes["generation_tokens_total"] = 1
        if not sequence.n_tokens:
            prompt_ids = sequence.job.requests[sequence.number].prompt_ids
            changes |= {"prompt_tokens_total": len(prompt_ids)}
            changes |= {"cached_prompt_tokens_total": token.cached}
        for name, value in changes.items():
            self._totals[name] += value
        sequence.time, sequence.n_tokens = now, sequence.n_tokens + 1

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
