"""Describes parameters that are not a whole stored tensor, but some of its rows, reordered rows, or
values with a constant added. Decoders return these descriptions (Llama.stored), and
ark.models.checkpoint reads the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Stored:
    """Describes how a parameter is stored in a checkpoint. rows: the rows of the stored tensor of
    which the parameter consists, in the parameter's order. rows_in_all: the number of all rows of
    the stored tensor. added: a constant that is added to every element; the parameter is then fp32.
    axis: the dimension of the rows; 1 if the first dimension is that of experts or heads.
    transposed: True if the stored tensor's last two dimensions are swapped. folded: True if its
    first two dimensions are merged into one.
    """

    rows: Sequence[int]
    rows_in_all: int
    added: float = 0.0
    axis: int = 0
    transposed: bool = False
    folded: bool = False

    def shape(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stored tensor. own: the parameter's shape."""
        sizes = self.unfolded(own)
        sizes = (*sizes[:-2], sizes[-1], sizes[-2]) if self.transposed else sizes
        return (sizes[0] * sizes[1], *sizes[2:]) if self.folded else sizes

    def whole(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stored tensor with outputs before inputs, for a quantised tensor."""
        return self.shape(own) if self.folded else self.unfolded(own)

    def unfolded(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the parameter would have with all rows of the stored tensor. own: the
        parameter's shape.
        """
        return (*own[: self.axis], self.rows_in_all, *own[self.axis + 1 :])

    def of_experts(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The elements of a parameter for some experts. values: the stored elements of these
        experts.
        """
        if self.folded:
            values = values.reshape(-1, self.rows_in_all, *values.shape[1:])
        turned = values.swapaxes(-1, -2) if self.transposed else values
        return self.adjust(turned.take(np.asarray(self.rows, np.intp), self.axis))

    def span(self, share: slice) -> tuple[int, int, npt.NDArray[np.intp]]:
        """Returns the range of stored rows that contains a slice of the parameter's rows, and the
        indices of the slice's rows in this range.
        """
        rows = np.asarray(self.rows, np.intp)[share]
        begin = int(rows.min())
        return begin, int(rows.max()) + 1, rows - begin

    def adjust(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The values with the constant added, if there is one."""
        return values.astype(np.float32) + np.float32(self.added) if self.added else values


def parts(sizes: Sequence[int]) -> list[Stored]:
    """Descriptions of several parameters that one tensor holds one after the other. sizes: their
    numbers of rows.
    """
    ends = np.cumsum(sizes).tolist()
    return [Stored(range(b - n, b), ends[-1]) for n, b in zip(sizes, ends, strict=True)]


def plus_one(rows: int) -> Stored:
    """The description of a norm's weights, for checkpoints that store the weights minus 1."""
    return Stored(range(rows), rows, 1.0)


def rotated_first(stored: Stored, width: int, rotated: int) -> Stored:
    """Reorders the rows of queries or keys whose heads have `width` elements, of which the first
    `rotated` are rotated. ark rotates whole heads, in pairs of elements, with an angle of 0 for
    elements that are not rotated. In the new order, the rotated elements form the first pairs of a
    head, and the other elements form the last pairs.
    """
    half, rest = rotated // 2, (width - rotated) // 2
    order = [*range(half), *range(rotated, rotated + rest)]
    order += [*range(half, rotated), *range(rotated + rest, width)]
    heads = range(0, len(stored.rows), width)
    rows = [stored.rows[head + place] for head in heads for place in order]
    return Stored(rows, stored.rows_in_all, stored.added)
