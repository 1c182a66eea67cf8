"""RDNA3 instructions that move values between lanes, compared with the lanes from which they must
read.

The expected lane maps are written out from AMD's RDNA3 instruction set document (sections "Data
parallel processing" and "V_PERMLANE16_B32"), lane by lane.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from isa_program import Case, Suite, Words

LANES = np.arange(32)
ROW, IN_ROW = LANES & ~15, LANES & 15
OLD_VALUE = 0xDEAD0000  # what the destination held before

# By DPP control: the source lane of each lane, or -1 if it does not exist.
DPP: dict[str, Callable[[], np.ndarray]] = {
    "quad_perm:[1,0,3,2]": lambda: (LANES & ~3) + np.array([1, 0, 3, 2])[LANES & 3],
    "quad_perm:[3,3,0,1]": lambda: (LANES & ~3) + np.array([3, 3, 0, 1])[LANES & 3],
    "row_shl:1": lambda: np.where(IN_ROW + 1 < 16, LANES + 1, -1),
    "row_shl:5": lambda: np.where(IN_ROW + 5 < 16, LANES + 5, -1),
    "row_shr:1": lambda: np.where(IN_ROW >= 1, LANES - 1, -1),
    "row_shr:15": lambda: np.where(IN_ROW >= 15, LANES - 15, -1),
    "row_ror:3": lambda: ROW + (IN_ROW - 3) % 16,
    "row_mirror": lambda: ROW + 15 - IN_ROW,
    "row_half_mirror": lambda: (LANES & ~7) + 7 - (LANES & 7),
    "row_share:6": lambda: ROW + 6,
    "row_xmask:5": lambda: ROW + (IN_ROW ^ 5),
}
DPP8 = [7, 0, 6, 1, 5, 2, 4, 3]
ACTIVE_MASK = 0xF0FF0FF3  # EXEC of the cases with inactive lanes
PERMUTES = {"permlane16": 0, "permlanex16": 16}
LANE_SELECT = 0xFEDC_BA98_0123_7654


def _dpp_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for number, control in enumerate(DPP):
        for bound in (0, 1):
            tail = f"{control} row_mask:0xf bank_mask:0xf" + (" bound_ctrl:1" if bound else "")
            cases[f"dpp{number}_{bound}"] = Case(
                f"v_mov_b32 v40, {OLD_VALUE:#x}\nv_mov_b32_dpp v40, v10 {tail}", 1
            )
    masked = "row_shr:1 row_mask:0x2 bank_mask:0x5"
    cases["dpp_masks"] = Case(
        f"v_mov_b32 v40, {OLD_VALUE:#x}\nv_add_nc_u32_dpp v40, v10, v11 {masked}", 2
    )
    cases["dpp_e64"] = Case(
        "v_add3_u32_e64_dpp v40, v10, v11, v12 row_mirror row_mask:0xf bank_mask:0xf", 3
    )
    selectors = ",".join(map(str, DPP8))
    cases["dpp8"] = Case(f"v_mov_b32_dpp v40, v10 dpp8:[{selectors}]", 1)
    return cases


def _exec_cases() -> dict[str, Case]:
    """The cases of lane moves under a partial EXEC, in which a source lane may be inactive."""
    off, on = f"s_mov_b32 exec_lo, {ACTIVE_MASK:#x}", "s_mov_b32 exec_lo, -1"
    moves = {
        "exec_plain": "v_mov_b32_dpp v40, v10 row_ror:3 row_mask:0xf bank_mask:0xf",
        "exec_bound": "v_mov_b32_dpp v40, v10 row_ror:3 row_mask:0xf bank_mask:0xf bound_ctrl:1",
        "exec_fetch": "v_mov_b32_dpp v40, v10 row_ror:3 row_mask:0xf bank_mask:0xf fi:1",
        "permlane16": "v_permlane16_b32 v40, v10, s8, s9",
        "permlanex16": "v_permlanex16_b32 v40, v10, s8, s9",
        "permlane16_fetch": "v_permlane16_b32 v40, v10, s8, s9 op_sel:[1,0]",
        "permlane16_zero": "v_permlane16_b32 v40, v10, s8, s9 op_sel:[0,1]",
        "bpermute": "ds_bpermute_b32 v40, v11, v10\ns_waitcnt lgkmcnt(0)",
        "permute": "ds_permute_b32 v40, v11, v10\ns_waitcnt lgkmcnt(0)",
        "swizzle": 'ds_swizzle_b32 v40, v10 offset:swizzle(BITMASK_PERM, "01pip")\n'
        "s_waitcnt lgkmcnt(0)",
        "mbcnt": "v_mbcnt_lo_u32_b32 v40, v11, v10",
        "first": "v_readfirstlane_b32 s10, v10\nv_mov_b32 v40, s10",
        "lane": "v_readlane_b32 s10, v10, 21\nv_mov_b32 v40, s10\nv_writelane_b32 v40, s10, 3",
    }
    prepare = f"v_mov_b32 v40, {OLD_VALUE:#x}\ns_mov_b32 s8, {LANE_SELECT & 0xFFFFFFFF:#x}\n"
    prepare += f"s_mov_b32 s9, {LANE_SELECT >> 32:#x}\n"
    return {name: Case(f"{prepare}{off}\n{move}\n{on}", 2) for name, move in moves.items()}


SUITE = Suite("gfx1100", {**_dpp_cases(), **_exec_cases()})
VALUES = np.random.default_rng(7).integers(0, 2**31, 32, dtype=np.uint32)
OTHER = np.random.default_rng(8).integers(0, 2**31, 32, dtype=np.uint32)
IS_ACTIVE = (ACTIVE_MASK >> LANES) & 1 == 1


def run(name: str, *inputs: Words) -> Words:
    return SUITE.run(name, inputs)[0]


@pytest.mark.parametrize("bound", (0, 1))
@pytest.mark.parametrize("number", range(len(DPP)), ids=list(DPP))
def test_dpp_reads_from_the_documented_lane(number: int, bound: int) -> None:
    source = list(DPP.values())[number]()
    fallback = 0 if bound else OLD_VALUE
    expected = np.where(source >= 0, VALUES[source], fallback)
    assert np.array_equal(run(f"dpp{number}_{bound}", VALUES), expected)


def test_dpp_masks_keep_rows_and_banks() -> None:
    """DPP with masks writes only lanes in row 1 and banks 0 and 2; lane 16 has no source lane and
    is not written.
    """
    source = np.where(IN_ROW >= 1, LANES - 1, -1)
    written = (LANES >= 16) & np.isin((LANES // 4) % 4, (0, 2)) & (source >= 0)
    expected = np.where(written, VALUES[source] + OTHER, OLD_VALUE)
    assert np.array_equal(run("dpp_masks", VALUES, OTHER), expected)


def test_dpp_on_a_three_operand_instruction() -> None:
    expected = VALUES[ROW + 15 - IN_ROW] + OTHER + VALUES
    assert np.array_equal(run("dpp_e64", VALUES, OTHER, VALUES), expected)


def test_dpp8() -> None:
    assert np.array_equal(run("dpp8", VALUES), VALUES[(LANES & ~7) + np.array(DPP8)[LANES & 7]])


def test_dpp_from_inactive_lanes() -> None:
    source = ROW + (IN_ROW - 3) % 16
    moved = VALUES[source]
    readable = IS_ACTIVE[source]
    kept = np.where(IS_ACTIVE & readable, moved, OLD_VALUE)
    assert np.array_equal(run("exec_plain", VALUES, OTHER), kept)
    zeroed = np.where(IS_ACTIVE, np.where(readable, moved, 0), OLD_VALUE)
    assert np.array_equal(run("exec_bound", VALUES, OTHER), zeroed)
    fetched = np.where(IS_ACTIVE, moved, OLD_VALUE)
    assert np.array_equal(run("exec_fetch", VALUES, OTHER), fetched)


@pytest.mark.parametrize("name", PERMUTES)
def test_permlane16(name: str) -> None:
    """v_permlane16 and v_permlanex16: lane i gets the value of the lane in its own or the other row
    that nibble i of the selector names.
    """
    select = np.array([(LANE_SELECT >> (4 * i)) & 15 for i in range(16)])
    source = (ROW ^ PERMUTES[name]) + select[IN_ROW]
    readable = IS_ACTIVE[source]
    assert np.array_equal(
        run(name, VALUES, OTHER), np.where(IS_ACTIVE & readable, VALUES[source], OLD_VALUE)
    )
    if name == "permlane16":
        fetched = np.where(IS_ACTIVE, VALUES[source], OLD_VALUE)
        assert np.array_equal(run("permlane16_fetch", VALUES, OTHER), fetched)
        zeroed = np.where(IS_ACTIVE, np.where(readable, VALUES[source], 0), OLD_VALUE)
        assert np.array_equal(run("permlane16_zero", VALUES, OTHER), zeroed)


def test_bpermute_and_permute() -> None:
    """ds_bpermute: lane i reads from lane index / 4. ds_permute: lane i writes to lane
    index / 4.
    """
    index = np.random.default_rng(3).permutation(32).astype(np.uint32)
    pulled = np.where(IS_ACTIVE[index], VALUES[index], 0)
    assert np.array_equal(
        run("bpermute", VALUES, index * 4), np.where(IS_ACTIVE, pulled, OLD_VALUE)
    )
    pushed = np.zeros(32, np.uint32)
    pushed[index[IS_ACTIVE]] = VALUES[IS_ACTIVE]
    assert np.array_equal(run("permute", VALUES, index * 4), np.where(IS_ACTIVE, pushed, OLD_VALUE))


def test_swizzle_bit_mode() -> None:
    """ds_swizzle in bit mode: of the source lane's number, bit 4 is cleared, bit 3 set, bits 2 and
    0 kept, bit 1 inverted.
    """
    source = ((LANES & 0b00101) | 0b01000) | ((LANES & 0b00010) ^ 0b00010)
    expected = np.where(IS_ACTIVE[source], VALUES[source], 0)
    assert np.array_equal(run("swizzle", VALUES, OTHER), np.where(IS_ACTIVE, expected, OLD_VALUE))


def test_counting_and_single_lanes() -> None:
    below = [bin(int(OTHER[i]) & ((1 << i) - 1)).count("1") for i in LANES]
    expected = np.where(IS_ACTIVE, VALUES + np.array(below, np.uint32), OLD_VALUE)
    assert np.array_equal(run("mbcnt", VALUES, OTHER), expected)
    first = VALUES[np.flatnonzero(IS_ACTIVE)[0]]
    assert np.array_equal(run("first", VALUES, OTHER), np.where(IS_ACTIVE, first, OLD_VALUE))
    # Lane 3 is inactive: only v_writelane, which ignores EXEC, reaches it.
    expected = np.where(IS_ACTIVE | (LANES == 3), VALUES[21], OLD_VALUE)
    assert not IS_ACTIVE[3]
    assert np.array_equal(run("lane", VALUES, OTHER), expected)
