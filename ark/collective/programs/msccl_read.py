"""Reads MSCCL XML as programs, which can run in a plan, in the simulator and in NumPy.

In MSCCL's runtime, thread blocks run concurrently, and a send does not wait until its receive takes
the data. So a send becomes a put into a new slot on the receiver, and the receive becomes a copy or
a reduction from this slot. The steps are followed in an order that the runtime allows, which
detects deadlocks. The program is checked before it is returned. `ark.collective.programs.msccl`
writes the format.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass
from xml.etree import ElementTree

from ark.collective.programs.builder import IN, OUT, ProgramBuilder
from ark.collective.programs.checker import check
from ark.collective.programs.types import Collective, CollectiveProgram, Span
from ark.errors import ModelError

_COLLECTIVES = {
    "allgather": Collective.ALL_GATHER,
    "reducescatter": Collective.REDUCE_SCATTER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "allreduce": Collective.ALL_REDUCE,
    "broadcast": Collective.BROADCAST,
    "reduce": Collective.REDUCE,
    "alltoall": Collective.ALL_TO_ALL,
}
_SENDS = ("s", "rcs", "rrs", "rrcs")
_RECEIVES = ("r", "rcs", "rrc", "rrs", "rrcs")
_KINDS = {*_SENDS, *_RECEIVES, "cpy", "re", "nop"}
_MOST_BYTES, _MOST_RANKS, _MOST_STEPS, _MOST_CHUNKS = 32 << 20, 1024, 1 << 18, 1 << 15


@dataclass(frozen=True)
class _Step:
    kind: str
    src: tuple[str, int]
    dst: tuple[str, int]
    count: int
    block: int  # the block of the awaited step, or -1
    step: int


@dataclass
class _Block:
    send: int
    receive: int
    channel: int
    steps: list[_Step]
    done: int = 0


def from_xml(text: str, reduction: str = "sum") -> CollectiveProgram:
    """Reads MSCCL XML. reduction: the reduction of a program that reduces, which the format does
    not contain.

    Raises ModelError with the location if the text is not MSCCL XML or the program deadlocks, and
    PlanError (ark.collective.programs.check) if the program does not compute its collective.
    """
    if len(text) > _MOST_BYTES or re.search(r"<!(DOCTYPE|ENTITY)", text, re.IGNORECASE):
        raise ModelError(
            f"the MSCCL XML must have at most {_MOST_BYTES} characters and must not define entities"
        )
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as error:
        raise ModelError(f"the MSCCL program is not valid XML: {error}") from error
    if root.tag != "algo":
        raise ModelError(f"the XML's outermost element is <{root.tag:.40}>, expected <algo>")
    program = _Reader(root, reduction).read()
    check(program)
    return program


def _number(element: ElementTree.Element, name: str, least: int, most: int, default: str) -> int:
    value = element.get(name, default)
    if not re.fullmatch(r"-?[0-9]{1,7}", value) or not least <= int(value) <= most:
        raise ModelError(
            f"<{element.tag}> has {name}={value[:40]!r}, expected a number from {least} to {most}"
        )
    return int(value)


class _Reader:
    def __init__(self, root: ElementTree.Element, reduction: str) -> None:
        name = root.get("coll", "")
        if name not in _COLLECTIVES:
            raise ModelError(
                f"the algorithm's collective is {name[:40]!r}; expected one of "
                f"{', '.join(_COLLECTIVES)}"
            )
        collective = _COLLECTIVES[name]
        self.collective = collective
        self.ranks = _number(root, "ngpus", 1, _MOST_RANKS, "")
        gpus = {_number(g, "id", 0, self.ranks - 1, ""): g for g in root.findall("gpu")}
        if len(gpus) != self.ranks:
            raise ModelError(
                f"the algorithm has ngpus={self.ranks}, but {len(gpus)} <gpu> elements"
            )
        first = gpus[0]
        slots = [_number(first, n, 0, _MOST_CHUNKS, "0") for n in ("i_chunks", "o_chunks")]
        chunks = max(*slots, 1)
        self.in_place = root.get("inplace", "0") == "1" and root.get("outofplace", "0") != "1"
        rooted = _number(root, "root", 0, self.ranks - 1, "0") if collective.rooted else None
        self.builder = ProgramBuilder(
            root.get("name", "") or name,
            collective,
            self.ranks,
            chunks,
            reduction=reduction if collective.reduces else None,
            root=rooted,
        )
        self.chunks, self.shard = chunks, max(1, chunks // self.ranks)
        self.blocks = [self._blocks(gpus[r]) for r in range(self.ranks)]
        self.scratch = max(_number(g, "s_chunks", 0, _MOST_CHUNKS, "0") for g in gpus.values())

    def _blocks(self, gpu: ElementTree.Element) -> list[_Block]:
        by_number: dict[int, _Block] = {}
        for block in gpu.findall("tb"):
            by_number[_number(block, "id", 0, _MOST_STEPS, "")] = _Block(
                _number(block, "send", -1, self.ranks - 1, "-1"),
                _number(block, "recv", -1, self.ranks - 1, "-1"),
                _number(block, "chan", 0, _MOST_CHUNKS, "0"),
                [self._step(s) for s in block.findall("step")],
            )
        if sorted(by_number) != list(range(len(by_number))):
            raise ModelError(f"the thread blocks of rank {gpu.get('id')} are not numbered from 0")
        return [by_number[i] for i in range(len(by_number))]

    def _step(self, step: ElementTree.Element) -> _Step:
        kind = step.get("type", "")
        if kind not in _KINDS:
            raise ModelError(
                f"a step is of type {kind[:40]!r}; expected one of {', '.join(_KINDS)}"
            )
        sides = []
        for side in ("src", "dst"):
            buffer = step.get(f"{side}buf", "i")
            if buffer not in ("i", "o", "s"):
                raise ModelError(f"a step has {side}buf={buffer[:40]!r}, expected i, o or s")
            sides.append((buffer, _number(step, f"{side}off", -1, _MOST_CHUNKS, "-1")))
        return _Step(
            kind,
            sides[0],
            sides[1],
            _number(step, "cnt", 0, _MOST_CHUNKS, "1"),
            _number(step, "depid", -1, _MOST_STEPS, "-1"),
            _number(step, "deps", -1, _MOST_STEPS, "-1"),
        )

    def _span(self, rank: int, place: tuple[str, int], count: int) -> Span:
        """The slots of a step's buffer. If the program works in place, input and output are the
        same buffer.
        """
        buffer, at = place
        if at < 0 or count < 1:
            raise ModelError(
                f"a step of rank {rank} moves {count} chunks from or to chunk {at}; expected at "
                "least 1 chunk, and a chunk number of at least 0"
            )
        if buffer == "s":
            return Span("s", at, count)
        if not self.in_place or self.collective in (Collective.BROADCAST, Collective.ALL_TO_ALL):
            return Span(IN if buffer == "i" else OUT, at, count)
        own = rank * self.shard
        if self.collective is Collective.REDUCE_SCATTER:
            return Span("work", at + (own if buffer == "o" else 0), count)
        shift = own if buffer == "i" and self.collective is Collective.ALL_GATHER else 0
        return Span(OUT, at + shift, count)

    def read(self) -> CollectiveProgram:
        b = self.builder
        if self.scratch:
            b.scratch(self.scratch, "s")
        # For each rank, the number of additional slots that the program needs: one for each chunk
        # that is sent to the rank, and one for each chunk that its own steps keep in other slots.
        arriving: dict[int, int] = defaultdict(int)
        for rank, blocks in enumerate(self.blocks):
            for block in blocks:
                for step in block.steps:
                    if step.kind in _SENDS:
                        arriving[block.send] += step.count
                    if step.kind == "rrs":
                        arriving[rank] += step.count
        if sum(arriving.values()) > _MOST_STEPS:
            raise ModelError(f"the algorithm sends more than {_MOST_STEPS} chunks")
        if arriving:
            b.scratch(max(arriving.values()), "wire")
        self.used: dict[int, int] = defaultdict(int)
        self.queues: dict[tuple[int, int, int], deque[Span]] = defaultdict(deque)
        work = self.in_place and self.collective is Collective.REDUCE_SCATTER
        if work:
            b.scratch(self.chunks, "work")
        for rank in range(self.ranks):
            self._begin(rank, work)
        moved = True
        while moved:
            moved = False
            for rank, blocks in enumerate(self.blocks):
                for block in blocks:
                    while block.done < len(block.steps) and self._try(rank, block):
                        moved = True
        for rank, blocks in enumerate(self.blocks):
            for number, block in enumerate(blocks):
                if block.done < len(block.steps):
                    raise ModelError(
                        f"the algorithm never ends: step {block.done} of thread block {number} on "
                        f"rank {rank} waits for data that is never sent"
                    )
            if work:
                b.copy(rank, Span("work", rank * self.shard, self.shard), Span(OUT, 0, self.shard))
        return b.build()

    def _begin(self, rank: int, work: bool) -> None:
        """Prepares a rank's memory for a program in place, in which the input buffer is also the
        output buffer.
        """
        whole = Span(IN, 0, self.chunks)
        if work:
            self.builder.copy(rank, whole, Span("work", 0, self.chunks))
        elif self.in_place and self.collective in (Collective.ALL_REDUCE, Collective.REDUCE):
            self.builder.copy(rank, whole, Span(OUT, 0, self.chunks))
        elif self.in_place and self.collective is Collective.ALL_GATHER:
            own = Span(OUT, rank * self.shard, self.shard)
            self.builder.copy(rank, Span(IN, 0, self.shard), own)

    def _slot(self, rank: int, count: int) -> Span:
        span = Span("wire", self.used[rank], count)
        self.used[rank] += count
        return span

    def _try(self, rank: int, block: _Block) -> bool:
        """Runs a block's next step if its dependencies are met. Returns True if it ran."""
        step, blocks = block.steps[block.done], self.blocks[rank]
        if step.block >= 0:
            if step.block >= len(blocks):
                raise ModelError(
                    f"a step of rank {rank} waits for thread block {step.block}, "
                    "which does not exist"
                )
            if blocks[step.block].done <= step.step:
                return False
        queue = self.queues[block.receive, rank, block.channel]
        if step.kind in _RECEIVES and not queue:
            return False
        block.done += 1
        if step.kind == "nop":
            return True
        b, count = self.builder, step.count
        received = queue.popleft() if step.kind in _RECEIVES else None
        if received is not None and received.count != count:
            raise ModelError(f"rank {rank} receives {count} chunks, but {received.count} were sent")
        source = None
        if step.kind in ("s", "cpy", "re", "rrc", "rrs", "rrcs"):
            source = self._span(rank, step.src, count)
        target = source
        if step.kind == "rrs":
            target = self._slot(rank, count)
        elif step.kind != "s":
            target = self._span(rank, step.dst, count)
        assert target is not None
        if step.kind == "cpy" and source is not None and source != target:
            b.copy(rank, source, target)
        elif step.kind == "re" and source is not None:
            b.reduce(rank, [target, source], target)
        elif received is not None and source is not None:
            b.reduce(rank, [source, received], target)
        elif received is not None:
            b.copy(rank, received, target)
        if step.kind in _SENDS:
            if block.send < 0:
                raise ModelError(f"a thread block of rank {rank} sends without naming a peer")
            there = self._slot(block.send, count)
            b.put(rank, block.send, target, there)
            self.queues[rank, block.send, block.channel].append(there)
        return True
