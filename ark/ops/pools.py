"""Pooling of (n, channels, spatial...) tensors: the largest element or the mean of each window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.errors import ModelError
from ark.frontend.tensor import NullTensor, Tensor, TensorLike, as_tensor
from ark.ir.attributes import PoolAttributes, WindowAttributes
from ark.ir.pool_attributes import UnpoolAttributes
from ark.lower.ops.pools import lower_pool, lower_unpool
from ark.lower.registry import register
from ark.ops.base import float_dtype, result
from ark.ops.indexing import pad
from ark.ops.reductions import reduce_max, reduce_mean
from ark.ops.windows import Numbers, Padding, numbers, padding_pairs, spatial


def _pool(
    function: str,
    input: Any,
    kernel: Numbers,
    stride: Numbers | None,
    padding: Any,
    dilation: Numbers,
    ceil: bool,
    counted: bool,
    name: str,
) -> Tensor:
    tensor = as_tensor(input)
    op = f"{function}_pool"
    dtype = float_dtype(op, tensor)
    count = spatial(op, tensor)
    size = numbers(op, "kernel", kernel, count, 1)
    steps = numbers(op, "stride", size if stride is None else stride, count, 1)
    spread = numbers(op, "dilation", dilation, count, 1)
    pads = padding_pairs(op, padding, count)
    sizes = []
    for n, k, s, d, (a, b) in zip(tensor.ir.shape[2:], size, steps, spread, pads, strict=True):
        room = n + a + b - (k - 1) * d - 1
        places = (-(-room // s) if ceil else room // s) + 1
        # The last window must begin inside of the input or in the padding before it. So with
        # `ceil`, a last window that would begin after the input is omitted.
        sizes.append(places - 1 if ceil and (places - 1) * s >= n + a else places)
        if room < 0 or a >= k * d:
            raise ModelError(
                f"{op}: a window of size {size} with padding {pads} does not fit the input of "
                f"shape {list(tensor.ir.shape)}"
            )
    shape = (*tensor.ir.shape[:2], *sizes)
    room_of = zip(tensor.ir.shape[2:], sizes, size, steps, spread, pads, strict=True)
    if counted and any(
        (m - 1) * s + (k - 1) * d + 1 > n + a + b for n, m, k, s, d, (a, b) in room_of
    ):
        # torch's mean counts padding. With ceil=True, a window may extend beyond the padding; torch
        # does not count its elements there. So the input is padded first, and the mean counts the
        # elements of the padded input.
        tensor = pad(tensor, [(0, 0), (0, 0), *pads])
        pads, counted = [(0, 0)] * count, False
    attrs = {
        "function": function,
        "size": size,
        "stride": steps,
        "dilation": spread,
        "before": [a for a, _ in pads],
        "sizes": sizes,
        "counted": bool(counted),
    }
    return result("pool", [tensor], shape, dtype, NullTensor, attrs, name or op)


def max_pool(
    input: TensorLike,
    kernel: Numbers,
    stride: Numbers | None = None,
    padding: Padding = 0,
    dilation: Numbers = 1,
    ceil: bool = False,
    name: str = "",
) -> Tensor:
    """The largest element of each window of the spatial dimensions.

    input: (n, channels, spatial...) with one to three spatial dimensions. kernel: the window's
    size. stride: by default the kernel's size. padding: as for conv; padded elements are never the
    largest. ceil: if True, a last window that is only partly inside of the input gives a result,
    too.

    Examples:
        >>> x = torch.arange(16.0).reshape(1, 1, 4, 4)
        >>> ark.max_pool(x, kernel=2).eval()
        tensor([[[[ 5.,  7.],
                  [13., 15.]]]])
    """
    return _pool("max", input, kernel, stride, padding, dilation, ceil, False, name)


def avg_pool(
    input: TensorLike,
    kernel: Numbers,
    stride: Numbers | None = None,
    padding: Padding = 0,
    dilation: Numbers = 1,
    ceil: bool = False,
    count_include_pad: bool = True,
    name: str = "",
) -> Tensor:
    """The mean of each window of the spatial dimensions; otherwise as max_pool.

    count_include_pad: if True, padding counts as zeros. Elements of a window beyond the padding
    never count, as in torch.

    Examples:
        >>> x = torch.arange(16.0).reshape(1, 1, 4, 4)
        >>> ark.avg_pool(x, kernel=2).eval()
        tensor([[[[ 2.5000,  4.5000],
                  [10.5000, 12.5000]]]])
    """
    return _pool("mean", input, kernel, stride, padding, dilation, ceil, count_include_pad, name)


def global_max_pool(input: TensorLike, name: str = "") -> Tensor:
    """The largest element of each channel: (n, channels, spatial...) to (n, channels, 1...).

    Floating point or integers.

    Examples:
        >>> x = torch.arange(8.0).reshape(1, 2, 4)
        >>> ark.global_max_pool(x).eval()
        tensor([[[3.],
                 [7.]]])
    """
    tensor = as_tensor(input)
    return reduce_max(tensor, range(2, len(tensor.ir.shape)), name=name)


def global_avg_pool(input: TensorLike, name: str = "") -> Tensor:
    """The mean of each channel: (n, channels, spatial...) to (n, channels, 1...); fp32, fp16, bf16.

    Examples:
        >>> x = torch.arange(8.0).reshape(1, 2, 4)
        >>> ark.global_avg_pool(x).eval()
        tensor([[[1.5000],
                 [5.5000]]])
    """
    tensor = as_tensor(input)
    return reduce_mean(tensor, range(2, len(tensor.ir.shape)), name=name)


def _taps(given: WindowAttributes, place: Sequence[int], spatial: Sequence[int]) -> np.ndarray:
    """The elements of the window at `place` that are inside of the image, by their numbers in the
    window.
    """
    numbers = np.arange(math.prod(given.size)).reshape(given.size)
    inside = []
    for d, p in enumerate(place):
        ends = p * given.stride[d] - given.before[d] + np.arange(given.size[d]) * given.dilation[d]
        inside.append(np.flatnonzero((ends >= 0) & (ends < spatial[d])))
    return numbers[np.ix_(*inside)].reshape(-1)


def unpool(
    values: Tensor, places: Tensor, windows: WindowAttributes, shape: Sequence[int]
) -> Tensor:
    """The gradient of max pooling: each pixel of an image of the given shape (n, channels,
    spatial...) gets the sum of the values of the windows whose largest element it is. places: the
    number of this element in each window.
    """
    numbers = {name: getattr(windows, name) for name in WindowAttributes.__struct_fields__}
    attrs = {**numbers, "image": list(shape[2:])}
    return result("unpool", [values, places], shape, values.ir.dtype, attrs=attrs)


def _pool_reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The NumPy reference of pooling, computed one window at a time."""
    x, given = inputs[0], PoolAttributes.from_node(attrs)
    pooled = np.zeros((*x.shape[:2], *given.sizes))
    for place in np.ndindex(*given.sizes):
        parts: list[Any] = []
        for d, p in enumerate(place):
            at = p * given.stride[d] - given.before[d]
            ends = at + np.arange(given.size[d]) * given.dilation[d]
            parts.append(ends[(ends >= 0) & (ends < x.shape[2 + d])])
        whole = (slice(None), slice(None))
        window = x[whole + np.ix_(*parts)].reshape(*x.shape[:2], -1)
        many = math.prod(given.size) if given.counted else window.shape[-1]
        if given.function == "max":
            pooled[whole + place] = window.max(-1)
        elif given.function == "argmax":
            taps = _taps(given, place, x.shape[2:])
            pooled[whole + place] = taps[window.argmax(-1)]
        else:
            pooled[whole + place] = window.sum(-1) / (many if given.function == "mean" else 1)
    return [pooled]


register("pool", _pool_reference, lower_pool, aliasing="none")


def _unpool_reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The NumPy reference of the gradient of max pooling, computed one window at a time."""
    values, places = inputs
    given = UnpoolAttributes.from_node(attrs)
    pixels = np.zeros((*values.shape[:2], *given.image))
    n, channels = np.indices(values.shape[:2])
    for place in np.ndindex(*given.sizes):
        whole = (slice(None), slice(None), *place)
        taps = np.unravel_index(places[whole].astype(np.int64), given.size)
        at = [
            p * given.stride[d] - given.before[d] + taps[d] * given.dilation[d]
            for d, p in enumerate(place)
        ]
        np.add.at(pixels, (n, channels, *at), values[whole])
    return [pixels]


register("unpool", _unpool_reference, lower_unpool, aliasing="none")
