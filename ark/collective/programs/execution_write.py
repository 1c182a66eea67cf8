"""Writes programs as MSCCL++ execution plans, which have puts, signals and waits of thread blocks.

Operations of a rank that depend on each other are in one thread block, in the program's order.
Other operations are distributed to blocks by the peer of their puts. A dependency on another rank
becomes a signal in the block whose operation must end first, and a wait in the block whose
operation depends on it, over a channel between the two blocks. Each block first signals to peers
that its memory may be written. At its end it waits for the peers' operations for which it has not
waited yet. So a plan can be launched repeatedly. If a chain of operations is too long for a block,
it continues in another block, after a semaphore.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from ark.collective.programs import execution_form as form
from ark.collective.programs.order import describe, in_order
from ark.collective.programs.types import CollectiveProgram, Kind, OpRef, Role, Span
from ark.errors import UnsupportedError

_SIZES = (40, 24, 12, 6, 3)  # most operations of a program per block, tried in this order
_At = tuple[int, int]  # a thread block: rank, number
_T = TypeVar("_T")


@dataclass
class _Block:
    """A thread block under construction. It contains the operations of the program that it runs."""

    ops: list[int] = field(default_factory=list)
    acquires: int = -1  # number of the semaphore for which this block waits first, or -1
    releases: int = -1
    waits: dict[int, list[tuple[_At, int]]] = field(default_factory=lambda: defaultdict(list))
    signals: dict[int, list[_At]] = field(default_factory=lambda: defaultdict(list))
    opens: list[_At] = field(default_factory=list)  # blocks that this block signals at its start
    awaits: list[tuple[_At, int]] = field(default_factory=list)  # signals awaited at the end
    channels: list[int] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)


def to_execution_plan(program: CollectiveProgram) -> str:
    """Returns the JSON of an MSCCL++ execution plan over memory channels, out of place.

    The runtime can only add, so the reduction must be sum. Raises UnsupportedError for any other
    reduction, for DOT, BLEND and `pieces` above 1, and for a program that exceeds the executor's
    limits.
    """
    p = program
    if p.pieces != 1:
        raise UnsupportedError(
            f"{p.name} cuts its chunks in {p.pieces} pieces, which execution plans "
            "cannot express; write the program with pieces = 1."
        )
    if p.reduction not in (None, "sum"):
        raise UnsupportedError(f"MSCCL++ reduces by sum only; {p.name} uses {p.reduction}.")
    if p.counts is not None and not p.permutes:
        raise UnsupportedError(f"{p.name} has parts of unequal length; MSCCL++ needs equal ones.")
    for ref in in_order(p):
        if p.op(ref).kind not in (Kind.PUT, Kind.COPY, Kind.REDUCE):
            raise UnsupportedError(
                f"{describe(p, ref)}: MSCCL++ does not support dot products of tensors."
            )
    for size in _SIZES:
        writer = _Writer(p, size)
        plan = writer.plan()
        excess = _excess(plan)
        if excess is None:
            return msgspec.json.format(msgspec.json.encode(plan), indent=1).decode() + "\n"
    raise UnsupportedError(
        f"{p.name} needs {excess}. Use a program of fewer chunks (a smaller k) or of fewer ranks."
    )


def _excess(plan: form.ExecutionPlan) -> str | None:
    """The first limit of MSCCL++'s executor that the plan exceeds, in words; None if it exceeds no
    limit.
    """
    for gpu in plan.gpus:
        counts = [
            ("thread blocks a rank", len(gpu.threadblocks), form.MOST_BLOCKS),
            ("semaphores a rank", len(gpu.semaphores), form.MOST_SEMAPHORES),
        ]
        for block in gpu.threadblocks:
            channels = sum(len(each.channel_ids) for each in block.channels)
            buffers = sum(len(each.remote_buffer_ids) for each in block.remote_buffer_refs)
            counts += [
                ("operations a thread block", len(block.ops), form.MOST_OPS),
                ("channels a thread block", channels, form.MOST_CHANNELS),
                ("remote buffers a thread block", buffers, form.MOST_CHANNELS),
            ]
        for item, count, most in counts:
            if count > most:
                return f"{count} {item}; MSCCL++ allows {most}"
    return None


def _components(program: CollectiveProgram, rank: int) -> list[list[int]]:
    """The rank's operations, divided into groups that do not depend on each other. Each group is in
    the program's order.
    """
    ops = program.operations[rank]
    head = list(range(len(ops)))

    def find(i: int) -> int:
        while head[i] != i:
            head[i] = head[head[i]]
            i = head[i]
        return i

    for i, op in enumerate(ops):
        for dep in op.deps:
            if dep.rank == rank:
                a, b = sorted((find(i), find(dep.position)))
                head[b] = a
    parts: dict[int, list[int]] = {}
    for i in range(len(ops)):
        parts.setdefault(find(i), []).append(i)
    return [parts[i] for i in sorted(parts)]


class _Writer:
    def __init__(self, program: CollectiveProgram, size: int) -> None:
        self.p = program
        self.base: dict[str, tuple[form.Place, int]] = {}
        self.scratch = 0
        for buffer in program.buffers:
            if buffer.role is Role.SCRATCH:
                self.base[buffer.name] = ("s", self.scratch)
                self.scratch += buffer.slots
            else:
                self.base[buffer.name] = ("i" if buffer.role is Role.IN else "o", 0)
        self.semaphores = [0] * program.ranks
        self.blocks = [self._deal(rank, size) for rank in range(program.ranks)]
        self.home = {
            OpRef(rank, i): number
            for rank, blocks in enumerate(self.blocks)
            for number, block in enumerate(blocks)
            for i in block.ops
        }
        self.signal_counts: dict[
            tuple[_At, _At], int
        ] = {}  # numbers of signals from one block to another
        self.latest: dict[tuple[_At, _At], int] = {}
        self._connect()
        self.connected: list[list[int]] = [[] for _ in range(program.ranks)]
        self.channel: dict[tuple[_At, _At], int] = {}
        self.to_peer: dict[tuple[_At, int], _At] = {}
        self.remote: list[list[tuple[int, form.Place]]] = [[] for _ in range(program.ranks)]
        for one, other in sorted({tuple(sorted(pair)) for pair in self.signal_counts}):
            for here, there in ((one, other), (other, one)):
                self.channel[here, there] = len(self.connected[here[0]])
                self.connected[here[0]].append(there[0])
                self.to_peer.setdefault((here, there[0]), there)

    def _deal(self, rank: int, size: int) -> list[_Block]:
        """Distributes the operations of a rank to thread blocks with at most `size` operations
        each.
        """
        blocks: list[_Block] = []
        filling: dict[int | None, _Block] = {}
        for part in _components(self.p, rank):
            peers = [op.peer for op in (self.p.operations[rank][i] for i in part)]
            key = next((peer for peer in peers if peer is not None), None)
            if len(part) > size:
                cuts = [part[i : i + size] for i in range(0, len(part), size)]
                for i, cut in enumerate(cuts):
                    last = _Block(cut, self.semaphores[rank] - 1 if i else -1)
                    if i + 1 < len(cuts):
                        last.releases = self.semaphores[rank]
                        self.semaphores[rank] += 1
                    blocks.append(last)
                continue
            if key not in filling or len(filling[key].ops) + len(part) > size:
                filling[key] = _Block()
                blocks.append(filling[key])
            filling[key].ops.extend(part)
        for block in blocks:
            block.ops.sort()
        return blocks or [_Block()]

    def _connect(self) -> None:
        """Determines which thread blocks signal each other, and before which operations they
        wait.
        """
        heard: dict[OpRef, list[int]] = defaultdict(list)  # the peer's blocks that wait for a put
        needs: list[
            tuple[OpRef, _At, int]
        ] = []  # awaited block, waiting block, operation before which it waits
        for rank, blocks in enumerate(self.blocks):
            for number, block in enumerate(blocks):
                for i in block.ops:
                    for dep in self.p.operations[rank][i].deps:
                        if dep.rank != rank:
                            needs.append((dep, (rank, number), i))
                            if self.p.op(dep).peer == rank:
                                heard[dep].append(number)
        ends: list[tuple[OpRef, _At]] = []
        for ref in self.p.refs():
            peer = self.p.op(ref).peer
            if peer is not None and ref not in heard:
                number = self.home[ref] % len(self.blocks[peer])
                heard[ref].append(number)
                ends.append((ref, (peer, number)))
        opened: dict[tuple[_At, int], OpRef] = {}
        for ref in self.p.refs():
            peer = self.p.op(ref).peer
            if peer is not None:
                opened.setdefault(((ref.rank, self.home[ref]), peer), ref)
        for (at, peer), ref in opened.items():
            opener = (peer, min(heard[ref]))
            self.signal_counts[opener, at] = 1
            self.blocks[peer][opener[1]].opens.append(at)
            self.blocks[at[0]][at[1]].waits[ref.position].append((opener, 1))
        for ref, at, before in needs:
            self._tell(ref, at, self.blocks[at[0]][at[1]].waits[before])
        for ref, at in ends:
            self._tell(ref, at, self.blocks[at[0]][at[1]].awaits)

    def _tell(self, ref: OpRef, at: _At, waits: list[tuple[_At, int]]) -> None:
        source = (ref.rank, self.home[ref])
        if self.latest.get((source, at), -1) >= ref.position:
            return  # the block has already waited for a later signal
        self.latest[source, at] = ref.position
        self.signal_counts[source, at] = self.signal_counts.get((source, at), 0) + 1
        self.blocks[ref.rank][source[1]].signals[ref.position].append(at)
        waits.append((source, self.signal_counts[source, at]))

    def plan(self) -> form.ExecutionPlan:
        """The whole plan."""
        blocks = [
            tuple(_Emitter(self, (rank, number)).block() for number in range(len(blocks)))
            for rank, blocks in enumerate(self.blocks)
        ]
        slots = [self.p.buffer_by_name[name].slots for name in ("in", "out")]
        gpus = tuple(
            form.Gpu(
                id=rank,
                input_chunks=slots[0],
                output_chunks=slots[1],
                scratch_chunks=self.scratch,
                threadblocks=blocks[rank],
                channels=(form.Channels("memory", tuple(self.connected[rank])),)
                if self.connected[rank]
                else (),
                remote_buffers=tuple(
                    form.RemoteBuffer(peer, place, ("memory",)) for peer, place in self.remote[rank]
                ),
                semaphores=(form.Semaphore(0),) * self.semaphores[rank],
            )
            for rank in range(self.p.ranks)
        )
        return form.ExecutionPlan(
            name=self.p.name,
            collective=form.SEND_RECV if self.p.permutes else form.COLLECTIVES[self.p.collective],
            inplace=False,
            protocol="Simple",
            gpus=gpus,
        )


class _Emitter:
    """Writes the operations of one thread block."""

    def __init__(self, writer: _Writer, at: _At) -> None:
        self.w, self.at, self.rank = writer, at, at[0]
        self.source = writer.blocks[at[0]][at[1]]
        self.ops: list[form.Op] = []
        self.open: set[int] = (
            set()
        )  # operations that some threads of the block may not have finished
        self.behind = False  # True: some threads have waited and others have not
        self.waited: dict[_At, int] = defaultdict(int)

    def block(self) -> form.Block:
        """Writes all operations of the thread block in MSCCL++'s form."""
        source = self.source
        self._channel_ops("signal", source.opens)
        if source.acquires >= 0:
            self.ops.append(form.Op("sem_acquire", semaphore_ids=(source.acquires,)))
            self.behind = True
        for i in source.ops:
            self._wait(source.waits[i])
            local = {d.position for d in self.w.p.operations[self.rank][i].deps}
            if self.behind or local & self.open:
                self._sync()
            self._operation(i)
            self.open.add(i)
            if source.signals[i]:
                self._sync()
                self._channel_ops("signal", source.signals[i])
        self._wait(source.awaits)
        if source.releases >= 0:
            self._sync()
            self.ops.append(form.Op("sem_release", semaphore_ids=(source.releases,)))
        channels = (form.BlockChannels("memory", tuple(source.channels)),)
        buffers = (form.BlockBuffers("memory", tuple(source.buffers)),) if source.buffers else ()
        return form.Block(self.at[1], tuple(self.ops), channels if source.channels else (), buffers)

    def _sync(self) -> None:
        self.ops.append(form.Op("nop"))
        self.open.clear()
        self.behind = False

    def _wait(self, waits: list[tuple[_At, int]]) -> None:
        """Adds waits to the thread block. waits: other blocks, each with the number of its signals
        that must have arrived.
        """
        while short := sorted({at for at, count in waits if self.waited[at] < count}):
            self._channel_ops("wait", short)
            for at in short:
                self.waited[at] += 1
            self.behind = True

    def _channel_ops(self, name: str, blocks: list[_At]) -> None:
        numbers = [self._channel(at) for at in blocks]
        for i in range(0, len(numbers), form.MOST_PER_OP):
            some = tuple(numbers[i : i + form.MOST_PER_OP])
            self.ops.append(form.Op(name, "memory", some))

    def _channel(self, other: _At) -> int:
        return _index(self.source.channels, self.w.channel[self.at, other])

    def _operation(self, position: int) -> None:
        op = self.w.p.operations[self.rank][position]
        if op.peer is not None:
            place, start = self._place(op.dst)
            buffer = _index(self.w.remote[self.rank], (op.peer, place))
            there = form.Chunks(start, op.dst.count, buffer_id=_index(self.source.buffers, buffer))
            number = self._channel(self.w.to_peer[self.at, op.peer])
            here = self._here(op.srcs[0])
            self.ops.append(form.Op("put", "memory", (number,), (here,), (there,)))
        elif op.kind is Kind.COPY:
            self.ops.append(
                form.Op("copy", src_buff=(self._here(op.srcs[0]),), dst_buff=(self._here(op.dst),))
            )
        else:
            # If the target is also a source, it is read first, before it is overwritten.
            srcs = sorted(op.srcs, key=lambda span: span != op.dst)
            done = 0
            while done < len(srcs):
                first = [op.dst] if done else []
                some = srcs[done : done + form.MOST_PER_OP - len(first)]
                if done:
                    self._sync()
                parts = tuple(self._here(span) for span in (*first, *some))
                self.ops.append(form.Op("re", src_buff=parts, dst_buff=(self._here(op.dst),)))
                done += len(some)

    def _place(self, span: Span) -> tuple[form.Place, int]:
        place, base = self.w.base[span.buffer]
        return place, base + span.start

    def _here(self, span: Span) -> form.Chunks:
        place, start = self._place(span)
        return form.Chunks(start, span.count, type=place)


def _index(values: list[_T], value: _T) -> int:
    """The index of a value in a list. If the list lacks the value, it is appended."""
    if value not in values:
        values.append(value)
    return values.index(value)
