"""The table of gradient rules: for each op, what its inputs' gradients are made of.

A rule takes a `Call` (one node and the gradients of its results) and returns a gradient for every
input, None for one that has none or was not asked for. It is made of public ops. Filled by the
modules of op families beside this one, asked by ark.gradients.reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ark.errors import InternalError, UnsupportedError
from ark.frontend.tensor import Tensor
from ark.ir.graph import Node
from ark.lower.rewrite.fuse_chains import is_pointwise
from ark.ops.elementwise import cast, zeros

Gradients = Sequence[Tensor | None]
Rule = Callable[["Call"], Gradients]


@dataclass
class Call:
    """A node of which the gradient is asked.

    given: gradients of its outputs, None where nothing depends on one. wanted: by input, whether
    its gradient is needed. value: the tensor of an input or output as it was when the node ran;
    raises where the memory has been written since.
    """

    node: Node
    given: Sequence[Tensor | None]
    wanted: Sequence[bool]
    value: Callable[[Any], Tensor]

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
        """The gradient of an output; zeros where nothing depends on it."""
        found = self.given[place]
        if found is not None:
            return found
        out = self.node.outputs[place]
        return zeros(out.shape, out.dtype)

    def fitted(self, gradient: Tensor, place: int) -> Tensor:
        """A gradient in the type of an input."""
        dtype = self.node.inputs[place].dtype
        return gradient if gradient.ir.dtype == dtype else cast(gradient, dtype)


RULES: dict[str, Rule | None] = {}
"""By op; None: it has no gradient, and its inputs count as constants there."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enters a rule into the table under these names."""

    def enter(function: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise InternalError(f"the op {name!r} has two gradient rules")
            RULES[name] = function
        return function

    return enter


def constant(*names: str) -> None:
    """Ops whose results are constants to differentiation."""
    for name in names:
        RULES[name] = None


def is_constant(node: Node) -> bool:
    """Are the node's results constants, whatever goes in?"""
    return not is_pointwise(node) and RULES.get(node.type, _unknown) is None


def rule_of(node: Node) -> Rule:
    """The rule of a node's op; one that raises UnsupportedError where there is none."""
    return (RULES["pointwise"] if is_pointwise(node) else RULES.get(node.type)) or _unknown


def _unknown(call: Call) -> Gradients:
    raise refuse(call, "what goes in")


def refuse(call: Call, what: str) -> UnsupportedError:
    """The error for a gradient by an input that is not built."""
    return UnsupportedError(
        f"the gradient of {call.node.type} (op {call.node.name!r}) by {what} is not built; "
        "ark.detach it, to take it as a constant"
    )
