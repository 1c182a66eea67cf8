"""Lowering of an all-gather of rows and the matrix product that reads the gathered rows, as one op.
A rank multiplies its own rows first, and then the rows of its peers as they arrive. The node is
created by ark.lower.rewrite.overlap_collectives.
"""

from __future__ import annotations

import itertools

from ark.ir.attributes import OverlappedAttributes
from ark.ir.graph import Node
from ark.ir.values import Tensor as IrTensor
from ark.lower.context import Lowering
from ark.lower.copies import dense
from ark.lower.merge import part
from ark.lower.ops.communication.bands import Product
from ark.lower.products import GATHER
from ark.lower.registry import register
from ark.tasks.combine import CombineParams, moved


class _Gathered(Product):
    """A matrix product whose left operand is gathered: each rank has a share of its rows."""

    def __init__(self, lowering: Lowering, node: Node) -> None:
        super().__init__(lowering, node, node.read(OverlappedAttributes).rows)
        self.own = dense(lowering, node.inputs[0], ".dense", fill=True)
        self.share, self.k = self.own.shape
        nbytes = self.share_bytes(self.own.nbytes, False)
        if self.copies:
            nbytes, self.copiers = self.own.nbytes, self.idle
        self.cut = self.chunks(self.share, self.k, nbytes, self.own.dtype.itemsize)

    def write(self) -> None:
        steps = range(1, self.world)
        for step in steps:
            self._put(step)
        self.multiply(self.own, self._rows_of(self.rank, 0, self.share), "")
        received = {
            step: self.lowering.graph.tensor(
                self.own.shape, self.own.dtype, arena="symmetric", name=f"{self.name}.from+{step}"
            )
            for step in steps
        }
        high = -(-self.share // self.high)
        rounds = 1 if self.movers else max(1, min(self.rounds, high))
        cuts = [min(self.share, high * i // rounds * self.high) for i in range(rounds + 1)]
        for begin, end in itertools.pairwise(cuts):
            for step, source in received.items():
                self._multiply_received(step, source, begin, end)
        self.finish()

    def _rows_of(self, owner: int, begin: int, end: int) -> IrTensor:
        return part(self.out, 0, owner * self.share + begin, end - begin)

    def _put(self, step: int) -> None:
        """Emits the puts that send this rank's own rows to the rank that is `step` ranks after this
        one.
        """
        lowering, peer, back = self.lowering, self.peer(step), self.world - step
        name = f"{self.name}.from+{back}"
        target = lowering.graph.tensor(
            self.own.shape, self.own.dtype, arena="symmetric", rank=peer, name=name
        )
        if self.movers:
            self.put(self.own, target, self.cut, f".put+{step}")
            return
        coords = [chunk for row in self.cut for chunk in row]
        rows = [i for i, row in enumerate(self.cut) for _ in row]
        suffix = f".put+{step}"
        if self.copies:
            group = self.copy(self.own, target, self.share, self.k, suffix)
            signals = self.copied(self.share)
        else:
            operands = [lowering.flat(self.own), lowering.flat(target)]
            params = CombineParams(moved(self.own.dtype))
            group = lowering.emit("combine", params, operands, coords, suffix)
            nbytes = (coords[0][1] - coords[0][0]) * self.own.dtype.itemsize
            # The puts of an all-gather run while the ranks multiply their own rows. A put moves
            # half as many bytes as a put and a sum of an all-reduce, so twice as many puts run per
            # round of tiles.
            rounds = 2 * max(1, self.rounds // self.world)
            group.placement = self.others(len(coords), -(-nbytes // rounds), False)
            signals = [range(i, i + 1) for i in rows]
        group.sends = [
            tuple(lowering.semaphore(peer, f"{name}.{i}") for i in covered) for covered in signals
        ]

    def _multiply_received(self, step: int, source: IrTensor, begin: int, end: int) -> None:
        owner = self.peer(step)
        suffix = f".from+{step}.{begin // self.high}"
        out = self._rows_of(owner, begin, end)
        group = self.multiply(part(source, 0, begin, end - begin), out, suffix)
        rows = [(begin + c[2]) // self.high for c in group.coords]
        group.awaits = [
            ((self.lowering.semaphore(self.rank, f"{source.name}.{i}"), len(self.cut[i])),)
            for i in rows
        ]


def _lower_all_gather_matmul(lowering: Lowering, node: Node) -> None:
    _Gathered(lowering, node).write()


register(GATHER, None, _lower_all_gather_matmul, aliasing="none", names_ranks=True, all_ranks=True)
