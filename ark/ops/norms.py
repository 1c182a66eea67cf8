"""Ops on the rows of a tensor (its last dimension): softmax, its logarithm, layernorm, rmsnorm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.errors import ModelError
from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.attributes import NormAttributes
from ark.ir.dtype import by_name
from ark.lower.ops.norms import lower_row_norm
from ark.lower.registry import register
from ark.ops.base import float_dtype, result


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
    """The NumPy reference of rounded_rmsnorm. It rounds the normalised rows to the attribute `type`
    before it multiplies them by the weight.
    """
    (normed,) = _rmsnorm([inputs[0], np.ones(1)], attrs)
    kind = by_name(NormAttributes.from_node(attrs).type)
    return [normed.astype(kind.numpy).astype(normed.dtype) * inputs[1]]


register("softmax", _softmax, lower_row_norm, aliasing="exact")


register("safe_softmax", _safe_softmax, lower_row_norm, aliasing="exact")


register("log_softmax", _log_softmax, lower_row_norm, aliasing="exact")


register("layernorm", _layernorm, lower_row_norm, aliasing="exact")


register("rmsnorm", _rmsnorm, lower_row_norm, aliasing="exact")


register("rounded_rmsnorm", _rounded_rmsnorm, lower_row_norm, aliasing="exact")


def softmax(input: TensorLike, output: Output = None, name: str = "") -> Tensor:
    """Softmax over the last dimension; fp32, fp16, bf16.

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.softmax(x).eval()
        tensor([[0.0900, 0.2447, 0.6652],
                [0.0900, 0.2447, 0.6652]])
    """
    tensor = as_tensor(input)
    dtype = float_dtype("softmax", tensor)
    return result("softmax", [tensor], tensor.ir.shape, dtype, output, name=name)


def safe_softmax(input: TensorLike, output: Output = None, name: str = "") -> Tensor:
    """Softmax over the last dimension that gives zeros for a row of only -inf; fp32, fp16, bf16.

    Attention needs it for rows whose keys are all masked.

    Examples:
        >>> x = torch.tensor([[0.0, 1.0], [float("-inf"), float("-inf")]])
        >>> ark.safe_softmax(x).eval()
        tensor([[0.2689, 0.7311],
                [0.0000, 0.0000]])
    """
    tensor = as_tensor(input)
    dtype = float_dtype("safe_softmax", tensor)
    return result("safe_softmax", [tensor], tensor.ir.shape, dtype, output, name=name)


def log_softmax(input: TensorLike, output: Output = None, name: str = "") -> Tensor:
    """Logarithm of the softmax over the last dimension; any shape; fp32, fp16, bf16.

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.log_softmax(x).eval()
        tensor([[-2.4076, -1.4076, -0.4076],
                [-2.4076, -1.4076, -0.4076]])
    """
    tensor = as_tensor(input)
    dtype = float_dtype("log_softmax", tensor)
    return result("log_softmax", [tensor], tensor.ir.shape, dtype, output, name=name)


def layernorm(
    input: TensorLike, eps: float = 1e-6, output: Output = None, name: str = ""
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) over the last dimension; any shape; fp32, fp16, bf16.

    Layer normalisation (Ba et al. 2016), without weight and bias.

    Examples:
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
    input: TensorLike, weight: TensorLike, eps: float = 1e-6, output: Output = None, name: str = ""
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019).

    x is the input: fp32, fp16, bf16. weight: (columns,), of the input's type or fp32. Raises
    ModelError if the weight has another shape.

    Examples:
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
