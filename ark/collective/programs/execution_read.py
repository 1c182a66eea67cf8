"""Reads MSCCL++ execution plans as programs, which can run in one of ark's kernels, in the
simulator and in NumPy.

An execution plan has a list of operations for each thread block of each GPU. The reader simulates
the thread blocks one operation at a time. A thread block passes a wait, semaphore or barrier when
the operation that it waits for has been simulated. If no thread block can continue, the plan
deadlocks.

The order of the simulation gives no dependencies. An operation of the program depends on another
one only if a wait, a semaphore, a barrier or the order in a thread block requires it. So if an
execution plan lacks a wait, the program has a race. Every program is checked before it is returned,
and the checker rejects races. `execution_moves` converts the operations that move data.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from dataclasses import dataclass, field

from ark.collective.programs import execution_form as form
from ark.collective.programs.builder import IN, OUT
from ark.collective.programs.checker import check
from ark.collective.programs.execution_moves import MOVES, Mover, flat, share, slices
from ark.collective.programs.order import in_order
from ark.collective.programs.types import (
    Buffer,
    Collective,
    CollectiveProgram,
    Counts,
    Kind,
    OpRef,
    Role,
    Span,
    io_slots,
)
from ark.errors import ModelError, UnsupportedError
from ark.ir.json_reader import read

_MOST_BYTES, _MOST_OPERATIONS = 32 << 20, 1 << 18
_COLLECTIVES = {name: collective for collective, name in form.COLLECTIVES.items()}
_COLLECTIVES[form.SEND_RECV] = Collective.ALL_TO_ALL
_SYNCS = ("nop", "flush", "barrier", "signal", "rlxsignal", "wait", "rlxwait", "pipeline")
_KNOWN = (*MOVES, *_SYNCS, "sem_acquire", "sem_release")


def from_execution_plan(
    text: str, reduction: str | None = None, root: int = 0
) -> CollectiveProgram:
    """Reads an MSCCL++ execution plan.

    Args: text: the JSON. reduction: the reduction of a plan that reduces; by default that of its
    operations, or a sum. root: the root of a broadcast or reduce, which the format does not
    contain.

    Raises ModelError with the location if the text is not an execution plan or the plan deadlocks,
    UnsupportedError for unsupported operations, and PlanError (ark.collective.programs.check) if
    the plan has a race or does not compute its collective.
    """
    if len(text) > _MOST_BYTES:
        raise ModelError(f"the execution plan is longer than {_MOST_BYTES} characters")
    plan = read(text, form.ExecutionPlan, "the execution plan")
    program = _Reader(plan, reduction, root).read()
    if plan.collective == form.SEND_RECV:
        program = dataclasses.replace(program, counts=_sent(program))
    check(program)
    return program


def _sent(program: CollectiveProgram) -> Counts:
    """The chunks that each rank sends to each other rank in a `sendrecv` plan. They are derived
    from the program, because the plan does not contain them.
    """
    ranks, chunks = program.ranks, program.chunks
    sources = {(rank, IN, slot): rank for rank in range(ranks) for slot in range(chunks)}
    for ref in in_order(program):
        op = program.op(ref)
        pairs = zip(op.srcs[0].slots(), op.dst.slots(), strict=True)
        moved = {dst: sources.get((ref.rank, op.srcs[0].buffer, src), -1) for src, dst in pairs}
        for slot, source in moved.items():
            sources[op.writes_on(ref.rank), op.dst.buffer, slot] = source
    received = [{sources.get((rank, OUT, slot), -1) for slot in range(chunks)}
                for rank in range(ranks)]  # fmt: skip
    if sorted(map(sorted, received)) != [[rank] for rank in range(ranks)]:
        raise ModelError(
            "the plan's collective is 'sendrecv', but its ranks do not each receive the whole "
            f"input of one rank: they receive chunks of ranks {[sorted(each) for each in received]}"
        )
    return tuple(tuple(chunks * (source in each) for each in received) for source in range(ranks))


@dataclass
class _Block:
    ops: list[form.Op]
    after: set[OpRef] = field(default_factory=set)  # what the next operation must wait for
    done: int = 0
    at_barrier: bool = False


class _Reader:
    def __init__(self, plan: form.ExecutionPlan, reduction: str | None, root: int) -> None:
        self.plan, self.gpus = plan, plan.gpus
        if [gpu.id for gpu in plan.gpus] != list(range(len(plan.gpus))):
            raise ModelError("the plan's gpus are not numbered 0, 1, ... in order")
        if plan.collective not in _COLLECTIVES:
            raise UnsupportedError(
                f"the plan's collective is {plan.collective[:40]!r}, which is not supported; use "
                f"one of {', '.join(_COLLECTIVES)}."
            )
        self.collective = _COLLECTIVES[plan.collective]
        self.parts = slices(plan)
        self.ranks = len(plan.gpus)
        reduction = self._reduction(reduction) if self.collective.reduces else None
        self.mover = Mover(plan, self.collective, reduction, self.parts)
        self.root = root if self.collective.rooted else None
        self.blocks = [self._blocks(gpu) for gpu in plan.gpus]
        self.pairs = self._pairs()
        self.signal_queues: dict[tuple[int, int], deque[frozenset[OpRef]]] = defaultdict(deque)
        self.released: dict[tuple[int, int], deque[frozenset[OpRef]]] = defaultdict(deque)
        for gpu in plan.gpus:
            for number, semaphore in enumerate(gpu.semaphores):
                self.released[gpu.id, number].extend([frozenset()] * min(semaphore.init_value, 64))

    def _blocks(self, gpu: form.Gpu) -> list[_Block]:
        if [block.id for block in gpu.threadblocks] != list(range(len(gpu.threadblocks))):
            raise ModelError(f"the thread blocks of gpu {gpu.id} are not numbered 0, 1, ...")
        blocks = []
        for block in gpu.threadblocks:
            ops = flat(block)
            for op in ops:
                if op.name not in _KNOWN:
                    raise UnsupportedError(
                        f"the operation {op.name[:40]!r} is not supported; use one of "
                        f"{', '.join(_KNOWN)}."
                    )
            blocks.append(_Block([share(op, self.parts) for op in ops]))
        if sum(len(block.ops) for block in blocks) > _MOST_OPERATIONS:
            raise ModelError(f"gpu {gpu.id} has more than {_MOST_OPERATIONS} operations")
        return blocks

    def _reduction(self, given: str | None) -> str:
        """The given reduction or, if none is given, the one that all operations of the plan use."""
        named = {
            op.reduce_op for gpu in self.gpus for block in gpu.threadblocks for op in flat(block)
        } - {None}
        if len(named) > 1:
            raise UnsupportedError(
                f"operations of the plan reduce by {' and '.join(sorted(map(str, named)))}; one "
                "plan has one reduction."
            )
        return given or next(iter(named), None) or "sum"

    def _pairs(self) -> dict[tuple[str, int, int], tuple[int, int]]:
        """For every (type, gpu, channel), the gpu and the channel at the other end of the
        connection.
        """
        lists: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        for gpu in self.gpus:
            count: dict[str, int] = defaultdict(int)
            for channels in gpu.channels:
                for peer in channels.connected_to:
                    kind = channels.channel_type
                    lists[kind, gpu.id, peer].append(count[kind])
                    count[kind] += 1
        pairs: dict[tuple[str, int, int], tuple[int, int]] = {}
        for (through, rank, peer), here in lists.items():
            for one, other in zip(here, lists.get((through, peer, rank), []), strict=False):
                pairs[through, rank, one] = (peer, other)
        return pairs

    def read(self) -> CollectiveProgram:
        """Simulates all thread blocks to their ends. Returns the program."""
        mover, parts = self.mover, self.parts
        for rank, blocks in enumerate(self.blocks):
            begun = mover.begin(rank)
            for block in blocks:
                block.after = set(begun)
        moved = True
        while moved:
            moved = False
            for rank, blocks in enumerate(self.blocks):
                for number, block in enumerate(blocks):
                    while block.done < len(block.ops) and self._step(rank, number, block):
                        moved = True
        for rank, blocks in enumerate(self.blocks):
            for number, block in enumerate(blocks):
                if block.done < len(block.ops):
                    raise ModelError(
                        f"the plan never ends: operation {block.done} "
                        f"({block.ops[block.done].name}) of thread block {number} on gpu {rank} "
                        "waits for a signal, packets or data that are never sent"
                    )
            if mover.works:
                own = Span("work", rank * mover.shard, mover.shard)
                every = {ref for block in blocks for ref in block.after}
                mover.add(rank, Kind.COPY, Span(OUT, 0, mover.shard), (own,), every)
        slots = (mover.chunks, mover.chunks)
        if self.plan.collective != form.SEND_RECV:
            slots = io_slots(self.collective, self.ranks, mover.chunks)
        buffers = [Buffer(IN, Role.IN, slots[0]), Buffer(OUT, Role.OUT, slots[1])]
        scratch = parts * max(gpu.scratch_chunks for gpu in self.gpus)
        more = {"s": scratch, "wire": max(mover.wire), "work": mover.chunks * mover.works}
        buffers += [Buffer(name, Role.SCRATCH, count) for name, count in more.items() if count]
        return CollectiveProgram(
            name=self.plan.name or self.plan.collective,
            collective=self.collective,
            ranks=self.ranks,
            chunks=mover.chunks,
            buffers=tuple(buffers),
            operations=tuple(tuple(ops) for ops in mover.operations),
            reduction=mover.reduction,
            root=self.root,
        )

    def _channels(self, rank: int, number: int, op: form.Op) -> list[int]:
        kind = op.channel_type
        ids = [
            each
            for channels in self.gpus[rank].threadblocks[number].channels
            if channels.channel_type == kind
            for each in channels.channel_ids
        ]
        if any(each >= len(ids) or (kind, rank, ids[each]) not in self.pairs
               for each in op.channel_ids):  # fmt: skip
            raise ModelError(
                f"{op.name} of thread block {number} on gpu {rank} names a channel that this "
                "thread block does not have, or that has no other end"
            )
        return [ids[each] for each in op.channel_ids]

    def _step(self, rank: int, number: int, block: _Block) -> bool:
        """Simulates a thread block's next operation if its dependencies are met. Returns whether
        it was simulated.
        """
        op = block.ops[block.done]
        if op.name in ("wait", "rlxwait"):
            queues = [self.signal_queues[rank, self._key(op, each)]
                      for each in self._channels(rank, number, op)]  # fmt: skip
            if not self._take(queues, block):
                return False
        elif op.name == "sem_acquire":
            if not self._take([self.released[rank, each] for each in op.semaphore_ids], block):
                return False
        elif op.name == "sem_release":
            for each in op.semaphore_ids:
                self.released[rank, each].append(frozenset(block.after))
        elif op.name == "barrier":
            return self._barrier(rank, op, block)
        elif op.name in MOVES:
            if self.mover.arrived(rank, op) is None:
                return False
            block.after = self.mover.move(rank, number, op, block.after)
        if op.name in ("signal", "rlxsignal", "pws", "pwsf"):
            for each in self._channels(rank, number, op):
                peer, other = self.pairs[op.channel_type or "", rank, each]
                self.signal_queues[peer, self._key(op, other)].append(frozenset(block.after))
        block.done += 1
        return True

    def _key(self, op: form.Op, channel: int) -> int:
        return 2 * channel + (op.channel_type == "port")

    def _take(self, queues: list[deque[frozenset[OpRef]]], block: _Block) -> bool:
        # An operation may wait for several entries of one queue (signals of one channel). All of
        # them must be in the queue.
        if any(len(queue) < sum(other is queue for other in queues) for queue in queues):
            return False
        for queue in queues:
            block.after |= queue.popleft()
        return True

    def _barrier(self, rank: int, op: form.Op, block: _Block) -> bool:
        """Simulates the arrival of a thread block at a barrier of several thread blocks. Returns
        True if it is the last of them to arrive, so that all of them continue.
        """
        block.at_barrier = True
        here = [
            each
            for each in self.blocks[rank]
            if each.at_barrier and each.ops[each.done].barrier_id == op.barrier_id
        ]
        if len(here) < (op.num_threadblocks or 1):
            return False
        after = set().union(*(each.after for each in here))
        for each in here:
            each.after, each.at_barrier = set(after), False
            each.done += 1
        return True
