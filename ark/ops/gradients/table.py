"""The table of gradient rules. For each op, it has the function that computes the gradients of the
op's inputs.

Such a rule gets a `Call`, which has one node and the gradients of the node's results. It returns a
list with one gradient for every input. An entry is None if the input has no gradient or if its
gradient is not needed. Rules use public ops. The modules of op families in this package fill the
table; ark.ops.gradients.reverse uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ark.errors import InternalError, UnsupportedError
from ark.frontend.tensor import Tensor
from ark.ir.graph import Node
from ark.ops.elementwise import cast, zeros
from ark.tasks.node_expressions import is_elementwise

Gradients = Sequence[Tensor | None]
Rule = Callable[["Call"], Gradients]


@dataclass
class Call:
    """A node whose gradients are computed.

    given: the gradient of each output, None if the result does not depend on the output. wanted:
        for each input, True if its gradient is needed. value: a function that returns the tensor of
        an input or output with its value at the time of the node. It raises ModelError if a later
        node overwrites the value. maker: a function that returns the node which computed an input
        from tensors that have not changed since; None if there is no such node. passed: gradients
        of the inputs of such a node, which a rule adds here if it skips the node.
    """

    node: Node
    given: Sequence[Tensor | None]
    wanted: Sequence[bool]
    value: Callable[[Any], Tensor]
    maker: Callable[[Any], Node | None]
    passed: list[tuple[Any, Tensor]] = field(default_factory=list)

    @property
    def attrs(self) -> Any:
        """The node's attributes."""
        return self.node.attrs

    def input(self, place: int) -> Tensor:
        """An input's value."""
        return self.value(self.node.inputs[place])

    def output(self, place: int = 0) -> Tensor:
        """An output's value."""
        return self.value(self.node.outputs[place])

    def shape(self, place: int) -> tuple[int, ...]:
        """An input's shape."""
        return self.node.inputs[place].shape

    def gradient(self, place: int = 0) -> Tensor:
        """The gradient of output number `place`; zeros if the differentiated result does not depend
        on this output.
        """
        gradient = self.given[place]
        if gradient is not None:
            return gradient
        out = self.node.outputs[place]
        return zeros(out.shape, out.dtype)

    def fitted(self, gradient: Tensor, place: int) -> Tensor:
        """A gradient, cast to the type of input number `place`."""
        dtype = self.node.inputs[place].dtype
        return gradient if gradient.ir.dtype == dtype else cast(gradient, dtype)


RULES: dict[str, Rule | None] = {}
"""The rule of each op; None for an op whose inputs count as constants."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """A decorator that adds a rule to the table under these names."""

    def enter(function: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise InternalError(f"the op {name!r} has two gradient rules")
            RULES[name] = function
        return function

    return enter


def constant(*names: str) -> None:
    """Registers ops whose results are constants for differentiation."""
    for name in names:
        RULES[name] = None


def is_constant(node: Node) -> bool:
    """True if the node's results are constants even if its inputs are not."""
    return not is_elementwise(node) and RULES.get(node.type, _unknown) is None


def rule_of(node: Node) -> Rule:
    """The rule of a node's op. An elementwise op has the rule of all elementwise ops, unless it has
    its own. An op without a rule gets one that raises UnsupportedError.
    """
    common = RULES["elementwise"] if is_elementwise(node) else None
    return RULES.get(node.type) or common or _unknown


def _unknown(call: Call) -> Gradients:
    raise refuse(call, "its inputs")


def refuse(call: Call, input: str) -> UnsupportedError:
    """The error for a gradient with respect to an input that is not supported."""
    return UnsupportedError(
        f"the gradient of {call.node.type} (op {call.node.name!r}) with respect to {input} is "
        "not supported; ark.detach it to treat it as a constant"
    )
