"""An operator of a graph. Nodes are made by ark.ir.graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ark.ir.attribute_forms import Attributes, ElementwiseAttributes, Form, FormType
from ark.ir.hints import Hints
from ark.ir.values import Tensor


@dataclass(frozen=True)
class Node:
    """An operator. Its outputs are tensors, too; an op that writes in place has a new tensor on the
    same memory as output.

    virtual: True if it only names or views memory and makes no task. phase: the phase of the loop
    in which it runs. processors: first and last+1 processor that may run it; None: all. hints: how
    it is to be cut into tasks. context: nodes with the same number come from one
    ark.PlannerContext.
    """

    id: int
    type: str
    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    after: tuple[Tensor, ...] = ()
    virtual: bool = False
    phase: int = 0
    processors: tuple[int, int] | None = None
    hints: Hints | None = None
    context: int | None = None

    def with_attributes(self, attributes: Attributes) -> Node:
        """A copy of the node with these attributes."""
        return replace(self, attrs=attributes.to_node())

    def read(self, form: FormType[Form]) -> Form:
        """The attributes as the op's struct, `form`."""
        return form.from_node(self.attrs)

    @property
    def elementwise(self) -> ElementwiseAttributes:
        """The attributes of an elementwise op; for other ops, attributes without an expression and
        a number.
        """
        return ElementwiseAttributes.of(self.attrs)

    @property
    def placement(self) -> tuple[object, ...]:
        """The properties that two ops must have in common to be fused."""
        return self.phase, self.processors, self.hints
