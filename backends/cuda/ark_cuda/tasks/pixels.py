"""Tensor maps of products that sum over pixels (ark.tasks.matmul_pixels). A box has one chunk of
pixels of several channels. Pixels outside of an image are loaded as zeros.

Called by ark_cuda.tasks.products.
"""

from __future__ import annotations

import math

from ark.backend.codegen.body import BoxMap
from ark.plan.kind import Signature
from ark.plan.types import BOX_ROW_BYTES
from ark.tasks.matmul_params import MatmulParams, PixelParams
from ark.tasks.matmul_pixels import boxable, chunks
from ark_cuda.tasks.wgmma import once


def _rows_of_box(sig: Signature, index: int, rows: int) -> int:
    """The number of rows of a stage that one box loads: those of one element of the window."""
    channels = sig.operands[index].shape[0]
    return min(rows, channels) if index else rows


def serves(sig: Signature, index: int) -> bool:
    """True if tensor maps can describe operand `index`. The columns of a tile must be channels of
    one element of the window, or all channels of several.
    """
    params, operand = sig.read(MatmulParams), sig.operands[index]
    assert params.pixels is not None
    columns, channels = params.tile[1], sig.operands[1].shape[0]
    line = math.prod(params.pixels.chunk) * operand.itemsize
    even = channels % columns == 0 or columns % channels == 0
    return (
        boxable(operand.shape, operand.strides, operand.itemsize)
        and line == BOX_ROW_BYTES
        and even
        and channels % 8 == 0
    )


def pixel_map(sig: Signature, index: int, rows: int, p: PixelParams) -> BoxMap:
    """The tensor map of an operand. rows: the rows of the operand in a stage."""
    operand = sig.operands[index]
    sizes = tuple(reversed(operand.shape))
    steps = tuple(s * operand.itemsize for s in reversed(operand.strides[:3]))
    high, wide = p.chunk
    box = (wide, high, 1, _rows_of_box(sig, index, rows))
    return BoxMap(index, operand.dtype, sizes, steps, box)


def pixel_type(sig: Signature, index: int, p: PixelParams) -> str:
    """The C++ type with which the loading thread finds the chunks of a stage."""
    down, across = chunks(sig.operands[0].shape, p)
    high, wide = p.chunk
    channels = sig.operands[1].shape[0] if index else 0
    numbers = (channels, down, across, high, wide, p.size[1], *p.before, *p.dilation)
    return f"ArkPixels<{', '.join(map(str, numbers))}>"


PIXELS = once(
    "ARK_PIXELS",
    """// An operand of a product that sums over pixels. k counts the pixels of chunks of HIGH by
// WIDE pixels, of which an image has DOWN by ACROSS. CHANNELS: those of the convolution's input,
// whose pixels are moved by the element of the window; 0 for the gradient of the result. TAPS:
// elements of the window in a row. The other parameters are its padding and dilation in both
// directions.
template <int CHANNELS, int DOWN, int ACROSS, int HIGH, int WIDE, int TAPS, int BEFORE_DOWN,
          int BEFORE_ACROSS, int APART_DOWN, int APART_ACROSS>
struct ArkPixels {
  template <int ROWS>
  static ARK_DEVICE_MEMBER void load(char* to, ark_u64 map, int row, int k, ark_u64* full,
                                     ark_u64 keep) {
    const int chunk = k / (HIGH * WIDE);
    const int x = chunk % ACROSS * WIDE, y = chunk / ACROSS % DOWN * HIGH;
    const int image = chunk / (ACROSS * DOWN);
    if constexpr (CHANNELS == 0) {
      ark_box_load(to, map, x, y, image, row, full, keep);
    } else {
      constexpr int PART = ROWS < CHANNELS ? ROWS : CHANNELS;
#pragma unroll
      for (int i = 0; i < ROWS; i += PART) {
        const int tap = (row + i) / CHANNELS;
        ark_box_load(to + 128 * i, map, x + tap % TAPS * APART_ACROSS - BEFORE_ACROSS,
                     y + tap / TAPS * APART_DOWN - BEFORE_DOWN, image, (row + i) % CHANNELS, full,
                     keep);
      }
    }
  }
};
template <bool ROUND, int ROWS, int DEEP, int LINES, int... NUMBERS>
ARK_DEVICE void ark_matrix_boxes(char* to, ark_u64 map, int row, int k, int, int, ark_u64* full,
                                 ArkPixels<NUMBERS...>, ark_u64 keep = ARK_BOX_STAYS) {
  static_assert(!ROUND && LINES == 1, "a chunk of pixels at a time");
  ArkPixels<NUMBERS...>::template load<ROWS>(to, map, row, k, full, keep);
}""",
)
