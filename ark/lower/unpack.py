"""Rewrites ops on 4-bit elements as ops on whole bytes where the op only moves elements.

Called by the lowerings of ops that move elements.
"""

from __future__ import annotations

from ark.ir.dtype import bf16, int8
from ark.ir.graph import Node
from ark.ir.values import Tensor
from ark.lower.context import Lowering
from ark.lower.registry import get


def unpacked(lowering: Lowering, tensor: Tensor, fill: bool = True) -> Tensor:
    """A dense temporary of the tensor's shape in which every value of its type has a byte or more;
    with its values if asked.
    """
    dtype = bf16 if tensor.dtype.name == "fp4" else int8
    wide = lowering.temp(tensor.shape, dtype, f"{tensor.name}.unpacked")
    if fill:
        convert(lowering, tensor, wide)
    return wide


def convert(lowering: Lowering, source: Tensor, target: Tensor) -> None:
    """Casts one tensor into another of its shape."""
    get("cast").lower(lowering, Node(0, "cast", "cast", (source,), (target,)))
