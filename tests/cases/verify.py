"""Cases and helpers of tests/unit/plan/test_verify.py, which other tests use too."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable

from ark.machine.capability import Capability
from ark.plan import kind as kinds
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from tests.unit.plan.oracle import conflict, tasks, touched
from tests.unit.plan.shapes import machine, replace_task, with_tasks

MORE = int(os.environ.get("ARK_PLAN_MUTATIONS", "1"))
MACHINES = {
    "two": machine(2),
    "five": machine(5),
    "packets": machine(3, Capability.PACKETS),
    "gpu": machine(4, Capability.PACKETS, warps=2),
}


def drop_wait(plan: Plan, rng: random.Random) -> Plan:
    places = [(k, t) for k, t in tasks(plan).items() if t.waits]
    place, task = rng.choice(places)
    dropped = rng.randrange(len(task.waits))
    return replace_task(
        plan, place, waits=tuple(w for i, w in enumerate(task.waits) if i != dropped)
    )


def lower_threshold(plan: Plan, rng: random.Random) -> Plan:
    places = [(k, i) for k, t in tasks(plan).items() for i, (_, n) in enumerate(t.waits) if n]
    place, i = rng.choice(places)
    task = tasks(plan)[place]
    counter, threshold = task.waits[i]
    waits = list(task.waits)
    waits[i] = (counter, rng.randrange(threshold))
    return replace_task(plan, place, waits=tuple(waits))


def _alive(plan: Plan) -> dict[int, tuple[int, int]]:
    results: dict[int, tuple[int, int]] = {}
    for op in plan.ops:
        for tensor in op.operands:
            buffer = plan.tensors[tensor].buffer
            first, _ = results.get(buffer, (op.id, op.id))
            results[buffer] = (first, op.id)
    return results


def overlap_buffers(plan: Plan, rng: random.Random) -> Plan:
    """Moves a buffer onto another of the same arena that is live at the same time and is
    written.
    """
    alive = _alive(plan)
    pairs = [
        (a, b)
        for a in plan.buffers
        for b in plan.buffers
        if a.id != b.id
        and a.arena == b.arena in ("activation", "state", "packet")
        and a.nbytes <= b.nbytes
        and alive[a.id][0] <= alive[b.id][1]
        and alive[b.id][0] <= alive[a.id][1]
    ]
    a, b = rng.choice(pairs)
    buffers = list(plan.buffers)
    buffers[a.id] = dataclasses.replace(a, offset=b.offset)
    return dataclasses.replace(plan, buffers=tuple(buffers))


def swap_tasks(plan: Plan, rng: random.Random) -> Plan:
    """Swaps two tasks of a processor where the later one directly depends on the earlier one."""
    listed = tasks(plan)
    while True:
        number = rng.randrange(len(plan.phases))
        processor = rng.randrange(plan.processors)
        own = list(plan.phases[number].processors[processor])
        if len(own) < 2:
            continue
        i, j = sorted(rng.sample(range(len(own)), 2))
        first = touched(plan, listed[number, processor, i])
        if own[i].op != own[j].op and conflict(first, touched(plan, own[j])):
            own[i], own[j] = own[j], own[i]
            return with_tasks(plan, number, processor, own)


def drop_task(plan: Plan, rng: random.Random) -> Plan:
    place, _ = rng.choice(sorted(tasks(plan).items(), key=lambda kv: kv[0]))
    own = list(plan.phases[place[0]].processors[place[1]])
    del own[place[2]]
    return with_tasks(plan, place[0], place[1], own)


def move_tile(plan: Plan, rng: random.Random) -> Plan:
    """Gives a task the tile of another task of its op, so that one tile is computed twice and one
    never.
    """
    listed = tasks(plan)
    groups: dict[int, list] = {}
    for place, task in listed.items():
        groups.setdefault(task.op, []).append(place)
    several = [g for g in groups.values() if len(g) > 1]
    group = rng.choice(several)
    a, b = rng.sample(group, 2)
    other = listed[b]
    return replace_task(plan, a, coord=other.coord, fetches=other.fetches)


def misdirect_signal(plan: Plan, rng: random.Random) -> Plan:
    places = [(k, t) for k, t in tasks(plan).items() if t.signals]
    place, task = rng.choice(places)
    signals = list(task.signals)
    i = rng.randrange(len(signals))
    others = [c.id for c in plan.counters if c.id != signals[i]]
    signals[i] = rng.choice(others)
    return replace_task(plan, place, signals=tuple(signals))


def shift_fetch(plan: Plan, rng: random.Random) -> Plan:
    places = [(k, t) for k, t in tasks(plan).items() if t.fetches]
    place, task = rng.choice(places)
    fetch = dataclasses.replace(task.fetches[0], offset=task.fetches[0].offset + 64)
    return replace_task(plan, place, fetches=(fetch, *task.fetches[1:]))


def needed_shared_bytes(plan: Plan) -> int:
    """Returns the bytes of shared memory that the plan needs: the largest scratch of an op plus the
    operand stream's ring.
    """
    machine = machine_of(plan)
    scratch = (kinds.get(op.kind).scratch(kinds.signature(plan, op), machine) for op in plan.ops)
    return max(scratch) + machine.ring_bytes


def with_shared_bytes(plan: Plan, size: int) -> Plan:
    return dataclasses.replace(plan, machine={**plan.machine, "shared_bytes": size})


def grow_scratch(plan: Plan, rng: random.Random) -> Plan:
    """Makes the machine's shared memory too small for the plan by 1 to 100 bytes."""
    return with_shared_bytes(plan, needed_shared_bytes(plan) - rng.choice([1, 4, 16, 100]))


MUTATIONS: list[Callable[[Plan, random.Random], Plan]] = [
    drop_wait,
    lower_threshold,
    overlap_buffers,
    swap_tasks,
    drop_task,
    move_tile,
    misdirect_signal,
    shift_fetch,
    grow_scratch,
]
