"""gfx950's products of 8-, 6- and 4-bit elements, with and without scales, against NumPy.

The layouts are from AMD's CDNA4 instruction set document, sections "Dense matrix layouts: 8-bit and
smaller" and "MFMA with block exponent scaling". Lane l holds 32 elements along K of row (or column)
``l % size``. With 6 and 4 bits they are consecutive. With 8 bits they are two runs of 16, half of K
apart. For every format, the scale in lane l applies to the elements from ``32 * (l // size)`` on.
The values of all formats are from ml_dtypes.
"""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np
import pytest
from isa_matrix import LANE, MX, Format, pack_words, places, product_case, span
from isa_program import Case, Suite, Words
from numpy.typing import NDArray

SIZES = {16: 128, 32: 64}  # size: depth
OUT_VGPR = 112
A, B, SCALES = 80, 88, 96
# Which byte of the scale registers of A and B the instruction uses: op_sel[0] + 2 * op_sel_hi[0]
# for A, the same of [1] for B.
BYTES = ((0, 0), (1, 2), (2, 3), (3, 1))
NAN_SCALE = 0xFF


def _product(size: int, a: int, b: int, d: str, tail: str = "") -> str:
    kind = "mfma_scale" if tail else "mfma"
    sources = f"{span(A, MX[a].bits)}, {span(B, MX[b].bits)}, {d}"
    return f"v_{kind}_f32_{size}x{size}x{SIZES[size]}_f8f6f4 {d}, {sources}{tail} cbsz:{a} blgp:{b}"


def _case(size: int, a: int, b: int, tail: str = "", file: str = "v") -> Case:
    """Returns the case of a scaled product. Its inputs are A, B, two scales and C; the result
    replaces C.
    """
    sources = [(A, MX[a].bits), (B, MX[b].bits), (SCALES, 2)]
    out = (OUT_VGPR, size * size // 64)
    return product_case(sources, out, lambda d: _product(size, a, b, d, tail), file)


def _scales(byte_a: int = 0, byte_b: int = 0) -> str:
    low, high = f"{byte_a & 1},{byte_b & 1},0", f"{byte_a >> 1},{byte_b >> 1},0"
    return f", v{SCALES}, v{SCALES + 1} op_sel:[{low}] op_sel_hi:[{high}]"


@cache
def suite() -> Suite:
    cases = {}
    for size in SIZES:
        for a in range(len(MX)):
            for b in range(len(MX)):
                cases[f"plain_{size}_{a}{b}"] = _case(size, a, b)
                cases[f"scaled_{size}_{a}{b}"] = _case(size, a, b, _scales())
        for number, bytes_ in enumerate(BYTES):
            cases[f"byte_{size}_{number}"] = _case(size, 0, 4, _scales(*bytes_))
        cases[f"agpr_{size}_0"] = _case(size, 2, 1, _scales(), "a")
    clipped = cases["scaled_16_44"]
    mode = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"
    cases["clipped_16_44"] = Case(mode + clipped.body, clipped.inputs, clipped.outputs, OUT_VGPR)
    product = _product(16, 4, 4, span(OUT_VGPR, 4), _scales())
    for name, register in (("scale", SCALES + 1), ("element", A + 3), ("unused", A + 4)):
        fill = "ds_write_b32 v0, v0\ns_waitcnt lgkmcnt(0)"
        body = f"{fill}\nds_read_b32 v{register}, v0\n{product}\ns_waitcnt lgkmcnt(0)\ns_nop 7"
        cases[f"waits_{name}"] = Case(body, 0, 4, OUT_VGPR)
    return Suite("gfx950", cases)


def depths(size: int, form: Format) -> NDArray[np.int64]:
    """Returns, for each lane and element of its registers of A or B, the element's index
    along k.
    """
    group, element = (LANE // size)[:, None], np.arange(32)[None, :]
    if form.bits == 8:
        return 16 * group + element % 16 + element // 16 * (SIZES[size] // 2)
    return 32 * group + element


def registers(size: int, form: Format, codes: NDArray[np.uint8]) -> list[Words]:
    return pack_words(codes[(LANE % size)[:, None], depths(size, form)], form.bits)


def operands(size: int, a: int, b: int, seed: int) -> tuple[NDArray, NDArray, NDArray]:
    """Returns random codes of A (row, k) and B (column, k), and a random C (row, column)."""
    rng = np.random.default_rng(seed)
    codes = [rng.choice(MX[k].finite_codes(), (size, SIZES[size])) for k in (a, b)]
    return codes[0], codes[1], rng.uniform(-8, 8, (size, size)).astype(np.float32)


def run(
    name: str, size: int, a: int, b: int, seed: int, scales: NDArray[np.uint8]
) -> tuple[NDArray, NDArray]:
    """Runs a scaled product of random matrices. Returns the emulator's D and the exact one.
    ``scales``: bytes with the dimensions (0 for A or 1 for B, row or column, block of 32 along K,
    byte of the scale register).
    """
    left, right, c = operands(size, a, b, seed)
    where = places(size)
    scale_rows = np.ascontiguousarray(scales[:, LANE % size, LANE // size]).view(np.uint32)[..., 0]
    rows = [*registers(size, MX[a], left), *registers(size, MX[b], right), *scale_rows]
    rows += list(np.ascontiguousarray(c[where]).view(np.uint32))
    d = np.zeros_like(c)
    d[where] = suite().run(name, rows).view(np.float32)
    kind, _, number = name.split("_")
    byte_a, byte_b = BYTES[int(number)] if kind == "byte" else (0, 0)
    x, y = MX[a].values(left), MX[b].values(right)
    if kind != "plain":
        x = x * _factors(scales[0, :, :, byte_a])
        y = y * _factors(scales[1, :, :, byte_b])
    return d, x @ y.T + c


def _factors(exponents: NDArray[np.uint8]) -> NDArray[np.float64]:
    powers = np.ascontiguousarray(exponents).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return np.repeat(powers, 32, axis=1)


def some_scales(size: int, seed: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    return rng.integers(121, 134, (2, size, SIZES[size] // 32, 4)).astype(np.uint8)


def close(got: NDArray, exact: NDArray) -> None:
    assert np.abs(got - exact).max() <= 2**-20 * np.abs(exact).max()


PAIRS = [(a, b) for a in range(len(MX)) for b in range(len(MX))]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_product_of_any_two_formats(size: int, a: int, b: int) -> None:
    close(*run(f"plain_{size}_{a}{b}", size, a, b, 1, some_scales(size, 2)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_every_32_elements_have_their_scale(size: int, a: int, b: int) -> None:
    close(*run(f"scaled_{size}_{a}{b}", size, a, b, 3, some_scales(size, 4)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("number", range(len(BYTES)))
def test_op_sel_picks_the_scales_byte(size: int, number: int) -> None:
    close(*run(f"byte_{size}_{number}", size, 0, 4, 5, some_scales(size, 6)))


@pytest.mark.parametrize("size", SIZES)
def test_accumulator_registers(size: int) -> None:
    close(*run(f"agpr_{size}_0", size, 2, 1, 7, some_scales(size, 8)))


def test_scales_reach_their_ends() -> None:
    """Scales at the ends of their range: 2**-127 and 2**127 cancel, and a scale of 0xff makes its
    row or column NaN.
    """
    scales = np.full((2, 16, 4, 4), 127, np.uint8)
    scales[0, 3], scales[1] = 0, 254
    scales[0, :3], scales[0, 4:] = 1, 2
    got, exact = run("scaled_16_44", 16, 4, 4, 9, scales)
    close(got, exact)
    scales[:] = 127
    scales[0, 5, 2, 0] = scales[1, 7, 0, 0] = NAN_SCALE
    got, exact = run("scaled_16_44", 16, 4, 4, 9, scales)
    expected = np.zeros((16, 16), bool)
    expected[5], expected[:, 7] = True, True
    assert np.array_equal(np.isnan(got), expected)
    close(got[~expected], exact[~expected])


def test_overflow_by_the_mode() -> None:
    """An overflow of a scaled product gives infinity, or with the mode bit FP16_OVFL the largest
    number.
    """
    scales = np.full((2, 16, 4, 4), 254, np.uint8)
    plain, _ = run("scaled_16_44", 16, 4, 4, 10, scales)
    clipped, exact = run("clipped_16_44", 16, 4, 4, 10, scales)
    assert np.abs(exact).min() > np.finfo(np.float32).max
    assert np.array_equal(plain, np.sign(exact) * np.inf)
    assert np.array_equal(clipped, np.sign(exact) * np.finfo(np.float32).max)


def test_scales_and_elements_need_their_waits() -> None:
    """The check of waits covers the registers of scales and elements, but not the fifth and later
    registers of A, which 4-bit elements do not use.
    """
    for name, register in (("scale", SCALES + 1), ("element", A + 3)):
        with pytest.raises(AssertionError, match=f"v{register} before an s_waitcnt covers"):
            suite().run(f"waits_{name}", [], checks=True)
    suite().run("waits_unused", [], checks=True)
