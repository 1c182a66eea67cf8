"""Collective programs as tile tasks: the lowering of the nodes that ark.ops.collectives makes.

A put is a copy into a peer's receive buffer and a counter there for each tile, a reduction is a
sum, a copy is nothing at all. Every put has a receive buffer of its own, so within an iteration
nothing that a peer may read is overwritten, and the only waits between ranks are for data. All
ranks lower the same program, so they name receive buffers and counters alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ark.collective import CollectiveProgram
from ark.collective.values import Origin, Value, flow
from ark.ir.dtype import FLOATS, fp32
from ark.ir.graph import Node
from ark.ir.values import Tensor as IrTensor
from ark.lower.context import Lowering
from ark.lower.registry import register
from ark.lower.tiling import flat_tile
from ark.ops.communication import MIN_PUT, copy_box, dense
from ark.plan.groups import Group, RemoteSemaphore
from ark.plan.types import MAX_OPERANDS
from ark.tasks.pointwise import copy_params


class _Writer:
    """Writes one rank's part of a collective."""

    def __init__(self, lowering: Lowering, node: Node) -> None:
        self.lowering, self.rank = lowering, lowering.graph.rank
        self.program: CollectiveProgram = node.attrs["program"]
        self.flow = flow(self.program)
        self.name = f"collective.{lowering.number('collective')}"
        self.share = lowering.flat(dense(lowering, node.inputs[0], ".dense", fill=True))
        self.result = dense(lowering, node.outputs[0], ".out", fill=False)
        self.out = lowering.flat(self.result)
        shares = self.program.buffer_by_name["in"].slots // self.flow.parts
        self.elements = self.share.elements // shares
        self.homes: dict[int, int] = {}  # by value that is made here and stays: its slot of `out`
        for (rank, slot), value in self.flow.final.items():
            if rank == self.rank and value.origin is Origin.REDUCE:
                self.homes.setdefault(value.number, slot)
        self.places: dict[tuple[int, int], IrTensor] = {}

    def write(self) -> None:
        """Emits the rank's operations in the order of its list, then what is missing in `out`."""
        pieces = range(self.program.pieces)
        for value in self.flow.values.values():
            if value.writer != self.rank or value.origin is Origin.INPUT:
                continue
            for piece in pieces:
                if value.origin is Origin.PUT:
                    self._put(value, piece)
                else:
                    self._sum(value, piece)
        for slot in range(self.program.buffer_by_name["out"].slots):
            value = self.flow.final[self.rank, slot]
            if self.homes.get(value.number) != slot:
                for piece in pieces:
                    self._copy(value, piece, self._slice(self.out, slot, piece), f".out{slot}")

    def _bounds(self, part: int, piece: int) -> tuple[int, int]:
        """First and last+1 element of a share that a piece of its part holds; may be none."""
        cuts = self.flow.parts * self.program.pieces
        at = part * self.program.pieces + piece
        return self.elements * at // cuts, self.elements * (at + 1) // cuts

    def _slice(self, tensor: IrTensor, slot: int, piece: int) -> IrTensor:
        share, part = divmod(slot, self.flow.parts)
        begin, end = self._bounds(part, piece)
        offset = tensor.offsets[0] + share * self.elements + begin
        size = (end - begin,)
        name = f"{tensor.name}[{offset}:{offset + size[0]}]"
        return dataclasses.replace(tensor, shape=size, offsets=(offset,), padded=size, name=name)

    def _place(self, value: Value, piece: int) -> IrTensor:
        """Where a piece of a value lies: in the caller's tensors, received or temporary."""
        key = (value.number, piece)
        if key not in self.places:
            self.places[key] = self._new_place(value, piece)
        return self.places[key]

    def _new_place(self, value: Value, piece: int) -> IrTensor:
        begin, end = self._bounds(value.part, piece)
        size, name = (end - begin,), f"{self.name}.{value.number}.{piece}"
        if value.origin is Origin.INPUT:
            return self._slice(self.share, value.slot, piece)
        if value.origin is Origin.PUT:
            owner = -1 if value.rank == self.rank else value.rank
            return self.lowering.graph.tensor(
                size, self.share.dtype, arena="symmetric", rank=owner, name=name
            )
        if value.number in self.homes:
            return self._slice(self.out, self.homes[value.number], piece)
        return self.lowering.temp(size, self.share.dtype, name)

    def _semaphores(self, value: Value, piece: int, tiles: int) -> list[RemoteSemaphore]:
        """The counters of a put, one for each tile."""
        name = f"{self.name}.{value.number}.{piece}"
        return [self.lowering.semaphore(value.rank, f"{name}.{i}") for i in range(tiles)]

    def _tiles(self, elements: int) -> tuple[int, range]:
        """Tile size and first elements: by the size alone, so that both ends of a put agree."""
        tile = flat_tile(elements, self.lowering.machine, MIN_PUT)
        return tile, range(0, elements, tile)

    def _await(self, group: Group, sources: Sequence[Value], piece: int) -> None:
        arriving = [
            self._semaphores(value, piece, len(group.coords))
            for value in sources
            if value.origin is Origin.PUT
        ]
        if arriving:
            group.awaits = [tuple((m, 1) for m in mails) for mails in zip(*arriving, strict=True)]

    def _copy(self, value: Value, piece: int, target: IrTensor, suffix: str) -> Group | None:
        if not target.elements:
            return None
        tile, starts = self._tiles(target.elements)
        group = self.lowering.emit(
            "pointwise",
            copy_params([1, 1, 1, tile]),
            [self._place(value, piece), target],
            [(0, 0, 0, at) for at in starts],
            suffix,
        )
        self._await(group, [value], piece)
        return group

    def _put(self, value: Value, piece: int) -> None:
        source = self.flow.values[value.sources[0]]
        begin, end = self._bounds(value.part, piece)
        if begin == end:
            return
        group = self._copy(source, piece, self._place(value, piece), f".put{value.rank}")
        assert group is not None
        group.sends = [
            (semaphore,) for semaphore in self._semaphores(value, piece, len(group.coords))
        ]

    def _sum(self, value: Value, piece: int) -> None:
        """Adds the sources from left to right, through fp32 where a task cannot take all."""
        begin, end = self._bounds(value.part, piece)
        if begin == end:
            return
        tile, starts = self._tiles(end - begin)
        coords = [(at,) for at in starts]
        dtype = fp32 if self.share.dtype in FLOATS else self.share.dtype
        rest = [self.flow.values[number] for number in value.sources]
        partial: list[IrTensor] = []
        while rest:
            taken = rest[: MAX_OPERANDS - 1 - len(partial)]
            rest = rest[len(taken) :]
            target = (
                self.lowering.temp((end - begin,), dtype, f"{self.name}.partial")
                if rest
                else self._place(value, piece)
            )
            operands = [*partial, *(self._place(v, piece) for v in taken), target]
            group = self.lowering.emit("sum_ranks", {"tile": tile}, operands, coords, ".sum")
            self._await(group, taken, piece)
            partial = [target]


def _lower(lowering: Lowering, node: Node) -> None:
    writer = _Writer(lowering, node)
    writer.write()
    if writer.result is not node.outputs[0]:
        copy_box(lowering, writer.result, node.outputs[0], ".out")


register("collective", None, _lower, aliasing="none", names_ranks=True)
