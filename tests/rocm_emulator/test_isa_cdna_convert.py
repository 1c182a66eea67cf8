"""gfx950's conversions with a scale against ml_dtypes, and stochastic rounding against fractions.

``v_cvt_scalef32_*``: conversions to 8, 6 or 4 bits divide the value by the scale, and conversions
from these formats multiply it. The scale is the exponent of an f32. Each of several elements uses
the next number of v_prng_b32. From AMD's CDNA4 instruction set document, section "BF8 / FP8 and
smaller formats".
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import ml_dtypes
import numpy as np
import pytest
from isa_matrix import BF6, BF8, FP4, FP6, FP8, Format, pack_words, unpack
from isa_program import Case, Suite, Words
from numpy.typing import NDArray

OUT_VGPR = 100
SMALL = {"fp8": FP8, "bf8": BF8, "fp6": FP6, "bf6": BF6, "fp4": FP4}
LARGE = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
OVERFLOW_TO_LARGEST = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1"
M32 = 2**32 - 1


def _wide_values(rng: np.random.Generator, dtype: type, count: int, limit: float) -> NDArray:
    """(lane, element): values of every magnitude around a format's range, including ties and exact
    values.
    """
    size = np.exp2(rng.uniform(-9, np.log2(limit) + 1, (64, count)))
    values = np.where(rng.random((64, count)) < 0.5, np.round(size * 8) / 8, size)
    values[::16] = 0
    return (values * rng.choice([-1, 1], (64, count))).astype(dtype)


def _source_rows(values: NDArray) -> list[Words]:
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(64, -1)
    if raw.shape[1] < 4:
        raw = np.concatenate([raw, np.full((64, 4 - raw.shape[1]), 0x5A, np.uint8)], axis=1)
    return list(np.ascontiguousarray(raw).view(np.uint32).T)


def next_random(bits: int) -> int:
    return (bits << 1 & M32) ^ (197 if bits >> 31 else 0)


@dataclass(frozen=True)
class Down:
    """An instruction that converts to a small format. ``select``: which part of the destination
    register it writes.
    """

    name: str
    large: str
    small: str
    count: int
    random: bool
    select: int = 0
    high_source: bool = False

    @property
    def key(self) -> str:
        return f"{self.name}_{self.select}{'h' if self.high_source else ''}"

    @property
    def separate(self) -> bool:
        """True if the instruction has two source operands, whose elements alternate in the
        result.
        """
        return "2xpk16" in self.name or (
            self.large == "f32" and self.count == 2 and not self.random
        )

    @cached_property
    def case(self) -> Case:
        elements = 1 if self.large == "f32" else 2
        sources, first = [], 10
        for _ in range(2 if self.separate else 1):
            count = max(1, self.count // elements // (2 if self.separate else 1))
            sources.append(f"v[{first}:{first + count - 1}]" if count > 1 else f"v{first}")
            first += count
        sources += [f"v{first + k}" for k in range(2 if self.random else 1)]
        first += len(sources) - (2 if self.separate else 1)
        target = f"v[{OUT_VGPR}:{OUT_VGPR + 5}]" if self.count == 32 else f"v{OUT_VGPR}"
        width = SMALL[self.small].bits * self.count
        tail = ""
        if self.count < 32:
            # The last bits select one of four parts of the destination; for a half, only the last
            # bit counts.
            low, high = (0, self.select) if width == 16 else (self.select & 1, self.select >> 1)
            middle = [low] if len(sources) == 3 or width == 8 else []
            front = [int(self.high_source), 0]
            tail = " op_sel:[" + ",".join(map(str, [*front, *middle, high])) + "]"
        body = f"v_mov_b32 v{OUT_VGPR}, v{first}\n{self.name} {target}, {', '.join(sources)}{tail}"
        return Case(body, first - 10 + 1, 6 if self.count == 32 else 1, OUT_VGPR)


def _downs() -> list[Down]:
    p = "v_cvt_scalef32_"
    cases = []
    for large in LARGE:
        for small in ("fp8", "bf8"):
            cases += [Down(f"{p}pk_{small}_{large}", large, small, 2, False, s) for s in (0, 1)]
            for select in range(4):
                high = large != "f32" and select == 2
                cases.append(Down(f"{p}sr_{small}_{large}", large, small, 1, True, select, high))
        for select in range(4):
            cases.append(Down(f"{p}pk_fp4_{large}", large, "fp4", 2, False, select))
            cases.append(Down(f"{p}sr_pk_fp4_{large}", large, "fp4", 2, True, select))
        for small in ("fp6", "bf6"):
            plain = f"{p}2xpk16_{small}_f32" if large == "f32" else f"{p}pk32_{small}_{large}"
            cases.append(Down(plain, large, small, 32, False))
            cases.append(Down(f"{p}sr_pk32_{small}_{large}", large, small, 32, True))
    return cases


@dataclass(frozen=True)
class Up:
    """An instruction that converts from a small format. ``select``: which part of the source
    register it reads.
    """

    name: str
    small: str
    large: str
    count: int
    select: int = 0

    @property
    def key(self) -> str:
        return f"{self.name}_{self.select}"

    @property
    def rows(self) -> int:
        return self.count if self.large == "f32" else (self.count + 1) // 2

    @property
    def case(self) -> Case:
        source = "v[10:15]" if self.count == 32 else "v10"
        first = 16 if self.count == 32 else 11
        target = f"v[{OUT_VGPR}:{OUT_VGPR + self.rows - 1}]" if self.rows > 1 else f"v{OUT_VGPR}"
        single_half = self.count == 1 and self.large != "f32"
        bits = [self.select & 1, self.select >> 1, int(single_half)]
        tail = "" if self.count == 32 else " op_sel:[" + ",".join(map(str, bits)) + "]"
        body = (
            f"v_mov_b32 v{OUT_VGPR}, v{first + 1}\n{self.name} {target}, {source}, v{first}{tail}"
        )
        return Case(body, first - 10 + 2, self.rows, OUT_VGPR)


def _ups() -> list[Up]:
    p = "v_cvt_scalef32_"
    cases = []
    for large in LARGE:
        for small in ("fp8", "bf8"):
            cases += [Up(f"{p}pk_{large}_{small}", small, large, 2, s) for s in (0, 1)]
            if large != "bf16":
                cases += [Up(f"{p}{large}_{small}", small, large, 1, s) for s in range(4)]
        cases += [Up(f"{p}pk_{large}_fp4", "fp4", large, 2, s) for s in range(4)]
        cases += [Up(f"{p}pk32_{large}_{small}", small, large, 32) for small in ("fp6", "bf6")]
    return cases


DOWNS = {case.key: case for case in _downs()}
UPS = {case.key: case for case in _ups()}
EXTRA = {
    "saturate_fp8": Case(
        f"{OVERFLOW_TO_LARGEST}\ns_nop 1\nv_cvt_scalef32_pk_fp8_f32 v40, v10, v11, 1.0\n"
        "v_cvt_pk_bf8_f32 v41, v10, v11\nv_cvt_sr_f16_f32 v42, v10, v12\n"
        "v_cvt_sr_bf16_f32 v43, v10, v12",
        3,
        4,
    ),
    "overflow_fp8": Case(
        "v_cvt_scalef32_pk_fp8_f32 v40, v10, v11, 1.0\nv_cvt_pk_bf8_f32 v41, v10, v11",
        2,
        2,
    ),
    "no_numbers": Case(
        "v_cvt_scalef32_pk_fp4_f32 v40, v10, v11, 1.0\n"
        "v_cvt_scalef32_pk_fp8_f32 v41, v12, v12, v13\n"
        "v_cvt_scalef32_f32_bf8 v42, v14, v13\n",
        5,
        3,
    ),
    "modifiers": Case("v_cvt_scalef32_pk_fp8_f32 v40, -v10, |v11|, 2.0", 2),
    "sr_f16": Case("v_mov_b32 v40, v12\nv_cvt_sr_f16_f32 v40, v10, v11 op_sel:[0,0,1]", 3),
    "sr_bf16": Case("v_mov_b32 v40, v12\nv_cvt_sr_bf16_f32 v40, v10, v11", 3),
}
SUITE = Suite("gfx950", {key: case.case for key, case in {**DOWNS, **UPS}.items()} | EXTRA)

PACKED_CONVERSIONS = "v_cvt_pk_fp8_f32 v40, v10, -v10\nv_cvt_pk_bf8_f32 v41, v10, -v10"
EIGHT = {
    arch: Suite(arch, {"pack": Case(PACKED_CONVERSIONS, 1, 2)}) for arch in ("gfx942", "gfx950")
}


def exponents(rng: np.random.Generator) -> tuple[NDArray[np.int64], Words]:
    """Returns a random power of two for each lane, and words of f32 with that exponent. Other bits
    of a scale are random, because they are ignored.
    """
    powers = rng.integers(-6, 7, 64)
    noise = rng.integers(0, 2**23, 64) | rng.integers(0, 2, 64) << 31
    return powers, ((powers + 127) << 23 | noise).astype(np.uint32)


def nearest(values: NDArray[np.float64], form: Format) -> NDArray[np.uint8]:
    """Returns the codes of values, rounded to nearest by ml_dtypes. The values must be exact in
    f32, so that they are rounded once.
    """
    exact = values.astype(np.float32)
    assert np.array_equal(exact, values)
    if form.bits < 8:
        largest = form.values(form.finite_codes()).max()
        exact = np.clip(exact, -largest, largest)
    return exact.astype(form.dtype).view(np.uint8)


def at_random(value: float, form: Format, random: int) -> int:
    """Returns the code to which stochastic rounding rounds a value: the code above if the truncated
    part plus random / 2^32 is at least 1, otherwise the code below.
    """
    codes = [int(c) for c in form.finite_codes() if int(c) >> (form.bits - 1) == 0]
    grid = [Fraction(float(form.values(np.array([c], np.uint8))[0])) for c in codes]
    step = grid[-1] - grid[-2]
    sign = (1 if np.signbit(value) else 0) << (form.bits - 1)
    magnitude = abs(Fraction(value))
    below = max(k for k, g in enumerate(grid) if g <= magnitude)
    width = step if below == len(grid) - 1 else grid[below + 1] - grid[below]
    k = below + int((magnitude - grid[below]) / width + Fraction(random, 2**32) >= 1)
    if k >= len(grid):
        if form.bits < 8:
            return sign | codes[-1]
        return sign | (0x7C if form is BF8 else 0x7F)
    return sign | codes[k]


@pytest.mark.parametrize("key", DOWNS)
def test_to_a_small_format(key: str) -> None:
    op, rng = DOWNS[key], np.random.default_rng(len(key))
    form, dtype = SMALL[op.small], LARGE[op.large]
    limit = min(float(form.values(form.finite_codes()).max()), 3e4 if op.large == "f16" else 1e5)
    count = 2 if op.count == 1 and op.large != "f32" else op.count
    scaled = _wide_values(rng, dtype, count, limit)
    powers, scale = exponents(rng)
    if op.large == "f16":  # its range is the narrower one
        powers, scale = powers * 0, np.full(64, 127 << 23, np.uint32)
    with np.errstate(over="ignore"):
        values = np.ldexp(scaled.astype(np.float64), powers[:, None]).astype(dtype)
    exact = np.ldexp(values.astype(np.float64), -powers[:, None])
    random, old = (rng.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(2))
    parts = [values[:, 0::2], values[:, 1::2]] if op.separate else [values]
    rows = [row for part in parts for row in _source_rows(part)]
    rows += [random, scale] if op.random else [scale]
    if op.count == 1:
        exact = exact[:, [int(op.high_source)]]
    if op.random:
        codes = np.zeros(exact.shape, np.uint8)
        for lane in range(64):
            seed = int(random[lane])
            for element, value in enumerate(exact[lane]):
                codes[lane, element] = at_random(float(value), form, seed)
                seed = next_random(seed)
    else:
        codes = nearest(exact, form)
    got = SUITE.run(key, [*rows, old])
    if op.count == 32:
        assert np.array_equal(unpack(got, form.bits, 32), codes)
        return
    width = form.bits * op.count
    padded = np.zeros((64, 32 // form.bits), np.uint8)
    padded[:, : op.count] = codes
    field, mask = (
        pack_words(padded, form.bits)[0],
        np.uint32(((1 << width) - 1) << (op.select * width)),
    )
    assert np.array_equal(got[0], (old & ~mask) | field << np.uint32(op.select * width))


@pytest.mark.parametrize("key", UPS)
def test_from_a_small_format(key: str) -> None:
    """Conversions from a small format are right for every encoding. Four lanes together hold all
    encodings of the widest formats.
    """
    op, rng = UPS[key], np.random.default_rng(len(key))
    form = SMALL[op.small]
    held = 32 if op.count == 32 else 32 // form.bits
    codes = rng.integers(0, 1 << form.bits, (64, held)).astype(np.uint8)
    first = op.select * op.count
    codes[:, first] = (np.arange(64) * ((1 << form.bits) // 64 or 1)) % (1 << form.bits)
    powers, scale = exponents(rng)
    old = rng.integers(0, 2**32, 64, dtype=np.uint32)
    got = SUITE.run(key, [*pack_words(codes, form.bits), scale, old])
    chosen = form.values(codes[:, first : first + op.count])
    with np.errstate(over="ignore"):
        expected = np.ldexp(chosen, powers[:, None]).astype(LARGE[op.large])
    raw = np.ascontiguousarray(got.T).view(LARGE[op.large])
    if op.count == 1 and op.large != "f32":  # the high half; the low one stays
        assert np.array_equal(got[0] & 0xFFFF, old & 0xFFFF)
        raw = raw[:, 1:]
    wide = raw[:, : op.count].astype(np.float64)
    assert np.array_equal(wide, expected.astype(np.float64), equal_nan=True)


@pytest.mark.parametrize("arch", ("gfx942", "gfx950"))
def test_eight_bits_without_a_scale(arch: str) -> None:
    """Conversions to 8-bit floats without a scale are right for zero, numbers of every magnitude,
    and numbers that are too large. gfx942's types have no -0.
    """
    types = (
        (ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz)
        if arch == "gfx942"
        else (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    )
    rng = np.random.default_rng(6)
    values = (np.exp2(rng.uniform(-20, 18, 64)) * rng.choice([-1, 1], 64)).astype(np.float32)
    values[:4] = 0, -0.0, np.nan, np.inf
    got = EIGHT[arch].run("pack", [values.view(np.uint32)])
    for row, dtype in zip(got, types, strict=True):
        low, high = (row & 0xFF).astype(np.uint8), (row >> 8 & 0xFF).astype(np.uint8)
        for codes, wanted in ((low, values), (high, -values)):
            expected = wanted.astype(dtype)
            same = codes == expected.view(np.uint8)
            assert np.all(same | np.isnan(codes.view(dtype)) & np.isnan(expected))


def _floats(*values: float) -> Words:
    return np.resize(np.array(values, np.float32), 64).view(np.uint32)


def test_overflow_by_the_mode() -> None:
    """Values that are too large become NaN in E4M3 and infinity in E5M2, or with the mode bit
    FP16_OVFL the largest number.
    """
    large, negative = _floats(1e6, np.inf, 500, 1e38), _floats(-1e6, -np.inf, -500, -1e38)
    plain = SUITE.run("overflow_fp8", [large, negative])
    assert np.all(plain[0] & 0xFFFF == 0xFF7F)
    assert [int(x) & 0xFFFF for x in plain[1][:2]] == [0xFC7C, 0xFC7C]
    clipped = SUITE.run("saturate_fp8", [large, negative, _floats(0)])
    assert np.all(clipped[0] & 0xFFFF == 0xFE7E)
    assert [int(x) & 0xFFFF for x in clipped[1][:2]] == [0xFB7B, 0xFB7B]


def test_nan_is_converted() -> None:
    """Conversion of NaN and infinity. 4-bit formats have neither and get the largest number of that
    sign. A scale whose bits are all set gives NaN.
    """
    ones = np.full(64, 0x7F800000, np.uint32)
    quiet = np.full(64, 0x7FC00000, np.uint32)
    negative = np.full(64, 0xFFC00000, np.uint32)
    four, eight, wide = SUITE.run("no_numbers", [quiet, negative, _floats(1), ones, _floats(1)])
    assert np.all(four & 0xFF == 0xF7)
    assert np.all(eight & 0x7F7F == 0x7F7F)
    assert np.all(np.isnan(wide.view(np.float32)))


def test_modifiers_of_the_sources() -> None:
    """Conversion with source modifiers: of -3 and |-5|, with the results halved."""
    codes = np.array([-1.5, 2.5], np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint16)[0]
    assert np.all(SUITE.run("modifiers", [_floats(3), _floats(-5)])[0] & 0xFFFF == codes)


@pytest.mark.parametrize(("name", "dtype"), [("sr_f16", np.float16), ("sr_bf16", LARGE["bf16"])])
def test_stochastic_halves(name: str, dtype: type) -> None:
    rng = np.random.default_rng(5)
    values = (np.exp2(rng.uniform(-18, 15, 64)) * rng.choice([-1, 1], 64)).astype(np.float32)
    values[:4] = 0, -0.0, 65500, -65504
    random, old = (rng.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(2))
    expected = np.zeros(64, np.uint32)
    for lane in range(64):
        value = abs(Fraction(float(values[lane])))
        code = int(np.array([abs(values[lane])]).astype(dtype).view(np.uint16)[0])
        if _half(code, dtype) > value:
            code -= 1
        # One step above the largest finite number would be 2**16 in f16.
        above = _half(code + 1, dtype) if code != 0x7BFF or name != "sr_f16" else Fraction(65536)
        rest = (value - _half(code, dtype)) / (above - _half(code, dtype))
        code += int(rest + Fraction(int(random[lane]), 2**32) >= 1)
        expected[lane] = code | (0x8000 if np.signbit(values[lane]) else 0)
    got = SUITE.run(name, [values.view(np.uint32), random, old])[0]
    if name == "sr_f16":
        assert np.array_equal(got, (old & 0xFFFF) | expected << 16)
    else:
        assert np.array_equal(got, (old & 0xFFFF0000) | expected)


def _half(code: int, dtype: type) -> Fraction:
    return Fraction(float(np.array([code], np.uint16).view(dtype)[0]))
