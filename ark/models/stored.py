"""Parameters that differ from a stored tensor: some of its rows, reordered, or with a constant
added. Decoders describe them (Llama.stored), ark.models.checkpoint reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Stored:
    """rows: of the stored tensor, in the parameter's order. rows_in_all: of the stored tensor.
    added: to every element; the parameter is then fp32. axis: the dimension of the rows: 1 where
    the first one counts experts or heads. transposed: the stored tensor's last two dimensions are
    swapped. folded: its first two dimensions are one.
    """

    rows: Sequence[int]
    rows_in_all: int
    added: float = 0.0
    axis: int = 0
    transposed: bool = False
    folded: bool = False

    def shape(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The stored tensor's shape for that of the parameter."""
        sizes = self.unfolded(own)
        sizes = (*sizes[:-2], sizes[-1], sizes[-2]) if self.transposed else sizes
        return (sizes[0] * sizes[1], *sizes[2:]) if self.folded else sizes

    def whole(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The same with outputs before inputs, as it is where quantised."""
        return self.shape(own) if self.folded else self.unfolded(own)

    def unfolded(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The parameter's shape with all rows."""
        return (*own[: self.axis], self.rows_in_all, *own[self.axis + 1 :])

    def of_experts(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The parameter's elements from those of some experts."""
        if self.folded:
            values = values.reshape(-1, self.rows_in_all, *values.shape[1:])
        turned = values.swapaxes(-1, -2) if self.transposed else values
        return self.adjust(turned.take(np.asarray(self.rows, np.intp), self.axis))

    def span(self, share: slice) -> tuple[int, int, npt.NDArray[np.intp]]:
        """The range of stored rows that contains a share, and the share's indices within it."""
        rows = np.asarray(self.rows, np.intp)[share]
        begin = int(rows.min())
        return begin, int(rows.max()) + 1, rows - begin

    def adjust(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The parameter's elements from the stored ones."""
        return values.astype(np.float32) + np.float32(self.added) if self.added else values


def parts(sizes: Sequence[int]) -> list[Stored]:
    """Descriptions of several parameters that are concatenated in one tensor, with the given
    numbers of rows.
    """
    ends = np.cumsum(sizes).tolist()
    return [Stored(range(b - n, b), ends[-1]) for n, b in zip(sizes, ends, strict=True)]


def plus_one(rows: int) -> Stored:
    """A norm whose weights are stored with 1 subtracted."""
    return Stored(range(rows), rows, 1.0)


def rotated_first(stored: Stored, width: int, rotated: int) -> Stored:
    """Queries or keys of heads of `width` elements whose first `rotated` are rotated, reordered so
    that the pairs of a rotation of whole heads are those of the first elements, then the others.
    """
    half, rest = rotated // 2, (width - rotated) // 2
    order = [*range(half), *range(rotated, rotated + rest)]
    order += [*range(half, rotated), *range(rotated + rest, width)]
    heads = range(0, len(stored.rows), width)
    rows = [stored.rows[head + place] for head in heads for place in order]
    return Stored(rows, stored.rows_in_all, stored.added)
