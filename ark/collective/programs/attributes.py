"""The attributes of a `collective` node in a graph. They contain the collective program that the
node runs. Used by ark.ops, the passes, and code that makes graphs of single collectives.
"""

from __future__ import annotations

from typing import Any

from ark.collective.programs.types import CollectiveProgram
from ark.ir.attribute_forms import Attributes, without_defaults
from ark.ir.node import Node


class CollectiveAttributes(Attributes, frozen=True):
    """The attributes of a `collective` node. element: the type in which values are reduced; if
    empty, the type of the operands. engine: the way in which bytes travel to peers (copy engine,
    stores by threads, ...); if empty or "auto", the planner chooses it.
    """

    program: CollectiveProgram
    element: str = ""
    engine: str = ""

    def to_node(self) -> dict[str, Any]:
        """Returns the attributes in the form that a node stores. The program remains an object."""
        return {"program": self.program, **without_defaults(self, keep=("program",))}


def program_of(node: Node) -> CollectiveProgram | None:
    """Returns the program of a collective; None for other ops."""
    return node.read(CollectiveAttributes).program if node.type == "collective" else None
