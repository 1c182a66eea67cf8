"""Converts ONNX's Fourier transforms to products with matrices of cosines and sines, which are
computed while the graph is built.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import ark
from ark.errors import ModelError
from ark.interop.onnx.values import Call, Value, axis_of, operator, refuse, shaped
from ark.ir.dtype import FLOATS

MOST_POINTS = 4096  # most points of a transform, whose matrix has their square as elements


def _factors(n: int, points: int, inverse: bool, onesided: bool) -> np.ndarray:
    """The matrix of a Fourier transform: the factor of each element in each result, shape
    (elements, results). The factors of an inverse transform are not divided by `points`.

    onesided: only the first half of the results is computed. In an inverse transform, only the
    first half of the elements is given.
    """
    if points > MOST_POINTS:
        raise refuse(f"a Fourier transform of {points} points")
    rows, results = np.arange(min(n, points)), np.arange(points)
    if onesided and not inverse:
        results = results[: points // 2 + 1]
    if onesided and inverse:
        rows = rows[: points // 2 + 1]
    turns = np.outer(rows, results) % points * (2 * math.pi / points)
    factors = np.exp(1j * turns) if inverse else np.exp(-1j * turns)
    if onesided and inverse:  # the elements of the other half are conjugates of these
        alone = (rows == 0) | (2 * rows == points)
        factors = factors * np.where(alone, 1.0, 2.0)[:, None]
    return np.concatenate([factors, np.zeros((n - len(rows), len(results)))])


def _matrix(factors: np.ndarray, parts: int, real: bool = False) -> np.ndarray:
    """The factors as a real fp32 matrix, (elements * parts, results * 2), in which real and
    imaginary parts alternate. With `real`, results have only real parts: (elements * parts,
    results).
    """
    n, results = factors.shape
    whole = np.zeros((n, parts, results, 2))
    whole[:, 0, :, 0], whole[:, 0, :, 1] = factors.real, factors.imag
    if parts == 2:  # for the imaginary part of an element, the factor is multiplied by i
        whole[:, 1, :, 0], whole[:, 1, :, 1] = -factors.imag, factors.real
    whole = whole[..., :1] if real else whole
    return whole.reshape(n * parts, -1).astype(np.float32)


def _folded(call: Call, rows: Any, factors: np.ndarray) -> tuple[Any, np.ndarray]:
    """Folds rows, so that a Fourier transform needs half as many products. The cosine factors of
    elements j and n - j are equal, and their sine factors are opposite. So the sum of the two
    elements is multiplied by the cosine, and their difference by the sine. Returns the sums and
    differences as (rows, elements, parts), and the factors. Rounding errors are also smaller,
    because fewer terms are added up.
    """
    n = len(factors)
    even = np.arange(n // 2, -1, -1)
    odd = np.arange((n - 1) // 2, 0, -1)
    pairs = []
    for places, function in ((odd, ark.sub), (even, ark.add)):
        if len(places):
            one, other = (call.constant(p.astype(np.int32)) for p in (places, -places % n))
            pairs.append(function(ark.gather(rows, one, 1), ark.gather(rows, other, 1)))
    alone = np.where(even == -even % n, 0.5, 1.0)[:, None]
    parts = [1j * factors[odd].imag, alone * factors[even].real]
    return ark.concat(pairs, 1) if len(pairs) > 1 else pairs[0], np.concatenate(parts)


def _transformed(call: Call, rows: Any, matrix: np.ndarray) -> Any:
    """The product of rows (rows, elements) with the matrix."""
    return ark.matmul(rows, ark.cast(call.constant(matrix), rows.ir.dtype))


@operator("DFT")
def _dft(call: Call) -> Value:
    shape, tensor = call.shape(0), call.tensor(0)
    parts = shape[-1]
    if tensor.ir.dtype not in FLOATS or parts not in (1, 2):
        raise ModelError(
            f"a Fourier transform of {tensor.ir.dtype.name} {list(shape)} is not valid; expected "
            "floats whose last dimension has 1 or 2 elements (real and imaginary part)"
        )
    if call.version >= 20:
        axis = int(call.array(2).item()) if call.has(2) else -2
    else:
        axis = call.attribute("axis", 1)
    axis = axis_of(axis, len(shape))
    if axis == len(shape) - 1:
        raise ModelError(
            "the axis of the transform is the dimension of real and imaginary parts; choose "
            "another axis"
        )
    inverse, onesided = bool(call.attribute("inverse", 0)), bool(call.attribute("onesided", 0))
    n = shape[axis]
    points = int(call.array(1).item()) if call.has(1) else 0
    points = points or (2 * (n - 1) if inverse and onesided else n)
    factors = _factors(n, points, inverse, onesided)
    order = [d for d in range(len(shape)) if d not in (axis, len(shape) - 1)]
    order += [axis, len(shape) - 1]
    rows = ark.transpose(tensor, order) if order != sorted(order) else tensor
    lead = [shape[d] for d in order[:-2]]
    rows = ark.reshape(rows, [math.prod(lead), n, parts])
    if n == points and not (onesided and inverse):
        rows, factors = _folded(call, rows, factors)
    last = 1 if onesided and inverse else 2
    matrix = _matrix(factors, parts, last == 1)
    result = _transformed(call, ark.reshape(rows, [math.prod(lead), n * parts]), matrix)
    wide = [*lead, matrix.shape[1] // last, last]
    result = ark.reshape(ark.div(result, float(points)) if inverse else result, wide)
    back = [order.index(d) for d in range(len(shape))]
    result = ark.transpose(result, back) if back != sorted(back) else result
    return shaped(result, [wide[d] for d in back])


@operator("STFT")
def _stft(call: Call) -> Value:
    """Converts STFT: Fourier transforms of overlapping frames of a signal. The result is (batch,
    frames, results, 2).
    """
    shape, step = call.shape(0), int(call.array(1).item())
    length = int(call.array(3).item()) if call.has(3) else call.shape(2)[0]
    batch, n = shape[:2]
    parts = shape[2] if len(shape) > 2 else 1
    frames = (n - length) // step + 1
    if step < 1 or length < 1 or frames < 1:
        raise ModelError(
            f"frames of {length} elements at steps of {step} do not fit a signal of {n} elements"
        )
    window = call.value(2).array if call.has(2) else None
    factors = _factors(length, length, False, bool(call.attribute("onesided", 1)))
    if window is not None:
        factors = factors * window.astype(np.float64)[:, None]
    matrix = _matrix(factors, parts)
    places = np.arange(frames)[:, None] * step + np.arange(length)
    signal = ark.reshape(call.tensor(0), [batch, n, parts])
    rows = ark.gather(signal, call.constant(places.astype(np.int32)), 1)
    if call.has(2) and window is None:
        rows = ark.mul(rows, ark.reshape(call.tensor(2), [length, 1]))
    rows = ark.reshape(rows, [batch * frames, length * parts])
    return shaped(_transformed(call, rows, matrix), (batch, frames, matrix.shape[1] // 2, 2))
