"""Converts ONNX's matrix products, convolutions, pools and resizing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import ark
from ark.errors import ModelError
from ark.interop.onnx.values import Call, Value, operator, refuse, shaped
from ark.ir.dtype import FLOATS

Pairs = list[tuple[int, int]]


@operator("MatMul")
def _matmul(call: Call) -> Value:
    left, right = call.shape(0), call.shape(1)
    if not left or not right:
        raise ModelError("a matrix product needs at least one dimension")
    batch = np.broadcast_shapes(left[:-2], right[:-2])
    rows = () if len(left) == 1 else left[-2:-1]
    columns = () if len(right) == 1 else right[-1:]
    return shaped(multiplied(call.tensor(0), call.tensor(1)), (*batch, *rows, *columns))


def multiplied(a: Any, b: Any) -> Any:
    """The matrix product of two tensors. A vector is treated as one row or column."""
    left, right = a.ir.shape, b.ir.shape
    a = ark.reshape(a, [1, *left]) if len(left) == 1 else a
    b = ark.reshape(b, [*right, 1]) if len(right) == 1 else b
    return ark.matmul(a, b)


@operator("Gemm")
def _gemm(call: Call) -> Value:
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    left, right = bool(call.attribute("transA", 0)), bool(call.attribute("transB", 0))
    a, b = call.shape(0), call.shape(1)
    product = ark.matmul(
        call.tensor(0), call.tensor(1), transpose_input=left, transpose_other=right
    )
    product = product if alpha == 1.0 else ark.mul(product, alpha)
    if call.has(2) and beta != 0.0:
        added = call.tensor(2)
        product = ark.add(product, added if beta == 1.0 else ark.mul(added, beta))
    return shaped(product, (a[1] if left else a[0], b[0] if right else b[1]))


def pads_of(call: Call, sizes: tuple[int, ...], kernel: list[int]) -> Pairs:
    """The padding (before, after) of each spatial dimension, from the attribute `pads` or
    `auto_pad`.
    """
    rule, rank = call.attribute("auto_pad", "NOTSET"), len(sizes)
    strides = call.attribute("strides", [1] * rank)
    dilations = call.attribute("dilations", [1] * rank)
    if rule in ("NOTSET", "VALID"):
        flat = call.attribute("pads", [0] * 2 * rank) if rule == "NOTSET" else [0] * 2 * rank
        return list(zip(flat[:rank], flat[rank:], strict=True))
    pairs = []
    for n, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        whole = max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n)
        small, large = whole // 2, whole - whole // 2
        pairs.append((small, large) if rule == "SAME_UPPER" else (large, small))
    return pairs


@operator("Conv")
def _conv(call: Call) -> Value:
    bias = call.tensor(2) if call.has(2) else None
    tensor = convolved(call, call.tensor(0), call.tensor(1), bias)
    return shaped(tensor, tensor.ir.shape)


def convolved(call: Call, x: Any, weight: Any, bias: Any) -> Any:
    """A convolution of x with these weights, with the attributes of the call."""
    shape = x.ir.shape
    rank = len(shape) - 2
    return ark.conv(
        x,
        weight,
        bias,
        stride=list(call.attribute("strides", [1] * rank)),
        padding=pads_of(call, shape[2:], list(weight.ir.shape[2:])),
        dilation=list(call.attribute("dilations", [1] * rank)),
        groups=call.attribute("group", 1),
    )


@operator("ConvTranspose")
def _conv_transpose(call: Call) -> Value:
    shape, weight = call.shape(0), call.shape(1)
    rank = len(shape) - 2
    stride = list(call.attribute("strides", [1] * rank))
    dilation = list(call.attribute("dilations", [1] * rank))
    added = list(call.attribute("output_padding", [0] * rank))
    rule, wanted = call.attribute("auto_pad", "NOTSET"), call.attribute("output_shape")
    flat = call.attribute("pads", [0] * 2 * rank)
    pads = list(zip(flat[:rank], flat[rank:], strict=True))
    if wanted is None and rule.startswith("SAME"):
        wanted = [n * s for n, s in zip(shape[2:], stride, strict=True)]
    if wanted is not None:
        pads = []
        for i, size in enumerate(wanted):
            full = stride[i] * (shape[2 + i] - 1) + added[i] + (weight[2 + i] - 1) * dilation[i] + 1
            small, large = (full - size) // 2, (full - size) - (full - size) // 2
            if full < size:
                raise refuse("ConvTranspose to an output larger than the full one")
            pads.append((small, large) if rule == "SAME_UPPER" else (large, small))
    tensor = ark.conv_transpose(
        call.tensor(0),
        call.tensor(1),
        call.tensor(2) if call.has(2) else None,
        stride=stride,
        padding=pads,
        output_padding=added,
        dilation=dilation,
        groups=call.attribute("group", 1),
    )
    return shaped(tensor, tensor.ir.shape)


def pool(function: Callable[..., Any], mean: bool) -> Callable[[Call], Value]:
    """Returns the converter of a pool operator. function: ark's pool. mean: True for an average
    pool.
    """

    def run(call: Call) -> Value:
        shape, kernel = call.shape(0), list(call.attribute("kernel_shape"))
        words: dict[str, Any] = {
            "stride": list(call.attribute("strides", [1] * len(kernel))),
            "padding": pads_of(call, shape[2:], kernel),
            "dilation": list(call.attribute("dilations", [1] * len(kernel))),
            "ceil": bool(call.attribute("ceil_mode", 0)),
        }
        if mean:
            words["count_include_pad"] = bool(call.attribute("count_include_pad", 0))
        given = call.tensor(0)
        if given.ir.dtype in FLOATS or mean:
            tensor = function(given, kernel, **words)
        else:  # the standard's integer types have 8 bits, which fp32 holds exactly
            tensor = ark.cast(function(ark.cast(given, ark.fp32), kernel, **words), given.ir.dtype)
        return shaped(tensor, tensor.ir.shape)

    return run


operator("AveragePool")(pool(ark.avg_pool, mean=True))


def _global(function: Callable[..., Any]) -> Callable[[Call], Value]:
    def run(call: Call) -> Value:
        shape = call.shape(0)
        return shaped(function(call.tensor(0)), (*shape[:2], *[1] * (len(shape) - 2)))

    return run


operator("GlobalAveragePool")(_global(ark.global_avg_pool))
operator("GlobalMaxPool")(_global(ark.global_max_pool))
