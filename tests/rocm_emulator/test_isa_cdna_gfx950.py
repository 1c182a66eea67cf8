"""Instructions that gfx950 adds beside its matrix formats: reads of LDS by columns, swaps between
rows of lanes, wide loads to LDS, three-way logic and minima. Also LDS counters, which are older.

From AMD's CDNA4 instruction set document. Expected values are computed with NumPy.
"""

from __future__ import annotations

import numpy as np
import pytest
from isa_matrix import LANE, pack_words, unpack
from isa_program import Case, Suite, Words

RNG = np.random.default_rng(41)
A, B, C, D = (RNG.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(4))
LGKM, VM = "s_waitcnt lgkmcnt(0)", "s_waitcnt vmcnt(0)"
READS = {16: "ds_read_b64_tr_b16", 8: "ds_read_b64_tr_b8", 4: "ds_read_b64_tr_b4"}
READS[6] = "ds_read_b96_tr_b6"
TABLES = (0x00, 0x40, 0x96, 0xE8, 0xCA, 0xFF)
# Four input rows, 1024 bytes, as the waves of a workgroup would store them.
FILL = "".join(f"ds_write_b32 v0, v{10 + k} offset:{256 * k}\n" for k in range(4)) + LGKM + "\n"
# Writes a buffer descriptor of the input rows to s[8:11]: their address, 1024 bytes, raw 32-bit
# data.
RAW = "s_mov_b32 s8, s4\ns_mov_b32 s9, s5\ns_movk_i32 s10, 0x400\ns_mov_b32 s11, 0x27000\n"
READ_BACK = "".join(f"ds_read_b32 v{40 + k}, v0 offset:{256 * k}\n" for k in range(4)) + LGKM


def _to_lds(load: str, dwords: int) -> Case:
    """Returns a case of a load to LDS: each lane loads ``dwords`` neighbouring dwords to the LDS
    address in M0.
    """
    clear = "v_mov_b32 v60, 0\n" + "".join(
        f"ds_write_b32 v0, v60 offset:{256 * k}\n" for k in range(5)
    )
    body = f"{clear}{LGKM}\ns_movk_i32 m0, 64\nv_mul_u32_u24 v60, {dwords}, v0\n{RAW}"
    return Case(f"{body}{load}\n{VM}\n{READ_BACK}", 4, 4)


def _cases() -> dict[str, Case]:
    cases = {
        f"columns_{bits}": Case(
            FILL + f"{name} v[40:{42 if bits == 6 else 41}], v14 offset:32\n{LGKM}",
            5,
            3 if bits == 6 else 2,
        )
        for bits, name in READS.items()
    }
    cases["columns_idle"] = Case(
        FILL + f"s_mov_b64 exec, 0xff\n{READS[8]} v[40:41], v14\n{LGKM}\ns_mov_b64 exec, -1", 5, 2
    )
    cases["columns_early"] = Case(
        FILL + f"{READS[6]} v[40:42], v14\nv_mov_b32 v43, v42\n{LGKM}", 5, 4
    )
    cases["lds_early"] = Case(
        f"s_movk_i32 m0, 64\n{RAW}global_load_lds_dwordx3 v0, s[4:5]\n"
        f"ds_read_b32 v40, v0 offset:512\n{LGKM}\n{VM}",
        4,
    )
    for rows in (16, 32):
        cases[f"swap_{rows}"] = Case(
            "v_mov_b32 v40, v10\nv_mov_b32 v41, v11\n"
            f"s_nop 1\nv_permlane{rows}_swap_b32 v40, v41\ns_nop 1",
            2,
            2,
        )
    for table in TABLES:
        cases[f"logic_{table}"] = Case(
            f"v_bitop3_b32 v40, v10, v11, v12 bitop3:{table:#x}\nv_mov_b32 v41, v13\n"
            f"v_bitop3_b16 v41, v10, v11, v12 bitop3:{table:#x} op_sel:[1,0,1,1]",
            4,
            2,
        )
    cases["random"] = Case("v_prng_b32 v40, v10", 1)
    cases["minimum"] = Case(
        "v_minimum3_f32 v40, v10, v11, v12\nv_maximum3_f32 v41, v10, v11, v12\n"
        "v_minimum3_f32 v42, -v10, |v11|, 1.0\n"
        "v_pk_minimum3_f16 v43, v10, v11, v12\nv_pk_maximum3_f16 v44, v10, v11, v12",
        3,
        5,
    )
    cases["shift_pack"] = Case(
        "v_mov_b32 v40, v13\nv_mov_b32 v41, v13\nv_ashr_pk_i8_i32 v40, v10, v11, v12\n"
        "v_ashr_pk_u8_i32 v41, v10, v11, v12",
        4,
        2,
    )
    for dwords in (3, 4):
        cases[f"global_to_lds_{dwords}"] = _to_lds(
            f"global_load_lds_dwordx{dwords} v60, s[4:5]", dwords
        )
        cases[f"buffer_to_lds_{dwords}"] = _to_lds(
            f"buffer_load_dwordx{dwords} v60, s[8:11], 0 offen lds", dwords
        )
    cases["scratch_to_lds"] = Case(
        f"scratch_store_dword off, v10, off offset:8\n{VM}\nv_mov_b32 v60, 8\nv_mov_b32 v61, 5\n"
        "s_movk_i32 m0, 64\nscratch_load_lds_dword v60, off\n"
        f"s_movk_i32 m0, 512\nscratch_load_lds_sbyte v61, off offset:4\n{VM}\n"
        f"ds_read_b32 v40, v0 offset:64\nds_read_b32 v41, v0 offset:516\n{LGKM}",
        1,
        2,
    )
    cases["counters"] = Case(
        "v_mov_b32 v60, 64\nv_mov_b32 v61, 5\nds_write_b32 v60, v61 offset:8\n"
        f"{LGKM}\ns_movk_i32 m0, 64\nv_mov_b32 v40, v10\nv_mov_b32 v41, v10\n"
        "s_mov_b64 exec, 0xff00ff\nds_append v40 offset:8\n"
        f"s_mov_b64 exec, 0xf\nds_consume v41 offset:8\ns_mov_b64 exec, -1\n{LGKM}\n"
        f"ds_read_b32 v42, v60 offset:8\n{LGKM}",
        1,
        3,
    )
    cases["wrap"] = Case(
        f"ds_write_b32 v0, v10\nds_wrap_rtn_b32 v40, v0, v11, v12\nds_read_b32 v41, v0\n{LGKM}",
        3,
        2,
    )
    cases["by_thread"] = Case(
        f"s_movk_i32 m0, 128\nds_write_addtid_b32 v10 offset:64\n{LGKM}\n"
        f"ds_read_b32 v40, v0 offset:192\nds_read_addtid_b32 v41 offset:64\n{LGKM}",
        1,
        2,
    )
    return cases


SUITE = Suite("gfx950", _cases())


def run(name: str, *inputs: Words) -> Words:
    return SUITE.run(name, inputs, checks=True)


def _image() -> np.ndarray:
    return np.concatenate([A, B, C, D]).view(np.uint8)


@pytest.mark.parametrize("bits", READS)
def test_lds_is_read_by_columns(bits: int) -> None:
    """Reads of LDS by columns: sixteen lanes address the rows of a 16-row matrix, and each gets a
    column.
    """
    width, align = (12, 16) if bits == 6 else (8, 8)
    slots = RNG.integers(0, (1024 - 32) // align, 64).astype(np.uint32) * align
    got = run(f"columns_{bits}", A, B, C, D, slots)
    held = _image()[slots[:, None] + 32 + np.arange(width)]
    each = 8 * width // bits
    if bits == 16:
        rows = np.ascontiguousarray(held).view(np.uint16).reshape(4, each, 16)
        columns = np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(64, each).view(np.uint32).T
        assert np.array_equal(got, columns)
        return
    words = np.ascontiguousarray(held).view(np.uint32).T
    rows = unpack(words, bits, each).reshape(4, each, 16)
    assert np.array_equal(got, pack_words(rows.swapaxes(1, 2).reshape(64, each), bits))


def test_columns_need_alignment_and_all_lanes() -> None:
    slots = (LANE * 8).astype(np.uint32)
    with pytest.raises(AssertionError, match="multiple of 8"):
        run("columns_4", A, B, C, D, slots + np.uint32(4))
    with pytest.raises(AssertionError, match="multiple of 16"):
        run("columns_6", A, B, C, D, slots)
    with pytest.raises(AssertionError, match="inactive lanes"):
        run("columns_idle", A, B, C, D, slots)


def test_results_need_their_waits() -> None:
    slots = (LANE // 2 * 16).astype(np.uint32)
    with pytest.raises(AssertionError, match="v42 before an s_waitcnt covers"):
        run("columns_early", A, B, C, D, slots)
    with pytest.raises(AssertionError, match="before an s_waitcnt vmcnt covers"):
        run("lds_early", A, B, C, D)


@pytest.mark.parametrize("rows", (16, 32))
def test_odd_rows_change_places_with_even_ones(rows: int) -> None:
    first, second = run(f"swap_{rows}", A, B)
    a, b = A.reshape(-1, 2, rows), B.reshape(-1, 2, rows)
    assert np.array_equal(first, np.stack([a[:, 0], b[:, 0]], axis=1).ravel())
    assert np.array_equal(second, np.stack([a[:, 1], b[:, 1]], axis=1).ravel())


@pytest.mark.parametrize("table", TABLES)
def test_three_way_logic(table: int) -> None:
    """Three-way logic by a table of eight bits: each bit of the result is the table's bit number 4
    * a + 2 * b + c, where a, b and c are the operands' bits.
    """

    def expected(a: Words, b: Words, c: Words) -> Words:
        one = np.uint32(1)
        result = np.zeros(64, np.uint32)
        for k in np.arange(32, dtype=np.uint32):
            row = (a >> k & one) * 4 + (b >> k & one) * 2 + (c >> k & one)
            result |= (np.uint32(table) >> row & one) << k
        return result

    wide, half = run(f"logic_{table}", A, B, C, D)
    assert np.array_equal(wide, expected(A, B, C))
    high = expected(A >> 16, B & 0xFFFF, C >> 16) << 16
    assert np.array_equal(half, high | D & 0xFFFF)


def test_pseudo_random_numbers() -> None:
    expected = (A << 1) ^ np.where(A >> 31 == 1, 197, 0).astype(np.uint32)
    assert np.array_equal(run("random", A)[0], expected)


def test_minimum_and_maximum_of_three() -> None:
    """Minimum and maximum of three values, in which NaN takes precedence and -0 is less than +0."""
    rng = np.random.default_rng(8)
    x, y, z = (rng.uniform(-2, 2, 64).astype(np.float32) for _ in range(3))
    x[:3], y[3:6], z[6:9] = np.nan, np.nan, np.nan
    x[10], y[10], z[10] = 0.0, -0.0, 0.0
    low, high, mixed, _, _ = run("minimum", *(v.view(np.uint32) for v in (x, y, z)))
    for got, wanted in (
        (low, np.minimum(np.minimum(x, y), z)),
        (high, np.maximum(np.maximum(x, y), z)),
        (mixed, np.minimum(np.minimum(-x, np.abs(y)), np.float32(1))),
    ):
        assert np.array_equal(got.view(np.float32), wanted, equal_nan=True)
    assert np.signbit(low.view(np.float32)[10]) and not np.signbit(high.view(np.float32)[10])
    halves = rng.uniform(-2, 2, (3, 64, 2)).astype(np.float16)
    halves[0, 5], halves[2, 7, 1] = np.nan, np.nan
    words = [np.ascontiguousarray(h).view(np.uint32)[:, 0] for h in halves]
    _, _, _, low, high = run("minimum", *words)
    for got, choose in ((low, np.minimum), (high, np.maximum)):
        wanted = choose(choose(halves[0], halves[1]), halves[2])
        pairs = np.ascontiguousarray(got).view(np.float16).reshape(64, 2)
        assert np.array_equal(pairs, wanted, equal_nan=True)


def test_shift_and_pack_saturates() -> None:
    shift = (LANE % 32).astype(np.uint32) | 0x20  # five bits count
    x, y = A.view(np.int32) >> (LANE % 32), B.view(np.int32) >> (LANE % 32)
    signed, unsigned = run("shift_pack", A, B, shift, C)
    for got, low, high in ((signed, -128, 127), (unsigned, 0, 255)):
        bytes_ = [np.clip(v, low, high).astype(np.uint32) & 0xFF for v in (x, y)]
        assert np.array_equal(got & 0xFFFF, bytes_[0] | bytes_[1] << 8)


@pytest.mark.parametrize("dwords", (3, 4))
@pytest.mark.parametrize("kind", ("global", "buffer"))
def test_wide_loads_go_to_lds(kind: str, dwords: int) -> None:
    """Loads of 12 and 16 bytes to LDS, where the data of neighbouring lanes are contiguous."""
    got = run(f"{kind}_to_lds_{dwords}", A, B, C, D).ravel()
    expected = np.zeros(256, np.uint32)
    expected[16:] = np.resize(np.concatenate([A, B, C, D])[: 64 * dwords], 256)[:240]
    expected[16 + 64 * dwords :] = 0
    assert np.array_equal(got, expected)


def test_private_memory_goes_to_lds() -> None:
    """Loads from private memory to LDS. The instruction's offset is added to the source and to the
    destination.
    """
    whole, byte = run("scratch_to_lds", A)
    assert np.array_equal(whole, A)
    assert np.array_equal(byte.view(np.int32), (A >> 8 & 0xFF).astype(np.uint8).view(np.int8))


def test_counters_of_active_lanes() -> None:
    """LDS counters: sixteen active lanes are added to 5, then four are subtracted; each active lane
    gets the old value.
    """
    joined, left, final = run("counters", A)
    assert np.array_equal(joined, np.where((0xFF00FF >> LANE) & 1 == 1, 5, A))
    assert np.array_equal(left, np.where(LANE < 4, 21, A)) and np.all(final == 17)


def test_wrapping_subtraction() -> None:
    size, more = A // 2 + 1, C
    size[::2] = np.maximum(size[::2], A[::2]) + 1  # these wrap
    before, after = run("wrap", A, size, more)
    assert np.array_equal(before, A)
    assert np.array_equal(after, np.where(size <= A, A - size, A + more))


def test_addresses_by_thread() -> None:
    plain, by_thread = run("by_thread", A)
    assert np.array_equal(plain, A) and np.array_equal(by_thread, A)
