"""Named pipeline schedules, built block by block as their papers describe them.

A name determines a placement (blocks on devices), the memory of the devices, and the priorities of
blocks that are ready. `list_schedule` makes the schedule from these. `tessel` does not use names;
it searches for schedules. Called by ark.parallel.plans. The schedules are GPipe (Huang et al.
2019), 1F1B (PipeDream-flush, Narayanan et al. 2021), interleaved 1F1B (Narayanan et al. 2021), zero
bubble H1 (Qi et al. 2024), Chimera (Li and Hoefler 2021), interlaced pipelines and 3F1B (nnScaler,
Lin et al. 2024).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ark.errors import InvalidUsageError, PlanError
from ark.parallel.pipeline.placement import MOST_DEVICES, Block, Placement
from ark.parallel.pipeline.schedule import MOST_ENTRIES, Entry, Schedule
from ark.parallel.pipeline.unroll import makespan_bound

Priority = Callable[[str, int], tuple[int, ...]]
"""A function that returns the priority of a ready block, from the block's name and micro-batch. The
block with the lowest value runs first.
"""
STAGES_PER_DEVICE = 2  # stages of a device in an interleaved pipeline
FORWARD_PASSES = 3  # forward passes of 3F1B


@dataclass(frozen=True)
class Named:
    """A named pipeline: a placement, the memory of each device (None: unlimited), and the
    priorities of blocks.
    """

    placement: Placement
    memory: tuple[int | None, ...]
    priority: Priority


@dataclass(frozen=True)
class Spans:
    """The times of a stage's blocks. forward, backward: of the two passes. weights: the part of the
    backward pass that computes the gradients of weights.
    """

    forward: int = 1
    backward: int = 2
    weights: int = 1
    shared: int = 1


def _forward_and_backward(
    stages: Sequence[tuple[str, tuple[int, ...]]], spans: Spans
) -> list[Block]:
    """Forward blocks through all stages, each of which allocates a unit of memory, then backward
    blocks in reverse order, each of which frees it.
    """
    blocks: list[Block] = []
    last: tuple[str, ...] = ()
    for way, span, held in (("f", spans.forward, 1), ("b", spans.backward, -1)):
        for name, devices in stages if way == "f" else stages[::-1]:
            blocks.append(Block(way + name, span, held, devices, last))
            last = (way + name,)
    return blocks


def _v(devices: int, spans: Spans) -> list[Block]:
    return _forward_and_backward([(str(d), (d,)) for d in range(devices)], spans)


def _backward_first(name: str, batch: int) -> tuple[int, ...]:
    return (0 if name[0] == "b" else 2 if name[0] == "w" else 1, batch)


def _gpipe(devices: int, spans: Spans) -> Named:
    """The schedule of GPipe: all forward blocks run first, then all backward blocks."""

    def priority(name: str, batch: int) -> tuple[int, ...]:
        return (int(name[0] == "b"), batch)

    return Named(Placement(devices, tuple(_v(devices, spans))), (None,) * devices, priority)


def _1f1b(devices: int, spans: Spans) -> Named:
    """Backward blocks run as early as possible. A stage holds at most as many micro-batches as
    there are stages from this one to the last.
    """
    held = tuple(devices - d for d in range(devices))
    return Named(Placement(devices, tuple(_v(devices, spans))), held, _backward_first)


def _interleaved(devices: int, spans: Spans) -> Named:
    """1F1B with several stages per device. Stage i is on device i modulo the number of devices."""
    count = devices * STAGES_PER_DEVICE
    blocks = _forward_and_backward([(str(i), (i % devices,)) for i in range(count)], spans)

    def priority(name: str, batch: int) -> tuple[int, ...]:
        chunk, device = divmod(int(name[1:]), devices)
        group, rest = divmod(batch, devices)
        if name[0] == "b":
            chunk = STAGES_PER_DEVICE - 1 - chunk
        index = (group * STAGES_PER_DEVICE + chunk) * devices + rest
        ahead = 2 * (devices - device - 1) + (STAGES_PER_DEVICE - 1) * devices
        return (2 * index + 1 if name[0] == "b" else 2 * max(0, index - ahead), index)

    held = tuple(
        2 * (devices - d - 1) + (STAGES_PER_DEVICE - 1) * devices + 1 for d in range(devices)
    )
    return Named(Placement(devices, tuple(blocks)), held, priority)


def _zero_bubble(devices: int, spans: Spans) -> Named:
    """1F1B with the backward pass of a stage in two blocks. The first one computes the gradients
    for which the previous stage waits. The second one computes the weights' gradients and fills
    idle time (ZB-H1: no more memory than 1F1B).
    """
    blocks = []
    for block in _v(devices, spans):
        if block.name[0] == "f":
            blocks.append(block)
            continue
        inner = max(1, spans.backward - spans.weights)
        blocks.append(Block(block.name, inner, 0, block.devices, block.after))
        weights = "w" + block.name[1:]
        blocks.append(Block(weights, spans.weights, -1, block.devices, (block.name,)))

    def priority(name: str, batch: int) -> tuple[int, ...]:
        if name[0] == "w":
            return (1, 0, batch)
        ahead = devices - int(name[1:]) - 1
        return (0, 2 * batch + 1 if name[0] == "b" else 2 * max(0, batch - ahead), batch)

    return Named(Placement(devices, tuple(blocks)), (devices,) * devices, priority)


def _chimera(devices: int, spans: Spans) -> Named:
    """Two pipelines in opposite directions. Each device has one stage of each pipeline."""
    down = [(f"{d}.down", (d,)) for d in range(devices)]
    up = [(f"{d}.up", (d,)) for d in reversed(range(devices))]
    blocks = [*_forward_and_backward(down, spans), *_forward_and_backward(up, spans)]

    def priority(name: str, batch: int) -> tuple[int, ...]:
        number, _, way = name[1:].partition(".")
        at = int(number) if way == "down" else devices - 1 - int(number)
        return (batch if name[0] == "b" else max(0, batch - devices + at), -at)

    held = (devices + devices // 2,) * devices
    return Named(Placement(devices, tuple(blocks)), held, priority)


def _interlaced(devices: int, spans: Spans) -> Named:
    """A first layer on all devices, such as a large embedding, followed by 1F1B for the other
    layers.
    """
    every = tuple(range(devices))
    blocks = _forward_and_backward(
        [("in", every), *((str(d), (d,)) for d in range(devices))], spans
    )
    placed = [
        Block(b.name, spans.shared, 0, b.devices, b.after) if b.name[1:] == "in" else b
        for b in blocks
    ]
    held = tuple(devices - d for d in range(devices))
    return Named(Placement(devices, tuple(placed)), held, _backward_first)


def _3f1b(devices: int, spans: Spans) -> Named:
    """The schedule 3F1B: three forward passes, of which only the last has a backward pass
    (recycling, as in AlphaFold2).
    """
    all_blocks: list[Block] = []
    last: tuple[str, ...] = ()
    for number in range(FORWARD_PASSES - 1):
        for d in range(devices):
            all_blocks.append(Block(f"{'ghij'[number]}{d}", spans.forward, 0, (d,), last))
            last = (all_blocks[-1].name,)
    blocks = _v(devices, spans)
    all_blocks += [Block(b.name, b.span, b.memory, b.devices, b.after or last) for b in blocks]

    def priority(name: str, batch: int) -> tuple[int, ...]:
        return ("bfhg".index(name[0]), batch)

    return Named(
        Placement(devices, tuple(all_blocks)), tuple(devices - d for d in range(devices)), priority
    )


PIPELINES: dict[str, Callable[[int, Spans], Named]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
    "chimera": _chimera,
    "interlaced": _interlaced,
    "3f1b": _3f1b,
}


def named(name: str, devices: int, spans: Spans | None = None, inference: bool = False) -> Named:
    """The pipeline of that name. Raises InvalidUsageError for unknown names and unsupported sizes.

    inference: True for a pipeline without backward blocks, in which no memory is held.
    """
    if name not in PIPELINES:
        raise InvalidUsageError(
            f"the pipeline {name!r} does not exist; use one of {', '.join(PIPELINES)}"
        )
    if not 1 <= devices <= MOST_DEVICES // 4:
        raise InvalidUsageError(
            f"the pipeline {name} does not support {devices} devices; use 1 to {MOST_DEVICES // 4}"
        )
    pipeline = PIPELINES[name](devices, spans or Spans())
    if not inference:
        return pipeline
    kept = [replace(b, memory=0) for b in pipeline.placement.blocks if b.name[0] not in "bw"]
    return Named(Placement(devices, tuple(kept)), pipeline.memory, pipeline.priority)


def list_schedule(plan: Named, micro_batches: int) -> Schedule:
    """Makes a schedule by priorities. An idle device always runs one of the ready blocks that fit
    into its memory, the one with the lowest priority value.

    The result is deterministic. The period is the busiest device's time per micro-batch. Raises
    PlanError if no ready block fits, and InvalidUsageError if the number of micro-batches is out of
    range.
    """
    placement = plan.placement.checked()
    blocks = placement.blocks
    if not 1 <= micro_batches <= MOST_ENTRIES // len(blocks):
        raise InvalidUsageError(
            f"micro_batches={micro_batches} is out of range; this pipeline supports 1 to "
            f"{MOST_ENTRIES // len(blocks)}"
        )
    followers: list[list[int]] = [[] for _ in blocks]
    for a, b in placement.edges():
        followers[a].append(b)
    missing = {
        (i, m): len(set(b.after)) for i, b in enumerate(blocks) for m in range(micro_batches)
    }
    ready: list[list[tuple[tuple[int, ...], int, int]]] = [[] for _ in range(placement.devices)]

    def offer(i: int, m: int) -> None:
        for d in blocks[i].devices:
            heapq.heappush(ready[d], (plan.priority(blocks[i].name, m), m, i))

    for i, block in enumerate(blocks):
        if not block.after:
            offer(i, 0)  # the block of the next micro-batch is ready once this one has started
    free = [0] * placement.devices
    held = [0] * placement.devices
    started: dict[tuple[int, int], int] = {}
    ending: list[tuple[int, int, int]] = []
    now = 0
    while len(started) < len(missing):
        changed = True
        while changed:
            changed = False
            for d in range(placement.devices):
                if free[d] > now or not ready[d]:
                    continue
                for _, m, i in sorted(ready[d]):
                    block = blocks[i]
                    if any(free[e] > now or _full(plan, held, e, block) for e in block.devices):
                        continue
                    started[i, m] = now
                    heapq.heappush(ending, (now + block.span, i, m))
                    entry = (plan.priority(block.name, m), m, i)
                    for e in block.devices:
                        free[e] = now + block.span
                        held[e] += block.memory
                        ready[e].remove(entry)
                        heapq.heapify(ready[e])
                    if not block.after and m + 1 < micro_batches:
                        offer(i, m + 1)
                    changed = True
                    break
        if not ending:
            raise PlanError(
                "the pipeline cannot continue: no ready block fits into the devices' memory; "
                "give more memory"
            )
        now = ending[0][0]
        while ending and ending[0][0] == now:
            _, i, m = heapq.heappop(ending)
            for j in followers[i]:
                missing[j, m] -= 1
                if not missing[j, m]:
                    offer(j, m)
    entries = tuple(
        Entry(blocks[i].name, m, at, blocks[i].span, blocks[i].devices, "named")
        for (i, m), at in sorted(
            started.items(), key=lambda s: (s[1], blocks[s[0][0]].devices, s[0])
        )
    )
    return _schedule(placement, micro_batches, entries)


def replay(schedule: Schedule, placement: Placement, micro_batches: int) -> Schedule:
    """A schedule with the same order of blocks on each device as in `schedule`, but with the spans
    (times) of `placement`. Both must have the same blocks.

    Each block starts as soon as its predecessors have ended and its devices are idle.
    """
    blocks = {b.name: b for b in placement.blocks}
    free = [0] * placement.devices
    ends: dict[tuple[str, int], int] = {}
    entries = []
    for e in schedule.entries:
        block = blocks[e.block]
        start = max(
            *(free[d] for d in e.devices), 0, *(ends[name, e.micro_batch] for name in block.after)
        )
        ends[e.block, e.micro_batch] = start + block.span
        for d in e.devices:
            free[d] = start + block.span
        entries.append(Entry(e.block, e.micro_batch, start, block.span, e.devices, e.phase))
    entries.sort(key=lambda e: (e.start, e.devices, e.micro_batch))
    return _schedule(placement, micro_batches, tuple(entries))


def _schedule(placement: Placement, micro_batches: int, entries: tuple[Entry, ...]) -> Schedule:
    period = max(placement.load(d) for d in range(placement.devices))
    return Schedule(
        period=period,
        makespan=max(e.start + e.span for e in entries),
        optimal=False,
        entries=entries,
        period_bound=period,
        makespan_bound=makespan_bound(placement, micro_batches),
    )


def _full(plan: Named, held: Sequence[int], device: int, block: Block) -> bool:
    limit = plan.memory[device]
    return limit is not None and block.memory > 0 and held[device] + block.memory > limit
