"""Lowering of collective programs (ark.collective.programs), which describe a collective's
algorithm as puts, copies and reductions, to tile tasks. The nodes are created by
ark.ops.communication.collectives.

Tasks of the kind `combine` execute the operations: a put combines a single share and stores the
result on a peer, and a reduction combines several shares. A copy needs no task, because its readers
read the source. Every put has its own receive buffer, so within an iteration no data that a peer
may still read is overwritten. The only waits between ranks are for data: the packets themselves, or
a counter for each tile. All ranks lower the same program, so the names of receive buffers and
counters match.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from msgspec import structs

from ark.collective.programs.attributes import CollectiveAttributes
from ark.collective.programs.values import Origin, Value, flow
from ark.ir.dtype import uint32
from ark.ir.graph import Node
from ark.ir.values import Tensor as IrTensor
from ark.lower.context import Lowering
from ark.lower.copies import copy_box, dense, move
from ark.lower.engines import AUTO, PACKET, Engine, tile_bytes
from ark.lower.registry import register
from ark.plan.groups import Group, RemoteSemaphore
from ark.plan.types import MAX_OPERANDS
from ark.tasks.combine import ELEMENTS, CombineParams, moved, tiles, words

CACHE_LINE_BYTES = 128  # parts of a share begin at multiples of this size


class _Writer:
    """Emits the tasks of one rank for a collective program."""

    def __init__(self, lowering: Lowering, node: Node) -> None:
        self.lowering, self.rank = lowering, lowering.graph.rank
        given = node.read(CollectiveAttributes)
        self.program = given.program
        self.flow = flow(self.program)
        self.name = f"collective.{lowering.number('collective')}"
        self.share = lowering.flat(dense(lowering, node.inputs[0], ".dense", fill=True))
        self.result = dense(lowering, node.outputs[0], ".out", fill=False)
        self.out = lowering.flat(self.result)
        self.itemsize = self.share.dtype.itemsize
        self.element = given.element or self._element()
        self.unit = max(1, ELEMENTS[self.element].itemsize // self.itemsize)
        shares = self.program.buffer_by_name["in"].slots // self.flow.parts
        self.elements = self.share.elements // shares
        cut = self.elements * self.itemsize // (self.flow.parts * self.program.pieces)
        asked = given.engine or AUTO
        if asked == AUTO:
            nbytes = max(self.share.nbytes, self.out.nbytes)
            asked = lowering.measured(self.program.collective, self.program.name, nbytes)
        self.engine: Engine = lowering.engine(cut, asked)
        self.homes: dict[int, int] = {}  # by value computed and kept here: its slot of `out`
        for (rank, slot), value in self.flow.final.items():
            if rank == self.rank and value.origin is Origin.REDUCE:
                self.homes.setdefault(value.number, slot)
        self.places: dict[tuple[int, int], IrTensor] = {}
        self.received: set[int] = set()  # ids of buffers of packets

    def _element(self) -> str:
        reduces = self.program.collective.reduces
        return self.share.dtype.name if reduces else moved(self.share.dtype)

    def write(self) -> None:
        """Emits the rank's operations in program order. Then emits copies for the parts of `out`
        that no operation has stored there directly.
        """
        pieces = range(self.program.pieces)
        for value in self.flow.values.values():
            if value.writer != self.rank or value.origin is Origin.INPUT:
                continue
            for piece in pieces:
                self._make(value, piece)
        for slot in range(self.program.buffer_by_name["out"].slots):
            value = self.flow.final[self.rank, slot]
            if self.homes.get(value.number) != slot:
                for piece in pieces:
                    target = self._slice(self.out, slot, piece)
                    if target.elements:
                        self._combine([value], piece, target, value, f".out{slot}")

    def _bounds(self, part: int, piece: int) -> tuple[int, int]:
        """The range of elements of one piece of a part of a share: the first element, and the one
        after the last. The range may be empty.
        """
        cuts = self.flow.parts * self.program.pieces
        at = part * self.program.pieces + piece
        line = CACHE_LINE_BYTES // self.itemsize
        step = line if self.elements >= cuts * line else self.unit
        whole = self.elements // step
        begin, end = (whole * i // cuts * step if i < cuts else self.elements for i in (at, at + 1))
        return begin, end

    def _slice(self, tensor: IrTensor, slot: int, piece: int) -> IrTensor:
        share, part = divmod(slot, self.flow.parts)
        begin, end = self._bounds(part, piece)
        offset = tensor.offsets[0] + share * self.elements + begin
        size = (end - begin,)
        if size == tensor.shape:
            return tensor
        name = f"{tensor.name}[{offset}:{offset + size[0]}]"
        return dataclasses.replace(tensor, shape=size, offsets=(offset,), padded=size, name=name)

    def _place(self, value: Value, piece: int) -> IrTensor:
        """The tensor that holds a piece of a value: a part of the caller's tensors, a receive
        buffer or a temporary.
        """
        key = (value.number, piece)
        if key not in self.places:
            self.places[key] = self._new_place(value, piece)
        return self.places[key]

    def _new_place(self, value: Value, piece: int) -> IrTensor:
        begin, end = self._bounds(value.part, piece)
        size, name = (end - begin,), f"{self.name}.{value.number}.{piece}"
        graph = self.lowering.graph
        if value.origin is Origin.INPUT:
            return self._slice(self.share, value.slot, piece)
        if value.origin is Origin.PUT:
            owner = -1 if value.rank == self.rank else value.rank
            if self.engine.name == PACKET:
                size = (words(size[0] * self.itemsize),)
                scratch = graph.tensor(size, uint32, arena="symmetric", rank=owner, name=name)
                self.received.add(scratch.buffer.id)
                return scratch
            return graph.tensor(size, self.share.dtype, arena="symmetric", rank=owner, name=name)
        if value.number in self.homes:
            return self._slice(self.out, self.homes[value.number], piece)
        return self.lowering.temp(size, self.share.dtype, name)

    def _tiles(self, elements: int) -> list[tuple[int, int]]:
        """The tiles of a transfer. They depend on its size only, so that the sending and the
        receiving rank compute the same tiles.
        """
        nbytes = tile_bytes(self.engine, self.lowering.machine, elements * self.itemsize)
        return tiles(elements, self.itemsize, nbytes)

    def _semaphores(self, value: Value, piece: int, count: int) -> list[RemoteSemaphore]:
        """The counters of a put, one for each tile."""
        name = f"{self.name}.{value.number}.{piece}"
        return [self.lowering.semaphore(value.rank, f"{name}.{i}") for i in range(count)]

    def _make(self, value: Value, piece: int) -> None:
        """Emits the tasks that compute a value: they combine the value's sources from left to
        right. If there are more sources than a task can have operands, they are combined in several
        steps.
        """
        begin, end = self._bounds(value.part, piece)
        if begin == end:
            return
        suffix = f".put{value.rank}" if value.origin is Origin.PUT else f".{value.reduce}"
        rest = [self.flow.values[number] for number in value.sources]
        partial: list[IrTensor] = []
        while rest:
            taken = rest[: MAX_OPERANDS - 1 - len(partial)]
            rest = rest[len(taken) :]
            if rest:
                label = f"{self.name}.partial"
                target = self.lowering.temp((end - begin,), self.share.dtype, label)
            else:
                target = self._place(value, piece)
            divide = 1 if rest else value.divide
            group = self._put(taken, piece, target, value, suffix, partial, divide)
            partial = [target]
        if value.origin is Origin.PUT and self.engine.name != PACKET:
            group.sends = [(s,) for s in self._semaphores(value, piece, len(group.coords))]

    def _put(
        self,
        sources: Sequence[Value],
        piece: int,
        target: IrTensor,
        value: Value,
        suffix: str,
        partial: Sequence[IrTensor],
        divide: int,
    ) -> Group:
        """Emits tasks that combine sources and store the result on a peer. If the engine can only
        copy to the peer, they are combined locally first and the result is copied.
        """
        owner = target.buffer.rank
        if owner < 0 or not (self.engine.copies or self.lowering.far(owner)):
            return self._combine(sources, piece, target, value, suffix, partial, divide)
        source = None if partial or len(sources) > 1 or divide != 1 else sources[0]
        if source is not None and source.origin is not Origin.PUT:
            ready = self._place(source, piece)
        else:
            ready = self.lowering.temp(target.shape, target.dtype, f"{self.name}.ready")
            self._combine(sources, piece, ready, value, suffix, partial, divide)
        coords = self._tiles(target.elements)
        return move(self.lowering, self.engine, ready, target, coords, suffix)

    def _combine(
        self,
        sources: Sequence[Value],
        piece: int,
        target: IrTensor,
        value: Value,
        suffix: str,
        partial: Sequence[IrTensor] = (),
        divide: int = 1,
    ) -> Group:
        operands = [*partial, *(self._place(v, piece) for v in sources), target]
        packets = all(t.buffer.id in self.received for t in operands)
        begin, end = self._bounds(value.part, piece)
        coords = self._tiles(end - begin)
        if packets:  # coordinates count packet words instead of elements
            coords = [(a * self.itemsize // 4, words(b * self.itemsize)) for a, b in coords]
        params = CombineParams("uint32" if packets else self.element)
        if len(operands) > 2 or divide != 1:
            params = structs.replace(params, op=value.reduce or "sum", divide=divide)
        group = self.lowering.emit("combine", params, operands, coords, suffix)
        group.received = frozenset(t.buffer.id for t in operands) & self.received
        arriving = [
            self._semaphores(v, piece, len(coords)) for v in sources if v.origin is Origin.PUT
        ]
        if arriving and self.engine.name != PACKET:
            group.awaits = [
                tuple((s, 1) for s in semaphores) for semaphores in zip(*arriving, strict=True)
            ]
        return group


def _lower_collective(lowering: Lowering, node: Node) -> None:
    writer = _Writer(lowering, node)
    writer.write()
    if writer.result is not node.outputs[0]:
        copy_box(lowering, writer.result, node.outputs[0], ".out")


register("collective", None, _lower_collective, aliasing="none", names_ranks=True, all_ranks=True)
