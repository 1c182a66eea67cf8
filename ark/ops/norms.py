"""Ops over rows, the last dimension: softmax and its logarithm, layernorm, rmsnorm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.errors import ModelError, PlanError
from ark.frontend.tensor import NullTensor, Tensor, TensorLike, as_tensor
from ark.ir.attributes import NormAttributes
from ark.ir.dtype import by_name
from ark.ir.fold import fold
from ark.ir.graph import Node
from ark.ir.values import Tensor as IrTensor
from ark.ir.values import dense_view
from ark.lower.context import Lowering
from ark.lower.registry import register
from ark.lower.tiling import box_coords
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.ops.base import float_dtype, result
from ark.tasks.movement import ArgMaxParams
from ark.tasks.rows import RowNormParams

NARROW = 2  # bytes of elements whose rows are dealt
IDLE = 20  # of so many processors one may have no rows
MOST_LINES = 1 << 30  # of one dimension, which a task's coordinates count
FEW = 1024  # elements of rows that one task normalises in the time of one row


def lower_rows(lowering: Lowering, node: Node) -> None:
    """Tasks of whole rows: one a processor, or of a few short rows that take the time of one."""
    (source, *others), out, machine = node.inputs, node.outputs[0], lowering.machine
    row = out.shape[-1:]
    others = [t if t.shape == row else lowering.view(t, row) for t in others]
    few = 1
    if node.hints is None and machine.cooperative:
        columns = source.shape[-1]
        few = min(2 * machine.warps, max(1, FEW // columns))
    if node.hints is None and len(out.shape) > 2 and math.prod(out.shape[:-1]) <= MOST_LINES:
        source, out = _flat(lowering, source, out)
    shape = fold(out.shape)
    rows = max(few, -(-shape[0] * shape[1] * shape[2] // machine.processors))
    rows = max(1, min(rows, shape[2]))
    asked = lowering.tile((*shape[:3], 1), fixed=(0, 1), shown=_whole_rows(node))
    if asked:
        rows = asked[2]
    coords = box_coords((*shape[:3], 1), (1, 1, rows, 1))
    many = _dealt(source, out, machine) if node.hints is None and node.type != "argmax" else 0
    if many:
        apart = (out.shape[0] // many, many, out.shape[1])
        source, out = lowering.view(source, apart), lowering.view(out, apart)
        params = RowNormParams(node.type, apart[0], node.read(NormAttributes).eps, dealt=True)
        coords = [(0, 0, i, 0) for i in range(many)]
        lowering.emit("rownorm", params, [source, *others, out], coords)
        return
    if node.type == "argmax":
        lowering.emit("argmax", ArgMaxParams(rows), [source, *others, out], coords)
        return
    params = RowNormParams(node.type, rows, node.read(NormAttributes).eps)
    lowering.emit("rownorm", params, [source, *others, out], coords)


def is_large(out: IrTensor, machine: Machine) -> bool:
    """True for a result whose rows are worth dealing."""
    return out.nbytes >= machine.costs.deal_bytes


def _dealt(source: IrTensor, out: IrTensor, machine: Machine) -> int:
    """Processors that many rows of a large matrix are dealt to one by one; 0 for none.

    So all go through memory together. 0 where they are not, where rows are claimed instead, or
    where too many processors would have no rows. Rows of wider elements, which some backends bring
    several ahead, are faster as they lie.
    """
    rows = out.shape[0]
    large = is_large(out, machine) and out.dtype.itemsize <= NARROW
    if (
        not large
        or machine.has(Capability.CLAIMS)
        or not machine.cooperative
        or len(out.shape) != 2
        or source.shape != out.shape
    ):
        return 0
    if not (source.dense and out.dense):
        return 0
    some = range(machine.processors, machine.processors - machine.processors // IDLE - 1, -1)
    return next((p for p in some if p > 0 and rows % p == 0), 0)


def _flat(lowering: Lowering, source: IrTensor, out: IrTensor) -> tuple[IrTensor, IrTensor]:
    """Both as matrices, where memory allows it."""
    rows = out.elements // out.shape[-1]
    flat = [(rows, t.shape[-1]) for t in (source, out)]
    if any(dense_view(t, dims) is None for t, dims in zip((source, out), flat, strict=True)):
        return source, out
    return lowering.view(source, flat[0]), lowering.view(out, flat[1])


def _whole_rows(node: Node) -> list[int] | None:
    """The hinted tile with one index in the place of a whole row; PlanError for a part of one."""
    if node.hints is None or node.hints.tile is None:
        return None
    *others, columns = node.hints.tile
    if columns < node.outputs[0].shape[-1]:
        raise PlanError(
            f"op {node.name!r}: a tile {list(node.hints.tile)} holds a part of a row of "
            f"{node.outputs[0].shape[-1]}, and a task of {node.type} computes whole rows"
        )
    return [*others, 1]


def _softmax(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    e = np.exp(inputs[0] - inputs[0].max(axis=-1, keepdims=True))
    return [e / e.sum(axis=-1, keepdims=True)]


def _safe_softmax(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    most = inputs[0].max(axis=-1, keepdims=True)
    e = np.exp(inputs[0] - np.where(most == -np.inf, 0.0, most))
    total = e.sum(axis=-1, keepdims=True)
    return [e / np.where(total == 0.0, 1.0, total)]


def _log_softmax(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    shifted = inputs[0] - inputs[0].max(axis=-1, keepdims=True)
    return [shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))]


def _layernorm(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    x, *given = inputs
    normed = (x - x.mean(-1, keepdims=True)) / np.sqrt(
        x.var(-1, keepdims=True) + NormAttributes.from_node(attrs).eps
    )
    for row, join in zip(given, (np.multiply, np.add), strict=False):
        normed = join(normed, row.reshape(-1))
    return [normed]


def _rmsnorm(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    x = inputs[0]
    return [
        x
        / np.sqrt((x * x).mean(-1, keepdims=True) + NormAttributes.from_node(attrs).eps)
        * inputs[1]
    ]


def _rounded_rmsnorm(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """Rows are rounded before they are multiplied by the weight."""
    (normed,) = _rmsnorm([inputs[0], np.ones(1)], attrs)
    kind = by_name(NormAttributes.from_node(attrs).type)
    return [normed.astype(kind.numpy).astype(normed.dtype) * inputs[1]]


register("softmax", _softmax, lower_rows, aliasing="exact")


register("safe_softmax", _safe_softmax, lower_rows, aliasing="exact")


register("log_softmax", _log_softmax, lower_rows, aliasing="exact")


register("layernorm", _layernorm, lower_rows, aliasing="exact")


register("rmsnorm", _rmsnorm, lower_rows, aliasing="exact")


register("rounded_rmsnorm", _rounded_rmsnorm, lower_rows, aliasing="exact")


def softmax(input: TensorLike, output: TensorLike | None = NullTensor, name: str = "") -> Tensor:
    """Softmax over the last dimension; fp32, fp16, bf16.

    Example:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.softmax(x).eval()
        tensor([[0.0900, 0.2447, 0.6652],
                [0.0900, 0.2447, 0.6652]])
    """
    tensor = as_tensor(input)
    dtype = float_dtype("softmax", tensor)
    return result("softmax", [tensor], tensor.ir.shape, dtype, output, name=name)


def safe_softmax(
    input: TensorLike, output: TensorLike | None = NullTensor, name: str = ""
) -> Tensor:
    """Softmax over the last dimension, zeros where all elements are -inf; fp32, fp16, bf16.

    Attention has it of a row whose keys are all masked.

    Example:
        >>> x = torch.tensor([[0.0, 1.0], [float("-inf"), float("-inf")]])
        >>> ark.safe_softmax(x).eval()
        tensor([[0.2689, 0.7311],
                [0.0000, 0.0000]])
    """
    tensor = as_tensor(input)
    dtype = float_dtype("safe_softmax", tensor)
    return result("safe_softmax", [tensor], tensor.ir.shape, dtype, output, name=name)


def log_softmax(
    input: TensorLike, output: TensorLike | None = NullTensor, name: str = ""
) -> Tensor:
    """Logarithm of the softmax over the last dimension; any shape; fp32, fp16, bf16.

    Example:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.log_softmax(x).eval()
        tensor([[-2.4076, -1.4076, -0.4076],
                [-2.4076, -1.4076, -0.4076]])
    """
    tensor = as_tensor(input)
    dtype = float_dtype("log_softmax", tensor)
    return result("log_softmax", [tensor], tensor.ir.shape, dtype, output, name=name)


def layernorm(
    input: TensorLike, eps: float = 1e-6, output: TensorLike | None = NullTensor, name: str = ""
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) over the last dimension; any shape; fp32, fp16, bf16.

    Layer normalisation (Ba et al. 2016), without weight and bias.

    Example:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.layernorm(x).eval()
        tensor([[-1.2247,  0.0000,  1.2247],
                [-1.2247,  0.0000,  1.2247]])
    """
    tensor = as_tensor(input)
    dtype = float_dtype("layernorm", tensor)
    attrs = NormAttributes(eps=float(eps)).to_node()
    return result("layernorm", [tensor], tensor.ir.shape, dtype, output, attrs, name)


def rmsnorm(
    input: TensorLike,
    weight: TensorLike,
    eps: float = 1e-6,
    output: TensorLike | None = NullTensor,
    name: str = "",
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019).

    weight: (columns,), of the input's type or fp32.

    Example:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.rmsnorm(x, torch.ones(3)).eval()
        tensor([[0.0000, 0.7746, 1.5492],
                [0.7348, 0.9798, 1.2247]])
    """
    tensor, scale = as_tensor(input), as_tensor(weight)
    dtype = float_dtype("rmsnorm", tensor)
    float_dtype("rmsnorm", scale)
    if scale.ir.shape != tensor.ir.shape[-1:]:
        raise ModelError(
            f"rmsnorm: the weight has shape {list(scale.ir.shape)}, but rows have "
            f"{tensor.ir.shape[-1]} columns; pass a weight of shape [{tensor.ir.shape[-1]}]"
        )
    attrs = NormAttributes(eps=float(eps)).to_node()
    return result("rmsnorm", [tensor, scale], tensor.ir.shape, dtype, output, attrs, name)
