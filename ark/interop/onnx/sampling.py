"""Operators that interpolate values of an image: GridSample, DeformConv and RoiAlign.

The elements around a position are gathered and weighted: one for nearest, two per dimension for
linear, four per dimension for cubic interpolation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import ark
from ark.errors import ModelError
from ark.interop.onnx.values import Call, Value, operator, refuse, shaped
from ark.ir.dtype import FLOATS

CUBIC_COEFFICIENT = -0.75  # the coefficient of Keys' cubic convolution (1981) in GridSample


@operator("GridSample")
def _grid_sample(call: Call) -> Value:
    """Converts GridSample. The last dimension of the grid has one coordinate per spatial dimension,
    in reverse order of dimensions.
    """
    shape, grid = call.shape(0), ark.cast(call.tensor(1), ark.fp32)
    sizes, places = shape[2:], call.shape(1)[1:-1]
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(
        call.attribute("mode", "linear"), call.attribute("mode", "linear")
    )
    corners = bool(call.attribute("align_corners", 0))
    flat = ark.reshape(grid, [shape[0], math.prod(places), len(sizes)])
    coordinates = []
    for d, n in enumerate(sizes):
        at = _column(flat, len(sizes) - 1 - d)
        scale, shift = ((n - 1) / 2, (n - 1) / 2) if corners else (n / 2, (n - 1) / 2)
        coordinates.append(ark.add(ark.mul(at, scale), shift))
    outside = _Outside(call.attribute("padding_mode", "zeros"), corners)
    x = ark.reshape(call.tensor(0), [shape[0], shape[1], math.prod(sizes)])
    return shaped(_sampled(x, sizes, coordinates, mode, outside), (*shape[:2], *places))


def _column(tensor: Any, place: int) -> Any:
    """The elements at one index of the last dimension of a tensor with three dimensions."""
    rows, count, _ = tensor.ir.shape
    return ark.reshape(tensor[:, :, place : place + 1], [rows, count])


class _Outside:
    """The treatment of positions outside of the image, by padding mode. corners: True if the image
    ends at the centres of its first and last elements; False if it ends at the outer edges of these
    elements.
    """

    def __init__(self, mode: str, corners: bool) -> None:
        if mode not in ("zeros", "border", "reflection"):
            raise ModelError(f"the padding_mode {mode!r} is not one that ONNX has")
        self.mode, self.corners = mode, corners

    def place(self, x: Any, n: int) -> Any:
        """Applies the padding mode to positions: moves a position that is outside of the image as
        the mode requires. Returns the positions to sample.
        """
        if self.mode == "border":
            low, high = (0.0, n - 1.0) if self.corners else (-0.5, n - 0.5)
            inside = ark.logical_and(ark.greater_equal(x, low), ark.less_equal(x, high))
            return ark.where(inside, x, ark.minimum(ark.maximum(x, 0.0), float(n - 1)))
        return self._reflected(x, n) if self.mode == "reflection" else x

    def neighbour(self, i: Any, n: int) -> tuple[Any, Any]:
        """Converts a whole-numbered position to an index, and a mask that is True inside of the
        image (None if it is True everywhere).
        """
        inside = None
        if self.mode == "zeros":
            inside = ark.logical_and(ark.greater_equal(i, 0.0), ark.less_equal(i, float(n - 1)))
        if self.mode == "reflection":
            i = self._reflected(i, n)
        return ark.minimum(ark.maximum(i, 0.0), float(n - 1)), inside

    def _reflected(self, x: Any, n: int) -> Any:
        low, high = (0.0, n - 1.0) if self.corners else (-0.5, n - 0.5)
        span = high - low
        if not span:
            return ark.mul(x, 0.0)
        away = ark.abs(ark.sub(x, low))
        turns = ark.floor(ark.div(away, span))
        rest = ark.sub(away, ark.mul(turns, span))
        odd = ark.sub(turns, ark.mul(ark.floor(ark.mul(turns, 0.5)), 2.0))
        return ark.where(ark.greater(odd, 0.5), ark.sub(high, rest), ark.add(rest, low))


def _weights(x: Any, mode: str) -> list[tuple[Any, Any]]:
    """The neighbours of a position from which a value is interpolated: pairs of a neighbour's
    position, a whole number, and its weight.
    """
    if mode == "nearest":
        return [(ark.round(x), None)]
    low = ark.floor(x)
    t = ark.sub(x, low)
    u = ark.sub(1.0, t)
    if mode == "linear":
        return [(low, u), (ark.add(low, 1.0), t)]
    if mode != "cubic":
        raise ModelError(f"the mode {mode!r} is not one that ONNX has")

    def inner(s: Any) -> Any:
        return ark.add(
            ark.mul(
                ark.mul(ark.sub(ark.mul(s, CUBIC_COEFFICIENT + 2), CUBIC_COEFFICIENT + 3), s), s
            ),
            1.0,
        )

    def outer(s: Any) -> Any:
        steps = ark.add(
            ark.mul(ark.sub(ark.mul(s, CUBIC_COEFFICIENT), 5 * CUBIC_COEFFICIENT), s),
            8 * CUBIC_COEFFICIENT,
        )
        return ark.sub(ark.mul(steps, s), 4 * CUBIC_COEFFICIENT)

    shares = [outer(ark.add(t, 1.0)), inner(t), inner(u), outer(ark.add(u, 1.0))]
    return [(ark.add(low, float(i - 1)), share) for i, share in enumerate(shares)]


def _sampled(
    x: Any, sizes: Sequence[int], places: Sequence[Any], mode: str, outside: _Outside
) -> Any:
    """Samples x (n, channels, elements) at positions; places: one tensor (n, places) per dimension.
    The result is (n, channels, places).
    """
    if x.ir.dtype not in FLOATS:
        raise refuse(f"sampling of {x.ir.dtype.name}")
    rows, channels, _ = x.ir.shape
    count = places[0].ir.shape[1]
    if mode == "nearest":
        places = [ark.round(p) for p in places]
    bounded = [outside.place(p, n) for p, n in zip(places, sizes, strict=True)]
    around = [_weights(p, mode) for p in bounded]
    total: Any = None
    for corner in itertools.product(*around):
        index: Any = None
        share: Any = None
        for (i, weight), n in zip(corner, sizes, strict=True):
            at, inside = outside.neighbour(i, n)
            index = at if index is None else ark.add(ark.mul(index, float(n)), at)
            if inside is not None:
                weight = ark.where(inside, 1.0 if weight is None else weight, ark.mul(at, 0.0))
            if weight is not None:
                share = weight if share is None else ark.mul(share, weight)
        ids = ark.reshape(ark.cast(index, ark.int32), [rows, 1, count])
        sampled = ark.gather_elements(x, ark.expand(ids, [rows, channels, count]), 2)
        if share is not None:
            sampled = ark.mul(ark.cast(sampled, ark.fp32), ark.reshape(share, [rows, 1, count]))
        total = sampled if total is None else ark.add(total, sampled)
    return total if total.ir.dtype == x.ir.dtype else ark.cast(total, x.ir.dtype)


@operator("DeformConv")
def _deform_conv(call: Call) -> Value:
    """Converts DeformConv (deformable convolution). The positions in each window are shifted by
    offsets, and the sampled windows are multiplied with the weights as matrices.
    """
    shape, weight, moved = call.shape(0), call.shape(1), call.shape(2)
    if len(shape) != 4:
        raise refuse(f"DeformConv of {len(shape) - 2} spatial dimensions")
    (rows, channels), sizes, kernel, out = shape[:2], shape[2:], weight[2:], moved[2:]
    steps, spread = (call.attribute(a, [1, 1]) for a in ("strides", "dilations"))
    pads = call.attribute("pads", [0] * 4)
    parts, groups = call.attribute("offset_group", 1), call.attribute("group", 1)
    taps, count = math.prod(kernel), math.prod(out)
    offsets = ark.reshape(ark.cast(call.tensor(2), ark.fp32), [rows * parts, taps, 2, count])
    coordinates = []
    for d in range(2):
        own = ark.reshape(offsets[:, :, d : d + 1], [rows * parts, *kernel, *out])
        where = ark.add(
            ark.mul(ark.iota([1, *kernel, *out], 1 + d, ark.fp32), float(spread[d])),
            ark.mul(ark.iota([1, *kernel, *out], 3 + d, ark.fp32), float(steps[d])),
        )
        own = ark.add(own, ark.sub(where, float(pads[d])))
        coordinates.append(ark.reshape(own, [rows * parts, taps * count]))
    x = ark.reshape(call.tensor(0), [rows * parts, channels // parts, math.prod(sizes)])
    windows = _sampled(x, sizes, coordinates, "linear", _Outside("zeros", True))
    if call.has(4):
        mask = ark.reshape(call.tensor(4), [rows * parts, 1, taps * count])
        windows = ark.mul(windows, mask)
    depth = channels // groups * taps
    windows = ark.reshape(windows, [rows, groups, depth, count])
    w = ark.reshape(call.tensor(1), [1, groups, weight[0] // groups, depth])
    result = ark.reshape(ark.matmul(w, windows), [rows, weight[0], count])
    if call.has(3):
        result = ark.add(result, ark.reshape(call.tensor(3), [1, -1, 1]))
    return shaped(result, (rows, weight[0], *out))


@operator("RoiAlign")
def _roi_align(call: Call) -> Value:
    """Converts RoiAlign: each box is divided into equal parts, and each result is the mean of
    samples in one part. The attribute with the number of samples must be given.
    """
    shape, count = call.shape(0), call.shape(1)[0]
    (channels, *sizes), samples = shape[1:], int(call.attribute("sampling_ratio", 0))
    bins = (call.attribute("output_height", 1), call.attribute("output_width", 1))
    if samples < 1:
        raise refuse("RoiAlign with sampling_ratio 0 (a number of samples for each box)")
    if call.attribute("mode", "avg") != "avg":
        raise refuse("RoiAlign of maxima")
    scale = call.attribute("spatial_scale", 1.0)
    half = call.version >= 16 and (
        call.attribute("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    )
    boxes = ark.sub(ark.mul(ark.cast(call.tensor(1), ark.fp32), scale), 0.5 if half else 0.0)
    parts, places = [b * samples for b in bins], []
    for d in range(2):
        low, high = (ark.reshape(boxes[:, i : i + 1], [count, 1, 1]) for i in (1 - d, 3 - d))
        size = ark.sub(high, low)
        size = size if half else ark.maximum(size, 1.0)
        steps = ark.add(ark.iota([1, *parts], 1 + d, ark.fp32), 0.5)
        places.append(ark.add(low, ark.mul(steps, ark.div(size, float(parts[d])))))
    flat = [ark.reshape(ark.expand(p, [count, *parts]), [count, math.prod(parts)]) for p in places]
    x = ark.gather(call.tensor(0), call.tensor(2), 0)
    x = ark.reshape(x, [count, channels, math.prod(sizes)])
    sampled = _sampled(x, sizes, flat, "linear", _Outside("border", True))
    # The weight of a sample is 0 if its position is more than one element outside of the image.
    for p, n in zip(flat, sizes, strict=True):
        inside = ark.logical_and(ark.greater_equal(p, -1.0), ark.less_equal(p, float(n)))
        sampled = ark.mul(sampled, ark.reshape(ark.cast(inside, sampled.ir.dtype), [count, 1, -1]))
    sampled = ark.reshape(sampled, [count, channels, bins[0], samples, bins[1], samples])
    return shaped(ark.reduce_mean(sampled, [3, 5]), (count, channels, *bins))
