"""WMMA of RDNA3 against NumPy, with operands in the layout that AMD's instruction set document
gives.

A lane (0 to 15) holds a row of A and a column of B, packed along K; lanes 16 to 31 hold a copy of
the same. Row r, column c of C and D lies in register r // 2 of lane c + 16 * (r % 2).
"""

from __future__ import annotations

import numpy as np
import pytest
from isa_program import Case, Suite, Words
from ml_dtypes import bfloat16
from numpy.typing import NDArray

C_REGISTER, D_REGISTER = 80, 40
LANE = np.arange(32)


def _case(name: str, a_words: int, tail: str = "") -> Case:
    """Returns the case of a WMMA instruction. Its inputs are the words of A and of B, then the
    eight of C.
    """
    b_start = 10 + a_words
    c_start = b_start + a_words
    # Aligned register ranges, away from the inputs.
    moves = [f"v_mov_b32 v{60 + k}, v{10 + k}" for k in range(a_words)]
    moves += [f"v_mov_b32 v{70 + k}, v{b_start + k}" for k in range(a_words)]
    moves += [f"v_mov_b32 v{C_REGISTER + k}, v{c_start + k}" for k in range(8)]
    moves += [f"v_mov_b32 v{D_REGISTER + k}, v{c_start + k}" for k in range(8)]
    last = a_words - 1
    instruction = f"{name} v[40:47], v[60:{60 + last}], v[70:{70 + last}], v[80:87]{tail}"
    return Case("\n".join([*moves, instruction]), 2 * a_words + 8, 8)


SUITE = Suite(
    "gfx1100",
    {
        "f32_f16": _case("v_wmma_f32_16x16x16_f16", 8),
        "f32_bf16": _case("v_wmma_f32_16x16x16_bf16", 8),
        "f16_f16": _case("v_wmma_f16_16x16x16_f16", 8),
        "f16_f16_high": _case("v_wmma_f16_16x16x16_f16", 8, " op_sel:[0,0,1]"),
        "bf16_bf16": _case("v_wmma_bf16_16x16x16_bf16", 8),
        "iu8_ss": _case("v_wmma_i32_16x16x16_iu8", 4, " neg_lo:[1,1,0]"),
        "iu8_uu": _case("v_wmma_i32_16x16x16_iu8", 4),
        "iu8_su": _case("v_wmma_i32_16x16x16_iu8", 4, " neg_lo:[1,0,0]"),
        "iu8_clamp": _case("v_wmma_i32_16x16x16_iu8", 4, " neg_lo:[1,1,0] clamp"),
        "iu4_ss": _case("v_wmma_i32_16x16x16_iu4", 2, " neg_lo:[1,1,0]"),
        "iu4_uu": _case("v_wmma_i32_16x16x16_iu4", 2),
        "constant": Case(
            "\n".join(f"v_mov_b32 v{60 + k}, v{10 + k}" for k in range(16))
            + "\nv_wmma_f32_16x16x16_f16 v[40:47], v[60:67], v[68:75], 1.0",
            16,
            8,
        ),
    },
)


def pack_lines(matrix: NDArray, bits: int) -> list[Words]:
    """Packs the matrix (unsigned numbers of `bits` bits) into registers, one row for each lane."""
    per_word = 32 // bits
    fields = (matrix.astype(np.uint64) & ((1 << bits) - 1)).reshape(16, -1, per_word)
    words = (fields << (np.arange(per_word, dtype=np.uint64) * bits)).sum(axis=2).astype(np.uint32)
    return [words[LANE % 16, k] for k in range(words.shape[1])]


def spread(values: Words) -> list[Words]:
    """Distributes C or D (16 x 16 words) to the registers that hold it."""
    return [values[2 * k + LANE // 16, LANE % 16] for k in range(8)]


def collect(registers: Words) -> Words:
    rows = np.arange(16)
    return registers[rows[:, None] // 2, np.arange(16) + 16 * (rows[:, None] % 2)]


def run(name: str, a: list[Words], b: list[Words], c: Words) -> Words:
    return collect(SUITE.run(name, [*a, *b, *spread(c)]))


def floats(dtype: type, seed: int) -> tuple[NDArray, NDArray, NDArray]:
    rng = np.random.default_rng(seed)
    a, b = (rng.uniform(-2, 2, (16, 16)).astype(dtype) for _ in range(2))
    return a, b, rng.uniform(-4, 4, (16, 16))


def bits16(matrix: NDArray) -> NDArray:
    return np.ascontiguousarray(matrix).view(np.uint16)


@pytest.mark.parametrize(("name", "dtype"), [("f32_f16", np.float16), ("f32_bf16", bfloat16)])
def test_f32_accumulation(name: str, dtype: type) -> None:
    a, b, c = floats(dtype, 1)
    c32 = c.astype(np.float32)
    d = run(name, pack_lines(bits16(a), 16), pack_lines(bits16(b.T), 16), c32.view(np.uint32))
    exact = a.astype(np.float64) @ b.astype(np.float64) + c32
    assert np.abs(d.view(np.float32) - exact).max() <= 2**-20 * np.abs(exact).max() + 2**-20


@pytest.mark.parametrize(
    ("name", "dtype", "shift", "error"),
    [
        ("f16_f16", np.float16, 0, 2**-10),
        ("f16_f16_high", np.float16, 16, 2**-10),
        ("bf16_bf16", bfloat16, 0, 2**-7),
    ],
)
def test_16_bit_accumulation(name: str, dtype: type, shift: int, error: float) -> None:
    """WMMA with 16-bit accumulation: C and D are in one half of each register, and the other half
    is unchanged.
    """
    a, b, c = floats(dtype, 2)
    c16 = c.astype(dtype)
    held = bits16(c16).astype(np.uint32) << shift | np.uint32(0x5A5A << (16 - shift))
    d = run(name, pack_lines(bits16(a), 16), pack_lines(bits16(b.T), 16), held)
    assert np.all((d >> (16 - shift)) & 0xFFFF == 0x5A5A)
    result = ((d >> shift) & 0xFFFF).astype(np.uint16).view(dtype).astype(np.float64)
    exact = a.astype(np.float64) @ b.astype(np.float64) + c16.astype(np.float64)
    assert np.abs(result - exact).max() <= error * np.abs(exact).max()


@pytest.mark.parametrize(
    ("name", "bits", "a_signed", "b_signed"),
    [
        ("iu8_ss", 8, True, True),
        ("iu8_uu", 8, False, False),
        ("iu8_su", 8, True, False),
        ("iu4_ss", 4, True, True),
        ("iu4_uu", 4, False, False),
    ],
)
def test_integers_are_exact(name: str, bits: int, a_signed: bool, b_signed: bool) -> None:
    rng = np.random.default_rng(bits)

    def matrix(is_signed: bool) -> NDArray:
        low = -(1 << (bits - 1)) if is_signed else 0
        return rng.integers(low, low + (1 << bits), (16, 16))

    a, b = matrix(a_signed), matrix(b_signed)
    c = rng.integers(-(2**20), 2**20, (16, 16)).astype(np.int32)
    d = run(name, pack_lines(a, bits), pack_lines(b.T, bits), c.view(np.uint32))
    assert np.array_equal(d.view(np.int32), a @ b + c)


def test_clamp_saturates_the_sum() -> None:
    a = np.full((16, 16), 127)
    c = np.full((16, 16), 2**31 - 1000, np.int32)
    d = run("iu8_clamp", pack_lines(a, 8), pack_lines(a, 8), c.view(np.uint32))
    assert np.all(d.view(np.int32) == 2**31 - 1)
    d = run("iu8_ss", pack_lines(a, 8), pack_lines(a, 8), c.view(np.uint32))
    assert np.all(d.view(np.int32) < 0)


def test_constant_addend() -> None:
    a, b, _ = floats(np.float16, 3)
    words = [*pack_lines(bits16(a), 16), *pack_lines(bits16(b.T), 16)]
    d = collect(SUITE.run("constant", words)).view(np.float32)
    assert np.allclose(d, a.astype(np.float64) @ b.astype(np.float64) + 1, atol=1e-5)
