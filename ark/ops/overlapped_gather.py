"""A product of rows that ranks gather, as one op (ark.lower.overlap makes the nodes): own rows are
multiplied first, then peers' bands as they arrive. Called by the lowering.
"""

from __future__ import annotations

from ark.ir.graph import Node
from ark.ir.values import Tensor as IrTensor
from ark.lower.context import Lowering
from ark.lower.merge import part
from ark.lower.overlap import GATHER
from ark.lower.registry import register
from ark.lower.tiling import box_coords
from ark.ops.bands import Product
from ark.ops.communication import dense
from ark.tasks.combine import moved

PUSHED = 256  # columns of a tile that is pushed as it is


class _Gathered(Product):
    """A product of rows that all ranks have a share of."""

    def __init__(self, lowering: Lowering, node: Node) -> None:
        super().__init__(lowering, node, node.attrs["rows"])
        self.own = dense(lowering, node.inputs[0], ".dense", fill=True)
        self.share, self.k = self.own.shape
        self.cut = self.chunks(self.share, self.k, self.own.dtype.itemsize)
        self.pushed = self.copies_itself() and self.own.dtype.itemsize == 2 and self.k % 8 == 0
        # How many tiles side by side a row of tiles comes in.
        self.parts = [-(-self.k // PUSHED)] * len(self.cut)
        if not self.pushed:
            self.parts = [len(row) for row in self.cut]

    def write(self) -> None:
        steps = range(1, self.world)
        high = -(-self.share // self.high)
        slots = max(1, min(self.rounds // self.world, high)) if self.pushed else 1
        for slot in range(slots):
            begin, end = self._cut_at(slot, slots), self._cut_at(slot + 1, slots)
            for step in steps:
                self._put(step, slot, begin, end)
            own = part(self.own, 0, begin, end - begin)
            self.multiply(own, [self._rows_of(self.rank, begin, end)], f".{slot}")
        self.land()
        received = {
            step: self.lowering.graph.tensor(
                self.own.shape, self.own.dtype, arena="symmetric", name=f"{self.name}.from+{step}"
            )
            for step in steps
        }
        turns = max(1, min(self.rounds, high))
        for turn in range(turns):
            begin, end = self._cut_at(turn, turns), self._cut_at(turn + 1, turns)
            for step, source in received.items():
                self._multiply_received(step, source, begin, end)
        self.finish()

    def _cut_at(self, number: int, parts: int) -> int:
        """Where a part of the shared rows begins, in whole tiles."""
        return min(self.share, -(-self.share // self.high) * number // parts * self.high)

    def _rows_of(self, owner: int, begin: int, end: int) -> IrTensor:
        return part(self.out, 0, owner * self.share + begin, end - begin)

    def _put(self, step: int, slot: int, begin: int, end: int) -> None:
        """Some own rows to the rank `step` on."""
        lowering, peer, back = self.lowering, self.peer(step), self.world - step
        name, first = f"{self.name}.from+{back}", begin // self.high
        target = lowering.graph.tensor(
            self.own.shape, self.own.dtype, arena="symmetric", rank=peer, name=name
        )
        suffix = f".{slot}.put+{step}"
        if self.pushed:
            tile = (self.high, min(PUSHED, self.k))
            sides = [part(t, 0, begin, end - begin) for t in (self.own, target)]
            coords = box_coords((1, 1, end - begin, self.k), (1, 1, *tile))
            params = {"tile": list(tile), "late": True}
            group = lowering.emit("push", params, sides, coords, suffix)
            group.lanes = self.deal(len(coords))
            rows = [first + row for row in self.rows_of(group)]
        else:
            coords = [chunk for row in self.cut for chunk in row]
            operands = [lowering.flat(self.own), lowering.flat(target)]
            params = {"element": moved(self.own.dtype)}
            group = lowering.emit("combine", params, operands, coords, suffix)
            rows = [i for i, row in enumerate(self.cut) for _ in row]
        self.leave(group, [[(peer, f"{name}.{i}")] for i in rows], slot)

    def _multiply_received(self, step: int, source: IrTensor, begin: int, end: int) -> None:
        owner = self.peer(step)
        suffix = f".from+{step}.{begin // self.high}"
        out = self._rows_of(owner, begin, end)
        group = self.multiply(part(source, 0, begin, end - begin), [out], suffix)
        first = begin // self.high
        group.awaits = [
            ((self.lowering.semaphore(self.rank, f"{source.name}.{i}"), self.parts[i]),)
            for i in (first + row for row in self.rows_of(group))
        ]


def _lower_gathered(lowering: Lowering, node: Node) -> None:
    _Gathered(lowering, node).write()


register(GATHER, None, _lower_gathered, aliasing="none", names_ranks=True, all_ranks=True)
