"""Products that sum over the pixels of images: the gradient of a convolution's weights. Used by the
task kind ark.tasks.matmul and by lowering.

Both operands have images and then the pixels of an image as their last dimensions: the gradient of
the result (m, n, pixels), and the convolution's input (stride * columns of the window * channels,
n, pixels). The input is stored once for each column of the window, moved by this column, with the
pixels of the gradient's columns. If windows have a stride, its rows 0, stride, 2 * stride... are
stored first, then rows 1, stride + 1... Rows of pixels have the same length in both operands, which
may include zeros at the end. So the pixel that an element of the window reads is at the same
distance from the gradient's pixel everywhere. Element (i, row of the window, j) of the product is
the sum over all images and pixels of row i of the gradient times the pixel that this row of the
window reads in column and channel j. Pixels outside of an image are zero.

The param `pixels` of a matmul describes them. rows: of the window. stride, dilation, before: of the
rows (as in ark.tasks.convolution). pitch: the length of a row of pixels. chunk: the dimension k
counts the pixels of each image by chunks of this number. A box copy (TMA) loads a chunk of several
rows of an operand, with zeros for pixels outside of the image. It can begin only at multiples of 16
bytes, which is why the input is stored several times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ark.plan.kind import Signature
from ark.plan.params import INT_MAX, need
from ark.plan.types import BOX_ALIGNMENT_BYTES
from ark.tasks import text
from ark.tasks.matmul_params import MatmulParams, PixelParams


def chunks(shape: Sequence[int], p: PixelParams) -> int:
    """The number of chunks of an image of the gradient. shape: the gradient's."""
    return -(-shape[2] // p.chunk)


def matrix_shape(
    shape: Sequence[int], other: Sequence[int], p: PixelParams, index: int
) -> tuple[int, int]:
    """The shape of operand `index` as a matrix. shape, other: those of both operands."""
    k = shape[1] * chunks(shape, p) * p.chunk
    return (other[0] // p.stride * p.rows if index else shape[0]), k


def place(row: int, p: PixelParams) -> tuple[int, int]:
    """Where a row of the window reads the input: in the image's rows from which number on, and at
    which distance in pixels from the gradient's pixel.
    """
    down, first = divmod(row * p.dilation - p.before, p.stride)
    return first, down * p.pitch


def side_shape(sig: Signature, index: int, p: PixelParams) -> tuple[int, int]:
    """The shape of operand 0 or 1 as a matrix."""
    return matrix_shape(sig.operands[0].shape, sig.operands[1].shape, p, index)


def check(sig: Signature, p: PixelParams) -> None:
    """Raises PlanError unless the operands fit each other and the product has no other special
    form.
    """
    params, (back, image) = sig.read(MatmulParams), sig.operands[:2]
    need(
        len(back.shape) == len(image.shape) == 3 and back.shape[1] == image.shape[1],
        f"operands {list(back.shape)} and {list(image.shape)} must be (rows, n, pixels) of the "
        "same images",
    )
    need(
        image.shape[0] % p.stride == 0,
        f"{image.shape[0]} rows of the input do not divide by the stride {p.stride}",
    )
    reach = p.chunk + (p.before + p.rows * p.dilation) * p.pitch
    need(back.shape[2] + reach < INT_MAX, "pixel indices exceed 32 bits")
    need(math.prod(side_shape(sig, 1, p)) <= INT_MAX**2, "indices of k exceed 64 bits")
    plain = (params.gated, params.heads, params.kv_heads, params.head_dim, params.windows)
    need(
        not params.transpose_a and params.transpose_b and not any(plain),
        "a product over pixels needs the right operand transposed, and no other special form",
    )


def touched(
    sig: Signature, index: int, ends: tuple[int, int], part: tuple[int, int], p: PixelParams
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The box of an operand that a tile reads. ends: its first row (of operand 1: column), and its
    last one + 1. part: the first element of k, and the last one + 1.
    """
    shape, (first, end) = sig.operands[index].shape, ends
    each = chunks(sig.operands[0].shape, p) * p.chunk
    images = part[0] // each, (part[1] - 1) // each + 1
    low, high = first, end
    if index:
        each_row = shape[0] // p.stride
        low, high = 0, shape[0]
        if first // each_row == (end - 1) // each_row:
            begin = place(first // each_row, p)[0] * each_row
            low, high = begin + first % each_row, begin + (end - 1) % each_row + 1
    return (low, images[0], 0), (high, images[1], shape[2])


def boxable(shape: Sequence[int], strides: Sequence[int], itemsize: int, p: PixelParams) -> bool:
    """True if box copies can load chunks of an operand with this shape and these strides."""
    steps = (*strides[:-1], p.pitch, p.chunk)
    return strides[-1] == 1 and all(s * itemsize % BOX_ALIGNMENT_BYTES == 0 for s in steps)


def tile_text(
    sig: Signature,
    dims: Sequence[int],
    part: tuple[str, str],
    finish: Callable[[str, str], str],
) -> str:
    """C++ statements that compute the tile at row m0 and column n0. dims: m and n of the product.
    part: the texts of the first element of k and of the last one + 1. finish: a function of the
    texts of a row and a column that returns statements which store `sum` there.
    """
    params, (back, image) = sig.read(MatmulParams), sig.operands[:2]
    p = params.pixels
    assert p is not None
    each, each_row = chunks(back.shape, p) * p.chunk, image.shape[0] // p.stride
    at = text.offset(sig, 0, ["m", "image", "pixel"])
    from_image = text.offset(sig, 1, ["right", "image", "seen"])
    load = text.load(sig, 0, "p0", at), text.load(sig, 1, "p1", from_image)
    rows, columns = params.tile
    return (
        text.operand(sig, 0, "p0")
        + text.operand(sig, 1, "p1")
        + f"""  for (int e = ark_tid(); e < {rows * columns}; e += ARK_THREADS) {{
    const int m = m0 + e / {columns}, n = n0 + e % {columns};
    if (m >= {dims[0]} || n >= {dims[1]}) continue;
    const int row = n / {each_row} * {p.dilation} - {p.before};
    const int down = ark_floor_div(row, {p.stride});
    const int right = (row - down * {p.stride}) * {each_row} + n % {each_row};
    float sum = 0.0f;
    for (ark_i64 k = {part[0]}; k < {part[1]}; ++k) {{
      const int image = static_cast<int>(k / {each}), pixel = static_cast<int>(k % {each});
      const int seen = pixel + down * {p.pitch};
      if (pixel >= {back.shape[2]} || seen < 0 || seen >= {image.shape[2]}) continue;
      sum += {load[0]} * {load[1]};
    }}
{finish("m", "n")}  }}
"""
    )


def summed(back: np.ndarray, image: np.ndarray, p: PixelParams) -> np.ndarray:
    """The product in NumPy: (m, rows of the window * rows of the input)."""
    rows = []
    each_row = image.shape[0] // p.stride
    for row in range(p.rows):
        first, distance = place(row, p)
        at = np.arange(back.shape[2]) + distance
        inside = (at >= 0) & (at < image.shape[2])
        part = image[first * each_row : (first + 1) * each_row]
        moved = part[:, :, at.clip(0, image.shape[2] - 1)] * inside
        rows.append(np.einsum("mnp,cnp->mc", back, moved))
    return np.concatenate(rows, axis=1)
