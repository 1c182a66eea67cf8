"""CDNA instructions that move values between lanes or select parts of registers, compared with maps
written by hand.

Lane maps and selections follow AMD's CDNA3 instruction set document (sections "DPP", "SDWA", "DS
permute") for a wave of 64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from isa_program import Case, Suite, Words

LANES = np.arange(64)
ROW, IN_ROW = LANES & ~15, LANES & 15
OLD_VALUE = 0xDEAD0000
DPP: dict[str, Callable[[], np.ndarray]] = {
    "quad_perm:[2,3,0,1]": lambda: (LANES & ~3) + np.array([2, 3, 0, 1])[LANES & 3],
    "row_shl:2": lambda: np.where(IN_ROW + 2 < 16, LANES + 2, -1),
    "row_shr:4": lambda: np.where(IN_ROW >= 4, LANES - 4, -1),
    "row_ror:9": lambda: ROW + (IN_ROW - 9) % 16,
    "wave_shl:1": lambda: np.where(LANES < 63, LANES + 1, -1),
    "wave_rol:1": lambda: (LANES + 1) % 64,
    "wave_shr:1": lambda: LANES - 1,
    "wave_ror:1": lambda: (LANES - 1) % 64,
    "row_mirror": lambda: ROW + 15 - IN_ROW,
    "row_half_mirror": lambda: (LANES & ~7) + 7 - (LANES & 7),
    "row_bcast:15": lambda: np.where(LANES >= 16, ROW - 1, -1),
    "row_bcast:31": lambda: np.where(LANES >= 32, 31, -1),
    "row_newbcast:5": lambda: ROW + 5,
}
ACTIVE_MASK = 0xFF0F_FFF0_F0FF_0FF3
IS_ACTIVE = np.array([(ACTIVE_MASK >> lane) & 1 for lane in range(64)], bool)
# The part of a word that a sub-dword selection reads.
SELECT: dict[str, Callable[[Words], Words]] = {
    "BYTE_0": lambda w: w & 0xFF,
    "BYTE_1": lambda w: w >> 8 & 0xFF,
    "BYTE_2": lambda w: w >> 16 & 0xFF,
    "BYTE_3": lambda w: w >> 24,
    "WORD_0": lambda w: w & 0xFFFF,
    "WORD_1": lambda w: w >> 16,
    "DWORD": lambda w: w,
}
FIELD = {"BYTE_0": (0, 8), "BYTE_2": (16, 8), "WORD_0": (0, 16), "WORD_1": (16, 16)}
UNUSED = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")


def _cases() -> dict[str, Case]:
    start = f"v_mov_b32 v40, {OLD_VALUE:#x}\n"
    cases: dict[str, Case] = {}
    for number, control in enumerate(DPP):
        for bound in (0, 1):
            tail = f"{control} row_mask:0xf bank_mask:0xf" + (" bound_ctrl:1" if bound else "")
            cases[f"dpp{number}_{bound}"] = Case(
                f"{start}s_nop 1\nv_mov_b32_dpp v40, v10 {tail}", 1
            )
    cases["dpp_masks"] = Case(
        f"{start}s_nop 1\nv_add_u32_dpp v40, v10, v11 row_ror:1 row_mask:0xa bank_mask:0x3", 2
    )
    for first in SELECT:
        cases[f"source_{first}"] = Case(
            f"v_add_u32_sdwa v40, v10, v11 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:{first} "
            "src1_sel:BYTE_2",
            2,
        )
    cases["signed"] = Case(
        "v_add_u32_sdwa v40, sext(v10), sext(v11) dst_sel:DWORD dst_unused:UNUSED_PAD "
        "src0_sel:BYTE_3 src1_sel:WORD_1",
        2,
    )
    for place in FIELD:
        for unused in UNUSED:
            cases[f"target_{place}_{unused}"] = Case(
                f"v_mov_b32 v40, v12\nv_or_b32_sdwa v40, v10, v11 dst_sel:{place} "
                f"dst_unused:{unused} src0_sel:DWORD src1_sel:WORD_1",
                3,
            )
    cases["half_sdwa"] = Case(
        "v_mov_b32 v40, v12\nv_mul_f16_sdwa v40, -v10, |v11| dst_sel:WORD_1 "
        "dst_unused:UNUSED_PRESERVE src0_sel:WORD_1 src1_sel:WORD_0",
        3,
    )
    cases["compare_sdwa"] = Case(
        "v_cmp_gt_u32_sdwa s[8:9], v10, v11 src0_sel:BYTE_1 src1_sel:BYTE_2\n"
        "v_mov_b32 v40, s8\nv_mov_b32 v41, s9",
        2,
        2,
    )
    low, high = ACTIVE_MASK & 0xFFFFFFFF, ACTIVE_MASK >> 32
    off = f"s_mov_b32 exec_lo, {low:#x}\ns_mov_b32 exec_hi, {high:#x}\n"
    on = "\ns_mov_b64 exec, -1"
    wait = "\ns_waitcnt lgkmcnt(0)"
    cases["dpp_inactive"] = Case(
        f"{start}{off}s_nop 4\nv_mov_b32_dpp v40, v10 row_ror:1 row_mask:0xf bank_mask:0xf{on}", 1
    )
    cases["bpermute"] = Case(f"{start}{off}ds_bpermute_b32 v40, v11, v10{wait}{on}", 2)
    cases["permute"] = Case(f"{start}{off}ds_permute_b32 v40, v11, v10{wait}{on}", 2)
    cases["swizzle_quad"] = Case(
        f"ds_swizzle_b32 v40, v10 offset:swizzle(QUAD_PERM,3,0,2,1){wait}", 1
    )
    cases["swizzle_broadcast"] = Case(
        f"ds_swizzle_b32 v40, v10 offset:swizzle(BROADCAST,8,3){wait}", 1
    )
    cases["swizzle_swap"] = Case(f"ds_swizzle_b32 v40, v10 offset:swizzle(SWAP,4){wait}", 1)
    cases["swizzle_reverse"] = Case(f"ds_swizzle_b32 v40, v10 offset:swizzle(REVERSE,16){wait}", 1)
    cases["count"] = Case(
        "s_mov_b32 s8, 0x12345678\ns_mov_b32 s9, 0x9abcdef0\n"
        "v_mbcnt_lo_u32_b32 v40, s8, v10\nv_mbcnt_hi_u32_b32 v40, s9, v40",
        1,
    )
    cases["lanes"] = Case(
        "v_readlane_b32 s8, v10, 41\ns_mov_b32 m0, 7\ns_nop 3\nv_readlane_b32 s9, v10, m0\n"
        "v_mov_b32 v40, s8\ns_nop 3\nv_writelane_b32 v40, s9, 62\nv_readfirstlane_b32 s10, v10\n"
        "v_mov_b32 v41, s10",
        1,
        2,
    )
    cases["perm"] = Case("v_perm_b32 v40, v10, v11, v12\nv_alignbyte_b32 v41, v10, v11, 3", 3, 2)
    cases["indexed"] = Case(
        "s_mov_b32 s8, 2\ns_set_gpr_idx_on s8, gpr_idx(SRC0)\nv_mov_b32 v40, v10\n"
        "s_set_gpr_idx_off\ns_set_gpr_idx_on s8, gpr_idx(DST)\nv_mov_b32 v39, v11\n"
        "s_set_gpr_idx_off\nv_mov_b32 v42, v10",
        3,
        3,
    )
    return cases


SUITE = Suite("gfx90a", _cases())
RNG = np.random.default_rng(31)
A, B, C = (RNG.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(3))


def run(name: str, *inputs: Words) -> Words:
    return SUITE.run(name, inputs)


@pytest.mark.parametrize("bound", (0, 1))
@pytest.mark.parametrize("number", range(len(DPP)), ids=list(DPP))
def test_dpp_reads_from_the_documented_lane(number: int, bound: int) -> None:
    source = list(DPP.values())[number]()
    expected = np.where(source >= 0, A[source], 0 if bound else OLD_VALUE)
    assert np.array_equal(run(f"dpp{number}_{bound}", A)[0], expected)


def test_dpp_masks_and_inactive_sources() -> None:
    """DPP with masks writes only rows 1 and 3 and banks 0 and 1, and keeps lanes whose source lane
    is inactive.
    """
    source = ROW + (IN_ROW - 1) % 16
    written = np.isin(LANES // 16, (1, 3)) & np.isin(LANES // 4 % 4, (0, 1))
    expected = np.where(written, A[source] + B, OLD_VALUE)
    assert np.array_equal(run("dpp_masks", A, B)[0], expected)
    kept = np.where(IS_ACTIVE & IS_ACTIVE[source], A[source], OLD_VALUE)
    assert np.array_equal(run("dpp_inactive", A)[0], kept)


@pytest.mark.parametrize("select", SELECT)
def test_sdwa_source_selection(select: str) -> None:
    expected = SELECT[select](A) + SELECT["BYTE_2"](B)
    assert np.array_equal(run(f"source_{select}", A, B)[0], expected)


def test_sdwa_sign_extension() -> None:
    expected = (A.view(np.int32) >> 24) + (B.view(np.int32) >> 16)
    assert np.array_equal(run("signed", A, B)[0].view(np.int32), expected)


@pytest.mark.parametrize("unused", UNUSED)
@pytest.mark.parametrize("place", FIELD)
def test_sdwa_destination(place: str, unused: str) -> None:
    shift, width = FIELD[place]
    mask = np.uint32(((1 << width) - 1) << shift)
    result = A | B >> 16
    field = (result << shift) & mask
    if unused == "UNUSED_PRESERVE":
        expected = field | (C & ~mask)
    elif unused == "UNUSED_SEXT":
        signed = (result << np.uint32(32 - width)).view(np.int32) >> (32 - width)
        expected = signed.view(np.uint32) << shift
    else:
        expected = field
    assert np.array_equal(run(f"target_{place}_{unused}", A, B, C)[0], expected)


def test_sdwa_on_halves_and_comparisons() -> None:
    halves = RNG.uniform(-4, 4, (3, 64, 2)).astype(np.float16)
    a, b, c = (np.ascontiguousarray(h).view(np.uint32)[:, 0] for h in halves)
    product = (-halves[0, :, 1] * np.abs(halves[1, :, 0])).view(np.uint16).astype(np.uint32)
    assert np.array_equal(run("half_sdwa", a, b, c)[0], (c & 0xFFFF) | product << 16)
    greater = SELECT["BYTE_1"](A) > SELECT["BYTE_2"](B)
    mask = sum(1 << int(lane) for lane in np.flatnonzero(greater))
    low, high = run("compare_sdwa", A, B)
    assert np.all(low == mask & 0xFFFFFFFF) and np.all(high == mask >> 32)


def test_permutes_through_lds_hardware() -> None:
    """ds_bpermute reads from lane index / 4, ds_permute writes to lane index / 4. Inactive lanes
    neither send nor receive.
    """
    index = np.random.default_rng(3).permutation(64).astype(np.uint32)
    pulled = np.where(IS_ACTIVE[index], A[index], 0)
    assert np.array_equal(run("bpermute", A, index * 4)[0], np.where(IS_ACTIVE, pulled, OLD_VALUE))
    pushed = np.zeros(64, np.uint32)
    pushed[index[IS_ACTIVE]] = A[IS_ACTIVE]
    assert np.array_equal(run("permute", A, index * 4)[0], np.where(IS_ACTIVE, pushed, OLD_VALUE))


def test_swizzles() -> None:
    quad = (LANES & ~3) + np.array([3, 0, 2, 1])[LANES & 3]
    assert np.array_equal(run("swizzle_quad", A)[0], A[quad])
    assert np.array_equal(run("swizzle_broadcast", A)[0], A[(LANES & ~7) + 3])
    assert np.array_equal(run("swizzle_swap", A)[0], A[LANES ^ 4])
    assert np.array_equal(run("swizzle_reverse", A)[0], A[LANES ^ 15])


def test_counting_and_single_lanes() -> None:
    mask = 0x9ABCDEF0_12345678
    below = [bin(mask & ((1 << lane) - 1)).count("1") for lane in range(64)]
    assert np.array_equal(run("count", A)[0], A + np.array(below, np.uint32))
    written, first = run("lanes", A)
    assert np.array_equal(written, np.where(LANES == 62, A[7], A[41])) and np.all(first == A[0])


def test_byte_permutation() -> None:
    """v_perm_b32: a selector below 8 selects a byte of {S0, S1}, 8 to 11 repeat a sign bit, 12
    gives 0, others give 0xff.
    """
    selectors = np.array([0, 3, 4, 7, 8, 9, 10, 11, 12, 13, 1, 5, 2, 6, 14, 255], np.uint8)
    chosen = selectors[RNG.integers(0, len(selectors), (64, 4))]
    data = np.concatenate([B[:, None].view(np.uint8), A[:, None].view(np.uint8)], axis=1)
    expected = np.zeros((64, 4), np.uint8)
    for lane in range(64):
        for k, select in enumerate(chosen[lane].tolist()):
            if select < 8:
                expected[lane, k] = data[lane, select]
            elif select < 12:
                expected[lane, k] = 0xFF if data[lane, 2 * (select - 8) + 1] & 0x80 else 0
            else:
                expected[lane, k] = 0 if select == 12 else 0xFF
    got, aligned = run("perm", A, B, np.ascontiguousarray(chosen).view(np.uint32)[:, 0])
    assert np.array_equal(got, expected.view(np.uint32)[:, 0])
    assert np.array_equal(aligned, B >> 24 | A << 8)


def test_register_numbers_from_m0() -> None:
    read, written, plain = run("indexed", A, B, C)
    assert np.array_equal(read, C) and np.array_equal(written, B) and np.array_equal(plain, A)
