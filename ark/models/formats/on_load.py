"""The formats to which weights of 16 or 32 bits can be quantised while they are loaded (`--quantize
fp8|int8|int4`).

fp8 and int8 have one fp32 scale per row, which maps the row's largest magnitude to the type's
largest value. int4 has a bf16 scale for each group of up to 128 inputs. Values are rounded to the
nearest code, ties to even.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ark.errors import InvalidUsageError
from ark.ir.dtype import FLOAT_CODES, SMALL_FLOATS, DataType, bf16, fp32, int4, int8
from ark.models.formats.layout import Array, Codes, Layout, group_for

SMALLEST_SCALE = 1e-30  # the scale of a group that has only zeros


@dataclass(frozen=True)
class OnLoad:
    """A format to which weights are quantised while they are loaded. name: the value of the option.
    codes, scales: the types of codes and scales. group: the largest number of inputs that share a
    scale; 0 for a whole row.
    """

    name: str
    codes: DataType
    scales: DataType
    group: int

    def layout(self, shape: Sequence[int]) -> Layout | None:
        """The layout of a weight with that shape; None if its rows cannot be divided into groups of
        a supported size.
        """
        group = group_for(self.group or shape[-1], shape[-1])
        return Layout(self.codes, group, self.scales) if len(shape) > 1 and group else None

    def encode(self, values: Array, group: int) -> Codes:
        """Quantises a weight (outputs, inputs). group: the number of inputs that share a scale."""
        outputs, inputs = values.shape
        wide = values.astype(np.float32).reshape(outputs, inputs // group, group)
        most = np.abs(wide).max(-1)
        scales = np.maximum(most / np.float32(self.codes.largest), SMALLEST_SCALE)
        scales = scales.astype(self.scales.numpy)
        scaled = wide / scales.astype(np.float32)[..., None]
        codes = self._rounded(scaled.reshape(outputs, inputs))
        return Codes(codes.astype(self.codes.numpy), scales)

    def _rounded(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        whole = values if self.codes in SMALL_FLOATS else np.rint(values)
        return np.clip(whole, -self.codes.largest, self.codes.largest)


ON_LOAD = {
    format.name: format
    for format in (
        OnLoad("fp8", FLOAT_CODES, fp32, 0),
        OnLoad("int8", int8, fp32, 0),
        OnLoad("int4", int4, bf16, 128),
    )
}


def on_load(name: str) -> OnLoad:
    """The format that a value of `--quantize` names. Raises InvalidUsageError for any other
    value.
    """
    if name not in ON_LOAD:
        raise InvalidUsageError(
            f"quantize={name!r} is not a format that weights can be loaded in; give "
            f"{', '.join(ON_LOAD)}"
        )
    return ON_LOAD[name]
