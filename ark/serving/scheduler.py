"""The scheduler of an engine. It decides which requests run in the next step (launch), in which
rows of the batch and on which pages of the KV cache, and when the device ends a step early. It is a
state machine without a device, threads or a clock: the same calls in the same order give the same
steps. Called by ark.serving.engine.

A step is one launch. While it runs, `take` receives the tokens that rows have sampled so far. The
pages of a request do not change until `end`, because the device writes to them until then.

A request waits until a slot is free and there are pages for its text. Then it is admitted: its
prompt is computed in chunks (or token by token in a row), and it decodes in a row. Busy rows are
always the first ones, so that few requests can use a decoding phase with few rows (a form). When
pages run out, the request that was admitted last is preempted: its pages are taken away, and its
keys and values are computed again later. Its text is kept, so no token is lost or reported twice.

A request may use free rows to verify a draft of its next tokens (speculative decoding). Each of
these rows samples the token after one draft token. The sampled tokens are accepted up to and
including the one after the last correct draft token. The noise of sampling depends only on the seed
and the position, so the text is the same as without drafts.

A request with a grammar needs a mask of the tokens that may come next. While the host computes the
mask, the request has no row. In a step, its row samples one token and then waits while other rows
continue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ark.serving.drafts import right_tokens, shortened
from ark.serving.pages import PagePool, page_name
from ark.serving.progress import Chunks, Done, Outcome, Progress, Propose, Step, lookup, may_draft
from ark.serving.types import FinishReason, LaunchRecord, Request, Stats


def forms_of(slots: int) -> tuple[int, ...]:
    """The numbers of rows for which a plan has a decoding phase: powers of two below `slots`, and
    `slots`.
    """
    return (*(1 << n for n in range((slots - 1).bit_length())), slots)


class Scheduler:
    """The state of all requests of an engine.

    slots: the number of requests that run at once. chunk: the tokens of a chunk; 0 if prompts are
    read token by token in the rows of the batch. context: the most positions of a request; the pool
    has pages for at least one such request. draft: the most tokens of a draft. propose: the
    function that returns drafts.
    """

    def __init__(
        self,
        slots: int,
        chunk: int,
        context: int,
        pool: PagePool,
        draft: int = 0,
        propose: Propose = lookup,
    ) -> None:
        assert pool.count * pool.size >= context
        self.slots, self.chunk, self.context, self.pool = slots, chunk, context, pool
        self.draft, self.propose = draft, propose
        self.forms = forms_of(slots)
        self.drafted_tokens = self.accepted_tokens = 0
        self.waiting: deque[Progress] = deque()
        self.running: list[Progress] = []  # in order of admission
        self.rows: list[Progress] = []
        self.cached_tokens = 0
        self.preemptions = 0

    @property
    def idle(self) -> bool:
        """True if no request waits or runs."""
        return not self.waiting and not self.running

    def stats(
        self,
        prompt_tokens: int,
        generated_tokens: int,
        iterations: int,
        launches: tuple[LaunchRecord, ...] = (),
    ) -> Stats:
        """The state between two steps. The arguments are the engine's counts and launches."""
        ids = [progress.request.id for progress in self.running if progress.finish is None]
        return Stats(
            slots=self.slots,
            running=len(ids),
            waiting=len(self.waiting),
            pages=self.pool.count,
            free_pages=self.pool.available,
            prompt_tokens=prompt_tokens,
            cached_prompt_tokens=self.cached_tokens,
            generated_tokens=generated_tokens,
            iterations=iterations,
            preemptions=self.preemptions,
            slot_ids=(*ids, *[""] * (self.slots - len(ids))),
            launches=launches,
        )

    def add(self, request: Request, adapter: int = 0) -> Progress:
        """Adds a request to those that wait; its prompt must be shorter than the context. adapter:
        the number of its adapter, 0 for none.
        """
        most = request.sampling.max_tokens
        total = self.context if most is None else min(self.context, len(request.prompt) + most)
        guide = None if request.grammar is None else request.grammar.begin()
        progress = Progress(request, list(request.prompt), total, adapter, guide=guide)
        self.waiting.append(progress)
        return progress

    def form(self, rows: int) -> int:
        """The batch size of the smallest decoding phase that has at least `rows` rows."""
        return next(n for n in self.forms if n >= rows)

    def cancel(self, request_id: str) -> bool:
        """Removes a request from the queue or from its row. Returns False if no request has that
        id. Called between two steps.
        """
        for progress in (*self.waiting, *self.running):
            if progress.request.id == request_id:
                return self.remove(progress)
        return False

    def remove(self, progress: Progress) -> bool:
        """Removes a request from the queue or from its row. Returns False if it has already
        ended.
        """
        if progress in self.waiting:
            self.waiting.remove(progress)
        elif progress in self.running:
            self._give_back(progress)
        else:
            return False
        return True

    def plan(self, iterations: int = 1) -> Step:
        """Returns the next step. In the step, rows decode for at most `iterations` iterations, or
        for a single one while a prompt is not computed completely. `end` must be called after the
        step.
        """
        self._admit()
        for progress in list(self.running):
            if progress in self.running and progress.computed == progress.last:
                self._grow(progress)
        chunks = self._chunks()
        computed = [p for p in self.running if not self.chunk or p.computed == p.last]
        ready = [p for p in computed if p.masked]
        self._place(ready)
        drafts = self._draft()
        few = min(iterations, self.draft + 1) if self.draft else iterations  # then draft again
        prompts = self.chunk and any(p.computed < p.last for p in self.running)
        count = self._iterations(1 if prompts or any(drafts) else few)
        return Step(chunks, tuple(self.rows), count, drafts)

    def take(self, step: Step, row: int, tokens: Sequence[int]) -> Outcome | None:
        """Records the new tokens of a row. If other rows verified a draft for it, their tokens
        follow the row's own. Returns the tokens that the row's request accepts, or None if the
        request had already ended.
        """
        progress, draft = step.rows[row], step.drafts[row] if step.drafts else ()
        if progress.finish is not None:
            return None
        given = self._right(progress, tokens, draft) if draft else tokens
        accepted, progress.finish = self._accept(progress, given)
        progress.tokens += accepted
        progress.computed = progress.last  # the row has read all tokens except the newest
        return Outcome(progress, tuple(accepted), progress.finish)

    def leaves(self, step: Step) -> bool:
        """True if the device should end the step now because requests in it have ended, and either
        other requests wait, no row is left, or the remaining rows fit in a smaller decoding phase.
        """
        left = sum(progress.finish is None for progress in step.rows)
        if left == len(step.rows):
            return False
        return bool(self.waiting) or not left or self.form(left) < self.form(len(step.rows))

    def end(self, step: Step, done: Done) -> None:
        """Ends a step, after all its tokens were taken. done: the part that the device has done.
        The slots and pages of requests that have ended become free, and so do pages that other
        requests got in advance and did not use.
        """
        for progress in step.rows:
            progress.computed = min(progress.computed + done.iterations, progress.last)
        prompt = () if step.chunks is None else (step.chunks.progress,)
        if step.chunks is not None and done.chunks < step.chunks.count:
            step.chunks.progress.computed = step.chunks.start + done.chunks * self.chunk
        for progress in dict.fromkeys((*step.rows, *prompt)):
            self._publish(progress)
            if progress.finish is not None:
                self._give_back(progress)
            else:
                used = -(-len(progress.tokens) // self.pool.size)
                self.pool.release(progress.pages[used:])
                del progress.pages[used:]

    def _right(
        self, progress: Progress, tokens: Sequence[int], draft: Sequence[int]
    ) -> Sequence[int]:
        """The valid tokens among those that a step with a draft has sampled: the tokens that equal
        the draft's first tokens, up to the first difference, and the next one. tokens: the tokens
        that were sampled by the request's row and by the rows that verified the draft.
        """
        right = right_tokens(draft, tokens)
        progress.drafts.learn(right)
        self.drafted_tokens += len(draft)
        self.accepted_tokens += right
        return tokens[: right + 1]

    def _accept(
        self, progress: Progress, tokens: Sequence[int]
    ) -> tuple[list[int], FinishReason | None]:
        """The tokens up to the request's end, and the reason if the request ends with them,
        otherwise None.
        """
        accepted: list[int] = []
        for token in tokens:
            accepted.append(token)
            if token in progress.request.stop_token_ids:
                return accepted, FinishReason.STOP
            if len(progress.tokens) + len(accepted) >= progress.total:
                return accepted, FinishReason.LENGTH
        return accepted, None

    def _admit(self) -> None:
        """Admits waiting requests in order, as long as a slot is free and there are pages for the
        whole text of the next request. One free page is left for each running request, so that an
        admitted request is not preempted soon after.
        """
        size = self.pool.size
        while self.waiting and len(self.running) < self.slots:
            progress = self.waiting[0]
            pages, names = self.pool.match(progress.tokens[: progress.last], [], progress.root)
            more = -(-len(progress.tokens) // size) - len(pages)
            if more + len(self.running) > self.pool.available:
                self.pool.release(pages)
                return
            self.waiting.popleft()
            progress.pages, progress.names = pages, names
            for _ in range(more):
                self._take(progress)
            progress.computed = len(names) * size
            progress.admissions += 1
            self.cached_tokens += progress.computed
            self.running.append(progress)

    def _share(self, progress: Progress) -> None:
        """Replaces pages of a request by equal pages of another request that has the same prefix
        and has computed them since this request was admitted. The replaced pages become free.
        """
        if progress.computed != len(progress.names) * self.pool.size:
            return
        text = progress.tokens[: progress.last]
        pages, names = self.pool.match(text, progress.names, progress.root)
        first = len(progress.names)
        self.pool.release(progress.pages[first : first + len(pages)])
        progress.pages[first : first + len(pages)] = pages
        progress.names += names
        progress.computed += len(names) * self.pool.size
        self.cached_tokens += len(names) * self.pool.size

    def _take(self, progress: Progress) -> bool:
        page = self.pool.take()
        if page is None:
            return False
        progress.pages.append(page)
        return True

    def _grow(self, progress: Progress) -> None:
        """Allocates the page for a request's last token. If no page is available, the requests that
        were admitted last are preempted: their pages become free, and they wait. If necessary, this
        request is preempted, too.
        """
        while len(progress.pages) * self.pool.size <= progress.last and not self._take(progress):
            youngest = self.running[-1]
            self._give_back(youngest)
            self.waiting.appendleft(youngest)
            self.preemptions += 1
            if youngest is progress:
                return

    def _give_back(self, progress: Progress) -> None:
        self.running.remove(progress)
        self.pool.release(progress.pages)
        progress.pages, progress.names, progress.computed = [], [], 0

    def _chunks(self) -> Chunks | None:
        """Chunks of the first text whose prompt is not computed yet: a single chunk if other
        requests decode, otherwise all. None if all prompts are computed or rows read prompts.
        """
        if not self.chunk:
            return None
        for progress in self.running:
            self._share(progress)
        left = [p for p in self.running if p.computed < p.last]
        if not left:
            return None
        progress, start = left[0], left[0].computed
        count = 1 if len(left) < len(self.running) else -(-(progress.last - start) // self.chunk)
        progress.computed = min(start + count * self.chunk, progress.last)
        return Chunks(progress, start, count)

    def _place(self, ready: Sequence[Progress]) -> None:
        """Assigns the first rows to the requests that are ready. A request keeps its row if
        possible.
        """
        rows: list[Progress | None] = [p if p in ready else None for p in self.rows]
        fresh = deque(p for p in ready if p not in self.rows)
        for number, progress in enumerate(rows):
            if progress is None and fresh:
                rows[number] = fresh.popleft()
        placed: list[Progress | None] = [*rows, *fresh]
        for number in range(len(ready)):
            while len(placed) > len(ready) and placed[-1] is None:
                placed.pop()
            if placed[number] is None:
                placed[number] = placed.pop()
        self.rows = [p for p in placed[: len(ready)] if p is not None]

    def _draft(self) -> tuple[tuple[int, ...], ...]:
        """Returns, for each row, the draft tokens that free rows verify for its request. The number
        of busy rows and draft tokens is at most `slots`. Each position of a draft token has a page.
        """
        room = self.slots - len(self.rows) if self.draft else 0
        may = [p for p in self.rows if p.computed == p.last and p.room > 0 and may_draft(p)]
        asked = may if room else []
        proposals = shortened(self.propose(asked, min(self.draft, room)), room)
        proposed = dict(zip(asked, proposals, strict=True))
        drafts: list[tuple[int, ...]] = []
        for progress in self.rows:
            draft = proposed.get(progress, ())[: max(0, progress.room)]
            self._take_ahead(progress, len(progress.tokens) + len(draft))
            drafts.append(draft[: len(progress.pages) * self.pool.size - len(progress.tokens)])
        return tuple(drafts)

    def _iterations(self, most: int) -> int:
        """Returns the number of iterations of the next step, at most `most`, and allocates the
        pages that each row needs for them. The step ends when min_tokens no longer applies to a
        request. While requests wait, it also ends when the first running request reaches its total
        number of tokens. A row whose request has a mask stops after one token, while other rows
        continue.
        """
        if not self.rows:
            return 0
        ends = [p.total - p.computed - 1 for p in self.rows if self.waiting]
        early = [p.request.sampling.min_tokens - p.new for p in self.rows]
        most = min((most, *ends, *(n for n in early if n > 0)))
        count = min(most, max(p.most - p.computed - 1 for p in self.rows))
        while count > 1 and not self._fits(count):
            count = (count + 1) // 2
        for progress in self.rows:
            self._take_ahead(progress, min(progress.most - 1, progress.computed + count))
        return count

    def _fits(self, iterations: int) -> bool:
        """True if the pool has enough pages for `iterations` further iterations of all rows. Pages
        that are kept for later requests with the same prefix are counted only if `iterations` is at
        most the size of a page. For a longer launch they are not given up, because the launch may
        end before it needs them.
        """
        size, need = self.pool.size, 0
        for progress in self.rows:
            end = min(progress.most - 1, progress.computed + iterations)
            need += max(0, -(-end // size) - len(progress.pages))
        return need <= (self.pool.available if iterations <= size else self.pool.free)

    def _take_ahead(self, progress: Progress, end: int) -> None:
        """Allocates pages for a request's positions up to `end`, as long as pages are available."""
        while len(progress.pages) * self.pool.size < end and self._take(progress):
            pass

    def _publish(self, progress: Progress) -> None:
        """Gives a name (a hash of the text so far) to each page that a request has filled, so that
        other requests can share it.
        """
        size = self.pool.size
        for number in range(len(progress.names), progress.computed // size):
            before = progress.names[-1] if progress.names else progress.root
            name = page_name(before, progress.tokens[number * size : (number + 1) * size])
            progress.names.append(name)
            self.pool.publish(progress.pages[number], name)
