"""The decisions of an engine: which requests run in its next step, in which rows, on which pages,
and when the device is to leave a step early. A plain state machine without a device, threads or a
clock: the same calls in the same order make the same steps. Called by ark.serving.engine.

A step is one launch. While it runs, `take` is given the tokens that rows have made so far; what a
request holds stays untouched until `end`, because the device writes to its pages until then.

A request waits, is admitted when a slot and pages for its text are free, has its prompt computed in
chunks (or token by token in a row), and decodes in a row. Rows that decode are the first ones, so
that a form of few rows serves few requests. When pages run out, the request that was admitted last
gives its pages back and is computed again later: its text stays, so that no token is lost or made
twice.

Where rows are free, a request may have more of them: these read a draft of its next tokens, and the
tokens that they make count as far as the draft was right. A row's noise depends on the seed and the
position alone, so that the text is the same as without drafts.

A request with a grammar has a mask of the tokens that may come next. While the host makes it, the
request has no row. Its row makes one token of a step and stays there, while the others go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ark.serving.drafts import right_tokens, shortened
from ark.serving.pages import PagePool, page_name
from ark.serving.progress import Chunks, Outcome, Progress, Propose, Step, lookup, may_draft
from ark.serving.types import FinishReason, Request, Stats


def forms_of(slots: int) -> tuple[int, ...]:
    """Numbers of rows with a decoding phase each: powers of two, and all slots."""
    return (*(1 << n for n in range((slots - 1).bit_length())), slots)


class Scheduler:
    """The state of all requests of an engine.

    slots: requests that run at once. chunk: tokens of a chunk, 0 where rows read prompts. context:
    positions of a request; the pool has pages for one of so many. draft: most tokens of a draft,
    which `propose` makes.
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
        """True where no request waits or runs."""
        return not self.waiting and not self.running

    def stats(self, prompt_tokens: int, generated_tokens: int, iterations: int) -> Stats:
        """The state between two steps, with the engine's counts."""
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
        )

    def add(self, request: Request, adapter: int = 0) -> Progress:
        """A request arrives; its prompt is shorter than the context. adapter: the number of its
        own, 0 for none.
        """
        most = request.sampling.max_tokens
        total = self.context if most is None else min(self.context, len(request.prompt) + most)
        guide = None if request.grammar is None else request.grammar.begin()
        progress = Progress(request, list(request.prompt), total, adapter, guide=guide)
        self.waiting.append(progress)
        return progress

    def form(self, rows: int) -> int:
        """The rows of the phase that computes so many."""
        return next(n for n in self.forms if n >= rows)

    def cancel(self, request_id: str) -> bool:
        """Removes a request between two steps, whether it waits or runs; False if there is none of
        that id.
        """
        for progress in (*self.waiting, *self.running):
            if progress.request.id == request_id:
                return self.remove(progress)
        return False

    def remove(self, progress: Progress) -> bool:
        """Removes a request, in whatever state; False if it has ended."""
        if progress in self.waiting:
            self.waiting.remove(progress)
        elif progress in self.running:
            self._give_back(progress)
        else:
            return False
        return True

    def plan(self, iterations: int = 1) -> Step:
        """The next step, in which rows decode at most so many iterations, one while prompts are
        left to compute. `end` must follow.
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
        """A row has made further tokens; those of the rows that read its draft are behind its own.
        What they are for its request, or None if it has ended before them.
        """
        progress, draft = step.rows[row], step.drafts[row] if step.drafts else ()
        if progress.finish is not None:
            return None
        given = self._right(progress, tokens, draft) if draft else tokens
        accepted, progress.finish = self._accept(progress, given)
        progress.tokens += accepted
        progress.computed = progress.last  # the row has read all tokens before the newest one
        return Outcome(progress, tuple(accepted), progress.finish)

    def leaves(self, step: Step) -> bool:
        """True where the device should leave the step, because requests have ended in it: others
        wait, or a smaller form has the rows that are left.
        """
        left = sum(progress.finish is None for progress in step.rows)
        if left == len(step.rows):
            return False
        return bool(self.waiting) or not left or self.form(left) < self.form(len(step.rows))

    def end(self, step: Step, iterations: int) -> None:
        """The device has left a step after so many iterations of its rows, and all tokens were
        taken. Requests that have ended give their slots and pages back, the others the pages that
        they were given ahead.
        """
        for progress in step.rows:
            progress.computed = min(progress.computed + iterations, progress.last)
        prompt = () if step.chunks is None else (step.chunks.progress,)
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
        """The tokens behind a right beginning of the draft."""
        right = right_tokens(draft, tokens)
        progress.drafts.learn(right)
        self.drafted_tokens += len(draft)
        self.accepted_tokens += right
        return tokens[: right + 1]

    def _accept(
        self, progress: Progress, tokens: Sequence[int]
    ) -> tuple[list[int], FinishReason | None]:
        """The tokens up to the request's end, and why it ends, if it does."""
        accepted: list[int] = []
        for token in tokens:
            accepted.append(token)
            if token in progress.request.stop_token_ids:
                return accepted, FinishReason.STOP
            if len(progress.tokens) + len(accepted) >= progress.total:
                return accepted, FinishReason.LENGTH
        return accepted, None

    def _admit(self) -> None:
        """Admits waiting requests in order, as long as there is a slot and pages for all of their
        text. A page is left for each that runs, so that none is admitted to be preempted at once.
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
        """Takes the pages that another request has filled with the same text since the admission,
        instead of its own.
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
        """Gives a request the page for its last token. Where there is none, those that were
        admitted last are preempted, in the end the request itself.
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
        """Chunks of the first text that is not computed: one where others decode, else all."""
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
        """Gives each a row, one of the first; those that have one keep it where they can."""
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
        """By row, a draft that further rows read: at most so many in all as there are slots. Each
        place that is read has a page.
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
        """How many iterations rows decode at most. Each is given the pages for all of them. While
        requests wait, none beyond the end of the first that is known to end; none beyond the first
        token from which on a request may stop. A row with a mask stays behind its next token while
        the others go on.
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
        """True if there are pages for so many iterations of all rows. Pages that are kept for later
        requests are given up for a page's iterations alone, since the device may leave before it
        needs them.
        """
        size, need = self.pool.size, 0
        for progress in self.rows:
            end = min(progress.most - 1, progress.computed + iterations)
            need += max(0, -(-end // size) - len(progress.pages))
        return need <= (self.pool.available if iterations <= size else self.pool.free)

    def _take_ahead(self, progress: Progress, end: int) -> None:
        """Pages for the places up to `end`, as far as some are free."""
        while len(progress.pages) * self.pool.size < end and self._take(progress):
            pass

    def _publish(self, progress: Progress) -> None:
        """Names the pages that a request has filled."""
        size = self.pool.size
        for number in range(len(progress.names), progress.computed // size):
            before = progress.names[-1] if progress.names else progress.root
            name = page_name(before, progress.tokens[number * size : (number + 1) * size])
            progress.names.append(name)
            self.pool.publish(progress.pages[number], name)
