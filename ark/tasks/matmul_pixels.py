"""Products that sum over the pixels of images: the gradient of a convolution's weights. Used by the
task kind ark.tasks.matmul and by lowering.

Both operands have channels first, then images, rows and columns: the gradient of the result (m, n,
rows, columns), and the convolution's input (channels, n, rows, columns). Element (i, tap, channel)
of the product is the sum over all images and pixels of the gradient's channel i times the input's
channel at the pixel that this element of the window (tap) reads. Pixels outside of an image are
zero.

The param `pixels` of a matmul describes them: size, dilation and before (of the windows, as in
ark.tasks.convolution; their stride is 1), and chunk. The dimension k counts pixels by chunks, which
are boxes of `chunk` rows and columns of the gradient. A box copy (TMA) loads a chunk of several
channels, with zeros for pixels outside of the image.
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

PLANE = 2  # spatial dimensions


def chunks(shape: Sequence[int], p: PixelParams) -> tuple[int, int]:
    """The numbers of chunks of an image of the gradient, down and across. shape: the gradient's."""
    down, across = (-(-n // c) for n, c in zip(shape[2:], p.chunk, strict=True))
    return down, across


def matrix_shape(
    shape: Sequence[int], other: Sequence[int], p: PixelParams, index: int
) -> tuple[int, int]:
    """The shape of operand `index` as a matrix. shape, other: those of both operands."""
    k = shape[1] * math.prod(chunks(shape, p)) * math.prod(p.chunk)
    return (other[0] * math.prod(p.size) if index else shape[0]), k


def pixels_of(sig: Signature) -> PixelParams | None:
    """The parameters of a product that sums over pixels; None for other products."""
    return sig.read(MatmulParams).pixels


def side_shape(sig: Signature, index: int, p: PixelParams) -> tuple[int, int]:
    """The shape of operand 0 or 1 as a matrix."""
    return matrix_shape(sig.operands[0].shape, sig.operands[1].shape, p, index)


def check(sig: Signature, p: PixelParams) -> None:
    """Raises PlanError unless the operands fit each other and the product has no other special
    form.
    """
    params, (back, image) = sig.read(MatmulParams), sig.operands[:2]
    need(
        len(back.shape) == len(image.shape) == 2 + PLANE and back.shape[1] == image.shape[1],
        f"operands {list(back.shape)} and {list(image.shape)} must be (channels, n, rows, columns) "
        "of the same images",
    )
    need(
        all(len(n) == PLANE for n in (p.size, p.dilation, p.before, p.chunk)),
        "a product over pixels needs two numbers for each parameter of its windows",
    )
    for d in range(PLANE):
        last = back.shape[2 + d] + p.chunk[d] + (p.size[d] - 1) * p.dilation[d]
        need(last < INT_MAX, "pixel indices exceed 32 bits")
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
    each = math.prod(chunks(sig.operands[0].shape, p)) * math.prod(p.chunk)
    images = part[0] // each, (part[1] - 1) // each + 1
    low, high = first, end
    if index:
        apart = first // shape[0] != (end - 1) // shape[0]
        low, high = (0, shape[0]) if apart else (first % shape[0], (end - 1) % shape[0] + 1)
    return (low, images[0], 0, 0), (high, images[1], *shape[2:])


def boxable(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """True if box copies can load chunks of an operand with this shape and these strides."""
    return strides[-1] == 1 and all(s * itemsize % BOX_ALIGNMENT_BYTES == 0 for s in strides[:-1])


def chunk_of(shape: Sequence[int], itemsize: int, row_bytes: int) -> tuple[int, int]:
    """The chunk (rows, columns) of `row_bytes` bytes with which fewest pixels outside of the images
    are loaded; of several such chunks the widest. shape: the gradient's.
    """
    many, least = row_bytes // itemsize, BOX_ALIGNMENT_BYTES // itemsize
    widths = [w for w in (many >> i for i in range(many.bit_length())) if w >= least]

    def loaded(width: int) -> int:
        down, across = many // width, width
        return -(-shape[2] // down) * -(-shape[3] // across)

    best = min(widths, key=loaded)  # the first, which is the widest
    return many // best, best


def tile_text(sig: Signature, dims: Sequence[int], finish: Callable[[str, str], str]) -> str:
    """C++ statements that compute the tile at row m0 and column n0, whose part of k is number i1.
    dims: m and n of the product. finish: a function of the texts of a row and a column that returns
    statements which store `sum` there.
    """
    p = pixels_of(sig)
    assert p is not None
    params, (back, image) = sig.read(MatmulParams), sig.operands[:2]
    down, across = chunks(back.shape, p)
    high, wide = p.chunk
    k0, k1 = _range(sig)
    at = text.offset(sig, 0, ["m", "image", "y", "x"])
    from_image = text.offset(sig, 1, [f"n % {image.shape[0]}", "image", "v", "u"])
    load = text.load(sig, 0, "p0", at), text.load(sig, 1, "p1", from_image)
    rows, columns = params.tile
    return (
        text.operand(sig, 0, "p0")
        + text.operand(sig, 1, "p1")
        + f"""  for (int e = ark_tid(); e < {rows * columns}; e += ARK_THREADS) {{
    const int m = m0 + e / {columns}, n = n0 + e % {columns};
    if (m >= {dims[0]} || n >= {dims[1]}) continue;
    const int tap = n / {image.shape[0]};
    float sum = 0.0f;
    for (ark_i64 k = {k0}; k < {k1}; ++k) {{
      const int inside = static_cast<int>(k % {high * wide});
      const ark_i64 chunk = k / {high * wide};
      const int image = static_cast<int>(chunk / {down * across});
      const int y = static_cast<int>(chunk / {across} % {down}) * {high} + inside / {wide};
      const int x = static_cast<int>(chunk % {across}) * {wide} + inside % {wide};
      const int v = y + tap / {p.size[1]} * {p.dilation[0]} - {p.before[0]};
      const int u = x + tap % {p.size[1]} * {p.dilation[1]} - {p.before[1]};
      if (y >= {back.shape[2]} || x >= {back.shape[3]} || v < 0 || v >= {image.shape[2]} ||
          u < 0 || u >= {image.shape[3]}) continue;
      sum += {load[0]} * {load[1]};
    }}
{finish("m", "n")}  }}
"""
    )


def _range(sig: Signature) -> tuple[str, str]:
    from ark.tasks.matmul_form import k_range

    return k_range(sig)


def summed(back: np.ndarray, image: np.ndarray, p: PixelParams) -> np.ndarray:
    """The product in NumPy: (m, taps * channels)."""
    rows, columns = back.shape[2:]
    taps = []
    for tap in np.ndindex(*p.size):
        moved = image
        for d, (k, n) in enumerate(zip(tap, (rows, columns), strict=True)):
            at = np.arange(n) + k * p.dilation[d] - p.before[d]
            inside = (at >= 0) & (at < image.shape[2 + d])
            wide = [n if axis == 2 + d else 1 for axis in range(4)]
            moved = np.take(moved, at.clip(0, image.shape[2 + d] - 1), axis=2 + d)
            moved = moved * inside.reshape(wide)
        taps.append(np.einsum("mnyx,cnyx->mc", back, moved))
    return np.concatenate(taps, axis=1)
