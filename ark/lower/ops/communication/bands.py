"""Emits the tasks of a matrix product that is fused with a collective, and assigns them to
processors. Some tasks multiply, others add tiles of peers and send tiles. The rows of the product
are divided into bands, one for each rank. If there are fewer tiles than processors, the processors
without a tile add and send. Otherwise all processors add and send between two tiles. Used by
ark.lower.ops.communication.overlapped and overlapped_gather.
"""

from __future__ import annotations

from ark.ir.attributes import OverlappedAttributes
from ark.ir.dtype import fp32
from ark.ir.fold import split
from ark.ir.graph import Node
from ark.ir.values import Tensor as IrTensor
from ark.lower.context import Lowering
from ark.lower.copies import copy_box, dense, move
from ark.lower.cuts import choose_cut, choose_tile, is_exact, matrix_group
from ark.lower.engines import COPIED, ENGINES, THREADS, choose_engine, tile_bytes
from ark.lower.tiling import box_coords
from ark.plan.cost import operations
from ark.plan.groups import Group
from ark.plan.kind import OperandType, Signature
from ark.tasks import expression
from ark.tasks.combine import CombineParams, moved, tiles
from ark.tasks.matmul_params import MatmulParams

EARLY_SHARE = 0.75  # measured rounds take at least 3/4 of the predicted time
Chunks = list[tuple[int, int]]  # ranges of elements: the first, and the one after the last


class Product:
    """A matrix product that is fused with a collective: its division into tiles and into bands of
    rows (one for each rank), and the processors that multiply, add and send.
    """

    def __init__(self, lowering: Lowering, node: Node, rows: int) -> None:
        self.lowering, self.node = lowering, node
        self.rank, self.world = lowering.graph.rank, lowering.graph.world_size
        self.a, self.b = node.inputs[:2]
        self.out = dense(lowering, node.outputs[0], ".out", fill=False)
        self.rows = rows
        self.given = node.read(OverlappedAttributes)
        self.columns = self.b.shape[0 if self.given.transpose_b else 1]
        self.depth = self.b.shape[1 if self.given.transpose_b else 0]
        self.high, self.wide = self._tile()
        self.name = f"bands.{lowering.number('bands')}"
        begin, end = node.processors or (0, lowering.machine.processors)
        count = -(-rows // self.high) * -(-self.columns // self.wide)
        self.rounds = -(-count // (end - begin))
        computing = -(-count // self.rounds)
        self.computing = range(begin, begin + computing)
        self.idle = range(begin + computing, end)
        self._dealt = self._turn = 0
        self.copies = None
        engine = lowering.options.get("overlap")
        if engine in COPIED:
            self.copies = choose_engine(lowering.machine, self.out.nbytes, engine)
        # If the host's proxy thread copies to peers, a task waits for each copy. Half of the
        # processors without tiles run these tasks.
        self.copiers = self.idle[: -(-len(self.idle) // 2) if self.copies else 0]
        self._round = (0, 0, 0)  # index of its first tile, its number of tiles, its shift
        # The results are transferred by moving warps (warps with a task list of their own) if there
        # are enough rounds of multiplications to hide the transfers.
        count = lowering.machine.processors
        self.by_warps = (
            lowering.machine.lists > count and self.rounds >= self.world and not self.copies
        )
        self.movers = range(count + begin, count + end) if self.by_warps else range(0)

    def idle_suffice(self, put: int, added: int) -> bool:
        """True if the processors without tiles can send `put` bytes to peers and add `added` bytes
        while the other processors multiply. A put takes half as long as a sum of the same number of
        bytes.
        """
        needed = (put / 2 + added) / self.lowering.machine.costs.combine_rate
        return bool(self.idle) and needed < len(self.idle) * self.rounds * self._round_us()

    def early_bytes(self, rounds: int) -> int:
        """The bytes of sums that processors without tiles get for some rounds of multiplications.
        It is less than they are predicted to add, because late sums would delay all ranks.
        """
        rate = len(self.idle) * self.lowering.machine.costs.combine_rate
        return int(EARLY_SHARE * rate * rounds * self._round_us())

    def _round_us(self) -> float:
        """The predicted microseconds of a round of multiplications."""
        operands = tuple(
            OperandType(t.dtype.name, t.shape, t.strides) for t in (self.a, self.b, self.out)
        )
        transposes = self.given.transpose_a, self.given.transpose_b
        params = MatmulParams(*transposes, tile=(self.high, self.wide))
        sig = Signature("matmul", params.to_plan(), operands)
        return 2.0 * self.high * self.wide * self.depth / operations(sig, self.lowering.machine)

    def _tile(self) -> tuple[int, int]:
        """The tile size that the product would have if it were not fused with a collective."""
        machine, a = self.lowering.machine, self.a
        shape, size = (1, 1, self.rows, self.columns), a.dtype.itemsize
        measured = self.lowering.options.get("cuts", {})
        if machine.variant.name != "matrix":
            types = [t.dtype.name for t in (a, self.b, self.out)]
            exact = is_exact(types, shape, self.depth, machine)
            return choose_tile(shape, self.depth, size, machine, measured, exact)
        cut = choose_cut(shape, self.depth, size, machine, False, measured)
        return cut.rows, cut.columns

    def multiply(self, a: IrTensor, out: IrTensor, suffix: str) -> Group:
        """Emits the multiplications of one band of rows. `a` and `out` contain only the rows of the
        band.
        """
        machine = self.lowering.machine
        rows = out.shape[0]
        tile = (min(self.high, rows), self.wide)
        coords = box_coords((1, 1, *out.shape), (1, 1, *tile))
        group = matrix_group(tile[0], self.depth, a.dtype.itemsize, self.lowering.machine)
        if self.movers:  # a band of tiles ends with each round, so that its rows are complete
            group = min(group, max(1, len(self.computing) // self.across()))
        coords.sort(key=lambda c: (c[2] // (group * tile[0]), c[3], c[2]))
        stored = machine.variant.name == "matrix" and out.dtype not in (a.dtype, fp32)
        params = MatmulParams(
            transpose_a=self.given.transpose_a,
            transpose_b=self.given.transpose_b,
            tile=tile,
            expr=expression.leaf(0) if stored else None,
        )
        emitted = self.lowering.emit("matmul", params, [a, self.b, out], coords, suffix)
        emitted.placement = [self._processor(i) for i in range(len(coords))]
        self._dealt += len(coords)
        return emitted

    def begin_round(self, count: int, shift: int) -> None:
        """Begins a round, in which each processor computes one tile: the next `count` tiles. shift:
        the number of processors by which the assignment of tiles is rotated. Storing to a peer
        takes longer than storing locally; by the rotation, the processors that stored to a peer in
        the last round store locally in this one.
        """
        self._round = self._dealt, count, shift

    def _processor(self, number: int) -> int:
        first, count, shift = self._round
        number += self._dealt - first
        if number < count:
            number = (number + shift) % count
        return self.computing[(first + number) % len(self.computing)]

    def across(self) -> int:
        """The number of tiles across the product, side by side in one row of tiles."""
        return -(-self.columns // self.wide)

    def others(self, count: int, nbytes: int, everyone: bool) -> list[int]:
        """The processors of `count` tasks that add or send `nbytes` bytes each. Processors that do
        not multiply come first. Each of them gets as many tasks as it can run during one round of
        multiplications. The remaining tasks go to the processors that multiply. everyone: True to
        distribute the tasks over all processors instead.
        """
        free = [] if everyone else [*self.idle[len(self.copiers) :]]
        machine = self.lowering.machine
        least = int(machine.costs.combine_rate * self._round_us() / nbytes)
        taken = min(count, len(free) * max(1, least))
        processors = [free[i % len(free)] for i in range(taken)]
        rest = [*self.computing, *(self.idle if everyone else ())]
        processors += [rest[(self._turn + i) % len(rest)] for i in range(count - taken)]
        self._turn += count - taken
        return processors

    def moving(self, count: int) -> list[int]:
        """Assigns `count` tasks of similar size, which transfer results, to the task lists of
        moving warps in turn. Returns the list of each task.
        """
        processors = [self.movers[(self._turn + i) % len(self.movers)] for i in range(count)]
        self._turn += count
        return processors

    def is_last(self, number: int) -> bool:
        """True if the tile with this number belongs to the last round of multiplications."""
        last = -(-self._dealt // len(self.computing)) - 1
        return number // len(self.computing) == last

    def chunks(self, rows: int, width: int, nbytes: int, itemsize: int) -> list[Chunks]:
        """The ranges of elements that separate tasks transfer, for each row of tiles in a band. The
        sending and the receiving rank compute the same ranges.
        """
        return [
            [
                (begin * width + lo, begin * width + hi)
                for lo, hi in tiles(
                    (min(begin + self.high, rows) - begin) * width, itemsize, nbytes
                )
            ]
            for begin in range(0, rows, self.high)
        ]

    def share_bytes(self, band: int, last: bool) -> int:
        """The number of bytes for one task that adds or sends a part of a band. last: True for the
        last band that is transferred.
        """
        machine = self.lowering.machine
        if self.movers or (self.idle and not last):
            return machine.costs.lane_bytes
        return tile_bytes(ENGINES[THREADS], machine, band)

    def put(self, source: IrTensor, target: IrTensor, cut: list[Chunks], suffix: str) -> Group:
        """Emits tasks of `movers` that copy ranges of elements to a peer. The peer has one counter
        for each row of tiles.
        """
        lowering = self.lowering
        coords = [chunk for row in cut for chunk in row]
        operands = [lowering.flat(source), lowering.flat(target)]
        params = CombineParams(moved(source.dtype), moved=self.by_warps)
        group = lowering.emit("combine", params, operands, coords, suffix)
        group.placement = self.moving(len(coords))
        peer = target.buffer.rank
        group.sends = [
            (lowering.semaphore(peer, f"{target.buffer.name}.{i}"),)
            for i, row in enumerate(cut)
            for _ in row
        ]
        return group

    def copy(self, source: IrTensor, target: IrTensor, rows: int, width: int, suffix: str) -> Group:
        """Emits tasks that copy rows to a peer by the host's proxy thread. There are few of these
        tasks, because a task occupies its processor until its copy has ended.
        """
        assert self.copies is not None
        coords = [
            (part.start * self.high * width, min(part.stop * self.high, rows) * width)
            for part in self.copied(rows)
        ]
        group = move(self.lowering, self.copies, source, target, coords, suffix)
        free = self.copiers or self.computing[-1:]
        group.placement = [free[i % len(free)] for i in range(len(coords))]
        return group

    def copied(self, rows: int) -> list[range]:
        """The division of a band among copies by the proxy: for each copy, the numbers of its rows
        of tiles.
        """
        parts = split(-(-rows // self.high), max(1, len(self.copiers)))
        return [range(a, b) for a, b in parts]

    def peer(self, step: int) -> int:
        return (self.rank + step) % self.world

    def finish(self) -> None:
        if self.out is not self.node.outputs[0]:
            copy_box(self.lowering, self.out, self.node.outputs[0], ".out")
