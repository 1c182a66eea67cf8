"""Moves the part of an elementwise op or of a matmul's epilogue that depends on small tensors only
into a separate op, so that it is not computed again for each element.

For example, a batch norm after a convolution scales each element by weight / sqrt(variance + eps),
which is one factor per channel. The factor becomes an op of its own at the beginning of the phase,
if no op of the iteration writes its operands. There it delays no other op, because processors are
still waiting for the iteration's first results. Listed in ark.lower.passes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from ark.ir.dtype import fp32
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.context import Context
from ark.tasks import expression

MIN_REPEATS = 64  # a part is moved if each of its values is used at least this often
PLAIN = ("cast", "copy", "input", "number", "index")  # expressions that compute nothing
BEFORE = {"finish": 1, "expr": 0}  # input i of the expression is the node's input i + this number


def hoist_factors(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which values that are equal for many elements are computed by separate
    ops at the beginning of each phase.
    """
    written = graph.view.working.written
    numbers = itertools.count(1 + max((n.id for n in graph.nodes), default=0))
    least = context.machine.costs.hoisted_elements
    nodes: list[Node] = []
    for _, phase in itertools.groupby(graph.nodes, lambda n: n.phase):
        each = [_Factors(graph, node, written, numbers, least) for node in phase]
        nodes += [new_node for one in each for new_node in one.hoisted]
        nodes += [one.node for one in each]
    return graph.with_nodes(nodes)


class _Factors:
    """Separates the computations on small tensors from one node. node: the rewritten node, which
    reads the results of these computations. made: new nodes that do these computations. least: the
    smallest number of elements of a result for which the node is changed; for smaller results, an
    additional op would cost as much as it saves.
    """

    def __init__(
        self,
        graph: Graph,
        node: Node,
        written: frozenset[int],
        numbers: Iterator[int],
        least: int,
    ) -> None:
        self.node = node
        self.hoisted: list[Node] = []
        self._graph, self._written, self._numbers = graph, written, numbers
        self._inputs = list(node.inputs)
        self._known: dict[str, expression.Tree] = {}
        name = next((n for n in BEFORE if n in node.attrs), None)
        large = bool(node.outputs) and node.outputs[0].elements >= least
        if name is None or not large or node.hints is not None or len(node.outputs) > 1:
            return
        self._before = BEFORE[name]
        tree = self._replaced(node.attrs[name])
        if self.hoisted:
            read = sorted(expression.reads(tree))
            first = [0] if self._before else []  # the product
            kept = [i for i in read if i not in first]
            leaves = {old: new for new, old in enumerate([*first, *kept])}
            attrs = {**node.attrs, name: _renumbered(tree, leaves)}
            inputs = (
                *node.inputs[: 2 * self._before],
                *(self._inputs[i + self._before] for i in kept),
            )
            self.node = dataclasses.replace(node, inputs=inputs, attrs=attrs)

    def _replaced(self, tree: expression.Tree) -> expression.Tree:
        """The expression with each computation on small tensors replaced by a new input."""
        if tree[0] in ("input", "number", "index"):
            return tree
        if tree[0] not in PLAIN and self._small(tree):
            key = repr(tree)
            if key not in self._known:
                self._known[key] = self._computed(tree)
            return self._known[key]
        head = 2 if tree[0] == "cast" else 1
        return [*tree[:head], *(self._replaced(part) for part in tree[head:])]

    def _operands(self, tree: expression.Tree) -> list[Tensor]:
        return [self._inputs[i + self._before] for i in sorted(expression.reads(tree))]

    def _small(self, tree: expression.Tree) -> bool:
        """True if the expression reads only small tensors, and no op of the iteration writes
        these.
        """
        reads = expression.reads(tree)
        if not reads or (self._before and 0 in reads) or expression.places(tree):
            return False
        operands = self._operands(tree)
        if any(t.buffer.id in self._written or t.dtype.packed for t in operands):
            return False
        shape = np.broadcast_shapes(*(t.shape for t in operands))
        fits = math.prod(shape) * MIN_REPEATS <= self.node.outputs[0].elements
        names = [t.dtype.name for t in self._inputs[self._before :]]
        return fits and expression.check(tree, names, len(self.node.outputs[0].shape)) == "float"

    def _computed(self, tree: expression.Tree) -> expression.Tree:
        """Creates the node that computes the expression, and returns a leaf that reads its
        result.
        """
        operands, node = self._operands(tree), self.node
        shape = np.broadcast_shapes(*(t.shape for t in operands))
        out = self._graph.tensor(shape, fp32, name=f"{node.name}.factor")
        leaves = {old: new for new, old in enumerate(sorted(expression.reads(tree)))}
        number, attrs = next(self._numbers), {"expr": _renumbered(tree, leaves)}
        self.hoisted.append(node.beside(number, "elementwise", operands, out, attrs, waits=False))
        self._inputs.append(out)
        return expression.leaf(len(self._inputs) - 1 - self._before)


def _renumbered(tree: expression.Tree, leaves: dict[int, int]) -> expression.Tree:
    """The expression with its inputs renumbered. leaves: the new number of an input, by its old
    number.
    """
    names = [expression.leaf(leaves.get(i, 0)) for i in range(1 + max(leaves))]
    return expression.substitute(tree, names)
