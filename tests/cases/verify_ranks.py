"""Cases and helpers of tests/unit/plan/test_verify_ranks.py, which other tests use too."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from ark.plan.types import Plan, Task
from tests.unit.plan.oracle import tasks
from tests.unit.plan.shapes import replace_task

Place = tuple[int, int, int]


def remote(plan: Plan, tensor: int) -> bool:
    return plan.buffers[plan.tensors[tensor].buffer].rank != plan.rank


def puts(plan: Plan) -> list[tuple[Place, Task]]:
    """Returns the tasks that write to a peer."""
    return [(k, t) for k, t in tasks(plan).items() if remote(plan, plan.ops[t.op].operands[-1])]


def signalled(plan: Plan) -> list[tuple[Place, Task]]:
    """Returns the puts (tasks that write to a peer's memory) whose completion is signalled by a
    counter on a peer; packets need no signal.
    """
    return [
        (k, t) for k, t in puts(plan) if any(plan.counters[c].rank != plan.rank for c in t.signals)
    ]


def with_target(plan: Plan, op: int, tensor: int) -> Plan:
    """Returns the plan with an op's output replaced."""
    ops = list(plan.ops)
    ops[op] = dataclasses.replace(ops[op], operands=(*ops[op].operands[:-1], tensor))
    return dataclasses.replace(plan, ops=tuple(ops))


def put_to_a_wrong_rank(plan: Plan, rng: random.Random) -> Plan:
    """Changes a put's receive buffer to the buffer of the same name on the putting rank."""
    _, task = rng.choice(puts(plan))
    tensor = plan.tensors[plan.ops[task.op].operands[-1]]
    buffers = list(plan.buffers)
    buffers[tensor.buffer] = dataclasses.replace(buffers[tensor.buffer], rank=plan.rank)
    return dataclasses.replace(plan, buffers=tuple(buffers))


def put_into_its_own_buffer(plan: Plan, rng: random.Random) -> Plan:
    """Changes a put to write a receive buffer of the same shape and type on its own rank, which is
    memory that exists. A buffer of the same name is chosen only if there is no other: if all ranks
    do the same, only the rank itself uses that buffer, and the plan is safe.
    """
    _, task = rng.choice(puts(plan))
    wanted = plan.tensors[plan.ops[task.op].operands[-1]]
    own = [
        t
        for t in plan.tensors
        if (t.shape, t.dtype) == (wanted.shape, wanted.dtype)
        and plan.buffers[t.buffer].arena == "symmetric"
        and not remote(plan, t.id)
    ]
    others = [t for t in own if t.name != wanted.name]
    return with_target(plan, task.op, rng.choice(others or own).id)


def put_into_another_buffer(plan: Plan, rng: random.Random) -> Plan:
    """Changes a put to write another put's receive buffer on the peer."""
    received = {(k[0], plan.ops[t.op].operands[-1]) for k, t in puts(plan)}
    choices = []
    for place, task in puts(plan):
        used = plan.ops[task.op].operands[-1]
        fits = plan.tensors[used].shape
        others = {t for phase, t in received if phase == place[0]} - {used}
        choices += [(task.op, t) for t in sorted(others) if plan.tensors[t].shape == fits]
    return with_target(plan, *rng.choice(choices))


def signal_own_rank(plan: Plan, rng: random.Random) -> Plan:
    """Changes a put's signal to a counter on the putting rank."""
    place, task = rng.choice(signalled(plan))
    own = next(
        c.id
        for c in plan.counters
        if c.system and c.rank == plan.rank and c.name != "iteration barrier"
    )
    signals = tuple(own if plan.counters[c].rank != plan.rank else c for c in task.signals)
    return replace_task(plan, place, signals=signals)


def drop_signal(plan: Plan, rng: random.Random) -> Plan:
    place, task = rng.choice(signalled(plan))
    kept = tuple(c for c in task.signals if plan.counters[c].rank == plan.rank)
    return replace_task(plan, place, signals=kept)


def drop_mail_wait(plan: Plan, rng: random.Random) -> Plan:
    waiting = [
        (k, t) for k, t in tasks(plan).items() if any(plan.counters[c].system for c, _ in t.waits)
    ]
    place, task = rng.choice(waiting)
    kept = tuple((c, n) for c, n in task.waits if not plan.counters[c].system)
    return replace_task(plan, place, waits=kept)


MUTATIONS: list[Callable[[Plan, random.Random], Plan]] = [
    put_to_a_wrong_rank,
    put_into_its_own_buffer,
    put_into_another_buffer,
    signal_own_rank,
    drop_signal,
    drop_mail_wait,
]
