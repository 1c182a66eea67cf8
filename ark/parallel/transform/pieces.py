"""The primitives of parallel plans: op_trans splits an op, op_assign sets the ranks of a piece,
op_order sets the order of pieces.

The communication between ranks follows from these (ark.parallel.transform.materialise). The
primitives are those of nnScaler (Lin et al., OSDI 2024). A piece is an op, or a part of one, with
views of the logical tensors that it reads and writes. Plans that are not legal are refused here.
"""

from __future__ import annotations

import dataclasses
import heapq
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from ark.errors import InvalidUsageError, ModelError, UnsupportedError
from ark.ir.graph import Graph, Node
from ark.ir.values import Buffer, Tensor
from ark.parallel.transform.annotations import Annotation, annotate
from ark.parallel.transform.carried import VALUE, carried
from ark.parallel.transform.normal import normal
from ark.parallel.transform.views import View, meeting


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a node, with the views that it reads and writes. Pieces are compared by identity.

    others: outputs after the first, which are split in the same way as the first.
    """

    node: Node
    inputs: tuple[View, ...]
    output: View
    annotation: Annotation | None
    others: tuple[View, ...] = ()

    @property
    def written(self) -> tuple[View, ...]:
        """The views of all outputs."""
        return (self.output, *self.others)


def view_of(tensor: Tensor) -> View:
    """The part of a tensor's buffer that the tensor occupies, as a view."""
    ends = zip(tensor.offsets, tensor.shape, strict=True)
    return View(tensor.buffer.id, tuple((begin, begin + size) for begin, size in ends))


class ParallelGraph:
    """A one-device graph, in normal form (`graph`), that is being distributed over ranks.

    `op_trans` splits nodes into pieces, `op_assign` assigns each piece to one or several ranks, and
    `op_order` orders pieces. `ranks` is the number of ranks.

    Examples:
        >>> with ark.use_model(ark.Model(0, 1)) as model:
        ...     y = ark.linear(ark.tensor([8, 16]), ark.tensor([32, 16]))
        >>> plan = ark.parallel.ParallelGraph(model.graph, ranks=2)
        >>> (product,) = plan.nodes
        >>> for rank, piece in enumerate(plan.op_trans(plan.pieces(product)[0], "y", 2)):
        ...     plan.op_assign(piece, rank)
    """

    def __init__(self, graph: Graph, ranks: int) -> None:
        if ranks < 1:
            raise InvalidUsageError(f"ranks={ranks} must be at least 1")
        if graph.world_size != 1:
            raise InvalidUsageError(
                f"the graph is for {graph.world_size} ranks; write the model for one device"
            )
        form = normal(graph)
        self.graph, self.twins, self.versions = form.graph, form.twins, form.versions
        self.ranks, self.carried = ranks, carried(self.nodes)
        self._pieces: dict[int, list[Piece]] = {}
        self._at: dict[Piece, list[int]] = {}
        self._orders: dict[Piece, list[Piece]] = {}
        written: dict[int, list[tuple[Node, View]]] = {}
        extents: dict[int, tuple[int, ...]] = {}
        for node in self.nodes:
            if not node.outputs:
                raise UnsupportedError(
                    f"{node.name} has no output; in a graph that is split every op has one"
                )
            for tensor in (*node.inputs, *node.outputs):
                if extents.setdefault(tensor.buffer.id, tensor.extents) != tensor.extents:
                    raise UnsupportedError(
                        f"{node.name} reads {tensor.name or 'a tensor'} in the shape "
                        f"{list(tensor.extents)}, but another op reads it in "
                        f"{list(extents[tensor.buffer.id])}; a tensor that is split has one "
                        "shape, so copy it"
                    )
            written_views = tuple(view_of(t) for t in node.outputs)
            for view in written_views:
                for other, earlier in written.get(view.buffer, []):
                    if earlier.meets(view):
                        raise UnsupportedError(
                            f"{node.name} writes to the memory of {other.name}; in a graph that "
                            "is split every op writes to its own memory"
                        )
                written.setdefault(view.buffer, []).append((node, view))
            views = tuple(view_of(t) for t in node.inputs)
            try:
                annotation = annotate(node)
            except UnsupportedError:
                annotation = None
            self._pieces[node.id] = [
                Piece(node, views, written_views[0], annotation, written_views[1:])
            ]

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the graph that result in tasks, in program order."""
        return [node for node in self.graph.nodes if not node.virtual]

    def pieces(self, node: Node) -> list[Piece]:
        """The pieces of a node. At first there is one piece, the whole node."""
        return list(self._pieces[node.id])

    def op_trans(self, piece: Piece, letter: str, parts: int) -> list[Piece]:
        """Splits a piece along a letter of its annotation. The parts replace the piece.

        Raises InvalidUsageError with the reason if the piece cannot be split: there is no such
        letter, the letter must not be cut, or its size is not divisible by `parts`. Raises
        UnsupportedError for ops that cannot be split. Along "+" an op whose operands are partial
        sums is split into partial sums of its result (carried.py).
        """
        self._known(piece)
        through = self.carried.get(piece.node.id, {}).get(letter, frozenset())
        annotation = piece.annotation or annotate(piece.node)
        views = (*piece.inputs, piece.output)
        sizes = annotation.sizes([view.shape for view in views])
        where = f"{piece.node.name} ({annotation})"
        if letter == VALUE and through and parts >= 1:
            sizes[letter] = parts
        if letter not in sizes or letter == "1":
            raise InvalidUsageError(f"{where} has no dimension {letter!r} to split along")
        if letter in annotation.frozen:
            raise InvalidUsageError(f"{where} needs all elements along {letter} at once")
        if parts < 1 or sizes[letter] % parts:
            raise InvalidUsageError(
                f"{where} has {sizes[letter]} elements along {letter}, which is not divisible "
                f"by {parts}; use a divisor"
            )
        split = []
        for index in range(parts):
            cut = [
                view.cut(letters.index(letter), index, parts) if letter in letters else view
                for letters, view in zip(annotation.operands, views, strict=True)
            ]
            for at in through:
                cut[at] = cut[at].partial(index, parts)
            if letter in annotation.summed or letter == VALUE:
                cut[-1] = cut[-1].partial(index, parts)
            letters = annotation.operands[-1]
            others = [
                view.cut(letters.index(letter), index, parts) if letter in letters else view
                for view in piece.others
            ]
            split.append(
                dataclasses.replace(
                    piece, inputs=tuple(cut[:-1]), output=cut[-1], others=tuple(others)
                )
            )
        kept = self._pieces[piece.node.id]
        at = kept.index(piece)
        self._pieces[piece.node.id] = [*kept[:at], *split, *kept[at + 1 :]]
        self._at.pop(piece, None)
        return split

    def op_assign(self, piece: Piece, *ranks: int) -> None:
        """Sets the ranks that compute a piece. Each of them computes the whole piece."""
        self._known(piece)
        if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(self.ranks)):
            raise InvalidUsageError(
                f"{piece.node.name} cannot be assigned to ranks {list(ranks)}; name some of 0 "
                f"to {self.ranks - 1}, each once"
            )
        self._at[piece] = list(ranks)

    def op_order(self, first: Piece, then: Piece) -> None:
        """Makes `first` run before `then` on the ranks that compute both.

        Raises InvalidUsageError if they belong to different entry points, between which there is no
        order.
        """
        self._known(first)
        self._known(then)
        if first.node.phase != then.node.phase:
            raise InvalidUsageError(
                f"{first.node.name} and {then.node.name} belong to different entry points, "
                "which run one after the other; order pieces of one entry point"
            )
        self._orders.setdefault(then, []).append(first)

    def op_copy(self, node: Node) -> Node:
        """Creates a copy of a node's result, which all readers of the result read instead.

        The copy is one piece without ranks. Raises UnsupportedError for results that last beyond an
        iteration.
        """
        out = node.outputs[0]
        if out.buffer.arena != "activation":
            raise UnsupportedError(
                f"cannot copy the result of {node.name}: it lasts beyond an iteration, "
                "and only one op may write such memory; copy one of that op's operands instead"
            )
        copied = self.graph.tensor(out.extents, out.dtype, name=out.name)
        zeros = (0,) * len(out.extents)
        whole = dataclasses.replace(
            out, shape=out.extents, offsets=zeros, padded=out.extents, id=len(self.graph.tensors)
        )
        self.graph.tensors.append(whole)
        number = 1 + max(n.id for n in self.graph.nodes)
        copy = Node(number, "copy", f"{node.name}.copy", (whole,), (copied,), phase=node.phase)
        pieces: dict[int, list[Piece]] = {}
        nodes: list[Node] = []
        for other in self.graph.nodes:
            moved = self._reading(other, out.buffer, copied.buffer)
            nodes.append(moved)
            if other.id in self._pieces:
                pieces[other.id] = self._pieces[other.id]
            if other.id == node.id:
                nodes.append(copy)
                views = (view_of(whole),)
                pieces[number] = [Piece(copy, views, view_of(copied), annotate(copy))]
        self.graph.nodes, self._pieces = nodes, pieces
        return copy

    def _reading(self, node: Node, old: Buffer, new: Buffer) -> Node:
        """The node, changed so that it reads the buffer `new` instead of `old`. The views of its
        pieces are changed in the same way.
        """
        if all(t.buffer.id != old.id for t in node.inputs):
            return node
        inputs = tuple(
            dataclasses.replace(t, buffer=new) if t.buffer.id == old.id else t for t in node.inputs
        )
        moved = dataclasses.replace(node, inputs=inputs)
        changed = {}
        for piece in self._pieces[node.id]:
            views = tuple(
                dataclasses.replace(v, buffer=new.id) if v.buffer == old.id else v
                for v in piece.inputs
            )
            changed[piece] = dataclasses.replace(piece, node=moved, inputs=views)
        self._pieces[node.id] = list(changed.values())
        self._at = {changed.get(p, p): ranks for p, ranks in self._at.items()}
        self._orders = {
            changed.get(then, then): [changed.get(p, p) for p in firsts]
            for then, firsts in self._orders.items()
        }
        return moved

    def ranks_of(self, piece: Piece) -> list[int]:
        """The ranks that compute a piece. Raises ModelError if none are set."""
        if piece not in self._at:
            raise ModelError(
                f"{piece.node.name} has a piece {list(piece.output.box)} without ranks; "
                "assign it by op_assign"
            )
        return self._at[piece]

    def producers(self, view: View) -> list[Piece]:
        """The pieces that write any part of the view."""
        return [
            p
            for pieces in self._pieces.values()
            for p in pieces
            if any(written.meets(view) for written in p.written)
        ]

    def earlier(self, piece: Piece) -> list[Piece]:
        """The pieces that must run before this one according to calls of op_order."""
        return list(self._orders.get(piece, ()))

    def in_order(self) -> list[Piece]:
        """All pieces in an order in which each piece follows the pieces whose results it reads and
        the pieces ordered before it. Where these leave a choice, the order is program order.

        Raises ModelError with the cycle if pieces wait for each other.
        """
        pieces = [piece for pieces_of in self._pieces.values() for piece in pieces_of]
        number = {piece: i for i, piece in enumerate(pieces)}
        writes: dict[int, list[tuple[View, int]]] = {}
        readers: dict[tuple[int, int], list[tuple[View, int]]] = {}
        for i, piece in enumerate(pieces):
            for view in piece.written:
                writes.setdefault(view.buffer, []).append((view, i))
            for view in piece.inputs:
                if view.buffer in self.twins:
                    readers.setdefault((view.buffer, piece.node.phase), []).append((view, i))
        before: dict[int, set[int]] = {}
        for i, piece in enumerate(pieces):
            pieces_of = {n for v in piece.inputs for w, n in writes.get(v.buffer, ()) if w.meets(v)}
            pieces_of |= {number[p] for p in self.earlier(piece)}
            for view in piece.written:  # it follows the readers of the old value
                for read, n in readers.get(self.versions.get(view.buffer, (-1, 0)), ()):
                    if meeting(read.box, view.box):
                        pieces_of.add(n)
            before[i] = pieces_of - {i}
        sorter = TopologicalSorter(before)
        try:
            sorter.prepare()
        except CycleError as error:
            names = " before ".join(pieces[i].node.name for i in error.args[1])
            raise ModelError(
                f"the plan has a cycle: {names}; dependencies order some of these ops the other "
                "way round, so remove an op_order"
            ) from None
        order: list[Piece] = []
        ready = list(sorter.get_ready())
        heapq.heapify(ready)
        while ready:
            chosen = heapq.heappop(ready)
            order.append(pieces[chosen])
            sorter.done(chosen)
            for other in sorter.get_ready():
                heapq.heappush(ready, other)
        return order

    def _known(self, piece: Piece) -> None:
        if all(piece is not p for p in self._pieces.get(piece.node.id, ())):
            raise InvalidUsageError(
                f"the piece of {piece.node.name} is not in this plan: it was split, or belongs "
                "to another plan"
            )
