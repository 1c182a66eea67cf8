"""`tessel`: computes a verified schedule from a placement, the devices' memory and a number of
micro-batches. Called by ark.parallel.plans and `ark tessel`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ark.collective.packages import require
from ark.errors import InternalError, InvalidUsageError, ModelError, PlanError
from ark.parallel.pipeline.complete import fewer, makespan, repeat, shorten
from ark.parallel.pipeline.placement import Placement, limits
from ark.parallel.pipeline.repetend import Repetend, search
from ark.parallel.pipeline.unroll import Times, makespan_bound, unroll

MOST_ENTRIES = 200_000


@dataclass(frozen=True)
class Entry:
    """The start time of one block of one micro-batch. phase: "warm-up", "repetend" (the repeating
    core) or "cool-down".
    """

    block: str
    micro_batch: int
    start: int
    span: int
    devices: tuple[int, ...]
    phase: str


@dataclass(frozen=True)
class Schedule:
    """The start times of all blocks, sorted.

    period: the time that each further micro-batch adds. optimal: True if no repeating schedule has
    a shorter period. period_bound, makespan_bound: lower bounds for every schedule. So the makespan
    (total time) exceeds the least possible one by at most `makespan - makespan_bound`.
    """

    period: int
    makespan: int
    optimal: bool
    entries: tuple[Entry, ...]
    period_bound: int
    makespan_bound: int


def tessel(
    placement: Placement,
    memory: int | Sequence[int],
    micro_batches: int = 8,
    time_limit_s: float = 60.0,
) -> Schedule:
    """The schedule of the shortest period for many micro-batches of a placement.

    Args: placement: the blocks of one micro-batch, see `Placement` and `shape`. memory: of each
    device, one number or one per device. micro_batches: their number. time_limit_s: seconds for the
    search of the period. If they do not suffice, `optimal` is false and the bounds limit the
    distance from the optimum.

    Raises: PlanError: one micro-batch does not fit into the memory, or no schedule was found in
    time. ModelError: the placement is not valid. InvalidUsageError: arguments out of range.
    SystemError: OR-tools is not installed.

    Examples:
        >>> placement = ark.parallel.shape("V", devices=2, forward=1, backward=2)
        >>> schedule = ark.parallel.tessel(placement, memory=2, micro_batches=4)
        >>> schedule.period, schedule.optimal
        (3, True)
    """
    placement = placement.checked()
    most = MOST_ENTRIES // len(placement.blocks)
    if not 1 <= micro_batches <= most:
        raise InvalidUsageError(
            f"micro_batches={micro_batches} is out of range; this placement supports 1 to {most}"
        )
    if not 0 < time_limit_s < math.inf:
        raise InvalidUsageError(f"time_limit_s={time_limit_s} must be above 0")
    given = limits(placement, memory)
    unit = math.gcd(*(block.span for block in placement.blocks))
    scaled = msgspec.structs.replace(
        placement,
        blocks=tuple(msgspec.structs.replace(b, span=b.span // unit) for b in placement.blocks),
    )
    steady = tuple(m - _kept(placement, d, micro_batches) for d, m in enumerate(given))
    if min(steady) < 0:
        device = steady.index(min(steady))
        raise PlanError(
            f"when a micro-batch has ended, its blocks leave {given[device] - steady[device]} of "
            f"the {given[device]} units of memory of device {device} allocated; let blocks free "
            "it, or give more memory"
        )
    core = search(scaled, steady, time_limit_s)
    times, ahead, bound = _completed(scaled, given, core, micro_batches)
    entries = []
    for (m, b), start in times.items():
        window = m + core.starts[b] // core.period
        late = "cool-down" if window >= micro_batches else "repetend"
        phase = "warm-up" if window < ahead else late
        block = placement.blocks[b]
        entries.append(Entry(block.name, m, start * unit, block.span, block.devices, phase))
    entries.sort(key=lambda e: (e.start, e.devices, e.micro_batch))
    result = Schedule(
        period=core.period * unit,
        makespan=max(e.start + e.span for e in entries),
        optimal=core.bound == core.period,
        entries=tuple(entries),
        period_bound=core.bound * unit,
        makespan_bound=bound * unit,
    )
    wrong = verify(placement, given, micro_batches, result.entries)
    if wrong:
        raise InternalError(
            f"the resulting schedule is not valid: {wrong}; please report this placement"
        )
    return result


def _completed(
    placement: Placement, memory: Sequence[int], core: Repetend, count: int
) -> tuple[Times, int, int]:
    """Returns the start times of all blocks, the number of periods before the first copy of the
    core, and a lower bound on the makespan (total time).
    """
    times, ahead = unroll(placement, memory, core, count)
    few = fewer(placement, count)
    if few == count:
        times, bound = shorten(placement, memory, times, count)
        return times, ahead, bound
    bound = makespan_bound(placement, count)
    if few > 1 and makespan(placement, times) > bound:
        placed, _ = shorten(placement, memory, unroll(placement, memory, core, few)[0], few)
        longer = repeat(placement, placed, core.period, count - few)
        if longer and makespan(placement, longer) < makespan(placement, times):
            blocks = placement.blocks
            entries = [
                Entry(blocks[b].name, m, start, blocks[b].span, blocks[b].devices, "")
                for (m, b), start in longer.items()
            ]
            if verify(placement, memory, count, entries) is None:
                times = longer
    return times, ahead, bound


def _kept(placement: Placement, device: int, micro_batches: int) -> int:
    """The memory of a device that all micro-batches except the last leave allocated.

    Raises ModelError if a device could free memory before it is allocated.
    """
    on = placement.on(device)
    if any(placement.blocks[i].memory < 0 for i in on):
        cp: Any = require("ortools.sat.python.cp_model", "parallel")
        model = cp.CpModel()
        started = [model.new_bool_var("") for _ in placement.blocks]
        for a, b in placement.edges():
            model.add_implication(started[b], started[a])
        model.minimize(sum(placement.blocks[i].memory * started[i] for i in on))
        solver = cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.solve(model)
        if solver.objective_value < 0:
            chosen = [i for i in on if solver.value(started[i]) and placement.blocks[i].memory < 0]
            raise ModelError(
                f"block {placement.blocks[chosen[0]].name!r} may free memory of device {device} "
                "before it was allocated; make it depend on the blocks that allocate it"
            )
    return sum(placement.blocks[i].memory for i in on) * (micro_batches - 1)


def verify(
    placement: Placement, memory: Sequence[int], micro_batches: int, entries: Sequence[Entry]
) -> str | None:
    """Checks a schedule: completeness, order, overlap and memory. Returns the first error, or
    None.
    """
    blocks = {block.name: block for block in placement.blocks}
    starts = {(e.block, e.micro_batch): e.start for e in entries}
    if len(starts) != len(entries) or len(starts) != len(blocks) * micro_batches:
        return f"it has {len(entries)} entries for {len(blocks)} blocks x {micro_batches}"
    for (name, m), start in starts.items():
        for before in blocks[name].after:
            if start < starts[before, m] + blocks[before].span:
                return f"{name} of micro-batch {m} starts at {start}, before {before} has ended"
    here: list[list[tuple[int, str, int]]] = [[] for _ in range(placement.devices)]
    for (name, m), start in sorted(starts.items(), key=lambda item: item[1]):
        for device in blocks[name].devices:
            here[device].append((start, name, m))
    for device, listed in enumerate(here):
        held, free = 0, 0
        for start, name, m in listed:
            if start < free:
                return (
                    f"{name} of micro-batch {m} starts at {start} on device {device}, which is busy"
                )
            free = start + blocks[name].span
            held += blocks[name].memory
            if held > memory[device]:
                return f"device {device} holds {held} at {start} and has {memory[device]}"
    return None
