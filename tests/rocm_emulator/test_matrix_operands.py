"""Widened operands of matrix instructions, which the emulator caches, while their registers change.

The emulator converts an operand once for as long as its registers hold the same bits. Here the same
registers are used by several products in one wave: with other contents, as another type, under
another MODE, and as the other operand. Each product is compared with NumPy; sums are exact.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from isa_program import Case, Suite, Words
from numpy.typing import NDArray

LANE = np.arange(64)
PRODUCT_COUNT = 5
MOVES = "\n".join(f"v_mov_b32 v{80 + k}, v{10 + k}" for k in range(4))
WAIT = "s_nop 15\ns_nop 3\n"


def _multiply(k: int, kind: str, a: str = "v[80:81]", b: str = "v[82:83]") -> str:
    return f"v_mfma_f32_{kind} v[{100 + 4 * k}:{103 + 4 * k}], {a}, {b}, 0\n{WAIT}"


HALVES = Case(
    f"{MOVES}\n"
    + _multiply(0, "16x16x16_f16")
    + _multiply(1, "16x16x16_bf16")
    + _multiply(2, "16x16x16_f16", "v[82:83]", "v[80:81]")
    + "v_mov_b32 v80, v14\ns_nop 7\n"
    + _multiply(3, "16x16x16_f16")
    + "v_writelane_b32 v83, 0, 63\ns_nop 7\n"
    + _multiply(4, "16x16x16_f16"),
    inputs=5,
    outputs=4 * PRODUCT_COUNT,
    first_output=100,
)
FLOATS = Case(
    f"{MOVES}\n"
    + _multiply(0, "16x16x4_f32", "v80", "v82")
    + "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 8), 0xc0\n"
    + _multiply(1, "16x16x4_f32", "v80", "v82"),
    inputs=5,
    outputs=8,
    first_output=100,
)
CDNA = {arch: Suite(arch, {"halves": HALVES, "floats": FLOATS}) for arch in ("gfx942", "gfx950")}


def _lines(words: Words, dtype: type) -> NDArray[np.float64]:
    """Returns the (row or column, k) matrix of a 16 x 16 operand in two registers. A lane holds
    four consecutive k.
    """
    values = np.ascontiguousarray(words.T).view(dtype).astype(np.float64)  # (lane, 4)
    return values.reshape(4, 16, 4).transpose(1, 0, 2).reshape(16, 16)


def _result(registers: Words) -> NDArray[np.float32]:
    row = 4 * (LANE // 16) + np.arange(4)[:, None]
    out = np.zeros((16, 16), np.float32)
    out[row, np.broadcast_to(LANE % 16, row.shape)] = registers.view(np.float32)
    return out


def _words(seed: int, count: int, lanes: int) -> Words:
    """Returns words of f16 pairs: random multiples of 1/2 between -2 and 2, whose bits are also
    valid bf16.
    """
    values = np.random.default_rng(seed).uniform(-2, 2, (count, lanes, 2)).astype(np.float16)
    return np.ascontiguousarray(values).view(np.uint32)[..., 0]


def _expect(got: NDArray[np.float32], a: NDArray[np.float64], b: NDArray[np.float64]) -> None:
    np.testing.assert_array_equal(got, (a @ b.T).astype(np.float32))


@pytest.mark.parametrize("arch", CDNA)
def test_halves_of_changing_registers(arch: str) -> None:
    words = _words(1, 5, 64)
    a, b, changed = words[:2].copy(), words[2:4].copy(), words[4]
    got = CDNA[arch].run("halves", list(words)).reshape(PRODUCT_COUNT, 4, 64)
    f16, bf16 = np.float16, ml_dtypes.bfloat16
    _expect(_result(got[0]), _lines(a, f16), _lines(b, f16))
    _expect(_result(got[1]), _lines(a, bf16), _lines(b, bf16))
    _expect(_result(got[2]), _lines(b, f16), _lines(a, f16))
    a[0] = changed
    _expect(_result(got[3]), _lines(a, f16), _lines(b, f16))
    b[1, 63] = 0
    _expect(_result(got[4]), _lines(a, f16), _lines(b, f16))


@pytest.mark.parametrize("arch", CDNA)
def test_denormals_when_mode_changes(arch: str) -> None:
    """Only f32 operands of matrix products depend on the denormal bits of MODE."""
    words = np.zeros((5, 64), np.uint32)
    words[0] = np.float32(2.0**-130).view(np.uint32)
    words[2] = np.float32(2.0**100).view(np.uint32)
    got = CDNA[arch].run("floats", list(words)).view(np.float32)
    assert np.all(got[:4] == 4 * 2.0**-30) and not got[4:].any()


def _wmma(k: int, kind: str) -> str:
    first = 100 + 8 * k
    return f"v_wmma_f32_16x16x16_{kind} v[{first}:{first + 7}], v[60:67], v[68:75], 0\n"


RDNA = Suite(
    "gfx1100",
    {
        "halves": Case(
            "\n".join(f"v_mov_b32 v{60 + k}, v{10 + k}" for k in range(16))
            + "\n"
            + _wmma(0, "f16")
            + _wmma(1, "bf16")
            + "v_mov_b32 v64, v26\n"
            + _wmma(2, "f16")
            + "v_writelane_b32 v75, 0, 15\n"
            + _wmma(3, "f16"),
            inputs=17,
            outputs=32,
            first_output=100,
        )
    },
)


def test_halves_of_changing_registers_on_rdna() -> None:
    words = _words(2, 17, 16)
    words = np.concatenate([words, words], axis=1)  # lanes from 16 on hold the same again
    a, b, changed = words[:8].copy(), words[8:16].copy(), words[16]
    got = RDNA.run("halves", list(words)).reshape(4, 8, 32)

    def lines(registers: Words, dtype: type) -> NDArray[np.float64]:
        return np.ascontiguousarray(registers[:, :16].T).view(dtype).astype(np.float64)

    def result(registers: Words) -> NDArray[np.float32]:
        return registers.reshape(8, 2, 16).reshape(16, 16).view(np.float32)

    f16, bf16 = np.float16, ml_dtypes.bfloat16
    _expect(result(got[0]), lines(a, f16), lines(b, f16))
    _expect(result(got[1]), lines(a, bf16), lines(b, bf16))
    a[4] = changed
    _expect(result(got[2]), lines(a, f16), lines(b, f16))
    b[7, 15] = 0
    _expect(result(got[3]), lines(a, f16), lines(b, f16))
