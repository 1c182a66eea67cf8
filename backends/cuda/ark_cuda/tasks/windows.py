"""Tensor maps for a product whose operand is the matrix of an image's convolution windows
(ark.tasks.matmul_windows). That matrix is not stored: tensor maps in im2col mode copy its boxes
from the input image, one kernel element after another. Elements outside of the input are loaded as
zeros.

Called by ark_cuda.tasks.products.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ark.backend.codegen.body import BoxMap
from ark.plan.kind import OperandType
from ark.plan.types import BOX_ROW_BYTES
from ark.tasks.matmul_params import WindowParams
from ark.tasks.matmul_windows import as_boxes, boxable
from ark_cuda.tasks.wgmma import once


def _plane(numbers: Sequence[int], fill: int) -> tuple[int, int]:
    """A parameter of the windows (stride, padding, ...) for both spatial dimensions, (rows,
    columns). A one-dimensional input counts as a single row; `fill` is then the number for rows.
    """
    down, across = (fill, *numbers)[-2:]
    return down, across


def _as_boxes(operand: OperandType, p: WindowParams) -> tuple[OperandType, WindowParams]:
    shape, strides, seen = as_boxes(operand.shape, operand.strides, p, operand.itemsize)
    return dataclasses.replace(operand, shape=shape, strides=strides), seen


def serves(operand: OperandType, p: WindowParams) -> bool:
    """True if a tensor map can describe these windows."""
    return boxable(operand.shape, operand.strides, operand.itemsize, p)


def padded_depth(operand: OperandType, p: WindowParams) -> int:
    """The number of elements along k in the boxes of windows and weights. For each element of the
    kernel, the channels are padded with zeros to whole lines of 128 bytes.
    """
    seen, windows = _as_boxes(operand, p)
    return math.prod(windows.size) * _filled(seen)


def _filled(operand: OperandType) -> int:
    """The number of channels including the zeros that pad them to whole lines of 128 bytes."""
    deep = BOX_ROW_BYTES // operand.itemsize
    return -(-operand.shape[-1] // deep) * deep


def window_map(operand: OperandType, index: int, rows: int, p: WindowParams) -> BoxMap:
    """The tensor map of the image. A box contains `rows` consecutive windows. Of each window it has
    one line (128 bytes) of channels of the pixel at one kernel element.
    """
    operand, p = _as_boxes(operand, p)
    n, *plane, channels = operand.shape
    high, wide = (1, *plane)[-2:]
    first, *down, across, _ = operand.strides
    rows_apart = down[0] if down else wide * across
    steps = tuple(s * operand.itemsize for s in (across, rows_apart, first))
    stride = _plane(p.stride, 1)
    before, sizes = _plane(p.before, 0), _plane(p.sizes, 1)
    # In each dimension: the position of the pixel that the first kernel element reads in the last
    # window, relative to the last pixel of the input.
    ends = [
        (many - 1) * step - margin + 1 - extent
        for many, step, margin, extent in zip(sizes, stride, before, (high, wide), strict=True)
    ]
    return BoxMap(
        index,
        operand.dtype,
        (channels, wide, high, n),
        steps,
        (BOX_ROW_BYTES // operand.itemsize, rows),
        lower=(-before[1], -before[0]),
        upper=(ends[1], ends[0]),
        steps=(1, stride[1], stride[0], 1),
    )


def weight_map(
    weight: OperandType, index: int, rows: int, operand: OperandType, p: WindowParams
) -> BoxMap:
    """The tensor map of the weights of a convolution. A box has `rows` rows and one line (128
    bytes) of channels at one element of the kernel. Channels are padded like those of the windows.
    operand: the windows' input.
    """
    seen, windows = _as_boxes(operand, p)
    channels, taps = seen.shape[-1], math.prod(windows.size)
    pitch = weight.strides[-2] * weight.itemsize
    sizes = (channels, weight.shape[-2], taps)
    steps = (pitch, channels * weight.itemsize)
    return BoxMap(index, weight.dtype, sizes, steps, (BOX_ROW_BYTES // weight.itemsize, rows, 1))


def window_type(operand: OperandType, p: WindowParams) -> str:
    """The C++ type with which the loading thread computes which pixels a tile's windows and which
    channels a stage need.
    """
    operand, p = _as_boxes(operand, p)
    pairs = [_plane(n, fill) for n, fill in ((p.stride, 1), (p.before, 0), (p.dilation, 1))]
    numbers = (
        math.prod(p.sizes),
        p.sizes[-1],
        _filled(operand),
        p.size[-1],
        *(n for pair in pairs for n in pair),
    )
    return f"ArkWindows<{str(p.side == 0).lower()}, {', '.join(map(str, numbers))}>"


def weight_type(operand: OperandType, p: WindowParams) -> str:
    """The C++ type with which the loading thread finds a stage's weights in `weight_map`."""
    return f"ArkTaps<{_filled(_as_boxes(operand, p)[0])}>"


TAPS = once(
    "ARK_TAPS",
    """// The weights of a convolution. The channels at each element of the kernel are padded with
// zeros to FILLED elements of k.
template <int FILLED>
struct ArkTaps {};
template <bool ACROSS, int ROWS, int DEEP, int LINES, int FILLED>
ARK_DEVICE void ark_matrix_boxes(char* to, ark_u64 map, int row, int k, int, int, ark_u64* full,
                                 ArkTaps<FILLED>, ark_u64 keep = ARK_BOX_STAYS) {
  static_assert(!ACROSS && LINES == 1, "a line of k at a time, side by side");
  ark_box_load(to, map, k % FILLED, row, k / FILLED, full, keep);
}""",
)
