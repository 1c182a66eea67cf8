"""GPTQ's weights of 2, 4 and 8 bits. A 32-bit word has the codes of consecutive inputs. Each group
of inputs has a scale and a zero point. With act-order, the tensor `g_idx` has the group number of
each input, and groups are not contiguous. ark then reorders the inputs so that those of a group are
next to each other, and reorders activations in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ark.ir.dtype import int4, int8, uint4, uint8
from ark.models.fields import Fields
from ark.models.formats.base import (
    FLOAT_SCALES,
    FLOATS,
    Floats,
    Piece,
    QuantizedTensor,
    choice,
    read_group,
    unpacked,
)
from ark.models.formats.layout import Array, Codes, Layout, group_for


@dataclass(frozen=True)
class Gptq:
    """GPTQ's parameters. group: the number of inputs that share a scale; 0 if all inputs share one.
    symmetric: True if all zero points are half of the codes' range. added: the number that is added
    to stored zero points.
    """

    bits: int
    group: int
    symmetric: bool
    added: int
    name: str = "GPTQ"

    def pieces(self, name: str, shape: tuple[int, ...]) -> dict[str, Piece]:
        outputs, inputs = shape
        groups = -(-inputs // (self.group or inputs))
        per_word = 32 // self.bits
        return {
            "qweight": Piece(("I32",), ((inputs // per_word, outputs),)),
            "qzeros": Piece(("I32",), ((groups, outputs // per_word),)),
            "scales": Piece(FLOATS, ((groups, outputs),)),
            "g_idx": Piece(("I32",), ((inputs,),), False),
        }

    def layout(self, tensor: QuantizedTensor) -> Layout | None:
        group = group_for(self.group or tensor.shape[1], tensor.shape[1])
        order = self._order(tensor)
        if not group or (order is not None and not len(order)):
            return None
        types = (int8, uint8) if self.bits == 8 else (int4, uint4)
        scales = FLOAT_SCALES[tensor.pieces["scales"].dtype_code]
        codes = types[0 if self.symmetric else 1]
        return Layout(codes, group, scales, not self.symmetric, order is not None)

    def decode(self, tensor: QuantizedTensor) -> Codes | Floats:
        words = np.ascontiguousarray(tensor.read("qweight").T)
        codes: Array = unpacked(words, self.bits)
        zeros = unpacked(tensor.read("qzeros"), self.bits).astype(np.int16).T + self.added
        scales = tensor.read("scales").T
        half = 1 << (self.bits - 1)
        order = self._order(tensor)
        if order is not None and not len(order):  # the groups have different sizes
            groups = tensor.read("g_idx")
            values = codes.astype(np.float32) - zeros[:, groups]
            return np.asarray(values * scales[:, groups].astype(np.float32))
        if order is not None:
            codes = codes[:, order]
        if not self.symmetric:
            return Codes(codes, scales, zeros, order)
        if (zeros != half).any():
            raise tensor.wrong(f"sym is true and its zeros are not all {half}")
        return Codes((codes.astype(np.int16) - half).astype(np.int8), scales, None, order)

    def _order(self, tensor: QuantizedTensor) -> Array | None:
        """The indices of the inputs, ordered by group. None if they are already in this order. An
        empty array if groups have different sizes.
        """
        if "g_idx" not in tensor.pieces:
            return None
        inputs = tensor.shape[1]
        size = self.group or inputs
        groups = tensor.read("g_idx")
        usual = np.arange(inputs, dtype=np.int32) // size
        if (groups == usual).all():
            return None
        if groups.min() < 0 or groups.max() > usual[-1]:
            raise tensor.wrong(f"g_idx names groups that are not among its {usual[-1] + 1}")
        order = np.argsort(groups, kind="stable")
        return order if (groups[order] == usual).all() else order[:0]


def read(fields: Fields) -> Gptq:
    """Reads the format from a quantization_config."""
    bits = choice(fields, "bits", (4, 8, 2), None)
    kind = choice(fields, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    symmetric = fields.flag("sym", True)
    assert isinstance(bits, int)
    return Gptq(bits, read_group(fields, "group_size"), symmetric, 1 if kind == "gptq" else 0)
