"""What a plan may choose for each op, and what that costs: by which letter an axis of the mesh
splits it, or that all ranks of the axis compute it alike.

The cost model of ark.parallel.plans.search: arithmetic or memory traffic of a rank, whichever is
longer, and what changes of layout move, by ring volumes. Coarse on purpose: it ranks plans.
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
from ark.parallel.transform import Annotation, annotate

Choice = tuple[str | None, ...]
"""A letter for each axis of the mesh, or None: its ranks all compute the same."""
State = tuple[str, ...]
"""How a tensor lies along each axis: "R", "V", or the number of the dimension that is cut."""


@dataclass(frozen=True)
class Rates:
    """What a rank does in a microsecond. step_us: what every collective takes beside its bytes."""

    flops_per_us: float
    memory_bytes_per_us: float
    link_bytes_per_us: float
    step_us: float = 5.0


@dataclass(frozen=True)
class Option:
    """A node under a choice: what its operands must be like, what its output is, what it costs."""

    choice: Choice
    inputs: tuple[State, ...]
    output: State
    us: float


class Costs:
    """Options of nodes on a mesh, and what changes between their states cost."""

    def __init__(self, mesh: Sequence[int], rates: Rates) -> None:
        self.mesh, self.rates = tuple(mesh), rates

    def options(self, node: Node) -> list[Option]:
        """Every way to split a node; one that splits nothing is always among them."""
        try:
            annotation = annotate(node)
        except UnsupportedError:
            whole: State = ("R",) * len(self.mesh)
            tensors = (*node.inputs, *node.outputs)
            us = self._us(sum(t.elements for t in tensors), sum(t.nbytes for t in tensors))
            return [Option((None,) * len(self.mesh), (whole,) * len(node.inputs), whole, us)]
        sizes = letter_sizes(node, annotation)
        free = sorted(set(sizes) - annotation.frozen - {"1"})
        made = []
        for choice in itertools.product((None, *free), repeat=len(self.mesh)):
            parts = self._parts(choice)
            if all(sizes[letter] % count == 0 for letter, count in parts.items()):
                made.append(self._option(node, annotation, choice, parts, sizes))
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
        sizes: dict[str, int],
    ) -> Option:
        states = []
        for at, letters in enumerate(annotation.operands):
            last = at == len(annotation.operands) - 1
            states.append(
                tuple(
                    str(letters.index(letter))
                    if letter in letters
                    else ("V" if last and letter in annotation.summed else "R")
                    for letter in choice
                )
            )
        work = math.prod(sizes.values()) / math.prod(parts.values())
        moved = sum(
            self.local(tensor, state) * tensor.dtype.itemsize
            for tensor, state in zip((*node.inputs, *node.outputs), states, strict=True)
        )
        us = self._us((2 if node.type == "matmul" else 1) * work, moved)
        return Option(choice, tuple(states[:-1]), states[-1], us)

    def _us(self, flops: float, moved: float) -> float:
        return max(flops / self.rates.flops_per_us, moved / self.rates.memory_bytes_per_us)

    def local(self, tensor: Tensor, state: State) -> int:
        """Elements that a rank holds of a tensor in a state."""
        cuts = [n for n, kind in zip(self.mesh, state, strict=True) if kind not in ("R", "V")]
        return tensor.elements // math.prod(cuts)

    def change_us(self, tensor: Tensor, have: State, want: State) -> float:
        """What it takes to bring a tensor from one state to another, axis by axis."""
        total, held = 0.0, float(self.local(tensor, have))
        for count, before, after in zip(self.mesh, have, want, strict=True):
            if before == after or before == "R":
                held /= count if before == "R" != after else 1
                continue
            cut = after not in ("R", "V")
            if before == "V":
                op = "reduce_scatter" if cut else "all_reduce"
            else:
                op = "all_to_all" if cut else "all_gather"
            elements = ring_volume(op, count, 1) * held / count
            total += self.rates.step_us
            total += elements * tensor.dtype.itemsize / self.rates.link_bytes_per_us
            held *= count if op == "all_gather" else 1
            held /= count if op == "reduce_scatter" else 1
        return total


def letter_sizes(node: Node, annotation: Annotation) -> dict[str, int]:
    """The size of every letter of a node."""
    tensors = (*node.inputs, *node.outputs)
    return {
        letter: size
        for letters, tensor in zip(annotation.operands, tensors, strict=True)
        for letter, size in zip(letters, tensor.shape, strict=True)
    }
