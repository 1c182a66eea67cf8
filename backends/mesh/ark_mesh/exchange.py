"""Converts a plan into supersteps: in a superstep the cores compute on private memory; between two
supersteps they exchange messages.

The tasks of a phase are visited in program order. For every item of memory (the smallest unit that
tasks access) that a task writes, the exchange records the last writer, the cores that hold a copy,
and the supersteps of its accesses. A read of an item that its core does not hold becomes a message,
and the task is placed in the superstep after that message. The counters of the plan are not used:
program order and the tasks' accesses determine everything. Called by ark_mesh.executor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ark.ir.values import row_major
from ark.plan import kind as kinds
from ark.plan.boxes import Boxes, Templates
from ark.plan.types import INITIAL, Plan, PlanTensor, Task

HOST_WRITER = -1  # the last writer of an item that this iteration has not written


@dataclass(frozen=True, eq=False)
class Piece:
    """Byte ranges, begin[i] to end[i], of a buffer in the memory of a core."""

    core: int
    buffer: int
    begin: np.ndarray
    end: np.ndarray

    @property
    def nbytes(self) -> int:
        return int((self.end - self.begin).sum())


@dataclass(frozen=True, eq=False)
class Message:
    """A message: byte ranges of a buffer that a core sends to another core. changed: True to
    deliver only the bytes that the sender has changed in this iteration. This is needed if several
    cores append to the same item.
    """

    piece: Piece
    target: int
    changed: bool = False


@dataclass
class Supersteps:
    """The supersteps of one phase. tasks: for each core, (superstep, task) in the order in which
    they run. exchanges: the messages after each superstep. The last messages of an iteration make
    all copies of persistent data equal again. written: the locations of an iteration's results at
    its end. They are ordered by each buffer's last write, because buffers with disjoint lifetimes
    share host memory. last: for each buffer, the op that writes it last.
    """

    tasks: list[list[tuple[int, Task]]]
    exchanges: list[list[Message]] = field(default_factory=list)
    written: list[Piece] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)


@dataclass
class _Items:
    """A buffer that tasks write, divided into items of `size` bytes. A set of cores is a bit mask.

    holders: the cores that have the present contents of an item. homes: the cores that have the
    contents when an iteration begins. source: the last writer. wrote: the superstep of the last
    write. read: the superstep of the last read after that write. appended: the cores that appended
    to the item in this iteration. late: the last superstep of these appends.
    """

    size: int
    holders: np.ndarray
    homes: np.ndarray
    source: np.ndarray
    wrote: np.ndarray
    read: np.ndarray
    appended: np.ndarray
    late: np.ndarray

    @classmethod
    def of(cls, nbytes: int, size: int) -> _Items:
        count = -(-nbytes // size)
        holders, homes, appended = (np.zeros(count, np.uint64) for _ in range(3))
        source, wrote, read, late = (np.full(count, -1, np.int32) for _ in range(4))
        return cls(size, holders, homes, source, wrote, read, appended, late)

    def begin(self) -> None:
        """Resets the records to the state before an iteration: no core has written, and the
        contents are on the cores in `homes`.
        """
        self.holders[:] = 0
        self.appended[:] = 0
        for array in (self.source, self.wrote, self.read, self.late):
            array[:] = -1


def _bit(core: int) -> np.uint64:
    bit: np.uint64 = np.uint64(1 << core)
    return bit


class Exchange:
    """The supersteps of all phases of a plan, and the byte range of each buffer that a core
    touches.

    windows: by core and buffer, the first byte and the end.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.windows: list[dict[int, tuple[int, int]]] = [{} for _ in range(plan.processors)]
        self.shared: list[Piece] = []  # pieces that cores append to
        self._items: dict[int, _Items] = {}
        self._lasting = {b.id for b in plan.buffers if b.initial or b.arena in INITIAL}
        self._signatures = [kinds.signature(plan, op) for op in plan.ops]
        self._templates = Templates()
        self._sizes = self._item_sizes()
        coords = [self._coords(phase) for phase in range(len(plan.phases))]
        for number in range(len(plan.phases)):
            for op, where in coords[number].items():
                self._open(op, where)
        self.phases = []
        ends: list[dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]] = []
        for number in range(len(plan.phases)):
            self.phases.append(self._walk(number, coords[number]))
            ends.append(
                {
                    b: (i.source.copy(), i.holders.copy(), i.appended.copy())
                    for b, i in self._items.items()
                }
            )
        for steps, end in zip(self.phases, ends, strict=True):
            self._finish(steps, end)

    def _item_sizes(self) -> dict[int, int]:
        """For each buffer, the largest item size in bytes such that all tensors of the buffer
        consist of whole items.
        """
        sizes: dict[int, int] = {}
        for tensor in self.plan.tensors:
            size = np.gcd(tensor.itemsize, tensor.first_byte)
            sizes[tensor.buffer] = int(np.gcd(sizes.get(tensor.buffer, 0), size))
        return sizes

    def _coords(self, phase: int) -> dict[int, tuple[tuple[int, ...], ...]]:
        coords: dict[int, list[tuple[int, ...]]] = {}
        for tasks in self.plan.phases[phase].processors:
            for task in tasks:
                coords.setdefault(task.op, []).append(task.coord)
        return {op: tuple(where) for op, where in coords.items()}

    def _open(self, op: int, where: tuple[tuple[int, ...], ...]) -> None:
        """Allocates the records (last writer, copies) of the buffers that an op writes."""
        for boxes in self._templates.boxes(self._signatures[op], where):
            buffer = self.plan.tensors[self.plan.ops[op].operands[boxes.operand]].buffer
            if boxes.write and buffer not in self._items:
                nbytes = self.plan.buffers[buffer].nbytes
                self._items[buffer] = _Items.of(nbytes, self._sizes[buffer])

    def _walk(self, number: int, coords: dict[int, tuple[tuple[int, ...], ...]]) -> Supersteps:
        """Assigns the tasks of a phase to supersteps."""
        for items in self._items.values():
            items.begin()
        lists = self.plan.phases[number].processors
        steps = Supersteps([[] for _ in lists])
        reached = [0] * len(lists)  # by core, the superstep of its last task
        tasks = [(task.op, core, task) for core, own in enumerate(lists) for task in own]
        tasks.sort(key=lambda entry: entry[0])  # the sort is stable and keeps program order
        touched = {op: self._touched(op, where) for op, where in coords.items()}
        for op, core, task in tasks:
            accesses = touched[op].get(task.coord, [])
            needs = [self._need(core, *access) for access in accesses]
            step = max([reached[core], *(first for first, _ in needs)])
            while len(steps.exchanges) <= step:
                steps.exchanges.append([])
            for _, messages in needs:
                if messages:
                    steps.exchanges[step - 1] += messages
            for access in accesses:
                self._note(core, step, *access)
                buffer, _, write, _ = access
                if write:
                    steps.last[buffer] = op
            steps.tasks[core].append((step, task))
            reached[core] = step
        return steps

    def _touched(
        self, op: int, where: tuple[tuple[int, ...], ...]
    ) -> dict[tuple[int, ...], list[tuple[int, np.ndarray, bool, bool]]]:
        """For each task's coordinates, its accesses as (buffer, items, write, append_only), reads
        first.
        """
        touched: dict[tuple[int, ...], list[tuple[int, np.ndarray, bool, bool]]] = {}
        boxes_of = self._templates.boxes(self._signatures[op], where)
        for boxes in sorted(boxes_of, key=lambda b: b.write):
            tensor = self.plan.tensors[self.plan.ops[op].operands[boxes.operand]]
            size = self._sizes[tensor.buffer]
            places = [_places(tensor, boxes, row, size) for row in range(len(boxes.lo))]
            for task, row in zip(boxes.tasks.tolist(), boxes.box.tolist(), strict=True):
                access = (tensor.buffer, places[row], boxes.write, boxes.append_only)
                touched.setdefault(where[task], []).append(access)
        return touched

    def _need(
        self, core: int, buffer: int, at: np.ndarray, write: bool, append_only: bool
    ) -> tuple[int, list[Message]]:
        """Returns the first superstep in which the core may access the items, and the messages that
        must arrive before it.

        A write to a part of an item keeps the rest of it, so it counts as a read as well.
        """
        items = self._items.get(buffer)
        if items is None:
            return 0, []
        first = 0
        if write:
            first = int(max(first, items.wrote[at].max(), items.read[at].max()))
            first = first if append_only else int(max(first, items.late[at].max()))
        source = items.source[at]
        missing = (source != HOST_WRITER) & (items.holders[at] & _bit(core) == 0)
        messages: list[Message] = []
        if missing.any():
            first = max(first, int(items.wrote[at][missing].max()) + 1)
            for origin in np.unique(source[missing]).tolist():
                sent = self._piece(origin, buffer, at[missing & (source == origin)])
                messages.append(Message(sent, core))
        if not append_only:
            for origin in _cores(items.appended[at] & ~_bit(core)):
                from_it = items.appended[at] & _bit(origin) != 0
                first = max(first, int(items.late[at][from_it].max()) + 1)
                sent = self._piece(origin, buffer, at[from_it])
                messages.append(Message(sent, core, changed=True))
        return first, messages

    def _note(
        self, core: int, step: int, buffer: int, at: np.ndarray, write: bool, append_only: bool
    ) -> None:
        """Records that the core accesses the items in that superstep."""
        items, size = self._items.get(buffer), self._sizes[buffer]
        low, high = self.windows[core].get(buffer, (1 << 62, 0))
        low, high = min(low, int(at[0]) * size), max(high, int(at[-1] + 1) * size)
        self.windows[core][buffer] = low, high
        if items is None:
            return
        untouched = at[items.source[at] == HOST_WRITER]
        if buffer in self._lasting:
            items.homes[untouched] |= _bit(core)
        if not write:
            items.holders[at] |= _bit(core)
            items.read[at] = np.maximum(items.read[at], step)
        elif append_only:
            items.appended[at] |= _bit(core)
            items.late[at] = np.maximum(items.late[at], step)
        else:
            items.source[at], items.holders[at] = core, _bit(core)
            items.wrote[at], items.read[at] = step, step
            items.appended[at], items.late[at] = 0, -1

    def _finish(
        self, steps: Supersteps, end: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]
    ) -> None:
        """Adds the last exchange of an iteration and records the locations of the iteration's
        results after it.
        """
        last: list[Message] = []
        for buffer, (source, holders, appended) in end.items():
            items = self._items[buffer]
            for origin in np.unique(source[source != HOST_WRITER]).tolist():
                theirs = np.flatnonzero(source == origin)
                wanted = items.homes[theirs] & ~holders[theirs]
                for home in _cores(wanted):
                    stale = theirs[wanted & _bit(home) != 0]
                    last.append(Message(self._piece(origin, buffer, stale), home))
                alone = theirs[appended[theirs] == 0]
                if len(alone):
                    steps.written.append(self._piece(origin, buffer, alone))
            for origin in _cores(appended):
                theirs = np.flatnonzero(appended & _bit(origin))
                wanted = (items.homes[theirs] | appended[theirs]) & ~_bit(origin)
                for sets in np.unique(wanted):
                    piece = self._piece(origin, buffer, theirs[wanted == sets])
                    last += [Message(piece, home, True) for home in _cores(sets[None])]
                self.shared.append(self._piece(origin, buffer, theirs))
                lowest = theirs[appended[theirs] & (_bit(origin) - np.uint64(1)) == 0]
                if len(lowest):
                    steps.written.append(self._piece(origin, buffer, lowest))
        steps.written.sort(key=lambda piece: steps.last[piece.buffer])
        if not steps.exchanges:
            steps.exchanges.append([])
        steps.exchanges[-1] += last

    def _piece(self, core: int, buffer: int, at: np.ndarray) -> Piece:
        """The byte ranges of the given items of a buffer, with consecutive items joined. at: the
        numbers of the items, ascending, at least one.
        """
        size = self._sizes[buffer]
        breaks = np.flatnonzero(np.diff(at) != 1)
        begin = at[np.concatenate(([0], breaks + 1))] * size
        end = (at[np.concatenate((breaks, [len(at) - 1]))] + 1) * size
        return Piece(core, buffer, begin, end)


def _places(tensor: PlanTensor, boxes: Boxes, row: int, size: int) -> np.ndarray:
    """The items of `size` bytes that a box covers in its buffer, in ascending order."""
    strides = np.zeros(boxes.dims, np.int64)
    extents = tensor.items.extents
    strides[boxes.dims - len(extents) :] = row_major(extents)
    per = boxes.itemsize // size
    at = np.zeros(1, np.int64)
    for low, high, stride in zip(boxes.lo[row], boxes.hi[row], strides, strict=True):
        at = (at[:, None] + np.arange(low, high) * stride).ravel()
    if per > 1:
        at = (at[:, None] * per + np.arange(per)).ravel()
    return at + tensor.first_byte // size


def _cores(sets: np.ndarray) -> list[int]:
    """The cores that are in any of the sets, in ascending order."""
    union = int(np.bitwise_or.reduce(sets)) if len(sets) else 0
    return [core for core in range(union.bit_length()) if union >> core & 1]
