"""From pieces on ranks to one graph a rank: tensors of the pieces' sizes, and what moves between.

Where an operand's view meets views that pieces of other ranks wrote, the rank receives them, adds
what are shares of a value and puts boxes together. All ranks' graphs are written in one order, so
sends and receives pair up and cannot wait for each other. A value of which every rank has a share
and every rank wants all becomes one all_reduce.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from ark.errors import ModelError, UnsupportedError
from ark.ir.graph import Graph
from ark.ir.values import Buffer, Tensor, dense_view
from ark.parallel.transform.annotations import local_attrs
from ark.parallel.transform.normal import RESHAPE
from ark.parallel.transform.pieces import ParallelGraph, Piece
from ark.parallel.transform.views import Box, View, meeting

RESULTS = ("state", "external")  # arenas of what a caller reads
IN_PLACE = ("kv_append", "kv_cache_slot")  # ops that write into a part of an operand
TAG = 0


@dataclass
class RankGraphs:
    """One graph a rank. held: for each rank, by the name of a buffer that the caller fills or
    reads, which view of the one-device graph's buffer it is; names are those of that graph.
    """

    graphs: list[Graph]
    held: list[dict[str, View]] = field(default_factory=list)


def materialise(plan: ParallelGraph) -> RankGraphs:
    """The ranks' graphs of a plan; ModelError where it has a circle or leaves a piece out."""
    return _Writer(plan).write()


class _Writer:
    def __init__(self, plan: ParallelGraph) -> None:
        self.plan = plan
        self.made = RankGraphs(
            [Graph(rank, plan.ranks) for rank in range(plan.ranks)], [{} for _ in range(plan.ranks)]
        )
        self.order = plan.in_order()
        self.source: dict[int, Tensor] = {}  # by buffer: a tensor that is all of it
        for node in plan.nodes:
            for tensor in (*node.inputs, *node.outputs):
                self.source.setdefault(tensor.buffer.id, tensor)
        self.producers: dict[int, list[Piece]] = {}
        self.wanted: dict[View, set[int]] = {}
        self.twin_of = {written: twin for twin, written in plan.twins.items()}
        for piece in self.order:
            self.producers.setdefault(piece.output.buffer, []).append(piece)
            for view in piece.inputs:
                self.wanted.setdefault(view, set()).update(plan.ranks_of(piece))
        self.lasting = {
            (rank, view.buffer): self._box_around(rank, view.buffer)
            for view, ranks in list(self.wanted.items())
            if view.buffer in plan.twins
            for rank in ranks
        }
        for (rank, twin), box in self.lasting.items():
            self.wanted.setdefault(View(plan.twins[twin], box), set()).add(rank)
        self.local: dict[tuple[int, Piece], Tensor] = {}
        self.fetched: dict[tuple[int, View], Tensor] = {}
        self.given: dict[tuple[int, int], tuple[Tensor, Box]] = {}

    def write(self) -> RankGraphs:
        for piece in self.order:
            for rank in self.plan.ranks_of(piece):
                inputs = [self._operand(rank, view) for view in piece.inputs]
                self._emit(rank, piece, inputs)
        for (rank, twin), box in sorted(self.lasting.items()):
            self._refresh(rank, twin, box)
        return self.made

    def _refresh(self, rank: int, twin: int, box: Box) -> None:
        """What a rank keeps of memory that others have written, or it has written elsewhere."""
        new = self._operand(rank, View(self.plan.twins[twin], box))
        kept = self._given(rank, View(twin, box))
        if new.buffer.id != kept.buffer.id:
            graph = self.made.graphs[rank]
            graph.add("copy", [new], [graph.rewrite(kept)], {}, "keep")

    def _emit(self, rank: int, piece: Piece, inputs: Sequence[Tensor]) -> None:
        graph = self.made.graphs[rank]
        out = self._place(rank, piece)
        earlier = [
            self.local[rank, first]
            for first in self.plan.earlier(piece)
            if (rank, first) in self.local
        ]
        if piece.node.type == RESHAPE:
            out = self._reshaped(rank, inputs[0], out)
            graph.depend(out, earlier)
            self.local[rank, piece] = out
            return
        graph.depend(out, earlier)
        attrs = local_attrs(piece.node, out.shape)
        graph.add(piece.node.type, inputs, [out], attrs, piece.node.name)
        self.local[rank, piece] = out

    def _place(self, rank: int, piece: Piece) -> Tensor:
        """A tensor for what a piece writes on a rank: in what it keeps, where it is all of that."""
        graph, source, view = self.made.graphs[rank], self.source[piece.output.buffer], piece.output
        twin = self.twin_of.get(view.buffer)
        here = twin is not None and self.lasting.get((rank, twin)) == view.box
        if here and view.share == (0, 1):
            assert twin is not None
            return graph.rewrite(self._given(rank, View(twin, view.box)))
        if piece.node.type in IN_PLACE:
            raise UnsupportedError(
                f"{piece.node.name} writes into memory in place, so the ranks that hold it must "
                "compute it in the parts that they hold; split what reads it alike"
            )
        if source.buffer.arena not in RESULTS or twin is not None:
            return graph.tensor(view.shape, source.dtype, name=source.name)
        name = self._name(rank, source.buffer)
        self.made.held[rank][name] = view
        arena = source.buffer.arena
        return graph.tensor(view.shape, source.dtype, arena=arena, name=name)

    def _reshaped(self, rank: int, tensor: Tensor, shaped: Tensor) -> Tensor:
        """The tensor in another shape: seen so, or copied where it is no row of elements or where
        its memory is written over later.
        """
        graph = self.made.graphs[rank]
        lasting = any(tensor.buffer.id == t.buffer.id for t, _ in self.given.values())
        layout = None if lasting else dense_view(tensor, shaped.shape)
        if layout is None:
            dense = graph.tensor(tensor.shape, tensor.dtype, name=tensor.name)
            graph.add("copy", [tensor], [dense], {}, "copy")
            tensor, layout = dense, dense_view(dense, shaped.shape)
            assert layout is not None
        extents, offsets = layout
        made = graph.tensor(
            shaped.shape,
            tensor.dtype,
            buffer=tensor.buffer,
            extents=extents,
            offsets=offsets,
            name=tensor.name,
        )
        graph.depend(made, graph.depends(tensor))
        return made

    def _name(self, rank: int, buffer: Buffer) -> str:
        """The buffer's name; with a number where a rank holds several parts of it."""
        for count in itertools.count():
            name = f"{buffer.name}.{count}" if count else buffer.name
            if name not in self.made.held[rank]:
                return name
        raise AssertionError

    def _operand(self, rank: int, view: View) -> Tensor:
        """The tensor on a rank that holds a view, made of what others hold if need be."""
        if (rank, view) not in self.fetched:
            if view.buffer in self.producers:
                self._fetch(rank, view)
            else:
                self.fetched[rank, view] = self._given(rank, view)
        return self.fetched[rank, view]

    def _given(self, rank: int, view: View) -> Tensor:
        """A part of what the caller fills: each rank has the box around all that it reads of it."""
        key = (rank, view.buffer)
        if key not in self.given:
            box = self._box_around(rank, view.buffer)
            source = self.source[view.buffer]
            shape = tuple(end - begin for begin, end in box)
            name = source.buffer.name
            made = self.made.graphs[rank].tensor(
                shape, source.dtype, arena=source.buffer.arena, name=name
            )
            self.made.held[rank][name] = View(self.plan.twins.get(view.buffer, view.buffer), box)
            self.given[key] = (made, box)
        whole, box = self.given[key]
        return self._part(rank, whole, box, view.box)

    def _box_around(self, rank: int, buffer: int) -> Box:
        """The box around all that a rank reads of a buffer."""
        boxes = [v.box for v, ranks in self.wanted.items() if v.buffer == buffer and rank in ranks]
        sides = zip(*boxes, strict=True)
        return tuple((min(b for b, _ in side), max(e for _, e in side)) for side in sides)

    def _part(self, rank: int, whole: Tensor, box: Box, wanted: Box) -> Tensor:
        """The box `wanted` of a tensor that holds `box`."""
        if box == wanted:
            return whole
        graph = self.made.graphs[rank]
        made = graph.tensor(
            [end - begin for begin, end in wanted],
            whole.dtype,
            buffer=whole.buffer,
            extents=whole.extents,
            offsets=[o + w[0] - b[0] for o, w, b in zip(whole.offsets, wanted, box, strict=True)],
            name=whole.name,
        )
        graph.depend(made, graph.depends(whole))
        return made

    def _fetch(self, rank: int, view: View) -> None:
        sources = [p for p in self.producers[view.buffer] if p.output.meets(view)]
        for piece in sources:
            if (rank, piece) in self.local and piece.output.share == (0, 1):
                box = piece.output.box
                if meeting(box, view.box) == view.box:
                    found = self._part(rank, self.local[rank, piece], box, view.box)
                    self.fetched[rank, view] = found
                    return
        if self._reduced_everywhere(view, sources):
            for other, piece in enumerate(self._by_rank(sources)):
                graph = self.made.graphs[other]
                share = self.local[other, piece]
                total = graph.tensor(view.shape, share.dtype, name=share.name)
                graph.add("all_reduce", [share], [total], {"packet": False}, "all_reduce")
                self.fetched[other, view] = total
            return
        cells = list(_cells(view.box, [p.output.box for p in sources]))
        whole = None
        for cell in cells:
            parts = [self._load(rank, *chosen, cell) for chosen in self._cover(rank, cell, sources)]
            if len(cells) == 1 and len(parts) == 1:
                whole = parts[0]
                break
            if whole is None:
                whole = self.made.graphs[rank].tensor(
                    view.shape, parts[0].dtype, name=parts[0].name
                )
            self._add_up(rank, parts, self._part(rank, whole, view.box, cell))
        assert whole is not None
        self.fetched[rank, view] = whole

    def _reduced_everywhere(self, view: View, sources: Sequence[Piece]) -> bool:
        """Does each rank have one share of exactly this box, and want all of it?"""
        ranks = [self.plan.ranks_of(piece) for piece in sources]
        return (
            len(sources) == self.plan.ranks > 1
            and sorted(ranks) == [[rank] for rank in range(self.plan.ranks)]
            and all(p.output.box == view.box for p in sources)
            and sorted(p.output.share for p in sources)
            == [(i, len(sources)) for i in range(len(sources))]
            and len(self.wanted[view]) == self.plan.ranks
        )

    def _by_rank(self, sources: Sequence[Piece]) -> list[Piece]:
        return sorted(sources, key=lambda piece: self.plan.ranks_of(piece)[0])

    def _cover(self, rank: int, cell: Box, sources: Sequence[Piece]) -> list[tuple[int, Piece]]:
        """(rank, piece) whose shares add up to the cell's value, the rank's own where it can be."""
        able = [
            ((other - rank) % self.plan.ranks, other, piece)
            for piece in sources
            if meeting(piece.output.box, cell) == cell
            for other in self.plan.ranks_of(piece)
        ]
        able.sort(key=lambda entry: entry[0])

        def rest(start: Fraction) -> list[tuple[int, Piece]] | None:
            if start == 1:
                return []
            for _, other, piece in able:
                if piece.output.interval[0] == start:
                    later = rest(piece.output.interval[1])
                    if later is not None:
                        return [(other, piece), *later]
            return None

        found = rest(Fraction(0))
        if found is None:
            raise ModelError(
                f"nothing that the plan computes adds up to the part {list(cell)} that rank {rank} "
                "needs; split the op that writes it into parts of one kind"
            )
        return found

    def _load(self, rank: int, owner: int, piece: Piece, cell: Box) -> Tensor:
        """The cell of what a piece wrote on `owner`, on `rank`."""
        part = self._part(owner, self.local[owner, piece], piece.output.box, cell)
        if owner == rank:
            return part
        here, there = self.made.graphs[rank], self.made.graphs[owner]
        there.add("send", [part], [], {"remote_rank": rank, "tag": TAG}, "send")
        received = here.tensor(part.shape, part.dtype, name=part.name)
        here.add("recv", [], [received], {"remote_rank": owner, "tag": TAG}, "recv")
        return received

    def _add_up(self, rank: int, parts: Sequence[Tensor], target: Tensor) -> None:
        graph = self.made.graphs[rank]
        if len(parts) == 1:
            graph.add("copy", parts, [target], {}, "copy")
            return
        total = parts[0]
        for number, part in enumerate(parts[1:], 2):
            out = target if number == len(parts) else graph.tensor(target.shape, target.dtype)
            graph.add("add", [total, part], [out], {}, "add")
            total = out


def _cells(box: Box, others: Sequence[Box]) -> Iterable[Box]:
    """The box cut wherever one of the others begins or ends."""
    sides = []
    for d, (begin, end) in enumerate(box):
        cuts = {begin, end}
        cuts |= {at for other in others for at in other[d] if begin < at < end}
        sides.append(list(itertools.pairwise(sorted(cuts))))
    return itertools.product(*sides)


def whole_of(graph: Graph, views: Sequence[tuple[View, np.ndarray]]) -> np.ndarray:
    """A buffer of the one-device graph from parts that ranks hold, shares of values added up.

    Equal parts of several ranks count once.
    """
    buffer = views[0][0].buffer
    tensor = next(t for t in graph.tensors if t.buffer.id == buffer)
    found = np.zeros(tensor.extents, views[0][1].dtype)
    different = dict(views)
    for view, array in sorted(different.items(), key=lambda item: item[0].share == (0, 1)):
        box = tuple(slice(*side) for side in view.box)
        found[box] = array if view.share == (0, 1) else found[box] + array
    return found


def part_of(whole: np.ndarray, view: View) -> np.ndarray:
    """What a rank holds of an array that is a buffer of the one-device graph."""
    return whole[tuple(slice(*side) for side in view.box)]
