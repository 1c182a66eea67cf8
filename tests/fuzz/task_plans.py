"""Mutated plans in ARK's layout. Some are of one rank, for the model of the unmutated plan. Others
are of one of two ranks, whose peer has an unmutated plan. If the sanitizer is loaded, accepted
plans of one rank are also run.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from typing import Any, TypeVar, cast

import ark
from ark.backend import registry
from ark.errors import BaseError
from ark.plan.types import Plan
from ark.runtime.admission import admit
from ark.runtime.run import Ranks
from tests.fuzz import WrongResultError, mutate
from tests.fuzz.execute import compare, sanitized
from tests.task_plans import (
    COLUMNS,
    OUT,
    ROWS,
    fused_sum,
    norm_and_product,
    packet_ring,
    packet_sum,
    ring,
)

_T = TypeVar("_T")


def task_plan(rng: random.Random, keep: Callable[[str], None]) -> bool | str:
    """The target: a mutated plan in ARK's layout."""
    form = rng.choice((None, None, ring, packet_ring, packet_sum, fused_sum))
    base = form(rng.randrange(2), 2) if form else norm_and_product()
    text = mutate.text_of(mutate.of_json(base, rng))
    keep(text)
    return run_task_plan(text)


def run_task_plan(text: str) -> bool | str:
    """Checks a plan, together with its peer's if it has one. Returns False if it is refused, True
    if it is accepted and not run, "executed" if it ran with the oracle's result, "ended alike" if
    both ended with the same error.
    """
    machine = registry.machine("cpu-2")
    rank = _rank_of_pair(text)
    ark.init()
    if rank is None:
        x, w = ark.tensor([1, ROWS, COLUMNS], ark.fp16), ark.tensor([COLUMNS, OUT])
        wide = ark.cast(x, ark.fp32)
        ark.matmul(ark.div(wide, ark.reduce_mean(ark.mul(wide, wide), axis=2)), w)
    else:
        pair = _Pair(rank, _form(text))
    try:
        plan = ark.Plan.from_str(text)
        task_plan = plan.built(machine, None if rank is None else pair.members).inner
        if task_plan is None:
            return False
        admit([task_plan] if rank is None else pair.plans(task_plan), machine)
    except BaseError:
        return False
    if rank is not None or not sanitized():
        return True
    comparison = compare(task_plan)
    if comparison.wrong:
        raise WrongResultError(comparison.wrong)
    return "executed" if comparison.ran else "ended alike"


def _rank_of_pair(text: str) -> int | None:
    try:
        data = json.loads(text)
        rank, world = data["Rank"], data["WorldSize"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return rank if type(rank) is int and rank in (0, 1) and world == 2 else None


def _form(text: str) -> Callable[[int, int], Any]:
    """Returns the function that builds the unmutated version of a plan, which is recognised by its
    task types.
    """
    if "RecvReduceSend" in text:
        return packet_sum
    if "Fused" in text:
        return fused_sum
    return packet_ring if "SendPacket" in text or "RecvPacket" in text else ring


class _HeardError(Exception):
    """Raised in the peer's planning after it has sent its messages, because no rank answers
    them.
    """


class _Pair:
    """The connection of one of two ranks. It answers like a peer whose plan is not mutated."""

    def __init__(self, rank: int, form: Callable[[int, int], Any]) -> None:
        self._rank = rank
        self._first_message: bytes | None = None
        if form is packet_sum:
            ark.sharding(ark.tensor([2 * 96]), 0, 96)
        for _ in range(8):  # tensors for all tensor numbers in the plan
            _ = ark.tensor([96], ark.fp16) if form is fused_sum else ark.tensor([3, 700])
        machine, plan = registry.machine("cpu-2"), ark.Plan(form(1 - rank, 2))
        with contextlib.suppress(_HeardError):
            plan.built(machine, self.members)
        self._other = plan.built(machine).inner

    def members(self, _: int) -> Ranks:
        return cast(Ranks, self)

    def all_gather(self, data: bytes) -> list[bytes]:
        if self._first_message is None:
            self._first_message = data
            raise _HeardError
        return self._in_order(data, self._first_message)

    def plans(self, plan: Plan) -> list[Plan]:
        assert self._other is not None
        return self._in_order(plan, self._other)

    def _in_order(self, mine: _T, other: _T) -> list[_T]:
        return [mine, other] if self._rank == 0 else [other, mine]
