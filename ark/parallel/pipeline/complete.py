"""Shortens the schedule of N micro-batches. The given schedule consists of a warm-up, copies of a
repeating core, and a cool-down. Such a schedule need not be the shortest one.

CP-SAT (a constraint solver) places all blocks again, starting from the known schedule. If there are
few micro-batches, the solver places all of them. If there are many, it places a smaller number.
Then a section of its schedule, one period long, is repeated for the other micro-batches. This is
possible because the state of the pipeline is the same before and after the section. Called by
ark.parallel.pipeline.schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ark.collective.packages import require
from ark.parallel.pipeline.placement import Placement
from ark.parallel.pipeline.unroll import Times, around, makespan_bound

MAX_PLACED_BLOCKS = 128  # blocks of all micro-batches that the solver places together
SOLVER_TIME = 1.0  # CP-SAT's deterministic time, about seconds, per call of `shorten`


def makespan(placement: Placement, times: Times) -> int:
    """The end time of the last block."""
    return max(start + placement.blocks[b].span for (_, b), start in times.items())


def fewer(placement: Placement, count: int) -> int:
    """The number of micro-batches that the solver places directly, at most `count`."""
    return min(count, MAX_PLACED_BLOCKS // len(placement.blocks))


def shorten(
    placement: Placement, memory: Sequence[int], times: Times, count: int
) -> tuple[Times, int]:
    """Returns the shortest schedule of `count` micro-batches that the solver finds, or `times` if
    it finds no shorter one, and a lower bound on the length of every schedule.

    The solver tries lengths in increasing order from the bound on, until its time is used.
    """
    bound = target = makespan_bound(placement, count)
    most, effort = makespan(placement, times), SOLVER_TIME
    while target < most and effort > 0:
        answer, placed, used = _decide(placement, memory, times, count, target, effort)
        effort -= used
        if placed:
            times, most = placed, makespan(placement, placed)
            target = bound
        elif answer == "impossible":
            bound = target = target + 1
        else:
            target += max(1, (most - target) // 2)
    return times, bound


def _decide(
    placement: Placement,
    memory: Sequence[int],
    known: Times,
    count: int,
    end: int,
    effort: float,
) -> tuple[str, Times, float]:
    """Lets the solver search for a schedule that ends by time `end`. Returns the answer ("found",
    "impossible" or "unknown"), the schedule, and the solver's time.
    """
    cp: Any = require("ortools.sat.python.cp_model", "parallel")
    model, blocks, edges = cp.CpModel(), placement.blocks, placement.edges()
    heads, tails = around(placement)
    starts = {
        (m, b): model.new_int_var(
            heads[b] + m * blocks[b].span,
            end - tails[b] - (count - m) * blocks[b].span,
            "",
        )
        for m, b in sorted(known)
    }
    for (m, b), start in starts.items():
        model.add_hint(start, known[m, b])
        before = [(m, a) for a, after in edges if after == b]
        for other in [*before, *([(m - 1, b)] if m else [])]:
            model.add(start >= starts[other] + blocks[other[1]].span)
    for device in range(placement.devices):
        on = [key for key in starts if device in blocks[key[1]].devices]
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(starts[k], blocks[k[1]].span, "") for k in on]
        )
        taking = [k for k in on if blocks[k[1]].memory]
        if taking:
            changes = [blocks[k[1]].memory for k in taking]
            least = -sum(map(abs, changes))
            when = [starts[k] for k in taking]
            model.add_reservoir_constraint(when, changes, least, memory[device])
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    solver.parameters.linearization_level = 0
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    used = max(float(solver.response_proto.deterministic_time), 1e-3)
    if status in (cp.OPTIMAL, cp.FEASIBLE):
        return "found", {key: int(solver.value(start)) for key, start in starts.items()}, used
    return ("impossible" if status == cp.INFEASIBLE else "unknown"), {}, used


def repeat(placement: Placement, times: Times, period: int, copies: int) -> Times | None:
    """Lengthens a schedule by `copies` periods. It searches for two times, one period apart, at
    which the pipeline is in the same state, except that one more micro-batch has been processed at
    the later time. The part of the schedule between the two times is repeated. Returns None if
    there are no such times.
    """
    blocks = placement.blocks
    for at in range(makespan(placement, times) - period):
        if _state(placement, times, at, 0) == _state(placement, times, at + period, 1):
            break
    else:
        return None
    longer: Times = {}
    for (m, b), start in times.items():
        if start < at + period:
            longer[m, b] = start
        else:
            longer[m + copies, b] = start + copies * period
        if at <= start < at + period:
            for copy in range(1, copies + 1):
                longer[m + copy, b] = start + copy * period
    return longer if len(longer) == len(times) + copies * len(blocks) else None


def _state(placement: Placement, times: Times, at: int, shift: int) -> list[tuple[int, ...]]:
    """The state of the pipeline at time `at`, with two entries for each block. One is the number of
    micro-batches that have started the block before this time, minus `shift`. The other is the time
    for which each unfinished run of the block has already run.
    """
    state = []
    for b, block in enumerate(placement.blocks):
        begun = [start for (_, other), start in times.items() if other == b and start < at]
        running = sorted(at - start for start in begun if start + block.span > at)
        state.append((len(begun) - shift, *running))
    return state
