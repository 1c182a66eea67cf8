"""Products and the collectives that they meet as one op, tile by tile (ark.lower.overlap makes the
nodes): a tile of a product leaves for its owner's memory while the next one is multiplied, the
owner's own tile takes it in when it is multiplied, and the sum goes on to all ranks, or stays.

Each rank owns a share of the result's rows. All ranks multiply what others own first and what they
own last, so that what belongs to an own tile has come when that is done, and only the sums of the
last tiles travel when the products have ended. Rows are added in rank order in fp32 and rounded
once: the bits are those of the ops one by one, on all ranks, from run to run. Where the product's
body does not compute with its sums, tasks behind the products add. Called by the lowering.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import reduce

from ark.ir.graph import Node
from ark.ir.values import Buffer
from ark.ir.values import Tensor as IrTensor
from ark.lower.context import Lowering
from ark.lower.merge import part
from ark.lower.overlap import SHARE, SUM
from ark.lower.registry import register
from ark.ops.bands import Chunks, Product
from ark.plan.groups import Group
from ark.tasks import expression
from ark.tasks.combine import moved


class _Sum(Product):
    """A product that is summed over ranks; each owns a share of its rows."""

    def __init__(self, lowering: Lowering, node: Node) -> None:
        super().__init__(lowering, node, node.attrs["rows"])
        self.everywhere = node.type == SUM
        self.dtype = self.out.dtype
        self.steps = range(1, self.world)
        self.residuals = [lowering.view(t, (self.rows, self.columns)) for t in node.inputs[2:]]
        self.result = lowering.view(self.out, (self.out.elements // self.columns, self.columns))
        least = min(self._tile_rows(owner) for owner in range(self.world))
        self.bands = max(1, min(self.rounds // self.world, least))
        self.direct = self.everywhere and self.out.buffer.arena == "symmetric"
        stored = self.world if self.everywhere else 1
        self.folded = self.takes_expressions(2 + stored + self.world - 1 + len(self.residuals))

    def _owned(self, owner: int) -> tuple[int, int]:
        """First and last+1 row of a rank."""
        if not self.everywhere:
            return self.rows * owner // self.world, self.rows * (owner + 1) // self.world
        high = -(-self.rows // self.high)
        cuts = (high * i // self.world * self.high for i in (owner, owner + 1))
        begin, end = (min(self.rows, cut) for cut in cuts)
        return begin, end

    def _tile_rows(self, owner: int) -> int:
        begin, end = self._owned(owner)
        return -(-(end - begin) // self.high)

    def _band(self, owner: int, turn: int) -> tuple[int, int]:
        """The rows of a rank whose turn it is."""
        begin, end = self._owned(owner)
        many = self._tile_rows(owner)
        first, last = (begin + many * i // self.bands * self.high for i in (turn, turn + 1))
        return first, min(last, end)

    def write(self) -> None:
        for turn in range(self.bands):
            for step in self.steps:
                self._send(turn, step)
        for turn in range(self.bands):
            self._own(turn)
        self.tell()
        for turn in range(self.bands if self.everywhere else 0):
            for step in self.steps:
                self._arrive(turn, step)
        self.finish()

    def _left(self, begin: int, end: int) -> IrTensor:
        """The rows of the left side that make these rows."""
        return part(self.a, int(bool(self.node.attrs["transpose_a"])), begin, end - begin)

    def _send(self, turn: int, step: int) -> None:
        """A band's products, into the memory of its owner."""
        owner = self.peer(step)
        begin, end = self._band(owner, turn)
        if begin == end:
            return
        made = self._received(turn, self.world - step, (end - begin, self.columns), owner)
        group = self.multiply(self._left(begin, end), [made], f".{turn}.put+{step}")
        self.leave(group, [[(owner, f"{made.name}.{row}")] for row in self.rows_of(group)], turn)

    def _received(self, turn: int, step: int, shape: Sequence[int], owner: int = -1) -> IrTensor:
        """Where the owner of a band gets the products of the rank `step` behind it."""
        name = f"{self.name}.{turn}.from+{step}"
        return self.lowering.graph.tensor(
            shape, self.dtype, arena="symmetric", rank=owner, name=name
        )

    def _own(self, turn: int) -> None:
        """An own band: all ranks' products, added in rank order."""
        begin, end = self._band(self.rank, turn)
        if begin == end:
            return
        shape = (end - begin, self.columns)
        base = 0 if self.everywhere else self._owned(self.rank)[0]
        outs = [part(self.result, 0, begin - base, end - begin)]
        if self.everywhere:
            outs += [self._there(turn, step, begin, end) for step in self.steps]
        received = [self._received(turn, step, shape) for step in self.steps]
        residuals = [part(t, 0, begin, end - begin) for t in self.residuals]
        order = [(other - self.rank) % self.world for other in range(self.world)]
        order += range(self.world, self.world + len(residuals))
        self.tell(turn)
        left = self._left(begin, end)
        if self.folded:
            own = ["cast", self.dtype.name, expression.leaf(0)]
            terms = [expression.leaf(place) if place else own for place in order]
            total = reduce(lambda a, b: ["add", a, b], terms)
            group = self.multiply(left, outs, f".{turn}", total, [*received, *residuals])
            rows = self.rows_of(group)
        else:
            made = self.lowering.temp(shape, self.dtype, f"{self.name}.{turn}.own")
            self.multiply(left, [made], f".{turn}")
            operands = [made, *received, *residuals, *outs]
            group, rows = self._combine(turn, operands, order[: self.world], len(outs))
        across = self.across()
        group.awaits = [
            tuple((self.lowering.semaphore(self.rank, f"{t.name}.{i}"), across) for t in received)
            for i in rows
        ]
        if self.everywhere:
            told = [[(self.peer(s), self._told(turn, s, i)) for s in self.steps] for i in rows]
            if self.folded:
                self.leave(group, told, self.bands)
            else:
                self.sends(group, told)

    def _combine(
        self, turn: int, operands: Sequence[IrTensor], order: list[int], outputs: int
    ) -> tuple[Group, list[int]]:
        """Tasks that add a band's products where the product's own do not, and their rows of
        tiles.
        """
        cut = self._cut(self.rank, turn)
        params = {"element": self.dtype.name, "op": "sum", "order": order, "outputs": outputs}
        flat = [self.lowering.flat(t) for t in operands]
        coords = [chunk for row in cut for chunk in row]
        group = self.lowering.emit("combine", params, flat, coords, f".{turn}.sum")
        return group, [i for i, row in enumerate(cut) for _ in row]

    def _cut(self, owner: int, turn: int) -> list[Chunks]:
        """A band as it is added, by row of tiles."""
        begin, end = self._band(owner, turn)
        return self.chunks(end - begin, self.columns, self.dtype.itemsize)

    def _told(self, turn: int, step: int, row: int) -> str:
        """The counter of the rank `step` on for a row of tiles that this one has summed."""
        return f"{self.name}.{turn}.sum+{self.world - step}.{row}"

    def _there(self, turn: int, step: int, begin: int, end: int) -> IrTensor:
        """A band of the result at a peer: in place, or where it is received."""
        peer = self.peer(step)
        if not self.direct:
            return self._sums(turn, self.world - step, begin, end, peer)
        there = dataclasses.replace(self.result, buffer=self._buffer_at(peer))
        return part(there, 0, begin, end - begin)

    def _sums(self, turn: int, step: int, begin: int, end: int, owner: int) -> IrTensor:
        """Where a rank receives the sums of the rank `step` on."""
        name = f"{self.name}.{turn}.sums+{step}"
        return self.lowering.graph.tensor(
            (end - begin, self.columns), self.dtype, arena="symmetric", rank=owner, name=name
        )

    def _buffer_at(self, peer: int) -> Buffer:
        graph, own = self.lowering.graph, self.out.buffer
        for buffer in graph.buffers:
            if (buffer.arena, buffer.rank, buffer.name) == ("symmetric", peer, own.name):
                return buffer
        return graph.buffer("symmetric", own.nbytes, peer, own.name)

    def _arrive(self, turn: int, step: int) -> None:
        """The sums of the rank `step` on: they are there, or are copied to where they belong."""
        lowering, owner = self.lowering, self.peer(step)
        begin, end = self._band(owner, turn)
        if begin == end:
            return
        place = lowering.flat(part(self.result, 0, begin, end - begin))
        cut = self._cut(owner, turn)
        if self.direct:
            coords = [(row[0][0], row[-1][1]) for row in cut]
            rows = list(range(len(cut)))
            group = lowering.emit("arrival", {}, [place], coords, f".{turn}.from+{step}")
        else:
            coords = [chunk for row in cut for chunk in row]
            rows = [i for i, row in enumerate(cut) for _ in row]
            source = lowering.flat(self._sums(turn, step, begin, end, -1))
            params = {"element": moved(self.dtype)}
            group = lowering.emit(
                "combine", params, [source, place], coords, f".{turn}.from+{step}"
            )
        parts = [self.across() if self.folded else len(row) for row in cut]
        name = f"{self.name}.{turn}.sum+{step}"
        group.awaits = [((lowering.semaphore(self.rank, f"{name}.{i}"), parts[i]),) for i in rows]


def _lower_sum(lowering: Lowering, node: Node) -> None:
    _Sum(lowering, node).write()


for _type in (SUM, SHARE):
    register(_type, None, _lower_sum, aliasing="none", names_ranks=True, all_ranks=True)
