"""The cost model: predicts the timeline of one iteration, for comparison with a measured one.

A task takes its start time plus the longer of its arithmetic time and its memory time, at the
machine's rates (ark.machine.costs). Products of types that matrix units support run at the rate of
matrix units, all else at that of scalar units. The first read of a byte by an op runs at the rate
of memory, or of the last-level cache if all buffers of the plan fit into that cache. Further reads
of the same byte by tasks of the op run at the rate of the cache. A dependency between two tasks
adds the machine's signal time, by counter or by packets. `ark bench fidelity` measures the model's
error. Called by `ark trace`, by ark.cli.measure.predicted, and by ark.interop (for the number of
processors that a graph can keep busy), and by ark.lower.list_scheduling for training steps.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from ark.ir.fold import MAX_FOLDED_DIMS
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.costs import BoxCosts
from ark.plan import kind as kinds
from ark.plan.access import Region, region
from ark.plan.boxes import Templates
from ark.plan.kind import Signature
from ark.plan.params import PartialParams, TiledParams
from ark.plan.serialize import machine_of
from ark.plan.types import BOX_ALIGNMENT_BYTES, BOX_ROW_BYTES, Plan, Task

# Kinds of tasks that compute products. Matrix units compute them if they support their types.
PRODUCTS = (
    *("matmul", "linear", "linear_rows", "expert_linear"),
    *("attention_tiles", "attention_gradient"),
)
CONVOLUTIONS = ("convolution", "grouped_convolution")
VECTOR_BYTES = 16  # neighbouring elements of at least this size are moved together
# Rows of fewer elements are not read by the neighbouring lanes of a warp.
MIN_COALESCED_ROW_ELEMENTS = 32
# A product whose tile has at most MAX_FEW_ROWS rows or columns uses scalar units, at `few_rate` if
# it has at least MIN_FEW_ROWS.
MAX_FEW_ROWS, MIN_FEW_ROWS = 16, 9
Place = tuple[int, int]  # processor, position


@dataclass(frozen=True)
class Span:
    """When a task is predicted to begin and to end, in microseconds from the beginning of its phase
    (ark.plan.types.Phase: the tasks of one iteration, such as of a prompt or of a token).
    """

    processor: int
    position: int
    task: Task
    begin: float
    end: float


def predict(plan: Plan, phase: int) -> list[Span]:
    """The predicted timeline of one phase, sorted by processor and position. Waits for other ranks
    are assumed to take no time.
    """
    machine = machine_of(plan)
    takes = _takes(plan, machine)
    waits, signals = _waits_and_signals(plan, phase)
    left: dict[Hashable, int] = defaultdict(int)
    for events in signals.values():
        for event in events:
            left[event] += 1
    ready: dict[Hashable, float] = defaultdict(float)
    waiting: dict[Hashable, list[int]] = defaultdict(list)
    lists = plan.phases[phase].processors
    clock = [0.0] * len(lists)
    heads = [0] * len(lists)
    spans: list[Span] = []
    able = list(range(len(lists)))
    while able:
        processor = able.pop()
        while heads[processor] < len(lists[processor]):
            place = (processor, heads[processor])
            task = lists[processor][heads[processor]]
            missing = next((event for event in waits[place] if left[event] > 0), None)
            if missing is not None:
                waiting[missing].append(processor)
                break
            begin = max([clock[processor], *(ready[event] for event in waits[place])])
            next_to = heads[processor] and not waits[place]
            before = lists[processor][heads[processor] - 1] if next_to else None
            end = begin + takes(task, before)
            spans.append(Span(*place, task, begin, end))
            clock[processor] = end
            heads[processor] += 1
            for event in signals[place]:
                left[event] -= 1
                ready[event] = max(ready[event], end + machine.costs.signal_us)
                if not left[event]:
                    able += waiting.pop(event, ())
    return sorted(spans, key=lambda span: (span.processor, span.position))


def work(plan: Plan, phase: int) -> float:
    """Predicted microseconds of all tasks of one iteration if they were executed one after the
    other.
    """
    takes = _takes(plan, machine_of(plan))
    return sum(takes(task, None) for tasks in plan.phases[phase].processors for task in tasks)


def busied(plan: Plan, machine: Machine) -> int:
    """The number of processors that the plan's first phase can keep busy. On most machines this is
    the number of all processors. It may be smaller if each launch starts threads as processors (as
    on a CPU), because idle threads would spin while they wait.
    """
    if not machine.has(Capability.STARTS_PROCESSORS):
        return machine.processors
    return min(machine.processors, max(1, int(work(plan, 0) / machine.costs.start_work_us)))


def phase_us(plan: Plan, phase: int) -> float:
    """The predicted microseconds until the last task of phase number `phase` ends."""
    return max((span.end for span in predict(plan, phase)), default=0.0)


def iteration_us(plan: Plan) -> float:
    """The predicted microseconds of one iteration of the plan's last phase, including the barrier
    at the end of the iteration.
    """
    return phase_us(plan, len(plan.phases) - 1) + machine_of(plan).costs.barrier_us


def _takes(plan: Plan, machine: Machine) -> Callable[[Task, Task | None], float]:
    """A function that returns the microseconds a processor takes for a task. Its second argument is
    the task that ended on the processor just before, or None if the processor waited in between.
    """
    costs = machine.costs
    signatures = [kinds.signature(plan, op) for op in plan.ops]
    op_kinds = [kinds.get(op.kind) for op in plan.ops]
    counts = Counter(t.op for p in plan.phases for tasks in p.processors for t in tasks)
    whole = sum(b.nbytes for b in plan.buffers if b.rank == plan.rank)
    rates: dict[int, tuple[float, float]] = {}
    begins: dict[int, float] = {}
    touched: dict[int, tuple[set[int], set[int]]] = {}

    def buffers(task: Task) -> tuple[set[int], set[int]]:
        """The buffers that the task's op reads, and those that it writes."""
        if task.op not in touched:
            reads, writes = touched[task.op] = set(), set()
            for access in op_kinds[task.op].accesses(signatures[task.op], task.coord):
                tensor = plan.ops[task.op].operands[access.operand]
                (writes if access.write else reads).add(plan.tensors[tensor].buffer)
        return touched[task.op]

    def rate(op: int, moves: float) -> tuple[float, float]:
        """The rates at which a task of the op runs, as a pair: operations per microsecond, and
        bytes per microsecond. moves: the number of bytes that one task moves.
        """
        active = min(machine.processors, counts[op])
        cache = cache_rate(signatures[op], machine, active)
        first = cache
        if whole > costs.cache_bytes:
            sig = signatures[op]
            turned = sig.kind == "transpose" and sig.read(_Permuted).perm[-1] != 3
            share = costs.turned_share if turned else 1.0
            first = min(cache, share * machine.bandwidth_gbps * 1e3 / active)
        once = sum(plan.tensors[t].nbytes for t in plan.ops[op].operands)
        share = min(1.0, once / max(1.0, moves * counts[op]))
        return operations(signatures[op], machine), 1.0 / (share / first + (1 - share) / cache)

    def takes(task: Task, before: Task | None) -> float:
        sig = signatures[task.op]
        flops, moves = op_kinds[task.op].cost(sig, task.coord)
        if task.op not in rates:
            rates[task.op] = rate(task.op, moves)
        rate_of, read = rates[task.op]
        near = moves <= costs.next_bytes
        if before is not None and near and buffers(before)[1] & buffers(task)[0]:
            return costs.next_us + max(flops / rate_of, moves / costs.next_rate)
        if task.op not in begins:
            later = op_kinds[task.op].rounds(sig, machine) - 1
            begins[task.op] = costs.task_us + costs.pass_us * later
        singly = apart(sig, machine) / costs.apart_rate
        return begins[task.op] + max(flops / rate_of, moves / read, singly)

    return takes


def apart(sig: Signature, machine: Machine) -> int:
    """The number of elements that a task moves if neighbouring threads do not access neighbouring
    memory: copies by index arithmetic with runs of few elements, and reductions of short rows.
    Otherwise 0.
    """
    elements = 1
    if kinds.get(sig.kind).coalesced(sig, machine):
        return 0
    if sig.kind == "remap":
        source, out = sig.operands[0], sig.operands[1]
        last = len(out.shape) - 1
        factors = [[f for d, f in rule[0] if d == last] for rule in sig.read(_Rules).rules]
        beside = not any(factors[:-1]) and [abs(f) for f in factors[-1]] == [1]
        run = out.shape[last] if beside else 1
        if run * out.itemsize >= VECTOR_BYTES or source.shape[-1] == 1:
            return 0
    elif sig.kind == "reduce":
        given = sig.read(_Reduced)
        if given.axis != MAX_FOLDED_DIMS - 1 or not 1 < given.count < MIN_COALESCED_ROW_ELEMENTS:
            return 0
        elements = given.count
    else:
        return 0
    return elements * math.prod(sig.read(TiledParams).tile)


class _Rules(PartialParams, frozen=True):
    """The index arithmetic of copies, the only parameter of them that the cost model reads."""

    rules: tuple[Any, ...]


class _Reduced(PartialParams, frozen=True):
    """The dimension that a reduction reduces, and its size."""

    axis: int
    count: int


class _Permuted(PartialParams, frozen=True):
    """The order of dimensions, the only parameter of a transpose that the cost model reads."""

    perm: tuple[int, ...]


class _Windows(PartialParams, frozen=True):
    """The sizes of a convolution's window, the only parameter of it that the cost model reads."""

    size: tuple[int, ...]


class _Product(PartialParams, frozen=True):
    """The parameters of matrix products that the cost model reads: their accuracy (tf32), and the
    convolution windows that are an operand.
    """

    tf32: bool = False
    windows: Any = None


def cache_rate(sig: Signature, machine: Machine, active: int) -> float:
    """Bytes per microsecond that one processor loads from the last-level cache while `active`
    processors load. The rate is higher if box copies (TMA) load tiles of few rows or columns,
    because a stage of the ring then holds several steps of the inner loop. It is not for windows of
    convolutions, of which each step takes a copy of its own.
    """
    costs = machine.costs
    usual = min(costs.processor_rate, costs.cache_rate / active)
    if sig.kind != "matmul" or machine.variant.name != "matrix" or costs.boxes is None:
        return usual
    small = 2 * BOX_ROW_BYTES * sum(sig.read(TiledParams).tile) <= costs.boxes.small_stage
    return costs.boxes.small_load_rate if small and not sig.read(_Product).windows else usual


def few_rate(machine: Machine, exact: bool) -> float:
    """Operations per microsecond of one processor in products with MIN_FEW_ROWS to MAX_FEW_ROWS
    rows or columns. exact: True for products in full fp32.
    """
    costs = machine.costs
    staged = exact and machine.variant.name == "block" and costs.staged_rate > 0
    return costs.staged_rate if staged else costs.few_rate


def operations(sig: Signature, machine: Machine) -> float:
    """Operations per microsecond of one processor: those of matrix units for products of types that
    they support, otherwise those of scalar units.
    """
    costs = machine.costs
    if sig.kind in CONVOLUTIONS and costs.boxes is not None:
        return _convolved(sig, machine, costs.boxes)
    if sig.kind == "attention_gradient" and costs.boxes is not None:
        return costs.boxes.attention_rate
    if sig.kind not in PRODUCTS:
        return costs.scalar_rate
    least = min(sig.read(TiledParams).tile) if sig.kind == "matmul" else MAX_FEW_ROWS + 1
    several = not machine.has(Capability.ONE_PRODUCT_BODY)
    boxed = machine.variant.name == "matrix"
    exact = sig.operands[0].dtype == "fp32" and not sig.read(_Product).tf32
    if several and least <= MAX_FEW_ROWS and (exact or not boxed):
        narrow = min(sig.operands[2].shape[-2:])
        return (
            few_rate(machine, exact)
            if MIN_FEW_ROWS <= narrow <= MAX_FEW_ROWS
            else costs.scalar_rate
        )
    units, most = machine.tflops * 1e6 / machine.processors, math.inf
    if boxed and sig.kind == "matmul" and costs.boxes is not None and sig.read(_Product).windows:
        # Each step along k takes at least the time of a copy of windows.
        step = BOX_ROW_BYTES // sig.operands[0].itemsize * math.prod(sig.read(TiledParams).tile)
        most = 2 * step / costs.boxes.least_step_us
    if several and sig.operands[0].dtype == "fp32":
        if not exact:
            return min(units / 2, most)
        alone = boxed and sig.kind == "matmul"  # fp32 tiles always use the machine's first variant
        if alone and costs.boxes:
            return costs.boxes.plain_rate
        return costs.exact_rate / (1.0 + (0.0 if _aligned(sig) else costs.unaligned_share))
    return 2 * units if sig.operands[0].itemsize == 1 else min(units, most)


def _convolved(sig: Signature, machine: Machine, boxes: BoxCosts) -> float:
    """Operations per microsecond of one processor in a convolution whose windows are not loaded by
    box copies (TMA im2col). A grouped convolution with several outputs per group is slower if
    channels are not the last dimension, because it then reads the image element by element.
    """
    weight, source, out = sig.operands[:3]
    if sig.kind == "convolution":
        by_elements = out.shape[1] > 1 and out.shape[2] > 1
        return boxes.plain_rate if by_elements else machine.costs.scalar_rate
    each = weight.shape[0] // math.prod(sig.read(_Windows).size)
    rows = out.shape[3] // (source.shape[3] // each)
    halves = source.itemsize == weight.itemsize == 2 and each % 8 == rows % 8 == 0
    units = halves and machine.has(Capability.MMA_SYNC)
    return boxes.common_rate if units else machine.costs.scalar_rate


def _aligned(sig: Signature) -> bool:
    """True if all rows of a product's operands begin at multiples of 16 bytes."""
    steps = (s * o.itemsize for o in sig.operands[:2] for s in o.strides[:-1])
    return all(step % BOX_ALIGNMENT_BYTES == 0 for step in steps)


def _waits_and_signals(
    plan: Plan, phase: int
) -> tuple[dict[Place, list[Hashable]], dict[Place, list[Hashable]]]:
    """The events that each task waits for and those that it signals. An event is the id of one of
    this rank's counters or a set of packets.
    """
    waits: dict[Place, list[Hashable]] = defaultdict(list)
    signals: dict[Place, list[Hashable]] = defaultdict(list)
    by_op: dict[int, list[tuple[tuple[int, ...], Place]]] = defaultdict(list)
    for processor, tasks in enumerate(plan.phases[phase].processors):
        for position, task in enumerate(tasks):
            place = (processor, position)
            by_op[task.op].append((task.coord, place))
            waits[place] += [counter for counter, _ in task.waits]
            signals[place] += [c for c in task.signals if plan.counters[c].rank == plan.rank]
    templates = Templates()
    readers: list[Region] = []
    writers: dict[Hashable, list[Region]] = defaultdict(list)
    for op, listed in by_op.items():
        listed.sort()
        entry = plan.ops[op]
        if not any(plan.tensors[t].packet for t in entry.operands):
            continue
        coords = tuple(coord for coord, _ in listed)
        for boxes in templates.boxes(kinds.signature(plan, entry), coords):
            tensor = plan.tensors[entry.operands[boxes.operand]]
            touched = region(op, boxes, tensor, plan.buffers[tensor.buffer])
            if tensor.packet:
                (writers[tensor.buffer] if boxes.write else readers).append(touched)
    for reader in readers:
        members, starts = reader.boxes.by_box
        for writer in writers[reader.memory]:
            known: dict[bytes, Hashable] = {}
            for box, producers, key in reader.tasks_met(writer):
                event = known.get(key)
                if event is None:
                    event = known[key] = (reader.op, writer.op, reader.boxes.operand, len(known))
                    for producer in producers.tolist():
                        signals[by_op[writer.op][producer][1]].append(event)
                for member in members[starts[box] : starts[box + 1]].tolist():
                    waits[by_op[reader.op][member][1]].append(event)
    return waits, signals
