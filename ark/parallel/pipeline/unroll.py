"""Makes the schedule of N micro-batches from a repeating core (repetend): warm-up, copies of the
core, cool-down.

Time is divided into windows of one period. A window in which all micro-batches of the core exist is
a copy of the core. The blocks in the windows before and after the copies are placed again by
CP-SAT, as close to the copies as possible. If there are too few micro-batches for one copy, all
blocks are placed again. Called by ark.parallel.pipeline.schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ark.collective.packages import require
from ark.parallel.pipeline.placement import Placement
from ark.parallel.pipeline.repetend import Repetend

# The time limit of the solver (CP-SAT's deterministic time, about seconds) for each of warm-up and
# cool-down.
SOLVER_TIME = 0.25
NEARBY_COPIES = 2  # copies of the core that are considered when blocks around it are placed

Times = dict[tuple[int, int], int]
"""Start times by (micro-batch, block)."""


def unroll(
    placement: Placement, memory: Sequence[int], core: Repetend, count: int
) -> tuple[Times, int]:
    """Returns the start times of all blocks of `count` micro-batches (the first is 0), and the
    number of periods before the first copy of the core (`count` if there is no copy).
    """
    blocks = range(len(placement.blocks))
    regular = {(m, b): m * core.period + core.starts[b] for m in range(count) for b in blocks}
    window = {key: start // core.period for key, start in regular.items()}
    ahead = max(start // core.period for start in core.starts)
    if count <= ahead:
        placed = _place(placement, memory, regular, set(regular), {}, early=True)
        return _from_zero(placed), count
    first, last = ahead * core.period, count * core.period
    warm = {k for k in regular if window[k] < ahead}
    seen = {k for k in regular if ahead <= window[k] < min(ahead + NEARBY_COPIES, count)}
    warm_up = _place(
        placement, memory, {k: regular[k] - first for k in warm | seen}, warm, {}, early=False
    )
    cool = {k for k in regular if window[k] >= count}
    seen = {k for k in regular if max(ahead, count - NEARBY_COPIES) <= window[k] < count}
    held: dict[int, int] = {}
    for key in regular.keys() - cool - seen:
        for device in placement.blocks[key[1]].devices:
            held[device] = held.get(device, 0) + placement.blocks[key[1]].memory
    cool_down = _place(
        placement, memory, {k: regular[k] - last for k in cool | seen}, cool, held, early=True
    )
    placed = dict(regular)
    placed.update({k: warm_up[k] + first for k in warm})
    placed.update({k: cool_down[k] + last for k in cool})
    return _from_zero(placed), ahead


def _from_zero(times: Times) -> Times:
    first = min(times.values())
    return {key: start - first for key, start in times.items()}


def _pushed(placement: Placement, known: Times, free: set[tuple[int, int]], early: bool) -> Times:
    """A schedule in which the free blocks start as early as possible (early is True) or as late as
    possible. free: the blocks that may move. The order of blocks on each device, and the memory in
    use when a block starts, do not change.
    """
    blocks, edges = placement.blocks, placement.edges()
    pushed: Times = {}
    at: dict[int, int] = {}  # by device: the end (or start) of the block placed last
    for m, b in sorted(known, key=lambda key: (known[key], key), reverse=not early):
        if (m, b) not in free:
            pushed[m, b] = known[m, b]
        else:
            span = blocks[b].span
            if early:
                beside = [(m, a) for a, after in edges if after == b] + [(m - 1, b)]
                times = [pushed[k] + blocks[k[1]].span for k in beside if k in pushed]
                times += [at[d] for d in blocks[b].devices if d in at]
                pushed[m, b] = max(times, default=min(known.values()))
            else:
                beside = [(m, after) for a, after in edges if a == b] + [(m + 1, b)]
                times = [pushed[k] for k in beside if k in pushed]
                times += [at[d] for d in blocks[b].devices if d in at]
                pushed[m, b] = min(times, default=max(known.values())) - span
        for device in blocks[b].devices:
            at[device] = pushed[m, b] + (blocks[b].span if early else 0)
    return pushed


def _place(
    placement: Placement,
    memory: Sequence[int],
    known: Times,
    free: set[tuple[int, int]],
    held: Mapping[int, int],
    early: bool,
) -> Times:
    """Places the blocks in `free` again; the other blocks of the schedule `known` stay where they
    are. early: if True, the last free block ends as early as possible; if False, the first free
    block starts as late as possible. held: the memory of each device that is already allocated
    before.
    """
    if not free:
        return known
    known = _pushed(placement, known, free, early)
    cp: Any = require("ortools.sat.python.cp_model", "parallel")
    model, blocks = cp.CpModel(), placement.blocks
    low = min(known.values())
    high = max(start + blocks[b].span for (_, b), start in known.items())
    starts: dict[tuple[int, int], Any] = dict(known)
    for key in sorted(free):
        starts[key] = model.new_int_var(low, high - blocks[key[1]].span, "")
        model.add_hint(starts[key], known[key])
    for m, b in sorted(known):
        for a in [a for a, after in placement.edges() if after == b]:
            if (m, a) in known and not {(m, a), (m, b)}.isdisjoint(free):
                model.add(starts[m, b] >= starts[m, a] + blocks[a].span)
        if (m - 1, b) in known and not {(m - 1, b), (m, b)}.isdisjoint(free):
            model.add(starts[m, b] >= starts[m - 1, b] + blocks[b].span)
    for device in range(placement.devices):
        on = [key for key in sorted(known) if device in blocks[key[1]].devices]
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(starts[k], blocks[k[1]].span, "") for k in on]
        )
        taking = [k for k in on if blocks[k[1]].memory]
        if taking:
            before = held.get(device, 0)
            times = [low, *(starts[k] for k in taking)]
            changes = [before, *(blocks[k[1]].memory for k in taking)]
            model.add_reservoir_constraint(times, changes, -sum(map(abs, changes)), memory[device])
    objective = model.new_int_var(low, high, "")
    for m, b in sorted(known):
        if early:
            model.add(objective >= starts[m, b] + blocks[b].span)
        else:
            model.add(objective <= starts[m, b])
    (model.minimize if early else model.maximize)(objective)
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    # The solver's presolve is limited, because a longer one takes more time than it saves.
    solver.parameters.max_presolve_iterations = 1
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.symmetry_level = 0
    solver.parameters.max_deterministic_time = SOLVER_TIME
    if solver.solve(model) not in (cp.OPTIMAL, cp.FEASIBLE):
        return known
    return {key: known[key] if key not in free else solver.value(starts[key]) for key in known}


def around(placement: Placement) -> tuple[list[int], list[int]]:
    """For each block, the least time that must pass before it, and after it, within its
    micro-batch.
    """
    order, blocks = placement.order(), placement.blocks
    heads, tails = [0] * len(blocks), [0] * len(blocks)
    edges = placement.edges()
    for i in order:
        heads[i] = max((heads[a] + blocks[a].span for a, b in edges if b == i), default=0)
    for i in reversed(order):
        tails[i] = max((tails[b] + blocks[b].span for a, b in edges if a == i), default=0)
    return heads, tails


def makespan_bound(placement: Placement, count: int) -> int:
    """A lower bound on the makespan (total time) of `count` micro-batches: the larger of the bounds
    from the devices' loads and from chains of blocks.
    """
    heads, tails = around(placement)
    busy = [
        min(heads[i] for i in on) + count * placement.load(d) + min(tails[i] for i in on)
        for d in range(placement.devices)
        if (on := placement.on(d))
    ]
    return max(placement.latency(), *busy)
