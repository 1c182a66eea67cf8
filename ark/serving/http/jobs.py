"""Passes events from the engine's thread to the server's event loop, in batches and in order.

The engine calls back on its own thread, which must not wait. `Dispatcher` collects the events and
wakes the event loop once for a batch. An HTTP request waits for the events of its `Job`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ark.errors import BaseError, InvalidUsageError
from ark.models.sampling import SamplingParams
from ark.serving.http.errors import SERVER_ERROR, ApiError
from ark.serving.http.metrics import Metrics
from ark.serving.types import EngineLike, Event, FinishReason, Grammar, Request


class Job:
    """The choices (answers) of one HTTP request, and their events. Used on the event loop only.

    error: the error with which the server ended the job, or None.
    """

    def __init__(self, ids: Sequence[str], cancel: Callable[[str], None]) -> None:
        self.ids = tuple(ids)
        self.error: ApiError | None = None
        self._open = set(ids)
        self._cancel = cancel
        self._events: list[tuple[int, Event]] = []
        self._arrived = asyncio.Event()

    @property
    def open(self) -> int:
        """The number of choices that have not ended."""
        return len(self._open)

    def arrive(self, index: int, event: Event) -> None:
        """Adds an event of a choice."""
        self._events.append((index, event))
        if event.finish is not None:
            self._open.discard(event.id)
        self._arrived.set()

    async def events(self) -> list[tuple[int, Event]]:
        """Waits for events and returns all since the last call. Raises the job's error if it has
        one.
        """
        while not self._events:
            if self.error is not None:
                raise self.error
            self._arrived.clear()
            await self._arrived.wait()
        events, self._events = self._events, []
        if self.error is not None:
            raise self.error
        return events

    def cancel(self, *indices: int) -> None:
        """Cancels the given choices of the request, or all if none are given."""
        for request in [self.ids[i] for i in indices] or self.ids:
            if request in self._open:
                self._cancel(request)

    def end(self, error: ApiError) -> None:
        """Ends the job with an error, which `events` raises."""
        if self.error is None:
            self.error = error
            self.cancel()
            self._arrived.set()


class Dispatcher:
    """Submits requests to an engine, and delivers the engine's events to jobs.

    room: the most choices that may run or wait at the same time.
    """

    def __init__(self, engine: EngineLike, metrics: Metrics, room: int) -> None:
        self.engine = engine
        self.jobs: set[Job] = set()
        self._metrics = metrics
        self._room = room
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[Job, int, Event]] = deque()
        self._woken = False
        self._numbers = itertools.count()

    def submit(
        self,
        name: str,
        prompts: Sequence[tuple[Sequence[int], SamplingParams, frozenset[int], Grammar | None]],
        adapter: str = "",
    ) -> Job:
        """Queues a choice for each prompt. adapter: a name, or "" for none. Raises ApiError if the
        choices cannot be served now.
        """
        self.check_room(len(prompts))
        number = next(self._numbers)
        job = Job([f"{name}-{number}-{i}" for i in range(len(prompts))], self.engine.cancel)
        self.jobs.add(job)
        self._metrics.begin(job.ids, [len(prompt) for prompt, *_ in prompts])
        for i, (prompt, sampling, stops, grammar) in enumerate(prompts):
            request = Request(job.ids[i], tuple(prompt), sampling, stops, grammar, adapter)
            try:
                self.engine.submit(request, partial(self._from_engine, job, i))
            except BaseError as error:
                for rest in range(i, len(prompts)):
                    self._give(job, rest, Event(job.ids[rest], finish=FinishReason.CANCELLED))
                job.cancel()
                if isinstance(error, InvalidUsageError):
                    raise refused(error) from None
                raise
        return job

    def check_room(self, choices: int) -> None:
        """Raises ApiError unless there is room for this number of further choices."""
        if choices > self._room:
            raise ApiError(
                400, f"{choices} choices are too many: the server's limit is {self._room}"
            )
        opened = sum(job.open for job in self.jobs)
        if opened + choices > self._room:
            raise ApiError(
                503,
                f"the queue is full: {opened} choices are running or waiting, {choices} more do "
                f"not fit: {self._room} is the limit; try again later",
                kind=SERVER_ERROR,
                code="queue_full",
                retry_after=1,
            )

    def _from_engine(self, job: Job, index: int, event: Event) -> None:
        """Called on the engine's thread."""
        self._events.append((job, index, event))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the event loop and all readers have ended
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Cleared first, so that an event that arrives meanwhile wakes the event loop again.
        self._woken = False
        while self._events:
            self._give(*self._events.popleft())

    def _give(self, job: Job, index: int, event: Event) -> None:
        job.arrive(index, event)
        self._metrics.event(event, time.monotonic())
        if not job.open:
            self.jobs.discard(job)

    def end_all(self, error: ApiError) -> None:
        """Ends every job with an error."""
        for job in list(self.jobs):
            job.end(error)


def request_id(kind: str) -> str:
    """A new id for a response, such as `cmpl-...`."""
    return f"{kind}-{secrets.token_hex(12)}"


def refused(error: InvalidUsageError, others: Mapping[str, str] | None = None) -> ApiError:
    """The error for a request that the engine or SamplingParams refuses. Its `param` is the first
    parameter that the message names. others: for parameters that have another name in the request,
    the request's name.
    """
    message = str(error)
    words = re.findall(r"\w+", message)
    names = set(SamplingParams.__dataclass_fields__)
    longer = names - {"n", "stop", "seed"}  # the shorter names are English words too
    named = [word for i, word in enumerate(words) if word in (longer if i else names)]
    param: str | None = named[0] if named else None
    if param and others and param in others:
        message = re.sub(rf"\b{param}\b", others[param], message)
        param = others[param]
    return ApiError(400, message, param=param)
