"""The tensor that users hold: a value of a model's graph, with access to its memory once launched."""

from __future__ import annotations

from typing import Any

from ark.errors import InvalidUsageError
from ark.ir import tensor as ir
from ark.ir.dtype import DataType
from ark.model import Model


class Tensor:
    """A value of the current model."""

    def __init__(self, made: ir.Tensor, model: Model) -> None:
        self.ir = made
        self.model = model

    def shape(self) -> list[int]:
        """Sizes per dimension."""
        return list(self.ir.shape)

    def strides(self) -> list[int]:
        """The extent of the underlying buffer per dimension (ARK's meaning of the word)."""
        return list(self.ir.extents)

    def nelems(self) -> int:
        """Number of elements."""
        return self.ir.elements

    def dtype(self) -> DataType:
        """The element type."""
        return self.ir.dtype


NullTensor: Any = None


def as_tensor(value: Any) -> Tensor:
    """The tensor itself; InvalidUsageError for anything that is not one."""
    if isinstance(value, Tensor):
        return value
    raise InvalidUsageError(f"expected a tensor, got {type(value).__name__}; make one with ark.tensor")
