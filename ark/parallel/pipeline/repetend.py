"""Finds the repeating core of a pipeline (repetend) with the shortest period at which micro-batches
can follow each other.

The core is a modulo schedule (as in software pipelining): block b of micro-batch m starts at (m +
q) * period + r with 0 <= r < period. Each block has its own q and r. Blocks of a device must not
overlap modulo the period, and whenever a block allocates memory, the memory held by all
micro-batches must fit. CP-SAT decides whether a period is possible. If it is, every longer period
is possible too, so bisection finds the least one. The result is proven optimal if the next shorter
period is impossible. The idea is that of Lin et al., "Tessel" (HPCA 2024), which enumerates q
instead.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ark.collective.packages import require
from ark.errors import PlanError
from ark.parallel.pipeline.placement import Placement

# Constraints that follow from the other constraints speed up the solver. They are added for at most
# this many pairs of dependent blocks on a device.
MOST_PAIRS = 200
LATENCY_EFFORT = 0.3  # CP-SAT's deterministic time, about seconds, for minimising the latency


@dataclass(frozen=True)
class Repetend:
    """A repeating core. starts: the start times of the blocks of micro-batch 0. bound: no shorter
    period than this is possible.
    """

    period: int
    bound: int
    starts: tuple[int, ...]


def distances(placement: Placement) -> list[list[int | None]]:
    """The element [a][b] is the least time from the start of block a to the start of block b. It is
    None if b does not depend on a.
    """
    count = len(placement.blocks)
    after: list[list[int]] = [[] for _ in range(count)]
    for a, b in placement.edges():
        after[a].append(b)
    least: list[list[int | None]] = [[None] * count for _ in range(count)]
    for a in reversed(placement.order()):
        least[a][a] = 0
        for b, end in itertools.product(after[a], range(count)):
            rest = least[b][end]
            if rest is not None:
                least[a][end] = max(least[a][end] or 0, placement.blocks[a].span + rest)
    return least


class _Model:
    """A CP-SAT model that decides whether a period is possible."""

    def __init__(
        self,
        placement: Placement,
        memory: Sequence[int],
        period: int,
        apart: list[list[int | None]],
    ) -> None:
        self.cp: Any = require("ortools.sat.python.cp_model", "parallel")
        self.placement, self.period, self.apart = placement, period, apart
        self.model = self.cp.CpModel()
        self.blocks = placement.blocks
        count = len(self.blocks)
        # An upper bound for the variables q (the number of periods by which a block is delayed). If
        # all blocks are sorted by q, there is always a best solution in which neighbours differ by
        # at most 2. So q is at most 2 per block.
        self.most = 2 * count
        self.r = [self.model.new_int_var(0, period - 1, "") for _ in self.blocks]
        self.q = [self.model.new_int_var(0, self.most, "") for _ in self.blocks]
        self.starts = [q * period + r for q, r in zip(self.q, self.r, strict=True)]
        self.before: dict[tuple[int, int], Any] = {}
        self.model.add(self.r[0] == 0)
        for a, b in placement.edges():
            self.model.add(self.starts[b] >= self.starts[a] + self.blocks[a].span)
        for device in range(placement.devices):
            self._device(placement.on(device), memory[device])
        self._residues()

    def _device(self, on: list[int], limit: int) -> None:
        """Adds the constraints of a device: its blocks do not overlap modulo the period, and memory
        suffices whenever a block that allocates memory starts.
        """
        intervals = [
            self.model.new_fixed_size_interval_var(self.r[i] + late, self.blocks[i].span, "")
            for i in on
            for late in (0, self.period)
        ]
        self.model.add_no_overlap(intervals)
        for i in (i for i in on if self.blocks[i].memory > 0):
            self.model.add(
                sum(
                    self.blocks[j].memory * (self.q[i] - self.q[j] + self._not_after(j, i))
                    for j in on
                    if self.blocks[j].memory
                )
                <= limit
            )

    def _not_after(self, j: int, i: int) -> Any:
        """A variable of the solver. It is 1 if block j starts no later than block i of the same
        device, both times taken modulo the period.
        """
        if i == j:
            return 1
        if (j, i) not in self.before:
            literal = self.model.new_bool_var("")
            self.before[j, i], self.before[i, j] = literal, literal.negated()
            for (first, second), when in (((j, i), literal), ((i, j), literal.negated())):
                gap = self.r[second] - self.r[first]
                self.model.add(gap >= self.blocks[first].span).only_enforce_if(when)
                room = self.period - self.blocks[second].span
                self.model.add(gap <= room).only_enforce_if(when)
        return self.before[j, i]

    def _residues(self) -> None:
        """Adds implied constraints on the distance (modulo the period) between two dependent blocks
        of a device.

        The distance leaves room for both blocks. If there are dependent blocks between the two, the
        distance is at least the sum of the distances from each block to the next. With these sums,
        the solver often decides at once whether the period is possible.
        """
        pairs: dict[tuple[int, int], Any] = {}
        ordered = [
            (i, j)
            for device in range(self.placement.devices)
            for i, j in itertools.permutations(self.placement.on(device), 2)
            if self.apart[i][j] is not None
        ]
        if len(set(ordered)) <= MOST_PAIRS:
            for i, j in dict.fromkeys(ordered):
                first, last = self.blocks[i].span, self.period - self.blocks[j].span
                times = [[k * self.period + n for n in (first, last)] for k in range(self.most)]
                domain = self.cp.Domain.from_intervals(times)
                pairs[i, j] = self.model.new_int_var_from_domain(domain, "")
                self.model.add(pairs[i, j] == self.starts[j] - self.starts[i])
        within = {
            outer: [
                inner
                for inner in pairs
                if inner != outer
                and self.apart[outer[0]][inner[0]] is not None
                and self.apart[inner[1]][outer[1]] is not None
            ]
            for outer in pairs
        }
        for outer, inners in within.items():
            hidden = {deeper for inner in inners for deeper in within[inner]}
            for inner in (pair for pair in inners if pair not in hidden):
                lead = (self.apart[outer[0]][inner[0]] or 0) + (self.apart[inner[1]][outer[1]] or 0)
                self.model.add(pairs[outer] >= pairs[inner] + lead)

    def solve(self, seconds: float, effort: float | None = None) -> tuple[str, list[int]]:
        """Runs the solver. Returns ("found", start times), or "impossible" or "unknown" with an
        empty list.
        """
        solver = self.cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.cp_model_presolve = False  # takes longer than it saves here
        solver.parameters.use_strong_propagation_in_disjunctive = True
        # Linear relaxations do not help the solver to decide whether a period is possible, but they
        # lead to short latencies.
        solver.parameters.linearization_level = 0 if effort is None else 2
        solver.parameters.random_seed = 1
        solver.parameters.max_time_in_seconds = max(seconds, 0.01)
        if effort is not None:
            solver.parameters.max_deterministic_time = effort
        status = solver.solve(self.model)
        if status in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return "found", [solver.value(start) for start in self.starts]
        return "impossible" if status == self.cp.INFEASIBLE else "unknown", []

    def shortest(self, known: Sequence[int], seconds: float) -> list[int]:
        """The start times with the lowest latency (of one micro-batch) that the search finds.
        known: the start times from which it begins.
        """
        ends = [s + b.span for s, b in zip(self.starts, self.blocks, strict=True)]
        latency = self.model.new_int_var(0, (self.most + 2) * self.period, "")
        for end in ends:
            self.model.add(latency >= end)
        for variable, start in zip(self.q, known, strict=True):
            self.model.add_hint(variable, start // self.period)
        for variable, start in zip(self.r, known, strict=True):
            self.model.add_hint(variable, start % self.period)
        self.model.minimize(latency)
        return self.solve(seconds, LATENCY_EFFORT)[1] or list(known)


def search(placement: Placement, memory: Sequence[int], seconds: float) -> Repetend:
    """The repetend with the least period. Of several, one with a low latency is returned.

    memory: the memory of each device. If `seconds` do not suffice for a proof, `bound` is less than
    `period`. Raises PlanError if a single micro-batch does not fit into memory.
    """
    end = time.monotonic() + seconds
    apart = distances(placement)
    bound = max(placement.load(device) for device in range(placement.devices))
    # The longest period that is considered is that of a schedule in which micro-batches do not
    # overlap.
    most = sum(block.span for block in placement.blocks)

    def ask(period: int, share: float = 1.0) -> tuple[str, list[int]]:
        return _Model(placement, memory, period, apart).solve((end - time.monotonic()) * share)

    period, starts = most, _one_by_one(placement, memory)
    if not starts:
        answer, starts = ask(most)
        if answer == "impossible":
            raise PlanError(
                f"no order of the blocks fits into memory of {_listed(memory)}: a single "
                "micro-batch needs more; give more memory, or blocks that need less"
            )
        if answer == "unknown":
            raise PlanError(
                f"no schedule was found within {seconds:g} s; allow more time or use fewer blocks"
            )
    low, step = bound, 1
    while low < period and time.monotonic() < end:
        # Periods close to the lower bound are tried first, because the shortest possible period is
        # usually among them.
        middle = min(low + step - 1, (low + period) // 2)
        answer, starts_at = ask(middle, 0.3)
        if answer == "found":
            period, starts, step = middle, starts_at, 1
        else:
            low, step = middle + 1, 2 * step
            bound = low if answer == "impossible" else bound
    model = _Model(placement, memory, period, apart)
    starts = model.shortest(starts, max(end - time.monotonic(), 1.0))
    first = min(starts)
    return Repetend(period, min(bound, period), tuple(start - first for start in starts))


def _one_by_one(placement: Placement, memory: Sequence[int]) -> list[int]:
    """Start times of blocks that run one by one, those that need the least memory first. Empty if
    they do not fit into memory.
    """
    before = [set(b.after) for b in placement.blocks]
    starts, held, now = [-1] * len(before), [0] * placement.devices, 0
    done: set[str] = set()
    while len(done) < len(before):
        ready = [i for i, s in enumerate(starts) if s < 0 and before[i] <= done]
        chosen = min(ready, key=lambda i: (placement.blocks[i].memory, i))
        block = placement.blocks[chosen]
        for device in block.devices:
            held[device] += block.memory
            if held[device] > memory[device]:
                return []
        starts[chosen] = now
        now += block.span
        done.add(block.name)
    return starts


def _listed(memory: Sequence[int]) -> str:
    return str(memory[0]) if len(set(memory)) == 1 else str(list(memory))
