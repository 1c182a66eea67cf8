"""ATen operators for matmuls, convolutions, pools and resizing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

import ark
from ark.interop.torch.values import Call, Value, operator, refuse

TF32 = "tf32"
# torch 2.9 and later set the precision of fp32 matrix products by name ("tf32", "ieee"). torch
# still offers its older boolean switches, but reading one raises an error if it cannot express the
# precision that is set.
NAMED = hasattr(torch.backends.cudnn, "conv")


def products_as_tf32(like: Value) -> bool:
    """True if torch's settings say that fp32 matrices are multiplied as tf32."""
    matmul = torch.backends.cuda.matmul
    allowed = matmul.fp32_precision == TF32 if NAMED else matmul.allow_tf32
    return like.dtype == torch.float32 and bool(allowed)


def convolutions_as_tf32(dtype: torch.dtype) -> bool:
    """True for fp32 if torch's settings say that convolutions are computed as tf32, which is the
    default.
    """
    cudnn: Any = torch.backends.cudnn  # typed without precisions of their own
    allowed = cudnn.conv.fp32_precision == TF32 if NAMED else cudnn.allow_tf32
    return dtype == torch.float32 and bool(allowed)


def _product(a: Value, left: ark.Tensor, right: ark.Tensor) -> ark.Tensor:
    return ark.matmul(left, right, tf32=products_as_tf32(a))


@operator("mm.default", "bmm.default")
def _mm(call: Call, a: Value, b: Value) -> Any:
    return _product(a, a.tensor, b.tensor)


@operator("mv.default")
def _mv(call: Call, a: Value, b: Value) -> Any:
    return _product(a, a.tensor, ark.reshape(b.tensor, [b.shape[0], 1]))


@operator("dot.default")
def _dot(call: Call, a: Value, b: Value) -> Any:
    return ark.reduce_sum(ark.mul(a.tensor, b.tensor), 0)


@operator("matmul.default")
def _matmul(call: Call, a: Value, b: Value) -> Any:
    left = ark.reshape(a.tensor, [1, -1]) if len(a.shape) == 1 else a.tensor
    right = ark.reshape(b.tensor, [-1, 1]) if len(b.shape) == 1 else b.tensor
    return _product(a, left, right)


@operator("addmm.default", "baddbmm.default", "addmv.default")
def _addmm(call: Call, x: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1) -> Any:
    if not x.dtype.is_floating_point:
        raise refuse("a product of integers")
    product = _mv(call, a, b) if len(b.shape) == 1 else _mm(call, a, b)
    product = ark.reshape(product, list(call.shape))
    product = product if alpha == 1 else ark.mul(product, float(alpha))
    if beta == 0:
        return product
    return ark.add(product, x.tensor if beta == 1 else ark.mul(x.tensor, float(beta)))


@operator("linear.default")
def _linear(call: Call, x: Value, weight: Value, bias: Value | None = None) -> Any:
    rows = ark.reshape(x.tensor, [-1, x.tensor.ir.shape[-1]])
    table = ark.reshape(weight.tensor, [-1, rows.ir.shape[1]])
    output = ark.linear(rows, table, tf32=products_as_tf32(x))
    return output if bias is None else ark.add(output, bias.tensor)


@operator("convolution.default")
def _convolution(
    call: Call,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    count = len(x.shape) - 2

    def each(values: Sequence[int]) -> list[int]:
        return list(values) * count if len(values) == 1 else list(values)

    given = None if bias is None else bias.tensor
    steps, pads, spread = each(stride), each(padding), each(dilation)
    tf32 = convolutions_as_tf32(x.dtype)
    if transposed:
        more = each(output_padding)
        return ark.conv_transpose(
            x.tensor, weight.tensor, given, steps, pads, more, spread, groups, tf32=tf32
        )
    return ark.conv(x.tensor, weight.tensor, given, steps, pads, spread, groups, tf32=tf32)


def _images(x: Value, count: int) -> ark.Tensor:
    """The tensor with dimensions of size 1 added in front, so that it has a batch, channels and
    `count` spatial dimensions.
    """
    lead = [1] * (count + 2 - len(x.shape))
    return ark.reshape(x.tensor, [*lead, *x.shape])


def _max_pool(
    call: Call,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:
    count = len(kernel) if len(kernel) > 1 else 2

    def each(values: Any) -> list[int]:
        listed = [values] if isinstance(values, int) else list(values)
        return listed * count if len(listed) == 1 else listed

    sizes = each(kernel)
    steps = each(stride) if stride else sizes
    return ark.max_pool(
        _images(x, count), sizes, steps, each(padding), each(dilation), bool(ceil_mode)
    )


@operator("max_pool2d_with_indices.default", "max_pool3d_with_indices.default")
def _max_pool_with_indices(call: Call, x: Value, *rest: Any, **named: Any) -> list[Any]:
    if call.wants(1):
        raise refuse("a pool that returns indices")
    return [_max_pool(call, x, *rest, **named), None]


operator("max_pool2d.default", "max_pool3d.default")(_max_pool)


@operator("avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default")
def _avg_pool(
    call: Call,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    if divisor_override is not None:
        raise refuse("an average pool with a divisor of its own")
    count = len(kernel)
    pads = [padding] * count if isinstance(padding, int) else list(padding)
    pads = pads * count if len(pads) == 1 else pads
    steps = list(stride) or list(kernel)
    return ark.avg_pool(
        _images(x, count),
        list(kernel),
        steps * count if len(steps) == 1 else steps,
        pads,
        1,
        bool(ceil_mode),
        bool(count_include_pad),
    )


@operator("_adaptive_avg_pool2d.default", "_adaptive_avg_pool3d.default")
def _adaptive_avg_pool(call: Call, x: Value, sizes: Sequence[int]) -> Any:
    count = len(sizes)
    sizes_before = x.shape[-count:]
    if any(n % m for n, m in zip(sizes_before, sizes, strict=True)):
        raise refuse(f"an adaptive pool from {list(sizes_before)} to {list(sizes)}")
    return ark.avg_pool(
        _images(x, count), [n // m for n, m in zip(sizes_before, sizes, strict=True)]
    )


@operator("upsample_nearest2d.vec", "upsample_nearest2d.default", "upsample_nearest1d.vec")
def _nearest(call: Call, x: Value, *_: Any) -> Any:
    sizes = call.shape[2:]
    if any(m % n for n, m in zip(x.shape[2:], sizes, strict=True)):
        raise refuse("nearest resizing by a factor that is not an integer")
    return ark.resize(x.tensor, sizes, "nearest", "half_pixel")


@operator("upsample_bilinear2d.vec")
def _bilinear(call: Call, x: Value, size: Any, align_corners: bool, scales: Any) -> Any:
    if size is None and any(
        math.floor(n * s) != n * s for n, s in zip(x.shape[2:], scales, strict=True)
    ):
        raise refuse("bilinear resizing by a factor that does not give an integer size")
    return ark.resize(
        x.tensor, call.shape[2:], "linear", "align_corners" if align_corners else "half_pixel"
    )
