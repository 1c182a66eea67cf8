"""Builds one graph per rank from the pieces that are assigned to the rank: tensors of the pieces'
sizes, and communication with the other graphs.

If an operand's view overlaps views that pieces of other ranks write, the rank receives the written
parts, adds partial sums, and assembles the operand from its parts. The graphs of all ranks are
written in one order, so sends and receives match and cannot deadlock. Transfers that together form
a collective of all ranks are replaced by this collective (ark.parallel.transform.collectives).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from ark.errors import ModelError, UnsupportedError
from ark.ir.dtype import fp32
from ark.ir.graph import Graph
from ark.ir.values import Buffer, Tensor, dense_view
from ark.lower.engines import ONE_SHOT
from ark.parallel.transform.collectives import joint_collective
from ark.parallel.transform.normal import LASTING, RESHAPE
from ark.parallel.transform.pieces import ParallelGraph, Piece
from ark.parallel.transform.rearranged import local_attrs
from ark.parallel.transform.views import Box, View, meeting

ENDS = ("sample", "sample_adjusted", "sample_each")  # ops that may end the run on all ranks
# Types of ops that write into a part of an operand and keep the rest of its contents.
IN_PLACE = ("kv_append", "kv_cache_slot", "paged_append", *ENDS)
MESSAGE_TAG = 0
Written = tuple[Piece, View]
"""A piece, and its view of a buffer that it writes."""
Chosen = tuple[int, Piece, View]
"""(rank, piece, view): a rank, a piece that it computes, and the view that the piece writes."""


@dataclass
class RankGraphs:
    """One graph per rank. held: for each rank, the part (view) of each buffer that the caller fills
    or reads, by the buffer's name in the one-device graph.
    """

    graphs: list[Graph]
    held: list[dict[str, View]] = field(default_factory=list)


def materialise(plan: ParallelGraph, algorithm: str = ONE_SHOT) -> RankGraphs:
    """The ranks' graphs of a plan. algorithm: of collectives of all ranks, as of ark.all_reduce.

    Raises ModelError if the plan has a cycle or omits a piece.

    Examples:
        >>> with ark.use_model(ark.Model(0, 1)) as model:
        ...     y = ark.linear(ark.tensor([8, 16]), ark.tensor([32, 16]))
        >>> plan = ark.parallel.ParallelGraph(model.graph, ranks=2)
        >>> (product,) = plan.nodes
        >>> for rank, half in enumerate(plan.op_trans(plan.pieces(product)[0], "y", 2)):
        ...     plan.op_assign(half, rank)
        >>> graphs = ark.parallel.materialise(plan).graphs
    """
    return _Writer(plan, algorithm).write()


class _Writer:
    def __init__(self, plan: ParallelGraph, algorithm: str) -> None:
        self.plan, self.algorithm = plan, algorithm
        self.result = RankGraphs(
            [Graph(rank, plan.ranks) for rank in range(plan.ranks)], [{} for _ in range(plan.ranks)]
        )
        self.lasting_names = {b.name for b in plan.graph.buffers if b.arena in LASTING}
        self.order = plan.in_order()
        self.source: dict[int, Tensor] = {}  # by buffer: a tensor over the whole buffer
        for node in plan.nodes:
            for tensor in (*node.inputs, *node.outputs):
                self.source.setdefault(tensor.buffer.id, tensor)
        self.producers: dict[int, list[Written]] = {}
        self.wanted: dict[View, set[int]] = {}
        # For each rank and buffer: the smallest box that contains all that the rank reads of it.
        self.around: dict[tuple[int, int], Box] = {}
        for graph in self.result.graphs:
            graph.phases = plan.graph.phases
        for piece in self.order:
            for view in piece.written:
                self.producers.setdefault(view.buffer, []).append((piece, view))
            for view in piece.inputs:
                self._want(view, plan.ranks_of(piece))
        self.lasting = {key: box for key, box in self.around.items() if key[1] in plan.twins}
        self.versions = {place: version for version, place in plan.versions.items()}
        for (rank, twin), box in self.lasting.items():
            for version in [v for (other, _), v in self.versions.items() if other == twin]:
                self._want(View(version, box), (rank,))
        self.local: dict[tuple[int, Piece, int], Tensor] = {}  # the output of a piece on a rank
        self.fetched: dict[tuple[int, View], Tensor] = {}
        self.given: dict[tuple[int, int], tuple[Tensor, Box]] = {}

    def _want(self, view: View, ranks: Iterable[int]) -> None:
        """Records that ranks read a view."""
        for rank in ranks:
            self.wanted.setdefault(view, set()).add(rank)
            key = (rank, view.buffer)
            sides = zip(self.around.get(key, view.box), view.box, strict=True)
            self.around[key] = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in sides)

    def write(self) -> RankGraphs:
        for phase, pieces in itertools.groupby(self.order, key=lambda piece: piece.node.phase):
            for graph in self.result.graphs:
                graph.phase = phase
            for piece in pieces:
                for rank in self.plan.ranks_of(piece):
                    self._emit(rank, piece, [self._operand(rank, view) for view in piece.inputs])
            for (rank, twin), box in sorted(self.lasting.items()):
                if (twin, phase) in self.versions:
                    self._refresh(rank, twin, View(self.versions[twin, phase], box))
            for graph in self.result.graphs:
                if not any(node.phase == phase for node in graph.nodes):
                    _idle(graph)
        return self.result

    def _refresh(self, rank: int, twin: int, written: View) -> None:
        """Updates a rank's copy of lasting memory that other ranks have written, or that this rank
        has written in another buffer.
        """
        new = self._operand(rank, written)
        kept = self._given(rank, View(twin, written.box))
        if new.buffer.id != kept.buffer.id:
            graph = self.result.graphs[rank]
            graph.add("copy", [new], [graph.rewrite(kept)], {}, "keep")

    def _emit(self, rank: int, piece: Piece, inputs: Sequence[Tensor]) -> None:
        graph = self.result.graphs[rank]
        if piece.node.type in ENDS and len(self.plan.ranks_of(piece)) < self.plan.ranks:
            raise UnsupportedError(
                f"{piece.node.name} may end the run, which all ranks must do together; "
                "assign it to all of them by op_assign"
            )
        outs = [self._place(rank, piece, view) for view in piece.written]
        earlier = [
            self.local[rank, first, first.output.buffer]
            for first in self.plan.earlier(piece)
            if (rank, first, first.output.buffer) in self.local
        ]
        if piece.node.type == RESHAPE:
            outs = [self._reshaped(rank, inputs[0], outs[0])]
        for view, out in zip(piece.written, outs, strict=True):
            graph.depend(out, earlier)
            self.local[rank, piece, view.buffer] = out
        if piece.node.type != RESHAPE:
            attrs = local_attrs(piece.node, piece.inputs, piece.output)
            graph.add(piece.node.type, inputs, outs, attrs, piece.node.name)

    def _place(self, rank: int, piece: Piece, view: View) -> Tensor:
        """A tensor for the output of a piece on a rank. If the output covers all of the rank's
        memory for the buffer, the tensor is in this memory.
        """
        graph, source = self.result.graphs[rank], self.source[view.buffer]
        twin, _ = self.plan.versions.get(view.buffer, (None, 0))
        if twin is not None and view.share == (0, 1) and self.lasting.get((rank, twin)) == view.box:
            return graph.rewrite(self._given(rank, View(twin, view.box)))
        if piece.node.type in IN_PLACE:
            raise UnsupportedError(
                f"{piece.node.name} writes into memory in place, so each rank must compute the "
                "part that it holds; split the readers of that memory in the same way"
            )
        if source.buffer.arena not in LASTING or twin is not None:
            return self._temporary(rank, view.shape, source)
        name = self._name(rank, source.buffer)
        self.result.held[rank][name] = view
        arena = source.buffer.arena
        return graph.tensor(view.shape, source.dtype, arena=arena, name=name)

    def _reshaped(self, rank: int, tensor: Tensor, shaped: Tensor) -> Tensor:
        """The tensor in another shape. It is a view, or a copy if the tensor is not contiguous or
        its memory is overwritten later.
        """
        graph = self.result.graphs[rank]
        lasting = any(tensor.buffer.id == t.buffer.id for t, _ in self.given.values())
        layout = None if lasting else dense_view(tensor, shaped.shape)
        if layout is None:
            dense = self._temporary(rank, tensor.shape, tensor)
            graph.add("copy", [tensor], [dense], {}, "copy")
            tensor, layout = dense, dense_view(dense, shaped.shape)
            assert layout is not None
        extents, offsets = layout
        copy = graph.tensor(
            shaped.shape,
            tensor.dtype,
            buffer=tensor.buffer,
            extents=extents,
            offsets=offsets,
            name=tensor.name,
        )
        graph.depend(copy, graph.depends(tensor))
        return copy

    def _temporary(self, rank: int, shape: Sequence[int], like: Tensor) -> Tensor:
        """Memory for a value of this iteration. If `like` is memory that keeps its contents, which
        is found by its name, the new tensor gets another name.
        """
        name = f"{like.name}.copy" if like.name in self.lasting_names else like.name
        return self.result.graphs[rank].tensor(shape, like.dtype, name=name)

    def _name(self, rank: int, buffer: Buffer) -> str:
        """The buffer's name, with a number if the rank holds several parts of the buffer."""
        for count in itertools.count():
            name = f"{buffer.name}.{count}" if count else buffer.name
            if name not in self.result.held[rank]:
                return name
        raise AssertionError

    def _operand(self, rank: int, view: View) -> Tensor:
        """A tensor on a rank with a view's contents, received from other ranks if necessary."""
        if (rank, view) not in self.fetched:
            if view.buffer in self.producers:
                self._fetch(rank, view)
            elif view.share != (0, 1):
                raise ModelError(
                    "the plan reads a partial sum of a tensor that the caller fills, but every "
                    "rank holds that tensor whole; split the op along a dimension"
                )
            else:
                self.fetched[rank, view] = self._given(rank, view)
        return self.fetched[rank, view]

    def _given(self, rank: int, view: View) -> Tensor:
        """A part of a tensor that the caller fills. Each rank holds the smallest box that contains
        everything that it reads of the tensor.
        """
        key = (rank, view.buffer)
        if key not in self.given:
            box = self.around[key]
            source = self.source[view.buffer]
            shape = tuple(end - begin for begin, end in box)
            name = source.buffer.name
            tensor_of_rank = self.result.graphs[rank].tensor(
                shape, source.dtype, arena=source.buffer.arena, name=name
            )
            self.result.held[rank][name] = View(self.plan.twins.get(view.buffer, view.buffer), box)
            self.given[key] = (tensor_of_rank, box)
        whole, box = self.given[key]
        part = self._part(rank, whole, box, view.box)
        if part is not whole:  # a plan records operands; the caller uses the whole tensor's name
            self.result.graphs[rank].depend(part, [whole])
        return part

    def _part(self, rank: int, whole: Tensor, box: Box, wanted: Box) -> Tensor:
        """Returns the part `wanted` (a box) of a tensor that holds the box `box`."""
        if box == wanted:
            return whole
        graph = self.result.graphs[rank]
        part = graph.tensor(
            [end - begin for begin, end in wanted],
            whole.dtype,
            buffer=whole.buffer,
            extents=whole.extents,
            offsets=[o + w[0] - b[0] for o, w, b in zip(whole.offsets, wanted, box, strict=True)],
            name=whole.name and f"{whole.name}.part",
        )
        graph.depend(part, graph.depends(whole))
        return part

    def _fetch(self, rank: int, view: View) -> None:
        sources = [(p, w) for p, w in self.producers[view.buffer] if w.meets(view)]
        for piece, written in sources:
            written_here = self.local.get((rank, piece, view.buffer))
            inside = meeting(written.box, view.box) == view.box
            if written_here is not None and inside and written.share == view.share:
                self.fetched[rank, view] = self._part(rank, written_here, written.box, view.box)
                return
        ranks_of = self.plan.ranks_of
        by_ranks = [(ranks_of(piece), written) for piece, written in sources]
        joint = joint_collective(view, by_ranks, self.wanted, self.plan.ranks)
        if joint is not None:
            for other, graph in enumerate(self.result.graphs):
                own = [
                    self.local[other, piece, view.buffer]
                    for piece, _ in sources
                    if ranks_of(piece) == [other]
                ]
                share, read = own[0], joint.reads[other]
                if len(own) > 1:
                    share = self._temporary(other, share.shape, share)
                    self._add_up(other, own, share)
                total = self._temporary(other, read.shape, share)
                kind, attributes = joint.node(self.algorithm)
                graph.add(kind, [share], [total], attributes, joint.collective.value)
                self.fetched[other, read] = total
            return
        cells = list(_cells(view.box, [written.box for _, written in sources]))
        whole = None
        for cell in cells:
            parts = [
                self._load(rank, *chosen, cell)
                for chosen in self._cover(rank, cell, view.interval, sources)
            ]
            if len(cells) == 1 and len(parts) == 1:
                whole = parts[0]
                break
            if whole is None:
                whole = self._temporary(rank, view.shape, parts[0])
            self._add_up(rank, parts, self._part(rank, whole, view.box, cell))
        assert whole is not None
        self.fetched[rank, view] = whole

    def _cover(
        self,
        rank: int,
        cell: Box,
        interval: tuple[Fraction, Fraction],
        sources: Sequence[Written],
    ) -> list[Chosen]:
        """Finds pieces whose results add up to the share `interval` of a part `cell` of a value.
        Returns tuples (rank, piece, view). Pieces that the rank itself computes are preferred.
        """
        able = [
            ((other - rank) % self.plan.ranks, other, piece, written)
            for piece, written in sources
            if meeting(written.box, cell) == cell
            for other in self.plan.ranks_of(piece)
        ]
        able.sort(key=lambda entry: entry[0])

        def rest(start: Fraction) -> list[Chosen] | None:
            if start == interval[1]:
                return []
            for _, other, piece, written in able:
                if written.interval[0] == start:
                    later = rest(written.interval[1])
                    if later is not None:
                        return [(other, piece, written), *later]
            return None

        others = rest(interval[0])
        if others is None:
            raise ModelError(
                f"rank {rank} needs the part {list(cell)} of a value, but no pieces of the plan "
                "add up to it; split the op that writes the value into parts of one kind"
            )
        return others

    def _load(self, rank: int, owner: int, piece: Piece, written: View, cell: Box) -> Tensor:
        """A box (cell) of the output that a piece has on rank `owner`, as a tensor on `rank`."""
        output = self.local[owner, piece, written.buffer]
        part = self._part(owner, output, written.box, cell)
        if owner == rank:
            return part
        here, there = self.result.graphs[rank], self.result.graphs[owner]
        there.add("send", [part], [], {"remote_rank": rank, "tag": MESSAGE_TAG}, "send")
        received = self._temporary(rank, part.shape, part)
        here.add("recv", [], [received], {"remote_rank": owner, "tag": MESSAGE_TAG}, "recv")
        return received

    def _add_up(self, rank: int, parts: Sequence[Tensor], target: Tensor) -> None:
        graph = self.result.graphs[rank]
        if len(parts) == 1:
            graph.add("copy", parts, [target], {}, "copy")
            return
        total = parts[0]
        for number, part in enumerate(parts[1:], 2):
            out = target if number == len(parts) else graph.tensor(target.shape, target.dtype)
            graph.add("add", [total, part], [out], {}, "add")
            total = out


def _idle(graph: Graph) -> None:
    """Adds an op for a rank that has no work, because an entry point needs at least one op."""
    begin, end = (graph.tensor((1,), fp32, arena="state") for _ in range(2))
    graph.add("copy", [begin], [end], {}, "idle")


def _cells(box: Box, others: Sequence[Box]) -> Iterable[Box]:
    """The parts into which a box is divided if it is cut wherever another box begins or ends."""
    sides = []
    for d, (begin, end) in enumerate(box):
        cuts = {begin, end}
        cuts |= {at for other in others for at in other[d] if begin < at < end}
        sides.append(list(itertools.pairwise(sorted(cuts))))
    return itertools.product(*sides)


def whole_of(graph: Graph, views: Sequence[tuple[View, np.ndarray]]) -> np.ndarray:
    """Assembles a buffer of the one-device graph from the ranks' parts, and adds up partial sums.

    If several ranks hold the same part, it is used once.
    """
    buffer = views[0][0].buffer
    tensor = next(t for t in graph.tensors if t.buffer.id == buffer)
    whole = np.zeros(tensor.extents, views[0][1].dtype)
    different = dict(views)
    for view, array in sorted(different.items(), key=lambda item: item[0].share == (0, 1)):
        box = tuple(slice(*side) for side in view.box)
        whole[box] = array if view.share == (0, 1) else whole[box] + array
    return whole
