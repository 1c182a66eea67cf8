"""Shapes, indices and headers of bodies that process lines along one axis, or windows.

Used by the kinds `scan`, `scatter` and `pool`, and by the ops and lowerings that make their tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.plan.kind import OperandType
from ark.tasks import expression, text
from ark.tasks.box_text import NAMES
from ark.tasks.elementwise import HEADERS

ALONG = (*HEADERS, text.header("folds.h"), text.header("along.h"))


def lines(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """The shape of the lines along the axis: the same shape with size 1 at the axis."""
    return (*shape[:axis], 1, *shape[axis + 1 :])


def indices(shape: Sequence[int]) -> list[str]:
    """Source texts of the indices in all dimensions of a shape."""
    return text.indices(shape, NAMES)[-len(shape) :]


def join(function: str, operand: OperandType) -> str:
    """The device function that combines two values, for the type in which the operand's elements
    are computed.
    """
    compute = expression.value_type(operand.dtype)
    tree = ["input", 1] if function == "set" else [function, ["input", 0], ["input", 1]]
    writer = expression.Writer([("now", compute), ("more", compute)], text.literal)
    result, _ = writer.write(tree)
    lines = "".join(f"{line} " for line in writer.statements)
    return f"[&]({compute} now, {compute} more) {{ (void)now; {lines}return {result}; }}"
