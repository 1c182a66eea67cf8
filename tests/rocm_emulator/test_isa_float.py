"""Floating point: rounding modes, denormals, specials, saturation, small formats, modifiers.

Expected values come from NumPy and ml_dtypes, directed rounding from exact values in double and the
neighbours of the rounded one. Runs on gfx942, and on gfx1100 where the instruction is the same.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from isa_program import Case, Suite, Words
from numpy.typing import NDArray

ARCHES = ("gfx942", "gfx1100")
# Bits of the register MODE: 1:0 are the rounding of f32, 3:2 that of f16 and f64 (nearest, up,
# down, zero); 5:4 and 7:6 say whether denormals of these types are kept.
ROUNDING = {"nearest": 0, "up": 1, "down": 2, "zero": 3}
SPECIALS = np.array(
    [
        np.nan,
        np.inf,
        -np.inf,
        0.0,
        -0.0,
        1.0,
        -1.5,
        2.0**-130,
        -(2.0**-149),
        3.0e38,
        1e-38,
        65504.0,
    ],
    np.float32,
)


def _mode(value: int) -> str:
    return f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 8), {value:#x}"


def _round_cases() -> dict[str, Case]:
    cases = {}
    for name, mode in ROUNDING.items():
        start, end = _mode(0xF0 | mode | mode << 2), _mode(0xF0)
        cases[f"round32_{name}"] = Case(
            f"{start}\nv_add_f32_e32 v40, v10, v11\nv_mul_f32_e32 v41, v10, v11\n"
            f"v_fma_f32 v42, v10, v11, v12\n{end}",
            3,
            3,
        )
        cases[f"round64_{name}"] = Case(
            "v_cvt_f64_f32_e32 v[60:61], v10\nv_cvt_f64_f32_e32 v[62:63], v11\n"
            f"{start}\nv_mul_f64 v[40:41], v[60:61], v[62:63]\n"
            f"v_add_f64 v[42:43], v[60:61], v[62:63]\nv_cvt_f32_f64_e32 v44, v[60:61]\n{end}",
            2,
            5,
        )
        cases[f"convert16_{name}"] = Case(f"{start}\nv_cvt_f16_f32_e64 v40, v10\n{end}", 1)
    for denormals in (0, 1, 2, 3):
        cases[f"denormals_{denormals}"] = Case(
            f"{_mode(0xC0 | denormals << 4)}\nv_mul_f32_e32 v40, 1.0, v10\n"
            f"v_mul_f32_e32 v41, v10, v11\n{_mode(0xF0)}",
            2,
            2,
        )
    return cases


def _plain_cases(arch: str) -> dict[str, Case]:
    cases = {
        "minmax": Case(
            "v_min_f32_e32 v40, v10, v11\nv_max_f32_e32 v41, v10, v11\n"
            "v_med3_f32 v42, v10, v11, v12\nv_min3_f32 v43, v10, v11, v12\n"
            "v_max3_f32 v44, v10, v11, v12",
            3,
            5,
        ),
        "integers": Case(
            "v_cvt_i32_f32_e32 v40, v10\nv_cvt_u32_f32_e32 v41, v10\n"
            "v_cvt_f64_f32_e32 v[60:61], v10\nv_cvt_i32_f64_e32 v42, v[60:61]\n"
            "v_cvt_u32_f64_e32 v43, v[60:61]",
            1,
            4,
        ),
        "from_integers": Case(
            "v_cvt_f32_i32_e32 v40, v10\nv_cvt_f32_u32_e32 v41, v10\n"
            "v_cvt_f64_i32_e32 v[42:43], v10\nv_cvt_f32_ubyte2_e32 v44, v10",
            1,
            5,
        ),
        "modifiers": Case(
            "v_add_f32_e64 v40, -v10, |v11| mul:2\nv_mul_f32_e64 v41, v10, v11 clamp\n"
            "v_fma_f32 v42, |v10|, -v11, -|v12| div:2\nv_cndmask_b32_e64 v43, -v10, |v11|, vcc"
            + ("_lo" if arch == "gfx1100" else ""),
            3,
            4,
        ),
        "parts": Case(
            "v_frexp_mant_f32_e32 v40, v10\nv_frexp_exp_i32_f32_e32 v41, v10\n"
            "v_fract_f32_e32 v42, v10\nv_rndne_f32_e32 v43, v10\nv_ldexp_f32 v44, v10, v11",
            2,
            5,
        ),
        "classes": Case(
            f"v_cmp_class_f32_e64 {'s8' if arch == 'gfx1100' else 's[8:9]'}, v10, v11\n"
            "v_mov_b32 v40, s8",
            2,
        ),
        "functions": Case(
            "v_exp_f32_e32 v40, v10\nv_log_f32_e32 v41, v11\nv_rcp_f32_e32 v42, v10\n"
            "v_rsq_f32_e32 v43, v11\nv_sqrt_f32_e32 v44, v11\nv_sin_f32_e32 v45, v10\n"
            "v_cos_f32_e32 v46, v10",
            2,
            7,
        ),
        "packed": Case(
            "v_pk_add_f16 v40, v10, v11\nv_pk_mul_f16 v41, v10, v11 op_sel:[1,0] op_sel_hi:[0,1]\n"
            "v_pk_fma_f16 v42, v10, v11, v12 neg_lo:[1,0,0] neg_hi:[0,0,1]\n"
            "v_pk_min_f16 v43, v10, v11\nv_fma_mix_f32 v44, v10, v11, v12 op_sel:[1,0,0] "
            "op_sel_hi:[1,1,0]",
            3,
            5,
        ),
        "packed_integers": Case(
            "v_pk_add_i16 v40, v10, v11 clamp\nv_pk_mul_lo_u16 v41, v10, v11\n"
            "v_pk_lshlrev_b16 v42, v10, v11\nv_pk_max_i16 v43, v10, v11 op_sel_hi:[1,0]",
            2,
            4,
        ),
    }
    if arch == "gfx942":
        cases["small"] = Case(
            "v_cvt_pk_fp8_f32 v40, v10, v11\nv_cvt_pk_bf8_f32 v41, v10, v11\n"
            "v_cvt_f32_fp8_e32 v42, v12\nv_cvt_f32_bf8_e32 v43, v12",
            3,
            4,
        )
        cases["packed32"] = Case(
            "v_mov_b32 v60, v10\nv_mov_b32 v61, v11\nv_mov_b32 v62, v12\nv_mov_b32 v63, v13\n"
            "v_pk_mul_f32 v[40:41], v[60:61], v[62:63]\n"
            "v_pk_add_f32 v[42:43], v[60:61], v[62:63] op_sel:[1,0] op_sel_hi:[0,1]",
            4,
            4,
        )
    return cases


SUITES = {arch: Suite(arch, {**_round_cases(), **_plain_cases(arch)}) for arch in ARCHES}
SUITES["gfx950"] = Suite(
    "gfx950",
    {
        "small": _plain_cases("gfx942")["small"],
        "bf16": Case("v_cvt_pk_bf16_f32 v40, v10, v11", 2),
    },
)


def bits(values: NDArray) -> Words:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def f32(words: Words) -> NDArray[np.float32]:
    return words.view(np.float32)


def lanes(arch: str, values: NDArray) -> NDArray:
    return np.resize(values, SUITES[arch].lanes)


def same(got: NDArray, expected: NDArray) -> None:
    """Asserts that the arrays are equal, including the signs of zeros. Any NaN equals any NaN."""
    assert np.array_equal(got, expected, equal_nan=True), (got, expected)
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.signbit(got[numbers]), np.signbit(expected[numbers]))


def rounded(exact: NDArray[np.float64], dtype: type, mode: str) -> NDArray:
    """``exact`` rounded to ``dtype`` in a rounding mode."""
    near = exact.astype(dtype)
    wide = near.astype(np.float64)
    below = np.where(wide > exact, np.nextafter(near, dtype(-np.inf)), near).astype(dtype)
    above = np.where(wide < exact, np.nextafter(near, dtype(np.inf)), near).astype(dtype)
    chosen = {"nearest": near, "up": above, "down": below}
    if mode == "zero":
        return np.where(exact >= 0, below, above)
    return chosen[mode]


@pytest.mark.parametrize("mode", ROUNDING)
@pytest.mark.parametrize("arch", ARCHES)
def test_rounding_of_f32(arch: str, mode: str) -> None:
    """Additions, products and fused multiply-adds in each rounding mode. Magnitudes are similar, so
    that the exact results fit into a double.
    """
    rng = np.random.default_rng(1)
    x, y, z = (rng.uniform(-8, 8, SUITES[arch].lanes).astype(np.float32) for _ in range(3))
    total, product, fused = SUITES[arch].run(f"round32_{mode}", [bits(x), bits(y), bits(z)])
    wide = x.astype(np.float64)
    same(f32(total), rounded(wide + y, np.float32, mode))
    same(f32(product), rounded(wide * y, np.float32, mode))
    exact = wide * y + z  # 48 bits and a sum of the same size: exact in double up to a bit
    got = f32(fused).astype(np.float64)
    spacing = np.abs(np.spacing(f32(fused))).astype(np.float64)
    off = got - exact
    slack = 2.0**-49
    allowed = {
        "nearest": np.abs(off) <= spacing / 2 + slack,
        "up": (off > -slack) & (off < spacing + slack),
        "down": (off < slack) & (off > -spacing - slack),
        "zero": (np.abs(got) <= np.abs(exact) + slack) & (np.abs(off) < spacing + slack),
    }
    assert np.all(allowed[mode])


@pytest.mark.parametrize("mode", ROUNDING)
@pytest.mark.parametrize("arch", ARCHES)
def test_rounding_of_f64_and_conversions(arch: str, mode: str) -> None:
    rng = np.random.default_rng(2)
    x, y = (rng.uniform(-8, 8, SUITES[arch].lanes).astype(np.float32) for _ in range(2))
    out = SUITES[arch].run(f"round64_{mode}", [bits(x), bits(y)])
    product = np.ascontiguousarray(out[0:2].T).view(np.float64)[:, 0]
    total = np.ascontiguousarray(out[2:4].T).view(np.float64)[:, 0]
    assert np.array_equal(product, x.astype(np.float64) * y)  # exact: 48 bits
    assert np.array_equal(total, x.astype(np.float64) + y)
    assert np.array_equal(f32(out[4]), x)
    (half,) = SUITES[arch].run(f"convert16_{mode}", [bits(x)])
    got = (half & 0xFFFF).astype(np.uint16).view(np.float16)
    same(got, rounded(x.astype(np.float64), np.float16, mode))


@pytest.mark.parametrize("setting", range(4))
@pytest.mark.parametrize("arch", ARCHES)
def test_denormals(arch: str, setting: int) -> None:
    """The denormal bits of MODE: bit 0 keeps denormal inputs, bit 1 keeps denormal results."""
    x = lanes(arch, np.array([2.0**-130, -(2.0**-149), 2.0**-126, 2.0**-70, -1.0], np.float32))
    y = lanes(arch, np.array([1.0, 1.0, 0.5, 2.0**-70, 3.0], np.float32))
    copied, product = SUITES[arch].run(f"denormals_{setting}", [bits(x), bits(y)])

    def flush(values: NDArray, keep: bool) -> NDArray:
        small = (np.abs(values) < 2.0**-126) & (not keep)
        return np.where(small, np.copysign(np.float32(0), values), values).astype(np.float32)

    keeps_in, keeps_out = bool(setting & 1), bool(setting & 2)
    same(f32(copied), flush(flush(x, keeps_in), keeps_out))
    exact = flush(x, keeps_in).astype(np.float64) * flush(y, keeps_in)
    same(f32(product), flush(exact.astype(np.float32), keeps_out))


@pytest.mark.parametrize("arch", ARCHES)
def test_minima_and_maxima_of_specials(arch: str) -> None:
    """Minima and maxima of special values: a number takes precedence over NaN, -0 is less than +0,
    and med3 with one NaN is the minimum.
    """
    count = SUITES[arch].lanes
    a, b, c = (x.ravel() for x in np.meshgrid(SPECIALS, SPECIALS, SPECIALS))
    for start in range(0, len(a) - count, count):
        x, y, z = (v[start : start + count] for v in (a, b, c))
        got = SUITES[arch].run("minmax", [bits(x), bits(y), bits(z)])
        low, high = np.fmin(x, y), np.fmax(x, y)
        zeros = (x == 0) & (y == 0)
        low = np.where(zeros & (np.signbit(x) | np.signbit(y)), np.float32(-0.0), low)
        high = np.where(zeros & ~(np.signbit(x) & np.signbit(y)), np.float32(0.0), high)
        same(f32(got[0]), low)
        same(f32(got[1]), high)
        nan = np.isnan(x) | np.isnan(y) | np.isnan(z)
        middle = np.sort(np.stack([x, y, z]), axis=0)[1]
        least = np.fmin(np.fmin(x, y), z)
        assert np.array_equal(f32(got[2]), np.where(nan, least, middle), equal_nan=True)
        assert np.array_equal(f32(got[3]), least, equal_nan=True)
        assert np.array_equal(f32(got[4]), np.fmax(np.fmax(x, y), z), equal_nan=True)


@pytest.mark.parametrize("arch", ARCHES)
def test_conversions_to_integers_saturate(arch: str) -> None:
    values = [
        0.5,
        -0.5,
        1.9,
        -1.9,
        2.0**31,
        -(2.0**31),
        2.0**32,
        1e20,
        -1e20,
        np.nan,
        np.inf,
        -np.inf,
    ]
    x = lanes(arch, np.array(values, np.float32))
    got = SUITES[arch].run("integers", [bits(x)])
    whole = np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=1e30, neginf=-1e30))
    signed = np.clip(whole, -(2**31), 2**31 - 1).astype(np.int32).view(np.uint32)
    unsigned = np.clip(whole, 0, 2**32 - 1).astype(np.uint32)
    assert np.array_equal(got, [signed, unsigned, signed, unsigned])


@pytest.mark.parametrize("arch", ARCHES)
def test_conversions_from_integers(arch: str) -> None:
    x = np.random.default_rng(4).integers(0, 2**32, SUITES[arch].lanes, dtype=np.uint32)
    got = SUITES[arch].run("from_integers", [x])
    assert np.array_equal(f32(got[0]), x.view(np.int32).astype(np.float32))
    assert np.array_equal(f32(got[1]), x.astype(np.float32))
    wide = np.ascontiguousarray(got[2:4].T).view(np.float64)[:, 0]
    assert np.array_equal(wide, x.view(np.int32).astype(np.float64))
    assert np.array_equal(f32(got[4]), (x >> 16 & 0xFF).astype(np.float32))


@pytest.mark.parametrize("arch", ARCHES)
def test_modifiers(arch: str) -> None:
    rng = np.random.default_rng(5)
    x, y, z = (rng.uniform(-3, 3, SUITES[arch].lanes).astype(np.float32) for _ in range(3))
    got = SUITES[arch].run("modifiers", [bits(x), bits(y), bits(z)])
    same(f32(got[0]), (-x + np.abs(y)) * np.float32(2))
    same(f32(got[1]), np.clip(x * y, np.float32(0), np.float32(1)) + np.float32(0))
    fused = np.abs(x.astype(np.float64)) * -y - np.abs(z)
    same(f32(got[2]), fused.astype(np.float32) * np.float32(0.5))
    assert np.all((f32(got[3]) == -x) | (f32(got[3]) == np.abs(y)))


@pytest.mark.parametrize("arch", ARCHES)
def test_parts_of_numbers(arch: str) -> None:
    rng = np.random.default_rng(6)
    x = lanes(arch, np.concatenate([SPECIALS, rng.uniform(-100, 100, 20).astype(np.float32)]))
    n = rng.integers(-20, 20, SUITES[arch].lanes).astype(np.int32)
    got = SUITES[arch].run("parts", [bits(x), n.view(np.uint32)])
    finite = np.isfinite(x)
    mantissa, exponent = np.frexp(x)
    same(f32(got[0]), np.where(finite, mantissa, x))
    assert np.array_equal(got[1].view(np.int32), np.where(finite & (x != 0), exponent, 0))
    with np.errstate(invalid="ignore"):
        fraction = x - np.floor(x)
    assert np.allclose(f32(got[2])[finite], fraction[finite], atol=1e-7)
    assert np.all(f32(got[2])[finite] < 1)
    same(f32(got[3]), np.rint(x))
    with np.errstate(over="ignore"):
        same(f32(got[4]), np.ldexp(x, n))


@pytest.mark.parametrize("arch", ARCHES)
def test_functions_within_the_documented_error(arch: str) -> None:
    """exp2, log2, 1/x, 1/sqrt, sqrt, and sin and cos of turns are within the documented error.
    Special values are exact.
    """
    rng = np.random.default_rng(12)
    x = rng.uniform(-20, 20, SUITES[arch].lanes).astype(np.float32)
    y = rng.uniform(0.01, 50, SUITES[arch].lanes).astype(np.float32)
    x[:3], y[:3] = [np.inf, -np.inf, 0.0], [np.inf, 0.0, 1.0]
    got = f32(SUITES[arch].run("functions", [bits(x), bits(y)])).astype(np.float64)
    wide, high = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        turns = 2 * np.pi * (wide - np.floor(wide))
        expected = [np.exp2(wide), np.log2(high), 1 / wide, 1 / np.sqrt(high), np.sqrt(high)]
        expected += [np.sin(turns), np.cos(turns)]
    for k in range(5):
        assert np.array_equal(np.isinf(got[k]), np.isinf(expected[k]))
        finite = np.isfinite(expected[k])
        assert np.allclose(got[k][finite], expected[k][finite], rtol=2**-22, atol=2**-24)
    assert np.all(np.isnan(got[5:, :2])) and np.allclose(got[5:, 2:], np.array(expected[5:])[:, 2:])


@pytest.mark.parametrize("arch", ARCHES)
def test_classes(arch: str) -> None:
    """v_cmp_class: its ten classes, from bit 0 on, are the two NaNs, -inf, -normal, -denormal, -0,
    and then 0, denormal, normal and inf.
    """
    patterns = [0x7F800001, 0x7FC00000, 0xFF800000, 0xBF800000, 0x80000001]
    patterns += [0x80000000, 0, 1, 0x3F800000, 0x7F800000]
    count = SUITES[arch].lanes
    for bit in range(10):
        values = np.resize(np.array(patterns, np.uint32), count)
        (mask,) = SUITES[arch].run("classes", [values, np.full(count, 1 << bit, np.uint32)])
        expected = sum(1 << lane for lane in range(32) if lane % 10 == bit)
        assert np.all(mask == expected), bit


def halves(words: Words) -> NDArray[np.float16]:
    return words.view(np.uint16).view(np.float16).reshape(-1, 2)


@pytest.mark.parametrize("arch", ARCHES)
def test_packed_halves(arch: str) -> None:
    rng = np.random.default_rng(7)
    count = SUITES[arch].lanes
    x, y, z = (rng.uniform(-4, 4, (count, 2)).astype(np.float16) for _ in range(3))
    words = [np.ascontiguousarray(v).view(np.uint32)[:, 0] for v in (x, y, z)]
    got = SUITES[arch].run("packed", words)
    same(halves(got[0]), x + y)
    same(halves(got[1]), np.stack([x[:, 1] * y[:, 0], x[:, 0] * y[:, 1]], axis=1))
    wide = x.astype(np.float64) * y * [-1, 1] + z * [1, -1]
    same(halves(got[2]), wide.astype(np.float16))
    same(halves(got[3]), np.fmin(x, y))
    mixed = x[:, 1].astype(np.float64) * y[:, 0] + f32(words[2])
    assert np.allclose(f32(got[4]), mixed.astype(np.float32), rtol=2**-23, atol=0)


@pytest.mark.parametrize("arch", ARCHES)
def test_packed_integers(arch: str) -> None:
    rng = np.random.default_rng(8)
    x, y = (rng.integers(0, 2**16, (SUITES[arch].lanes, 2), dtype=np.uint16) for _ in range(2))
    words = [np.ascontiguousarray(v).view(np.uint32)[:, 0] for v in (x, y)]
    got = [g.view(np.uint16).reshape(-1, 2) for g in SUITES[arch].run("packed_integers", words)]
    signed = [v.view(np.int16).astype(np.int32) for v in (x, y)]
    assert np.array_equal(got[0].view(np.int16), np.clip(sum(signed), -(2**15), 2**15 - 1))
    assert np.array_equal(got[1], x * y)
    assert np.array_equal(got[2], y << (x & 15))
    assert np.array_equal(got[3].view(np.int16), np.maximum(signed[0], signed[1][:, :1]))


def test_packed_f32() -> None:
    rng = np.random.default_rng(9)
    a, b, c, d = (rng.uniform(-4, 4, 64).astype(np.float32) for _ in range(4))
    got = f32(SUITES["gfx942"].run("packed32", [bits(v) for v in (a, b, c, d)]))
    same(got, np.stack([a * c, b * d, b + c, a + d]))


@pytest.mark.parametrize(
    ("arch", "e4m3", "e5m2"),
    [
        ("gfx942", ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz),
        ("gfx950", ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    ],
)
def test_eight_bit_floats(arch: str, e4m3: type, e5m2: type) -> None:
    """Conversions of 8-bit floats: every code to f32, and f32 of all magnitudes to the nearest
    code.
    """
    for start in range(0, 256, 64):
        codes = np.arange(start, start + 64, dtype=np.uint8)
        zero = np.zeros(64, np.uint32)
        got = SUITES[arch].run("small", [zero, zero, codes.astype(np.uint32)])
        same(f32(got[2]), codes.view(e4m3).astype(np.float32))
        same(f32(got[3]), codes.view(e5m2).astype(np.float32))
    rng = np.random.default_rng(10)
    x = (rng.uniform(-1, 1, 64) * 2.0 ** rng.uniform(-12, 7, 64)).astype(np.float32)
    y = np.roll(x, 1)
    small, large, _, _ = SUITES[arch].run("small", [bits(x), bits(y), np.zeros(64, np.uint32)])
    for got_words, dtype in ((small, e4m3), (large, e5m2)):
        pair = np.stack([x, y], axis=1).astype(dtype).view(np.uint8).astype(np.uint32)
        assert np.array_equal(got_words & 0xFFFF, pair[:, 0] | pair[:, 1] << 8)


def test_bf16_rounds_to_nearest_even() -> None:
    rng = np.random.default_rng(11)
    x = np.concatenate([SPECIALS, rng.uniform(-9, 9, 52).astype(np.float32)])
    ties = bits(x) & 0xFFFF0000 | 0x8000
    (got,) = SUITES["gfx950"].run("bf16", [bits(x), ties])
    low = (got & 0xFFFF).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        same(low, x.astype(ml_dtypes.bfloat16).astype(np.float32))
    high = (got >> 16).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        same(high, f32(ties).astype(ml_dtypes.bfloat16).astype(np.float32))
