"""How a packed parameter is made of a model's parameters: what ark.lower.rewrite.pack_weights
decides and ark.models.load follows when it reads a checkpoint. ark.plan.packing writes it to plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Part:
    """A parameter (rows, columns) of the model. pairs: 0 for its rows as they are, else a head's
    width: the two halves of each head's rows alternate, so that i and i + pairs / 2 are neighbours.
    """

    name: str
    pairs: int = 0


@dataclass(frozen=True)
class Packing:
    """A parameter that is made of others. interleave: rows of the parts in turn, as many of each;
    else the parts are concatenated.
    """

    name: str
    parts: tuple[Part, ...]
    interleave: bool = False

    def apply(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """The packed array; `read` gives a part (rows, columns) by name."""
        arrays = [_paired(read(part.name), part.pairs) for part in self.parts]
        if not self.interleave:
            return np.concatenate(arrays)
        return np.stack(arrays, axis=1).reshape(-1, arrays[0].shape[1])


def _paired(rows: np.ndarray, width: int) -> np.ndarray:
    if not width:
        return rows
    halves = rows.reshape(-1, 2, width // 2, rows.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
