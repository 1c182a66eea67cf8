"""Reverse-mode differentiation: walks a graph's nodes from the last to the first and adds, by the
rules of the ops, the nodes that compute gradients. What comes out is a graph like any other, so a
training step is one loop kernel (Griewank and Walther 2008, chapter 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ark.errors import InvalidUsageError, ModelError
from ark.frontend.model import Model
from ark.frontend.tensor import Tensor, as_tensor
from ark.gradients.regions import Regions
from ark.gradients.table import Call, is_constant, rule_of
from ark.ir import values as ir
from ark.ir.dtype import FLOATS
from ark.ops.elementwise import cast, ones, zeros


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Any = None,
    allow_unused: bool = False,
) -> Any:
    """Gradients of the sum of `outputs` with respect to each of `inputs`, as torch.autograd.grad.

    outputs: a tensor or several, of fp32, fp16 or bf16. grad_outputs: for each, a tensor of its
    shape that it is weighted with; an output of one element may have None. Returns a tensor of the
    shape and type of `inputs`, or a list where that is a list; where an output does not depend on
    an input, zeros, or None if allow_unused. The nodes are added to the current model behind those
    there; what earlier iterations left in memory counts as constant.

    UnsupportedError names an op that has no gradient. ModelError where an op has overwritten, in
    place, what its gradient needs.
    """
    ends = [as_tensor(t) for t in _listed(outputs)]
    wanted = [as_tensor(t) for t in _listed(inputs)]
    given = _listed(grad_outputs) if grad_outputs is not None else [None] * len(ends)
    if not ends or not wanted or len(given) != len(ends):
        raise InvalidUsageError(
            f"grad: {len(ends)} outputs with {len(given)} gradients by {len(wanted)} inputs; "
            "give at least one of each, and a gradient (or None) for every output"
        )
    starts = [_start(end, g) for end, g in zip(ends, given, strict=True)]
    for tensor in wanted:
        _floating("the input", tensor)
    found = _Reverse(Model.get_model(), [t.ir for t in wanted]).run(ends, starts)
    made = [
        g if g is not None or allow_unused else zeros(t.ir.shape, t.ir.dtype)
        for g, t in zip(found, wanted, strict=True)
    ]
    return made[0] if isinstance(inputs, Tensor) else made


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _floating(what: str, tensor: Tensor) -> None:
    if tensor.ir.dtype not in FLOATS:
        raise InvalidUsageError(
            f"grad: {what} {tensor.ir.name!r} is {tensor.ir.dtype.name}; gradients are of fp32, "
            "fp16 or bf16"
        )


def _start(end: Tensor, given: Any) -> Tensor:
    """The gradient of an output."""
    _floating("the output", end)
    if given is None:
        if end.ir.elements != 1:
            raise InvalidUsageError(
                f"grad: an output of shape {end.shape()} needs a gradient in grad_outputs; only "
                "one element is weighted with 1"
            )
        return ones(end.ir.shape, end.ir.dtype)
    tensor = as_tensor(given)
    if tensor.ir.shape != end.ir.shape:
        raise InvalidUsageError(
            f"grad: the gradient of an output of shape {end.shape()} has shape {tensor.shape()}; "
            "they must be equal"
        )
    return tensor if tensor.ir.dtype == end.ir.dtype else cast(tensor, end.ir.dtype)


class _Reverse:
    """One walk. nodes: those of the forward graph, all that were there before."""

    def __init__(self, model: Model, wanted: Sequence[ir.Tensor]) -> None:
        self.model = model
        self.graph = model.graph
        self.nodes = [n for n in self.graph.nodes if n.phase == self.graph.phase]
        self.wanted = wanted
        self.regions = Regions()
        self.writers: dict[int, list[tuple[int, ir.Tensor]]] = {}
        for place, node in enumerate(self.nodes):
            for out in node.outputs:
                self.writers.setdefault(out.buffer.id, []).append((place, out))
        self.births = [self._birth(t) for t in wanted]

    def _birth(self, tensor: ir.Tensor) -> int:
        """The place of the node that wrote a tensor last before it was made; -1: none did."""
        places = [
            place
            for place, out in self.writers.get(tensor.buffer.id, [])
            if out.id <= tensor.id and ir.overlap(out, tensor)
        ]
        return max(places, default=-1)

    def run(self, ends: Sequence[Tensor], starts: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradient of each wanted tensor."""
        active = self._active()
        found: list[Tensor | None] = [None] * len(self.wanted)
        pending = [(self._birth(e.ir), e, s) for e, s in zip(ends, starts, strict=True)]
        for place in range(len(self.nodes) - 1, -2, -1):
            for born, end, start in pending:
                if born == place and end.ir.id not in self.graph.detached:
                    self.regions.put(end.ir, start)
            for number, born in enumerate(self.births):
                if born == place:
                    found[number] = self.regions.look(self.wanted[number])
            if place in active:
                self._undo(place, active[place])
            elif place >= 0:
                for out in self.nodes[place].outputs:
                    self.regions.drop(out)
        return found

    def _active(self) -> dict[int, list[bool]]:
        """By place of a node that depends on a wanted tensor: which of its inputs do."""
        moved: dict[int, list[ir.Tensor]] = {}
        births: dict[int, list[ir.Tensor]] = {}
        for tensor, born in zip(self.wanted, self.births, strict=True):
            births.setdefault(born, []).append(tensor)
        found = {}
        for tensor in births.get(-1, []):
            moved.setdefault(tensor.buffer.id, []).append(tensor)
        for place, node in enumerate(self.nodes):
            uses = [
                t.dtype in FLOATS
                and t.id not in self.graph.detached
                and any(ir.overlap(t, m) for m in moved.get(t.buffer.id, []))
                for t in node.inputs
            ]
            if any(uses) and not is_constant(node):
                found[place] = uses
                for out in node.outputs:
                    moved.setdefault(out.buffer.id, []).append(out)
            for tensor in births.get(place, []):
                moved.setdefault(tensor.buffer.id, []).append(tensor)
        return found

    def _undo(self, place: int, uses: Sequence[bool]) -> None:
        """From the gradients of what a node made to those of what it read. Their nodes stay on the
        processors that this one was asked to stay on.
        """
        node = self.nodes[place]
        given = [self.regions.take(out) for out in reversed(node.outputs)][::-1]
        if all(g is None for g in given):
            return
        with self.graph.placed(node.processors):
            made = rule_of(node)(Call(node, given, uses, lambda t: self._value(t, place)))
            for tensor, gradient, used in zip(node.inputs, made, uses, strict=True):
                if used and gradient is not None:
                    self.regions.put(tensor, gradient)

    def _value(self, tensor: ir.Tensor, place: int) -> Tensor:
        """The handle of what a node read or made; ModelError where it is overwritten since."""
        for later, out in self.writers.get(tensor.buffer.id, []):
            written = later > place or (later == place and out.id != tensor.id)
            if written and ir.overlap(out, tensor):
                raise ModelError(
                    f"the gradient of op {self.nodes[place].name!r} needs {tensor.name!r}, which "
                    f"op {self.nodes[later].name!r} overwrites in place; let that one make a "
                    "tensor of its own (no output=)"
                )
        return Tensor(tensor, self.model)
