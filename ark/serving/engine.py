"""The engine: serves many requests on one device. A step is one launch of many iterations; in each
iteration every row of the batch decodes a token of one request. The engine's thread plans a step,
launches it, and reports tokens while the device computes. Other threads queue messages and set a
flag that ends the launch after an iteration. Used by `ark.LLM` and the server (docs/serving.md).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ark import log
from ark.backend import threads
from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.errors import BaseError, GpuError, InvalidUsageError
from ark.machine import Machine
from ark.models.checkpoint import Checkpoint
from ark.models.plans import choose_context
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.executor import BUDGET_S
from ark.serving.draft_model import DRAFT_TOKENS, DraftModel, check_draft_model
from ark.serving.loading import PAGE_POSITIONS, LoadedModel, Report, load_model
from ark.serving.masks import MaskMaker
from ark.serving.pace import Pace
from ark.serving.progress import Outcome, Step, lookup
from ark.serving.requests import check_request, check_steps
from ark.serving.rows import DeviceRows, Launched
from ark.serving.scheduler import Scheduler
from ark.serving.types import Event, FinishReason, Request, Stats

OnEvent = Callable[[Event], None]
LAUNCH_ITERATIONS = 512
"""The most iterations of a launch: so many that the host's work between launches is short."""
RANK_ITERATIONS = 8
"""The most iterations of a launch on several ranks: few, because it cannot end early."""
MASK_WAIT_S = 1e-4
"""Seconds for which a step waits for grammar masks; then it runs without these requests."""


class Engine:
    """Serves requests on a device. A context manager; created by `Engine.open`."""

    def __init__(
        self,
        model: LoadedModel,
        iterations: int = LAUNCH_ITERATIONS,
        draft: int = 0,
        draft_model: DraftModel | None = None,
    ) -> None:
        """model, draft_model: loaded; `close` closes them. For the other arguments see `open`."""
        self._model, self._shape, self._draft_model = model, model.shape, draft_model
        assert model.shape.pages is not None and not (draft and model.shape.pages.apart)
        self._rows = DeviceRows(model.executor, model.shape, model.ranks)
        several = model.shape.world_size > 1
        self._launch_iterations = min(iterations, RANK_ITERATIONS) if several else iterations
        self._pool = model.page_pool(self._rows.reserved)
        self._scheduler = Scheduler(
            model.shape.batch,
            model.shape.chunk,
            model.shape.context,
            self._pool,
            draft,
            lookup if draft_model is None else draft_model.propose,
        )
        self._news = threading.Condition()
        self._masks = MaskMaker(self._mask_made)
        self._arrived: deque[Request] = deque()
        self._cancelled: set[str] = set()
        self._listeners: dict[str, OnEvent] = {}
        self._closing = self._draining = False
        self._failure = ""
        self.on_failure: Callable[[str], None] = log.warn
        self._process = os.getpid()
        self._prompt_tokens = self._generated = self._iterations = 0
        self._pace = Pace()
        self._untold: list[Event] = []
        self._stats = self._count()
        self._thread = threads.start(self._serve, name="ark-engine")

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint | Path | str,
        backend: Backend | str = "",
        device: Device | int = 0,
        *,
        slots: int = 8,
        context: int | None = None,
        chunk: int | None = None,
        pages: int | None = None,
        page: int = PAGE_POSITIONS,
        iterations: int = LAUNCH_ITERATIONS,
        draft: int = 0,
        draft_model: Checkpoint | None = None,
        adapters: Mapping[str, Path | str] | None = None,
        sampling: str = "",
        max_logprobs: int = 0,
        budget_s: float = BUDGET_S,
        progress: Report | None = None,
        ranks: Bootstrap | None = None,
        machine: Machine | None = None,
    ) -> Engine:
        """Creates an engine that has loaded a checkpoint. checkpoint: opened, or its directory.

        backend: a backend, its name, or "" for one that has devices. device: an opened device (not
        closed by the engine) or an index. slots: how many requests run at once. context: positions
        of each request, its prompt included. chunk: prompt tokens per iteration; 0: a prompt is
        read one token per iteration. pages: those of the KV cache, of `page` positions each; by
        default enough for all slots. iterations: the most iterations of a launch, which ends
        earlier if a request arrives, ends or is cancelled. draft: how many proposed tokens of a
        request idle rows of the batch verify (speculative decoding); its text does not change.
        draft_model: a smaller model, on the same device, that proposes these tokens; without one
        they come from earlier repetitions in the text. adapters: directories by name, which
        requests choose (ark.models.adapters). sampling, max_logprobs: `sampling` and `logprobs` of
        ark.models.build.Shape. progress: see ark.models.generate.Generator. ranks: the ranks that
        share the model; this is rank 0, the others call `load_model` with the same arguments and
        ark.serving.ranks.follow. machine: the machine to plan for, by default the device's.

        Raises an error of ark.errors, with a cause and a remedy, before anything runs.
        """
        check_steps(iterations, draft)
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint.open(Path(checkpoint))
        if draft_model is not None:
            check_draft_model(checkpoint, draft_model, choose_context(checkpoint, context), ranks)
            draft = draft or DRAFT_TOKENS
        model = load_model(
            checkpoint,
            backend,
            device,
            slots=slots,
            context=context,
            chunk=chunk,
            pages=pages,
            page=page,
            draft=draft,
            sampling=sampling,
            max_logprobs=max_logprobs,
            budget_s=budget_s,
            progress=progress,
            ranks=ranks,
            machine=machine,
            adapters=adapters,
        )
        with ExitStack() as loaded:
            loaded.callback(model.close)
            drafts = None
            if draft_model is not None:
                target = model.opened if isinstance(device, int) else device
                drafts = DraftModel.open(draft_model, backend, target, model.shape, budget_s)
                loaded.callback(drafts.close)
            engine = cls(model, iterations, draft, drafts)
            loaded.pop_all()
            return engine

    @property
    def context(self) -> int:
        """The most positions of a request, its prompt included."""
        return self._shape.context

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queues a request; see ark.serving.types.EngineLike."""
        if os.getpid() != self._process:  # the thread exists only in the process that created it
            raise InvalidUsageError(
                "this engine was opened in another process; open one in this process, and start "
                "processes by the method spawn"
            )
        check_request(request, self._shape, self._model.adapters)
        request = replace(request, sampling=request.sampling.seeded())
        with self._news:
            if self._failure:
                raise GpuError(self._failure)
            if self._closing:
                raise InvalidUsageError("this engine was closed; open another one")
            if request.id in self._listeners:
                raise InvalidUsageError(
                    f"a request {request.id!r} is being served; give each request its own id"
                )
            self._listeners[request.id] = on_event
            self._arrived.append(request)
            if len(self._listeners) <= self._shape.batch:  # a slot is free
                self._rows.leave()
            self._news.notify_all()

    def cancel(self, request_id: str) -> None:
        """Ends a request with CANCELLED at the next iteration; unknown ids are ignored."""
        with self._news:
            if request_id in self._listeners:
                self._cancelled.add(request_id)
                self._rows.leave()
                self._news.notify_all()

    def stats(self) -> Stats:
        """The state after the latest tokens."""
        return self._stats

    def close(self, drain: bool = False) -> None:
        """Closes the engine; see ark.serving.types.EngineLike. Safe to call twice."""
        with self._news:
            self._closing, self._draining = True, drain
            if not drain:
                self._rows.leave()
            self._news.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        """The engine thread's loop: takes messages, then plans and runs a step."""
        threads.sleep_exactly()
        try:
            while self._hear():
                self._take_masks()
                if self._scheduler.idle:
                    self._tell_all()
                    continue
                step = self._scheduler.plan(self._launch_iterations)
                if step.rows or step.chunks is not None:
                    self._do(step)
                else:  # all running requests wait for their masks
                    self._tell_all()
                    self._await_mask()
        except BaseException as error:
            self._fail(error)
        finally:
            self._masks.close()
            with self._news:
                self._rows.close()
            if self._draft_model is not None:
                self._draft_model.close()
            self._model.close()

    def _mask_made(self) -> None:
        """Called on the mask thread when a mask is ready: ends the launch. The next one uses it."""
        with self._news:
            self._rows.leave()
            self._news.notify_all()

    def _await_mask(self) -> None:
        """Waits for a token mask, for a new or cancelled request, or for a call of `close`."""
        with self._news:
            self._news.wait_for(
                lambda: (
                    self._masks.ready
                    or self._cancelled
                    or self._arrived
                    or (self._closing and not self._draining)
                )
            )

    def _take_masks(self) -> None:
        """Assigns masks to requests. Ends requests whose text is complete or whose mask failed."""
        if not self._masks.pending:
            return
        with self._news:
            self._news.wait_for(lambda: self._masks.all_ready, MASK_WAIT_S)
        for progress, mask, error in self._masks.take():
            progress.mask = mask
            if mask is None and self._scheduler.remove(progress):
                finish = FinishReason.CANCELLED if error else FinishReason.STOP
                self._tell(Event(progress.request.id, finish=finish, error=error))

    def _do(self, step: Step) -> None:
        """Launches a step and passes its tokens to listeners as they arrive. The last ones are
        passed on after the next launch, so that the device does not wait for listeners.
        """
        launched = self._rows.start(step)
        try:
            self._tell_all()
            self._follow(step, launched)
            done, tokens = launched.end()
        except BaseException:
            launched.stop()
            raise
        self._take(step, tokens)
        self._scheduler.end(step, done)
        self._iterations += done.iterations
        if self._scheduler.idle:
            self._tell_all()

    def _follow(self, step: Step, launched: Launched) -> None:
        """Reports tokens until the kernel ends. Ends it early if the scheduler prefers that."""
        self._pace.begin()
        while launched.running():
            tokens = launched.read()
            if tokens:
                self._pace.saw(max(len(new) for _, new in tokens))
                if self._take(step, tokens) and (self._arrived or self._scheduler.leaves(step)):
                    self._rows.leave()
                self._tell_all()
            if launched.complete:
                return  # the caller waits for the kernel, which ends soon
            self._pace.pause()

    def _take(self, step: Step, tokens: Sequence[tuple[int, Sequence[int]]]) -> bool:
        """Records the tokens that rows have sampled. Returns True if a request has ended."""
        ended = False
        for row, new in tokens:
            outcome = self._scheduler.take(step, row, new)
            if outcome is not None:
                self._generated += len(outcome.tokens)
                ended = ended or outcome.finish is not None
                self._untold.append(self._event(step, outcome))
                if outcome.progress.guide is not None and outcome.finish is None:
                    self._masks.ask(outcome.progress, outcome.tokens)
        return ended

    def _event(self, step: Step, outcome: Outcome) -> Event:
        """The event for a request's listener: new tokens, and log probabilities if requested."""
        progress, tokens = outcome.progress, outcome.tokens
        request = progress.request
        asked = request.sampling.logprobs
        if asked is None:
            return Event(request.id, tokens, finish=outcome.finish)
        row, first = step.rows.index(progress), len(progress.tokens) - len(tokens)
        reported = self._rows.logprobs(row, first, len(tokens), asked)
        own, best = tuple(o for o, _ in reported), tuple(b for _, b in reported)
        return Event(request.id, tokens, own, best, outcome.finish)

    def _hear(self) -> bool:
        """Takes the messages of other threads, and waits if there is no work. Returns False if the
        engine must end.
        """
        with self._news:
            while True:
                self._rows.stay()  # a message from here on ends the next launch early
                while self._arrived:
                    request = self._arrived.popleft()
                    self._prompt_tokens += len(request.prompt)
                    progress = self._scheduler.add(request, self._model.adapter(request.adapter))
                    if progress.guide is not None:
                        self._masks.ask(progress)
                cancelled = self._cancelled
                if self._closing and not self._draining:
                    cancelled = set(self._listeners)
                self._cancelled = set()
                if cancelled or not self._scheduler.idle or self._closing:
                    break
                self._news.wait()
        for request_id in cancelled:
            if self._scheduler.cancel(request_id):
                self._tell(Event(request_id, finish=FinishReason.CANCELLED))
        return not (self._closing and self._scheduler.idle)

    def _tell(self, event: Event) -> None:
        """Queues an event for a request's listener, which `_tell_all` passes on."""
        self._untold.append(event)
        self._tell_all()

    def _tell_all(self) -> None:
        """Passes events to the listeners of their requests. If a listener raises an error, only its
        own request is cancelled.
        """
        events, self._untold = self._untold, []
        for event in events:
            with self._news:
                listener = self._listeners.get(event.id)
                if event.finish is not None:
                    self._listeners.pop(event.id, None)
            if listener is None:
                continue
            try:
                listener(event)
            except Exception as error:
                log.warn(
                    f"the listener of request {event.id!r} raised {error!r}; the request is "
                    "cancelled"
                )
                self.cancel(event.id)
        self._stats = self._count()

    def _fail(self, error: BaseException) -> None:
        """Ends every request with the error. Later requests are refused with it."""
        reason = str(error) if isinstance(error, BaseError) else repr(error)
        with self._news:
            self._failure = f"the engine has failed and must be opened again: {reason}"
            self._arrived.clear()
        for request_id in list(self._listeners):
            self._scheduler.cancel(request_id)
            self._tell(Event(request_id, finish=FinishReason.ERROR, error=self._failure))
        self._stats = self._count()
        self.on_failure(self._failure)

    def _count(self) -> Stats:
        counts = (self._prompt_tokens, self._generated, self._iterations)
        return self._scheduler.stats(*counts, self._rows.launches)
