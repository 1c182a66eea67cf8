"""MXFP4 weights of experts in the format of gpt-oss (quant_method `mxfp4`; OCP Microscaling Formats
1.0): blocks of 32 inputs, with two codes of 4 bits in each byte. The scale of a block is a power of
2, which is stored as its exponent plus 127.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ark.ir.dtype import bf16, fp4
from ark.models.fields import Fields
from ark.models.formats.base import Piece, QuantizedTensor
from ark.models.formats.layout import Array, Codes, Layout

BLOCK_INPUTS = 32


def codes_of(pairs: Array) -> Array:
    """The fp4 codes in bytes, along the last dimension. The low four bits of a byte are the first
    code.
    """
    halves = np.stack([pairs & 15, pairs >> 4], -1).reshape(*pairs.shape[:-1], -1)
    codes: Array = halves.view(ml_dtypes.float4_e2m1fn)
    return codes


def powers(exponents: Array) -> Array:
    """The scales 2^(e - 127) for stored exponents e."""
    scales: Array = exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return scales


@dataclass(frozen=True)
class Mxfp4:
    """The format. stacked: see Format."""

    name: str = "MXFP4"
    stacked: bool = True

    def pieces(self, name: str, shape: tuple[int, ...]) -> dict[str, Piece]:
        *outer, inputs = shape
        blocks = (*outer, -(-inputs // BLOCK_INPUTS))
        return {
            "_blocks": Piece(("U8",), ((*blocks, BLOCK_INPUTS // 2),)),
            "_scales": Piece(("U8", "F8_E8M0"), (blocks,)),
        }

    def layout(self, tensor: QuantizedTensor) -> Layout | None:
        if tensor.shape[-1] % BLOCK_INPUTS:
            inputs = tensor.shape[-1]
            raise tensor.wrong(f"its {inputs} inputs are not divisible by blocks of {BLOCK_INPUTS}")
        return Layout(fp4, BLOCK_INPUTS, bf16)

    def decode(self, tensor: QuantizedTensor) -> Codes:
        codes = codes_of(tensor.read("_blocks")).reshape(-1, tensor.shape[-1])
        return Codes(codes, powers(tensor.read("_scales")).reshape(len(codes), -1))


def read(fields: Fields) -> Mxfp4:
    """Reads the format from a quantization_config. Which weights have this format follows from the
    files' tensors.
    """
    return Mxfp4()
