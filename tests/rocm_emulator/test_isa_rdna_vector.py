"""RDNA3 vector and scalar instructions in a wave of 32, against NumPy and Python integers."""

from __future__ import annotations

import numpy as np
import pytest
from isa_program import Case, Suite, Words
from numpy.typing import NDArray

RNG = np.random.default_rng(11)
A, B, C = (RNG.integers(0, 2**32, 32, dtype=np.uint32) for _ in range(3))
F, G, H = (RNG.uniform(-8, 8, 32).astype(np.float32) for _ in range(3))
HALVES = RNG.uniform(-8, 8, (3, 32, 2)).astype(np.float16)
PACKED = [half.view(np.uint32)[:, 0] for half in HALVES]
LOW, HIGH = HALVES[:, :, 0], HALVES[:, :, 1]
MASK = int(RNG.integers(0, 2**32))


def f32(words: Words) -> NDArray[np.float32]:
    return words.view(np.float32)


def bits(values: NDArray[np.float32]) -> Words:
    return values.astype(np.float32).view(np.uint32)


CASES: dict[str, Case] = {
    # Dual issue: both operations read their sources before either writes its result, also if one
    # reads the other's destination.
    "dual_plain": Case("v_dual_add_f32 v40, v10, v11 :: v_dual_mul_f32 v41, v11, v12", 3, 2),
    "dual_x_feeds_y": Case(
        "v_mov_b32 v40, v10\nv_dual_mov_b32 v40, v11 :: v_dual_add_f32 v41, v40, v12", 3, 2
    ),
    "dual_y_feeds_x": Case(
        "v_mov_b32 v41, v11\nv_dual_add_f32 v40, v41, v10 :: v_dual_mov_b32 v41, v12", 3, 2
    ),
    "dual_swap": Case(
        "v_mov_b32 v40, v10\nv_mov_b32 v41, v11\n"
        "v_dual_mov_b32 v40, v41 :: v_dual_mov_b32 v41, v40",
        3,
        2,
    ),
    "dual_fmac": Case(
        "v_mov_b32 v40, v10\nv_mov_b32 v41, v11\n"
        "v_dual_fmac_f32 v40, v10, v11 :: v_dual_fmamk_f32 v41, v13, 0x40400000, v11",
        4,
        2,
    ),
    "dual_cndmask": Case(
        f"s_mov_b32 vcc_lo, {MASK:#x}\n"
        "v_dual_cndmask_b32 v40, v10, v11 :: v_dual_lshlrev_b32 v41, 5, v12",
        3,
        2,
    ),
    "dual_integers": Case(
        "v_dual_max_f32 v40, v10, v13 :: v_dual_and_b32 v41, v12, v11\n"
        "v_dual_min_f32 v42, v10, v13 :: v_dual_add_nc_u32 v43, v12, v11",
        4,
        4,
    ),
    # In a wave of 32 lanes all carries are in one SGPR.
    "add_carry": Case(
        "v_add_co_u32 v40, s8, v10, v11\nv_add_co_ci_u32_e64 v41, s9, v12, v12, s8\n"
        "v_mov_b32 v42, s9",
        3,
        3,
    ),
    "sub_carry": Case(
        "v_sub_co_u32 v40, vcc_lo, v10, v11\nv_sub_co_ci_u32_e32 v41, vcc_lo, v11, v12, vcc_lo\n"
        "v_mov_b32 v42, vcc_lo",
        3,
        3,
    ),
    "mad_wide": Case("v_mad_u64_u32 v[40:41], null, v10, v11, v[12:13]", 4, 2),
    # Comparisons write to a scalar register, or (cmpx) to EXEC only.
    "cmp": Case("v_cmp_lt_i32_e64 s8, v10, v11\nv_mov_b32 v40, s8", 2),
    "cmpx": Case(
        "s_mov_b32 vcc_lo, 0x1234\nv_mov_b32 v40, 7\nv_cmpx_gt_u32_e32 v10, v11\n"
        "v_mov_b32 v40, 9\ns_mov_b32 exec_lo, -1\nv_mov_b32 v41, vcc_lo",
        2,
        2,
    ),
    "saveexec": Case(
        f"v_mov_b32 v40, 1\nv_cmp_lt_u32_e32 vcc_lo, v10, v11\ns_and_saveexec_b32 s8, vcc_lo\n"
        "v_mov_b32 v40, 2\ns_xor_b32 exec_lo, exec_lo, s8\nv_mov_b32 v40, 3\n"
        f"s_mov_b32 s9, {MASK:#x}\ns_and_not1_saveexec_b32 s10, s9\ns_mov_b32 exec_lo, s8\n"
        "v_mov_b32 v41, s10",
        2,
        2,
    ),
    # 16-bit registers: operands are named halves of registers; the other half of the destination is
    # unchanged.
    "half_add": Case(
        "v_mov_b32 v40, v12\nv_add_f16_e32 v40.l, v10.h, v11.l\n"
        "v_mov_b32 v41, v12\nv_mul_f16_e32 v41.h, v10.l, v11.h",
        3,
        2,
    ),
    "half_fmac": Case(
        "v_mov_b32 v40, v12\nv_fmac_f16_e32 v40.h, v10.l, v11.h\n"
        "v_mov_b32 v41, v12\nv_fma_f16 v41.l, v10.h, -v11.h, |v12.h|",
        3,
        2,
    ),
    "half_literal": Case(
        "v_mov_b32 v40, v12\nv_fmamk_f16 v40.l, v10.h, 0x4200, v11.l\n"
        "v_mov_b32 v41, v12\nv_fmaak_f16 v41.h, v10.l, v11.h, 0xc000",
        3,
        2,
    ),
    "half_moves": Case(
        "v_mov_b32 v40, v12\nv_mov_b16_e32 v40.h, v10.l\nv_mov_b32 v41, v12\n"
        "v_not_b16_e32 v41.l, v10.h\nv_mov_b32 v42, v12\nv_xor_b16 v42.h, v10.h, v11.l\n"
        "v_cvt_f32_f16_e32 v43, v10.h\nv_cvt_i32_i16_e32 v44, v10.h\n"
        "v_cvt_u32_u16_e32 v45, v10.l",
        3,
        6,
    ),
    "half_select": Case(
        f"s_mov_b32 s8, {MASK:#x}\nv_mov_b32 v40, v12\nv_cndmask_b16 v40.h, v10.l, v11.h, s8\n"
        "v_cmp_lt_f16_e32 vcc_lo, v10.h, v11.l\nv_mov_b32 v41, vcc_lo",
        3,
        2,
    ),
    "short_integers": Case(
        "v_mov_b32 v40, v12\nv_add_nc_u16 v40.h, v10.l, v11.h\nv_mov_b32 v41, v12\n"
        "v_mul_lo_u16 v41.l, v10.h, v11.l\nv_mov_b32 v42, v12\nv_ashrrev_i16 v42.h, 3, v10.h\n"
        "v_mov_b32 v43, v12\nv_add_nc_i16 v43.l, v10.l, v11.l clamp",
        3,
        4,
    ),
    # Three-operand minima and maxima, logic, dot products, conversions.
    "minmax": Case("v_maxmin_f32 v40, v10, v11, v12\nv_minmax_f32 v41, v10, v11, v12", 3, 2),
    "minmax_int": Case(
        "v_maxmin_i32 v40, v10, v11, v12\nv_minmax_i32 v41, v10, v11, v12\n"
        "v_maxmin_u32 v42, v10, v11, v12\nv_minmax_u32 v43, v10, v11, v12\n"
        "v_xor3_b32 v44, v10, v11, v12",
        3,
        5,
    ),
    "dots": Case(
        "v_dot4_i32_iu8 v40, v10, v11, v12 neg_lo:[1,1,0]\n"
        "v_dot4_i32_iu8 v41, v10, v11, v12 neg_lo:[1,0,0]\n"
        "v_dot8_i32_iu4 v42, v10, v11, v12 neg_lo:[0,1,0]\n"
        "v_dot4_u32_u8 v43, v10, v11, v12",
        3,
        4,
    ),
    "dot_halves": Case(
        "v_mov_b32 v40, v12\nv_dot2_f16_f16 v40.h, v10, v11, v12.l\n"
        "v_mov_b32 v41, v10\nv_mov_b32 v42, v11\nv_swap_b16 v41.h, v42.l",
        3,
        3,
    ),
    "scalar_movrel": Case(
        "v_readfirstlane_b32 s10, v10\nv_readfirstlane_b32 s11, v11\ns_mov_b32 m0, 3\n"
        "s_movrels_b32 s8, s8\ns_movreld_b32 s9, s10\nv_mov_b32 v40, s8\nv_mov_b32 v41, s12",
        2,
        2,
    ),
    "narrow": Case("v_cvt_pk_i16_f32 v40, v10, v11\nv_cvt_pk_u16_f32 v41, v10, v11", 2, 2),
    # Cases of moves between registers that M0 selects, of the mode register, of a hint, and of the
    # clock.
    "movrel": Case("s_mov_b32 m0, 2\nv_movrels_b32 v40, v10\nv_movreld_b32 v39, v11", 3, 2),
    "rounding": Case(
        "s_round_mode 0xf\nv_add_f16_e32 v40.l, v10.l, v11.l\n"
        "s_round_mode 0x5\nv_add_f16_e32 v40.h, v10.l, v11.l\n"
        "s_round_mode 0x0\nv_add_f16_e32 v41.l, v10.l, v11.l",
        2,
        2,
    ),
    "flushing": Case(
        "s_denorm_mode 0x0\nv_mul_f16_e32 v40.l, 1.0, v10.l\ns_denorm_mode 0xf\n"
        "v_mul_f16_e32 v40.h, 1.0, v10.l",
        1,
    ),
    "hints": Case(
        "s_clause 0x1\ns_delay_alu instid0(VALU_DEP_1)\ns_waitcnt_depctr 0xfff\n"
        "s_waitcnt_vscnt null, 0x0\ns_waitcnt_lgkmcnt null, 0x0\ns_set_inst_prefetch_distance 1\n"
        "buffer_gl1_inv\nbuffer_gl0_inv\nv_mov_b32 v40, v10",
        1,
    ),
    "clock": Case(
        "s_sendmsg_rtn_b64 s[8:9], sendmsg(MSG_RTN_GET_REALTIME)\ns_waitcnt lgkmcnt(0)\n"
        "s_sleep 1\ns_sendmsg_rtn_b64 s[10:11], sendmsg(MSG_RTN_GET_REALTIME)\n"
        "s_waitcnt lgkmcnt(0)\nv_mov_b32 v40, s8\nv_mov_b32 v41, s9\nv_mov_b32 v42, s10\n"
        "v_mov_b32 v43, s11",
        1,
        4,
    ),
}
SUITE = Suite("gfx1100", CASES)
SELECTED = (MASK >> np.arange(32)) & 1 == 1


def run(name: str, *inputs: Words) -> Words:
    return SUITE.run(name, inputs)


def joined(low: NDArray, high: NDArray) -> Words:
    """Two f16 or 16-bit arrays as the halves of words."""
    halves = np.stack([np.asarray(low), np.asarray(high)], axis=1)
    return np.ascontiguousarray(halves).view(np.uint32)[:, 0]


def test_dual_issue() -> None:
    x, y = run("dual_plain", bits(F), bits(G), bits(H))
    assert np.array_equal(f32(x), F + G) and np.array_equal(f32(y), G * H)
    x, y = run("dual_x_feeds_y", bits(F), bits(G), bits(H))
    assert np.array_equal(f32(x), G) and np.array_equal(f32(y), F + H)
    x, y = run("dual_y_feeds_x", bits(F), bits(G), bits(H))
    assert np.array_equal(f32(x), G + F) and np.array_equal(f32(y), H)
    x, y = run("dual_swap", A, B, C)
    assert np.array_equal(x, B) and np.array_equal(y, A)
    x, y = run("dual_fmac", bits(F), bits(G), bits(H), bits(H))
    fused = F.astype(np.float64) * G + F
    assert np.array_equal(f32(x), fused.astype(np.float32))
    assert np.array_equal(f32(y), (H.astype(np.float64) * 3 + G).astype(np.float32))


def test_dual_issue_of_integers_and_selects() -> None:
    x, y = run("dual_cndmask", A, B, C)
    assert np.array_equal(x, np.where(SELECTED, B, A)) and np.array_equal(y, C << 5)
    most, common, least, total = run("dual_integers", bits(F), B, C, bits(G))
    assert np.array_equal(f32(most), np.maximum(F, G)) and np.array_equal(common, C & B)
    assert np.array_equal(f32(least), np.minimum(F, G)) and np.array_equal(total, C + B)


def mask_of(flags: NDArray) -> int:
    return int(sum(1 << i for i in range(32) if flags[i]))


def test_carries() -> None:
    low, high, carries = run("add_carry", A, B, C)
    wide = A.astype(np.uint64) + B
    upper = 2 * C.astype(np.uint64) + (wide >> 32)
    assert np.array_equal(low, wide.astype(np.uint32))
    assert np.array_equal(high, upper.astype(np.uint32))
    assert np.all(carries == mask_of(upper >> 32 != 0))
    low, high, borrows = run("sub_carry", A, B, C)
    upper = B.astype(np.int64) - C - (A < B)
    assert np.array_equal(low, A - B)
    assert np.array_equal(high, upper.astype(np.uint32))
    assert np.all(borrows == mask_of(upper < 0))


def test_wide_multiply_add() -> None:
    low, high = run("mad_wide", A, B, C, A)
    lanes = zip(A.tolist(), B.tolist(), C.tolist(), strict=True)
    exact = [(a * b + (a << 32 | c)) % 2**64 for a, b, c in lanes]
    got = [x | y << 32 for x, y in zip(low.tolist(), high.tolist(), strict=True)]
    assert got == exact


def test_comparisons_in_a_wave_of_32() -> None:
    assert np.all(run("cmp", A, B)[0] == mask_of(A.view(np.int32) < B.view(np.int32)))
    written, vcc = run("cmpx", A, B)
    assert np.array_equal(written, np.where(A > B, 9, 7)) and np.all(vcc == 0x1234)
    branch, saved = run("saveexec", A, B)
    assert np.array_equal(branch, np.where(A < B, 2, 3))
    assert np.all(saved == mask_of(A >= B))


def test_half_registers() -> None:
    low, high = run("half_add", *PACKED)
    assert np.array_equal(low, joined(HIGH[0] + LOW[1], HIGH[2]))
    assert np.array_equal(high, joined(LOW[2], LOW[0] * HIGH[1]))
    wide = HALVES.astype(np.float64)
    low, high = run("half_fmac", *PACKED)
    fused = (wide[0, :, 0] * wide[1, :, 1] + wide[2, :, 1]).astype(np.float16)
    assert np.array_equal(low, joined(LOW[2], fused))
    fused = (wide[0, :, 1] * -wide[1, :, 1] + np.abs(wide[2, :, 1])).astype(np.float16)
    assert np.array_equal(high, joined(fused, HIGH[2]))
    low, high = run("half_literal", *PACKED)
    fused = (wide[0, :, 1] * 3 + wide[1, :, 0]).astype(np.float16)
    assert np.array_equal(low, joined(fused, HIGH[2]))
    fused = (wide[0, :, 0] * wide[1, :, 1] - 2).astype(np.float16)
    assert np.array_equal(high, joined(LOW[2], fused))


def test_half_moves_and_selects() -> None:
    moved, inverted, mixed, widened, signed, unsigned = run("half_moves", A, B, C)
    assert np.array_equal(moved, (C & 0xFFFF) | A << 16)
    assert np.array_equal(inverted, (C & 0xFFFF0000) | (~A >> 16))
    assert np.array_equal(mixed, (C & 0xFFFF) | ((A >> 16 ^ B & 0xFFFF) << 16))
    assert np.array_equal(signed.view(np.int32), A.view(np.int32) >> 16)
    assert np.array_equal(unsigned, A & 0xFFFF)
    widened = run("half_moves", *PACKED)[3]
    assert np.array_equal(f32(widened), HIGH[0].astype(np.float32))
    chosen, less = run("half_select", *PACKED)
    assert np.array_equal(chosen, joined(LOW[2], np.where(SELECTED, HIGH[1], LOW[0])))
    assert np.all(less == mask_of(HIGH[0] < LOW[1]))


def test_short_integers() -> None:
    added, multiplied, shifted, clamped = run("short_integers", A, B, C)
    low, high = (lambda x: x & 0xFFFF), (lambda x: x >> 16)
    assert np.array_equal(added, low(C) | (low(A) + high(B)) << 16)
    assert np.array_equal(multiplied, (C & 0xFFFF0000) | low(high(A) * low(B)))
    signed = (A.view(np.int32) >> 16) >> 3
    assert np.array_equal(shifted, low(C) | signed.astype(np.uint32) << 16)
    total = low(A).astype(np.int16).astype(int) + low(B).astype(np.int16)
    total = np.clip(total, -(2**15), 2**15 - 1).astype(np.uint32) & 0xFFFF
    assert np.array_equal(clamped, (C & 0xFFFF0000) | total)


def test_minmax() -> None:
    specials = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], np.float32)
    x, y, z = (a.ravel()[:192] for a in np.meshgrid(specials, specials, specials))
    for start in range(0, 192, 32):
        a, b, c = (v[start : start + 32] for v in (x, y, z))
        first, second = run("minmax", bits(a), bits(b), bits(c))
        assert np.array_equal(f32(first), np.fmin(np.fmax(a, b), c), equal_nan=True)
        assert np.array_equal(f32(second), np.fmax(np.fmin(a, b), c), equal_nan=True)
    signed = [v.view(np.int32) for v in (A, B, C)]
    got = run("minmax_int", A, B, C)
    assert np.array_equal(got[0].view(np.int32), np.minimum(np.maximum(*signed[:2]), signed[2]))
    assert np.array_equal(got[1].view(np.int32), np.maximum(np.minimum(*signed[:2]), signed[2]))
    assert np.array_equal(got[2], np.minimum(np.maximum(A, B), C))
    assert np.array_equal(got[3], np.maximum(np.minimum(A, B), C))
    assert np.array_equal(got[4], A ^ B ^ C)


def fields(words: Words, width: int, is_signed: bool) -> NDArray[np.int64]:
    shifts = np.arange(0, 32, width)
    values = (words[:, None].astype(np.int64) >> shifts) & ((1 << width) - 1)
    return np.where(is_signed & (values >= 1 << (width - 1)), values - (1 << width), values)


def test_dot_products() -> None:
    got = run("dots", A, B, C)
    for row, (width, a_signed, b_signed) in enumerate(
        [(8, True, True), (8, True, False), (4, False, True), (8, False, False)]
    ):
        products = fields(A, width, a_signed) * fields(B, width, b_signed)
        expected = products.sum(axis=1) + C.view(np.int32)
        assert np.array_equal(got[row], expected.astype(np.uint32)), row


def test_dot_product_of_halves_and_swap() -> None:
    dotted, high, low = run("dot_halves", *PACKED)
    wide = HALVES.astype(np.float64)
    exact = (wide[0] * wide[1]).sum(axis=1) + wide[2, :, 0]
    assert np.array_equal(dotted, joined(LOW[2], exact.astype(np.float16)))
    assert np.array_equal(high, joined(LOW[0], LOW[1]))
    assert np.array_equal(low, joined(HIGH[0], HIGH[1]))


def test_narrowing_conversions_saturate() -> None:
    a = np.resize(np.array([0.9, -0.9, 1e9, -1e9, 32767.9, -32768.9, np.nan, np.inf]), 32)
    b = np.roll(a, 1)
    signed, unsigned = run("narrow", bits(a), bits(b))
    whole = np.trunc(np.nan_to_num(np.stack([a, b], axis=1), nan=0.0))
    expected = np.clip(whole, -32768, 32767).astype(np.int16)
    assert np.array_equal(signed, joined(*expected.T))
    assert np.array_equal(unsigned, joined(*np.clip(whole, 0, 65535).astype(np.uint16).T))


def test_relative_moves() -> None:
    read, written = run("movrel", A, B, C)
    assert np.array_equal(read, C) and np.array_equal(written, B)
    read, written = run("scalar_movrel", A, B)
    assert np.all(read == B[0]) and np.all(written == A[0])


def neighbours(exact: NDArray[np.float64]) -> tuple[NDArray, NDArray]:
    near = exact.astype(np.float16)
    below = np.where(near.astype(np.float64) > exact, np.nextafter(near, np.float16(-np.inf)), near)
    above = np.where(near.astype(np.float64) < exact, np.nextafter(near, np.float16(np.inf)), near)
    return below.astype(np.float16), above.astype(np.float16)


def test_rounding_modes() -> None:
    """Rounding modes of f16 conversions: towards zero, up, and to nearest, for the same inexact
    sums.
    """
    rng = np.random.default_rng(5)
    a = rng.uniform(-1000, 1000, 32).astype(np.float16)
    b = rng.uniform(-1, 1, 32).astype(np.float16)
    exact = a.astype(np.float64) + b
    below, above = neighbours(exact)
    first, second = run("rounding", joined(a, a), joined(b, b))
    assert np.array_equal(first, joined(np.where(exact > 0, below, above), above))
    assert np.array_equal((second & 0xFFFF).astype(np.uint16).view(np.float16), a + b)
    assert np.any(below != above)


def test_denormals_are_flushed_only_when_asked() -> None:
    tiny = np.resize(np.array([2**-24, -(2**-15), 2**-14, 1.0], np.float16), 32)
    (got,) = run("flushing", joined(tiny, tiny))
    flushed = np.where(np.abs(tiny) < 2**-14, np.copysign(np.float16(0), tiny), tiny)
    assert np.array_equal(got, joined(flushed.astype(np.float16), tiny))


def test_hints_do_nothing_and_time_passes() -> None:
    assert np.array_equal(run("hints", A)[0], A)
    low0, high0, low1, high1 = (int(row[0]) for row in run("clock", A))
    assert 0 < (low0 | high0 << 32) <= (low1 | high1 << 32)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"clock"}))
def test_nothing_depends_on_the_scheduler(name: str) -> None:
    """A case gives the same result with another seed of the emulator's scheduler."""
    inputs = [A, B, C, A][: CASES[name].inputs]
    assert np.array_equal(SUITE.run(name, inputs, seed=1), SUITE.run(name, inputs, seed=2))
