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

BOX_ROWS = 8  # rows of a box are a multiple of this, the rows over which swizzling repeats


def _rows_of_box(sig: Signature, index: int, rows: int) -> int:
    """The number of rows of a stage that one box loads: rows at the same distance."""
    p = sig.read(MatmulParams).pixels
    assert p is not None
    return math.gcd(rows, sig.operands[1].shape[0] // p.stride) if index else rows


def serves(sig: Signature, index: int) -> bool:
    """True if tensor maps can describe operand `index`."""
    params, operand = sig.read(MatmulParams), sig.operands[index]
    assert params.pixels is not None
    return (
        boxable(operand.shape, operand.strides, operand.itemsize, params.pixels)
        and params.pixels.chunk * operand.itemsize == BOX_ROW_BYTES
        and _rows_of_box(sig, index, params.tile[index]) % BOX_ROWS == 0
    )


def pixel_map(sig: Signature, index: int, rows: int, p: PixelParams) -> BoxMap:
    """The tensor map of an operand. rows: the rows of the operand in a stage."""
    operand = sig.operands[index]
    sizes = tuple(reversed(operand.shape))
    steps = tuple(s * operand.itemsize for s in reversed(operand.strides[:2]))
    box = (p.chunk, 1, _rows_of_box(sig, index, rows))
    return BoxMap(index, operand.dtype, sizes, steps, box)


def pixel_type(sig: Signature, index: int, p: PixelParams) -> str:
    """The C++ type with which the loading thread finds the chunks of a stage."""
    rows = sig.operands[1].shape[0] // p.stride if index else 0
    numbers = (rows, chunks(sig.operands[0].shape, p), p.chunk, p.stride, p.dilation, p.before)
    return f"ArkPixels<{', '.join(map(str, (*numbers, p.pitch)))}>"


PIXELS = once(
    "ARK_PIXELS",
    """// An operand of a product that sums over pixels. k counts the pixels of CHUNKS chunks of
// CHUNK pixels of each image. HIGH: the rows of the convolution's input for one row of the window;
// 0 for the gradient of the result. STEP, APART, BEFORE: stride, dilation and padding of the rows
// of windows. PITCH: the distance between rows of pixels.
ARK_DEVICE constexpr int ark_common_divisor(int a, int b) {
  return b == 0 ? a : ark_common_divisor(b, a % b);
}
template <int HIGH, int CHUNKS, int CHUNK, int STEP, int APART, int BEFORE, int PITCH>
struct ArkPixels {
  template <int ROWS>
  static ARK_DEVICE_MEMBER void load(char* to, ark_u64 map, int row, int k, ark_u64* full,
                                     ark_u64 keep) {
    const int chunk = k / CHUNK, image = chunk / CHUNKS, pixel = chunk % CHUNKS * CHUNK;
    if constexpr (HIGH == 0) {
      ark_box_load(to, map, pixel, image, row, full, keep);
    } else {
      constexpr int PART = ark_common_divisor(ROWS, HIGH);
#pragma unroll
      for (int i = 0; i < ROWS; i += PART) {
        const int line = (row + i) / HIGH * APART - BEFORE, down = ark_floor_div(line, STEP);
        ark_box_load(to + 128 * i, map, pixel + down * PITCH, image,
                     (line - down * STEP) * HIGH + (row + i) % HIGH, full, keep);
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
