"""Corners of single instructions that compiled code seldom reaches.

Expectations are written from AMD's CDNA3 and RDNA3 instruction set documents: what a signalling NaN
does to minima and maxima, where an unfused multiply-add rounds, and what compares and carries write
for lanes that a DPP control disables.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from isa_program import Case, Suite, Words

ARCHES = ("gfx942", "gfx1100")
QUIET, SIGNAL, SIGNAL_16 = 0x7FC12345, 0xFF812345, 0x7D01
LESS = {
    "v_min_f32_e32": "v40, v10, v11",
    "v_max_f32_e32": "v41, v10, v11",
    "v_min3_f32": "v42, v10, v11, v12",
    "v_max3_f32": "v43, v10, v11, v12",
    "v_med3_f32": "v44, v10, v11, v12",
}


def _dpp_body(rdna: bool) -> str:
    """Row shift by one with the second bank of each row off, in a compare and in a carry."""
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
    }
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
    # With three operands the quieted NaN of the first two meets the third and loses.
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


def test_counters_and_traces_do_nothing() -> None:
    assert (suite("gfx942").run("counters", [_lanes("gfx942")]) == 0).all()
