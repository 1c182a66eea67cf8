"""Finds flows: consecutive tasks of a processor's list between which the warps of a block need no
barrier, because no thread accesses bytes that another thread writes. In a flow each warp continues
by itself. So a chain of small ops has no barriers, and memory stays busy while one tile ends and
the next begins.

In some device functions each thread computes its own elements, in the order of box.h. Such a
function declares how many neighbouring elements a thread computes (TaskKind.apart). Let `span` be
their number of bytes, and `first` the first byte of the task's data. Then byte b belongs to thread
(b - first) / span, modulo the number of threads of the block. So if two tasks access the same bytes
with equal spans, the same thread accesses each byte. Called by ark.runtime.tables.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ark.backend.codegen.layout import FLOW_TASKS
from ark.ir.fold import fold
from ark.plan import kind as kinds
from ark.plan.access import space_of
from ark.plan.kind import Signature
from ark.plan.params import TiledParams
from ark.plan.serialize import machine_of
from ark.plan.types import Plan, Task
from ark.tasks.box_writer import MAX_KEPT_OPERANDS

MIN_FLOW_TASKS = 5  # the fewest tasks of a flow: more than fit in the loop's task slots


@dataclass(frozen=True)
class Touch:
    """Bytes that a task reads or writes. span: consecutive bytes that belong to one thread; 0 if
    the bytes are not divided among threads.
    """

    operand: int
    dtype: str
    space: tuple[str, int, int]
    first: int
    last: int
    span: int
    write: bool


@dataclass
class _Run:
    """The bytes that the tasks of a flow access, by memory space, ordered by their first bytes."""

    met: dict[tuple[str, int, int], list[tuple[int, int, int, bool]]] = field(default_factory=dict)
    longest: int = 0

    def takes(self, touches: Sequence[Touch]) -> bool:
        """True if a task with these accesses can be added to the flow: each byte is still accessed
        by one thread only.
        """
        return all(not self._meets(t) for t in touches)

    def _meets(self, t: Touch) -> bool:
        known = self.met.get(t.space, [])
        at = bisect_left(known, (t.first - self.longest,))
        for first, last, span, write in known[at:]:
            if first >= t.last:
                return False
            same = (first, last, span) == (t.first, t.last, t.span) and span > 0
            if last > t.first and (write or t.write) and not same:
                return True
        return False

    def add(self, touches: Sequence[Touch]) -> None:
        for t in touches:
            known, entry = self.met.setdefault(t.space, []), (t.first, t.last, t.span, t.write)
            place = bisect_left(known, entry)
            if place == len(known) or known[place] != entry:
                insort(known, entry)
            self.longest = max(self.longest, t.last - t.first)


@dataclass(frozen=True)
class Flow:
    """Tasks between which warps need no barrier. produced: for each task, a bit for each operand
    whose elements the previous task has computed in the same thread that reads them.
    """

    produced: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.produced)

    def words(self, bodies: Sequence[int]) -> list[int]:
        """The values of the field `flow` of the tasks' records (ArkTask). bodies: the numbers of
        the tasks' bodies.
        """
        encoded = [0] * len(self)
        same = 0
        for i in reversed(range(len(self))):
            same = same + 1 if i + 1 < len(self) and bodies[i] == bodies[i + 1] else 1
            kept = self.produced[i] if i and bodies[i] == bodies[i - 1] else 0
            encoded[i] = same << 8 | kept << 16
        encoded[0] |= len(self)
        return encoded


def flows(plan: Plan) -> dict[int, Flow]:
    """All flows of a plan: runs of tasks on one processor without block barriers between them. The
    result maps the number of a flow's first task to the flow. Tasks are numbered through the lists
    of all processors.
    """
    by_first_task: dict[int, Flow] = {}
    number = 0
    for index, phase in enumerate(plan.phases):
        known = _known(plan, index)
        for tasks in phase.processors:
            if known and len(tasks) >= MIN_FLOW_TASKS:
                by_first_task |= {number + i: flow for i, flow in _of_list(plan, tasks, known)}
            number += len(tasks)
    return by_first_task


Known = dict[int, tuple[Signature, int]]


def _known(plan: Plan, phase: int) -> Known:
    """The ops of a phase in which each thread computes its own elements. For each such op: its
    signature, and the number of neighbouring elements that a thread computes.
    """
    machine = machine_of(plan, phase)
    if machine.variant.name != "block" or not machine.cooperative:
        return {}
    ops = {task.op for tasks in plan.phases[phase].processors for task in tasks}
    known: dict[object, int] = {}
    neighbours_of: Known = {}
    for op in sorted(ops):
        sig = kinds.signature(plan, plan.ops[op])
        if sig.key not in known:
            known[sig.key] = kinds.get(sig.kind).apart(sig, machine)
        if known[sig.key]:
            neighbours_of[op] = sig, known[sig.key]
    return neighbours_of


def _of_list(plan: Plan, tasks: Sequence[Task], known: Known) -> Iterator[tuple[int, Flow]]:
    """The flows (runs of tasks without block barriers) of one task list, each with the position of
    its first task. Tasks of a flow do not wait, and only the last one may signal.
    """
    begin, run = 0, _Run()
    produced: list[int] = []
    before: Sequence[Touch] = ()

    def ended(end: int) -> Iterator[tuple[int, Flow]]:
        if end - begin >= MIN_FLOW_TASKS:
            yield begin, Flow(tuple(produced))

    for place, task in enumerate(tasks):
        own = task.op in known and not task.waits and not task.fetches
        touches = _touched(plan, task, *known[task.op]) if own else None
        behind = begin < place < begin + FLOW_TASKS and not tasks[place - 1].signals
        if touches is not None and behind and run.takes(touches):
            run.add(touches)
            produced.append(_produced(before, touches))
            before = touches
            continue
        yield from ended(place)
        begin, run = (place, _Run()) if touches is not None else (place + 1, _Run())
        run.add(touches or ())
        produced, before = [0], touches or ()
    yield from ended(len(tasks))


def _produced(before: Sequence[Touch], touches: Sequence[Touch]) -> int:
    """Returns a mask with a bit for each operand of a task, set if the previous task has computed
    the operand's elements in the same thread that reads them. before: the accesses of the previous
    task.
    """

    def place(t: Touch) -> tuple[object, ...]:
        return t.space, t.first, t.last, t.span, t.dtype

    written = {place(t) for t in before if t.write and t.span}
    reads = (t for t in touches if not t.write and t.operand < MAX_KEPT_OPERANDS)
    return sum(1 << t.operand for t in reads if place(t) in written)


def _touched(plan: Plan, task: Task, sig: Signature, neighbours: int) -> list[Touch] | None:
    """The accesses of a task in which each thread computes `neighbours` consecutive elements. None
    if peers may access the same bytes.
    """
    op = plan.ops[task.op]
    touches = []
    accesses = kinds.get(op.kind).accesses(sig, task.coord)
    out = next(a for a in reversed(accesses) if a.write)
    shape = [h - lo for lo, h in zip(out.lo, out.hi, strict=True)]
    whole = _in_order(shape, sig.read(TiledParams).tile)
    for access in accesses:
        tensor = plan.tensors[op.operands[access.operand]]
        buffer = plan.buffers[tensor.buffer]
        if tensor.packet or buffer.rank != plan.rank or buffer.arena == "symmetric":
            return None
        extent = [h - lo for lo, h in zip(access.lo, access.hi, strict=True)]
        first = sum(lo * s for lo, s in zip(access.lo, tensor.strides, strict=True))
        last = sum((h - 1) * s for h, s in zip(access.hi, tensor.strides, strict=True)) + 1
        base, size = max(buffer.offset, 0) + tensor.first_byte, tensor.itemsize
        dense = whole and _dense(extent, tensor.strides) and fold(extent) == fold(shape)
        dense = dense and math.prod(shape) % neighbours == 0
        span = neighbours * size if dense else 0
        place = base + first * size, base + last * size
        where = (access.operand, tensor.dtype, space_of(buffer))
        touches.append(Touch(*where, *place, span, access.write))
    return touches


def _in_order(shape: Sequence[int], tile: Sequence[int]) -> bool:
    """True if consecutive element numbers of a tile are consecutive elements of the part that is
    inside of the tensor. So only the first dimension in which the tile is longer than 1 may extend
    past the tensor's end.
    """
    pairs = list(zip(fold(shape), tile, strict=True))
    first = next((d for d, (_, t) in enumerate(pairs) if t > 1), len(pairs))
    return all(n == t for n, t in pairs[first + 1 :])


def _dense(extent: Sequence[int], strides: Sequence[int]) -> bool:
    """True if a box's elements are contiguous, the last dimension fastest."""
    step = 1
    for n, stride in zip(reversed(extent), reversed(strides), strict=True):
        if n > 1 and stride != step:
            return False
        step *= n
    return True
