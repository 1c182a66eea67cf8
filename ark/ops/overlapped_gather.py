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
from ark.ops.bands import Product
from ark.ops.communication import dense
from ark.tasks.combine import moved


class _Gathered(Product):
    """A product of rows that all ranks have a share of."""

    def __init__(self, lowering: Lowering, node: Node) -> None:
        super().__init__(lowering, node, node.attrs["rows"])
        self.own = dense(lowering, node.inputs[0], ".dense", fill=True)
        self.share, self.k = self.own.shape
        self.cut = self.chunks(self.share, self.k, self.own.dtype.itemsize)

    def write(self) -> None:
        steps = range(1, self.world)
        high = -(-self.share // self.high)
        slots = max(1, min(self.rounds // self.world, high))
        for slot in range(slots):
            begin, end = self._cut_at(slot, slots), self._cut_at(slot + 1, slots)
            for step in steps:
                self._put(step, slot, begin, end)
            own = part(self.own, 0, begin, end - begin)
            self.multiply(own, [self._rows_of(self.rank, begin, end)], f".{slot}")
        self.tell()
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
        name = f"{self.name}.from+{back}"
        target = lowering.graph.tensor(
            self.own.shape, self.own.dtype, arena="symmetric", rank=peer, name=name
        )
        rows = range(begin // self.high, -(-end // self.high))
        first, count = begin * self.k, (end - begin) * self.k
        coords = [(lo - first, hi - first) for row in rows for lo, hi in self.cut[row]]
        operands = [part(lowering.flat(t), 0, first, count) for t in (self.own, target)]
        params = {"element": moved(self.own.dtype)}
        group = lowering.emit("combine", params, operands, coords, f".{slot}.put+{step}")
        group.lanes = self.deal(len(coords))
        told = [[(peer, f"{name}.{row}")] for row in rows for _ in self.cut[row]]
        self.leave(group, told, slot)

    def _multiply_received(self, step: int, source: IrTensor, begin: int, end: int) -> None:
        owner = self.peer(step)
        suffix = f".from+{step}.{begin // self.high}"
        out = self._rows_of(owner, begin, end)
        group = self.multiply(part(source, 0, begin, end - begin), [out], suffix)
        first = begin // self.high
        group.awaits = [
            ((self.lowering.semaphore(self.rank, f"{source.name}.{i}"), len(self.cut[i])),)
            for i in (first + row for row in self.rows_of(group))
        ]


def _lower_gathered(lowering: Lowering, node: Node) -> None:
    _Gathered(lowering, node).write()


register(GATHER, None, _lower_gathered, aliasing="none", names_ranks=True, all_ranks=True)
