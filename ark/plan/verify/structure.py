"""Part of the verifier: checks that everything to which a plan refers exists, that all sizes fit,
and that no two entries contradict each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ark.errors import PlanError
from ark.ir.dtype import by_name
from ark.ir.values import MAX_DIMS
from ark.plan import kind as kinds
from ark.plan.memory import BUFFER_ALIGNMENT_BYTES, align
from ark.plan.rotated import Rotated
from ark.plan.serialize import machine_of
from ark.plan.types import (
    ARENAS,
    INITIAL,
    ITERATION_BARRIER,
    Plan,
    PlanTensor,
)
from ark.plan.verify.listing import Listing
from ark.plan.verify.rank_set import Key, RankSet, refuse
from ark.plan.verify.streams import check_streams, written_memory
from ark.plan.verify.work import WIDEST_READ_BYTES


def check_ranks(plans: Sequence[Plan]) -> None:
    """Raises PlanError unless these are the plans of all ranks, in order."""
    if not plans:
        raise refuse("the list of plans is empty; give one plan for each rank")
    if isinstance(plans, Rotated):
        return
    world = plans[0].world_size
    if [p.rank for p in plans] != list(range(world)):
        raise refuse(
            f"ranks {[p.rank for p in plans]} were given for a world of {world}; the "
            "plans of all ranks must be given, in order"
        )
    for plan in plans:
        if plan.world_size != world or len(plan.phases) != len(plans[0].phases):
            raise refuse(f"rank {plan.rank} differs from rank 0 in its number of ranks or phases")
        if plan.meta.get("engines") != plans[0].meta.get("engines"):
            raise refuse(
                f"ranks 0 and {plan.rank} were planned with different tables of `ark tune "
                "--collectives`; plan all ranks with the same tables: let Runtime.launch plan, "
                "measure on all "
                "hosts alike, or remove the tables with `ark tune --collectives --forget`"
            )
        _check_names(plan)


def check_structure(rank_set: RankSet) -> None:
    """Raises PlanError for the first reference that does not exist, size that does not fit or part
    that is inconsistent with another.
    """
    for plan in rank_set.checked_plans:
        _check_memory(rank_set, plan)
        _check_ops(plan)
        _check_counters(rank_set, plan)
        _check_lists(rank_set, plan)
    _check_forms(rank_set)


def check_tasks(rank_set: RankSet) -> None:
    """Raises PlanError for the first task with an access, a wait or a fetch that is not allowed."""
    for plan in rank_set.checked_plans:
        _check_tasks(rank_set, plan)
    phases = range(len(rank_set.checked_plans[0].phases))
    written = set().union(*(written_memory(rank_set, number) for number in phases))
    rewritten = [written_memory(rank_set, number, appended=False) for number in phases]
    if isinstance(rank_set.plans, Rotated):
        _check_moved(rank_set.plans, written)
    for plan in rank_set.checked_plans:
        check_streams(rank_set, plan, written, rewritten)
        _check_shared_memory(rank_set, plan)


def check_sizes(plan: Plan) -> None:
    """Raises PlanError unless each buffer is exactly as large as its largest tensor needs, and each
    arena as large as its buffers need. So a plan allocates no memory that it does not use.
    """
    needed: dict[int, int] = {}
    for t in plan.tensors:
        nbytes = math.prod(t.items.extents) * t.itemsize
        needed[t.buffer] = max(needed.get(t.buffer, 0), nbytes)
    ends: dict[str, int] = {}
    for b in plan.buffers:
        if b.nbytes != needed.get(b.id, b.nbytes):
            raise refuse(
                f"buffer {b.name!r} has {b.nbytes} bytes, but its largest tensor needs "
                f"{needed[b.id]}"
            )
        if b.rank == plan.rank:
            ends[b.arena] = max(ends.get(b.arena, 0), align(b.offset + b.nbytes))
    for arena, nbytes in plan.arenas.items():
        if nbytes != ends.get(arena, 0):
            raise refuse(
                f"arena {arena!r} has {nbytes} bytes, but its buffers need {ends.get(arena, 0)}"
            )


def _check_memory(rank_set: RankSet, plan: Plan) -> None:
    for b in plan.buffers:
        if b.arena not in ARENAS or not 0 <= b.rank < plan.world_size or b.nbytes <= 0:
            raise refuse(
                f"buffer {b.name!r} has arena {b.arena!r}, rank {b.rank} and {b.nbytes} bytes; "
                f"expected an arena of {', '.join(ARENAS)}, a rank below {plan.world_size} and "
                "1 byte or more"
            )
        if b.initial != (b.arena in INITIAL):
            raise refuse(
                f"buffer {b.name!r} of arena {b.arena!r} has initial={b.initial}, expected "
                f"{not b.initial}: buffers of {', '.join(INITIAL)} hold data before an iteration"
            )
        if b.rank != plan.rank:
            owner, entry = rank_set.buffer_of(plan.rank, b.id)
            if entry < 0:
                raise refuse(f"rank {plan.rank} uses buffer {b.name!r}, which rank {owner} lacks")
            named = rank_set.plan(owner).buffers[entry]
            if (named.nbytes, named.arena) != (b.nbytes, b.arena):
                raise refuse(
                    f"buffer {b.name!r} has {b.nbytes} bytes in arena {b.arena!r} on rank "
                    f"{plan.rank}, but {named.nbytes} in {named.arena!r} on its owner, rank {owner}"
                )
        elif b.arena != "external" and not (
            b.offset >= 0 and b.offset + b.nbytes <= plan.arenas.get(b.arena, 0)
        ):
            raise refuse(
                f"buffer {b.name!r} has bytes {b.offset} to {b.offset + b.nbytes} of arena "
                f"{b.arena!r}, which has {plan.arenas.get(b.arena, 0)}"
            )
        if b.offset > 0 and b.offset % BUFFER_ALIGNMENT_BYTES:
            raise refuse(
                f"buffer {b.name!r} lies at byte {b.offset}, expected a multiple of "
                f"{BUFFER_ALIGNMENT_BYTES}"
            )
    for t in plan.tensors:
        _check_tensor(plan, t)


def _check_tensor(plan: Plan, t: PlanTensor) -> None:
    if not 0 <= t.buffer < len(plan.buffers):
        raise refuse(f"tensor {t.name!r} is on buffer {t.buffer}, which does not exist")
    inside = 1 <= len(t.shape) == len(t.extents) == len(t.offsets) <= MAX_DIMS and all(
        o >= 0 and s > 0 and o + s <= e
        for o, s, e in zip(t.offsets, t.shape, t.extents, strict=True)
    )
    if not inside or math.prod(t.items.extents) * t.itemsize > plan.buffers[t.buffer].nbytes:
        raise refuse(
            f"tensor {t.name!r} of shape {list(t.shape)}, with offsets {list(t.offsets)} and "
            f"extents {list(t.extents)}, does not fit its buffer of "
            f"{plan.buffers[t.buffer].nbytes} bytes"
        )
    if t.offsets[-1] % by_name(t.dtype).per_item or t.extents[-1] % by_name(t.dtype).per_item:
        raise refuse(
            f"tensor {t.name!r} of {t.dtype} begins at element {t.offsets[-1]} of rows of "
            f"{t.extents[-1]} elements; both numbers must be multiples of "
            f"{by_name(t.dtype).per_item}, the number of elements that share a byte"
        )
    arena = plan.buffers[t.buffer].arena
    if arena != "symmetric" and t.packet != (arena == "packet"):
        raise refuse(
            f"tensor {t.name!r} has packet={t.packet}, but its buffer is in arena {arena!r}"
        )


def _check_moved(plans: Rotated, written: set[Key]) -> None:
    """Raises PlanError unless all tensors whose offset differs between ranks are valid. On every
    rank such a tensor must be inside its buffer, and the buffer must be a parameter that no task
    writes. Then the plans of the ranks differ only in these addresses.
    """
    first = plans.first
    changed = [first.buffers[b] for rank, b in written if rank == first.rank]
    for number in plans.moved:
        if not 0 <= number < len(first.tensors):
            raise refuse(
                f"the plans of the ranks list tensor {number} as one whose offset differs between "
                "ranks, but it does not exist"
            )
        tensor = first.tensors[number]
        own = first.buffers[tensor.buffer]
        begin, end = own.offset, own.offset + own.nbytes
        if (
            own.arena != "parameter"
            or own.rank != first.rank
            or any(
                b.arena == own.arena and b.offset < end and begin < b.offset + b.nbytes
                for b in changed
            )
        ):
            raise refuse(
                f"tensor {tensor.name!r} has an offset that differs between ranks, but is in arena "
                f"{own.arena!r} of rank {own.rank}; expected a parameter of this rank that no "
                "task writes"
            )
        for there in plans.everywhere(tensor):
            _check_tensor(first, there)
            if (there.first_byte - tensor.first_byte) % WIDEST_READ_BYTES:
                raise refuse(
                    f"the offset of tensor {tensor.name!r} differs by "
                    f"{there.first_byte - tensor.first_byte} bytes between ranks, expected a "
                    f"multiple of {WIDEST_READ_BYTES}"
                )


def _check_forms(rank_set: RankSet) -> None:
    """Raises PlanError if a buffer that peers access is used both as packets (values with an epoch)
    and as plain memory, by any rank.
    """
    forms: dict[Key, bool] = {}
    for plan in rank_set.checked_plans:
        for t in plan.tensors:
            if plan.buffers[t.buffer].arena == "symmetric":
                owner, buffer = rank_set.buffer_of(plan.rank, t.buffer)
                key = (
                    rank_set.symmetry.twin[owner],
                    buffer,
                )  # ranks that do the same work have the same buffer ids
                if forms.setdefault(key, t.packet) != t.packet:
                    raise refuse(
                        f"tensor {t.name!r} of rank {plan.rank} has packet={t.packet}, another "
                        f"tensor in the same buffer packet={not t.packet}; a buffer holds packets "
                        "or plain memory"
                    )


def _check_names(plan: Plan) -> None:
    """Raises PlanError unless names are unique among the buffers and counters that peers look up by
    name, and among the buffers that keep their contents, which the caller loads and saves by name.
    """
    kept = {b.id: b.name for b in plan.buffers if b.initial and b.rank == plan.rank}
    owner = {name: number for number, name in kept.items()}
    tensors = [(t.name, t.buffer) for t in plan.tensors if t.buffer in kept]
    for name, buffer in (*((name, number) for number, name in kept.items()), *tensors):
        if owner.get(name, buffer) != buffer:
            raise refuse(
                f"two buffers of rank {plan.rank} that keep their contents are called {name!r}; "
                "their names must differ, because data is loaded and saved by name"
            )
    local = [b for b in plan.buffers if b.rank == plan.rank and b.arena == "symmetric"]
    signalled = [c for c in plan.counters if c.rank == plan.rank and c.system]
    for entries, names in (
        ("buffers", [b.name for b in local]),
        ("counters", [c.name for c in signalled]),
    ):
        if len(set(names)) < len(names):
            raise refuse(
                f"two {entries} of rank {plan.rank} that peers use have the same name; peers look "
                "them up by name, so names must differ"
            )


def _check_ops(plan: Plan) -> None:
    hosts = plan.meta.get("hosts") or [0] * plan.world_size
    if len(hosts) != plan.world_size or any(type(h) is not int for h in hosts):
        raise refuse(f"the hosts are {hosts!r}, expected a number for each rank")
    for op in plan.ops:
        kinds.get(op.kind)
        for tensor in (*op.operands, *op.after):
            if not 0 <= tensor < len(plan.tensors):
                raise refuse(f"op {op.name!r} uses tensor {tensor}, which does not exist")
        owners = {plan.buffers[plan.tensors[t].buffer].rank for t in op.operands}
        if op.kind != "transfer" and any(hosts[o] != hosts[plan.rank] for o in owners):
            raise refuse(
                f"op {op.name!r} of kind {op.kind!r} touches memory of another host; only "
                "transfers reach there"
            )


def _check_counters(rank_set: RankSet, plan: Plan) -> None:
    """Raises PlanError unless counters and their owners exist, and counter 0 is an iteration
    barrier with a valid step, the same kind on all ranks.
    """
    for c in plan.counters:
        if not 0 <= c.rank < plan.world_size:
            raise refuse(f"counter {c.name!r} is on rank {c.rank}, which does not exist")
        if c.rank != plan.rank and rank_set.counter_of(plan.rank, c.id)[1] < 0:
            raise refuse(f"rank {plan.rank} signals {c.name!r}, which rank {c.rank} lacks")
    barrier = plan.counters[ITERATION_BARRIER] if plan.counters else None
    if barrier is None or barrier.name != "iteration barrier" or barrier.rank != plan.rank:
        raise refuse(
            f"counter {ITERATION_BARRIER} of rank {plan.rank} is not its own 'iteration barrier'"
        )
    barrier_step = barrier.step
    if plan.world_size == 1 and barrier_step > 0:
        return  # the number of its signals is checked when the phase is executed
    if barrier_step not in (1, plan.world_size) or (barrier_step == plan.world_size) != (
        rank_set.plan(0).counters[ITERATION_BARRIER].step == plan.world_size
    ):
        raise refuse(
            f"the iteration barrier of rank {plan.rank} has step {barrier_step}; expected "
            f"{plan.world_size} (all ranks) on every rank, or 1 on every rank"
        )


def _check_lists(rank_set: RankSet, plan: Plan) -> None:
    """Raises PlanError unless every processor has a task list in every phase, and every op to which
    a task belongs exists and has tasks in one phase only.
    """
    phase_of: dict[int, int] = {}
    offered = len(plan.machine["variants"])
    for number, phase in enumerate(plan.phases):
        if phase.variant >= offered:
            raise refuse(
                f"phase {phase.name!r} has variant {phase.variant}, but the machine has {offered} "
                "variants, numbered from 0"
            )
        machine = machine_of(plan, number)
        if len(phase.processors) != machine.lists:
            raise refuse(
                f"phase {phase.name!r} has {len(phase.processors)} task lists, expected "
                f"{machine.lists} for {machine.processors} processors"
            )
        for op in rank_set.listing(plan.rank, number).by_op:
            if not 0 <= op < len(plan.ops):
                raise refuse(f"a task belongs to op {op}, which does not exist")
            if phase_of.setdefault(op, number) != number:
                raise refuse(
                    f"op {plan.ops[op].name!r} has tasks in the phases "
                    f"{plan.phases[phase_of[op]].name!r} and {phase.name!r}, expected one phase"
                )
    for table in ("processor_ranges", "contexts"):
        asked = plan.meta.get(table)
        if asked is not None and len(asked) != len(plan.ops):
            raise refuse(
                f"{table} has {len(asked)} entries, expected one for each of {len(plan.ops)} ops"
            )


def _check_tasks(rank_set: RankSet, plan: Plan) -> None:
    for number in range(len(plan.phases)):
        _check_waits_and_signals(plan, rank_set.listing(plan.rank, number))
        try:
            touched = rank_set.touches(plan.rank, number)
        except PlanError as error:
            raise refuse(f"on rank {plan.rank}, {error}") from error
        for region in (r for listed_op in touched for r in listed_op if r.write):
            op = plan.ops[region.op]
            tensor = plan.tensors[op.operands[region.boxes.operand]]
            if region.boxes.union < math.prod(tensor.items.shape):
                raise refuse(
                    f"the tiles of op {op.name!r} write {region.boxes.union} of "
                    f"{math.prod(tensor.items.shape)} items of {tensor.name!r}; they must write all"
                )


def _check_waits_and_signals(plan: Plan, listed: Listing) -> None:
    local = np.array([c.rank == plan.rank for c in plan.counters])
    node, counter, threshold = listed.waits.T
    least = 0 if plan.counters[ITERATION_BARRIER].step < plan.world_size else 1
    bad = (counter < 0) | (counter >= len(local)) | (counter == ITERATION_BARRIER)
    bad |= threshold < least
    bad[~bad] = ~local[counter[~bad]]
    for i in np.flatnonzero(bad)[:1].tolist():
        name = plan.ops[listed.tasks[int(node[i])].op].name
        raise refuse(
            f"a task of op {name!r} waits for {int(threshold[i])} signals of counter "
            f"{int(counter[i])}; expected {least} or more, of a counter of rank {plan.rank} other "
            "than the iteration barrier"
        )
    node, counter = listed.signals.T
    for i in np.flatnonzero((counter < 0) | (counter >= len(local)))[:1].tolist():
        name = plan.ops[listed.tasks[int(node[i])].op].name
        raise refuse(f"a task of op {name!r} signals a counter that does not exist")


def _check_shared_memory(rank_set: RankSet, plan: Plan) -> None:
    machines = [machine_of(plan, number) for number in range(len(plan.phases))]
    phase_of = {
        op: number
        for number in range(len(plan.phases))
        for op in rank_set.listing(plan.rank, number).by_op
    }
    for op, sig in zip(plan.ops, rank_set.signatures(plan.rank), strict=True):
        machine = machines[phase_of.get(op.id, -1)]
        needed = kinds.get(op.kind).scratch(sig, machine) + machine.ring_bytes
        if needed > machine.shared_bytes:
            raise refuse(
                f"op {op.name!r} needs {needed} bytes of shared memory, a processor of "
                f"{machine.name} has {machine.shared_bytes}"
            )
