"""Builds the arrays that the loop kernel reads: tasks, counter operations and fetches, with
addresses.

Called by ark.runtime.device_tables, after memory is allocated and peers are connected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ark.backend.codegen import layout
from ark.backend.codegen.body import BoxMap
from ark.backend.codegen.constants import signal_words
from ark.errors import PlanError
from ark.plan import kind as kinds
from ark.plan.boxes import Templates
from ark.plan.serialize import machine_of
from ark.plan.types import BOX_ROW_BYTES, Fetch, Growth, Plan, Task
from ark.runtime.flows import flows


@dataclass(frozen=True)
class Tables:
    """The arrays of a plan, in the layouts of ark.backend.codegen.layout. listing: the plan's Task
    objects in the order of the array `tasks`, for error messages.
    """

    tasks: np.ndarray
    counter_ops: np.ndarray
    fetches: np.ndarray
    growths: np.ndarray
    ranges: np.ndarray
    lists: np.ndarray  # operand addresses that do not fit in task records
    listing: tuple[tuple[int, int, Task], ...]  # (phase, processor, task) by index


def build(
    plan: Plan,
    opcode: Sequence[int],
    buffer_address: Callable[[int], int],
    counter_address: Callable[[int], int],
    box_maps: Sequence[Sequence[BoxMap]] = (),
    map_address: Callable[[int, int], int] | None = None,
    list_address: int = 0,
    own_count: Callable[[int], int] | None = None,
) -> Tables:
    """Builds the tables of a plan. opcode: for each op, the number of its device function in its
    kernel. box_maps: for each op, its box maps (tensor maps for TMA). buffer_address,
    counter_address: functions from an id to a device address. own_count: a function from a peer's
    counter to the address of the word in which this rank counts its signals to that counter.
    map_address: a function from an op's id and the number of a box map to the map's address.
    list_address: the address at which `lists` will be.
    """
    operands, limits = _operands(plan, buffer_address)
    counters = [counter_address(c.id) for c in plan.counters]
    stored = own_count if signal_words(plan, machine_of(plan)) > 1 else None
    maps = _map_addresses(plan, box_maps, map_address)
    cut = stream_boxes(plan)
    own = [[] if op.id in cut else maps[op.id] for op in plan.ops]
    own = [
        addresses if op.claims is None else [*addresses, counters[op.claims]]
        for op, addresses in zip(plan.ops, own, strict=True)
    ]
    rows, lists = _rows(operands, own, list_address)
    numbers = [kinds.get(op.kind).own(kinds.signature(plan, op))[::-1] for op in plan.ops]
    early = _early(plan, box_maps, cut)
    flowing = _flow_words(plan, opcode)
    listing: list[tuple[int, int, Task]] = []
    records: list[tuple[object, ...]] = []
    counter_ops: list[tuple[int, int, int, int, int]] = []
    fetch_addresses: list[np.ndarray] = []
    fetch_sizes: list[np.ndarray] = []
    fetch_forms: list[np.ndarray] = []
    growths: list[tuple[int, ...]] = []
    ranges: list[tuple[int, int, int, int]] = []
    fetched = 0
    for number, phase in enumerate(plan.phases):
        for processor, tasks in enumerate(phase.processors):
            first_task, first_fetch = len(records), fetched
            for task, before in zip(tasks, (None, *tasks), strict=False):
                stage, growing = fetched - first_fetch, 0
                for fetch in task.fetches:
                    operand = operands[task.op][fetch.operand]
                    room = limits[task.op][fetch.operand]
                    if fetch.growth is not None:
                        room = min(room, limits[task.op][fetch.growth.beside])
                    if fetch.offset < 0 or fetch.offset + fetch.reach > room:
                        raise PlanError(
                            f"op {plan.ops[task.op].name!r} fetches past the end of its "
                            "operand, so the plan is not valid; plan again"
                        )
                    starts, sizes, forms = _stages(fetch)
                    starts += np.uint64(operand + fetch.offset)
                    if fetch.parts > 1 and maps[task.op]:
                        starts, sizes, forms = _boxes(fetch, maps[task.op][0])
                    if fetch.growth is not None:
                        growths.append(_growth(fetch, fetch.growth, operands[task.op]))
                        growing = len(growths)
                        # The number of bytes of this fetch may grow during a launch. So one record
                        # describes the whole fetch, instead of one record per stage.
                        starts, sizes, forms = starts[:1], sizes[:1], np.full(1, growing)
                    fetch_addresses.append(starts)
                    fetch_sizes.append(sizes)
                    fetch_forms.append(forms)
                    fetched += len(starts)
                wait_begin = len(counter_ops)
                for counter, threshold in task.waits:
                    counter_ops.append(_counter_op(plan, counters, counter, threshold))
                signal_begin = len(counter_ops)
                for counter in task.signals:
                    op = _counter_op(plan, counters, counter, 1)
                    counter_ops.append(_by_store(plan, op, stored(counter)) if stored else op)
                spare = layout.MAX_COORDS - len(task.coord) - len(numbers[task.op])
                coord = (*task.coord, *([0] * spare), *numbers[task.op])
                records.append(
                    (
                        opcode[task.op],
                        task.op,
                        wait_begin,
                        signal_begin,
                        len(counter_ops),
                        flowing.get(len(records), 0),
                        stage,
                        fetched - first_fetch,
                        coord,
                        len(records),
                        growing or early.bits(task, before),
                        rows[task.op],
                    )
                )
                listing.append((number, processor, task))
            ranges.append((first_task, len(records), first_fetch, fetched))
    fetches = np.zeros(max(1, fetched), layout.dtype("ArkFetch"))
    if fetched:
        fetches["address"] = np.concatenate(fetch_addresses)
        fetches["bytes"] = np.concatenate(fetch_sizes)
        fetches["form"] = np.concatenate(fetch_forms)
    return Tables(
        tasks=np.array(records, layout.dtype("ArkTask")),
        counter_ops=np.array(counter_ops or [(0, 0, 0, 0, 0)], layout.dtype("ArkCounterOp")),
        fetches=fetches,
        growths=np.array(growths or [(0,) * 14], layout.dtype("ArkGrowth")),
        ranges=np.array(ranges, layout.dtype("ArkRange")),
        lists=lists,
        listing=tuple(listing),
    )


# Bits of a task's record. ALL: the boxes of all operands may be loaded before the task begins.
# RIGHT: those of a matmul's right operand may. BESIDE: the other boxes may be loaded once the
# preceding task of the list has performed its waits.
ALL, RIGHT, BESIDE = 1, 2, 4


@dataclass(frozen=True)
class _Early:
    """What may be loaded for tasks before they begin. flags: by op, the bit ALL or RIGHT. loaded,
    written: by op, the ids of the buffers that its box maps cover, and of those that it writes.
    """

    flags: dict[int, int]
    loaded: dict[int, frozenset[int]]
    written: dict[int, frozenset[int]]

    def bits(self, task: Task, before: Task | None) -> int:
        """The bits of a task. before: the preceding task of its processor. When `before` begins,
        all earlier tasks have ended. So loading need not wait for the end of `before` if `before`
        writes nothing that is loaded.
        """
        flag, loaded = self.flags.get(task.op, 0), self.loaded.get(task.op)
        if loaded is None or flag == ALL or before is None or before.op == task.op:
            return flag
        return flag if loaded & self.written.get(before.op, loaded) else flag | BESIDE


def _flow_words(plan: Plan, opcode: Sequence[int]) -> dict[int, int]:
    """For each task that belongs to a flow (a run of tasks without block barriers,
    ark.runtime.flows), by its index, the value of its record's field `flow`.
    """
    ops = [task.op for phase in plan.phases for tasks in phase.processors for task in tasks]
    word_of: dict[int, int] = {}
    for first, flow in flows(plan).items():
        words = flow.words([opcode[op] for op in ops[first : first + len(flow)]])
        word_of |= dict(enumerate(words, first))
    return word_of


def _early(plan: Plan, box_maps: Sequence[Sequence[BoxMap]], cut: frozenset[int]) -> _Early:
    """What may be loaded for each op whose boxes the loading thread copies. The flags are for ops
    whose box maps cover memory that is not written during a launch: of all operands (ALL), or only
    of a matmul's right-hand side (RIGHT). cut: the result of `stream_boxes`, the ids of the ops
    whose fetches have parts of rows in each stage.
    """
    mapped = {
        op.id: [op.operands[m.operand] for m in maps]
        for op, maps in zip(plan.ops, box_maps, strict=bool(box_maps))
        if maps and op.id not in cut
    }
    if not mapped:
        return _Early({}, {}, {})
    coords: dict[int, list[tuple[int, ...]]] = {}
    for phase in plan.phases:
        for task in (t for tasks in phase.processors for t in tasks):
            coords.setdefault(task.op, []).append(task.coord)
    # A caller's external buffers may overlap, so they are treated as one buffer: if a launch writes
    # one of them, all of them count as written. Buffers in new memory (`fresh`) are excepted.
    fresh = plan.meta.get("fresh", ())
    outer = {b.id for b in plan.buffers if b.arena == "external" and b.name not in fresh}

    def of(tensor: int) -> int:
        buffer = plan.tensors[tensor].buffer
        return min(outer) if buffer in outer else buffer

    templates, written = Templates(), dict[int, frozenset[int]]()
    for op in plan.ops:
        boxes = templates.boxes(kinds.signature(plan, op), tuple(coords.get(op.id, ())))
        written[op.id] = frozenset(of(op.operands[b.operand]) for b in boxes if b.write)
    every = frozenset().union(*written.values())
    kept = ("parameter", "state", "external")

    def unwritten(tensor: int) -> bool:
        buffer = plan.buffers[plan.tensors[tensor].buffer]
        return of(tensor) not in every and buffer.arena in kept and buffer.rank == plan.rank

    flags: dict[int, int] = {}
    for number, tensors in mapped.items():
        if all(map(unwritten, tensors)):
            flags[number] = ALL
        elif plan.ops[number].kind == "matmul" and unwritten(tensors[1]):
            flags[number] = RIGHT
    loaded = {number: frozenset(map(of, tensors)) for number, tensors in mapped.items()}
    return _Early(flags, loaded, written)


def _stages(fetch: Fetch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each stage of a fetch, the values of three fields of its record (ArkFetch): the first
    byte, the bytes of one piece, and the form.
    """
    if fetch.parts == 1:
        starts = np.arange(0, fetch.nbytes, fetch.stage, dtype=np.uint64)
        sizes = np.minimum(fetch.stage, fetch.nbytes - starts.astype(np.int64))
        return starts, sizes, np.zeros(len(starts), np.int64)
    row = fetch.piece * fetch.parts
    first, part = np.divmod(
        np.arange(-(-fetch.nbytes // (fetch.rows * row)) * fetch.parts), fetch.parts
    )
    pieces = np.minimum(fetch.rows, fetch.nbytes // row - first * fetch.rows)
    starts = (first * fetch.rows * row + part * fetch.piece).astype(np.uint64)
    return starts, np.full(len(starts), fetch.piece), layout.fetch_form(pieces, row)


def _boxes(fetch: Fetch, address: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Like `_stages`, for a fetch whose stages are loaded by box copies (TMA). address: the
    device address of the box map (tensor map).
    """
    row, lines = fetch.piece * fetch.parts, fetch.piece // BOX_ROW_BYTES
    first, part = np.divmod(
        np.arange(-(-fetch.nbytes // (fetch.rows * row)) * fetch.parts), fetch.parts
    )
    addresses = np.full(len(first), address, np.uint64)
    forms = layout.box_form(fetch.offset // row + first * fetch.rows)
    return addresses, fetch.stage | part * lines << 16, forms


def stream_boxes(plan: Plan) -> frozenset[int]:
    """The ids of ops whose fetches have parts of rows in each stage. Their box maps are used by the
    operand stream (the copies that run ahead of tasks), not by the tasks.
    """
    phases = (phase.processors for phase in plan.phases)
    tasks = (task for processors in phases for tasks in processors for task in tasks)
    return frozenset(t.op for t in tasks if any(f.parts > 1 for f in t.fetches))


def _growth(fetch: Fetch, growth: Growth, operands: list[int]) -> tuple[int, ...]:
    """The values of the fields of an ArkGrowth, which describes a fetch whose size grows with the
    iterations. operands: the addresses of the op's operands.
    """
    row, rows, step = growth.row, fetch.nbytes // growth.row, fetch.stage // growth.row
    first, beside = (operands[i] + fetch.offset for i in (fetch.operand, growth.beside))
    share = (row, rows, step, growth.part, growth.parts)
    pages = growth.pages
    if pages is None:
        return (first, beside, operands[growth.length], 0, *share, 0, 0, 0, growth.window, 0)
    table = operands[pages.table]
    own = (pages.rows, pages.pitch, pages.count)
    return (first, beside, operands[growth.length], table, *share, *own, growth.window, 0)


def _map_addresses(
    plan: Plan, box_maps: Sequence[Sequence[BoxMap]], map_address: Callable[[int, int], int] | None
) -> list[list[int]]:
    """For each op, the addresses of its box maps."""
    addresses: list[list[int]] = []
    for op in plan.ops:
        count = len(box_maps[op.id]) if box_maps and map_address else 0
        if count and len(op.operands) + count > layout.RECORD_OPERANDS:
            raise PlanError(
                f"op {op.name!r} has {len(op.operands)} operands and {count} tensor maps; a task "
                f"record has room for {layout.RECORD_OPERANDS} of both together; split the op"
            )
        addresses.append([map_address(op.id, i) for i in range(count)] if map_address else [])
    return addresses


def listed(plan: Plan) -> int:
    """The number of operand and map addresses that do not fit in task records, and are stored in
    the array `lists`.
    """
    room = layout.RECORD_OPERANDS
    return sum(len(op.operands) - room + 1 for op in plan.ops if len(op.operands) > room)


def _rows(
    operands: list[list[int]], maps: list[list[int]], list_address: int
) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Returns, for each op, the operand and map addresses that are stored in its tasks' records;
    and an array with the addresses that do not fit in records, which are stored in the table
    `lists`.
    """
    rows: list[tuple[int, ...]] = []
    lists: list[int] = []
    room = layout.RECORD_OPERANDS
    for own, mapped in zip(operands, maps, strict=True):
        row = [*own, *mapped]
        if len(row) > room:
            place = list_address + 8 * len(lists)
            lists += row[room - 1 :]
            row = [*row[: room - 1], place]
        rows.append((*row, *([0] * (room - len(row)))))
    return rows, np.array(lists, np.uint64)


def _counter_op(
    plan: Plan, addresses: list[int], counter: int, value: int
) -> tuple[int, int, int, int, int]:
    entry = plan.counters[counter]
    flags = layout.COUNTER_OP_SYSTEM if entry.system else 0
    hosts = plan.meta.get("hosts")
    if hosts and hosts[entry.rank] != hosts[plan.rank]:
        flags |= layout.COUNTER_OP_FAR
    return addresses[counter], value, entry.step, counter, flags


def _by_store(
    plan: Plan, op: tuple[int, int, int, int, int], own_count: int
) -> tuple[int, int, int, int, int]:
    """Converts a counter operation to one that signals by a store instead of an atomic addition.
    Each rank has its own word of the counter, to which it stores the number of its signals so far.
    For a peer's counter, this number is read from this rank's memory at `own_count`.
    """
    address, value, step, counter, flags = op
    if not flags & layout.COUNTER_OP_SYSTEM:
        return op
    address += 4 * plan.rank
    if plan.counters[counter].rank == plan.rank:
        return address, value, step, counter, flags
    flags |= layout.COUNTER_OP_STORED
    return address, value, own_count & 0xFFFFFFFF, own_count >> 32, flags


def _operands(
    plan: Plan, buffer_address: Callable[[int], int]
) -> tuple[list[list[int]], list[list[int]]]:
    """For each op: the operands' addresses, and the number of bytes from each address to the end of
    its buffer.
    """
    addresses: list[list[int]] = []
    limits: list[list[int]] = []
    for op in plan.ops:
        row, room = [], []
        for tensor_id in op.operands:
            tensor = plan.tensors[tensor_id]
            start = tensor.first_byte
            row.append(buffer_address(tensor.buffer) + start)
            room.append(plan.buffers[tensor.buffer].nbytes - start)
        addresses.append(row)
        limits.append(room)
    return addresses, limits
