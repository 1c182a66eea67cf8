"""The block formats of GGUF files, as llama.cpp defines them (ggml-quants). Weights in Q8_0, Q4_0,
Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K and MXFP4 stay quantised in memory. Weights in all other formats
that the gguf package supports are dequantised when they are loaded.

A row of a tensor is a row of blocks. A value is scale * code, or scale * code - offset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ark.ir.dtype import DataType, bf16, fp4, fp16, fp32, int4, int8, uint4, uint8
from ark.models.formats.base import Floats, Piece, QuantizedTensor
from ark.models.formats.layout import Array, Codes, Layout
from ark.models.formats.mxfp4 import powers
from ark.models.shards import read_bytes

Blocks = npt.NDArray[np.uint8]
Parts = tuple[Array, Array, Array | None]
"""The codes, scales and offsets of blocks."""


def _half(blocks: Blocks, place: int) -> Array:
    """The fp16 number at byte `place` of each block, as an array (blocks, 1)."""
    return np.ascontiguousarray(blocks[:, place : place + 2]).view(np.float16)


def _nibbles(packed: Blocks) -> Blocks:
    """The low four bits of all bytes along the last dimension, followed by the high four bits."""
    return np.concatenate([packed & 15, packed >> 4], -1)


def _q8_0(blocks: Blocks) -> Parts:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks, 0), None


def _q4_0(blocks: Blocks) -> Parts:
    return _nibbles(blocks[:, 2:]).astype(np.int8) - 8, _half(blocks, 0), None


def _q4_1(blocks: Blocks) -> Parts:
    scale, least = (_half(blocks, place).astype(np.float32) for place in (0, 2))
    return _nibbles(blocks[:, 4:]), scale, -least


def _five(low: Blocks, high: Blocks) -> Blocks:
    bits = np.unpackbits(np.ascontiguousarray(high), axis=-1, bitorder="little")
    return (_nibbles(low) | bits << 4).astype(np.uint8)


def _q5_0(blocks: Blocks) -> Parts:
    codes = _five(blocks[:, 6:], blocks[:, 2:6]).astype(np.int8) - 16
    return codes, _half(blocks, 0), None


def _q5_1(blocks: Blocks) -> Parts:
    scale, least = (_half(blocks, place).astype(np.float32) for place in (0, 2))
    return _five(blocks[:, 8:], blocks[:, 4:8]), scale, -least


def _scales_of_k(blocks: Blocks) -> tuple[Array, Array]:
    """The scales and offsets of the eight groups of a block. Each is a 6-bit number times an fp16
    number.
    """
    low, least, high = (blocks[:, 4 + 4 * n : 8 + 4 * n] for n in range(3))
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], -1)
    offsets = np.concatenate([least & 63, (high >> 4) | (least >> 6) << 4], -1)
    steps = [_half(blocks, place).astype(np.float32) for place in (0, 2)]
    return steps[0] * scales, steps[1] * offsets


def _q4_k(blocks: Blocks) -> Parts:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return codes.reshape(-1, 256), *_scales_of_k(blocks)


def _q5_k(blocks: Blocks) -> Parts:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    high = blocks[:, None, 16:48] >> shifts & 1
    return (low | high << 4).reshape(-1, 256), *_scales_of_k(blocks)


def _q6_k(blocks: Blocks) -> Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    codes = (low | high << 4).astype(np.int8) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return codes.reshape(-1, 256), _half(blocks, 208).astype(np.float32) * scales, None


def _mxfp4(blocks: Blocks) -> Parts:
    codes = _nibbles(blocks[:, 1:]).view(ml_dtypes.float4_e2m1fn)
    return codes, powers(np.ascontiguousarray(blocks[:, :1])), None


@dataclass(frozen=True)
class Block:
    """One of GGUF's block formats. inputs, nbytes: the number of weights in a block, and its size
    in bytes. codes, group, scales: see Layout. parts: a function that reads codes, scales and
    offsets from blocks.
    """

    inputs: int
    nbytes: int
    codes: DataType
    group: int
    scales: DataType
    parts: Callable[[Blocks], Parts]
    offsets: bool = False


BLOCKS = {
    "Q8_0": Block(32, 34, int8, 32, fp16, _q8_0),
    "Q4_0": Block(32, 18, int4, 32, fp16, _q4_0),
    "Q4_1": Block(32, 20, uint4, 32, fp32, _q4_1, True),
    "Q5_0": Block(32, 22, int8, 32, fp16, _q5_0),
    "Q5_1": Block(32, 24, uint8, 32, fp32, _q5_1, True),
    "Q4_K": Block(256, 144, uint4, 32, fp32, _q4_k, True),
    "Q5_K": Block(256, 176, uint8, 32, fp32, _q5_k, True),
    "Q6_K": Block(256, 210, int8, 16, fp32, _q6_k),
    "MXFP4": Block(32, 17, fp4, 32, bf16, _mxfp4),
}
OTHERS = (
    "Q2_K", "Q3_K", "TQ1_0", "TQ2_0", "IQ4_NL", "IQ4_XS", "IQ1_S", "IQ1_M", "IQ2_XXS",
    "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
)  # fmt: skip


@dataclass(frozen=True)
class Gguf:
    """The formats of a GGUF file. Each tensor of the file states its own format."""

    name: str = "GGUF"

    def pieces(self, name: str, shape: tuple[int, ...]) -> dict[str, Piece]:
        return {"weight": Piece((*BLOCKS, *OTHERS), (shape,))}

    def layout(self, tensor: QuantizedTensor) -> Layout | None:
        block = BLOCKS.get(tensor.pieces["weight"].dtype_code)
        return Layout(block.codes, block.group, block.scales, block.offsets) if block else None

    def decode(self, tensor: QuantizedTensor) -> Codes | Floats:
        piece, (outputs, inputs) = tensor.pieces["weight"], tensor.shape
        data = read_bytes(piece, 0, piece.nbytes)
        block = BLOCKS.get(piece.dtype_code)
        if block is None:
            return dequantised(data, piece.dtype_code).reshape(outputs, inputs)
        codes, scales, offsets = block.parts(data.reshape(-1, block.nbytes))
        codes, scales = codes.reshape(outputs, inputs), scales.reshape(outputs, -1)
        if offsets is None:
            return Codes(codes, scales)
        return with_offsets(codes, scales, offsets.reshape(outputs, -1))


def with_offsets(codes: Array, scales: Array, offsets: Array) -> Codes:
    """Codes for values of the form scale * code - offset. Codes represent scale * (code - zero
    point), so the zero point is offset / scale. If the scale of a group is 0, its codes become 0
    and its scale 1.
    """
    flat = scales == 0
    if flat.any():
        codes = np.where(flat.repeat(codes.shape[1] // scales.shape[1], 1), 0, codes)
    scales = np.where(flat, np.float32(1), scales)
    return Codes(codes.astype(np.uint8), scales, offsets / scales)


def dequantised(data: Blocks, kind: str) -> Floats:
    """The values of a tensor whose type is not in BLOCKS, computed by the gguf package."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    quantised = GGMLQuantizationType[kind]
    rows = data.reshape(-1, GGML_QUANT_SIZES[quantised][1])
    values: Floats = dequantize(rows, quantised).astype(np.float32)
    return values
