"""Unpacks tensors of 4-bit elements for ops that only move elements. The elements are cast to a
type with at least one byte per element, moved, and cast back. Called by the lowerings of these ops.
"""

from __future__ import annotations

from ark.ir.dtype import bf16, int8
from ark.ir.graph import Node
from ark.ir.values import Tensor
from ark.lower.context import Lowering
from ark.lower.registry import get


def unpacked(lowering: Lowering, tensor: Tensor, fill: bool = True) -> Tensor:
    """A dense temporary for the elements of a tensor with several elements per byte. Its type has
    at least a byte per element and represents all values of the tensor's type. fill: True to copy
    the values into it.
    """
    dtype = bf16 if tensor.dtype.name == "fp4" else int8
    wide = lowering.temp(tensor.shape, dtype, f"{tensor.name}.unpacked")
    if fill:
        convert(lowering, tensor, wide)
    return wide


def convert(lowering: Lowering, source: Tensor, target: Tensor) -> None:
    """Emits a cast of one tensor into another of the same shape."""
    get("cast").lower(lowering, Node(0, "cast", "cast", (source,), (target,)))
