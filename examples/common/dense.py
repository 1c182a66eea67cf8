"""Small dense algebra in batches. A number may be a NumPy array or a tensor of ark.

A vector is a list of numbers. A symmetric matrix is the list of its upper triangle, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Number = Any
AXES = ((1, 2), (2, 0), (0, 1))


def at(size: int, row: int, column: int) -> int:
    """The index of an element of a symmetric matrix in the list of its upper triangle."""
    i, j = sorted((row, column))
    return i * size - i * (i - 1) // 2 + j - i


def dot(left: Sequence[Number], right: Sequence[Number]) -> Number:
    total = left[0] * right[0]
    for a, b in zip(left[1:], right[1:], strict=True):
        total = total + a * b
    return total


def cross(left: Sequence[Number], right: Sequence[Number]) -> list[Number]:
    return [left[j] * right[k] - left[k] * right[j] for j, k in AXES]


def inverse(matrix: Sequence[Number]) -> list[Number]:
    """The inverse of a symmetric 3x3 matrix, by cofactors."""
    a, b, c, d, e, f = matrix
    cofactors = [d * f - e * e, c * e - b * f, b * e - c * d]
    cofactors += [a * f - c * c, b * c - a * e, a * d - b * b]
    scale = 1.0 / dot([a, b, c], cofactors[:3])
    return [x * scale for x in cofactors]


def solve(matrix: Sequence[Number], right: Sequence[Number]) -> list[Number]:
    """The solution x of matrix x = right, for a symmetric positive definite matrix, by L D L'."""
    size = len(right)
    lower: dict[tuple[int, int], Number] = {}
    scaled: dict[tuple[int, int], Number] = {}  # L D
    pivots: list[Number] = []  # 1 / D
    x: list[Number] = []
    for j in range(size):
        for i in range(j, size):
            value = matrix[at(size, i, j)]
            if j:
                value = value - dot(
                    [scaled[i, k] for k in range(j)], [lower[j, k] for k in range(j)]
                )
            scaled[i, j] = value
            if i == j:
                pivots.append(1.0 / value)
            lower[i, j] = value * pivots[j]
        x.append(right[j])
        if j:
            x[j] = x[j] - dot([lower[j, k] for k in range(j)], x[:j])
    x = [value * pivot for value, pivot in zip(x, pivots, strict=True)]
    for j in reversed(range(size - 1)):
        below = range(j + 1, size)
        x[j] = x[j] - dot([lower[i, j] for i in below], [x[i] for i in below])
    return x
