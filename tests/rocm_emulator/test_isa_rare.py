"""Vector operations that compilers emit only for intrinsics, on CDNA and RDNA, compared with NumPy.

Definitions are from AMD's CDNA2 and RDNA3 instruction set documents: sums of absolute differences
at four byte offsets, cube map coordinates, multiplications in which zero wins, normalised f16, and
RDNA3's moves between registers that M0 selects.
"""

from __future__ import annotations

import numpy as np
import pytest
from isa_program import Case, Suite, Words
from numpy.typing import NDArray

RNG = np.random.default_rng(51)
LARGEST = np.finfo(np.float32).max
# Six inputs: a 64-bit source in v10, a byte pattern in v12, an addend in v14 and on (v13 unused).
DIFFERENCES = {
    "qsad_pk_u16": ("v_qsad_pk_u16_u8 v[40:41], v[10:11], v12, v[14:15]", False, 2),
    "mqsad_pk_u16": ("v_mqsad_pk_u16_u8 v[40:41], v[10:11], v12, v[14:15]", True, 2),
    "mqsad_u32": ("v_mqsad_u32_u8 v[40:43], v[10:11], v12, v[14:17]", True, 4),
}
CUBE = "\n".join(
    f"v_cube{suffix}_f32 v{40 + k}, v10, v11, v12"
    for k, suffix in enumerate(("id", "sc", "tc", "ma"))
)
SHARED = {
    **{name: Case(text, 8, rows) for name, (text, _, rows) in DIFFERENCES.items()},
    "cube": Case(CUBE, 3, 4),
}
CDNA = {
    "normalised": Case(
        "v_cvt_pknorm_i16_f16 v40, v10, v11\nv_cvt_pknorm_u16_f16 v41, -v10, |v11|", 2, 2
    ),
    "legacy": Case(
        "v_mov_b32 v40, v13\nv_mov_b32 v41, v13\nv_mad_legacy_f16 v40, v10, v11, v12\n"
        "v_div_fixup_legacy_f16 v41, v10, v11, v12",
        4,
        2,
    ),
    "byte": Case("v_mov_b32 v40, v12\nv_cvt_pkaccum_u8_f32 v40, v10, v11", 3),
}
RDNA = {
    "normalised": Case(
        "v_cvt_pk_norm_i16_f16 v40, v10, v11\nv_cvt_pk_norm_u16_f16 v41, -v10, |v11|", 2, 2
    ),
    "zero_wins": Case(
        "v_fma_dx9_zero_f32 v40, v10, v11, v12\nv_mov_b32 v41, v12\n"
        "v_fmac_dx9_zero_f32 v41, v10, v11\nv_mullit_f32 v42, v10, v11, v12",
        3,
        3,
    ),
    "moved": Case(
        "v_pipeflush\ns_mov_b32 m0, 0x30001\nv_movrelsd_2_b32 v37, v10\nv_mov_b32 v41, v12\n"
        "v_mov_b32 v42, v10\ns_movk_i32 s9, 77\ns_movrelsd_2_b32 s10, s8\nv_mov_b32 v43, s13\n"
        "s_mov_b32 m0, 0x20001\nv_swaprel_b32 v39, v41",
        3,
        4,
    ),
    "atomics": Case(
        "global_store_b32 v0, v10, s[6:7]\ns_waitcnt_vscnt null, 0\n"
        "global_atomic_csub_u32 v40, v0, v11, s[6:7] glc\ns_waitcnt vmcnt(0)\n"
        "global_load_b32 v41, v0, s[6:7]\ns_waitcnt vmcnt(0)\n"
        "global_store_b32 v0, v12, s[6:7]\ns_waitcnt_vscnt null, 0\n"
        "v_mov_b32 v60, v14\nv_mov_b32 v61, v13\n"
        "global_atomic_cmpswap_f32 v42, v0, v[60:61], s[6:7] glc\ns_waitcnt vmcnt(0)\n"
        "global_load_b32 v43, v0, s[6:7]\ns_waitcnt vmcnt(0)",
        5,
        4,
    ),
}
SUITES = {"gfx90a": Suite("gfx90a", SHARED | CDNA), "gfx1100": Suite("gfx1100", SHARED | RDNA)}
ARCHS = pytest.mark.parametrize("arch", SUITES)


def _words(count: int) -> list[Words]:
    return [RNG.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(count)]


def run(arch: str, name: str, inputs: list[Words]) -> Words:
    lanes = SUITES[arch].lanes
    return SUITES[arch].run(name, [row[:lanes] for row in inputs])


@ARCHS
@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_at_four_offsets(arch: str, name: str) -> None:
    _, masked, rows = DIFFERENCES[name]
    inputs = _words(8)
    inputs[2][::3] &= 0xFF00FF00  # if the name begins with m, bytes of zero are ignored
    got = run(arch, name, inputs)
    lanes = SUITES[arch].lanes
    bytes_ = np.stack(inputs[:2], axis=1)[:lanes].view(np.uint8).astype(np.int64)
    pattern = inputs[2][:lanes, None].view(np.uint8).astype(np.int64)
    sums = []
    for k in range(4):
        parts = np.abs(bytes_[:, k : k + 4] - pattern)
        sums.append((parts * (pattern != 0) if masked else parts).sum(axis=1))
    if rows == 4:
        expected = np.stack(inputs[4:])[:, :lanes] + np.stack(sums).astype(np.uint32)
    else:
        addends = np.stack(inputs[4:6], axis=1)[:lanes].view(np.uint16)
        halves = addends + np.stack(sums, axis=1).astype(np.uint16)
        expected = np.ascontiguousarray(halves).view(np.uint32).T
    assert np.array_equal(got, expected)


@ARCHS
def test_cube_map_coordinates(arch: str) -> None:
    """The cube map instructions: the face, the two coordinates on it, and twice the major axis."""
    lanes = SUITES[arch].lanes
    x, y, z = (RNG.uniform(-1, 1, lanes).astype(np.float32) for _ in range(3))
    x[0], y[0], z[0] = 0.5, 0.5, 0.5
    x[1], y[1], z[1] = -0.5, 0.5, 0.25
    got = run(arch, "cube", [v.view(np.uint32) for v in (x, y, z)]).view(np.float32)
    on_z = (np.abs(z) >= np.abs(x)) & (np.abs(z) >= np.abs(y))
    on_y = ~on_z & (np.abs(y) >= np.abs(x))
    axes = [on_z, on_y]
    major = np.select(axes, [z, y], x)
    face = np.select(axes, [4, 2], 0) + (major < 0)
    s = np.select(axes, [np.where(z < 0, -x, x), x], np.where(x < 0, z, -z))
    t = np.select(axes, [-y, np.where(y < 0, -z, z)], -y)
    assert np.array_equal(got, np.stack([face, s, t, 2 * major]).astype(np.float32))


def _halves(values: NDArray[np.float64]) -> Words:
    low = np.resize(values, 64).astype(np.float16).view(np.uint16).astype(np.uint32)
    return low | 0xABCD0000


@ARCHS
def test_normalised_halves(arch: str) -> None:
    lanes = SUITES[arch].lanes
    a, b = RNG.uniform(-1.3, 1.3, (2, 64)).astype(np.float16).astype(np.float64)
    a[:2], b[:2] = (np.nan, -1), (1, np.nan)
    signed, unsigned = run(arch, "normalised", [_halves(a), _halves(b)])
    for got, x, y, low, most in (
        (signed, a, b, -1, 32767),
        (unsigned, -a, np.abs(b), 0, 65535),
    ):
        parts = []
        for v in (x, y):
            clipped = np.clip(np.nan_to_num(v, nan=0), low, 1).astype(np.float32)
            parts.append(np.round(clipped * np.float32(most)).astype(np.int64) & 0xFFFF)
        expected = parts[0] | parts[1] << 16
        assert np.array_equal(got, expected[:lanes].astype(np.uint32))


def test_legacy_halves_clear_the_other_half() -> None:
    a, b = RNG.integers(-15, 16, (2, 64)).astype(np.float16) + np.float16(0.5)  # exact products
    c = RNG.uniform(-4, 4, 64).astype(np.float16)
    mad, fixed = run("gfx90a", "legacy", [*(_halves(v) for v in (a, b, c)), *_words(1)])
    wide = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    assert np.array_equal(mad, wide.astype(np.float16).view(np.uint16).astype(np.uint32))
    sign = np.where(np.signbit(b) != np.signbit(c), -1, 1)
    expected = (np.abs(a) * sign).astype(np.float16).view(np.uint16)
    assert np.array_equal(fixed, expected.astype(np.uint32))


def test_one_byte_is_converted() -> None:
    values = RNG.uniform(-20, 300, 64).astype(np.float32)
    values[:3] = 2.5, 3.5, np.nan
    place, old = _words(2)
    rounded = np.clip(np.round(np.nan_to_num(values, nan=0)), 0, 255).astype(np.uint32)
    shift = (place & 3) * 8
    expected = (old & ~(np.uint32(0xFF) << shift)) | rounded << shift
    got = run("gfx90a", "byte", [values.view(np.uint32), place, old])[0]
    assert np.array_equal(got, expected)


def test_legacy_products_with_zero_are_zero() -> None:
    """Legacy products, in which 0 times infinity or NaN is 0, and v_mullit_f32, whose result is the
    most negative number if an operand is out of range.
    """
    a, b, c = RNG.uniform(-3, 3, (3, 32)).astype(np.float32)
    a[:3], b[:3] = (0, np.inf, np.nan), (np.inf, 0, 0)
    b[3:6], c[6:8] = (-np.inf, np.nan, -LARGEST), (0, np.nan)
    fused, summed, light = run("gfx1100", "zero_wins", [v.view(np.uint32) for v in (a, b, c)])
    with np.errstate(invalid="ignore", over="ignore"):
        wide = a.astype(np.float64) * b.astype(np.float64)
        product = np.where((a == 0) | (b == 0), 0.0, wide)
        expected = (product + c).astype(np.float32)
        single = product.astype(np.float32)
    assert np.array_equal(fused.view(np.float32), expected, equal_nan=True)
    assert np.array_equal(summed, fused)
    none = ~(b > -LARGEST) | ~(c > 0)
    expected = np.where(none, -LARGEST, single)
    assert np.array_equal(light.view(np.float32), expected)


def test_moves_by_two_numbers_in_m0() -> None:
    """Moves by two offsets in M0: from v(10 + 1) to v(37 + 3), from s(8 + 1) to s(10 + 3), and an
    exchange of v(39 + 2) and v(41 + 1).
    """
    inputs = [row[:32] for row in _words(3)]
    first, second, third, scalar = run("gfx1100", "moved", inputs)
    assert np.array_equal(first, inputs[1])
    assert np.array_equal(second, inputs[0]) and np.array_equal(third, inputs[2])
    assert np.all(scalar == 77)


def test_rdna_atomics_that_clamp_and_compare_floats() -> None:
    lanes = np.arange(32)
    old, less = (row[:32] for row in _words(2))
    value = RNG.uniform(-1, 1, 32).astype(np.float32)
    value[0] = -0.0
    expected = np.where(lanes % 2 == 0, value, np.float32(3))
    expected[0] = 0.0  # equal as a number
    inputs = [old, less, value.view(np.uint32), expected.view(np.uint32), np.full(32, 7, np.uint32)]
    before, after, was, now = run("gfx1100", "atomics", inputs)
    assert np.array_equal(before, old)
    assert np.array_equal(after, np.where(old < less, 0, old - less))
    assert np.array_equal(was, value.view(np.uint32))
    assert np.array_equal(now, np.where(lanes % 2 == 0, 7, value.view(np.uint32)))
