"""The attributes of a collective in a graph, which hold its program. Called by ark.ops, the passes,
and what makes graphs of single collectives.
"""

from __future__ import annotations

from typing import Any

from ark.collective.programs.types import CollectiveProgram
from ark.ir.attribute_forms import Attributes, without_defaults
from ark.ir.node import Node


class CollectiveAttributes(Attributes, frozen=True):
    """element: the type that is combined; empty for the operands'. engine: by which bytes travel;
    empty or "auto" for the planner's choice.
    """

    program: CollectiveProgram
    element: str = ""
    engine: str = ""

    def to_node(self) -> dict[str, Any]:
        """As of Attributes; the program stays the object that it is."""
        return {"program": self.program, **without_defaults(self, keep=("program",))}


def program_of(node: Node) -> CollectiveProgram | None:
    """The program of a collective; None for other ops."""
    return node.read(CollectiveAttributes).program if node.type == "collective" else None
