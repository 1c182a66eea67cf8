"""Describes how a packed parameter is made from several parameters of a model. A packed parameter
is a weight in the layout that a kernel reads, for example the query, key and value matrices as one
matrix. ark.lower.rewrite.pack_weights decides which parameters are packed, ark.models.load packs
when it reads a checkpoint, and ark.plan.packing writes the description to plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Part:
    """One of the parameters, of shape (rows, columns) or (rows,), from which a packed parameter is
    made. pairs: 0 if the rows keep their order. Otherwise pairs is the width of an attention head,
    and rows are reordered so that the elements of a rotary pair are neighbours: within each head,
    row i is followed by row i + pairs / 2.
    """

    name: str
    pairs: int = 0


@dataclass(frozen=True)
class Packing:
    """The description of one packed parameter. name: the packed parameter's name. parts: the
    parameters that are packed. interleave: True if its rows are taken from the parts in turn, one
    row from each; False if the parts are concatenated.
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
