"""Indices of a tensor, `t[1:3, 0]`, as ranges. Called by ark.frontend.tensor."""

from __future__ import annotations

from typing import Any

from ark.errors import InvalidUsageError, UnsupportedError


def index_range(part: Any, size: int) -> tuple[int, int]:
    """The range of indices that an integer or a slice of step 1 selects: the first index, and the
    one after the last.
    """
    if isinstance(part, slice):
        if part.step not in (None, 1):
            raise UnsupportedError(
                f"a slice with step {part.step} is not supported; the step must be 1"
            )
        begin, end, _ = part.indices(size)
        if end <= begin:
            raise InvalidUsageError(f"the slice {part} of a dimension of {size} has no elements")
        return begin, end
    if isinstance(part, int) and not isinstance(part, bool):
        if not -size <= part < size:
            raise InvalidUsageError(f"the index {part} is out of range for a dimension of {size}")
        return part % size, part % size + 1
    raise InvalidUsageError(f"an index is an integer or a slice, got {type(part).__name__}")
