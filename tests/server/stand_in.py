"""An engine without a model, for tests of HTTP alone. It generates a range of tokens cyclically."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ark import log
from ark.errors import InvalidUsageError
from ark.serving.types import Event, FinishReason, LaunchRecord, Request, Stats

FIRST, COUNT = 2, 94


@dataclass
class _Running:
    request: Request
    on_event: Callable[[Event], None]
    count: int = 0


class CountingEngine:
    """An engine that answers with the tokens FIRST to FIRST + COUNT - 1 in cyclic order, which are
    printable characters in the vocabulary of the shipped checkpoint. step_s: the duration of an
    iteration.
    """

    def __init__(self, slots: int = 4, context: int = 128, step_s: float = 0.0) -> None:
        self.context = context
        self.step_s = step_s
        self.cancelled: list[str] = []
        self.submitted: list[Request] = []
        self.fail = ""
        self.on_failure: Callable[[str], None] = log.warn
        self.has_logprobs = False
        self._slots = slots
        self._open: dict[str, _Running] = {}
        self._lock = threading.Condition()
        self._ended = False
        self._stats = Stats(slots, 0, 0, 64, 64, 0, 0, 0, 0, 0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        if request.sampling.logprobs is not None and not self.has_logprobs:
            raise InvalidUsageError("logprobs is not supported by this engine; omit it")
        with self._lock:
            self.submitted.append(request)
            self._open[request.id] = _Running(request, on_event)
            self._lock.notify()

    def cancel(self, request_id: str) -> None:
        with self._lock:
            running = self._open.pop(request_id, None)
            if running:
                self.cancelled.append(request_id)
        if running:
            running.on_event(Event(request_id, finish=FinishReason.CANCELLED))

    def stats(self) -> Stats:
        with self._lock:
            names = tuple(self._open)[: self._slots]
            waiting = len(self._open) - len(names)
            slots = names + ("",) * (self._slots - len(names))
            return replace(self._stats, running=len(names), waiting=waiting, slot_ids=slots)

    def close(self, drain: bool = False) -> None:
        with self._lock:
            self._ended = True
            self._lock.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._open and not self._ended:
                    self._lock.wait()
                if self._ended:
                    return
                rows = list(self._open.values())[: self._slots]
                fresh = sum(row.count == 0 for row in rows)
                events = [(row.on_event, self._step(row)) for row in rows]
                time_us = 1e6 * self.step_s
                record = (time.monotonic(), fresh, 16, 1, self._slots, len(rows), time_us)
                launches = (
                    *self._stats.launches[-199:],
                    LaunchRecord(*record, time_us * fresh / 4),
                )
                self._stats = replace(self._stats, launches=launches)
                for _, event in events:
                    if event.finish is not None:
                        self._open.pop(event.id, None)
            for on_event, event in events:
                on_event(event)
            if self.fail:
                self.on_failure(self.fail)
            time.sleep(self.step_s)

    def _step(self, row: _Running) -> Event:
        if self.fail:
            return Event(row.request.id, finish=FinishReason.ERROR, error=self.fail)
        row.count += 1
        token = FIRST + (row.request.prompt[-1] + row.count) % COUNT
        full = len(row.request.prompt) + row.count >= self.context
        finish = None
        if token in row.request.stop_token_ids:
            finish = FinishReason.STOP
        elif full or row.count == row.request.sampling.max_tokens:
            finish = FinishReason.LENGTH
        self._stats = replace(
            self._stats,
            generated_tokens=self._stats.generated_tokens + 1,
            iterations=self._stats.iterations + 1,
        )
        most = row.request.sampling.logprobs
        if most is None:
            return Event(row.request.id, (token,), finish=finish)
        top = {FIRST + (token - FIRST + i) % COUNT: -0.5 - i for i in range(most)}
        return Event(row.request.id, (token,), (-0.5,), (top,), finish)


class ScriptedEngine(CountingEngine):
    """Answers every request with the tokens of `script`, followed by the end token 1."""

    def __init__(self, context: int = 2048) -> None:
        super().__init__(context=context)
        self.script: list[int] = []

    def _step(self, row: _Running) -> Event:
        tokens = [*self.script, 1]
        row.count += 1
        token = tokens[row.count - 1]
        finish = FinishReason.STOP if row.count == len(tokens) else None
        if finish is None and row.count == row.request.sampling.max_tokens:
            finish = FinishReason.LENGTH
        return Event(row.request.id, (token,), finish=finish)
