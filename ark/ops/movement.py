"""Ops that move elements: transpose, embedding, rope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.errors import InvalidUsageError, ModelError
from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.attributes import TransposeAttributes
from ark.ir.values import MAX_DIMS, whole
from ark.lower.ops.movement import lower_embedding, lower_rope, lower_transpose
from ark.lower.registry import register
from ark.ops.base import broadcast, float_dtype, index_dtype, result, same_dtype


def transpose(
    input: TensorLike, perm: Sequence[int], output: Output = None, name: str = ""
) -> Tensor:
    """Permutes dimensions: dimension i of the result is dimension perm[i] of the input; any type.

    Raises InvalidUsageError if perm does not contain each dimension once.

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.transpose(x, [1, 0]).eval()
        tensor([[0., 3.],
                [1., 4.],
                [2., 5.]])
    """
    tensor = as_tensor(input)
    shape = tensor.ir.shape
    if not isinstance(perm, Sequence) or isinstance(perm, str) or len(perm) > MAX_DIMS:
        raise InvalidUsageError(
            f"transpose: {perm!r} is not a list of at most {MAX_DIMS} dimensions"
        )
    order = [whole("transpose", p) for p in perm]
    if sorted(order) != list(range(len(shape))):
        raise InvalidUsageError(
            f"transpose: perm {order} must contain each of the {len(shape)} dimensions of the "
            f"shape {list(shape)} exactly once"
        )
    attrs = TransposeAttributes(perm=order).to_node()
    dims = [shape[p] for p in order]
    return result("transpose", [tensor], dims, tensor.ir.dtype, output, attrs, name)


def _transpose(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    return [inputs[0].transpose(TransposeAttributes.from_node(attrs).perm)]


def embedding(
    input: TensorLike, weight: TensorLike, output: Output = None, name: str = ""
) -> Tensor:
    """The rows of `weight` at the indices `input`: result[...] = weight[input[...]].

    input: (...), int32 or int64. weight: (rows, dim), floating point. The result is (..., dim). An
    index out of range ends the run with a GpuError that names it.

    Examples:
        >>> ark.embedding(torch.tensor([2, 0]), torch.arange(6.0).reshape(3, 2)).eval()
        tensor([[4., 5.],
                [0., 1.]])
    """
    ids, table = as_tensor(input), as_tensor(weight)
    index_dtype("embedding", ids)
    dtype = float_dtype("embedding", table)
    if len(table.ir.shape) != 2 or len(ids.ir.shape) >= MAX_DIMS:
        raise ModelError(
            f"embedding: the weight has shape {list(table.ir.shape)} and the indices "
            f"{list(ids.ir.shape)}; expected (rows, dim) and at most {MAX_DIMS - 1} dimensions"
        )
    shape = (*ids.ir.shape, table.ir.shape[1])
    return result("embedding", [ids, table], shape, dtype, output, name=name)


def _embedding(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    return [inputs[1][inputs[0].astype(np.int64)]]


def rope(input: TensorLike, other: TensorLike, output: Output = None, name: str = "") -> Tensor:
    """Multiplies input and other as complex numbers, in a rotary embedding (Su et al. 2021).

    Elements 2i and 2i + 1 of the last dimension are the real and the imaginary part of a number;
    `other` contains cos and sin of the angle by which it is rotated. The last dimensions must be
    equal and even; leading dimensions broadcast. fp32, fp16, bf16. Raises ModelError for other
    sizes.

    Examples:
        >>> ark.rope(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]])).eval()
        tensor([[-2.,  1.]])
    """
    left, right = as_tensor(input), as_tensor(other)
    float_dtype("rope", left)
    dtype = same_dtype("rope", left, right)
    width = left.ir.shape[-1]
    if width % 2 or right.ir.shape[-1] != width:
        raise ModelError(
            f"rope: the last dimensions are {width} and {right.ir.shape[-1]}; they must be equal "
            "and even, because elements rotate in pairs"
        )
    shape = broadcast(left.ir.shape, right.ir.shape, "rope")
    return result("rope", [left, right], shape, dtype, output, name=name)


def _rope(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    a, b = np.broadcast_arrays(*inputs)
    out = np.empty(a.shape, np.float64)
    out[..., 0::2] = a[..., 0::2] * b[..., 0::2] - a[..., 1::2] * b[..., 1::2]
    out[..., 1::2] = a[..., 0::2] * b[..., 1::2] + a[..., 1::2] * b[..., 0::2]
    return [out]


register("transpose", _transpose, lower_transpose, aliasing="none")
register("embedding", _embedding, lower_embedding, aliasing="none")
register("rope", _rope, lower_rope, aliasing="exact")
