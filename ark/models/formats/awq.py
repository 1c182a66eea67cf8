"""AWQ's weights of 4 bits, in the format of its `gemm` kernels. A 32-bit word has the codes of
eight outputs. Each group of inputs has a scale and a zero point.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ark.ir.dtype import uint4
from ark.models.fields import Fields
from ark.models.formats.base import (
    FLOAT_SCALES,
    FLOATS,
    Piece,
    QuantizedTensor,
    choice,
    read_group,
    unpacked,
)
from ark.models.formats.layout import Array, Codes, Layout, group_for

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""For each 4-bit field of a word, from the lowest bits on, the number of the output (0 to 7) to
which it belongs.
"""


@dataclass(frozen=True)
class Awq:
    """AWQ's parameters. group: the number of inputs that share a scale; 0 if all inputs do."""

    group: int
    name: str = "AWQ"

    def pieces(self, name: str, shape: tuple[int, ...]) -> dict[str, Piece]:
        outputs, inputs = shape
        groups = -(-inputs // (self.group or inputs))
        return {
            "qweight": Piece(("I32",), ((inputs, outputs // 8),)),
            "qzeros": Piece(("I32",), ((groups, outputs // 8),)),
            "scales": Piece(FLOATS, ((groups, outputs),)),
        }

    def layout(self, tensor: QuantizedTensor) -> Layout | None:
        group = group_for(self.group or tensor.shape[1], tensor.shape[1])
        scales = FLOAT_SCALES[tensor.pieces["scales"].dtype_code]
        return Layout(uint4, group, scales, zeros=True) if group else None

    def decode(self, tensor: QuantizedTensor) -> Codes:
        codes, zeros = (_columns(tensor.read(end)) for end in ("qweight", "qzeros"))
        return Codes(codes, tensor.read("scales").T, zeros)


def _columns(words: Array) -> Array:
    """Unpacks codes of 4 bits. words: (n, outputs / 8). Returns (outputs, n)."""
    halves = unpacked(words, 4).reshape(*words.shape, 8)
    ordered = np.empty_like(halves)
    ordered[..., list(ORDER)] = halves
    return np.ascontiguousarray(ordered.reshape(len(words), -1).T)


def read(fields: Fields) -> Awq:
    """Reads the format from a quantization_config."""
    choice(fields, "bits" if fields.get("bits") is not None else "w_bit", (4,), 4)
    choice(fields, "zero_point", (True,), True)
    version = fields.text("version")
    if version is not None and version.lower() != "gemm":
        choice(fields, "version", ("gemm",), "gemm")
    name = "group_size" if fields.get("group_size") is not None else "q_group_size"
    return Awq(read_group(fields, name))
