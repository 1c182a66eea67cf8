"""Products whose rows are dealt to ranks in bands: how their tiles are cut, who multiplies them,
and when a tile that leaves is told (ark.ops.overlapped).

A signal to a peer waits for what was stored there. So a tile's own task stores it, and another one
behind the next tile signals: the stores travel while that is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ark.codegen.layout import RECORD_OPERANDS
from ark.ir.dtype import FLOATS, SMALL_FLOATS, fp32
from ark.ir.graph import Node
from ark.ir.values import Tensor as IrTensor
from ark.lower.context import Lowering
from ark.lower.cuts import choose_cut, matrix_group
from ark.lower.engines import ENGINES, THREADS, tile_bytes
from ark.lower.tiling import box_coords
from ark.ops.communication import copy_box, dense
from ark.plan.groups import Group
from ark.tasks import expression
from ark.tasks.combine import tiles

MAPS = 2  # of a product's two sides, in a task's record
Chunks = list[tuple[int, int]]  # first and last+1 element
Told = list[list[tuple[int, str]]]  # by task: ranks and the names of counters there


class Product:
    """A product whose rows are bands, and what leaves of it."""

    def __init__(self, lowering: Lowering, node: Node, rows: int) -> None:
        self.lowering, self.node = lowering, node
        self.rank, self.world = lowering.graph.rank, lowering.graph.world_size
        self.a, self.b = node.inputs[:2]
        self.out = dense(lowering, node.outputs[0], ".out", fill=False)
        self.rows = rows
        self.columns = self.b.shape[0 if node.attrs["transpose_b"] else 1]
        self.depth = self.b.shape[1 if node.attrs["transpose_b"] else 0]
        self.high, self.wide = self._tile()
        self.name = f"bands.{lowering.number('bands')}"
        begin, end = node.processors or (0, lowering.machine.processors)
        count = -(-rows // self.high) * -(-self.columns // self.wide)
        self.rounds = -(-count // (end - begin))
        self.computing = range(begin, begin + -(-count // self.rounds))
        self._dealt = 0
        self._leaving: list[tuple[Group, Told, int]] = []

    def _tile(self) -> tuple[int, int]:
        machine, a = self.lowering.machine, self.a
        if machine.variant.name != "matrix":
            return machine.matmul_tile(self.rows, self.columns, 1)
        cut = choose_cut(
            (1, 1, self.rows, self.columns),
            self.depth,
            a.dtype.itemsize,
            machine,
            False,
            self.lowering.options.get("cuts", {}),
        )
        return cut.rows, cut.columns

    def takes_expressions(self, operands: int) -> bool:
        """Does the product's body compute with its sums and so many operands before it stores?"""
        machine = self.lowering.machine
        fits = operands + MAPS <= RECORD_OPERANDS
        able = machine.has("single_thread") or (machine.variant.name == "matrix" and fits)
        return able and self.a.dtype in (*FLOATS, *SMALL_FLOATS)

    def multiply(
        self,
        a: IrTensor,
        outs: Sequence[IrTensor],
        suffix: str,
        expr: Any = None,
        read: Sequence[IrTensor] = (),
    ) -> Group:
        """The tiles of some rows, which a and the outs hold. expr: over the product and `read`."""
        machine, attrs, out = self.lowering.machine, self.node.attrs, outs[0]
        rows = out.shape[0]
        tile = (min(self.high, rows), self.wide)
        coords = box_coords((1, 1, *out.shape), (1, 1, *tile))
        group = matrix_group(tile[0], self.depth, a.dtype.itemsize)
        coords.sort(key=lambda c: (c[2] // (group * tile[0]), c[3], c[2]))
        turns = {name: bool(attrs[name]) for name in ("transpose_a", "transpose_b")}
        params: dict[str, object] = {**turns, "tile": list(tile)}
        if expr is None and machine.variant.name == "matrix" and out.dtype not in (a.dtype, fp32):
            expr = expression.leaf(0)
        if expr is not None:
            params["expr"] = expr
        if len(outs) > 1:
            params["copies"] = len(outs) - 1
        operands = [a, self.b, out, *read, *outs[1:]]
        made = self.lowering.emit("matmul", params, operands, coords, suffix)
        made.lanes = self.deal(len(coords))
        self._dealt += len(coords)
        return made

    def deal(self, count: int) -> list[int]:
        """The processors of the next so many tiles."""
        lanes = self.computing
        return [lanes[(self._dealt + i) % len(lanes)] for i in range(count)]

    def rows_of(self, group: Group) -> list[int]:
        """By tile: which row of tiles of its band it is in."""
        return [coord[2] // self.high for coord in group.coords]

    def across(self) -> int:
        """Tiles side by side."""
        return -(-self.columns // self.wide)

    def leave(self, group: Group, told: Told, turn: int) -> None:
        """What tasks store at peers is told these behind the next tiles, or before own bands of
        that turn: it travels while those are multiplied.
        """
        self.tell()
        self._leaving.append((group, told, turn))

    def tell(self, turn: int | None = None) -> None:
        """Tells what has left, of turns up to this one, behind the tiles emitted so far."""
        left = [entry for entry in self._leaving if turn is None or entry[2] <= turn]
        self._leaving = [entry for entry in self._leaving if entry not in left]
        for group, told, _ in left:
            coords = [(i,) for i in range(len(told))]
            suffix = f"{group.name.removeprefix(self.node.name)}.told"
            made = self.lowering.emit("tell", {"tasks": len(told)}, [], coords, suffix)
            made.lanes = group.lanes
            self.sends(made, told)

    def sends(self, group: Group, told: Told) -> None:
        """Tasks tell peers themselves."""
        group.sends = [
            tuple(self.lowering.semaphore(rank, name) for rank, name in task) for task in told
        ]

    def chunks(self, rows: int, width: int, itemsize: int) -> list[Chunks]:
        """By row of tiles of a band: how its elements are cut; both ends of a put agree."""
        nbytes = tile_bytes(ENGINES[THREADS], self.lowering.machine, rows * width * itemsize)
        return [
            [
                (begin * width + lo, begin * width + hi)
                for lo, hi in tiles(
                    (min(begin + self.high, rows) - begin) * width, itemsize, nbytes
                )
            ]
            for begin in range(0, rows, self.high)
        ]

    def peer(self, step: int) -> int:
        return (self.rank + step) % self.world

    def finish(self) -> None:
        if self.out is not self.node.outputs[0]:
            copy_box(self.lowering, self.out, self.node.outputs[0], ".out")
