"""CDNA memory instructions: LDS, global, flat, buffer and scalar ones, atomics, loads to LDS.

Expected values are computed with Python integers and NumPy from the same inputs; addressing follows
AMD's CDNA3 instruction set document, chapters "Scalar memory", "Vector memory" and "Data share".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from isa_program import Case, Suite, Words

RNG = np.random.default_rng(31)
A, B, C, D = (RNG.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(4))
B[:8] = A[:8]  # some that compare equal
LANES = np.arange(64)
M32, M64 = 2**32 - 1, 2**64 - 1
LGKM, VM = "s_waitcnt lgkmcnt(0)", "s_waitcnt vmcnt(0)"
# Writes a buffer descriptor of the input rows to s[8:11]: their address, 1024 bytes, raw 32-bit
# data.
RAW = "s_mov_b32 s8, s4\ns_mov_b32 s9, s5\ns_movk_i32 s10, 0x400\ns_mov_b32 s11, 0x27000\n"
# Writes a buffer descriptor of the same memory as 16 records of 64 bytes.
RECORDS = (
    "s_mov_b32 s8, s4\ns_or_b32 s9, s5, 0x400000\ns_movk_i32 s10, 16\ns_mov_b32 s11, 0x27000\n"
)


def s(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


Rule = Callable[[int, int, int], int]  # memory before, data, width -> memory after
ATOMICS: dict[str, tuple[str, Rule]] = {
    "add": ("add", lambda m, d, w: m + d),
    "sub": ("sub", lambda m, d, w: m - d),
    "smin": ("min_i", lambda m, d, w: min(s(m, w), s(d, w))),
    "smax": ("max_i", lambda m, d, w: max(s(m, w), s(d, w))),
    "umin": ("min_u", lambda m, d, w: min(m, d)),
    "umax": ("max_u", lambda m, d, w: max(m, d)),
    "and": ("and_b", lambda m, d, w: m & d),
    "or": ("or_b", lambda m, d, w: m | d),
    "xor": ("xor_b", lambda m, d, w: m ^ d),
    "inc": ("inc", lambda m, d, w: 0 if m >= d else m + 1),
    "dec": ("dec", lambda m, d, w: d if m == 0 or m > d else m - 1),
    "swap": ("wrxchg", lambda m, d, w: d),
}


def _ds_name(name: str, bits: int) -> str:
    base = ATOMICS[name][0]
    if base.endswith(("_i", "_u", "_b")):
        return f"ds_{base[:-2]}_rtn_{base[-1]}{bits}"
    return f"ds_{base}_rtn_{'b' if base == 'wrxchg' else 'u'}{bits}"


def _atomic_cases() -> dict[str, Case]:
    """The cases of atomic operations. Memory is initialised with input row 0 (and 1 for 64 bits);
    the operand is row 2 (and 3).
    """
    cases = {}
    for name in ATOMICS:
        cases[f"ds_{name}_32"] = Case(
            f"ds_write_b32 v0, v10\n{_ds_name(name, 32)} v40, v0, v12\nds_read_b32 v41, v0\n{LGKM}",
            4, 4,
        )  # fmt: skip
        cases[f"ds_{name}_64"] = Case(
            "v_lshlrev_b32 v60, 1, v0\nds_write_b64 v60, v[10:11]\n"
            f"{_ds_name(name, 64)} v[40:41], v60, v[12:13]\nds_read_b64 v[42:43], v60\n{LGKM}",
            4, 4,
        )  # fmt: skip
        cases[f"global_{name}_32"] = Case(
            f"global_store_dword v0, v10, s[6:7]\n{VM}\n"
            f"global_atomic_{name} v40, v0, v12, s[6:7] sc0\n{VM}\n"
            f"global_load_dword v41, v0, s[6:7]\n{VM}",
            4, 4,
        )  # fmt: skip
        cases[f"global_{name}_64"] = Case(
            f"v_lshlrev_b32 v60, 1, v0\nglobal_store_dwordx2 v60, v[10:11], s[6:7]\n{VM}\n"
            f"global_atomic_{name}_x2 v[40:41], v60, v[12:13], s[6:7] sc0\n{VM}\n"
            f"global_load_dwordx2 v[42:43], v60, s[6:7]\n{VM}",
            4, 4,
        )  # fmt: skip
    return cases


CASES: dict[str, Case] = {
    **_atomic_cases(),
    "cmpswap": Case(
        f"global_store_dword v0, v10, s[6:7]\nds_write_b32 v0, v10\n{VM}\n"
        "v_mov_b32 v60, v12\nv_mov_b32 v61, v11\n"  # {new, expected}
        f"global_atomic_cmpswap v40, v0, v[60:61], s[6:7] sc0\n{VM}\n"
        f"global_load_dword v41, v0, s[6:7]\n"
        f"ds_cmpst_rtn_b32 v42, v0, v11, v12\nds_read_b32 v43, v0\n{VM}\n{LGKM}",
        3, 4,
    ),
    "adds_from_all_lanes": Case(
        "v_mov_b32 v60, 0\nv_mov_b32 v61, 1\n"
        f"ds_write_b32 v60, v60\nds_add_u32 v60, v61\nds_add_rtn_u32 v40, v60, v61\n"
        f"ds_read_b32 v41, v60\n{LGKM}",
        0, 2,
    ),
    "pairs": Case(
        "ds_write2_b32 v0, v10, v11 offset0:0 offset1:64\n"
        "ds_write2st64_b32 v0, v12, v13 offset0:2 offset1:3\n"
        "ds_read2_b32 v[40:41], v0 offset0:64 offset1:0\n"
        f"ds_read2st64_b32 v[42:43], v0 offset0:3 offset1:1\n{LGKM}",
        4, 4,
    ),
    "wide": Case(
        "v_lshlrev_b32 v60, 2, v0\nds_write_b128 v60, v[10:13]\nds_read_b96 v[40:42], v60\n"
        "ds_read_b64 v[44:45], v60 offset:8\nds_write_b96 v60, v[10:12] offset:4\n"
        f"ds_read_b128 v[46:49], v60\n{LGKM}",
        4, 10,
    ),
    "bytes": Case(
        "ds_write_b32 v0, v10\nds_write_b8 v0, v11 offset:1\nds_write_b8_d16_hi v0, v11 offset:3\n"
        "ds_read_b32 v40, v0\nds_read_i8 v41, v0 offset:3\nds_read_u8 v42, v0 offset:2\n"
        "ds_write_b16_d16_hi v0, v12\nds_read_u16 v43, v0\nds_read_i16 v44, v0 offset:2\n"
        f"v_mov_b32 v45, v13\nds_read_u16_d16_hi v45, v0\nv_mov_b32 v46, v13\n{LGKM}\n"
        f"ds_read_i8_d16 v46, v0 offset:1\n{LGKM}",
        4, 7,
    ),
    "flat_reaches_lds": Case(
        "s_mov_b64 s[8:9], src_shared_base\nv_mov_b32 v61, s9\nv_add_u32 v60, 16, v0\n"
        f"flat_store_dword v[60:61], v10\n{VM}\n{LGKM}\nds_read_b32 v40, v0 offset:16\n"
        f"flat_atomic_add v41, v[60:61], v11 sc0\n{VM}\n{LGKM}\n"
        f"flat_load_dword v42, v[60:61]\n{VM}\n{LGKM}",
        2, 3,
    ),
    "global_addressing": Case(
        "v_mov_b32 v60, s4\nv_mov_b32 v61, s5\nv_add_co_u32_e32 v60, vcc, v60, v0\n"
        "v_addc_co_u32_e32 v61, vcc, 0, v61, vcc\nglobal_load_dword v40, v[60:61], off offset:256\n"
        "global_load_dword v41, v0, s[4:5] offset:512\nv_add_u32 v62, 0x300, v0\n"
        "global_load_dword v42, v62, s[4:5] offset:-256\n"
        "global_load_ushort v43, v0, s[4:5] offset:2\nglobal_load_sbyte v44, v0, s[4:5] offset:1\n"
        f"v_mov_b32 v45, v11\nglobal_load_short_d16_hi v45, v0, s[4:5]\n{VM}",
        4, 6,
    ),
    # Private memory of gfx90a is interleaved: dword k of lane l is dword number l of the k-th row
    # of 64 dwords. The accesses of this case are unaligned.
    "swizzled_buffer": Case(
        """
        s_mov_b32 s8, s6
        s_or_b32 s9, s7, 0x80000000
        s_mov_b32 s10, 0x10000
        s_mov_b32 s11, 0xe00000
        v_mov_b32_e32 v60, 0
        global_store_dword v0, v60, s[6:7]
        global_store_dword v0, v60, s[6:7] offset:256
        global_store_dword v0, v60, s[6:7] offset:512
        global_store_dword v0, v60, s[6:7] offset:768
        s_waitcnt vmcnt(0)
        buffer_store_dword v10, off, s[8:11], 0 offset:1
        buffer_store_dwordx2 v[10:11], off, s[8:11], 0 offset:6
        s_waitcnt vmcnt(0)
        buffer_load_dword v44, off, s[8:11], 0 offset:1
        buffer_load_dwordx2 v[46:47], off, s[8:11], 0 offset:6
        buffer_load_ushort v45, off, s[8:11], 0 offset:3
        global_load_dword v40, v0, s[6:7]
        global_load_dword v41, v0, s[6:7] offset:256
        global_load_dword v42, v0, s[6:7] offset:512
        global_load_dword v43, v0, s[6:7] offset:768
        s_waitcnt vmcnt(0)
        """,
        2,
        8,
    ),
    "raw_buffer": Case(
        RAW + "buffer_load_dword v40, v0, s[8:11], 0 offen offset:256\n"
        "s_movk_i32 s12, 512\nbuffer_load_dword v41, v0, s[8:11], s12 offen\n"
        "v_add_u32 v60, 0x380, v0\nbuffer_load_dword v42, v60, s[8:11], 0 offen\n"
        "buffer_load_dwordx2 v[44:45], v60, s[8:11], 0 offen offset:4\n"
        f"buffer_load_dword v46, off, s[8:11], 0 offset:20\n{VM}",
        4, 7,
    ),
    "structured_buffer": Case(
        RECORDS + "v_lshrrev_b32 v60, 4, v0\nv_and_b32 v61, 15, v0\nv_lshlrev_b32 v61, 2, v61\n"
        "v_lshrrev_b32 v60, 2, v0\nv_mov_b32 v61, 4\n"
        "buffer_load_dword v40, v60, s[8:11], 0 idxen offset:8\n"
        f"buffer_load_dword v41, v[60:61], s[8:11], 0 idxen offen\n{VM}",
        4, 2,
    ),
    "buffer_store": Case(
        "s_mov_b32 s8, s6\ns_mov_b32 s9, s7\ns_movk_i32 s10, 0x80\ns_mov_b32 s11, 0x27000\n"
        "global_store_dword v0, v11, s[6:7]\n"
        f"buffer_store_dword v10, v0, s[8:11], 0 offen\n{VM}\n"
        "global_load_dword v40, v0, s[6:7]\n"
        f"buffer_atomic_add v12, v0, s[8:11], 0 offen sc0\n{VM}\nv_mov_b32 v41, v12",
        3, 2,
    ),
    # A single lane, 32, stores two dwords at byte 128 of a buffer of 132 bytes, so only the first
    # dword is in range and stored.
    "straddling_store": Case(
        "s_mov_b32 s8, s6\ns_mov_b32 s9, s7\ns_movk_i32 s10, 0x84\ns_mov_b32 s11, 0x27000\n"
        f"global_store_dword v0, v11, s[6:7]\n{VM}\nv_mov_b32 v60, v10\nv_mov_b32 v61, v10\n"
        "s_mov_b64 s[12:13], exec\nv_cmp_eq_u32_e32 vcc, 0x80, v0\ns_mov_b64 exec, vcc\n"
        f"buffer_store_dwordx2 v[60:61], v0, s[8:11], 0 offen\n{VM}\n"
        f"s_mov_b64 exec, s[12:13]\nglobal_load_dword v40, v0, s[6:7]\n{VM}",
        2,
    ),
    "scalar_loads": Case(
        "s_load_dword s8, s[4:5], 0x104\ns_movk_i32 s9, 0x200\ns_load_dword s10, s[4:5], s9\n"
        f"s_load_dwordx4 s[12:15], s[4:5], 0x8\n{LGKM}\nv_mov_b32 v40, s8\nv_mov_b32 v41, s10\n"
        "v_mov_b32 v42, s12\nv_mov_b32 v43, s15\n" + RAW +
        f"s_buffer_load_dwordx2 s[12:13], s[8:11], 0x3fc\n{LGKM}\n"
        "v_mov_b32 v44, s12\nv_mov_b32 v45, s13",
        4, 6,
    ),
    "to_lds": Case(
        "s_mov_b32 m0, 64\nglobal_load_lds_dword v0, s[4:5] offset:256\n"
        + RAW + "s_movk_i32 m0, 0x400\nbuffer_load_dword v0, s[8:11], 0 offen offset:16 lds\n"
        f"{VM}\nds_read_b32 v40, v0 offset:320\nds_read_b32 v41, v0 offset:1040\n{LGKM}",
        4, 2,
    ),
    "float_atomics": Case(
        "global_store_dword v0, v10, s[6:7]\nds_write_b32 v0, v10\n" + VM + "\n"
        f"global_atomic_add_f32 v40, v0, v11, s[6:7] sc0\n{VM}\nglobal_load_dword v41, v0, s[6:7]\n"
        f"ds_add_f32 v0, v11\nds_read_b32 v42, v0\nds_max_f32 v0, v12\nds_read_b32 v43, v0\n"
        f"{VM}\n{LGKM}\nglobal_store_dword v0, v13, s[6:7]\n{VM}\n"
        f"global_atomic_pk_add_f16 v0, v14, s[6:7]\n{VM}\nglobal_load_dword v44, v0, s[6:7]\n{VM}",
        5, 5,
    ),
}  # fmt: skip


@cache
def suite() -> Suite:
    return Suite("gfx942", CASES)


def run(name: str, *rows: Words) -> Words:
    return suite().run(name, list(rows))


def signed(values: Words, bits: int) -> Words:
    shift = np.uint32(32 - bits)
    return ((values << shift).view(np.int32) >> np.int32(32 - bits)).view(np.uint32)


@pytest.mark.parametrize("where", ["ds", "global"])
@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", list(ATOMICS))
def test_integer_atomics(name: str, bits: int, where: str) -> None:
    rule = ATOMICS[name][1]
    small = [A.copy(), B.copy(), C.copy(), D.copy()]
    small[0][:4], small[2][:4], small[2][4:8] = 0, 5, small[0][4:8]  # for inc and dec
    if bits == 64:
        small[1][:8] = small[3][:8] = 0
    got = run(f"{where}_{name}_{bits}", *small)
    for lane in range(64):
        memory, data = (int(small[k][lane]) for k in (0, 2))
        if bits == 64:
            memory |= int(small[1][lane]) << 32
            data |= int(small[3][lane]) << 32
        after = rule(memory, data, bits) & (M64 if bits == 64 else M32)
        words = (
            [memory, after]
            if bits == 32
            else [memory & M32, memory >> 32, after & M32, after >> 32]
        )
        assert [int(got[k][lane]) for k in range(len(words))] == words, hex(data)


def test_compare_and_swap() -> None:
    got = run("cmpswap", A, B, C)
    after = np.where(A == B, C, A)
    assert np.array_equal(got, [A, after, A, after])


def test_lanes_of_one_atomic_do_not_lose_updates() -> None:
    got = run("adds_from_all_lanes")
    assert np.array_equal(np.sort(got[0]), 64 + LANES)
    assert set(got[1]) == {128}


def test_lds_pairs_and_wide_accesses() -> None:
    assert np.array_equal(run("pairs", A, B, C, D), [B, A, D, B])
    assert np.array_equal(run("wide", A, B, C, D), [A, B, C, 0 * A, C, D, A, A, B, C])


def test_lds_bytes_and_halves() -> None:
    got = run("bytes", A, B, C, D)
    mixed = (A & 0x00FF00FF) | (B & 0xFF) << 8 | (B >> 16 & 0xFF) << 24
    after = mixed & 0xFFFF0000 | C >> 16
    assert np.array_equal(got[0], mixed)
    assert np.array_equal(got[1], signed(mixed >> 24, 8))
    assert np.array_equal(got[2], mixed >> 16 & 0xFF)
    assert np.array_equal(got[3], after & 0xFFFF)
    assert np.array_equal(got[4], signed(after >> 16, 16))
    assert np.array_equal(got[5], after << 16 | D & 0xFFFF)
    assert np.array_equal(got[6], signed(after >> 8 & 0xFF, 8) & 0xFFFF | D & 0xFFFF0000)


def test_flat_addresses_in_the_shared_aperture() -> None:
    assert np.array_equal(run("flat_reaches_lds", A, B), [A, A, A + B])


def test_global_addressing() -> None:
    got = run("global_addressing", A, B, C, D)
    assert np.array_equal(got[:3], [B, C, C])
    assert np.array_equal(got[3], A >> 16)
    assert np.array_equal(got[4], signed(A >> 8 & 0xFF, 8))
    assert np.array_equal(got[5], A << 16 | B & 0xFFFF)


def test_raw_buffers_read_zero_beyond_their_end() -> None:
    got = run("raw_buffer", A, B, C, D)
    assert np.array_equal(got[:2], [B, C])
    inside = LANES < 32  # 0x380 + 4 * lane < 0x400
    assert np.array_equal(got[2], np.where(inside, np.roll(D, -32), 0))
    # If a pair ends out of range, its first dword may still be in range: each is checked
    # separately.
    assert np.array_equal(got[4], np.where(LANES < 31, np.roll(D, -33), 0))
    assert np.array_equal(got[5], np.where(LANES < 30, np.roll(D, -34), 0))
    assert set(got[6]) == {A[5]}


def test_stores_into_a_raw_buffer_end_with_it() -> None:
    got = run("straddling_store", A, B)
    assert np.array_equal(got[0], np.where(LANES == 32, A, B))


def test_swizzled_buffers_split_unaligned_accesses() -> None:
    got = run("swizzled_buffer", A, B)
    low, high = A << 16 & np.uint32(0xFFFF0000), A >> 16
    assert np.array_equal(got[:4], [A << 8, A >> 24 | low, high | B << 16, B >> 16])
    assert np.array_equal(got[4:], [A, A >> 16, A, B])


def test_structured_buffers_count_in_records() -> None:
    got = run("structured_buffer", A, B, C, D)
    words = np.concatenate([A, B, C, D])
    for row, element in ((0, 2), (1, 1)):
        expected = [words[16 * lane + element] if lane < 16 else 0 for lane in LANES]
        assert np.array_equal(got[row], expected)


def test_buffer_stores_stop_at_the_end() -> None:
    got = run("buffer_store", A, B, C)
    memory = np.where(LANES < 32, A, B)
    assert np.array_equal(got[0], memory)
    assert np.array_equal(got[1][:32], memory[:32])


def test_scalar_loads() -> None:
    got = run("scalar_loads", A, B, C, D)
    assert [int(row[0]) for row in got] == [B[1], C[0], A[2], A[5], D[63], 0]


def test_loads_that_go_to_lds() -> None:
    got = run("to_lds", A, B, C, D)
    assert np.array_equal(got[0], B)
    assert np.array_equal(got[1], np.concatenate([A[4:], B[:4]]))


def test_float_atomics() -> None:
    x, y, z = (RNG.uniform(-8, 8, 64).astype(np.float32) for _ in range(3))
    h = RNG.uniform(-8, 8, (2, 64, 2)).astype(np.float16)
    packed = [half.view(np.uint32)[:, 0] for half in h]
    got = run("float_atomics", x.view(np.uint32), y.view(np.uint32), z.view(np.uint32), *packed)
    assert np.array_equal(got[:3].view(np.float32), [x, x + y, x + y])
    assert np.array_equal(got[3].view(np.float32), np.maximum(x + y, z))
    assert np.array_equal(got[4].view(np.float16).reshape(64, 2), h[0] + h[1])
