"""The choices of a plan for each op, and their costs.

A choice states how an op is split. For each axis of the mesh of ranks, it has the dimension of the
op (a letter) along which the ranks of this axis split the op, or None if they all compute the same.
For example, ("m", None) on a mesh of 2 x 4 ranks splits the rows of a matmul in two. The cost is
the time of an op (ark.parallel.plans.times) plus the time of layout conversions, by ring volumes.
In training, an op's gradient costs twice the op, and gradients are converted in the reverse
direction.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ark.errors import UnsupportedError
from ark.ir.attributes import MatmulAttributes
from ark.ir.graph import Node
from ark.ir.values import Tensor
from ark.parallel.layout.moves import ring_volume
from ark.parallel.plans.times import Rates, Times
from ark.parallel.transform import Annotation, annotate
from ark.parallel.transform.carried import VALUE, Carried

NEVER_US = 1e9  # cost of a forbidden conversion: a whole value to partial sums
Choice = tuple[str | None, ...]
"""How an op is split: for each axis of the mesh, the letter of the dimension along which the ranks
of the axis split the op, or None if they all compute the same.
"""
State = tuple[str, ...]
"""The layout of a tensor along each axis of the mesh: "R" (replicated), "V" (each rank has partial
sums), or the number of the dimension that is cut.
"""


@dataclass(frozen=True)
class Option:
    """A choice for a node, with the layouts of its operands and output, and its cost.

    grads: the layouts of the operands' gradients. us: the time of the forward op. saved: bytes of
    the op's output on a rank.
    """

    choice: Choice
    inputs: tuple[State, ...]
    output: State
    us: float
    grads: tuple[State, ...] = ()
    saved: int = 0


@dataclass(frozen=True)
class Move:
    """A collective among the ranks of one axis. bytes: the bytes that each of these ranks sends."""

    op: str
    axis: int
    bytes: float
    us: float


class Costs:
    """Computes the options of nodes on a mesh, and the cost of conversions between states
    (layouts).

    links: bytes per microsecond along each axis, if axes differ. training: True to add the cost of
    gradients. nodes: all nodes of the graph, because the time of an op can depend on its
    neighbours.
    """

    def __init__(
        self,
        mesh: Sequence[int],
        rates: Rates,
        links: Sequence[float] | None = None,
        training: bool = False,
        nodes: Sequence[Node] = (),
    ) -> None:
        self.mesh, self.rates, self.training = tuple(mesh), rates, training
        self.times = Times(rates, nodes)
        self.links = tuple(links or (rates.link_bytes_per_us,) * len(self.mesh))

    def options(self, node: Node, through: Carried | None = None) -> list[Option]:
        """All options of a node. The option that splits nothing is always included.

        through: the operands that may be partial sums (ark.parallel.transform.carried).
        """
        try:
            annotation = annotate(node)
        except UnsupportedError:
            whole: State = ("R",) * len(self.mesh)
            inputs = (whole,) * len(node.inputs)
            out = sum(t.nbytes for t in node.outputs)
            us = self._us(node, arithmetic(node), sum(_touched(node)), inputs, whole)
            return [Option((None,) * len(self.mesh), inputs, whole, us, inputs, out)]
        sizes = annotation.sizes([t.shape for t in (*node.inputs, node.outputs[0])])
        through = through or {}
        free = sorted((set(sizes) | set(through)) - annotation.frozen - {"1"})
        options = []
        for choice in itertools.product((None, *free), repeat=len(self.mesh)):
            parts = self._parts(choice)
            if all(sizes.get(letter, 0) % count == 0 for letter, count in parts.items()):
                options.append(self._option(node, annotation, choice, parts, through))
        return options

    def _parts(self, choice: Choice) -> dict[str, int]:
        parts: dict[str, int] = {}
        for letter, count in zip(choice, self.mesh, strict=True):
            if letter is not None:
                parts[letter] = parts.get(letter, 1) * count
        return parts

    def _option(
        self,
        node: Node,
        annotation: Annotation,
        choice: Choice,
        parts: dict[str, int],
        through: Carried,
    ) -> Option:
        def states(otherwise: str) -> list[State]:
            return [
                tuple(
                    "R"
                    if letter is None
                    else otherwise
                    if letter not in letters
                    else str(letters.index(letter))
                    for letter in choice
                )
                for letters in annotation.operands
            ]

        inputs, grads = states("R"), states("V")
        for axis, letter in enumerate(choice):
            for at in through.get(letter or "", ()):
                inputs[at] = (*inputs[at][:axis], "V", *inputs[at][axis + 1 :])
                if letter == VALUE:
                    grads[at] = (*grads[at][:axis], "R", *grads[at][axis + 1 :])
        output = tuple(
            "V" if letter == VALUE or letter in annotation.summed else state
            for letter, state in zip(choice, inputs[-1], strict=True)
        )
        # If an axis splits an op into partial sums (VALUE), a rank has no less work, because a
        # partial sum has as many elements as the whole value.
        work = arithmetic(node) / math.prod(n for letter, n in parts.items() if letter != VALUE)
        tensors = (*node.inputs, *node.outputs)
        states_of = [*inputs[:-1], *[output] * len(node.outputs)]
        moved = sum(
            touched * self.local(tensor, state) / tensor.elements
            for tensor, state, touched in zip(tensors, states_of, _touched(node), strict=True)
        )
        out = node.outputs[0]
        saved = self.local(out, output) * out.dtype.itemsize
        us = self._us(node, work, moved, inputs[:-1], output)
        return Option(choice, tuple(inputs[:-1]), output, us, tuple(grads[:-1]), saved)

    def _us(
        self, node: Node, flops: float, moved: float, inputs: Sequence[State], output: State
    ) -> float:
        rows = columns = depth = 0.0
        if node.type == "matmul":
            out = node.outputs[0]
            columns = out.shape[-1] / self._cuts(output, len(out.shape) - 1)
            rows = self.local(out, output) / columns
            depth = self.local(node.inputs[0], inputs[0]) / rows
        return self.times.us(node, flops, moved, rows, columns, depth)

    def _cuts(self, state: State, dimension: int) -> int:
        """The number of parts into which a layout cuts a dimension of a tensor. state: the layout
        along each axis.
        """
        return math.prod(
            n for n, kind in zip(self.mesh, state, strict=True) if kind == str(dimension)
        )

    def local(self, tensor: Tensor, state: State) -> int:
        """The number of elements of a tensor that a rank holds in a layout."""
        cuts = [n for n, kind in zip(self.mesh, state, strict=True) if kind not in ("R", "V")]
        return tensor.elements // math.prod(cuts)

    def moves(self, tensor: Tensor, have: State, want: State) -> list[Move]:
        """The collectives that convert a tensor from the layout `have` to the layout `want`, axis
        by axis.
        """
        moves, held = [], float(self.local(tensor, have))
        for axis, (count, before, after) in enumerate(zip(self.mesh, have, want, strict=True)):
            if before == "R" and after == "V" and count > 1:
                moves.append(Move("value_split", axis, 0.0, NEVER_US))
                continue
            if before == after or before == "R" or count == 1:
                held /= count if before == "R" != after else 1
                continue
            cut = after not in ("R", "V")
            if before == "V":
                op = "reduce_scatter" if cut else "all_reduce"
            else:
                op = "all_to_all" if cut else "all_gather"
            sent = ring_volume(op, count, 1) * held / count * tensor.dtype.itemsize
            us = self.rates.step_us + sent / self.links[axis]
            if before == "V":
                us += self.times.added_us(held / count, tensor.dtype.itemsize, count)
            moves.append(Move(op, axis, sent, us))
            held *= count if op == "all_gather" else 1
            held /= count if op == "reduce_scatter" else 1
        return moves

    def change_us(self, tensor: Tensor, have: State, want: State) -> float:
        """The time in microseconds to convert a tensor from the layout `have` to the layout
        `want`.
        """
        return sum(move.us for move in self.moves(tensor, have, want))


def of_gradient(state: State) -> State:
    """The layout of a value's gradient. It is replicated if the value consists of partial sums,
    otherwise it is the layout of the value.
    """
    return tuple("R" if kind == "V" else kind for kind in state)


def arithmetic(node: Node) -> float:
    """The number of arithmetic operations of a node. For causal attention, half of all pairs of
    query and key are counted.
    """
    out = node.outputs[0] if node.outputs else node.inputs[0]
    if node.type == "matmul":
        depth = -2 if node.read(MatmulAttributes).transpose_a else -1
        return 2.0 * out.elements * node.inputs[0].shape[depth]
    if node.type in ("expert_linear", "quantized_linear"):
        return 2.0 * out.elements * node.inputs[1].shape[-1]
    if node.type == "attention":
        return 2.0 * out.elements * node.inputs[1].shape[-2]
    return float(max(t.elements for t in (*node.inputs, *node.outputs)))


def _touched(node: Node) -> list[float]:
    """The bytes of each operand and result that a node reads or writes."""
    tensors = [*node.inputs, *node.outputs]
    nbytes = [float(t.nbytes) for t in tensors]
    if node.type == "embed":
        nbytes[1] = nbytes[-1]
    if node.type == "kv_append":
        nbytes[-1] = nbytes[2] = nbytes[0]
    return nbytes
