"""How a packed parameter is made from a model's parameters. ark.lower.rewrite.pack_weights decides
it, ark.models.load follows it when it reads a checkpoint, and ark.plan.packing writes it to plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Part:
    """One of the parameters (rows, columns), or (rows,), from which a packed one is made. pairs: 0
    if its rows keep their order. Otherwise it is the width of a head, and within each head row i is
    followed by row i + pairs / 2.
    """

    name: str
    pairs: int = 0


@dataclass(frozen=True)
class Packing:
    """A parameter that is made from others. interleave: True if rows are taken from the parts in
    turn, one from each; False if the parts are concatenated.
    """

    name: str
    parts: tuple[Part, ...]
    interleave: bool = False

    def apply(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """The packed parameter as an array. read: a function that returns the array of one of the
        parts by name.
        """
        arrays = [_paired(read(part.name), part.pairs) for part in self.parts]
        if not self.interleave:
            return np.concatenate(arrays)
        return np.stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:])


def _paired(rows: np.ndarray, width: int) -> np.ndarray:
    if not width:
        return rows
    halves = rows.reshape(-1, 2, width // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
