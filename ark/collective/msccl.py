"""Programs as MSCCL-style XML, so that other runtimes can take what ark synthesises.

A one-sided put becomes a send (`s`) and a receive (`r`) in thread blocks of their own for every
ordered pair of ranks; a reduce becomes copies and `re` steps in one local thread block. Waits on a
reader of another rank (a slot is used again) move to the receive, where they are local.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple
from xml.sax.saxutils import quoteattr

from ark.collective.order import describe, in_order
from ark.collective.types import CollectiveProgram, Kind, Operation, OpRef, Role, Span
from ark.errors import UnsupportedError

_COLL = {
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_reduce": "allreduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_to_all": "alltoall",
}


class _Place(NamedTuple):
    block: int
    step: int


@dataclass
class _Block:
    """One thread block: what it sends to, receives from, and its steps as attribute texts."""

    send: int = -1
    recv: int = -1
    steps: list[str] = field(default_factory=list)


@dataclass
class _Gpu:
    blocks: list[_Block] = field(default_factory=list)
    index: dict[tuple[int, int], int] = field(default_factory=dict)
    waited_for: set[_Place] = field(default_factory=set)

    def block(self, send: int, recv: int) -> int:
        key = (send, recv)
        if key not in self.index:
            self.index[key] = len(self.blocks)
            self.blocks.append(_Block(send, recv))
        return self.index[key]

    def add(self, block: int, deps: list[_Place], body: str) -> _Place:
        """Appends a step; each dependency beyond the last one takes a `nop` step before it."""
        steps = self.blocks[block].steps
        foreign = sorted({d.block: d for d in sorted(deps) if d.block != block}.values())
        self.waited_for.update(foreign)
        for dep in foreign[:-1]:
            steps.append(_nop(dep))
        last = foreign[-1] if foreign else _Place(-1, -1)
        steps.append(f'{body} depid="{last.block}" deps="{last.step}"')
        return _Place(block, len(steps) - 1)


def _printable(name: str) -> str:
    """A name as XML can say it: what is no character there becomes a question mark."""
    return "".join(c if c.isprintable() else "?" for c in name)


def _nop(dep: _Place) -> str:
    return (
        'type="nop" srcbuf="i" srcoff="-1" dstbuf="i" dstoff="-1" cnt="0" '
        f'depid="{dep.block}" deps="{dep.step}"'
    )


def to_xml(program: CollectiveProgram) -> str:
    """Returns MSCCL-style XML. All reductions must be elementwise; the runtime chooses which.

    Raises UnsupportedError for a program that this form cannot say: DOT or BLEND, `pieces` above
    1, or a wait for an unrelated operation of another rank.
    """
    p = program
    if p.pieces != 1:
        raise UnsupportedError(
            f"{p.name} cuts its chunks in {p.pieces} pieces, which the XML form does not know; "
            "write it with pieces = 1, the runtime that reads it cuts chunks itself."
        )
    writer = _Writer(p)
    for ref in in_order(p):
        writer.operation(ref)
    return writer.text()


class _Writer:
    def __init__(self, program: CollectiveProgram) -> None:
        self.p = program
        self.gpus = [_Gpu() for _ in range(program.ranks)]
        self.sent: dict[OpRef, _Place] = {}  # where an operation ends, on its own rank
        self.received: dict[OpRef, _Place] = {}  # where a put ends, on its peer
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
                f"{describe(self.p, ref)} needs dot products, which the XML form does not know; "
                "use an elementwise reduction such as sum."
            )
        here, there = [], []
        for dep in op.deps:
            if dep.rank == ref.rank:
                here.append(self.sent[dep])
            elif self.p.op(dep).peer == ref.rank:
                here.append(self.received[dep])
            elif dep.rank == op.peer:
                there.append(self.sent[dep])
            elif op.peer is not None and self.p.op(dep).peer == op.peer:
                there.append(self.received[dep])
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
        spans = self.spans(op.srcs[0], op.dst)
        gpu, other = self.gpus[ref.rank], self.gpus[peer]
        self.sent[ref] = gpu.add(gpu.block(peer, -1), here, f'type="s" {spans}')
        self.received[ref] = other.add(other.block(-1, ref.rank), there, f'type="r" {spans}')

    def local(self, ref: OpRef, op: Operation, deps: list[_Place]) -> None:
        gpu = self.gpus[ref.rank]
        block = gpu.block(-1, -1)
        srcs = list(op.srcs)
        if op.kind is Kind.REDUCE and op.dst in srcs:
            srcs.remove(op.dst)
        else:
            place = gpu.add(block, deps, f'type="cpy" {self.spans(srcs.pop(0), op.dst)}')
            deps = []
        for src in srcs:
            place = gpu.add(block, deps, f'type="re" {self.spans(src, op.dst)}')
            deps = []
        self.sent[ref] = place

    def text(self) -> str:
        p = self.p
        inputs, outputs = p.buffer_by_name["in"].slots, p.buffer_by_name["out"].slots
        root = "" if p.root is None else f' root="{p.root}"'
        lines = [
            f'<algo name={quoteattr(_printable(p.name))} nchunksperloop="{p.chunks}" nchannels="1" '
            f'proto="Simple" ngpus="{p.ranks}" coll="{_COLL[p.collective.value]}" inplace="0" '
            f'outofplace="1"{root}>'
        ]
        for rank, gpu in enumerate(self.gpus):
            lines.append(
                f'  <gpu id="{rank}" i_chunks="{inputs}" o_chunks="{outputs}" '
                f's_chunks="{self.scratch}">'
            )
            for number, block in enumerate(gpu.blocks):
                lines.append(
                    f'    <tb id="{number}" send="{block.send}" recv="{block.recv}" chan="0">'
                )
                for index, body in enumerate(block.steps):
                    waited = int(_Place(number, index) in gpu.waited_for)
                    lines.append(f'      <step s="{index}" {body} hasdep="{waited}"/>')
                lines.append("    </tb>")
            lines.append("  </gpu>")
        return "\n".join([*lines, "</algo>"]) + "\n"
