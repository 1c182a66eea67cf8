"""The operator Resize. Common forms become ark.resize. All other forms become, for each axis, one
gather (nearest) or one product with a matrix of weights (linear, cubic). Indices and weights are
computed while the graph is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import ark
from ark.errors import ModelError
from ark.interop.onnx.reductions import along_last
from ark.interop.onnx.values import Call, Value, axis_of, operator, refuse, shaped
from ark.ir.dtype import FLOATS
from ark.ops.images import COORDINATES


@operator("Resize")
def _resize(call: Call) -> Value:
    shape = call.shape(0)
    axes = [axis_of(a, len(shape)) for a in call.attribute("axes", range(len(shape)))]
    sizes, scales = _sizes(call, axes)
    mode = call.attribute("mode", "nearest")
    places = call.attribute("coordinate_transformation_mode", "half_pixel")
    whole = all(n * scales[d] == sizes[d] for d, n in enumerate(shape))
    rounds = call.attribute("nearest_mode", "round_prefer_floor")
    common = mode == "linear" or (mode == "nearest" and rounds == "round_prefer_floor")
    spatial = tuple(sizes[:2]) == shape[:2] and len(shape) > 2
    plain = not call.attribute("antialias", 0) and not call.attribute("exclude_outside", 0)
    if common and plain and whole and spatial and places in COORDINATES:
        return shaped(ark.resize(call.tensor(0), sizes[2:], mode, places), sizes)
    if mode not in ("nearest", "linear", "cubic"):
        raise ModelError(f"the mode {mode!r} is not one of nearest, linear, cubic")
    tensor, dtype = call.tensor(0), call.dtype(0)
    if mode != "nearest" and dtype not in FLOATS:
        raise refuse(f"Resize of {dtype.name} with mode {mode}")
    crop = places == "tf_crop_and_resize"
    region = call.array(1).tolist() if crop else []
    outside = np.zeros(sizes, np.bool_)
    for i, d in enumerate(axes):
        n, size = shape[d], sizes[d]
        ends = (region[i], region[i + len(axes)]) if crop else (0.0, 1.0)
        x = _coordinates(places, n, size, scales[d], ends)
        if crop:
            over = (x < 0) | (x > n - 1)
            outside |= over.reshape([-1 if e == d else 1 for e in range(len(sizes))])
        if size == n and np.array_equal(x, np.arange(n)):
            continue
        if mode == "nearest":
            ids = np.clip(_rounded(x, rounds), 0, n - 1).astype(np.int64)
            tensor = ark.gather(tensor, call.constant(ids), d)
        else:
            weights = _weights(call, x, n, scales[d]).astype(np.float32)
            tensor = along_last(tensor, d, partial(_product, call, weights))
    if outside.any():
        value = call.attribute("extrapolation_value", 0.0)
        tensor = ark.where(call.constant(outside), value, tensor)
    return shaped(tensor, sizes)


def _product(call: Call, weights: np.ndarray, tensor: Any) -> Any:
    """Interpolates along the last dimension. Multiplies a tensor (..., n) by weights (size, n); the
    result has the shape (..., size).
    """
    other = call.constant(np.ascontiguousarray(weights.T))
    other = other if tensor.ir.dtype == ark.fp32 else ark.cast(other, tensor.ir.dtype)
    shape = tensor.ir.shape
    product = ark.matmul(ark.reshape(tensor, [-1, shape[-1]]), other)
    return ark.reshape(product, [*shape[:-1], len(weights)])


def _sizes(call: Call, axes: list[int]) -> tuple[list[int], list[float]]:
    """The sizes of the result, and the scale of each dimension."""
    shape = call.shape(0)
    sizes, scales = list(shape), [1.0] * len(shape)
    if call.has(3) and call.value(3).shape != (0,):
        given = dict(zip(axes, call.integers(3), strict=True))
        policy = call.attribute("keep_aspect_ratio_policy", "stretch")
        ratios = {d: n / shape[d] for d, n in given.items()}
        for d, n in given.items():
            sizes[d], scales[d] = n, ratios[d]
            if policy != "stretch":
                scales[d] = (min if policy == "not_larger" else max)(ratios.values())
                sizes[d] = math.floor(scales[d] * shape[d] + 0.5)
    else:
        for d, scale in zip(axes, call.array(2).tolist(), strict=True):
            sizes[d], scales[d] = math.floor(shape[d] * scale), scale
    if min(sizes, default=1) < 1:
        raise ModelError(
            f"a tensor of shape {list(shape)} would be resized to {sizes}; every size must be at "
            "least 1"
        )
    return sizes, scales


def _coordinates(
    mode: str, n: int, size: int, scale: float, ends: tuple[float, float]
) -> np.ndarray:
    """The position of each result element on an axis of n elements, as ONNX defines it for Resize.
    mode: the coordinate transformation. ends: the region of interest.
    """
    i = np.arange(size, dtype=np.float64)
    half = (i + 0.5) / scale - 0.5
    if mode == "half_pixel":
        return half
    if mode == "half_pixel_symmetric":
        return half + n / 2 * (1 - size / (scale * n))
    if mode == "pytorch_half_pixel":
        return half if size > 1 else np.zeros(1)
    if mode == "asymmetric":
        return i / scale
    if mode == "align_corners":
        wide = scale * n  # the standard does not round this length
        return i * (n - 1) / (wide - 1) if wide != 1 else np.zeros(size)
    if mode == "tf_crop_and_resize":
        first, last = ends
        if size > 1:
            return first * (n - 1) + i * (last - first) * (n - 1) / (size - 1)
        return np.full(1, 0.5 * (first + last) * (n - 1))
    raise ModelError(f"the coordinate mode {mode!r} is not one that ONNX has")


def _rounded(x: np.ndarray, how: str) -> np.ndarray:
    """Positions rounded to indices, as ONNX's nearest_mode specifies."""
    if how not in _ROUNDINGS:
        raise ModelError(f"the nearest_mode {how!r} is not one that ONNX has")
    return _ROUNDINGS[how](x)


_ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
}


def _weights(call: Call, x: np.ndarray, n: int, scale: float) -> np.ndarray:
    """The weights (size, n): the weight of each input element in each result element. Cubic weights
    are Keys' (1981).
    """
    cubic = call.attribute("mode") == "cubic"
    a = call.attribute("cubic_coeff_a", -0.75)
    shrink = min(scale, 1.0) if call.attribute("antialias", 0) else 1.0
    reach = math.ceil((2 if cubic else 1) / shrink)
    near = np.floor(x)[:, None] + np.arange(-reach, reach + 1)
    away = np.abs(near - x[:, None]) * shrink
    if cubic:
        inner = ((a + 2) * away - (a + 3)) * away**2 + 1
        outer = ((away - 5) * away + 8) * away * a - 4 * a
        shares = np.where(away <= 1, inner, np.where(away < 2, outer, 0.0))
    else:
        shares = np.maximum(0.0, 1 - away)
    if call.attribute("exclude_outside", 0):
        shares = np.where((near < 0) | (near > n - 1), 0.0, shares)
    shares = shares / shares.sum(axis=1, keepdims=True)
    weights = np.zeros((len(x), n))
    rows = np.broadcast_to(np.arange(len(x))[:, None], near.shape)
    np.add.at(weights, (rows, np.clip(near, 0, n - 1).astype(np.int64)), shares)
    return weights
