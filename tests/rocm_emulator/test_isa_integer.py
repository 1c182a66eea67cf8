"""Integer instructions, scalar and vector, against Python's unbounded integers.

Each vector operation runs on 64 lanes of random and corner values at once; each scalar one on a
list of pairs, and its SCC comes back beside the result. Expectations follow AMD's CDNA3 instruction
set document, written here from scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from isa_program import Case, Suite, Words

M32, M64 = 2**32 - 1, 2**64 - 1
CORNERS = [0, 1, 2, 31, 32, 63, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000]
CORNERS += [0x7FFFFF, 0x800000, 0xFFFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE]
RNG = np.random.default_rng(7)


def _inputs(count: int) -> list[Words]:
    """Returns rows of inputs. Lanes 0 to 19 pair extreme values with each other; the other lanes
    are random.
    """
    rows = []
    for k in range(count):
        row = RNG.integers(0, 2**32, 64, dtype=np.uint32)
        row[: len(CORNERS)] = np.roll(np.array(CORNERS, np.uint32), 3 * k)
        rows.append(row)
    return rows


INPUTS = _inputs(4)


def s32(x: int) -> int:
    return x - 2**32 if x & 0x80000000 else x


def s64(x: int) -> int:
    return x - 2**64 if x & 2**63 else x


def s24(x: int) -> int:
    x &= 0xFFFFFF
    return x - 2**24 if x & 0x800000 else x


def s16(x: int) -> int:
    x &= 0xFFFF
    return x - 2**16 if x & 0x8000 else x


def clamp(x: int, low: int, high: int) -> int:
    return min(max(x, low), high)


def first_high(x: int, width: int = 32) -> int:
    return width - x.bit_length() if x else -1


def first_low(x: int) -> int:
    return (x & -x).bit_length() - 1 if x else -1


def signed_high(x: int, width: int) -> int:
    sign = x >> (width - 1)
    return first_high(x ^ ((1 << width) - 1) if sign else x, width)


def field(x: int, offset: int, width: int, signed: bool) -> int:
    x = (x >> offset) & ((1 << width) - 1)
    return x - (1 << width) if signed and width and x >> (width - 1) else x


def permuted(a: int, b: int, select: int) -> int:
    data = (a << 32 | b).to_bytes(8, "little")
    out = 0
    for k in range(4):
        s = select >> (8 * k) & 0xFF
        if s < 8:
            byte = data[s]
        elif s < 12:
            byte = 0xFF if data[2 * (s - 8) + 1] & 0x80 else 0
        else:
            byte = 0 if s == 12 else 0xFF
        out |= byte << (8 * k)
    return out


def sad8(a: int, b: int, c: int, masked: bool = False) -> int:
    pairs = zip(a.to_bytes(4, "little"), b.to_bytes(4, "little"), strict=True)
    return c + sum(abs(x - y) for x, y in pairs if y or not masked)


def dot(a: int, b: int, c: int, width: int, signed: bool) -> int:
    for at in range(0, 32, width):
        c += field(a, at, width, signed) * field(b, at, width, signed)
    return c


Function = Callable[..., int]
# Vector operations: name -> value of a lane from its (unsigned) sources.
VECTOR: dict[str, tuple[int, Function]] = {
    "v_add_u32": (2, lambda a, b: a + b),
    "v_sub_u32": (2, lambda a, b: a - b),
    "v_subrev_u32": (2, lambda a, b: b - a),
    "v_mul_lo_u32": (2, lambda a, b: a * b),
    "v_mul_hi_u32": (2, lambda a, b: a * b >> 32),
    "v_mul_hi_i32": (2, lambda a, b: s32(a) * s32(b) >> 32),
    "v_mul_i32_i24": (2, lambda a, b: s24(a) * s24(b)),
    "v_mul_hi_i32_i24": (2, lambda a, b: s24(a) * s24(b) >> 32),
    "v_mul_u32_u24": (2, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    "v_mul_hi_u32_u24": (2, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32),
    "v_mad_i32_i24": (3, lambda a, b, c: s24(a) * s24(b) + c),
    "v_mad_u32_u24": (3, lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c),
    "v_mad_u32_u16": (3, lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF) + c),
    "v_mad_i32_i16": (3, lambda a, b, c: s16(a) * s16(b) + c),
    "v_min_i32": (2, lambda a, b: min(s32(a), s32(b))),
    "v_max_i32": (2, lambda a, b: max(s32(a), s32(b))),
    "v_min_u32": (2, min),
    "v_max_u32": (2, max),
    "v_min3_i32": (3, lambda *x: min(map(s32, x))),
    "v_max3_i32": (3, lambda *x: max(map(s32, x))),
    "v_med3_i32": (3, lambda *x: sorted(map(s32, x))[1]),
    "v_min3_u32": (3, min),
    "v_max3_u32": (3, max),
    "v_med3_u32": (3, lambda *x: sorted(x)[1]),
    "v_add3_u32": (3, lambda a, b, c: a + b + c),
    "v_xad_u32": (3, lambda a, b, c: (a ^ b) + c),
    "v_lshl_add_u32": (3, lambda a, b, c: (a << (b & 31)) + c),
    "v_add_lshl_u32": (3, lambda a, b, c: (a + b & M32) << (c & 31)),
    "v_lshl_or_b32": (3, lambda a, b, c: a << (b & 31) | c),
    "v_and_or_b32": (3, lambda a, b, c: a & b | c),
    "v_or3_b32": (3, lambda a, b, c: a | b | c),
    "v_lshlrev_b32": (2, lambda a, b: b << (a & 31)),
    "v_lshrrev_b32": (2, lambda a, b: b >> (a & 31)),
    "v_ashrrev_i32": (2, lambda a, b: s32(b) >> (a & 31)),
    "v_and_b32": (2, lambda a, b: a & b),
    "v_or_b32": (2, lambda a, b: a | b),
    "v_xor_b32": (2, lambda a, b: a ^ b),
    "v_xnor_b32": (2, lambda a, b: ~(a ^ b)),
    "v_not_b32": (1, lambda a: ~a),
    "v_bfm_b32": (2, lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    "v_bfe_u32": (3, lambda a, b, c: field(a, b & 31, c & 31, False)),
    "v_bfe_i32": (3, lambda a, b, c: field(s32(a), b & 31, c & 31, True)),
    "v_bfi_b32": (3, lambda a, b, c: a & b | ~a & c),
    "v_alignbit_b32": (3, lambda a, b, c: (a << 32 | b) >> (c & 31)),
    "v_alignbyte_b32": (3, lambda a, b, c: (a << 32 | b) >> 8 * (c & 3)),
    "v_perm_b32": (3, permuted),
    "v_bcnt_u32_b32": (2, lambda a, b: a.bit_count() + b),
    "v_bfrev_b32": (1, lambda a: int(f"{a:032b}"[::-1], 2)),
    "v_ffbh_u32": (1, first_high),
    "v_ffbl_b32": (1, first_low),
    "v_ffbh_i32": (1, lambda a: signed_high(a, 32)),
    "v_sad_u8": (3, sad8),
    "v_msad_u8": (3, lambda a, b, c: sad8(a, b, c, True)),
    "v_sad_hi_u8": (3, lambda a, b, c: (sad8(a, b, 0) << 16) + c),
    "v_sad_u16": (
        3,
        lambda a, b, c: c + abs((a & 0xFFFF) - (b & 0xFFFF)) + abs((a >> 16) - (b >> 16)),
    ),
    "v_sad_u32": (3, lambda a, b, c: c + abs(a - b)),
    "v_cvt_pk_u16_u32": (2, lambda a, b: min(a, 65535) | min(b, 65535) << 16),
    "v_cvt_pk_i16_i32": (
        2,
        lambda a, b: clamp(s32(a), -32768, 32767) & 0xFFFF | clamp(s32(b), -32768, 32767) << 16,
    ),
    "v_dot2_i32_i16": (3, lambda a, b, c: dot(a, b, c, 16, True)),
    "v_dot2_u32_u16": (3, lambda a, b, c: dot(a, b, c, 16, False)),
    "v_dot4_i32_i8": (3, lambda a, b, c: dot(a, b, c, 8, True)),
    "v_dot4_u32_u8": (3, lambda a, b, c: dot(a, b, c, 8, False)),
    "v_dot8_i32_i4": (3, lambda a, b, c: dot(a, b, c, 4, True)),
    "v_dot8_u32_u4": (3, lambda a, b, c: dot(a, b, c, 4, False)),
    # Operations of 16 bits write zeros to the upper half of the register. (Those of three sources
    # keep its contents, which are zero before.)
    "v_add_u16": (2, lambda a, b: a + b & 0xFFFF),
    "v_sub_u16": (2, lambda a, b: a - b & 0xFFFF),
    "v_subrev_u16": (2, lambda a, b: b - a & 0xFFFF),
    "v_mul_lo_u16": (2, lambda a, b: a * b & 0xFFFF),
    "v_lshlrev_b16": (2, lambda a, b: (b & 0xFFFF) << (a & 15) & 0xFFFF),
    "v_lshrrev_b16": (2, lambda a, b: (b & 0xFFFF) >> (a & 15)),
    "v_ashrrev_i16": (2, lambda a, b: s16(b) >> (a & 15) & 0xFFFF),
    "v_max_u16": (2, lambda a, b: max(a & 0xFFFF, b & 0xFFFF)),
    "v_min_u16": (2, lambda a, b: min(a & 0xFFFF, b & 0xFFFF)),
    "v_max_i16": (2, lambda a, b: max(s16(a), s16(b)) & 0xFFFF),
    "v_min_i16": (2, lambda a, b: min(s16(a), s16(b)) & 0xFFFF),
    "v_mad_u16": (3, lambda a, b, c: a * b + c & 0xFFFF),
    "v_mad_i16": (3, lambda a, b, c: s16(a) * s16(b) + c & 0xFFFF),
    "v_med3_i16": (3, lambda *x: sorted(map(s16, x))[1] & 0xFFFF),
    "v_min3_u16": (3, lambda *x: min(v & 0xFFFF for v in x)),
    "v_max3_i16": (3, lambda *x: max(map(s16, x)) & 0xFFFF),
}
# Operations with the modifier clamp, which saturate; and operations on packed pairs of 16 bits.
CLAMPED: dict[str, Function] = {
    "v_add_u32": lambda a, b: min(a + b, M32),
    "v_sub_u32": lambda a, b: max(a - b, 0),
    "v_add_i32": lambda a, b: clamp(s32(a) + s32(b), -(2**31), 2**31 - 1),
    "v_sub_i32": lambda a, b: clamp(s32(a) - s32(b), -(2**31), 2**31 - 1),
    "v_add_u16": lambda a, b: min((a & 0xFFFF) + (b & 0xFFFF), 0xFFFF),
    "v_add_i16": lambda a, b: clamp(s16(a) + s16(b), -32768, 32767) & 0xFFFF,
    "v_sub_i16": lambda a, b: clamp(s16(a) - s16(b), -32768, 32767) & 0xFFFF,
}
# Sources of 64 bits: (widths of the sources, function).
WIDE: dict[str, tuple[tuple[int, ...], Function]] = {
    "v_lshlrev_b64": ((1, 2), lambda a, b: b << (a & 63)),
    "v_lshrrev_b64": ((1, 2), lambda a, b: b >> (a & 63)),
    "v_ashrrev_i64": ((1, 2), lambda a, b: s64(b) >> (a & 63)),
    "v_lshl_add_u64": ((2, 1, 2), lambda a, b, c: (a << b % 5) + c),
}
COMPARE: dict[str, Callable[[int, int], bool]] = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ne": lambda a, b: a != b,
    "ge": lambda a, b: a >= b,
}
READ: dict[str, tuple[int, Function]] = {
    "i32": (1, s32),
    "u32": (1, lambda x: x),
    "i64": (2, s64),
    "u64": (2, lambda x: x),
    "i16": (1, s16),
    "u16": (1, lambda x: x & 0xFFFF),
}


def _wide(k: int, width: int) -> str:
    first = 10 + 2 * k
    return f"v[{first}:{first + 1}]" if width == 2 else f"v{first}"


def _vector_cases() -> dict[str, Case]:
    cases = {}
    for name, (count, _) in VECTOR.items():
        sources = ", ".join(f"v{10 + k}" for k in range(count))
        cases[name] = Case(f"v_mov_b32 v40, 0\n{name} v40, {sources}", count)
    for name in CLAMPED:
        cases[f"{name}_clamp"] = Case(f"{name}_e64 v40, v10, v11 clamp", 2)
        if name in ("v_add_i32", "v_sub_i32", "v_add_i16", "v_sub_i16"):
            cases[f"{name}_clamp"] = Case(f"{name} v40, v10, v11 clamp", 2)
    for name, (widths, _) in WIDE.items():
        sources = ", ".join(_wide(k, w) for k, w in enumerate(widths))
        fix = "v_and_b32 v12, 3, v12\n" if name == "v_lshl_add_u64" else ""
        cases[name] = Case(f"{fix}{name} v[40:41], {sources}", 6, 2)
    for kind, (width, _) in READ.items():
        body = ""
        for k, name in enumerate(COMPARE):
            body += f"v_cmp_{name}_{kind}_e64 s[{8 + 2 * k}:{9 + 2 * k}], "
            body += f"{_wide(0, width)}, {_wide(1, width)}\n"
            body += f"v_cndmask_b32_e64 v{40 + k}, 0, 1, s[{8 + 2 * k}:{9 + 2 * k}]\n"
        cases[f"cmp_{kind}"] = Case(body, 4, len(COMPARE))
    cases["carry"] = Case(
        "v_add_co_u32_e32 v40, vcc, v10, v11\nv_addc_co_u32_e32 v41, vcc, v12, v13, vcc\n"
        "v_addc_co_u32_e64 v42, s[8:9], 0, 0, vcc\n"
        "v_sub_co_u32_e32 v43, vcc, v10, v11\nv_subb_co_u32_e32 v44, vcc, v12, v13, vcc\n"
        "v_cndmask_b32_e64 v45, 0, 1, vcc",
        4,
        6,
    )
    cases["mad_64"] = Case(
        "v_mad_u64_u32 v[40:41], s[8:9], v10, v11, v[12:13]\nv_cndmask_b32_e64 v44, 0, 1, s[8:9]\n"
        "v_mad_i64_i32 v[42:43], s[8:9], v10, v11, v[12:13]",
        4,
        5,
    )
    return cases


@cache
def suite() -> Suite:
    return Suite("gfx942", {**_vector_cases(), **_scalar_cases()})


def lanes(rows: list[Words]) -> list[tuple[int, ...]]:
    return [tuple(int(row[lane]) for row in rows) for lane in range(64)]


def check(got: Words, expected: list[int], sources: list[tuple[int, ...]]) -> None:
    for lane, value in enumerate(expected):
        assert int(got[lane]) == value & M32, (lane, [hex(s) for s in sources[lane]])


@pytest.mark.parametrize("name", list(VECTOR))
def test_vector(name: str) -> None:
    count, function = VECTOR[name]
    rows = INPUTS[:count]
    if name == "v_perm_b32":
        rows = [*INPUTS[:2], INPUTS[2] & 0x0F0F0F0F]
    sources = lanes(rows)
    check(suite().run(name, rows)[0], [function(*s) for s in sources], sources)


@pytest.mark.parametrize("name", list(CLAMPED))
def test_saturation(name: str) -> None:
    sources = lanes(INPUTS[:2])
    got = suite().run(f"{name}_clamp", INPUTS[:2])[0]
    check(got, [CLAMPED[name](*s) for s in sources], sources)


@pytest.mark.parametrize("name", list(WIDE))
def test_wide(name: str) -> None:
    widths, function = WIDE[name]
    rows = [*INPUTS, *_inputs(2)]
    if name == "v_lshl_add_u64":
        rows[2] = rows[2] & 3
    sources = []
    for lane in range(64):
        values = [int(rows[2 * k][lane]) for k in range(len(widths))]
        values = [v | int(rows[2 * k + 1][lane]) << 32 if widths[k] == 2 else v
                  for k, v in enumerate(values)]  # fmt: skip
        sources.append(tuple(values))
    got = suite().run(name, rows)
    results = [function(*s) & M64 for s in sources]
    check(got[0], results, sources)
    check(got[1], [r >> 32 for r in results], sources)


@pytest.mark.parametrize("kind", list(READ))
def test_comparisons(kind: str) -> None:
    width, read = READ[kind]
    rows = [row.copy() for row in INPUTS]
    rows[2][40:] = rows[0][40:]  # equal in the low and, below, in the high words too
    rows[3][50:] = rows[1][50:]
    got = suite().run(f"cmp_{kind}", rows)
    for k, name in enumerate(COMPARE):
        for lane in range(64):
            pair = [int(rows[2 * j][lane]) for j in range(2)]
            if width == 2:
                pair = [p | int(rows[2 * j + 1][lane]) << 32 for j, p in enumerate(pair)]
            a, b = (read(p) for p in pair)
            assert bool(got[k][lane]) == COMPARE[name](a, b), (name, hex(pair[0]), hex(pair[1]))


def test_carries_go_through_lane_masks() -> None:
    got = suite().run("carry", INPUTS)
    for lane, (a, b, c, d) in enumerate(lanes(INPUTS)):
        total = (a | c << 32) + (b | d << 32)
        assert int(got[0][lane]) | int(got[1][lane]) << 32 == total & M64
        assert int(got[2][lane]) == total >> 64
        rest = (a | c << 32) - (b | d << 32)
        assert int(got[3][lane]) | int(got[4][lane]) << 32 == rest & M64
        assert bool(got[5][lane]) == (rest < 0)


def test_multiply_add_of_64_bits() -> None:
    got = suite().run("mad_64", INPUTS)
    for lane, (a, b, low, high) in enumerate(lanes(INPUTS)):
        addend = low | high << 32
        unsigned, signed = a * b + addend, s32(a) * s32(b) + s64(addend)
        assert int(got[0][lane]) | int(got[1][lane]) << 32 == unsigned & M64
        assert int(got[4][lane]) == unsigned >> 64
        assert int(got[2][lane]) | int(got[3][lane]) << 32 == signed & M64


# Scalar operations: (64-bit result, widths of the sources, value, the function of SCC, or None if
# SCC must stay unchanged).
Scc = Callable[..., bool] | None
nonzero: Scc = lambda result, *_: result != 0  # noqa: E731
SCALAR: dict[str, tuple[int, tuple[int, ...], Function, Scc]] = {
    "s_add_u32": (1, (1, 1), lambda a, b: a + b, lambda r, a, b: a + b > M32),
    "s_sub_u32": (1, (1, 1), lambda a, b: a - b, lambda r, a, b: b > a),
    "s_add_i32": (1, (1, 1), lambda a, b: a + b, lambda r, a, b: s32(r) != s32(a) + s32(b)),
    "s_sub_i32": (1, (1, 1), lambda a, b: a - b, lambda r, a, b: s32(r) != s32(a) - s32(b)),
    "s_min_i32": (1, (1, 1), lambda a, b: min(s32(a), s32(b)), lambda r, a, b: s32(a) < s32(b)),
    "s_max_i32": (1, (1, 1), lambda a, b: max(s32(a), s32(b)), lambda r, a, b: s32(a) >= s32(b)),
    "s_min_u32": (1, (1, 1), min, lambda r, a, b: a < b),
    "s_max_u32": (1, (1, 1), max, lambda r, a, b: a >= b),
    "s_and_b32": (1, (1, 1), lambda a, b: a & b, nonzero),
    "s_or_b32": (1, (1, 1), lambda a, b: a | b, nonzero),
    "s_xor_b32": (1, (1, 1), lambda a, b: a ^ b, nonzero),
    "s_andn2_b32": (1, (1, 1), lambda a, b: a & ~b, nonzero),
    "s_orn2_b32": (1, (1, 1), lambda a, b: a | ~b, nonzero),
    "s_nand_b32": (1, (1, 1), lambda a, b: ~(a & b), nonzero),
    "s_nor_b32": (1, (1, 1), lambda a, b: ~(a | b), nonzero),
    "s_xnor_b32": (1, (1, 1), lambda a, b: ~(a ^ b), nonzero),
    "s_and_b64": (2, (2, 2), lambda a, b: a & b, nonzero),
    "s_andn2_b64": (2, (2, 2), lambda a, b: a & ~b, nonzero),
    "s_xor_b64": (2, (2, 2), lambda a, b: a ^ b, nonzero),
    "s_xnor_b64": (2, (2, 2), lambda a, b: ~(a ^ b), nonzero),
    "s_lshl_b32": (1, (1, 1), lambda a, b: a << (b & 31), nonzero),
    "s_lshr_b32": (1, (1, 1), lambda a, b: a >> (b & 31), nonzero),
    "s_ashr_i32": (1, (1, 1), lambda a, b: s32(a) >> (b & 31), nonzero),
    "s_lshl_b64": (2, (2, 1), lambda a, b: a << (b & 63), nonzero),
    "s_lshr_b64": (2, (2, 1), lambda a, b: a >> (b & 63), nonzero),
    "s_ashr_i64": (2, (2, 1), lambda a, b: s64(a) >> (b & 63), nonzero),
    "s_bfm_b32": (1, (1, 1), lambda a, b: ((1 << (a & 31)) - 1) << (b & 31), None),
    "s_bfm_b64": (2, (1, 1), lambda a, b: ((1 << (a & 63)) - 1) << (b & 63), None),
    "s_mul_i32": (1, (1, 1), lambda a, b: a * b, None),
    "s_mul_hi_u32": (1, (1, 1), lambda a, b: a * b >> 32, None),
    "s_mul_hi_i32": (1, (1, 1), lambda a, b: s32(a) * s32(b) >> 32, None),
    "s_bfe_u32": (1, (1, 1), lambda a, b: field(a, b & 31, b >> 16 & 0x7F, False), nonzero),
    "s_bfe_u64": (2, (2, 1), lambda a, b: field(a, b & 63, b >> 16 & 0x7F, False), nonzero),
    # The difference is taken modulo 2^32 before its absolute value is computed.
    "s_absdiff_i32": (1, (1, 1), lambda a, b: abs(s32(a - b & M32)), nonzero),
    "s_or_b64": (2, (2, 2), lambda a, b: a | b, nonzero),
    "s_orn2_b64": (2, (2, 2), lambda a, b: a | ~b, nonzero),
    "s_nand_b64": (2, (2, 2), lambda a, b: ~(a & b), nonzero),
    "s_nor_b64": (2, (2, 2), lambda a, b: ~(a | b), nonzero),
    "s_lshl2_add_u32": (1, (1, 1), lambda a, b: (a << 2) + b, lambda r, a, b: (a << 2) + b > M32),
    "s_pack_ll_b32_b16": (1, (1, 1), lambda a, b: a & 0xFFFF | b << 16, None),
    "s_pack_lh_b32_b16": (1, (1, 1), lambda a, b: a & 0xFFFF | b & 0xFFFF0000, None),
    "s_pack_hh_b32_b16": (1, (1, 1), lambda a, b: a >> 16 | b & 0xFFFF0000, None),
    "s_not_b32": (1, (1,), lambda a: ~a, nonzero),
    "s_not_b64": (2, (2,), lambda a: ~a, nonzero),
    "s_brev_b32": (1, (1,), lambda a: int(f"{a:032b}"[::-1], 2), None),
    "s_bcnt1_i32_b64": (1, (2,), lambda a: a.bit_count(), nonzero),
    "s_bcnt0_i32_b32": (1, (1,), lambda a: 32 - a.bit_count(), nonzero),
    "s_ff1_i32_b32": (1, (1,), first_low, None),
    "s_ff1_i32_b64": (1, (2,), first_low, None),
    "s_ff0_i32_b32": (1, (1,), lambda a: first_low(~a & M32), None),
    "s_flbit_i32_b32": (1, (1,), first_high, None),
    "s_flbit_i32_b64": (1, (2,), lambda a: first_high(a, 64), None),
    "s_flbit_i32": (1, (1,), lambda a: signed_high(a, 32), None),
    "s_sext_i32_i8": (1, (1,), lambda a: (a & 0xFF) - (a & 0x80) * 2, None),
    "s_sext_i32_i16": (1, (1,), s16, None),
    "s_abs_i32": (1, (1,), lambda a: abs(s32(a)), nonzero),
}
RANDOM_ROUNDS = 10


def _scalar_cases() -> dict[str, Case]:
    """The cases of scalar operations. Each lane of the inputs is one round: its values are moved to
    s[8:11], and the result and SCC are returned.
    """
    cases = {}
    for name, (size, widths, _, _) in SCALAR.items():
        body = ""
        for r in range(RANDOM_ROUNDS):
            body += "".join(f"v_readlane_b32 s{8 + k}, v{10 + k}, {r}\n" for k in range(4))
            sources = ", ".join(f"s[{8 + 2 * k}:{9 + 2 * k}]" if w == 2 else f"s{8 + 2 * k}"
                                for k, w in enumerate(widths))  # fmt: skip
            body += f"s_cmp_lg_u32 s8, s8\ns_cselect_b32 s15, 0, {r % 2}\ns_cmp_eq_u32 s15, 1\n"
            body += f"{name} {'s[12:13]' if size == 2 else 's12'}, {sources}\n"
            body += "s_cselect_b32 s14, 1, 0\n"
            body += "".join(f"v_writelane_b32 v{40 + k}, s{12 + k}, {r}\n" for k in range(3))
        cases[name] = Case(body, 4, 3)
    return cases


@pytest.mark.parametrize("name", list(SCALAR))
def test_scalar(name: str) -> None:
    size, widths, function, scc = SCALAR[name]
    rows = [np.roll(row, -7) for row in INPUTS]  # corners first, then random
    for r in (3, 6):  # equal sources
        rows[2][r], rows[3][r] = rows[0][r], rows[1][r]
    rows[0][7], rows[2][7] = 0x80000000, 1  # the difference does not fit in 32 signed bits
    got = suite().run(name, rows)
    for r in range(RANDOM_ROUNDS):
        values = [int(rows[2 * k][r]) for k in range(len(widths))]
        values = [v | int(rows[2 * k + 1][r]) << 32 if widths[k] == 2 else v
                  for k, v in enumerate(values)]  # fmt: skip
        expected = function(*values) & (M64 if size == 2 else M32)
        result = int(got[0][r]) | (int(got[1][r]) << 32 if size == 2 else 0)
        assert result == expected, [hex(v) for v in values]
        flag = bool(r % 2) if scc is None else scc(expected, *values)
        assert bool(got[2][r]) == flag, ("SCC", [hex(v) for v in values])
