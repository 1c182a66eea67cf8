"""Matrices in the registers of one wave, for the tests of CDNA's scaled and sparse products.

Packing of elements narrower than a byte, and AMD's layout of D (CDNA3 and CDNA4 instruction set
documents, chapter "Matrix arithmetic").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from isa_program import Case, Words
from numpy.typing import NDArray

LANE = np.arange(64)


@dataclass(frozen=True)
class Format:
    """An element type of a matrix: its width in bits, and the type of ml_dtypes or NumPy that
    represents it.
    """

    bits: int
    dtype: type

    def values(self, codes: NDArray[np.uint8]) -> NDArray[np.float64]:
        return codes.view(self.dtype).astype(np.float64)

    def finite_codes(self) -> NDArray[np.uint8]:
        """Every encoding that is neither NaN nor infinite."""
        codes = np.arange(1 << self.bits, dtype=np.uint8)
        return codes[np.isfinite(self.values(codes))]


FP8 = Format(8, ml_dtypes.float8_e4m3fn)
BF8 = Format(8, ml_dtypes.float8_e5m2)
FP6 = Format(6, ml_dtypes.float6_e2m3fn)
BF6 = Format(6, ml_dtypes.float6_e3m2fn)
FP4 = Format(4, ml_dtypes.float4_e2m1fn)
MX = (FP8, BF8, FP6, BF6, FP4)  # by the number that cbsz and blgp give them


def pack_words(codes: NDArray[np.uint8], bits: int) -> list[Words]:
    """Packs a row of codes for each lane into the lane's registers, with the first element in the
    lowest bits.
    """
    spread = (codes[..., None] >> np.arange(bits)) & 1
    flat = np.packbits(spread.reshape(64, -1), axis=1, bitorder="little")
    return list(np.ascontiguousarray(flat).view(np.uint32).T)


def unpack(registers: Words, bits: int, count: int) -> NDArray[np.uint8]:
    """The inverse of `pack_words`: returns codes (lane, element) from words (register, lane)."""
    raw = np.ascontiguousarray(registers.T).view(np.uint8)
    spread = np.unpackbits(raw, axis=1, bitorder="little")[:, : bits * count]
    return (spread.reshape(64, count, bits) << np.arange(bits)).sum(axis=2).astype(np.uint8)


def places(size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the rows and the columns of the elements of a square matrix C or D that each register
    of each lane holds.
    """
    register, lane = np.arange(size * size // 64)[:, None], LANE[None, :]
    if size == 32:
        row = 8 * (register // 4) + 4 * (lane // 32) + register % 4
    else:
        row = 4 * (lane // 16) + register
    return row, np.broadcast_to(lane % size, row.shape)


def product_case(
    sources: list[tuple[int, int]], out: tuple[int, int], product: Callable[[str], str], file: str
) -> Case:
    """A wave that loads its operands from the inputs, in order, and multiplies matrices.

    sources, out: the first register and the number of registers of each operand; `out` holds C and
    then D. file: "v", or "a" for C and D in accumulation registers. product: a function from D's
    registers to the instruction's text.
    """
    lines, first = [], 10
    for target, count in (*sources, out):
        lines += [f"v_mov_b32 v{target + k}, v{first + k}" for k in range(count)]
        first += count
    start, results = out
    if file == "a":
        lines += [f"v_accvgpr_write_b32 a{k}, v{start + k}" for k in range(results)]
    d = span(0 if file == "a" else start, results, file)
    lines += ["s_nop 1", product(d), "s_nop 15", "s_nop 3"]
    if file == "a":
        lines += [f"v_accvgpr_read_b32 v{start + k}, a{k}" for k in range(results)]
    return Case("\n".join(lines), first - 10, results, start)


def span(first: int, count: int, file: str = "v") -> str:
    """The assembler's name of a range of registers."""
    return f"{file}{first}" if count == 1 else f"{file}[{first}:{first + count - 1}]"
