"""The scheduler's decisions without a device. For random schedules each request's text equals that
of its solo run, no page is lost or shared wrongly, and all requests end.
"""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from ark.models.sampling import SamplingParams
from ark.serving.pages import PagePool
from ark.serving.progress import Done, Outcome, Progress, Propose, Step, lookup
from ark.serving.scheduler import Scheduler
from ark.serving.types import FinishReason, Request
from tests.serving.model_device import (
    VOCABULARY_TOKENS,
    ModelDevice,
    chained,
    finish,
    next_token,
    solo,
)
from tests.slow import SLOW

MAX_POSITIONS = 24
TOKEN = st.integers(0, VOCABULARY_TOKENS - 1)


MASK = np.ones(VOCABULARY_TOKENS, bool)


class AnyText:
    """A grammar that accepts all texts."""

    def begin(self) -> AnyText:
        return self

    def advance(self, tokens: Sequence[int]) -> np.ndarray | None:
        return MASK


def mostly_right(texts: Sequence[Progress], most: int) -> list[tuple[int, ...]]:
    """Replaces a draft model in schedules on ModelDevice. Its proposals are right except for every
    fourth position.
    """
    drafts = []
    for text in texts:
        tokens = list(text.tokens)
        for _ in range(most - text.drafts.paused()):
            chain = chained(tokens, text.adapter)[-1]
            tokens.append((next_token(chain) + (chain % 4 == 0)) % VOCABULARY_TOKENS)
        drafts.append(tuple(tokens[len(text.tokens) :]))
    return drafts


class Schedules(RuleBasedStateMachine):
    """A hypothesis state machine: requests arrive, are cancelled, get their grammar masks, and
    steps run, in any order.
    """

    @initialize(
        slots=st.integers(1, 5),
        chunk=st.sampled_from([0, 1, 3, 4, 16]),
        size=st.sampled_from([1, 3, 4, 8]),
        spare=st.integers(0, 12),
        share=st.booleans(),
        draft=st.sampled_from([0, 1, 3]),
        propose=st.sampled_from([lookup, mostly_right]),
    )
    def open(
        self,
        slots: int,
        chunk: int,
        size: int,
        spare: int,
        share: bool,
        draft: int,
        propose: Propose,
    ) -> None:
        self.pool = PagePool(7, -(-MAX_POSITIONS // size) + spare, size, share)
        self.scheduler = Scheduler(slots, chunk, MAX_POSITIONS, self.pool, draft, propose)
        self.device = ModelDevice(chunk, size)
        self.requests: dict[str, Request] = {}
        self.texts: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}

    @rule(
        beginning=st.sampled_from([(), (1, 2, 3, 4, 0, 1, 2, 3), (1, 2, 3, 4, 4, 4, 4, 4, 4)]),
        rest=st.lists(TOKEN, min_size=1, max_size=12),
        most=st.one_of(st.none(), st.integers(1, 12)),
        stops=st.frozensets(TOKEN, max_size=1),
        grammar=st.sampled_from([None, None, AnyText()]),
        adapter=st.sampled_from([0, 0, 1, 2]),
    )
    def add(
        self,
        beginning: tuple[int, ...],
        rest: list[int],
        most: int | None,
        stops: frozenset[int],
        grammar: AnyText | None,
        adapter: int,
    ) -> None:
        number = str(len(self.requests))
        sampling = SamplingParams(max_tokens=most)
        prompt = (*beginning, *rest)
        request = Request(number, prompt, sampling, stops, grammar, str(adapter or ""))
        self.requests[number], self.texts[number] = request, []
        self.scheduler.add(request, adapter)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(list(self.requests)))
        assert self.scheduler.cancel(number) == (number not in self.ends)
        self.ends.setdefault(number, FinishReason.CANCELLED)

    @precondition(lambda self: not self.scheduler.idle)
    @rule(iterations=st.integers(1, 40), data=st.data())
    def step(self, iterations: int, data: st.DataObject) -> None:
        """Runs a launch that ends after any of its iterations. Its tokens are passed to the
        scheduler in portions of any size.
        """
        scheduler = self.scheduler
        step = scheduler.plan(iterations)
        if not step.rows and not step.chunks:
            assert scheduler.running and all(self._waits(p) for p in scheduler.running)
            return
        assert not any(map(self._waits, step.rows))
        assert all(p.new_tokens(step.iterations, self.pool.size) <= 1 for p in step.rows if p.guide)
        assert (step.iterations > 0) == bool(step.rows) and step.iterations <= iterations
        assert set(step.rows) <= set(scheduler.running)
        assert len(step.rows) + sum(map(len, step.drafts)) <= scheduler.slots
        for progress in step.rows:  # no row waits for a page
            needed = min(progress.most, progress.computed + step.iterations + 1)
            assert progress.end(self.pool.size) >= needed
        count = data.draw(st.integers(1, step.chunk_count + step.iterations))
        chunks = min(count, step.chunk_count)
        done = Done(chunks, count - chunks)
        whole = any(step.drafts)
        left = self.device.run(step, done)
        while any(left):
            row = data.draw(st.sampled_from([row for row, tokens in enumerate(left) if tokens]))
            many = len(left[row]) if whole else data.draw(st.integers(1, len(left[row])))
            tokens, left[row] = left[row][:many], left[row][many:]
            outcome = scheduler.take(step, row, tokens)
            if outcome is not None:
                self._hear(outcome)
                outcome.progress.mask = None
            self.pages_are_held(step)
        scheduler.end(step, done)
        for progress in scheduler.running:  # none has pages in advance between two steps
            assert len(progress.pages) <= -(-len(progress.tokens) // self.pool.size)

    def pages_are_held(self, step: Step) -> None:
        """Pages of rows whose requests have ended are not reused before the step has ended, because
        the device writes to them until then.
        """
        assert set(step.rows) <= set(self.scheduler.running)
        assert all(progress.pages for progress in step.rows)

    def _waits(self, progress: Progress) -> bool:
        return progress.guide is not None and progress.mask is None

    @precondition(lambda self: any(map(self._waits, self.scheduler.running)))
    @rule(data=st.data())
    def mask(self, data: st.DataObject) -> None:
        waiting = [p for p in self.scheduler.running if self._waits(p)]
        data.draw(st.sampled_from(waiting)).mask = MASK

    def _hear(self, outcome: Outcome) -> None:
        number = outcome.progress.request.id
        assert number not in self.ends and (outcome.tokens or outcome.finish)
        self.texts[number] += outcome.tokens
        if outcome.finish is not None:
            self.ends[number] = outcome.finish

    @invariant()
    def pages_add_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.pool.check([progress.pages for progress in self.scheduler.running])
        assert all(not progress.pages for progress in self.scheduler.waiting)

    @invariant()
    def requests_are_served_in_order(self) -> None:
        """Invariant: requests are served in order, so waiting requests arrived after all running
        ones.
        """
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        assert len(scheduler.running) <= scheduler.slots
        order = [int(p.request.id) for p in (*scheduler.running, *scheduler.waiting)]
        assert order == sorted(order)

    @invariant()
    def texts_are_those_of_solo_runs(self) -> None:
        for number, text in getattr(self, "texts", {}).items():
            wanted, reason = solo(self.requests[number], MAX_POSITIONS)
            assert text == wanted[: len(text)]
            end = self.ends.get(number)
            assert end in (None, FinishReason.CANCELLED) or (text, end) == (wanted, reason)

    def teardown(self) -> None:
        """Drains a schedule: all remaining requests end within as many steps as their tokens could
        need.
        """
        if not hasattr(self, "scheduler"):
            return
        steps = 0
        while not self.scheduler.idle:
            for progress in (*self.scheduler.running, *self.scheduler.waiting):
                progress.mask = MASK
            step = self.scheduler.plan(1)
            for outcome in finish(self.scheduler, step, self.device):
                self._hear(outcome)
            self.pages_add_up()
            steps += 1
            assert steps <= 2 * MAX_POSITIONS * len(self.requests), "requests do not end"
        self.texts_are_those_of_solo_runs()
        assert set(self.ends) == set(self.requests)
        assert self.pool.available == self.pool.count


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=10_000 if SLOW else 80, stateful_step_count=30, deadline=None
)


def test_cached_prompt_computes_its_last_token_again() -> None:
    """If all pages of a prompt are cached, its last token is nevertheless computed again, because
    the next token is computed from it.
    """
    pool = PagePool(0, 8, 4)
    scheduler, device = Scheduler(2, 4, MAX_POSITIONS, pool), ModelDevice(4, 4)
    for number in ("0", "1"):
        request = Request(number, (1, 2, 3, 4) * 2, SamplingParams(max_tokens=2))
        scheduler.add(request)
        text: list[int] = []
        while not scheduler.idle:
            step = scheduler.plan()
            for outcome in finish(scheduler, step, device):
                text += outcome.tokens
        assert (text, FinishReason.LENGTH) == solo(request, MAX_POSITIONS)
    assert scheduler.cached_tokens == 4


def test_step_ends_where_a_request_may_stop_first() -> None:
    """A step ends no later than with the first token that may be a stop token, here the fifth
    because of min_tokens.
    """
    pool = PagePool(0, 8, 4)
    scheduler, device = Scheduler(2, 4, MAX_POSITIONS, pool, draft=1), ModelDevice(4, 4)
    scheduler.add(Request("0", (1, 1, 1, 1), SamplingParams(min_tokens=5, max_tokens=12)))
    new = 0
    while new < 5:
        step = scheduler.plan(64)
        assert new + step.iterations <= 5 and not any(step.drafts)
        new += sum(len(outcome.tokens) for outcome in finish(scheduler, step, device))


def test_requests_that_arrive_together_compute_their_beginning_once() -> None:
    pool = PagePool(0, 40, 4)
    scheduler, device = Scheduler(4, 4, MAX_POSITIONS, pool), ModelDevice(4, 4)
    for number in range(4):
        scheduler.add(Request(str(number), (1, 2, 3, 4, 0, 1, 2, 3, number), SamplingParams()))
    while not scheduler.idle:
        step = scheduler.plan()
        finish(scheduler, step, device)
    assert scheduler.cached_tokens == 3 * 8


def test_launch_has_pages_for_all_of_its_iterations() -> None:
    """A launch has at most as many iterations as every row has pages for. Here either of two rows
    could take all free pages.
    """
    scheduler = Scheduler(2, 0, MAX_POSITIONS, PagePool(0, MAX_POSITIONS, 1))
    for number in range(2):
        scheduler.add(Request(str(number), (1, 2, 3), SamplingParams(max_tokens=None)))
    step = scheduler.plan(40)
    assert step.iterations > MAX_POSITIONS // 4
    assert all(p.end(1) > p.computed + step.iterations for p in step.rows)


def test_launch_is_ended_early_only_if_it_helps() -> None:
    """If one of four rows ends, the launch continues; it is ended early only if a request waits for
    the slot.
    """
    for waits in (False, True):
        pool = PagePool(0, 200, 4)
        scheduler = Scheduler(4, 0, MAX_POSITIONS, pool)
        for number in range(4 + waits):
            scheduler.add(Request(str(number), (1,), SamplingParams(max_tokens=1 + (number > 0))))
        step = scheduler.plan(40)
        assert not scheduler.leaves(step)
        outcome = scheduler.take(step, 0, [1])
        assert outcome is not None and outcome.finish == FinishReason.LENGTH
        assert scheduler.leaves(step) == waits
        for row in range(1, 4):
            scheduler.take(step, row, [1, 1])
        assert scheduler.leaves(step)


def test_row_with_a_mask_stops_alone() -> None:
    """In a launch, a row with a mask generates only the one token for which it has a mask; the
    other row continues.
    """
    pool = PagePool(0, 8, 8)
    scheduler, device = Scheduler(2, 0, MAX_POSITIONS, pool), ModelDevice(0, 8)
    free = scheduler.add(Request("0", (1, 2), SamplingParams(max_tokens=20)))
    masked = scheduler.add(Request("1", (3,), SamplingParams(max_tokens=20), grammar=AnyText()))
    masked.mask = MASK
    step = scheduler.plan(12)
    assert step.iterations == 12 and [p.new_tokens(12, 8) for p in step.rows] == [11, 1]
    finish(scheduler, step, device)
    assert (free.new, masked.new) == (11, 1)
    masked.mask = None
    assert scheduler.plan(12).rows == (free,)
