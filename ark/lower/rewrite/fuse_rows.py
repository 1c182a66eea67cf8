"""Fuses sums over rows and the elementwise nodes around them into one `row_fusion` node, which
reads each row once. The gradient of a layer norm is such a set of nodes. Listed in
ark.lower.passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ark.ir.attributes import NormAttributes, ReduceAttributes, RowFusionAttributes
from ark.ir.dtype import FLOATS
from ark.ir.graph import Graph, Node
from ark.ir.graph_view import WritesSoFar, touched
from ark.ir.values import Tensor, overlap
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_regions import is_float_of_inputs
from ark.plan.types import MAX_OPERANDS
from ark.tasks import expression
from ark.tasks.node_expressions import expression_of, is_elementwise
from ark.tasks.row_fusion import MAX_ROW_ELEMENTS, MAX_STAGES

MIN_ROW_ELEMENTS = 64  # with fewer elements, a warp's lanes would be idle
MIN_SUMS = 2  # ark.lower.rewrite.fuse_reduction_terms fuses a single sum with its term
STAGES_PER_NODE = 7  # at most
MAX_MOVED_NODES = 8  # nodes that are moved behind a fused node because they read its results
MAX_WIDE_INPUTS = 6  # rows of more tensors would not fit into registers
Key = tuple[int, int, int]  # a box of memory: buffer, first element, number of elements


def fuse_rows(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which sums over rows are fused with elementwise nodes: those between
    two sums, those that read a sum, and those that compute the elements of a sum.
    """
    touches, kept = graph.view.touches, context.kept
    nodes: list[list[Node]] = []
    makers: dict[int, tuple[int, Node]] = {}  # by buffer: index and node of an elementwise result
    written = WritesSoFar()
    rows, places, later = _Rows(), list[int](), list[int]()

    def end() -> None:
        nonlocal rows, places, later
        node, absorbed = None, list[int]()
        if rows.sums >= MIN_SUMS and len(rows.nodes) > 1:
            for tensor in rows.inputs():
                maker = makers.get(tensor.buffer.id)
                if maker is None or tensor.buffer.arena != "activation" or tensor.buffer.id in kept:
                    continue
                alone = touches[tensor.buffer.id] == 1 + rows.uses(tensor)
                if alone and not written.behind(maker[0], maker[1].inputs):
                    absorbed += [maker[0]] if rows.absorb(maker[1], tensor) else []
            node = rows.node(kept, touches)
        if node is not None:
            moved = [place for place in later if place < places[-1]]
            behind = [n for place in moved for n in nodes[place]]
            for place in (*places, *absorbed, *moved):
                nodes[place] = []
            nodes[places[-1]] = [node, *behind]
        rows, places, later = _Rows(), [], []

    for node in graph.nodes:
        # A node that depends on the rows, or on a node that does, can wait until they are computed.
        waits = not node.virtual and any(_meet(node, n) for p in later for n in nodes[p])
        alone = node.type == "layernorm" and touches[node.outputs[0].buffer.id] == 2
        added = not node.virtual and not waits and not alone and rows.add(node)
        if not added and not node.virtual and (waits or rows.meets(node)):
            small = is_elementwise(node) or node.type in ("reduce_sum", "reduce_mean")
            if small and len(later) < MAX_MOVED_NODES and not _sums(node):
                later.append(len(nodes))
            else:
                end()
        if not added and not rows.nodes:
            added = not node.virtual and not alone and rows.add(node)
        if added:
            places.append(len(nodes))
        if is_elementwise(node) and not node.virtual:
            makers[node.outputs[0].buffer.id] = (len(nodes), node)
        written.add(len(nodes), node)
        nodes.append([node])
    end()
    return graph.with_nodes(n for listed in nodes for n in listed)


def _meet(a: Node, b: Node) -> bool:
    """True if one of two nodes writes memory that the other one reads or writes."""
    writes = [{t.buffer.id for t in n.outputs} for n in (a, b)]
    touches = [{t.buffer.id for t in touched(n)} for n in (a, b)]
    return bool(writes[0] & touches[1] or writes[1] & touches[0])


class _Rows:
    """Nodes over the rows of matrices with equal numbers of rows and columns. sums: the number of
    sums over rows.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.makers: list[Node] = []  # elementwise nodes whose results only these nodes read
        self.sums = 0
        self.frame = (0, 0)  # rows, columns

    def _places(self) -> Iterator[Node]:
        yield from self.makers
        yield from self.nodes

    def inputs(self) -> list[Tensor]:
        """The tensors that the nodes read and none of them computes."""
        known: set[Key] = set()
        inputs: dict[Key, Tensor] = {}
        for node in self._places():
            for tensor in node.inputs:
                if _key(tensor) not in known:
                    inputs.setdefault(_key(tensor), tensor)
            known |= {_key(t) for t in node.outputs}
        return list(inputs.values())

    def uses(self, tensor: Tensor) -> int:
        """The number of nodes' inputs that lie in the tensor's buffer."""
        return sum(t.buffer.id == tensor.buffer.id for n in self._places() for t in n.inputs)

    def meets(self, node: Node) -> bool:
        """True if the node must run after these nodes."""
        return any(_meet(node, n) for n in self.nodes)

    def _fits(self, node: Node, frame: tuple[int, int]) -> bool:
        """True if the node computes rows of this frame from such rows."""
        first = self.nodes[0] if self.nodes else node
        if node.hints is not None or (node.placement, node.context) != (
            first.placement,
            first.context,
        ):
            return False
        shapes = [_shape(t, frame) for t in (*node.inputs, *node.outputs)]
        return all(shapes) and shapes[-1] in ("full", "rows")

    def add(self, node: Node) -> bool:
        """Adds a sum over rows, a norm, or an elementwise node that reads a result of these nodes,
        if it fits. Returns True if the node was added.
        """
        summing = _sums(node)
        if not summing and not (self.nodes and _pointwise(node)):
            return False
        source, out = node.inputs[0], node.outputs[0]
        frame = self.frame
        if not self.nodes:
            frame = source.elements // source.shape[-1], source.shape[-1]
        results = {_key(t): t for n in self.nodes for t in n.outputs}
        reads = [t for t in node.inputs if _key(t) in results]
        fresh = [t for t in node.inputs if _key(t) not in results]
        if (
            not self._fits(node, frame)
            or not (summing or reads)
            or any(overlap(t, r) for t in (*fresh, out) for r in results.values())
            or not all(_over(out, t, frame) for t in (*self.inputs(), *fresh))
            or len({_key(t) for t in (*self.inputs(), *fresh)}) + len(results) >= MAX_OPERANDS
            or STAGES_PER_NODE * (len(self.nodes) + 1) > MAX_STAGES
        ):
            return False
        self.frame = frame
        self.nodes.append(node)
        self.sums += summing
        return True

    def absorb(self, maker: Node, tensor: Tensor) -> bool:
        """Computes an input in the fused node. maker: the node that computes it. Returns False if
        that is not possible.
        """
        results = [t for n in self._places() for t in n.outputs]
        whole = _key(maker.outputs[0]) == _key(tensor)
        if (
            not (whole and _pointwise(maker) and self._fits(maker, self.frame))
            or any(overlap(t, r) for t in maker.inputs for r in results)
            or STAGES_PER_NODE * (len(self.nodes) + len(self.makers) + 1) > MAX_STAGES
        ):
            return False
        self.makers.insert(0, maker)
        return True

    def node(self, kept: frozenset[int], touches: Mapping[int, int]) -> Node | None:
        """The fused node; None if it would need too many registers."""
        inputs = self.inputs()
        wide = sum(_shape(t, self.frame) == "full" for t in inputs)
        inside: dict[int, int] = {}
        for node in self._places():
            for tensor in touched(node):
                inside[tensor.buffer.id] = inside.get(tensor.buffer.id, 0) + 1
        stored = [
            n.outputs[0]
            for n in self.nodes
            if (b := n.outputs[0].buffer).arena != "activation"
            or b.id in kept
            or touches[b.id] > inside[b.id]
        ]
        if not stored:
            stored = [self.nodes[-1].outputs[0]]
        if wide > MAX_WIDE_INPUTS or len(inputs) + len(stored) > MAX_OPERANDS:
            return None
        numbers = {_key(t): i for i, t in enumerate(inputs)}
        stages: list[tuple[str, list[object]]] = []

        def stage(word: str, tree: expression.Tree) -> int:
            stages.append((word, list(tree)))
            return len(inputs) + len(stages) - 1

        def mean(tree: expression.Tree) -> expression.Tree:
            count = expression.number(float(self.frame[1]))
            total = expression.leaf(stage("sum", tree))
            return expression.leaf(stage("row", ["div", total, count]))

        for node in self._places():
            leaves = [expression.leaf(numbers[_key(t)]) for t in node.inputs]
            out = node.outputs[0]
            if node.type == "layernorm":
                eps = expression.number(node.read(NormAttributes).eps)
                centred = expression.leaf(stage("each", ["sub", leaves[0], mean(leaves[0])]))
                variance = mean(["mul", centred, centred])
                scale = expression.leaf(stage("row", ["rsqrt", ["add", variance, eps]]))
                number = stage("each", ["mul", centred, scale])
            elif node.type == "reduce_mean":
                number = mean(leaves[0])[1]
            elif node.type == "reduce_sum":
                number = stage("sum", leaves[0])
            else:
                word = "each" if _shape(out, self.frame) == "full" else "row"
                number = stage(word, expression.substitute(expression_of(node), leaves))
            numbers[_key(out)] = number
        given = RowFusionAttributes(
            columns=self.frame[1], stages=stages, stores=[numbers[_key(t)] for t in stored]
        )
        last = self.nodes[-1]
        return last.fused("row_fusion", inputs, stored, given.to_node(), self._places())


def _key(tensor: Tensor) -> Key:
    """The memory of a dense tensor, whatever its shape."""
    start = sum(o * s for o, s in zip(tensor.offsets, tensor.strides, strict=True))
    return tensor.buffer.id, start, tensor.elements


def _shape(tensor: Tensor, frame: tuple[int, int]) -> str:
    """Which values a tensor has for rows: `full` (one for each element), `rows` (a value for each
    row), `columns` (a value for each column), `one` (one value); "" if it has another form.
    """
    rows, columns = frame
    if not tensor.dense or tensor.dtype not in FLOATS or not tensor.shape:
        return ""
    if tensor.elements == 1:
        return "one"
    if tensor.shape[-1] == columns:
        return {rows * columns: "full", columns: "columns"}.get(tensor.elements, "")
    return "rows" if tensor.shape[-1] == 1 and tensor.elements == rows else ""


def _over(out: Tensor, read: Tensor, frame: tuple[int, int]) -> bool:
    """False if storing the result `out` would change rows of the tensor `read` before they are
    read. A result may overlap the tensor if each of its rows replaces the same row of the tensor.
    """
    return not overlap(out, read) or (_key(out) == _key(read) and _shape(read, frame) == "full")


def _sums(node: Node) -> int:
    """The number of sums over rows in the node: 1 for a sum or mean over rows whose result has one
    column, 2 for a layer norm without weights, otherwise 0.
    """
    if node.type not in ("reduce_sum", "reduce_mean", "layernorm") or node.virtual:
        return 0
    source = node.inputs[0]
    rows = math.prod(source.shape[:-1])
    fits = rows > 1 and MIN_ROW_ELEMENTS <= source.shape[-1] <= MAX_ROW_ELEMENTS
    if not fits or len(node.inputs) > 1:
        return 0
    if node.type == "layernorm":
        return 2
    given = node.read(ReduceAttributes)
    return int(given.keepdims and given.axis == len(source.shape) - 1 and given.term is None)


def _pointwise(node: Node) -> bool:
    return (
        is_elementwise(node)
        and bool(node.inputs)
        and is_float_of_inputs(expression_of(node), len(node.inputs))
    )
