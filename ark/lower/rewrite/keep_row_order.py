"""Keeps rows in the order of windows from one layer to the next.

A block of a window transformer (Swin, Liu et al. 2021) permutes rows to windows, computes
attention, permutes them back and adds its input; norms and layers of each row follow:

    y = x + back(f(windows(norm(x))));  z = y + g(y)

All ops but attention compute each row independently. So the block may permute x itself, compute in
the order of windows, and permute back only its result:

    w = windows(x);  y = w + f(norm(w));  z = back(y + g(y))

The permutation `back` of a block and the permutation `windows` of the next block are then
consecutive copies, which ark.lower.rewrite.compose_remaps replaces by one.

The pass has two rewrites. `_add_in_windows` moves the permutations of one addition, and `_sunk`
moves a permutation behind all ops on rows that read its result. Listed in ark.lower.passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ark.ir.attributes import MatmulAttributes
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.registry import get
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.makers import Pattern, replaceable
from ark.lower.rewrite.views import same_elements, whole
from ark.tasks import expression
from ark.tasks.node_expressions import expression_of, is_elementwise

COPIES = ("transpose", "remap")
NORMS = ("layernorm", "rmsnorm")


def keep_row_order(graph: Graph, context: Context) -> Graph:
    """A copy of the graph whose residual additions are in the order of windows; the graph itself if
    it has no such additions.
    """
    ends: set[int] = set()  # ids of the copies that restore the order of rows
    while (added := _add_in_windows(graph, context.kept)) is not None:
        graph, end = added
        ends.add(end)
    while (sunk := _sunk(graph, context.kept, ends)) is not None:
        graph = sunk
    return graph


class _Rows(Pattern):
    """Finds in a graph the copies that permute rows of a given length, and the ops that treat each
    row independently.
    """

    def writer(self, tensor: Tensor) -> Node | None:
        """The only node that writes the tensor, if it fills the tensor's buffer; None otherwise.
        Unlike `maker`, it allows any number of readers.
        """
        node = self.makers.get(tensor.buffer.id)
        fills = node is not None and replaceable(node) and same_elements(tensor, node.outputs[0])
        return node if fills else None

    def readers(self, tensor: Tensor) -> list[Node]:
        """All nodes that read the tensor's buffer, or whose order after its writer is required, in
        program order.
        """
        places = sorted(self.view.places[n] for n in self.view.reading[tensor.buffer.id])
        return [self.view.nodes[p] for p in places]

    def order(self, copies: Sequence[Node], width: int) -> np.ndarray | None:
        """The permutation of rows by a chain of copies: for each row of the result, the number of
        the source's row. None if the copies do not permute rows of `width` elements.
        """
        first = copies[0].inputs[0]
        if first.elements % width or not whole(first):
            return None
        numbers = np.arange(first.elements, dtype=np.int64)
        for node in copies:
            reference = get(node.type).reference
            if reference is None or node.outputs[0].elements != first.elements:
                return None
            numbers = reference([numbers.reshape(node.inputs[0].shape)], node.attrs)[0]
        rows = numbers.reshape(-1, width).astype(np.int64)
        order = rows[:, 0] // width
        permutes = np.array_equal(np.sort(order), np.arange(len(order)))
        moves = np.array_equal(rows, order[:, None] * width + np.arange(width))
        return order if permutes and moves else None


def _on_rows(node: Node, changed: set[int], rows: int) -> bool:
    """True for a node that computes each of `rows` rows independently. Its inputs in the buffers
    `changed`, whose rows are in another order, are read row by row; all other inputs must be equal
    for all rows.
    """
    if not replaceable(node) or not whole(node.outputs[0]):
        return False
    sizes = {t.elements // t.shape[-1] for t in (*node.outputs, *node.inputs) if _in(t, changed)}
    if any(not whole(t) for t in node.inputs if _in(t, changed)) or not sizes <= {rows}:
        return False
    out, others = node.outputs[0], [t for t in node.inputs if not _in(t, changed)]
    if out.elements // out.shape[-1] != rows:
        return False
    if node.type == "matmul":
        given = node.read(MatmulAttributes)
        flat = all(len(t.shape) == 2 for t in (*node.inputs, out)) and len(node.inputs) == 2
        return flat and not given.transpose_a and given.finish is None and len(others) == 1
    if node.type in NORMS:
        return len(node.inputs) == 1
    if not is_elementwise(node) or expression.places(expression_of(node)):
        return False
    alike = all(t.shape == out.shape for t in node.inputs if _in(t, changed))
    return alike and all(all(n == 1 for n in t.shape[:-1]) for t in others)


def _in(tensor: Tensor, buffers: set[int]) -> bool:
    return tensor.buffer.id in buffers


def _add_in_windows(graph: Graph, kept: frozenset[int]) -> tuple[Graph, int] | None:
    """Moves one residual addition to the order of windows. The addition is x + back(y), where
    `back` undoes the permutation `windows` and the graph also computes windows(norm(x)). The sum
    becomes back(windows(x) + y), and windows(norm(x)) becomes norm(windows(x)).

    Returns the graph with its first such addition rewritten, and the id of the last copy of `back`.
    None if there is no such addition.
    """
    rows = _Rows(graph, kept)
    for node in graph.nodes:
        if node.type != "add" or len(node.inputs) != 2 or not replaceable(node):
            continue
        for source, added in (node.inputs, node.inputs[::-1]):
            back, out = _copies_to(rows, added), node.outputs[0]
            same = source.shape == added.shape == out.shape and source.dtype == added.dtype
            once = back and rows.writer(source) and rows.writer(back[0].inputs[0])
            if not once or not same or not whole(out):
                continue
            count = out.elements // out.shape[-1]
            for between, copies in _windows_of(rows, source, node, count):
                if not _same_placement(node, back, between, copies):
                    continue
                orders = [rows.order(chain, out.shape[-1]) for chain in (back, copies)]
                there, here = orders
                if there is None or here is None:
                    continue
                if (there[here] == np.arange(count)).all() and (here[:-1] > here[1:]).any():
                    moved = _moved(graph, node, source, back, between, copies)
                    return moved, back[-1].id
    return None


def _same_placement(node: Node, *chains: Sequence[Node]) -> bool:
    """True if all nodes of the chains run in the node's phase and on its processors."""
    return all(n.placement == node.placement for chain in chains for n in chain)


def _copies_to(rows: _Rows, tensor: Tensor) -> list[Node]:
    """The chain of copies that computes this tensor, in program order. The result of each copy is
    read only once.
    """
    chain: list[Node] = []
    maker = rows.writer(tensor)
    while maker is not None and maker.type in COPIES and rows.private(tensor):
        chain.insert(0, maker)
        (tensor,) = maker.inputs
        maker = rows.writer(tensor)
    return chain


def _windows_of(
    rows: _Rows, source: Tensor, last: Node, count: int
) -> Iterator[tuple[list[Node], list[Node]]]:
    """Finds chains that begin with `source`: ops on rows, then copies, the result of each of which
    is read only once. Yields the ops and the copies of each chain. last: the addition, before which
    all nodes of a chain must run.
    """
    for reader in rows.readers(source):
        between: list[Node] = []
        copies: list[Node] = []
        node, changed = reader, {source.buffer.id}
        while rows.view.places[node.id] < rows.view.places[last.id] and replaceable(node):
            if node.type in COPIES and whole(node.inputs[0]) and whole(node.outputs[0]):
                copies.append(node)
            elif not copies and _on_rows(node, changed, count):
                between.append(node)
            else:
                break
            changed = {node.outputs[0].buffer.id}
            if not rows.private(node.outputs[0]):
                break
            (node,) = rows.readers(node.outputs[0])
        if between and copies and between[-1].outputs[0].shape[-1] == source.shape[-1]:
            yield between, copies


def _moved(
    graph: Graph,
    node: Node,
    source: Tensor,
    back: Sequence[Node],
    between: Sequence[Node],
    copies: Sequence[Node],
) -> Graph:
    """Moves a permutation of rows across an addition: returns the graph in which `copies` permute
    the addition's source instead of the result of the ops `between`, and the copies `back` permute
    the sum.
    """
    end, inner, out = copies[-1].outputs[0], back[0].inputs[0], node.outputs[0]
    windows = graph.tensor(end.shape, source.dtype, name="windows")
    total = graph.tensor(inner.shape, out.dtype, name=out.name)
    last = between[-1].outputs[0]
    moves = {source.buffer.id: windows, last.buffer.id: end}
    ops = [_in_buffers(graph, op, moves) for op in between]
    sources = [windows if t.buffer.id == source.buffer.id else inner for t in node.inputs]
    views = tuple(_view(graph, t, inner.shape) for t in sources)
    placed: dict[int, list[Node]] = {n.id: [] for n in (*back, *between, *copies)}
    placed[copies[-1].id] = [*_chain(graph, copies, source, windows), *ops]
    placed[node.id] = [
        dataclasses.replace(node, inputs=views, outputs=(total,)),
        *_chain(graph, back, total, out),
    ]
    return graph.with_nodes(n for old in graph.nodes for n in placed.get(old.id, [old]))


def _view(graph: Graph, tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A view of all of the tensor's buffer in the given shape."""
    return graph.tensor(shape, tensor.dtype, buffer=tensor.buffer, name=tensor.name)


def _in_buffers(graph: Graph, node: Node, moves: Mapping[int, Tensor]) -> Node:
    """A copy of the node in which some tensors are in other buffers. moves: for the id of a buffer,
    the tensor in the new buffer.
    """

    def moved(tensor: Tensor) -> Tensor:
        target = moves.get(tensor.buffer.id)
        return tensor if target is None else _view(graph, target, tensor.shape)

    inputs, outputs = (tuple(map(moved, ts)) for ts in (node.inputs, node.outputs))
    return dataclasses.replace(node, inputs=inputs, outputs=outputs)


def _chain(graph: Graph, copies: Sequence[Node], source: Tensor, out: Tensor) -> list[Node]:
    """Copies of the chain of nodes `copies`; the first copy reads `source`, and the last one writes
    `out`.
    """
    chain = list(copies)
    first = _view(graph, source, chain[0].inputs[0].shape)
    chain[0] = dataclasses.replace(chain[0], inputs=(first,))
    last = _view(graph, out, chain[-1].outputs[0].shape)
    chain[-1] = dataclasses.replace(chain[-1], outputs=(last,))
    return chain


def _sunk(graph: Graph, kept: frozenset[int], ends: set[int]) -> Graph | None:
    """Moves a chain of copies, whose last node is in `ends`, behind all ops on rows that depend on
    its result. Returns the new graph. None if this is not possible for any chain: other ops, or
    several results of these ops, need the order of rows that the copies restore.
    """
    rows = _Rows(graph, kept)
    for node in graph.nodes:
        if node.id not in ends:
            continue
        out = node.outputs[0]
        chain = [*_copies_to(rows, node.inputs[0]), node]
        if not _same_placement(node, chain):
            continue
        source = chain[0].inputs[0]
        changed = {out.buffer.id}
        region: list[Node] = []  # the ops on rows
        needed: dict[int, Tensor] = {}  # by buffer: results whose order other ops need
        for reader in graph.nodes[rows.view.places[node.id] + 1 :]:
            read = [t for t in reader.inputs if _in(t, changed)]
            if not read:
                continue
            count = out.elements // out.shape[-1]
            on_rows = _on_rows(reader, changed, count) and _same_placement(node, [reader])
            if on_rows and rows.writer(reader.outputs[0]):
                region.append(reader)
                changed.add(reader.outputs[0].buffer.id)
            else:
                needed |= {t.buffer.id: t for t in read}
        needed |= dict.fromkeys(changed & kept, out)
        results = {n.outputs[0].buffer.id: n for n in region}
        last = results.get(next(iter(needed), -1))
        if len(needed) != 1 or last is None or rows.writer(source) is None:
            continue
        result = last.outputs[0]
        forms = {(t.elements, t.dtype, t.shape[-1]) for t in (result, out)}
        if len(forms) > 1:
            continue
        total = graph.tensor(result.shape, result.dtype, name=result.name)
        moves = {out.buffer.id: source, result.buffer.id: total}
        placed = {n.id: [_in_buffers(graph, n, moves)] for n in region}
        placed |= {n.id: [] for n in chain}
        placed[last.id] += _chain(graph, chain, total, result)
        return graph.with_nodes(n for old in graph.nodes for n in placed.get(old.id, [old]))
    return None
