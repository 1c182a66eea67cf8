"""ATen's softmax, log-softmax and similar operators, over any dimension."""

from __future__ import annotations

import math
from typing import Any

import ark
from ark.interop.torch.values import Call, Value, axes_of, axis_of, cast, floating, operator
from ark.ops.gradients.products import wide

# Rows of at least MIN_LONG_ROW_ELEMENTS elements are divided among processors if there are at most
# MAX_LONG_ROWS of them: one row per processor would leave processors idle.
MIN_LONG_ROW_ELEMENTS, MAX_LONG_ROWS = 32768, 64


@operator("_softmax.default", "softmax.int")
def _softmax(call: Call, x: Value, dim: int, *_: Any, **__: Any) -> Any:
    return _along(cast(x, call.dtype), axis_of(dim, len(x.shape)), False)


@operator("_safe_softmax.default")
def _safe_softmax(call: Call, x: Value, dim: int, *_: Any, **__: Any) -> Any:
    """Softmax that gives 0 if all elements are -inf, for example in a row whose keys are all
    masked.
    """
    tensor, axis = cast(x, call.dtype), axis_of(dim, len(x.shape))
    if axis == len(tensor.ir.shape) - 1:
        return ark.safe_softmax(tensor)
    most = ark.reduce_max(tensor, axis)
    nothing = ark.logical_and(ark.isinf(most), ark.less(most, 0.0))
    return ark.where(nothing, 0.0, _along(tensor, axis, False))


@operator("_log_softmax.default", "log_softmax.int")
def _log_softmax(call: Call, x: Value, dim: int, *_: Any, **__: Any) -> Any:
    return _along(cast(x, call.dtype), axis_of(dim, len(x.shape)), True)


@operator("logsumexp.default")
def _logsumexp(call: Call, x: Value, dims: Any, keepdim: bool = False) -> Any:
    return ark.logsumexp(floating(x), axes_of(dims, len(x.shape)))


def _along(tensor: ark.Tensor, axis: int, logarithm: bool) -> ark.Tensor:
    """Softmax over an axis, or its logarithm. Contiguous rows become one op. For other axes, and
    for few long rows, it is computed from a maximum and a sum.
    """
    shape = tensor.shape()
    if math.prod(shape[axis + 1 :]) > 1 or (
        shape[axis] >= MIN_LONG_ROW_ELEMENTS and math.prod(shape[:axis]) <= MAX_LONG_ROWS
    ):
        return _apart(tensor, axis, logarithm)
    function = ark.log_softmax if logarithm else ark.softmax
    return ark.reshape(function(ark.reshape(tensor, [*shape[:axis], -1])), shape)


def _apart(tensor: ark.Tensor, axis: int, logarithm: bool) -> ark.Tensor:
    """Softmax over an axis, or its logarithm, computed by separate ops from a maximum and a sum.
    Intermediate values are fp32. Each op that needs the exponentials computes them again, so that
    they are not stored.
    """
    dtype = tensor.ir.dtype
    most = wide(ark.detach(ark.reduce_max(tensor, axis)))

    def below() -> ark.Tensor:
        return ark.sub(wide(tensor), most)

    total = ark.reduce_sum(ark.exp(below()), axis)
    result = (
        ark.sub(below(), ark.ln(total))
        if logarithm
        else ark.mul(ark.exp(below()), ark.div(1.0, total))
    )
    return result if dtype == ark.fp32 else ark.cast(result, dtype)
