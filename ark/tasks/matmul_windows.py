"""Convolutions as matrix products (implicit GEMM). One operand is the matrix of an image's windows
(the im2col matrix). It is not stored: box copies (TMA im2col) load windows directly from the
image for the matrix units (capability "window_boxes"). Used by the task kind ark.tasks.matmul and
by lowering.

The param `windows` of a matmul describes them: side, the index of the operand that is the input (n,
spatial..., channels); size, stride, dilation, before and sizes as in ark.tasks.convolution. A row
of the matrix is the window of one result. The dimension k counts the elements of the window and,
within each, the channels. Elements outside of the input are zero. As left operand (side 0), the
windows of all n images form one matrix. As right operand (side 1), which is transposed, each image
has its own matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import structs

from ark.errors import PlanError
from ark.plan.kind import Signature
from ark.plan.params import INT_MAX, need
from ark.plan.types import BOX_ALIGNMENT_BYTES, BOX_ROW_BYTES
from ark.tasks import matmul_pixels, text
from ark.tasks.matmul_params import MatmulParams, WindowParams
from ark.tasks.windows import PlacedWindows, index_ranges, reached, window_sizes

MAX_ROWS_PER_THREAD = 4  # results of a thread that share an element of the input
MOST_STEP, MOST_MARGIN = 8, 127  # largest stride, and padding, of windows that box copies load


def side_shape(sig: Signature, index: int) -> tuple[int, ...]:
    """The shape of operand 0 or 1 as a batch of matrices. If the operand is an image, it is the
    shape of the matrix of its windows, or of its pixels.
    """
    params = sig.read(MatmulParams)
    if params.pixels is not None:
        return matmul_pixels.side_shape(sig, index, params.pixels)
    shape, p = sig.operands[index].shape, params.windows
    return shape if p is None or p.side != index else matrix_shape(shape, p)


def _windows(sig: Signature) -> WindowParams:
    """The parameters of the convolution windows of a product. Raises PlanError if it has none."""
    windows = sig.read(MatmulParams).windows
    if windows is None:
        raise PlanError("neither operand of the product is a matrix of windows")
    return windows


def matrix_shape(source: Sequence[int], p: WindowParams) -> tuple[int, ...]:
    """The shape of the matrix of an input's windows."""
    places, depth = math.prod(p.sizes), math.prod(p.size) * source[-1]
    return (source[0], 1, places, depth) if p.side else (source[0] * places, depth)


def as_boxes(
    shape: Sequence[int], strides: Sequence[int], p: WindowParams, itemsize: int
) -> tuple[tuple[int, ...], tuple[int, ...], WindowParams]:
    """The shape, strides and windows with which box copies (TMA) load an image. If the channels are
    not a multiple of BOX_ROW_BYTES, a row of a window may be loaded as if it were one pixel: all of
    its elements are treated as channels. This requires that they are contiguous and inside of the
    image. Such pixels overlap.
    """
    channels, across = shape[-1], shape[-2]
    reach = (p.sizes[-1] - 1) * p.stride[-1] + p.size[-1]
    inside = p.before[-1] == 0 and reach <= across
    beside = p.dilation[-1] == 1 and strides[-2] == channels
    if channels * itemsize % BOX_ROW_BYTES == 0 or not (inside and beside):
        return tuple(shape), tuple(strides), p
    row = structs.replace(p, size=(*p.size[:-1], 1), stride=(*p.stride[:-1], 1))
    places = (*shape[:-2], p.sizes[-1], p.size[-1] * channels)
    return places, (*strides[:-2], p.stride[-1] * channels, 1), row


def boxable(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, windows: WindowParams
) -> bool:
    """True if box copies (TMA) can load these windows. The channels of a pixel, or all elements of
    a window in one row, must be a multiple of BOX_ROW_BYTES. Strides, padding and dilations must be
    small.
    """
    source, steps, p = as_boxes(shape, strides, windows, itemsize)
    stride, spread, before = p.stride, p.dilation, p.before
    sizes = zip(p.size, p.sizes, source[1:-1], strict=True)
    margins = [
        (before[d], (taps - 1) * spread[d], abs((many - 1) * stride[d] - before[d] + 1 - n))
        for d, (taps, many, n) in enumerate(sizes)
    ]
    return (
        len(margins) <= 2
        and (source[-1] * itemsize % BOX_ROW_BYTES == 0 or p != windows)
        and all(s * itemsize % BOX_ALIGNMENT_BYTES == 0 for s in (*steps[:-1], source[-1]))
        and max(stride) <= MOST_STEP
        and max(max(m) for m in margins) <= MOST_MARGIN
    )


def check(sig: Signature) -> None:
    """Raises PlanError unless the windows fit their operand and the product has no other special
    form.
    """
    params, p = sig.read(MatmulParams), _windows(sig)
    source, weight = (sig.operands[i] for i in (p.side, 1 - p.side))
    spatial = len(source.shape) - 2
    need(
        spatial > 0 and all(len(n) == spatial for n in (*window_sizes(p), p.sizes)),
        f"the window parameters need one number for each spatial dimension of {list(source.shape)}",
    )
    for d in range(spatial):
        last = (p.sizes[d] - 1) * p.stride[d] + (p.size[d] - 1) * p.dilation[d]
        need(last < INT_MAX, "window indices exceed 32 bits")
    need(
        math.prod(matrix_shape(source.shape, p)) <= INT_MAX**2,
        "indices of the window matrix exceed 64 bits",
    )
    need(
        not params.transpose_a and params.transpose_b,
        "a product of windows needs the right operand transposed and the left one not",
    )
    need(
        source.strides[-1] == weight.strides[-1] == 1,
        "channels of the image and of the weights must be contiguous",
    )
    need(
        math.prod(weight.shape[:-2]) == 1, "a convolution as a product needs a single weight matrix"
    )
    plain = (params.gated, params.heads, params.kv_heads, params.head_dim)
    need(not any(plain), "a product of windows cannot be gated or rotated")
    need(
        params.splits == 1 or in_parts(p, source.shape, source.itemsize),
        "a product of windows can be split along k only if the windows are its left operand and "
        f"pixels are multiples of {BOX_ROW_BYTES} bytes",
    )


def in_parts(p: WindowParams, source: Sequence[int], itemsize: int) -> bool:
    """True if k may be divided into parts: all windows are one matrix, and a box copy loads
    channels of one pixel. source: the shape of the image.
    """
    return p.side == 0 and source[-1] * itemsize % BOX_ROW_BYTES == 0


def touched(
    sig: Signature, coord: Sequence[int], first: int, end: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The box of the input image that a tile reads for its results number `first` to `end` - 1."""
    p = _windows(sig)
    n, *sizes, channels = sig.operands[p.side].shape
    if p.side:
        images, ranges = (coord[0], coord[0]), index_ranges(p.sizes, first, end)
    else:
        images, *ranges = index_ranges((n, *p.sizes), first, end)
    low, high = reached(p, sizes, ranges)
    return (images[0], *low, 0), (images[1] + 1, *high, channels)


def begins(
    p: PlacedWindows, sizes: Sequence[int], place: str, where: Callable[[Sequence[str]], str]
) -> str:
    """C++ statements that return the address of element `tap` of a convolution window, or null if
    it is outside of the image. The address is p1 (the operand's pointer) + where(indices). sizes:
    the image's spatial sizes. place: the text of the number of the window, counted over the results
    of an image.
    """
    lines, guards = [], []
    for d, n in enumerate(sizes):
        across, under = math.prod(p.size[d + 1 :]), math.prod(p.sizes[d + 1 :])
        tap = f"tap / {across} % {p.size[d]}"
        lines.append(
            f"const int x{d} = ({place} / {under} % {p.sizes[d]}) * {p.stride[d]} - "
            f"{p.before[d]} + ({tap}) * {p.dilation[d]};"
        )
        guards.append(f"x{d} < 0 || x{d} >= {n}")
    offset = where([f"x{d}" for d in range(len(sizes))])
    lines += [f"if ({' || '.join(guards)}) return nullptr;", f"return p1 + ({offset});"]
    return "".join(f"    {line}\n" for line in ["(void)tap;", *lines])


def tile_text(sig: Signature, dims: Sequence[int], finish: Callable[[str, str], str]) -> str:
    """The text of a C++ call that computes the tile at batch i0, i1, row m0 and column n0. dims: m
    and n of the product. finish: a function of the texts of a row and a column that returns
    statements which store `sum` there.
    """
    params = sig.read(MatmulParams)
    p = _windows(sig)
    side, tile = p.side, params.tile
    source, weights = sig.operands[side], sig.operands[1 - side]
    channels, taps = source.shape[-1], math.prod(p.size)
    # The C++ function ark_convolution expects weights as rows of the product and windows as
    # columns. So if the windows are the left operand of the product, the transposed product is
    # computed.
    order, names = ((0, 1), ("m", "n")) if side else ((1, 0), ("n", "m"))
    many, sizes = [dims[i] for i in order], [tile[i] for i in order]
    image = "i0" if side else f"n / {math.prod(p.sizes)}"
    at = [*["0"] * (len(weights.shape) - 2), "m", f"(tap * {channels} + channel)"]
    constants = (1, *sizes, 1, *many, channels, taps, 1, channels, MAX_ROWS_PER_THREAD)
    begin = begins(
        p, source.shape[1:-1], "n", lambda x: text.offset(sig, side, [f"({image})", *x, "0"])
    )
    arguments = (
        "0",
        *(f"{name}0" for name in names),
        "[&](int, int m, int channel, int tap) { return p0 + ("
        f"{text.offset(sig, 1 - side, at)}); }}",
        f"[&](int, int tap, int n) -> decltype(p1) {{\n{begin}  }}",
        f"[&](int, int m, int n, float sum) {{\n{finish(*names)}  }}",
    )
    declared = text.operand(sig, 1 - side, "p0") + text.operand(sig, side, "p1")
    return f"{declared}  {text.called('ark_convolution', constants, arguments)};\n"


def laid_out(source: np.ndarray, p: WindowParams) -> np.ndarray:
    """The matrix of an image's windows in NumPy, for tests. It has the shape of `matrix_shape`."""
    taps = []
    for tap in np.ndindex(*p.size):
        seen = source
        for d, (k, count) in enumerate(zip(tap, p.sizes, strict=True)):
            at = np.arange(count) * p.stride[d] - p.before[d] + k * p.dilation[d]
            inside = (at >= 0) & (at < source.shape[1 + d])
            wide = [count if axis == 1 + d else 1 for axis in range(source.ndim)]
            seen = np.take(seen, at.clip(0, source.shape[1 + d] - 1), axis=1 + d)
            seen = seen * inside.reshape(wide)
        taps.append(seen)
    return np.stack(taps, axis=-2).reshape(matrix_shape(source.shape, p))
