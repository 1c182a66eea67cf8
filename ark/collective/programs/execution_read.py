"""Reads MSCCL++ execution plans as programs, which run in a plan, in the simulator and in NumPy.

The thread blocks are followed in an order that the plan's signals, semaphores and barriers allow,
which detects deadlocks. An operation's dependencies come from these alone, never from the order of
following, so that the checker, which every program passes before it is returned, refuses a plan
with a missing wait. Packets, switch channels and slices are not supported.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from ark.collective.programs import execution_form as form
from ark.collective.programs.builder import IN, OUT
from ark.collective.programs.checker import check
from ark.collective.programs.types import (
    Buffer,
    Collective,
    CollectiveProgram,
    Kind,
    Operation,
    OpRef,
    Role,
    Span,
    io_slots,
)
from ark.errors import ModelError, UnsupportedError
from ark.ir.json_reader import read

_MOST_BYTES, _MOST_OPERATIONS = 32 << 20, 1 << 18
_COLLECTIVES = {name: collective for collective, name in form.COLLECTIVES.items()}
_MOVES = ("put", "pws", "pwsf", "get", "copy", "re", "res", "rre", "rres")
_SYNCS = ("nop", "flush", "barrier", "signal", "rlxsignal", "wait", "rlxwait", "pipeline")
_KNOWN = (*_MOVES, *_SYNCS, "sem_acquire", "sem_release")


def from_execution_plan(text: str, reduction: str = "sum", root: int = 0) -> CollectiveProgram:
    """Reads an MSCCL++ execution plan.

    Args: text: the JSON. reduction: of a reducing plan; the form does not contain it, MSCCL++
    itself adds. root: of a broadcast or reduce, which the form does not contain either.

    Raises ModelError with the location on anything that is not such a plan or deadlocks,
    UnsupportedError for unsupported operations, and PlanError (ark.collective.programs.check) on a
    plan that races or does not compute its collective.
    """
    if len(text) > _MOST_BYTES:
        raise ModelError(f"the execution plan is longer than {_MOST_BYTES} characters")
    plan = read(text, form.ExecutionPlan, "the execution plan")
    if plan.protocol != "Simple":
        raise UnsupportedError(
            "plans of packets (protocol LL) are not supported; use protocol Simple."
        )
    program = _Reader(plan, reduction, root).read()
    check(program)
    return program


@dataclass
class _Block:
    ops: list[form.Op]
    after: set[OpRef] = field(default_factory=set)  # the operations that precede the next one
    done: int = 0
    at_barrier: bool = False


class _Reader:
    def __init__(self, plan: form.ExecutionPlan, reduction: str, root: int) -> None:
        self.plan, self.gpus = plan, plan.gpus
        if [gpu.id for gpu in plan.gpus] != list(range(len(plan.gpus))):
            raise ModelError("the plan's gpus are not numbered 0, 1, ... in order")
        self.collective = _COLLECTIVES[plan.collective]
        first = plan.gpus[0]
        self.ranks = len(plan.gpus)
        chunks = max(1, first.input_chunks, first.output_chunks)
        if self.collective is Collective.ALL_GATHER and not first.output_chunks:
            chunks = first.input_chunks * (1 if plan.inplace else self.ranks)
        self.chunks, self.shard = chunks, max(1, chunks // self.ranks)
        self.reduction = reduction if self.collective.reduces else None
        self.root = root if self.collective.rooted else None
        self.operations: list[list[Operation]] = [[] for _ in plan.gpus]
        self.wire = [0] * self.ranks
        self.blocks = [self._blocks(gpu) for gpu in plan.gpus]
        self.pairs = self._pairs()
        self.told: dict[tuple[int, int], deque[frozenset[OpRef]]] = defaultdict(deque)
        self.released: dict[tuple[int, int], deque[frozenset[OpRef]]] = defaultdict(deque)
        for gpu in plan.gpus:
            for number, semaphore in enumerate(gpu.semaphores):
                self.released[gpu.id, number].extend([frozenset()] * min(semaphore.init_value, 64))

    def _blocks(self, gpu: form.Gpu) -> list[_Block]:
        if [block.id for block in gpu.threadblocks] != list(range(len(gpu.threadblocks))):
            raise ModelError(f"the thread blocks of gpu {gpu.id} are not numbered 0, 1, ...")
        blocks = []
        for block in gpu.threadblocks:
            ops: list[form.Op] = []
            for op in block.ops:
                ops.extend([op] if op.name != "pipeline" else op.ops)
            for op in ops:
                if op.name not in _KNOWN:
                    raise UnsupportedError(
                        f"the operation {op.name[:40]!r} is not supported; use one of "
                        f"{', '.join(_KNOWN)}."
                    )
                if op.tbg_info is not None and op.tbg_info.tbg_size != 1:
                    raise UnsupportedError("operations in slices (tbg_info) are not supported.")
            blocks.append(_Block(ops))
        if sum(len(block.ops) for block in blocks) > _MOST_OPERATIONS:
            raise ModelError(f"gpu {gpu.id} has more than {_MOST_OPERATIONS} operations")
        return blocks

    def _pairs(self) -> dict[tuple[str, int, int], tuple[int, int]]:
        """For every (type, gpu, channel) the gpu and channel at its other end."""
        lists: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        for gpu in self.gpus:
            count: dict[str, int] = defaultdict(int)
            for channels in gpu.channels:
                if channels.channel_type == "switch":
                    raise UnsupportedError("switch channels (NVLS) are not supported.")
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
        """Follows the blocks to their ends."""
        for rank in range(self.ranks):
            self._begin(rank)
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
                        "waits for a signal or for data that is never sent"
                    )
            if self._works():
                own = Span("work", rank * self.shard, self.shard)
                every = {ref for block in blocks for ref in block.after}
                self._add(rank, Kind.COPY, Span(OUT, 0, self.shard), (own,), every)
        slots = io_slots(self.collective, self.ranks, self.chunks)
        buffers = [Buffer(IN, Role.IN, slots[0]), Buffer(OUT, Role.OUT, slots[1])]
        scratch = max(gpu.scratch_chunks for gpu in self.gpus)
        more = {"s": scratch, "wire": max(self.wire), "work": self.chunks * self._works()}
        buffers += [Buffer(name, Role.SCRATCH, count) for name, count in more.items() if count]
        return CollectiveProgram(
            name=self.plan.name or self.plan.collective,
            collective=self.collective,
            ranks=self.ranks,
            chunks=self.chunks,
            buffers=tuple(buffers),
            operations=tuple(tuple(ops) for ops in self.operations),
            reduction=self.reduction,
            root=self.root,
        )

    def _works(self) -> bool:
        return self.plan.inplace and self.collective is Collective.REDUCE_SCATTER

    def _begin(self, rank: int) -> None:
        """In place: the input buffer is also the output buffer."""
        if not self.plan.inplace:
            return
        source = Span(IN, 0, self.chunks)
        if self._works():
            target = Span("work", 0, self.chunks)
        elif self.collective in (Collective.ALL_REDUCE, Collective.REDUCE):
            target = Span(OUT, 0, self.chunks)
        elif self.collective is Collective.ALL_GATHER:
            source, target = Span(IN, 0, self.shard), Span(OUT, rank * self.shard, self.shard)
        else:
            raise UnsupportedError(f"{self.collective.value} in place is not supported.")
        ref = self._add(rank, Kind.COPY, target, (source,), set())
        for block in self.blocks[rank]:
            block.after = {ref}

    def _span(self, rank: int, place: str, chunks: form.Chunks) -> Span:
        """The span of chunks on a rank; in place, input and output are one buffer."""
        at = chunks.index
        if place == "s":
            return Span("s", at, chunks.size)
        if not self.plan.inplace:
            return Span(IN if place == "i" else OUT, at, chunks.size)
        own = rank * self.shard
        if self._works():
            return Span("work", at + (own if place == "o" else 0), chunks.size)
        gathers = self.collective is Collective.ALL_GATHER
        shift = own if gathers and place == "i" and self.gpus[rank].output_chunks else 0
        return Span(OUT, at + shift, chunks.size)

    def _there(self, rank: int, number: int, op: form.Op, chunks: form.Chunks) -> tuple[int, Span]:
        """The peer and its slots that a remote buffer refers to."""
        gpu, kind = self.gpus[rank], op.channel_type
        ids = [
            each
            for refs in gpu.threadblocks[number].remote_buffer_refs
            if refs.access_channel_type == kind
            for each in refs.remote_buffer_ids
        ]
        if chunks.buffer_id is None or chunks.buffer_id >= len(ids):
            raise ModelError(
                f"an operation of gpu {rank} names remote buffer {chunks.buffer_id}, but "
                f"its thread block {number} has {len(ids)}"
            )
        if ids[chunks.buffer_id] >= len(gpu.remote_buffers):
            raise ModelError(f"gpu {rank} has no remote buffer {ids[chunks.buffer_id]}")
        buffer = gpu.remote_buffers[ids[chunks.buffer_id]]
        if buffer.rank >= self.ranks:
            raise ModelError(
                f"a remote buffer of gpu {rank} is on gpu {buffer.rank}, but the plan has "
                f"{self.ranks} gpus"
            )
        return buffer.rank, self._span(buffer.rank, buffer.type, chunks)

    def _here(self, rank: int, chunks: form.Chunks) -> Span:
        if chunks.type is None:
            raise ModelError(f"an operation of gpu {rank} names no local buffer")
        return self._span(rank, chunks.type, chunks)

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
                f"{op.name} of thread block {number} on gpu {rank} names a channel that its block "
                "does not have, or that has no other end"
            )
        return [ids[each] for each in op.channel_ids]

    def _add(
        self, rank: int, kind: Kind, dst: Span, srcs: tuple[Span, ...], after: set[OpRef],
        peer: int | None = None,
    ) -> OpRef:  # fmt: skip
        reduce, divide = None, 1
        if kind is Kind.REDUCE:
            reduce = "sum" if self.reduction == "mean" else self.reduction or "sum"
        ref = OpRef(rank, len(self.operations[rank]))
        self.operations[rank].append(
            Operation(kind, dst, srcs, peer, tuple(sorted(after)), reduce, divide)
        )
        return ref

    def _put(self, rank: int, peer: int, src: Span, dst: Span, after: set[OpRef]) -> OpRef:
        if peer == rank:
            return self._add(rank, Kind.COPY, dst, (src,), after)
        return self._add(rank, Kind.PUT, dst, (src,), after, peer)

    def _step(self, rank: int, number: int, block: _Block) -> bool:
        """Runs a block's next operation if its dependencies are met."""
        op = block.ops[block.done]
        if op.name in ("wait", "rlxwait"):
            queues = [self.told[rank, self._key(op, each)]
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
        elif op.name in _MOVES:
            self._move(rank, number, op, block)
        if op.name in ("signal", "rlxsignal", "pws", "pwsf"):
            for each in self._channels(rank, number, op):
                peer, other = self.pairs[op.channel_type or "", rank, each]
                self.told[peer, self._key(op, other)].append(frozenset(block.after))
        block.done += 1
        return True

    def _key(self, op: form.Op, channel: int) -> int:
        return 2 * channel + (op.channel_type == "port")

    def _take(self, queues: list[deque[frozenset[OpRef]]], block: _Block) -> bool:
        # An operation may name one queue several times, and then takes that many entries.
        if any(len(queue) < sum(other is queue for other in queues) for queue in queues):
            return False
        for queue in queues:
            block.after |= queue.popleft()
        return True

    def _barrier(self, rank: int, op: form.Op, block: _Block) -> bool:
        """The last block to arrive releases all others."""
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

    def _move(self, rank: int, number: int, op: form.Op, block: _Block) -> None:
        """One operation that moves data; those of a rank's block run one after another."""
        if not op.src_buff or not op.dst_buff:
            raise ModelError(
                f"{op.name} of thread block {number} on gpu {rank} needs a source buffer and a "
                "target buffer"
            )
        if op.name in ("put", "pws", "pwsf", "get"):
            if len(op.src_buff) != len(op.dst_buff):
                raise ModelError(
                    f"{op.name} on gpu {rank} has {len(op.src_buff)} sources and "
                    f"{len(op.dst_buff)} targets; expected equal numbers"
                )
            refs = []
            for src, dst in zip(op.src_buff, op.dst_buff, strict=True):
                far, near = (src, dst) if op.name == "get" else (dst, src)
                peer, there = self._there(rank, number, op, far)
                here = self._here(rank, near)
                if op.name == "get":
                    refs.append(self._put(peer, rank, there, here, block.after))
                else:
                    refs.append(self._put(rank, peer, here, there, block.after))
            block.after = set(refs)
            return
        target = self._here(rank, op.dst_buff[0])
        srcs = [self._here(rank, op.src_buff[0])]
        for src in op.src_buff[1:]:
            if op.name in ("rre", "rres"):
                peer, there = self._there(rank, number, op, src)
                slots = Span("wire", self.wire[rank], there.count)
                self.wire[rank] += there.count
                block.after = {self._put(peer, rank, there, slots, block.after)} | block.after
                srcs.append(slots)
            else:
                srcs.append(self._here(rank, src))
        kind = Kind.COPY if len(srcs) == 1 else Kind.REDUCE
        if srcs != [target]:
            block.after = {self._add(rank, kind, target, tuple(srcs), block.after)}
        if op.name in ("res", "rres"):
            after, block.after = block.after, set(block.after)
            for dst in op.dst_buff[1:]:
                peer, there = self._there(rank, number, op, dst)
                block.after.add(self._put(rank, peer, target, there, after))
