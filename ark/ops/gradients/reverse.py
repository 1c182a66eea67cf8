"""Reverse-mode differentiation (Griewank and Walther 2008, chapter 3); `ark.grad` for users.

It goes through a graph's nodes from the last to the first and adds the nodes that compute
gradients, by the rules in ark.ops.gradients.table. The result is a graph like any other, so a
training step is one loop kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from ark.errors import InvalidUsageError, ModelError
from ark.frontend.model import Model
from ark.frontend.tensor import Tensor, as_tensor
from ark.ir import values as ir
from ark.ir.dtype import FLOATS
from ark.ir.graph import Node
from ark.lower.rewrite.fuse_chains import joined_chains
from ark.ops.elementwise import cast, ones, zeros
from ark.ops.gradients.elementwise import has_simple_gradients
from ark.ops.gradients.regions import Regions
from ark.ops.gradients.table import Call, is_constant, rule_of
from ark.tasks.node_expressions import expression_of


@overload
def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor,
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    allow_unused: Literal[False] = False,
) -> Tensor: ...


@overload
def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    allow_unused: Literal[False] = False,
) -> list[Tensor]: ...


@overload
def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    *,
    allow_unused: bool,
) -> Tensor | list[Tensor | None] | None: ...


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    allow_unused: bool = False,
) -> Tensor | list[Tensor] | list[Tensor | None] | None:
    """Gradients of the sum of `outputs` with respect to each of `inputs`, as torch.autograd.grad.

    outputs: a tensor or several, of fp32, fp16 or bf16. grad_outputs: for each output a weight
    tensor of its shape; may be None for an output of one element. Returns a tensor of the shape and
    type of `inputs`, or a list if that is a list; if no output depends on an input, zeros, or None
    if allow_unused. The nodes are appended to the current model; values in memory from earlier
    iterations count as constants.

    Raises UnsupportedError for an op that has no gradient, ModelError if an op has overwritten in
    place a value that its gradient needs.

    Examples:
        >>> x = ark.placeholder([3], data=torch.tensor([1.0, 2.0, 3.0]))
        >>> ark.grad(ark.reduce_sum(x * x, axis=0), x).eval()
        tensor([2., 4., 6.])
    """
    ends = [as_tensor(t) for t in _listed(outputs)]
    wanted = [as_tensor(t) for t in _listed(inputs)]
    given = _listed(grad_outputs) if grad_outputs is not None else [None] * len(ends)
    if not ends or not wanted or len(given) != len(ends):
        raise InvalidUsageError(
            f"grad: got {len(ends)} outputs, {len(given)} of their gradients and {len(wanted)} "
            "inputs; give at least one of each, and a gradient (or None) for every output"
        )
    starts = [_start(end, g) for end, g in zip(ends, given, strict=True)]
    for tensor in wanted:
        _floating("the input", tensor)
    reverse = _Reverse(Model.get_model(), [t.ir for t in wanted], [e.ir for e in ends])
    computed = reverse.run(ends, starts)
    gradients = [
        g if g is not None or allow_unused else zeros(t.ir.shape, t.ir.dtype)
        for g, t in zip(computed, wanted, strict=True)
    ]
    return gradients[0] if isinstance(inputs, Tensor) else gradients


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _floating(role: str, tensor: Tensor) -> None:
    if tensor.ir.dtype not in FLOATS:
        raise InvalidUsageError(
            f"grad: {role} {tensor.ir.name!r} is {tensor.ir.dtype.name}; gradients are of fp32, "
            "fp16 or bf16"
        )


def _start(end: Tensor, given: Any) -> Tensor:
    """The gradient of an output with which reverse differentiation begins: the one that the caller
    gives, or 1.
    """
    _floating("the output", end)
    if given is None:
        if end.ir.elements != 1:
            raise InvalidUsageError(
                f"grad: an output of shape {end.shape()} needs a gradient in grad_outputs; only a "
                "single element has the default gradient 1"
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
    """The computation of gradients for one call of `grad`. nodes: the forward graph, which are all
    nodes that existed before the call.
    """

    def __init__(
        self, model: Model, wanted: Sequence[ir.Tensor], ends: Sequence[ir.Tensor]
    ) -> None:
        self.model = model
        self.graph = model.graph
        self.wanted = wanted
        self.nodes = self._chains(ends)
        self.regions = Regions()
        self.writers: dict[int, list[tuple[int, ir.Tensor]]] = {}
        for place, node in enumerate(self.nodes):
            for out in node.outputs:
                self.writers.setdefault(out.buffer.id, []).append((place, out))
        self.births = [self._birth(t) for t in wanted]

    def _chains(self, ends: Sequence[ir.Tensor]) -> list[Node]:
        """The forward nodes, with chains of elementwise nodes joined: the gradient of a chain is
        computed from its inputs, so that its intermediate results are not stored. A node is not
        joined if a later one overwrites its inputs, if it broadcasts them, because the gradient of
        a broadcast input is the sum of the other input's gradient, if it reads conditions, because
        passes recognise masked scores and their gradients, or if it is a relu, whose gradient
        depends on its result alone.
        """
        phase = [n for n in self.graph.nodes if n.phase == self.graph.phase]
        named = {t.buffer.id for t in (*self.wanted, *ends)}
        ids = self.graph.detached
        named |= {t.buffer.id for n in phase for t in (*n.inputs, *n.outputs) if t.id in ids}
        last = {t.buffer.id: place for place, n in enumerate(phase) for t in n.outputs}
        places = {t.id: (place, t) for place, n in enumerate(phase) for t in n.outputs}

        def fits(node: Node) -> bool:
            here, out = places[node.outputs[0].id]
            kept = all(last.get(t.buffer.id, -1) < here for t in node.inputs)
            kept = kept and all(t.shape == out.shape and t.dtype in FLOATS for t in node.inputs)
            kept = kept and expression_of(node)[0] != "relu"
            return kept and node.outputs[0] == out and has_simple_gradients(node)

        return list(joined_chains(self.graph.with_nodes(phase), frozenset(named), fits).nodes)

    def _birth(self, tensor: ir.Tensor) -> int:
        """The index of the last node that wrote the tensor's memory before the tensor was created.
        -1 if there is none.
        """
        places = [
            place
            for place, out in self.writers.get(tensor.buffer.id, [])
            if out.id <= tensor.id and ir.overlap(out, tensor)
        ]
        return max(places, default=-1)

    def run(self, ends: Sequence[Tensor], starts: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradient of each tensor for which the caller requests one; None if no output depends
        on it.
        """
        active = self._active()
        gradients: list[Tensor | None] = [None] * len(self.wanted)
        pending = [(self._birth(e.ir), e, s) for e, s in zip(ends, starts, strict=True)]
        for place in range(len(self.nodes) - 1, -2, -1):
            for born, end, start in pending:
                if born == place and end.ir.id not in self.graph.detached:
                    self.regions.put(end.ir, start)
            for number, born in enumerate(self.births):
                if born == place:
                    gradients[number] = self.regions.look(self.wanted[number])
            if place in active:
                self._undo(place, active[place])
            elif place >= 0:
                for out in self.nodes[place].outputs:
                    self.regions.drop(out)
        return gradients

    def _active(self) -> dict[int, list[bool]]:
        """The nodes through which gradients flow, by index. Each node has a list with one entry per
        input. The entry is True if the input depends on a tensor for which the caller requests a
        gradient.
        """
        moved: dict[int, list[ir.Tensor]] = {}
        births: dict[int, list[ir.Tensor]] = {}
        for tensor, born in zip(self.wanted, self.births, strict=True):
            births.setdefault(born, []).append(tensor)
        active = {}
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
                active[place] = uses
                for out in node.outputs:
                    moved.setdefault(out.buffer.id, []).append(out)
            for tensor in births.get(place, []):
                moved.setdefault(tensor.buffer.id, []).append(tensor)
        return active

    def _undo(self, place: int, uses: Sequence[bool]) -> None:
        """Adds the nodes that compute the gradients of a node's inputs from the gradients of its
        outputs.

        If the user restricted the node to some processors, the new nodes are restricted to the same
        processors.
        """
        node, first = self.nodes[place], len(self.graph.nodes)
        given = [self.regions.take(out) for out in reversed(node.outputs)][::-1]
        if all(g is None for g in given):
            return
        with self.graph.placed(node.processors):
            call = Call(
                node,
                given,
                uses,
                lambda t: self._value(t, place),
                lambda t: self._maker(t, place),
            )
            gradients = rule_of(node)(call)
            for tensor, gradient, used in zip(node.inputs, gradients, uses, strict=True):
                if used and gradient is not None:
                    self.regions.put(tensor, gradient)
            for tensor, gradient in call.passed:
                self.regions.put(tensor, gradient)
        for added in self.graph.nodes[first:]:
            for out in added.outputs:
                self.graph.undone[out.buffer.id] = node.outputs[0].buffer.id

    def _maker(self, tensor: ir.Tensor, place: int) -> Node | None:
        """The node that alone computed an input of a node, from tensors that have not changed since
        then. None if there is no such node. place: the index of the node that reads the input.
        """
        writes = [w for w in self.writers.get(tensor.buffer.id, []) if w[0] < place]
        if len(writes) != 1:
            return None
        at, node = writes[0][0], self.nodes[writes[0][0]]
        later = [
            where
            for source in node.inputs
            for where, out in self.writers.get(source.buffer.id, [])
            if ir.overlap(out, source)
        ]
        return None if any(at <= where < place for where in later) else node

    def _value(self, tensor: ir.Tensor, place: int) -> Tensor:
        """The handle of a node's input or output. Raises ModelError if a later node has overwritten
        it. place: the index of the node.
        """
        for later, out in self.writers.get(tensor.buffer.id, []):
            written = later > place or (later == place and out.id != tensor.id)
            if written and ir.overlap(out, tensor):
                raise ModelError(
                    f"the gradient of op {self.nodes[place].name!r} needs {tensor.name!r}, "
                    f"which op {self.nodes[later].name!r} overwrites in place; let that op "
                    "write to a new tensor (no output=)"
                )
        return Tensor(tensor, self.model)
