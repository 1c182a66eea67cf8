"""Converts the ONNX operators LpPool, MaxPool with indices, MaxUnpool and Col2Im. Other pools are
in products.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import ark
from ark.errors import ModelError
from ark.interop.onnx.products import pads_of, pool
from ark.interop.onnx.values import Call, Value, in_fp32, operator, refuse, shaped
from ark.ir.dtype import FLOATS


@operator("LpPool")
def _lp_pool(call: Call) -> Value:
    """Converts LpPool: the p-norm of each window. Padding counts as zeros."""
    shape, kernel = call.shape(0), list(call.attribute("kernel_shape"))
    p, pads = call.attribute("p", 2), pads_of(call, shape[2:], kernel)
    if call.attribute("ceil_mode", 0):
        raise refuse("LpPool with ceil_mode")

    def pooled(x: Any) -> Any:
        means = ark.avg_pool(
            ark.pad(_powers(x, p), [(0, 0), (0, 0), *pads], "constant", 0.0),
            kernel,
            stride=list(call.attribute("strides", [1] * len(kernel))),
            dilation=list(call.attribute("dilations", [1] * len(kernel))),
        )
        return _root(ark.mul(means, float(math.prod(kernel))), p)

    result = in_fp32(pooled, call.tensor(0))
    return shaped(result, result.ir.shape)


def _powers(x: Any, p: int) -> Any:
    x = ark.abs(x)
    return ark.mul(x, x) if p == 2 else ark.pow(x, float(p))


def _root(sums: Any, p: int) -> Any:
    return ark.sqrt(sums) if p == 2 else ark.pow(sums, 1 / p)


@operator("GlobalLpPool")
def _global_lp_pool(call: Call) -> Value:
    shape, p = call.shape(0), call.attribute("p", 2)
    axes = list(range(2, len(shape)))
    result = in_fp32(lambda x: _root(ark.reduce_sum(_powers(x, p), axes), p), call.tensor(0))
    return shaped(result, (*shape[:2], *[1] * (len(shape) - 2)))


def places_of_windows(
    sizes: tuple[int, ...],
    kernel: list[int],
    pads: list[tuple[int, int]],
    strides: list[int],
    dilations: list[int],
    ceil: bool = False,
) -> tuple[np.ndarray, list[int]]:
    """Returns the flat spatial index of each element of each window, (windows, elements of a
    window), with -1 for padding; and the number of windows along each dimension.
    """
    counts, total, outside = [], np.zeros((1, 1), np.int64), np.zeros((1, 1), np.bool_)
    for n, k, (a, b), s, d in zip(sizes, kernel, pads, strides, dilations, strict=True):
        room = n + a + b - (k - 1) * d - 1
        count = (-(-room // s) if ceil else room // s) + 1
        if ceil and (count - 1) * s >= n + a:
            count -= 1
        if room < 0 or count < 1:
            raise ModelError(f"a window of {k} does not fit {n} elements")
        at = np.arange(count)[:, None] * s - a + np.arange(k) * d
        odd = (at < 0) | (at >= n)
        total = (total[:, None, :, None] * n + at[None, :, None, :]).reshape(len(total) * count, -1)
        either = np.logical_or(outside[:, None, :, None], odd[None, :, None, :])
        outside = either.reshape(len(total), -1)
        counts.append(count)
    return np.where(outside, -1, total), counts


def _windows_of(call: Call, sizes: tuple[int, ...], kernel: list[int], pads: Any) -> Any:
    ones = [1] * len(kernel)
    return places_of_windows(
        sizes,
        kernel,
        pads,
        list(call.attribute("strides", ones)),
        list(call.attribute("dilations", ones)),
        bool(call.attribute("ceil_mode", 0)),
    )


@operator("MaxPool")
def _max_pool(call: Call) -> Any:
    return _max_pool_with_places(call) if len(call.outputs) > 1 else _LARGEST(call)


_LARGEST = pool(ark.max_pool, mean=False)


def _max_pool_with_places(call: Call) -> list[Value]:
    """Converts MaxPool with indices: the largest element of each window, and the element's index in
    the whole input.
    """
    shape, kernel = call.shape(0), list(call.attribute("kernel_shape"))
    x = call.tensor(0)
    if x.ir.dtype not in FLOATS:
        raise refuse(f"a pool of {x.ir.dtype.name} that returns indices")
    places, counts = _windows_of(call, shape[2:], kernel, pads_of(call, shape[2:], kernel))
    rows, elements = math.prod(shape[:2]), math.prod(shape[2:])
    flat = ark.reshape(x, [rows, elements])
    lowest = ark.constant(-float("inf"), [rows, 1], x.ir.dtype)
    wide = ark.concat([flat, lowest], 1)
    ids = np.where(places < 0, elements, places)
    windows = ark.gather(wide, call.constant(ids.astype(np.int32)), 1)
    largest = ark.reduce_max(windows, [2])
    best = ark.cast(ark.argmax(windows, axis=2, dtype=ark.int64), ark.int64)
    step = ark.reshape(best, [rows, len(ids), 1])
    numbered = ids
    if call.attribute("storage_order", 0) and len(shape) > 2:  # 1 requests column-major indices
        whole = np.arange(elements).reshape(shape[2:][::-1]).transpose()
        numbered = np.append(whole.reshape(-1), 0)[ids]
    table = ark.expand(call.constant(numbered[None].astype(np.int64)), [rows, *ids.shape])
    index = ark.reshape(ark.gather_elements(table, step, 2), [rows, len(ids)])
    offset = ark.mul(ark.iota([rows, 1], 0, ark.int64), elements)
    result = (*shape[:2], *counts)
    return [shaped(largest, result), shaped(ark.add(index, offset), result)]


@operator("MaxUnpool")
def _max_unpool(call: Call) -> Value:
    shape, kernel = call.shape(0), list(call.attribute("kernel_shape"))
    rank = len(kernel)
    strides, pads = call.attribute("strides", [1] * rank), call.attribute("pads", [0] * 2 * rank)
    sizes = [
        (n - 1) * s - (a + b) + k
        for n, s, a, b, k in zip(shape[2:], strides, pads[:rank], pads[rank:], kernel, strict=True)
    ]
    own = [*shape[:2], *sizes]
    x = ark.reshape(call.tensor(0), [-1])
    zeros = ark.zeros([math.prod(own)], x.ir.dtype)
    places = ark.reshape(call.tensor(1), [-1])
    result = ark.reshape(ark.scatter_elements(zeros, places, x, 0, "set"), own)
    wanted = call.integers(2) if call.has(2) else own
    if wanted != own:
        grown = [(0, w - n) for w, n in zip(wanted, own, strict=True)]
        if min(b for _, b in grown) < 0:
            raise ModelError(
                f"the output shape {wanted} is smaller than {own}, to which the windows extend"
            )
        result = ark.pad(result, grown, "constant", 0.0)
    return shaped(result, wanted)


@operator("Col2Im")
def _col2im(call: Call) -> Value:
    """Converts Col2Im, which assembles an image from its windows. Each column of the input holds a
    window; overlapping elements are added up.
    """
    shape = call.shape(0)
    sizes, kernel = call.integers(1), call.integers(2)
    rank, taps = len(sizes), math.prod(kernel)
    flat = call.attribute("pads", [0] * 2 * rank)
    pads = list(zip(flat[:rank], flat[rank:], strict=True))
    places, _ = _windows_of(call, tuple(sizes), kernel, pads)
    elements, channels = math.prod(sizes), shape[1] // taps
    if places.shape[0] != shape[2] or channels * taps != shape[1]:
        raise ModelError(
            f"the input has shape {list(shape)}, which does not match the columns of {kernel} "
            f"windows over an image of {sizes}"
        )
    columns = ark.reshape(call.tensor(0), [shape[0] * channels, taps * shape[2]])
    ids = np.where(places < 0, elements, places).T.reshape(1, -1)
    ids = np.broadcast_to(ids, (shape[0] * channels, ids.shape[1])).astype(np.int64)
    zeros = ark.zeros([shape[0] * channels, elements + 1], columns.ir.dtype)
    index = call.constant(np.ascontiguousarray(ids))
    result = ark.scatter_elements(zeros, index, columns, 1, "add")[:, 0:elements]
    return shaped(ark.copy(result), (shape[0], channels, *sizes))
