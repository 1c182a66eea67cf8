"""The layout of a quantised weight in ark's memory, and the weight's values in NumPy.

A weight (outputs, inputs) consists of codes, and of a scale and possibly a zero point for each
group of neighbouring inputs: value = scale * (code - zero point). Formats (ark.models.formats)
decode a checkpoint's tensors to `Codes`. On the device, codes are stored as rows of a RowType
(codes followed by scales and zero points), by which linear layers multiply.
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
    """The layout of a quantised weight. codes: the type of the codes. group: the number of inputs
    that share a scale. scales: the type of scales and zero points. zeros: True if there are zero
    points. ordered: True if activations are reordered before the matmul, so that the inputs of a
    group are next to each other.
    """

    codes: DataType
    group: int
    scales: DataType
    zeros: bool = False
    ordered: bool = False

    def row_type(self, inputs: int, values: DataType) -> RowType:
        """The type of the weight's rows with `inputs` elements. values: the type to which they are
        dequantised.
        """
        return row_type(self.codes, inputs, self.group, self.scales, self.zeros, values)

    def grouped(self, inputs: int) -> Layout:
        """A copy of this layout whose groups have a size that divides `inputs`."""
        return replace(self, group=math.gcd(self.group, inputs))

    def nbytes(self, shape: Sequence[int]) -> int:
        """The bytes of a weight of that shape."""
        *outputs, inputs = shape
        order = 4 * inputs if self.ordered else 0
        return self.row_type(inputs, fp32).nbytes(math.prod(outputs) * inputs) + order


def group_for(group: int, inputs: int) -> int:
    """The largest group size that a RowType supports and that divides both the format's group and a
    row. 0 if there is none.
    """
    fits = math.gcd(group, inputs)
    return 0 if fits % CODE_STEP else fits


@dataclass(frozen=True)
class Codes:
    """A quantised weight. codes: (outputs, inputs) of a NumPy or ml_dtypes type. scales, zeros:
    (outputs, groups). order: the index of the input to which each column belongs; None if columns
    are in the order of inputs.
    """

    codes: Array
    scales: Array
    zeros: Array | None = None
    order: Array | None = None

    def floats(self) -> npt.NDArray[np.float32]:
        """The values, fp32 (outputs, inputs). This is the definition against which kernels are
        tested.
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
        """The codes of some of the outputs. places: the indices of these outputs."""
        zeros = None if self.zeros is None else self.zeros[places]
        return Codes(self.codes[places], self.scales[places], zeros, self.order)

    def rows_of(self, dtype: RowType, share: Sequence[slice] = ()) -> Array:
        """The rows in the memory format of `dtype`, as bytes. share: slices of the outputs and the
        inputs; by default all.
        """
        rows, columns = (*share, slice(None), slice(None))[:2]
        codes = self.codes[rows, columns]
        begin, group = columns.start or 0, self.codes.shape[1] // self.scales.shape[1]
        places = (begin + dtype.group * np.arange(dtype.groups)) // group
        wide = [None if v is None else v[rows][:, places] for v in (self.scales, self.zeros)]
        assert wide[0] is not None
        return row_bytes(dtype, codes, wide[0], wide[1])

    def places(self) -> Array:
        """For each column of the codes, the index of the input to which it belongs."""
        known = np.arange(self.codes.shape[1]) if self.order is None else self.order
        return known.astype(np.int32)
