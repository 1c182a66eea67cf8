"""fp8 weights in the format of transformers (quant_method `fp8`: DeepSeek-V3, Qwen3-FP8). There is
one scale for each block, by default of 128x128 elements, or one for a whole weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ark.ir.dtype import FLOAT_CODES, fp32
from ark.models.fields import Fields
from ark.models.formats.base import FLOATS, Piece, QuantizedTensor, by_blocks, choice
from ark.models.formats.compressed import read_block
from ark.models.formats.layout import Codes, Layout, group_for

SCALES = ("weight_scale_inv", "weight_scale")
"""The suffixes of the names of scales. Codes are multiplied by the scale in both cases, although
one suffix is `_inv`.
"""


@dataclass(frozen=True)
class Fp8:
    """The parameters of fp8 weights. block: the rows and columns that share a scale; 0 for all."""

    block: tuple[int, int]
    name: str = "fp8"

    def pieces(self, name: str, shape: tuple[int, ...]) -> dict[str, Piece]:
        pieces = {"weight": Piece(("F8_E4M3",), (shape,))}
        if self.block != (0, 0):
            counts = tuple(-(-n // size) for n, size in zip(shape, self.block, strict=True))
            pieces[SCALES[0]] = Piece((*FLOATS, "F8_E8M0"), (counts,))
        else:
            pieces |= {end: Piece(FLOATS, ((), (1,), (1, 1)), False) for end in SCALES}
        return pieces | {"input_scale": Piece((), (), False)}

    def layout(self, tensor: QuantizedTensor) -> Layout | None:
        self._scale(tensor)
        group = group_for(self.block[1] or tensor.shape[1], tensor.shape[1])
        return Layout(FLOAT_CODES, group, fp32) if group else None

    def decode(self, tensor: QuantizedTensor) -> Codes:
        scales = tensor.read(self._scale(tensor)).astype(np.float32)
        return by_blocks(tensor.read("weight"), scales, None, self.block)

    def _scale(self, tensor: QuantizedTensor) -> str:
        ends = [end for end in SCALES if end in tensor.pieces]
        if len(ends) != 1:
            raise tensor.wrong(f"it has {len(ends)} scales ({' or '.join(SCALES)}), not one")
        return ends[0]


def read(fields: Fields) -> Fp8:
    """Reads the format from a quantization_config."""
    choice(fields, "fmt", ("e4m3",), "e4m3")
    whole = fields.get("weight_block_size") is None
    return Fp8((0, 0) if whole else read_block(fields, "weight_block_size"))
