"""One operator of a graph. Called by ark.ir.graph, which gives it to everyone else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ark.ir.attribute_forms import Attributes, ElementwiseAttributes, Form, FormType
from ark.ir.hints import Hints
from ark.ir.values import Tensor


@dataclass(frozen=True)
class Node:
    """One operator. Outputs are tensors too; an op that writes in place has its own new tensor.

    virtual: it names or views memory and makes no task. phase: which part of the loop it runs in.
    processors: first and last+1 processor that may run it; none: all. hints: how it is to be cut.
    context: ops of one number were asked for together (ark.PlannerContext).
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
        """The node with these attributes instead."""
        return replace(self, attrs=attributes.to_node())

    def read(self, form: FormType[Form]) -> Form:
        """The attributes by name; `form` is the op's struct of them."""
        return form.from_node(self.attrs)

    @property
    def elementwise(self) -> ElementwiseAttributes:
        """Of an elementwise op; without an expression and a number for others."""
        return ElementwiseAttributes.of(self.attrs)

    @property
    def placement(self) -> tuple[object, ...]:
        """What ops must have in common to become one."""
        return self.phase, self.processors, self.hints
