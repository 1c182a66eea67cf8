"""How a quantised weight lies in ark's memory, and its values in NumPy.

A weight (outputs, inputs) is codes with a scale, and perhaps a zero, for each group of neighbouring
inputs: value = scale * (code - zero). Formats (ark.models.formats) decode a checkpoint's tensors to
`Codes`; ark.quantized_linear multiplies by them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ark.ir.dtype import DataType
from ark.tasks.quantized import STEP

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Layout:
    """codes: their type. group: inputs that share a scale. scales: the type of scales and zeros.
    zeros: True where there are zeros. ordered: True where the inputs are reordered before the
    product, so that those of a group are neighbours.
    """

    codes: DataType
    group: int
    scales: DataType
    zeros: bool = False
    ordered: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of Codes that a weight has."""
        more = (("zeros",) if self.zeros else ()) + (("order",) if self.ordered else ())
        return ("codes", "scales", *more)

    def grouped(self, inputs: int) -> Layout:
        """The same with groups that divide so many inputs."""
        return replace(self, group=math.gcd(self.group, inputs))

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a weight."""
        outputs, inputs = shape
        scales = outputs * (inputs // self.group) * (2 if self.zeros else 1)
        order = 4 * inputs if self.ordered else 0
        return outputs * self.codes.nbytes(inputs) + self.scales.nbytes(scales) + order


def group_for(group: int, inputs: int) -> int:
    """The largest group that divides the format's group and a row, as ark.quantized_linear reads
    it; 0 if there is none.
    """
    fits = math.gcd(group, inputs)
    return 0 if fits % STEP else fits


@dataclass(frozen=True)
class Codes:
    """codes (outputs, inputs) of a NumPy or ml_dtypes type; scales and zeros (outputs, groups).
    order: the input that each column belongs to, if that is not its own number.
    """

    codes: Array
    scales: Array
    zeros: Array | None = None
    order: Array | None = None

    def floats(self) -> npt.NDArray[np.float32]:
        """The values, fp32 (outputs, inputs): the definition that all else is tested against."""
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
        """Some of the outputs."""
        zeros = None if self.zeros is None else self.zeros[places]
        return Codes(self.codes[places], self.scales[places], zeros, self.order)

    def laid_out(self, layout: Layout) -> dict[str, Array]:
        """The tensors by field, in the layout's types and groups."""
        inputs = self.codes.shape[1]
        times = inputs // self.scales.shape[1] // layout.group
        fields = {"codes": self.codes.astype(layout.codes.numpy, copy=False)}
        for name, values in (("scales", self.scales), ("zeros", self.zeros)):
            if values is not None and name in layout.fields:
                fields[name] = values.astype(layout.scales.numpy, copy=False).repeat(times, 1)
        if layout.ordered:
            order = np.arange(inputs) if self.order is None else self.order
            fields["order"] = order.astype(np.int32)
        return fields
