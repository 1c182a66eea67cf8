"""Fuses a region into one op. A region is a run of consecutive elementwise ops and sums over one
dimension. If several ops of the region read a result, the fused op keeps the result in registers as
fp32, whereas a chain (ark.lower.rewrite.fuse_chains) would store it. All tensors of a region have
the same shape, except that some have size 1 in the summed dimension. Listed in ark.lower.passes
before the pass that fuses chains.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ark.errors import PlanError
from ark.ir.attributes import FusionAttributes, ReduceAttributes
from ark.ir.dtype import FLOATS, fp32
from ark.ir.fold import MAX_FOLDED_DIMS
from ark.ir.graph import Graph, Node
from ark.ir.graph_view import touched
from ark.ir.values import Tensor, overlap
from ark.lower.rewrite.context import Context
from ark.plan.types import MAX_OPERANDS
from ark.tasks import expression
from ark.tasks.fusion import MAX_LISTED_VALUES, STAGES
from ark.tasks.node_expressions import expression_of, is_elementwise

MIN_SHARED_RESULTS = 8  # fewest results that several ops of the region read, for fusing to pay off
MIN_ROW_ELEMENTS = 64  # contiguous; with fewer, bodies cannot use vectors and warps are idle
MAX_SMALL_ELEMENTS = 2048  # elements of a region that one task can compute
MAX_THREAD_SUM_ELEMENTS = 1024  # elements that one thread adds


def fuse_regions(graph: Graph, context: Context) -> Graph:
    """A copy of the graph with each region of elementwise ops and sums fused into one op.

    On machines whose processors have many threads, the synchronisation after a small op takes as
    long as the op, so fusing even two small ops pays off.
    """
    kept, costs = context.kept, context.machine.costs
    little = costs.little_elements if costs.hand_over_work > 0 else 0
    touches = graph.view.touches
    nodes: list[Node] = []
    run: list[Node] = []

    def end() -> None:
        nodes.extend(_joined(run, touches, kept, little))
        run.clear()

    region = _Region(little)
    for node in graph.nodes:
        if node.virtual:
            nodes.append(node)
            continue
        if not region.add(node):
            end()
            region = _Region(little)
            if not region.add(node):
                region = _Region(little)
                nodes.append(node)
                continue
        run.append(node)
    end()
    return graph.with_nodes(nodes)


def _joined(
    run: Sequence[Node], touches: Counter[int], kept: frozenset[int], little: int
) -> list[Node]:
    """The nodes that replace a run of nodes: one fused node; or the fused nodes of its two halves,
    if the whole run has too many operands; or the run itself, if fusing does not pay off.
    """
    region = _Region(little)
    for node in run:
        region.add(node)
    few = little > 0 and region.small() and len(region.stored(touches, kept)) > 1
    if region.shared() < MIN_SHARED_RESULTS and not few:
        return list(run)
    joined = region.node(touches, kept)
    if joined is not None:
        return [joined]
    half = len(run) // 2
    parts = (run[:half], run[half:])
    return [node for part in parts for node in _joined(part, touches, kept, little)]


class _Region:
    """A set of nodes that one device function can compute. little: the largest number of elements
    of an op that takes less time than the synchronisation after it; 0 if there are no such ops.
    Values are numbered in the order in which nodes are added: inputs -1, -2 and so on, results 0, 1
    and so on.
    """

    def __init__(self, little: int) -> None:
        self.most_little = little
        self.nodes: list[Node] = []
        self.inputs: list[Tensor] = []
        self.trees: list[expression.Tree] = []  # by result
        self.results: list[Tensor] = []
        self.summed: list[bool] = []  # by result: True for a sum
        self.after_sums: list[bool] = []  # by result: True if it depends on a sum
        self.axis = -1  # the summed dimension, of `rank` dimensions
        self.full: tuple[int, ...] = ()  # the shape of summed tensors, or of all if none are
        self._numbers: dict[int, int] = {}  # by tensor
        self._uses: Counter[int] = Counter()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the results that can be stored: that of the summed tensors, with size 1 in
        the summed dimension.
        """
        return tuple(1 if d == self.axis else n for d, n in enumerate(self.full))

    def add(self, node: Node) -> bool:
        """Adds the node to the region if it fits. Returns True if it was added."""
        summing = node.type == "reduce_sum"
        if not (summing and node.read(ReduceAttributes).keepdims) and not is_elementwise(node):
            return False
        out = node.outputs[0]
        first = self.nodes[0] if self.nodes else node
        little = out.elements <= self.most_little
        if (
            node.hints is not None
            or (node.placement, node.context) != (first.placement, first.context)
            or out.dtype not in (fp32, *(FLOATS if little else ()))
            or any(t.dtype not in FLOATS or len(t.shape) > len(out.shape) for t in node.inputs)
            or not 1 <= len(out.shape) <= MAX_FOLDED_DIMS
            or (
                out.shape[-1] < MIN_ROW_ELEMENTS
                and not (little and out.elements <= MAX_SMALL_ELEMENTS)
            )
            or len(self.results) == MAX_LISTED_VALUES
        ):
            return False
        axis, full = self._frame(node.inputs[0].shape if summing else out.shape)
        if summing and axis < 0:
            axis = node.read(ReduceAttributes).axis
        if not full or (summing and not self._sums(node, axis, full)):
            return False
        # A result of a fused region may not overlap another result. It may share memory with an
        # input only if it is exactly that input, which is then updated in place.
        fresh = [t for t in node.inputs if t.id not in self._numbers]
        if any(overlap(t, r) for t in (*fresh, out) for r in self.results):
            return False
        if any(overlap(out, t) and not has_same_box(out, t) for t in (*self.inputs, *fresh)):
            return False
        numbers = [self._number(t) for t in node.inputs]
        late = summing or any(n >= 0 and self.after_sums[n] for n in numbers)
        if late and not summing and axis >= 0 and out.shape == full:
            return False
        tree = expression.leaf(0) if summing else expression_of(node)
        if not is_float_of_inputs(tree, len(numbers)):
            return False
        self.axis, self.full = axis, full
        self._numbers[out.id] = len(self.results)
        # A result that one op reads twice counts as used twice. Otherwise a chain would have to
        # store the result or to repeat its expression.
        self._uses.update(numbers if little else set(numbers))
        self.trees.append(expression.substitute(tree, [["input", n] for n in numbers]))
        self.results.append(out)
        self.summed.append(summing)
        self.after_sums.append(late)
        self.nodes.append(node)
        return True

    def _frame(self, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """The region's summed dimension and full shape after a tensor of this shape is added. The
        dimension is -1 while it is unknown. The shape is () if the tensor does not fit into the
        region.
        """
        if not self.full or shape in (self.full, self.shape):
            return self.axis, self.full or shape
        differ = [
            d for d, pair in enumerate(zip(shape, self.full, strict=False)) if len({*pair}) > 1
        ]
        if self.axis >= 0 or len(shape) != len(self.full) or len(differ) != 1:
            return -1, ()
        sizes = shape[differ[0]], self.full[differ[0]]
        fits = (
            min(sizes) == 1 and max(sizes) <= MAX_THREAD_SUM_ELEMENTS and differ[0] < len(shape) - 1
        )
        return (differ[0], max(shape, self.full)) if fits else (-1, ())

    def _sums(self, node: Node, axis: int, full: tuple[int, ...]) -> bool:
        source = node.inputs[0]
        number = self._numbers.get(source.id, -1)
        return (
            node.read(ReduceAttributes).axis == axis < len(full) - 1
            and source.shape == full
            and 1 < full[axis] <= MAX_THREAD_SUM_ELEMENTS
            and not (number >= 0 and self.after_sums[number])
        )

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor in the region. A tensor that is not one of the region's results
        becomes an input of the region.
        """
        if tensor.id in self._numbers:
            return self._numbers[tensor.id]
        if tensor not in self.inputs:
            self.inputs.append(tensor)
        return -1 - self.inputs.index(tensor)

    def small(self) -> bool:
        """True if one task can compute the whole region."""
        return bool(self.full) and math.prod(self.full) <= MAX_SMALL_ELEMENTS

    def stored(self, touches: Counter[int], kept: frozenset[int]) -> list[int]:
        """The numbers of the results that the fused op must store: the results that ops outside of
        the region read. If there are none, the results that no op of the region reads.
        """
        inside = Counter(t.buffer.id for n in self.nodes for t in touched(n))
        results = [
            number
            for number, t in enumerate(self.results)
            if t.buffer.arena != "activation"
            or t.buffer.id in kept
            or touches[t.buffer.id] > inside[t.buffer.id]
        ]
        # If any result is read outside of the region, the results that no op reads are not stored.
        return results or [n for n in range(len(self.results)) if not self._uses[n]]

    def shared(self) -> int:
        """The number of results that several nodes of the region read."""
        return sum(uses > 1 for number, uses in self._uses.items() if number >= 0)

    def _stage(self, number: int) -> str:
        if self.summed[number]:
            return "sums"
        if self.axis >= 0 and self.results[number].shape == self.full:
            return "each"
        return "last" if self.after_sums[number] or not any(self.summed) else "first"

    def node(self, touches: Counter[int], kept: frozenset[int]) -> Node | None:
        """The region as one `fusion` node; None if one device function cannot compute it."""
        stored = self.stored(touches, kept)
        stages = {s: [n for n in range(len(self.results)) if self._stage(n) == s] for s in STAGES}
        if not stored or not self.inputs or len(self.inputs) + len(stored) > MAX_OPERANDS:
            return None
        if any(n in stages["each"] for n in stored) or (stages["each"] and not stages["sums"]):
            return None
        order = [n for s in STAGES for n in stages[s]]
        places = {n: len(self.inputs) + place for place, n in enumerate(order)}
        places.update({-1 - i: i for i in range(len(self.inputs))})
        last, rank = self.nodes[-1], len(self.full)
        trees = {s: [_renumbered(self.trees[n], places) for n in stages[s]] for s in STAGES}
        given = FusionAttributes(
            **trees,
            axis=self.axis + MAX_FOLDED_DIMS - rank if stages["sums"] else -1,
            count=self.full[self.axis] if stages["sums"] else 1,
            stores=[places[n] for n in stored],
        )
        outputs = (self.results[n] for n in stored)
        return last.fused("fusion", self.inputs, outputs, given.to_node(), self.nodes)


def _renumbered(tree: expression.Tree, places: dict[int, int]) -> list[object]:
    if tree[0] == "input":
        return ["input", places[tree[1]]]
    return [_renumbered(part, places) if isinstance(part, list) else part for part in tree]


def is_float_of_inputs(tree: expression.Tree, inputs: int) -> bool:
    """True for an expression whose result is a floating-point number and depends only on its
    inputs, not on the indices of elements.
    """
    try:
        kind = expression.check(tree, ["fp32"] * inputs, MAX_FOLDED_DIMS)
    except PlanError:
        return False
    return kind == "float" and not expression.places(tree)


def has_same_box(a: Tensor, b: Tensor) -> bool:
    return (a.extents, a.offsets, a.shape, a.dtype) == (b.extents, b.offsets, b.shape, b.dtype)
