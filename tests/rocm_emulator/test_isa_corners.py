"""Rare cases of single instructions that compiled code seldom reaches.

The expectations follow AMD's CDNA3 and RDNA3 instruction set documents: the effect of a signalling
NaN on minima and maxima, the roundings of an unfused multiply-add, the values that compares and
carries write for lanes that a DPP control disables, and saturation of integers by clamp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from isa_program import Case, Suite, Words

ARCHES = ("gfx942", "gfx1100")
M, M16 = 2**32 - 1, 2**16 - 1
QUIET, SIGNAL, SIGNAL_16 = 0x7FC12345, 0xFF812345, 0x7D01
LESS = {
    "v_min_f32_e32": "v40, v10, v11",
    "v_max_f32_e32": "v41, v10, v11",
    "v_min3_f32": "v42, v10, v11, v12",
    "v_max3_f32": "v43, v10, v11, v12",
    "v_med3_f32": "v44, v10, v11, v12",
}


def _dpp_body(rdna: bool) -> str:
    """The body of a case in which a comparison and an addition with carry use DPP: a row shift by
    one that does not write the second bank.
    """
    vcc = "vcc_lo" if rdna else "vcc"
    control = "row_shr:1 row_mask:0xf bank_mask:0xd"
    add = f"v_add_co_ci_u32_dpp v41, {vcc}, v10, v11, {vcc}"
    add = add if rdna else f"v_addc_co_u32_dpp v41, {vcc}, v10, v11, {vcc}"
    return (
        f"v_mov_b32_e32 v41, v11\n"
        f"v_cmp_lt_u32_{'dpp v10, v11 ' + control if rdna else 'e32 vcc, v10, v11'}\n"
        f"v_cndmask_b32_e64 v40, 0, 1, {vcc}\n"
        f"v_cmp_eq_u32_e32 {vcc}, v10, v10\n"
        f"{add} {control}\n"
        f"v_cndmask_b32_e64 v42, 0, 1, {vcc}"
    )


@cache
def suite(arch: str) -> Suite:
    rdna = arch == "gfx1100"
    half = "v_min_f16_e32 v40{0}, v10{0}, v11{0}\nv_max_f16_e32 v41{0}, v10{0}, v11{0}"
    cases = {
        "signal": Case("\n".join(f"{name} {rest}" for name, rest in LESS.items()), 3, 5),
        "signal_16": Case(half.format(".l" if rdna else ""), 2, 2),
        "signal_64": Case(
            "v_mov_b32_e32 v60, 0\nv_mov_b32_e32 v61, v10\nv_mov_b32_e32 v62, 0\n"
            "v_mov_b32_e32 v63, v11\n"
            "v_min_f64 v[40:41], v[60:61], v[62:63]\nv_max_f64 v[42:43], v[60:61], v[62:63]",
            2,
            4,
        ),
        "packed": Case("v_pk_min_f16 v40, v10, v11\nv_pk_max_f16 v41, v10, v11", 2, 2),
        "dpp": Case(_dpp_body(rdna), 2, 3),
        "dot_clamp": Case("v_dot2_f32_f16 v40, v10, v11, v12 clamp", 3),
    }
    if rdna:
        # At each start of the loop all registers have the same contents; only private memory
        # differs. The emulator must not take this for an endless loop.
        cases["count_in_private_memory"] = Case(
            "v_mov_b32 v60, 0\nscratch_store_b32 off, v60, off\nagain:\n"
            "scratch_load_b32 v60, off, off\ns_waitcnt vmcnt(0)\nv_add_nc_u32 v60, 1, v60\n"
            "scratch_store_b32 off, v60, off\nv_readfirstlane_b32 s8, v60\nv_mov_b32 v60, 0\n"
            "s_cmp_lg_u32 s8, 20000\ns_mov_b32 s8, 0\ns_cbranch_scc1 again\n"
            "scratch_load_b32 v40, off, off\ns_waitcnt vmcnt(0)",
            1,
        )
    if not rdna:
        cases["mad_16"] = Case(
            "v_mov_b32_e32 v41, v12\nv_mov_b32_e32 v60, 0\n"
            "v_mad_f16 v40, v10, v11, v12\nv_mac_f16_e32 v41, v10, v11",
            3,
            2,
        )
        cases["counters"] = Case("s_incperflevel 1\ns_decperflevel 1\ns_ttracedata", 1)
    return Suite(arch, cases)


def _lanes(arch: str, *values: int) -> Words:
    row = np.zeros(suite(arch).lanes, np.uint32)
    row[: len(values)] = values
    return row


@pytest.mark.parametrize("arch", ARCHES)
def test_signalling_nans_win_quieted(arch: str) -> None:
    one, two, quieted = 0x3F800000, 0x40000000, SIGNAL | 0x400000
    a = _lanes(arch, SIGNAL, one, one, QUIET, one)
    b = _lanes(arch, one, SIGNAL, QUIET, one, two)
    c = _lanes(arch, one, one, one, two, SIGNAL)
    got = suite(arch).run("signal", [a, b, c])
    assert [hex(x) for x in got[0][:5]] == [hex(x) for x in (quieted, quieted, one, one, one)]
    assert [hex(x) for x in got[1][:5]] == [hex(x) for x in (quieted, quieted, one, one, two)]
    # min3 and max3 compare the first two operands, of which one is a NaN that becomes quiet. They
    # compare this NaN with the third operand, and return the third.
    assert [hex(x) for x in got[2][:5]] == [hex(x) for x in (one, one, one, one, quieted)]
    assert [hex(x) for x in got[3][:5]] == [hex(x) for x in (one, one, one, two, quieted)]
    assert [hex(x) for x in got[4][:5]] == [hex(x) for x in (one, one, one, one, quieted)]


@pytest.mark.parametrize("arch", ARCHES)
def test_signalling_nans_of_other_widths(arch: str) -> None:
    low, high = suite(arch).run(
        "signal_16", [_lanes(arch, SIGNAL_16, 0x3C00), _lanes(arch, 0x3C00, SIGNAL_16)]
    )
    quiet = np.isnan(np.stack([low, high])[:, :2].astype(np.uint16).view(np.float16))
    assert quiet.all() and (np.stack([low, high])[:, :2] & 0x200).all()
    rows = [_lanes(arch, SIGNAL_16 << 16 | 0x3C00), _lanes(arch, 0x3C00 << 16 | SIGNAL_16)]
    for word in suite(arch).run("packed", rows)[:, 0]:
        halves = np.array([word], np.uint32).view(np.float16)
        assert np.isnan(halves).all() and word & 0x02000200 == 0x02000200
    wide = suite(arch).run("signal_64", [_lanes(arch, 0x7FF40000, 0x3FF00000),
                                         _lanes(arch, 0x3FF00000, 0x7FF40000)])  # fmt: skip
    assert (wide[1][:2] == 0x7FFC0000).all() and (wide[3][:2] == 0x7FFC0000).all()


def test_unfused_f16_rounds_the_product() -> None:
    rng = np.random.default_rng(5)
    a, b, c = (rng.standard_normal(64).astype(np.float16) for _ in range(3))
    a[:2], b[:2], c[:2] = np.float16(-6e-8), np.float16(0.25), np.float16(0)
    rows = [x.view(np.uint16).astype(np.uint32) for x in (a, b, c)]
    mad, mac = suite("gfx942").run("mad_16", rows)
    expected = (a * b + c).view(np.uint16)
    np.testing.assert_array_equal(mad & 0xFFFF, expected)
    np.testing.assert_array_equal(mac & 0xFFFF, expected)
    fused = (a.astype(np.float64) * b + c).astype(np.float16).view(np.uint16)
    assert (fused != expected).any()


@pytest.mark.parametrize("arch", ARCHES)
def test_lanes_that_dpp_disables_give_no_bit(arch: str) -> None:
    lanes = suite(arch).lanes
    lane = np.arange(lanes, dtype=np.uint32)
    a, b = lane + 1, np.full(lanes, 0xFFFFFFFF, np.uint32)
    less, total, carry = suite(arch).run("dpp", [a, b])
    active = (lane % 16 != 0) & (lane // 4 % 4 != 1)  # a source to read, and the bank is on
    if arch == "gfx1100":
        np.testing.assert_array_equal(less, active)
    moved = np.roll(a, 1)
    np.testing.assert_array_equal(total, np.where(active, moved + b + 1, b))
    np.testing.assert_array_equal(carry, active)


@pytest.mark.parametrize("arch", ARCHES)
def test_clamp_of_a_float_dot_product(arch: str) -> None:
    one, half = 0x3C00, 0x3800
    a = _lanes(arch, one << 16 | one, half << 16, half, one)
    b = _lanes(arch, one << 16 | one, one << 16, one, one | 0x8000)
    got = suite(arch).run("dot_clamp", [a, b, _lanes(arch, 0, 0x3E800000, 0, 0x3F000000)])
    assert got[0][:4].view(np.float32).tolist() == [1.0, 0.75, 0.5, 0.0]


@pytest.mark.parametrize(("arch", "kept"), [("gfx90a", 0.0), ("gfx942", 2.0**-24)])
def test_dot_products_flush_denormals_on_mi200(arch: str, kept: float) -> None:
    """Dot products of f16 flush denormals on MI200, as its matrix products do (PyTorch's
    documentation, "Numerical accuracy").
    """
    a, b = _lanes(arch, 1 << 16, 0x8001, 0, 0x3C00), _lanes(arch, 0x3C003C00)
    b[1], b[3] = 0xBC00, 0x3C00
    c = _lanes(arch, 0, 0, 1)
    got = suite(arch).run("dot_clamp", [a, b, c])[0].view(np.float32)[:4].tolist()
    assert got == [kept, kept, 0.0 if arch == "gfx90a" else 2.0**-149, 1.0]


def test_loop_that_counts_in_private_memory_is_no_deadlock() -> None:
    got = suite("gfx1100").run("count_in_private_memory", [_lanes("gfx1100")])
    assert (got[0] == 20000).all()


def test_counters_and_traces_do_nothing() -> None:
    assert (suite("gfx942").run("counters", [_lanes("gfx942")]) == 0).all()


def _signed(x: Words, bits: int) -> list[int]:
    values = [int(v) & (1 << bits) - 1 for v in x]
    return [v - (1 << bits) if v >> (bits - 1) else v for v in values]


def _unsigned(x: Words, bits: int) -> list[int]:
    return [int(v) & (1 << bits) - 1 for v in x]


Exact = Callable[[int, int, int], int]
Reader = Callable[[Words, int], list[int]]
# name -> (reader of the operands, bits of a factor, bits of the addend, bits of the result,
# function for its exact value).
SATURATING: dict[str, tuple[Reader, int, int, int, Exact]] = {
    "v_mad_u32_u24": (_unsigned, 24, 32, 32, lambda a, b, c: a * b + c),
    "v_mad_i32_i24": (_signed, 24, 32, 32, lambda a, b, c: a * b + c),
    "v_mad_u32_u16": (_unsigned, 16, 32, 32, lambda a, b, c: a * b + c),
    "v_mad_i32_i16": (_signed, 16, 32, 32, lambda a, b, c: a * b + c),
    "v_mad_u16": (_unsigned, 16, 16, 16, lambda a, b, c: a * b + c),
    "v_mad_i16": (_signed, 16, 16, 16, lambda a, b, c: a * b + c),
    "v_sad_u32": (_unsigned, 32, 32, 32, lambda a, b, c: abs(a - b) + c),
    "v_dot4_u32_u8": (_unsigned, 32, 32, 32, lambda a, b, c: _dot(a, b, False) + c),
    "v_dot4_i32_i8": (_signed, 32, 32, 32, lambda a, b, c: _dot(a, b, True) + c),
}
CARRY = {"v_add_co_u32_e64": (1, 2**32 - 1), "v_sub_co_u32_e64": (-1, 0)}


def _dot(a: int, b: int, signed: bool) -> int:
    x, y = ((v & 0xFFFFFFFF).to_bytes(4, "little") for v in (a, b))
    pairs = zip(x, y, strict=True)
    return sum((p - (p & 128) * 2) * (q - (q & 128) * 2) if signed else p * q for p, q in pairs)


@cache
def saturating() -> Suite:
    cases = {name: Case(f"{name} v40, v10, v11, v12 clamp", 3) for name in SATURATING}
    for name in CARRY:
        body = f"{name} v40, s[8:9], v10, v11 clamp\nv_cndmask_b32_e64 v41, 0, 1, s[8:9]"
        cases[name] = Case(body, 2, 2)
    for name in ("v_pk_mad_u16", "v_pk_mad_i16"):
        cases[name] = Case(f"{name} v40, v10, v11, v12 clamp", 3)
    for name in ("v_mad_u64_u32", "v_mad_i64_i32"):
        body = f"{name} v[40:41], s[8:9], v10, v11, v[12:13] clamp\n"
        cases[name] = Case(body + "v_cndmask_b32_e64 v42, 0, 1, s[8:9]", 4, 3)
    return Suite("gfx942", cases)


def _near_limits(count: int) -> list[Words]:
    rng = np.random.default_rng(11)
    corners = np.array([0, 1, 0x7FFF7FFF, 0x80008000, 0x7FFFFFFF, 0x80000000, M], np.uint32)
    rows = []
    for _ in range(count):
        row = rng.integers(0, 2**32, 64, dtype=np.uint32)
        row[::2] = rng.choice(corners, 32)
        rows.append(row)
    return rows


@pytest.mark.parametrize("name", list(SATURATING))
def test_clamp_saturates_exact_results(name: str) -> None:
    read, factor, addend, bits, exact = SATURATING[name]
    rows = _near_limits(3)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if read is _signed else (0, 2**bits - 1)
    sources = zip(read(rows[0], factor), read(rows[1], factor), read(rows[2], addend), strict=True)
    values = [exact(*v) for v in sources]
    assert any(not low <= v <= high for v in values) and any(low < v < high for v in values)
    expected = [min(max(v, low), high) & (1 << bits) - 1 for v in values]
    got = saturating().run(name, rows)[0] & np.uint32(2**bits - 1)
    assert [hex(v) for v in got] == [hex(v) for v in expected]


@pytest.mark.parametrize("name", list(CARRY))
def test_clamp_and_carry(name: str) -> None:
    sign, limit = CARRY[name]
    rows = _near_limits(2)
    got, carry = saturating().run(name, rows)
    for lane in range(64):
        exact = int(rows[0][lane]) + sign * int(rows[1][lane])
        fits = 0 <= exact < 2**32
        assert (int(got[lane]), int(carry[lane])) == (exact if fits else limit, int(not fits))


@pytest.mark.parametrize("signed", [False, True])
def test_clamp_of_packed_and_wide_products(signed: bool) -> None:
    rows, read = _near_limits(4), _signed if signed else _unsigned
    low, high = (-(2**15), 2**15 - 1) if signed else (0, 2**16 - 1)
    packed = saturating().run("v_pk_mad_i16" if signed else "v_pk_mad_u16", rows)[0]
    for shift in (0, 16):
        a, b, c = (read(row >> np.uint32(shift), 16) for row in rows[:3])
        expected = [min(max(x * y + z, low), high) & M16 for x, y, z in zip(a, b, c, strict=True)]
        assert [int(v) >> shift & M16 for v in packed] == expected
    wide = saturating().run("v_mad_i64_i32" if signed else "v_mad_u64_u32", rows)
    low, high = (-(2**63), 2**63 - 1) if signed else (0, 2**64 - 1)
    a, b = read(rows[0], 32), read(rows[1], 32)
    for lane in range(64):
        c = int(rows[2][lane]) | int(rows[3][lane]) << 32
        exact = a[lane] * b[lane] + (c - 2**64 if signed and c >> 63 else c)
        got = int(wide[0][lane]) | int(wide[1][lane]) << 32
        assert got == min(max(exact, low), high) & (2**64 - 1)
        assert int(wide[2][lane]) == exact >> 64 & 1  # bit 64 of the exact sum
