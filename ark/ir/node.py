"""An operator of a graph. Nodes are made by ark.ir.graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ark.ir.attribute_forms import Attributes, ElementwiseAttributes, Form, FormType
from ark.ir.hints import Hints
from ark.ir.values import Tensor


@dataclass(frozen=True)
class Node:
    """One op of a graph, applied to tensors. Its outputs are new tensors. The output of an op that
    writes in place is a new tensor on the memory of the tensor that it overwrites.

    virtual: True if the op only names or views memory and makes no task. phase: the number of the
    phase (entry point of the model) to which the op belongs. processors: the range of processors
    that may run the op, as (first, end) with `end` exclusive; None for all processors. hints: the
    user's settings for its tasks. context: a number that is equal for nodes of one
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

    def beside(
        self,
        id: int,
        type: str,
        inputs: Iterable[Tensor],
        output: Tensor,
        attrs: Mapping[str, Any],
        name: str = "",
        waits: bool = True,
    ) -> Node:
        """A new node that runs where this node runs. name: by default that of its result. waits:
        True if it must run after the ops after which this node must run.
        """
        return replace(
            self,
            id=id,
            type=type,
            name=name or output.name,
            inputs=tuple(inputs),
            outputs=(output,),
            attrs=attrs,
            after=self.after if waits else (),
        )

    def fused(
        self,
        type: str,
        inputs: Iterable[Tensor],
        outputs: Iterable[Tensor],
        attrs: Mapping[str, Any],
        members: Iterable[Node],
        name: str = "",
    ) -> Node:
        """The node that computes, in the place of this node, what the members compute."""
        return replace(
            self,
            type=type,
            name=name or self.name,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            attrs=attrs,
            after=tuple(t for n in members for t in n.after),
        )

    def read(self, form: FormType[Form]) -> Form:
        """The node's attributes as an instance of `form`, the attribute struct of its op."""
        return form.from_node(self.attrs)

    @property
    def elementwise(self) -> ElementwiseAttributes:
        """The attributes that all elementwise ops share. For an op of another kind, attributes
        without an expression and without a number.
        """
        return ElementwiseAttributes.of(self.attrs)

    @property
    def placement(self) -> tuple[object, ...]:
        """Where and how the node runs: two ops can be fused only if these properties are equal."""
        return self.phase, self.processors, self.hints
