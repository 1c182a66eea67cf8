"""The cuts of products of convolution windows that box copies load, in the kernel variant `matrix`.

Called by the rewrites that choose layouts of convolutions, and by the lowering of matmul.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ark.lower.cuts import Cut, box_costs, candidates, predicted_us
from ark.machine import Machine


def window_cuts(
    shape: Sequence[int],
    depth: int,
    itemsize: int,
    machine: Machine,
    parts: bool = False,
    channels: int = 0,
) -> list[Cut]:
    """The cuts of a product whose left operand is a matrix of convolution windows that box copies
    load. Empty if the result has fewer columns than the narrowest tile for windows. parts: True if
    k may be divided. channels: as for `candidates`.
    """
    flags = {"narrow": True, "windows": True, "plain": True}
    return candidates(shape, depth, itemsize, machine, parts=parts, channels=channels, **flags)


def divides_windows(
    shape: Sequence[int],
    depth: int,
    itemsize: int,
    machine: Machine,
    flat: Sequence[int] = (),
    besides: float = 0.0,
) -> bool:
    """True if a product of windows is predicted to be faster with k divided into parts, although an
    op of its own adds them. flat: the shape of the product in parts, by default `shape`. besides:
    further microseconds that the parts take. Other arguments: see `window_cuts`.
    """
    parts = _windows_us(flat or shape, depth, itemsize, machine, parts=True)
    besides += box_costs(machine).fold_us
    return parts + besides < _windows_us(shape, depth, itemsize, machine)


def _windows_us(
    shape: Sequence[int], depth: int, itemsize: int, machine: Machine, parts: bool = False
) -> float:
    """The predicted microseconds of a product of windows with its fastest cut; infinite if it has
    none.
    """
    able = window_cuts(shape, depth, itemsize, machine, parts)
    times = (predicted_us(c, shape, depth, itemsize, machine, windows=True) for c in able)
    return min(times, default=math.inf)
