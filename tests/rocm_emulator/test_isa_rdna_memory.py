"""RDNA3 memory instructions: halves, signs, pairs, atomics and addressing, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from isa_program import Case, Suite, Words

RNG = np.random.default_rng(21)
A, B, C = (RNG.integers(0, 2**32, 32, dtype=np.uint32) for _ in range(3))
LANES = np.arange(32)
ROW_BYTES = 128  # bytes between the rows of inputs
LDS_WAIT = "s_waitcnt lgkmcnt(0)"
WAIT = "s_waitcnt vmcnt(0)"

GLOBAL_LOADS = {
    "u8": ("global_load_u8 v40, v0, s[4:5] offset:1", lambda a, c: (a >> 8) & 0xFF),
    "i8": (
        "global_load_i8 v40, v0, s[4:5] offset:3",
        lambda a, c: (a.view(np.int32) >> 24).view(np.uint32),
    ),
    "u16": ("global_load_u16 v40, v0, s[4:5] offset:2", lambda a, c: a >> 16),
    "i16": (
        "global_load_i16 v40, v0, s[4:5]",
        lambda a, c: a.astype(np.uint16).view(np.int16).astype(np.int32).view(np.uint32),
    ),
    "d16_u8": (
        "global_load_d16_u8 v40, v0, s[4:5]",
        lambda a, c: (c & 0xFFFF0000) | (a & 0xFF),
    ),
    "d16_hi_i8": (
        "global_load_d16_hi_i8 v40, v0, s[4:5] offset:1",
        lambda a, c: (
            (c & 0xFFFF)
            | ((a >> 8).astype(np.uint8).view(np.int8).astype(np.int32).view(np.uint32) << 16)
        ),
    ),
    "d16_b16": (
        "global_load_d16_b16 v40, v0, s[4:5] offset:2",
        lambda a, c: (c & 0xFFFF0000) | a >> 16,
    ),
    "d16_hi_b16": (
        "global_load_d16_hi_b16 v40, v0, s[4:5]",
        lambda a, c: (c & 0xFFFF) | a << 16,
    ),
}
LDS_LOADS = {
    "ds_i8": ("ds_load_i8 v40, v0 offset:3", GLOBAL_LOADS["i8"][1]),
    "ds_u16": ("ds_load_u16 v40, v0 offset:2", GLOBAL_LOADS["u16"][1]),
    "ds_u8_d16_hi": (
        "ds_load_u8_d16_hi v40, v0 offset:1",
        lambda a, c: (c & 0xFFFF) | (a >> 8 & 0xFF) << 16,
    ),
    "ds_u16_d16": (
        "ds_load_u16_d16 v40, v0 offset:2",
        lambda a, c: (c & 0xFFFF0000) | a >> 16,
    ),
}
# name: (instruction, NumPy's result of one lane's memory from old, data); the type of the memory,
# float or int.
ATOMICS = {
    "add_u32": lambda old, data: old + data,
    "sub_u32": lambda old, data: old - data,
    "min_i32": lambda old, data: np.minimum(old.view(np.int32), data.view(np.int32)),
    "max_u32": lambda old, data: np.maximum(old, data),
    "and_b32": lambda old, data: old & data,
    "or_b32": lambda old, data: old | data,
    "xor_b32": lambda old, data: old ^ data,
    "inc_u32": lambda old, data: np.where(old >= data, 0, old + 1),
    "dec_u32": lambda old, data: np.where((old == 0) | (old > data), data, old - 1),
}


def _cases() -> dict[str, Case]:
    cases = {
        name: Case(f"v_mov_b32 v40, v12\n{text}\n{WAIT}", 3)
        for name, (text, _) in GLOBAL_LOADS.items()
    }
    for name, (text, _) in LDS_LOADS.items():
        cases[name] = Case(
            f"v_mov_b32 v40, v12\nds_store_b32 v0, v10\n{LDS_WAIT}\n{text}\n{LDS_WAIT}", 3
        )
    for name in ATOMICS:
        cases[f"ds_{name}"] = Case(
            f"ds_store_b32 v0, v10\n{LDS_WAIT}\nds_{name.replace('_', '_rtn_')} v40, v0, v11\n"
            f"{LDS_WAIT}\nds_load_b32 v41, v0\n{LDS_WAIT}",
            2,
            2,
        )
        cases[f"global_{name}"] = Case(
            f"global_store_b32 v0, v10, s[6:7] offset:512\ns_waitcnt_vscnt null, 0x0\n"
            f"global_atomic_{name} v40, v0, v11, s[6:7] offset:512 glc\n{WAIT}\n"
            f"global_load_b32 v41, v0, s[6:7] offset:512 glc\n{WAIT}",
            2,
            5,
        )
    cases["ds_pair"] = Case(
        "v_lshlrev_b32 v60, 1, v0\nds_store_2addr_b32 v60, v10, v11 offset0:3 offset1:4\n"
        f"{LDS_WAIT}\nds_load_2addr_b32 v[40:41], v60 offset0:4 offset1:3\n{LDS_WAIT}",
        2,
        2,
    )
    cases["ds_strided"] = Case(
        "ds_store_2addr_stride64_b32 v0, v10, v11 offset0:1 offset1:3\n"
        f"{LDS_WAIT}\nds_load_b32 v40, v0 offset:256\nds_load_b32 v41, v0 offset:768\n{LDS_WAIT}",
        2,
        2,
    )
    cases["ds_wide"] = Case(
        "v_lshlrev_b32 v60, 2, v0\nv_mov_b32 v64, v10\nv_mov_b32 v65, v11\nv_mov_b32 v66, v12\n"
        f"v_mov_b32 v67, v10\nds_store_b128 v60, v[64:67]\n{LDS_WAIT}\n"
        f"ds_load_b96 v[40:42], v60 offset:4\n{LDS_WAIT}",
        3,
        3,
    )
    # RDNA3's compare-and-store in LDS has the new value as its first data operand and the expected
    # old value as its second.
    cases["ds_cmpstore"] = Case(
        f"ds_store_b32 v0, v10\n{LDS_WAIT}\nds_cmpstore_rtn_b32 v40, v0, v11, v12\n{LDS_WAIT}\n"
        f"ds_load_b32 v41, v0\n{LDS_WAIT}",
        3,
        2,
    )
    # The compare-and-swap in global memory takes {new, expected} from a register pair.
    cases["global_cmpswap"] = Case(
        "v_mov_b32 v64, v11\nv_mov_b32 v65, v12\nglobal_store_b32 v0, v10, s[6:7] offset:512\n"
        "s_waitcnt_vscnt null, 0x0\n"
        f"global_atomic_cmpswap_b32 v40, v0, v[64:65], s[6:7] offset:512 glc\n{WAIT}\n"
        f"global_load_b32 v41, v0, s[6:7] offset:512\n{WAIT}",
        3,
        5,
    )
    for name in ("min", "max", "add"):
        cases[f"global_{name}_f32"] = Case(
            "global_store_b32 v0, v10, s[6:7] offset:512\ns_waitcnt_vscnt null, 0x0\n"
            f"global_atomic_{name}_f32 v0, v11, s[6:7] offset:512\ns_waitcnt_vscnt null, 0x0\n"
            f"global_load_b32 v40, v0, s[6:7] offset:512\n{WAIT}",
            2,
            5,
        )
    # Every lane adds to the same word: each sees a different value before.
    cases["contended"] = Case(
        "v_mov_b32 v60, 0\nv_mov_b32 v61, 1\nglobal_store_b32 v60, v60, s[6:7] offset:512\n"
        "s_waitcnt_vscnt null, 0x0\n"
        f"global_atomic_add_u32 v40, v60, v61, s[6:7] offset:512 glc\n{WAIT}",
        1,
        5,
    )
    # Cases of addressing: a negative offset, an address in vector registers, a flat access to LDS,
    # a buffer resource.
    cases["negative_offset"] = Case(
        f"s_add_u32 s8, s4, 0x80\ns_addc_u32 s9, s5, 0\n"
        f"global_load_b32 v40, v0, s[8:9] offset:-128\n{WAIT}",
        1,
    )
    cases["vector_address"] = Case(
        "v_add_co_u32 v60, s8, s4, v0\nv_add_co_ci_u32_e64 v61, null, s5, 0, s8\n"
        f"global_load_b64 v[40:41], v[60:61], off offset:128\nflat_load_b32 v42, v[60:61]\n"
        f"{WAIT} & lgkmcnt(0)",
        3,
        3,
    )
    cases["flat_to_lds"] = Case(
        f"ds_store_b32 v0, v10\n{LDS_WAIT}\ns_mov_b64 s[8:9], src_shared_base\n"
        f"v_mov_b32 v60, v0\nv_mov_b32 v61, s9\nflat_load_b32 v40, v[60:61]\n{WAIT} & lgkmcnt(0)",
        1,
    )
    # Words 16 and up lie beyond num_records: they read as 0.
    cases["buffer"] = Case(
        "s_mov_b32 s8, s4\ns_mov_b32 s9, s5\ns_mov_b32 s10, 64\ns_mov_b32 s11, 0x31014000\n"
        f"buffer_load_b32 v40, v0, s[8:11], 0 offen\n{WAIT}",
        1,
    )
    cases["scratch"] = Case(
        "scratch_store_b32 off, v10, off offset:4\nv_mov_b32 v60, 8\n"
        "scratch_store_b32 v60, v11, off\ns_mov_b32 s8, 4\ns_waitcnt_vscnt null, 0x0\n"
        f"scratch_load_b64 v[40:41], off, s8\n{WAIT}",
        2,
        2,
    )
    cases["scalar"] = Case(
        "s_load_b64 s[8:9], s[4:5], 0x8\ns_mov_b32 s12, 4\n"
        f"s_load_b32 s10, s[4:5], s12 offset:0x8\n{LDS_WAIT}\n"
        "v_mov_b32 v40, s8\nv_mov_b32 v41, s9\nv_mov_b32 v42, s10",
        1,
        3,
    )
    return cases


SUITE = Suite("gfx1100", _cases())


def run(name: str, *inputs: Words) -> Words:
    return SUITE.run(name, inputs)


@pytest.mark.parametrize("name", GLOBAL_LOADS)
def test_partial_global_loads(name: str) -> None:
    assert np.array_equal(run(name, A, B, C)[0], GLOBAL_LOADS[name][1](A, C))


@pytest.mark.parametrize("name", LDS_LOADS)
def test_partial_lds_loads(name: str) -> None:
    assert np.array_equal(run(name, A, B, C)[0], LDS_LOADS[name][1](A, C))


@pytest.mark.parametrize("where", ("ds", "global"))
@pytest.mark.parametrize("name", ATOMICS)
def test_atomics(name: str, where: str) -> None:
    data = B.copy()
    data[::3] = A[::3]
    data[1::5] = A[1::5] - 1
    before, after = run(f"{where}_{name}", A, data)[:2]
    expected = np.asarray(ATOMICS[name](A, data)).astype(np.int64)
    assert np.array_equal(before, A)
    assert np.array_equal(after, (expected % 2**32).astype(np.uint32))


def test_lds_pairs_and_wide_accesses() -> None:
    first, second = run("ds_pair", A, B)
    assert np.array_equal(first, B) and np.array_equal(second, A)
    first, second = run("ds_strided", A, B)
    assert np.array_equal(first, A) and np.array_equal(second, B)
    assert np.array_equal(run("ds_wide", A, B, C), [B, C, A])


@pytest.mark.parametrize("name", ("ds_cmpstore", "global_cmpswap"))
def test_compare_and_swap(name: str) -> None:
    expected = np.where(LANES % 2 == 0, A, A + 1)
    before, after = run(name, A, B, expected)[:2]
    assert np.array_equal(before, A)
    assert np.array_equal(after, np.where(LANES % 2 == 0, B, A))


@pytest.mark.parametrize(
    ("name", "numpy"), [("min", np.minimum), ("max", np.maximum), ("add", np.add)]
)
def test_float_atomics(name: str, numpy: np.ufunc) -> None:
    x, y = (RNG.uniform(-9, 9, 32).astype(np.float32) for _ in range(2))
    got = run(f"global_{name}_f32", x.view(np.uint32), y.view(np.uint32))[0]
    assert np.array_equal(got.view(np.float32), numpy(x, y))


def test_lanes_of_one_atomic_do_not_lose_updates() -> None:
    assert sorted(run("contended", A)[0]) == list(range(32))


def test_addressing() -> None:
    assert np.array_equal(run("negative_offset", A)[0], A)
    low, high, flat = run("vector_address", A, B, C)
    assert np.array_equal(low, B) and np.array_equal(high, [*B[1:], C[0]])
    assert np.array_equal(flat, A)
    assert np.array_equal(run("flat_to_lds", A)[0], A)
    assert np.array_equal(run("buffer", A)[0], np.where(LANES < 16, A, 0))
    first, second = run("scratch", A, B)
    assert np.array_equal(first, A) and np.array_equal(second, B)
    assert [row[0] for row in run("scalar", A)] == [A[2], A[3], A[3]]
