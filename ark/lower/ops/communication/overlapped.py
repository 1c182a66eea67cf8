"""Lowering of a matrix product and the collective after it (all-reduce or reduce-scatter) as one
op, so that tiles are sent while others are computed.

The nodes are created by the pass ark.lower.rewrite.overlap_collectives. Each tile of a product is
stored directly in its owner's memory. The owner adds the tiles that have arrived while further
tiles are multiplied, and sends the sum to all ranks or keeps it.

Each rank owns a share of the result's rows. All ranks multiply in rounds. In a round, a rank
multiplies a band of rows for each rank: first the band that the next rank owns, then the bands of
the following ranks, and last the band that it owns itself. So each rank's links are in use at any
time, and only the last round's sums remain when the products end. Rows are added in rank order in
fp32 and rounded once, so results are equal bit for bit to those of separate ops, on all ranks and
in every run.

If the option `overlap` names an engine by which the host copies, products that other ranks own are
stored locally and copied by the host's proxy, in all rounds except the last. Then no store of a
tile waits for a link.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from msgspec import structs

from ark.ir.attributes import OverlappedAttributes
from ark.ir.graph import Node
from ark.ir.values import Buffer
from ark.ir.values import Tensor as IrTensor
from ark.lower.context import Lowering
from ark.lower.merge import part
from ark.lower.ops.communication.bands import Chunks, Product
from ark.lower.products import SHARE, SUM
from ark.lower.registry import register
from ark.plan.params import Params
from ark.tasks.combine import CombineParams, moved


class _Sum(Product):
    """A matrix product whose results are summed over ranks. Each rank owns a share of the rows: it
    adds the results of all ranks for these rows.
    """

    def __init__(self, lowering: Lowering, node: Node) -> None:
        super().__init__(lowering, node, node.read(OverlappedAttributes).rows)
        self.everywhere = node.type == SUM
        self.dtype = self.out.dtype
        self.flat = lowering.flat(self.out)
        nbytes = self.rows * self.columns * self.dtype.itemsize
        own = nbytes // self.world
        if self.rounds > self.world and not self.copies and self.idle_suffice(nbytes - own, own):
            self.movers = self.movers or self.idle
        least = min(self._tile_rows(owner) for owner in range(self.world))
        self.rounds = 1 if self.movers else max(1, min(self.rounds, least))
        self._products: IrTensor | None = None
        self._last_rows: set[int] = set()  # rows of this rank's tiles that are multiplied last
        self.direct = self.everywhere and self.out.buffer.arena == "symmetric"

    def _copied(self, round_index: int) -> bool:
        """True if the host's proxy copies the products of this round to peers."""
        return self.copies is not None and round_index < self.rounds - 1

    def _owned(self, owner: int) -> tuple[int, int]:
        """The rows of the result that a rank owns: the first, and the one after the last."""
        if not self.everywhere:
            return self.rows * owner // self.world, self.rows * (owner + 1) // self.world
        high = -(-self.rows // self.high)
        cuts = (high * i // self.world * self.high for i in (owner, owner + 1))
        begin, end = (min(self.rows, cut) for cut in cuts)
        return begin, end

    def _tile_rows(self, owner: int) -> int:
        begin, end = self._owned(owner)
        return -(-(end - begin) // self.high)

    def _band(self, owner: int, round_index: int) -> tuple[int, int]:
        """The band of rows that all ranks multiply for the rank `owner` in a round: the first row,
        and the one after the last.
        """
        begin, end = self._owned(owner)
        many = self._tile_rows(owner)
        first, last = (
            begin + many * i // self.rounds * self.high for i in (round_index, round_index + 1)
        )
        return first, min(last, end)

    def write(self) -> None:
        own = before = None
        for round_index in range(self.rounds):
            bands = [self._band(owner, round_index) for owner in range(self.world)]
            count = sum(-(-(end - begin) // self.high) for begin, end in bands) * self.across()
            if not self.movers:
                self.begin_round(count, count // self.world * round_index)
            for step in (*range(1, self.world), 0):
                own = self._multiply(round_index, step)
            if round_index:
                self._add(round_index - 1, before)
            before = own
        self._add(self.rounds - 1, before)
        if self.everywhere:
            for round_index in range(self.rounds):
                for step in range(1, self.world):
                    self._arrive(round_index, step)
        self.finish()

    def _multiply(self, round_index: int, step: int) -> IrTensor | None:
        """Emits the multiplications of a band. The results are stored in the memory of the rank
        that owns the band. Returns the tensor with the results, or None if the band has no rows.
        """
        lowering, owner = self.lowering, self.peer(step)
        begin, end = self._band(owner, round_index)
        if begin == end:
            return None
        shape = (end - begin, self.columns)
        a = part(self.a, int(self.given.transpose_a), begin, end - begin)
        if step == 0:
            partial = self._band_tensor(shape, begin, f"{round_index}.own")
            first = self._dealt
            group = self.multiply(a, partial, f".{round_index}")
            tiles = enumerate(group.coords, first)
            self._last_rows = {c[2] // self.high for i, c in tiles if self.is_last(i)}
            return partial
        back = self.world - step
        partial = self._received(round_index, back, shape, owner)
        if self.movers:
            sent = self._band_tensor(shape, begin, f"{round_index}.to+{step}")
            self.multiply(a, sent, f".{round_index}.for+{step}")
            self.put(sent, partial, self._cut(owner, round_index), f".{round_index}.put+{step}")
            return partial
        if self._copied(round_index):
            sent = lowering.temp(shape, self.dtype, f"{self.name}.{round_index}.to+{step}")
            self.multiply(a, sent, f".{round_index}.for+{step}")
            group = self.copy(sent, partial, *shape, f".{round_index}.put+{step}")
            group.sends = [
                tuple(lowering.semaphore(owner, f"{partial.name}.{i}") for i in rows)
                for rows in self.copied(shape[0])
            ]
            return partial
        group = self.multiply(a, partial, f".{round_index}.put+{step}")
        group.sends = [
            (lowering.semaphore(owner, f"{partial.name}.{c[2] // self.high}"),)
            for c in group.coords
        ]
        return partial

    def _band_tensor(self, shape: tuple[int, int], begin: int, name: str) -> IrTensor:
        """A local tensor for the results of a band.

        Bands that are sent while others are multiplied are parts of one large tensor. If each had a
        tensor of its own, later bands might share memory with earlier ones and wait for it.
        """
        if not self.movers:
            return self.lowering.temp(shape, self.dtype, f"{self.name}.{name}")
        if self._products is None:
            whole = (self.rows, self.columns)
            self._products = self.lowering.temp(whole, self.dtype, f"{self.name}.made")
        return part(self._products, 0, begin, shape[0])

    def _received(
        self, round_index: int, step: int, shape: Sequence[int], owner: int = -1
    ) -> IrTensor:
        """The receive buffer in the memory of the band's owner, into which the rank that is `step`
        ranks after the owner puts its results of the band.
        """
        name = f"{self.name}.{round_index}.from+{step}"
        return self.lowering.graph.tensor(
            shape, self.dtype, arena="symmetric", rank=owner, name=name
        )

    def _cut(self, owner: int, round_index: int) -> list[Chunks]:
        begin, end = self._band(owner, round_index)
        size = self.dtype.itemsize
        last = round_index == self.rounds - 1
        nbytes = self.share_bytes((end - begin) * self.columns * size, last)
        return self.chunks(end - begin, self.columns, nbytes, size)

    def _rows_of(self, flat: IrTensor, begin: int, end: int) -> IrTensor:
        return part(flat, 0, begin * self.columns, (end - begin) * self.columns)

    def _add(self, round_index: int, own: IrTensor | None) -> None:
        """Emits tasks that add the results of all ranks for a band that this rank owns. If all
        ranks need the sums, the tasks also send them.
        """
        if own is None:
            return
        lowering = self.lowering
        begin, end = self._band(self.rank, round_index)
        steps = range(1, self.world)
        received = [self._received(round_index, step, own.shape) for step in steps]
        shares = [lowering.flat(t) for t in (own, *received)]
        base = 0 if self.everywhere else self._owned(self.rank)[0]
        outs = [self._rows_of(self.flat, begin - base, end - base)]
        signals = self.everywhere and not self._copied(round_index)
        if signals:
            outs += [self._there(round_index, step, begin, end) for step in steps]
        order = tuple((other - self.rank) % self.world for other in range(self.world))
        cut = self._cut(self.rank, round_index)
        params = CombineParams(self.dtype.name, order=order, outputs=len(outs))
        last = round_index == self.rounds - 1
        split = min(self._last_rows, default=len(cut)) if self.movers else 0
        if self.movers and not self.by_warps:
            later = -(-len(cut) * self.across() // len(self.computing)) - 1
            each = own.nbytes // len(cut)
            split = min(split, self.early_bytes(later) // each)
        for early, rows in ((True, range(split)), (False, range(split, len(cut)))):
            if not rows:
                continue
            lo, hi = cut[rows[0]][0][0], cut[rows[-1]][-1][1]
            operands = [part(t, 0, lo, hi - lo) for t in (*shares, *outs)]
            coords = [(a - lo, b - lo) for i in rows for a, b in cut[i]]
            suffix = f".{round_index}.sum{'.early' if early else ''}"
            chosen = structs.replace(params, moved=early and self.by_warps)
            group = lowering.emit("combine", chosen, operands, coords, suffix)
            nbytes = (coords[0][1] - coords[0][0]) * self.dtype.itemsize
            group.placement = (
                self.moving(len(coords)) if early else self.others(len(coords), nbytes, last)
            )
            for i in (row for row in rows for _ in cut[row]):
                parts = self._parts(cut, i, round_index)
                group.awaits.append(
                    tuple((lowering.semaphore(self.rank, f"{t.name}.{i}"), parts) for t in received)
                )
                if signals:
                    names = [self._sum_counter(round_index, s, i) for s in steps]
                    peers = [self.peer(s) for s in steps]
                    group.sends.append(tuple(map(lowering.semaphore, peers, names)))
        for step in steps if self.everywhere and not signals else ():
            there = self._there(round_index, step, begin, end)
            copied = self.copy(
                outs[0], there, end - begin, self.columns, f".{round_index}.sum+{step}"
            )
            peer = self.peer(step)
            copied.sends = [
                tuple(
                    lowering.semaphore(peer, self._sum_counter(round_index, step, i)) for i in rows
                )
                for rows in self.copied(end - begin)
            ]

    def _parts(self, cut: list[Chunks], row: int, round_index: int) -> int:
        """The number of tasks by which a peer sends the sums of row `row` of tiles."""
        if self.movers:
            return len(cut[row])
        return 1 if self._copied(round_index) else self.across()

    def _sum_counter(self, round_index: int, step: int, row: int) -> str:
        """The name of the counter that this rank signals when it has sent the sum of a row of tiles
        to the rank that is `step` ranks after this one. The counter is on that rank.
        """
        return f"{self.name}.{round_index}.sum+{self.world - step}.{row}"

    def _there(self, round_index: int, step: int, begin: int, end: int) -> IrTensor:
        """The tensor on a peer that receives the sums of a band: a part of the peer's result, or a
        receive buffer.
        """
        peer = self.peer(step)
        if self.direct:
            flat = dataclasses.replace(self.flat, buffer=self._buffer_at(peer))
            return self._rows_of(flat, begin, end)
        return self._sums(round_index, self.world - step, begin, end, peer)

    def _sums(self, round_index: int, step: int, begin: int, end: int, owner: int) -> IrTensor:
        """The receive buffer on rank `owner` for the sums that the rank `step` ranks after `owner`
        has computed.
        """
        size = ((end - begin) * self.columns,)
        name = f"{self.name}.{round_index}.sums+{step}"
        return self.lowering.graph.tensor(
            size, self.dtype, arena="symmetric", rank=owner, name=name
        )

    def _buffer_at(self, peer: int) -> Buffer:
        graph, own = self.lowering.graph, self.out.buffer
        for buffer in graph.buffers:
            if (buffer.arena, buffer.rank, buffer.name) == ("symmetric", peer, own.name):
                return buffer
        return graph.buffer("symmetric", own.nbytes, peer, own.name)

    def _arrive(self, round_index: int, step: int) -> None:
        """Emits the tasks that wait for the sums from the rank `step` ranks after this one. If the
        sums arrive in the result itself, the tasks only wait. Otherwise they also copy the sums
        from the receive buffer to the result.
        """
        lowering, owner = self.lowering, self.peer(step)
        begin, end = self._band(owner, round_index)
        if begin == end:
            return
        place = self._rows_of(self.flat, begin, end)
        cut = self._cut(owner, round_index)
        many = [1 if self._copied(round_index) else len(row) for row in cut]
        if self.direct:
            coords = [(row[0][0], row[-1][1]) for row in cut]
            rows = list(range(len(cut)))
            group = lowering.emit(
                "arrival", Params(), [place], coords, f".{round_index}.from+{step}"
            )
        else:
            coords = [chunk for row in cut for chunk in row]
            rows = [i for i, row in enumerate(cut) for _ in row]
            source = self._sums(round_index, step, begin, end, -1)
            params = CombineParams(moved(self.dtype))
            operands = [source, place]
            group = lowering.emit(
                "combine", params, operands, coords, f".{round_index}.from+{step}"
            )
        nbytes = math.ceil(place.nbytes / len(coords))
        group.placement = self.others(len(coords), nbytes, True)
        name = f"{self.name}.{round_index}.sum+{step}"
        group.awaits = [((lowering.semaphore(self.rank, f"{name}.{i}"), many[i]),) for i in rows]


def _lower_matmul_reduction(lowering: Lowering, node: Node) -> None:
    _Sum(lowering, node).write()


for _type in (SUM, SHARE):
    register(
        _type, None, _lower_matmul_reduction, aliasing="none", names_ranks=True, all_ranks=True
    )
