"""Helpers for device functions that process lines (all elements along one axis) or windows of a
tensor: shapes and source texts.

Used by the task kinds `scan`, `scatter` and `pool`, and by the ops and lowerings that create their
tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.plan.kind import OperandType
from ark.tasks import expression, text
from ark.tasks.box_text import NAMES
from ark.tasks.elementwise import HEADERS

ALONG = (*HEADERS, text.header("folds.h"), text.header("along.h"))


def lines(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """The given shape with size 1 at the axis. It has one element for each line along the axis."""
    return (*shape[:axis], 1, *shape[axis + 1 :])


def indices(shape: Sequence[int]) -> list[str]:
    """The source texts of an element's index in each dimension of a shape. They use the device
    loop's four indices i0 to i3.
    """
    return text.indices(shape, NAMES)[-len(shape) :]


def join(function: str, operand: OperandType) -> str:
    """The name of the device function that combines two values (such as a sum or maximum) in the
    type in which the operand's elements are computed.
    """
    compute = expression.value_type(operand.dtype)
    tree = ["input", 1] if function == "set" else [function, ["input", 0], ["input", 1]]
    writer = expression.Writer([("now", compute), ("more", compute)], text.literal)
    result, _ = writer.write(tree)
    lines = "".join(f"{line} " for line in writer.statements)
    return f"[&]({compute} now, {compute} more) {{ (void)now; {lines}return {result}; }}"
