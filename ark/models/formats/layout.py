"""The layout of a quantised weight in ark's memory, and its values in NumPy.

A weight (outputs, inputs) is codes with a scale, and perhaps a zero, for each group of neighbouring
inputs: value = scale * (code - zero). Formats (ark.models.formats) decode a checkpoint's tensors to
`Codes`; in memory they are rows of a RowType, by which linear layers multiply.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ark.ir.dtype import CODE_STEP, DataType, RowType, fp32, row_type
from ark.ir.rows import row_bytes

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Layout:
    """codes: the codes' type. group: the number of inputs that share a scale. scales: the type of
    scales and zeros. zeros: True if there are zeros. ordered: True if the inputs are reordered
    before the product so that those of a group are adjacent.
    """

    codes: DataType
    group: int
    scales: DataType
    zeros: bool = False
    ordered: bool = False

    def row_type(self, inputs: int, values: DataType) -> RowType:
        """The type of a weight's rows of `inputs` elements. values: the type to which they are
        dequantised.
        """
        return row_type(self.codes, inputs, self.group, self.scales, self.zeros, values)

    def grouped(self, inputs: int) -> Layout:
        """The same layout with groups that divide `inputs`."""
        return replace(self, group=math.gcd(self.group, inputs))

    def nbytes(self, shape: Sequence[int]) -> int:
        """The bytes of a weight of that shape."""
        *outputs, inputs = shape
        order = 4 * inputs if self.ordered else 0
        return self.row_type(inputs, fp32).nbytes(math.prod(outputs) * inputs) + order


def group_for(group: int, inputs: int) -> int:
    """The largest size of groups that a RowType supports and that divides both the format's group
    and a row; 0 if none does.
    """
    fits = math.gcd(group, inputs)
    return 0 if fits % CODE_STEP else fits


@dataclass(frozen=True)
class Codes:
    """codes (outputs, inputs) of a NumPy or ml_dtypes type; scales and zeros (outputs, groups).
    order: the input of each column; None if columns are in the inputs' order.
    """

    codes: Array
    scales: Array
    zeros: Array | None = None
    order: Array | None = None

    def floats(self) -> npt.NDArray[np.float32]:
        """The values, fp32 (outputs, inputs). This is the definition; kernels are tested against
        it.
        """
        group = self.codes.shape[1] // self.scales.shape[1]
        values = self.codes.astype(np.float32)
        if self.zeros is not None:
            values -= self.zeros.astype(np.float32).repeat(group, 1)
        values *= self.scales.astype(np.float32).repeat(group, 1)
        if self.order is None:
            return values
        result = np.empty_like(values)
        result[:, self.order] = values
        return result

    def rows(self, places: Any) -> Codes:
        """The codes of some of the outputs."""
        zeros = None if self.zeros is None else self.zeros[places]
        return Codes(self.codes[places], self.scales[places], zeros, self.order)

    def rows_of(self, dtype: RowType, share: Sequence[slice] = ()) -> Array:
        """The rows in the memory format of `dtype`, as bytes. share: slices of outputs and inputs;
        by default all.
        """
        rows, columns = (*share, slice(None), slice(None))[:2]
        codes = self.codes[rows, columns]
        begin, group = columns.start or 0, self.codes.shape[1] // self.scales.shape[1]
        places = (begin + dtype.group * np.arange(dtype.groups)) // group
        wide = [None if v is None else v[rows][:, places] for v in (self.scales, self.zeros)]
        assert wide[0] is not None
        return row_bytes(dtype, codes, wide[0], wide[1])

    def places(self) -> Array:
        """The input of each column."""
        known = np.arange(self.codes.shape[1]) if self.order is None else self.order
        return known.astype(np.int32)
