"""First part of the verifier: everything a plan names exists, fits, and belongs together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ark.errors import PlanError
from ark.ir.dtype import by_name
from ark.machine import Machine
from ark.plan import kind as kinds
from ark.plan.kind import Access, Signature
from ark.plan.serialize import machine_of
from ark.plan.types import ARENAS, GATE, Phase, Plan, PlanOp, Task


def refuse(message: str) -> PlanError:
    return PlanError(f"the plan is refused: {message}")


@dataclass(frozen=True)
class Fleet:
    """The plans of all ranks, with what they refer to on each other."""

    plans: tuple[Plan, ...]

    @cached_property
    def signatures(self) -> tuple[tuple[Signature, ...], ...]:
        """By rank and op."""
        return tuple(tuple(kinds.signature(p, op) for op in p.ops) for p in self.plans)

    def accesses(self, rank: int, task: Task) -> list[Access]:
        """What the task touches; PlanError if its coordinates mean nothing to its kind."""
        op = self.plans[rank].ops[task.op]
        try:
            return kinds.get(op.kind).accesses(self.signatures[rank][task.op], task.coord)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise refuse(
                f"task {list(task.coord)} of op {op.name!r} on rank {rank} does not fit its kind "
                f"{op.kind!r} ({type(error).__name__}: {error})"
            ) from error

    def buffer_of(self, rank: int, buffer: int) -> tuple[int, int]:
        """(rank, buffer id) of the memory that a plan's buffer entry names."""
        entry = self.plans[rank].buffers[buffer]
        if entry.rank == rank:
            return rank, buffer
        return entry.rank, self._named_buffers[entry.rank].get(entry.name, -1)

    def counter_of(self, rank: int, counter: int) -> tuple[int, int]:
        """(rank, counter id) of the counter that a plan's entry names."""
        entry = self.plans[rank].counters[counter]
        if entry.rank == rank:
            return rank, counter
        return entry.rank, self._named_counters[entry.rank].get(entry.name, -1)

    @cached_property
    def _named_buffers(self) -> tuple[dict[str, int], ...]:
        return tuple(
            {b.name: b.id for b in p.buffers if b.rank == p.rank and b.arena == "symmetric"}
            for p in self.plans
        )

    @cached_property
    def _named_counters(self) -> tuple[dict[str, int], ...]:
        return tuple(
            {c.name: c.id for c in p.counters if c.rank == p.rank and c.system} for p in self.plans
        )


def tasks_of(phase: Phase) -> Iterator[tuple[int, int, Task]]:
    """(processor, position, task) of a phase."""
    for processor, tasks in enumerate(phase.processors):
        for position, task in enumerate(tasks):
            yield processor, position, task


def check_structure(fleet: Fleet) -> None:
    """Raises PlanError for the first thing that does not exist, fit or belong."""
    if not fleet.plans:
        raise refuse("there are no plans")
    world = fleet.plans[0].world_size
    if [p.rank for p in fleet.plans] != list(range(world)):
        raise refuse(
            f"ranks {[p.rank for p in fleet.plans]} were given for a world of {world}; the plans "
            "of all ranks must be given, in order"
        )
    for plan in fleet.plans:
        if plan.world_size != world or len(plan.phases) != len(fleet.plans[0].phases):
            raise refuse(f"rank {plan.rank} has another number of ranks or phases than rank 0")
        _check_memory(fleet, plan)
        _check_ops(fleet, plan)
        _check_counters(fleet, plan)
        _check_tasks(fleet, plan)
        _check_shared_memory(fleet, plan)


def _check_memory(fleet: Fleet, plan: Plan) -> None:
    for b in plan.buffers:
        if b.arena not in ARENAS or not 0 <= b.rank < plan.world_size or b.nbytes <= 0:
            raise refuse(
                f"buffer {b.name!r} has arena {b.arena!r}, rank {b.rank}, {b.nbytes} bytes"
            )
        if b.rank != plan.rank:
            owner, found = fleet.buffer_of(plan.rank, b.id)
            if found < 0:
                raise refuse(f"rank {plan.rank} uses buffer {b.name!r}, which rank {owner} lacks")
            if fleet.plans[owner].buffers[found].nbytes != b.nbytes:
                raise refuse(f"ranks {plan.rank} and {owner} differ in the size of {b.name!r}")
        elif b.arena != "external" and not (
            b.offset >= 0 and b.offset + b.nbytes <= plan.arenas.get(b.arena, 0)
        ):
            raise refuse(f"buffer {b.name!r} lies outside of its arena {b.arena!r}")
    for t in plan.tensors:
        if not 0 <= t.buffer < len(plan.buffers):
            raise refuse(f"tensor {t.name!r} is on buffer {t.buffer}, which does not exist")
        itemsize = 8 if t.packet else by_name(t.dtype).itemsize
        inside = all(
            o >= 0 and s > 0 and o + s <= e
            for o, s, e in zip(t.offsets, t.shape, t.extents, strict=True)
        )
        if not inside or math.prod(t.extents) * itemsize > plan.buffers[t.buffer].nbytes:
            raise refuse(f"tensor {t.name!r} does not fit its buffer")
        if t.packet != (plan.buffers[t.buffer].arena == "packet"):
            raise refuse(f"tensor {t.name!r} mixes packets and plain memory")


def _check_ops(fleet: Fleet, plan: Plan) -> None:
    for op in plan.ops:
        kinds.get(op.kind)
        for tensor in (*op.operands, *op.after):
            if not 0 <= tensor < len(plan.tensors):
                raise refuse(f"op {op.name!r} uses tensor {tensor}, which does not exist")


def _check_counters(fleet: Fleet, plan: Plan) -> None:
    """Steps must be what is signalled in an iteration, or thresholds drift apart."""
    for c in plan.counters:
        if not 0 <= c.rank < plan.world_size:
            raise refuse(f"counter {c.name!r} is on rank {c.rank}, which does not exist")
        if c.rank != plan.rank and fleet.counter_of(plan.rank, c.id)[1] < 0:
            raise refuse(f"rank {plan.rank} signals {c.name!r}, which rank {c.rank} lacks")
    if not plan.counters or plan.counters[GATE].name != "gate":
        raise refuse(f"rank {plan.rank} has no gate")


def _check_tasks(fleet: Fleet, plan: Plan) -> None:
    phase_of: dict[int, int] = {}
    written = {
        fleet.buffer_of(p.rank, p.tensors[p.ops[task.op].operands[a.operand]].buffer)
        for p in fleet.plans
        for phase in p.phases
        for _, _, task in tasks_of(phase)
        if 0 <= task.op < len(p.ops)
        for a in fleet.accesses(p.rank, task)
        if a.write and 0 <= a.operand < len(p.ops[task.op].operands)
    }
    machine = machine_of(plan)
    for number, phase in enumerate(plan.phases):
        if len(phase.processors) != plan.processors:
            raise refuse(
                f"phase {phase.name!r} has {len(phase.processors)} task lists for "
                f"{plan.processors} processors"
            )
        for _, _, task in tasks_of(phase):
            if not 0 <= task.op < len(plan.ops):
                raise refuse(f"a task belongs to op {task.op}, which does not exist")
            op = plan.ops[task.op]
            if phase_of.setdefault(task.op, number) != number:
                raise refuse(f"op {op.name!r} has tasks in two phases")
            for counter, threshold in task.waits:
                if not 0 <= counter < len(plan.counters) or counter == GATE or threshold < 1:
                    raise refuse(f"a task of op {op.name!r} waits for counter {counter}")
                if plan.counters[counter].rank != plan.rank:
                    raise refuse(f"a task of op {op.name!r} waits for a counter of another rank")
            if any(not 0 <= c < len(plan.counters) for c in task.signals):
                raise refuse(f"a task of op {op.name!r} signals a counter that does not exist")
            _check_boxes(fleet, plan, op, task)
            _check_stream(fleet, plan, machine, op, task, written)


def _check_boxes(fleet: Fleet, plan: Plan, op: PlanOp, task: Task) -> None:
    for access in fleet.accesses(plan.rank, task):
        tensor = plan.tensors[op.operands[access.operand]]
        if len(access.lo) != len(tensor.shape) or any(
            not 0 <= lo < hi <= n
            for lo, hi, n in zip(access.lo, access.hi, tensor.shape, strict=False)
        ):
            raise refuse(
                f"task {list(task.coord)} of op {op.name!r} reaches outside of {tensor.name!r} "
                f"({list(access.lo)} to {list(access.hi)} of {list(tensor.shape)})"
            )


def _check_stream(
    fleet: Fleet,
    plan: Plan,
    machine: Machine,
    op: PlanOp,
    task: Task,
    written: set[tuple[int, int]],
) -> None:
    """Streamed operands are only read by the loop, and the stream brings what the body takes."""
    expected = kinds.get(op.kind).stream(fleet.signatures[plan.rank][task.op], task.coord)
    if tuple(task.fetches) != tuple(expected):
        raise refuse(f"task {list(task.coord)} of op {op.name!r} fetches what it does not use")
    for fetch in task.fetches:
        tensor = plan.tensors[op.operands[fetch.operand]]
        buffer = plan.buffers[tensor.buffer]
        room = buffer.nbytes - tensor.start * by_name(tensor.dtype).itemsize
        if not buffer.initial or fleet.buffer_of(plan.rank, buffer.id) in written:
            raise refuse(f"op {op.name!r} streams {buffer.name!r}, which the loop writes")
        if fetch.offset < 0 or fetch.offset + fetch.nbytes > room or fetch.stage <= 0:
            raise refuse(f"op {op.name!r} streams past the end of {buffer.name!r}")
        if machine.ring_bytes and fetch.stage > machine.stage_bytes:
            raise refuse(
                f"op {op.name!r} streams {fetch.stage} bytes at once; a stage of the ring holds "
                f"{machine.stage_bytes}"
            )


def _check_shared_memory(fleet: Fleet, plan: Plan) -> None:
    machine = machine_of(plan)
    for op, sig in zip(plan.ops, fleet.signatures[plan.rank], strict=True):
        needed = kinds.get(op.kind).scratch(sig, machine) + machine.ring_bytes
        if needed > machine.shared_bytes:
            raise refuse(
                f"op {op.name!r} needs {needed} bytes of shared memory, a processor of "
                f"{machine.name} has {machine.shared_bytes}"
            )
