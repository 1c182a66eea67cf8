"""Writes programs as MSCCL XML, for the runtimes that read this format.

A put (one-sided write) becomes a send (`s`) and a receive (`r`). Every ordered pair of ranks has a
thread block for its sends and one for its receives. A reduce becomes copies and `re` steps in one
local thread block. If a put reuses a slot, it must wait until the slot's last reader, on the
receiving rank, has read it. This wait is attached to the receive, because the receive is on the
reader's rank.

The runtimes differ in names and limits (`TARGETS`). Steps beyond the limit of a thread block
continue in another block on the next channel, and a put of too many chunks becomes several puts. If
a program still exceeds a limit, UnsupportedError is raised with that limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from ark.collective.programs.order import describe, in_order
from ark.collective.programs.types import CollectiveProgram, Kind, Operation, OpRef, Role, Span
from ark.errors import InvalidUsageError, UnsupportedError

_COLL = {
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_reduce": "allreduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_to_all": "alltoall",
}


@dataclass(frozen=True)
class Target:
    """The limits of a runtime, and the names that it gives to collectives. The runtime has at most
    `steps` steps per thread block, `blocks_per_channel` thread blocks per channel, `blocks` thread
    blocks in all, `channels` channels and `chunks` chunks per step. A step can wait only for thread
    blocks with numbers up to `waited_for`. The first chunk of a step (its offset) is at most
    `offset`.
    """

    steps: int
    blocks_per_channel: int
    blocks: int
    channels: int
    chunks: int = 71
    waited_for: int = 127
    offset: int = (1 << 15) - 1
    collectives: Mapping[str, str] = field(default_factory=lambda: _COLL)


# The limits of the programs that run MSCCL's XML. Sources: for microsoft/msccl src/include/msccl.h;
# for RCCL and msccl-executor-nccl msccl_struct.h (the lower of NCCL's and RCCL's numbers of
# channels) and msccl_parser.cc.
TARGETS = {
    "msccl": Target(256, 32, 216, 32, collectives={**_COLL, "reduce_scatter": "reduce_scatter"}),
    "rccl": Target(64, 32, 1024, 32),
}


class _Place(NamedTuple):
    block: int
    step: int


@dataclass
class _Block:
    """One thread block: the peers to which it sends and from which it receives, and its steps as
    texts of XML attributes.
    """

    send: int = -1
    recv: int = -1
    channel: int = 0
    steps: list[str] = field(default_factory=list)


@dataclass
class _Gpu:
    blocks: list[_Block] = field(default_factory=list)
    index: dict[tuple[int, int, int], int] = field(default_factory=dict)
    waited_for: set[_Place] = field(default_factory=set)

    def block(self, send: int, recv: int, number: int) -> int:
        """The number of the thread block that serves a connection (a peer to send to, a peer to
        receive from) on channel `number`. A local block has neither peer.
        """
        key = (send, recv, number)
        if key not in self.index:
            self.index[key] = len(self.blocks)
            self.blocks.append(_Block(send, recv, number if max(send, recv) >= 0 else 0))
        return self.index[key]

    def foreign(self, block: int, deps: list[_Place]) -> list[_Place]:
        """For each other thread block, the last of its steps that must be awaited."""
        return sorted({d.block: d for d in sorted(deps) if d.block != block}.values())

    def room(self, block: int, deps: list[_Place], limit: int) -> bool:
        """True if a step with these dependencies fits into the block, together with the `nop` steps
        that must precede it.
        """
        needed = max(1, len(self.foreign(block, deps)))
        return len(self.blocks[block].steps) + needed <= limit

    def add(self, block: int, deps: list[_Place], body: str) -> _Place:
        """Appends a step. A step can wait for one dependency; each further one needs a `nop` step
        before it.
        """
        steps = self.blocks[block].steps
        foreign = self.foreign(block, deps)
        self.waited_for.update(foreign)
        for dep in foreign[:-1]:
            steps.append(_nop(dep))
        last = foreign[-1] if foreign else _Place(-1, -1)
        steps.append(f'{body} depid="{last.block}" deps="{last.step}"')
        return _Place(block, len(steps) - 1)


def _printable(name: str) -> str:
    """A name that XML allows. Invalid characters become question marks."""
    return "".join(c if c.isprintable() else "?" for c in name)


def _nop(dep: _Place) -> str:
    return (
        'type="nop" srcbuf="i" srcoff="-1" dstbuf="i" dstoff="-1" cnt="0" '
        f'depid="{dep.block}" deps="{dep.step}"'
    )


def to_xml(program: CollectiveProgram, target: str = "rccl") -> str:
    """Returns MSCCL XML for a runtime of `TARGETS` ("rccl" also serves msccl-executor-nccl).

    All reductions must be elementwise; the call in the runtime determines the reduction. Raises
    InvalidUsageError for an unknown target. Raises UnsupportedError if the program exceeds the
    target's limits, or if the format cannot express it: DOT or BLEND, `pieces` above 1, or a
    dependency on another rank's operation that is not a put to this rank.
    """
    p = program
    if target not in TARGETS:
        raise InvalidUsageError(
            f"{target!r} is not a runtime of MSCCL XML; choose one of {', '.join(TARGETS)}."
        )
    if p.pieces != 1:
        raise UnsupportedError(
            f"{p.name} cuts its chunks in {p.pieces} pieces, which MSCCL XML cannot express; "
            "write the program with pieces = 1; the runtime that reads the XML cuts chunks itself."
        )
    if p.counts is not None:
        raise UnsupportedError(
            f"{p.name} has parts of unequal length, which MSCCL XML cannot express."
        )
    writer = _Writer(p, TARGETS[target])
    for ref in in_order(p):
        writer.operation(ref)
    writer.check(target)
    return writer.text()


class _Writer:
    def __init__(self, program: CollectiveProgram, target: Target) -> None:
        self.p = program
        self.target = target
        self.channel: dict[tuple[int, int], int] = {}  # by connection: the channel in use
        self.local_block = [0] * program.ranks  # by rank: the local block in use
        self.gpus = [_Gpu() for _ in range(program.ranks)]
        # For each operation of the program: the last steps of the operation on its own rank (sent),
        # and the last steps of a put on the receiving rank (received). A step is identified by its
        # thread block and position.
        self.sent: dict[OpRef, list[_Place]] = {}
        self.received: dict[OpRef, list[_Place]] = {}
        self.base: dict[str, tuple[str, int]] = {}
        offset = 0
        for buffer in program.buffers:
            if buffer.role is Role.SCRATCH:
                self.base[buffer.name] = ("s", offset)
                offset += buffer.slots
            else:
                self.base[buffer.name] = ("i" if buffer.role is Role.IN else "o", 0)
        self.scratch = offset

    def spans(self, src: Span, dst: Span) -> str:
        (sbuf, soff), (dbuf, doff) = self.base[src.buffer], self.base[dst.buffer]
        return (
            f'srcbuf="{sbuf}" srcoff="{soff + src.start}" dstbuf="{dbuf}" '
            f'dstoff="{doff + dst.start}" cnt="{dst.count}"'
        )

    def operation(self, ref: OpRef) -> None:
        op = self.p.op(ref)
        if op.kind in (Kind.DOT, Kind.BLEND):
            raise UnsupportedError(
                f"{describe(self.p, ref)} needs dot products, which MSCCL XML cannot express; "
                "use an elementwise reduction such as sum."
            )
        here: list[_Place] = []
        there: list[_Place] = []
        for dep in op.deps:
            if dep.rank == ref.rank:
                here += self.sent[dep]
            elif self.p.op(dep).peer == ref.rank:
                here += self.received[dep]
            elif dep.rank == op.peer:
                there += self.sent[dep]
            elif op.peer is not None and self.p.op(dep).peer == op.peer:
                there += self.received[dep]
            else:
                raise UnsupportedError(
                    f"{describe(self.p, ref)} waits for rank {dep.rank}, from which it receives "
                    "nothing; the XML form has no signals without data."
                )
        if op.kind is Kind.PUT and op.peer is not None:
            self.put(ref, op, op.peer, here, there)
        else:
            self.local(ref, op, here)

    def put(
        self, ref: OpRef, op: Operation, peer: int, here: list[_Place], there: list[_Place]
    ) -> None:
        gpu, other = self.gpus[ref.rank], self.gpus[peer]
        (src,), limit = op.srcs, self.target.chunks
        self.sent[ref], self.received[ref] = [], []
        for first in range(0, src.count, limit):
            count = min(limit, src.count - first)
            part = Span(src.buffer, src.start + first, count)
            spans = self.spans(part, Span(op.dst.buffer, op.dst.start + first, count))
            channel = self.channel.get((ref.rank, peer), 0)
            sends = gpu.block(peer, -1, channel)
            receives = other.block(-1, ref.rank, channel)
            if not (
                gpu.room(sends, here, self.target.steps)
                and other.room(receives, there, self.target.steps)
            ):
                channel += 1
                self.channel[ref.rank, peer] = channel
                sends = gpu.block(peer, -1, channel)
                receives = other.block(-1, ref.rank, channel)
            self.sent[ref].append(gpu.add(sends, here, f'type="s" {spans}'))
            self.received[ref].append(other.add(receives, there, f'type="r" {spans}'))

    def local(self, ref: OpRef, op: Operation, deps: list[_Place]) -> None:
        srcs = list(op.srcs)
        verb = "re" if op.kind is Kind.REDUCE and op.dst in srcs else "cpy"
        if verb == "re":
            srcs.remove(op.dst)
        before: list[_Place] = deps
        for src in srcs:
            for first in range(0, src.count, self.target.chunks):
                count = min(self.target.chunks, src.count - first)
                part = Span(src.buffer, src.start + first, count)
                spans = self.spans(part, Span(op.dst.buffer, op.dst.start + first, count))
                before = [self._step(ref.rank, before, f'type="{verb}" {spans}')]
            verb = "re"
        self.sent[ref] = before

    def _step(self, rank: int, deps: list[_Place], body: str) -> _Place:
        gpu = self.gpus[rank]
        block = gpu.block(-1, -1, self.local_block[rank])
        if not gpu.room(block, deps, self.target.steps):
            self.local_block[rank] += 1
            block = gpu.block(-1, -1, self.local_block[rank])
        return gpu.add(block, deps, body)

    def check(self, target: str) -> None:
        """Raises UnsupportedError for the first limit of the target that the program exceeds."""
        limits = self.target
        slots = max(self.scratch, *(self.p.buffer_by_name[name].slots for name in ("in", "out")))
        counts = [("chunks in a buffer", slots, limits.offset + 1)]
        for gpu in self.gpus:
            sends = Counter(each.channel for each in gpu.blocks if each.send >= 0)
            receives = Counter(each.channel for each in gpu.blocks if each.recv >= 0)
            busiest = max(0, *sends.values(), *receives.values())
            channels = 1 + max((each.channel for each in gpu.blocks), default=0)
            waited = max((place.block for place in gpu.waited_for), default=0)
            counts += [
                ("channels", channels, limits.channels),
                ("thread blocks on one channel", busiest, limits.blocks_per_channel),
                ("thread blocks a rank", len(gpu.blocks), limits.blocks),
                ("thread blocks before one that is waited for", waited, limits.waited_for),
            ]
        for item, count, most in counts:
            if count > most:
                raise UnsupportedError(
                    f"{self.p.name} needs {count} {item}; {target} allows {most}. Use a program of "
                    "fewer chunks (a smaller k) or of fewer ranks."
                )

    def text(self) -> str:
        p = self.p
        inputs, outputs = p.buffer_by_name["in"].slots, p.buffer_by_name["out"].slots
        root = "" if p.root is None else f' root="{p.root}"'
        name = self.target.collectives[p.collective.value]
        channels = 1 + max(block.channel for gpu in self.gpus for block in gpu.blocks)
        lines = [
            f'<algo name="{escape(_printable(p.name))}" nchunksperloop="{p.chunks}" '
            f'nchannels="{channels}" proto="Simple" ngpus="{p.ranks}" coll="{name}" '
            f'inplace="0" outofplace="1" minBytes="0" maxBytes="0"{root}>'
        ]
        for rank, gpu in enumerate(self.gpus):
            lines.append(
                f'  <gpu id="{rank}" i_chunks="{inputs}" o_chunks="{outputs}" '
                f's_chunks="{self.scratch}">'
            )
            for number, block in enumerate(gpu.blocks):
                lines.append(
                    f'    <tb id="{number}" send="{block.send}" recv="{block.recv}" '
                    f'chan="{block.channel}">'
                )
                for index, body in enumerate(block.steps):
                    waited = int(_Place(number, index) in gpu.waited_for)
                    lines.append(f'      <step s="{index}" {body} hasdep="{waited}"/>')
                lines.append("    </tb>")
            lines.append("  </gpu>")
        return "\n".join([*lines, "</algo>"]) + "\n"
