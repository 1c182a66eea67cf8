"""What a plan may choose for each op, and what that costs: by which letter an axis of the mesh
splits it, or that all ranks of the axis compute the same.

The cost model of ark.parallel.plans: what an op takes (ark.parallel.plans.times), and what changes
of layout move, by ring volumes. In training each op's gradient costs twice the op, and gradients
change layout the other way round.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ark.errors import UnsupportedError
from ark.ir.graph import Node
from ark.ir.values import Tensor
from ark.parallel.layout.moves import ring_volume
from ark.parallel.plans.times import Rates, Times
from ark.parallel.transform import Annotation, annotate
from ark.parallel.transform.carried import VALUE, Carried

NEVER_US = 1e9  # a value that is whole is not taken apart into shares of it
Choice = tuple[str | None, ...]
"""A letter for each axis of the mesh, or None: its ranks all compute the same."""
State = tuple[str, ...]
"""How a tensor lies along each axis: "R", "V", or the number of the dimension that is cut."""


@dataclass(frozen=True)
class Option:
    """A node under a choice: what its operands must be like, what its output is, what it costs.

    grads: how the operands' gradients lie. us: forward; saved: bytes of its output on a rank.
    """

    choice: Choice
    inputs: tuple[State, ...]
    output: State
    us: float
    grads: tuple[State, ...] = ()
    saved: int = 0


@dataclass(frozen=True)
class Move:
    """A collective among the ranks of one axis. bytes: what each of them sends."""

    op: str
    axis: int
    bytes: float
    us: float


class Costs:
    """Options of nodes on a mesh, and what changes between their states cost.

    links: bytes a microsecond along each axis, where they differ. training: gradients are counted.
    nodes: the graph's, where what stands beside an op decides what it takes.
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
        """Every way to split a node; one that splits nothing is always among them.

        through: operands that may come in shares (ark.parallel.transform.carried).
        """
        try:
            annotation = annotate(node)
        except UnsupportedError:
            whole: State = ("R",) * len(self.mesh)
            inputs = (whole,) * len(node.inputs)
            out = sum(t.nbytes for t in node.outputs)
            us = self._us(node, _flops(node), sum(_touched(node)), inputs, whole)
            return [Option((None,) * len(self.mesh), inputs, whole, us, inputs, out)]
        sizes = annotation.sizes([t.shape for t in (*node.inputs, *node.outputs)])
        through = through or {}
        free = sorted((set(sizes) | set(through)) - annotation.frozen - {"1"})
        made = []
        for choice in itertools.product((None, *free), repeat=len(self.mesh)):
            parts = self._parts(choice)
            if all(sizes.get(letter, 0) % count == 0 for letter, count in parts.items()):
                made.append(self._option(node, annotation, choice, parts, through))
        return made

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
        # Shares of a value are as large as the value.
        work = _flops(node) / math.prod(n for letter, n in parts.items() if letter != VALUE)
        moved = sum(
            touched * self.local(tensor, state) / tensor.elements
            for tensor, state, touched in zip(
                (*node.inputs, *node.outputs), (*inputs[:-1], output), _touched(node), strict=True
            )
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
        """Into how many parts a state cuts a dimension."""
        return math.prod(
            n for n, kind in zip(self.mesh, state, strict=True) if kind == str(dimension)
        )

    def local(self, tensor: Tensor, state: State) -> int:
        """Elements that a rank holds of a tensor in a state."""
        cuts = [n for n, kind in zip(self.mesh, state, strict=True) if kind not in ("R", "V")]
        return tensor.elements // math.prod(cuts)

    def moves(self, tensor: Tensor, have: State, want: State) -> list[Move]:
        """The collectives that take a tensor from one state to another, axis by axis."""
        made, held = [], float(self.local(tensor, have))
        for axis, (count, before, after) in enumerate(zip(self.mesh, have, want, strict=True)):
            if before == "R" and after == "V" and count > 1:
                made.append(Move("value_split", axis, 0.0, NEVER_US))
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
            made.append(Move(op, axis, sent, us))
            held *= count if op == "all_gather" else 1
            held /= count if op == "reduce_scatter" else 1
        return made

    def change_us(self, tensor: Tensor, have: State, want: State) -> float:
        """What it costs to take a tensor from one state to another."""
        return sum(move.us for move in self.moves(tensor, have, want))


def of_gradient(state: State) -> State:
    """The state of a value's gradient: of partial sums replicated, otherwise that of the value."""
    return tuple("R" if kind == "V" else kind for kind in state)


def _flops(node: Node) -> float:
    """Arithmetic of a node; causal attention does half of all pairs."""
    out = node.outputs[0] if node.outputs else node.inputs[0]
    if node.type == "matmul":
        return 2.0 * out.elements * node.inputs[0].shape[-2 if node.attrs["transpose_a"] else -1]
    if node.type == "expert_linear":
        return 2.0 * out.elements * node.inputs[1].shape[-1]
    if node.type == "attention":
        return 2.0 * out.elements * node.inputs[1].shape[-2]
    return float(max(t.elements for t in (*node.inputs, *node.outputs)))


def _touched(node: Node) -> list[float]:
    """Bytes of each operand and result that a node reads or writes."""
    tensors = [*node.inputs, *node.outputs]
    found = [float(t.nbytes) for t in tensors]
    if node.type == "embed":
        found[1] = found[-1]
    if node.type == "kv_append":
        found[-1] = found[2] = found[0]
    return found
