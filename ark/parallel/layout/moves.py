"""Moves: conversions of a layout by one collective.

A layout has three kinds of numbers: of replicas, of value splits (partial sums), and of parts along
each dimension. A move divides one of these numbers by a factor c and multiplies another one by c.
For example, an all-reduce over 4 devices divides the value splits by 4 and multiplies the replicas
by 4. Devices are numbered so that the factor varies fastest in both numbers. So after any sequence
of moves, each device's block is a box of the tensor. ark.parallel.layout.paths searches over moves;
the tests execute them on arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ark.parallel.layout.types import Layout, divisors

R, V, D = 0, 1, 2  # axes of a layout: replicas, values; dimension d is D + d


@dataclass(frozen=True)
class Step:
    """One collective of a conversion, which all groups of devices execute at the same time.

    op: all_reduce, all_gather, reduce_scatter or all_to_all; or slice or value_split, which send
    nothing. source, target: two numbers of the layout (of replicas, value splits or parts of a
    dimension). The step divides `source` by `ranks` and multiplies `target` by it. elements: the
    number of elements that each device sends, by the papers' formulas for rings. groups: the
    devices that communicate with each other, in the order of their parts.
    """

    op: str
    source: int
    target: int
    ranks: int
    elements: float
    before: Layout
    after: Layout
    groups: tuple[tuple[int, ...], ...] = field(default=(), repr=False)


def operation(source: int, target: int) -> str | None:
    """The collective that converts a split along axis `source` to a split along axis `target`; None
    if there is none. An axis is the replicas (R: each rank has the whole tensor), the values (V:
    each rank has a summand of each element), or a dimension of the tensor (each rank has a slice).
    """
    if source == target:
        return None
    if source == V:
        return "all_reduce" if target == R else "reduce_scatter"
    if source == R:
        return "value_split" if target == V else "slice"
    if target == V:
        return None
    return "all_gather" if target == R else "all_to_all"


def ring_volume(op: str, ranks: int, elements: int) -> int:
    """`ranks` times the number of elements that each device sends. elements: the size of a device's
    block before the step.

    The factor `ranks` makes the result a whole number. The formulas are those of rings: in an
    all-gather a device forwards c - 1 blocks, in a reduce-scatter and an all-to-all c - 1 parts of
    a block.
    """
    passed_on = {
        "all_gather": ranks * (ranks - 1),
        "all_reduce": 2 * (ranks - 1),
        "reduce_scatter": ranks - 1,
        "all_to_all": ranks - 1,
    }
    return passed_on.get(op, 0) * elements


def moves(layout: Layout) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """All moves (conversions by one collective) from a layout. For each: the source axis, the
    target axis, the factor, and the numbers (replicas, value splits, parts) of the resulting
    layout.
    """
    counts = layout.counts
    for source, count in enumerate(counts):
        for factor in divisors(count)[1:]:
            for target in range(len(counts)):
                if operation(source, target) is not None:
                    result = list(counts)
                    result[source] //= factor
                    result[target] *= factor
                    yield source, target, factor, tuple(result)


def moved(coordinates: np.ndarray, source: int, target: int, factor: int) -> np.ndarray:
    """The devices' coordinates (see `Layout.coordinates`) after a move of `factor` from axis
    `source` to axis `target`.
    """
    result: np.ndarray = coordinates.copy()
    result[:, source] //= factor
    result[:, target] = result[:, target] * factor + coordinates[:, source] % factor
    return result


def groups(coordinates: np.ndarray, source: int, factor: int) -> tuple[tuple[int, ...], ...]:
    """Groups of devices that communicate with each other in a move. The devices of a group have the
    same coordinates, except for the factor that the move takes from axis `source`. They are listed
    in the order of that factor.
    """
    key = coordinates.copy()
    key[:, source] //= factor
    order = np.lexsort((coordinates[:, source] % factor, *key.T[::-1]))
    rows = [tuple(row) for row in order.reshape(-1, factor).tolist()]
    return tuple(sorted(rows))
