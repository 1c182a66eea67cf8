"""MFMA of CDNA against NumPy, with the operands in AMD's register layouts.

The layouts are from the CDNA3 instruction set document and AMD's matrix instruction calculator. A
lane holds elements of row (of A) or column (of B) ``lane % size`` of block ``lane // size %
blocks``. They are consecutive along K, and the next group of lanes holds the next elements.
Register r of a block holds one element of D in each lane: for 32 x 32 in row 8 * (r // 4) + 4 *
(lane // 32) + r % 4, for 16 x 16 in row 4 * (lane // 16) + r, for 4 x 4 in row r.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from isa_program import Case, Suite, Words
from numpy.typing import NDArray

LANE = np.arange(64)
OUT_VGPR = 100  # first register of D
FNUZ = {"fp8": ml_dtypes.float8_e4m3fnuz, "bf8": ml_dtypes.float8_e5m2fnuz}
OCP = {"fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2}


@dataclass(frozen=True)
class Shape:
    """The shape of an MFMA instruction. D and C are square matrices of ``size`` rows, K is
    ``depth``, and the instruction computes ``blocks`` products.
    """

    name: str
    size: int
    depth: int
    blocks: int
    a: type
    b: type

    @property
    def each(self) -> int:
        """The number of elements of A (or B) in a lane."""
        return self.size * self.depth * self.blocks // 64

    @property
    def results(self) -> int:
        """The number of registers of C, and of D."""
        return self.size * self.size * self.blocks // 64


def _shapes(fp8: dict[str, type]) -> list[Shape]:
    f16, f32, bf16, i8 = np.float16, np.float32, ml_dtypes.bfloat16, np.int8
    plain: list[tuple[str, int, int, int, type]] = [
        ("f32_32x32x1_2b_f32", 32, 1, 2, f32),
        ("f32_16x16x1_4b_f32", 16, 1, 4, f32),
        ("f32_4x4x1_16b_f32", 4, 1, 16, f32),
        ("f32_32x32x2_f32", 32, 2, 1, f32),
        ("f32_16x16x4_f32", 16, 4, 1, f32),
        ("f32_32x32x4_2b_f16", 32, 4, 2, f16),
        ("f32_16x16x4_4b_f16", 16, 4, 4, f16),
        ("f32_4x4x4_16b_f16", 4, 4, 16, f16),
        ("f32_32x32x8_f16", 32, 8, 1, f16),
        ("f32_16x16x16_f16", 16, 16, 1, f16),
        ("f32_32x32x4_2b_bf16", 32, 4, 2, bf16),
        ("f32_16x16x4_4b_bf16", 16, 4, 4, bf16),
        ("f32_4x4x4_16b_bf16", 4, 4, 16, bf16),
        ("f32_32x32x8_bf16", 32, 8, 1, bf16),
        ("f32_16x16x16_bf16", 16, 16, 1, bf16),
        ("i32_32x32x4_2b_i8", 32, 4, 2, i8),
        ("i32_16x16x4_4b_i8", 16, 4, 4, i8),
        ("i32_4x4x4_16b_i8", 4, 4, 16, i8),
        ("i32_32x32x16_i8", 32, 16, 1, i8),
        ("i32_16x16x32_i8", 16, 32, 1, i8),
    ]
    mixed = [
        Shape(f"f32_{size}x{size}x{depth}_{x}_{y}", size, depth, 1, fp8[x], fp8[y])
        for size, depth in ((16, 32), (32, 16))
        for x in fp8
        for y in fp8
    ]
    return [Shape(name, *rest, dtype, dtype) for name, *rest, dtype in plain] + mixed


GFX942 = _shapes(FNUZ)
GFX950 = [
    *_shapes(OCP),
    Shape("f32_16x16x32_f16", 16, 32, 1, np.float16, np.float16),
    Shape("f32_32x32x16_f16", 32, 16, 1, np.float16, np.float16),
    Shape("f32_16x16x32_bf16", 16, 32, 1, ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    Shape("f32_32x32x16_bf16", 32, 16, 1, ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    Shape("i32_16x16x64_i8", 16, 64, 1, np.int8, np.int8),
    Shape("i32_32x32x32_i8", 32, 32, 1, np.int8, np.int8),
]
GFX90A = [
    Shape("f32_32x32x2bf16", 32, 2, 2, ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    Shape("f32_16x16x8bf16", 16, 8, 1, ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    Shape("f32_32x32x8bf16_1k", 32, 8, 1, ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    Shape("f32_16x16x16f16", 16, 16, 1, np.float16, np.float16),
    Shape("f32_32x32x2f32", 32, 2, 1, np.float32, np.float32),
    Shape("i32_32x32x8i8", 32, 8, 1, np.int8, np.int8),
    Shape("i32_16x16x16i8", 16, 16, 1, np.int8, np.int8),
]
SHAPES = {"gfx942": GFX942, "gfx950": GFX950, "gfx90a": GFX90A}
ALL = [(arch, shape) for arch, shapes in SHAPES.items() for shape in shapes]


def _words(shape: Shape, dtype: type) -> int:
    return max(1, shape.each * np.dtype(dtype).itemsize // 4)


def _register(base: int, count: int, file: str = "v") -> str:
    return f"{file}{base}" if count == 1 else f"{file}[{base}:{base + count - 1}]"


def _move(case_inputs: int, target: int, count: int) -> list[str]:
    return [f"v_mov_b32 v{target + k}, v{10 + case_inputs + k}" for k in range(count)]


def _case(shape: Shape, tail: str = "", agpr: bool = False) -> Case:
    """The case of a matrix product whose inputs A, B and C are moved to aligned registers, and
    whose result D overwrites C.
    """
    a, b, c = _words(shape, shape.a), _words(shape, shape.b), shape.results
    lines = _move(0, 80, a) + _move(a, 88, b) + _move(a + b, OUT_VGPR, c)
    file = "v"
    if agpr:
        lines += [f"v_accvgpr_write_b32 a{k}, v{OUT_VGPR + k}" for k in range(c)]
        file = "a"
    d = _register(0 if agpr else OUT_VGPR, c, file)
    sources = f"{_register(80, a)}, {_register(88, b)}"
    lines.append(f"v_mfma_{shape.name} {d}, {sources}, {d}{tail}")
    lines.append("s_nop 15\ns_nop 3")
    if agpr:
        lines += [f"v_accvgpr_read_b32 v{OUT_VGPR + k}, a{k}" for k in range(c)]
    return Case("\n".join(lines), a + b + c, c, OUT_VGPR)


def _upward(shape: Shape) -> Case:
    """The case of a product under a MODE that rounds up and flushes denormals."""
    plain = _case(shape)
    mode = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 8), 0x5\n"
    return Case(mode + plain.body, plain.inputs, plain.outputs, OUT_VGPR)


def _apart(shape: Shape, offset: int) -> Case:
    """The case of a product whose C begins `offset` registers after D and overlaps it."""
    a, b, c = _words(shape, shape.a), _words(shape, shape.b), shape.results
    lines = _move(0, 80, a) + _move(a, 88, b) + _move(a + b, OUT_VGPR + offset, c)
    sources = ", ".join(_register(*at) for at in ((80, a), (88, b), (OUT_VGPR + offset, c)))
    lines.append(f"v_mfma_{shape.name} {_register(OUT_VGPR, c)}, {sources}\ns_nop 15\ns_nop 3")
    return Case("\n".join(lines), a + b + c, c, OUT_VGPR)


FOUR = Shape("f32_16x16x4_4b_f16", 16, 4, 4, np.float16, np.float16)
HALVES = Shape("f32_16x16x16_f16", 16, 16, 1, np.float16, np.float16)
FLOATS = Shape("f32_16x16x4_f32", 16, 4, 1, np.float32, np.float32)
EXTRA = {
    "mode_halves": _upward(HALVES),
    "mode_floats": _upward(FLOATS),
    "broadcast": _case(FOUR, " cbsz:2 abid:1"),
    "rotate": _case(FOUR, " blgp:3"),
    "in_agprs": _case(FOUR, agpr=True),
    "c_before_d": _apart(HALVES, -2),
    "c_behind_d": _apart(HALVES, 2),
    "f64_16": Case(
        "v_mov_b32 v80, v10\nv_mov_b32 v81, v11\nv_mov_b32 v82, v12\nv_mov_b32 v83, v13\n"
        + "\n".join(f"v_mov_b32 v{40 + k}, v{14 + k}" for k in range(8))
        + "\nv_mfma_f64_16x16x4_f64 v[40:47], v[80:81], v[82:83], v[40:47]\ns_nop 15",
        12,
        8,
    ),
    "f64_4": Case(
        "v_mov_b32 v80, v10\nv_mov_b32 v81, v11\nv_mov_b32 v82, v12\nv_mov_b32 v83, v13\n"
        "v_mov_b32 v40, v14\nv_mov_b32 v41, v15\n"
        "v_mfma_f64_4x4x4_4b_f64 v[40:41], v[80:81], v[82:83], v[40:41] neg:[1,0,0]\ns_nop 15",
        6,
        2,
    ),
}


@cache
def suite(arch: str) -> Suite:
    cases = {shape.name: _case(shape) for shape in SHAPES[arch]}
    return Suite(arch, {**cases, **(EXTRA if arch == "gfx942" else {})})


def pack_words(shape: Shape, lines: NDArray) -> list[Words]:
    """Packs A (block, row, k) or B (block, column, k) into the words of the registers that
    hold it.
    """
    line, block = LANE % shape.size, LANE // shape.size % shape.blocks
    first = LANE // shape.size // shape.blocks * shape.each
    values = lines[block[:, None], line[:, None], first[:, None] + np.arange(shape.each)]
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(64, -1)
    return list(np.ascontiguousarray(raw).view(np.uint32).T)


def places(shape: Shape) -> tuple[NDArray, NDArray, NDArray]:
    """Returns the block, row and column of the element of D that each register of each lane
    holds.
    """
    r, lane = np.arange(shape.results)[:, None], LANE[None, :]
    if shape.size == 32:
        r, block = r % 16, r // 16
        row, column = 8 * (r // 4) + 4 * (lane // 32) + r % 4, lane % 32
    elif shape.size == 16:
        r, block = r % 4, r // 4
        row, column = 4 * (lane // 16) + r, lane % 16
    else:
        block, row, column = lane // 4, r, lane % 4
    full = (shape.results, 64)
    return tuple(np.broadcast_to(x, full) for x in (block, row, column))  # type: ignore[return-value]


def operands(shape: Shape, seed: int) -> tuple[NDArray, NDArray, NDArray]:
    """Returns random matrices A (block, row, k), B (block, column, k) and C (block, row,
    column).
    """
    rng = np.random.default_rng(seed)
    form = (shape.blocks, shape.size, shape.depth)
    square = (shape.blocks, shape.size, shape.size)
    if shape.a is np.int8:
        a, b = (rng.integers(-128, 128, form).astype(np.int8) for _ in range(2))
        return a, b, rng.integers(-1000, 1000, square).astype(np.int32)
    a, b = (rng.uniform(-2, 2, form).astype(t) for t in (shape.a, shape.b))
    return a, b, rng.uniform(-2, 2, square).astype(np.float32)


def run(arch: str, name: str, shape: Shape, a: NDArray, b: NDArray, c: NDArray) -> NDArray:
    where = places(shape)
    rows = [
        *pack_words(shape, a),
        *pack_words(shape, b),
        *np.ascontiguousarray(c[where]).view(np.uint32),
    ]
    registers = suite(arch).run(name, rows).view(c.dtype)
    d = np.zeros_like(c)
    d[where] = registers
    return d


def close(got: NDArray, a: NDArray, b: NDArray, c: NDArray) -> None:
    wide = np.int64 if c.dtype == np.int32 else np.float64
    exact = np.einsum("nik,njk->nij", a.astype(wide), b.astype(wide)) + c
    if c.dtype == np.int32:
        assert np.array_equal(got, exact)
    else:
        assert np.abs(got - exact).max() <= 2**-20 * np.abs(exact).max()


@pytest.mark.parametrize(("arch", "shape"), ALL, ids=[f"{a}-{s.name}" for a, s in ALL])
def test_product(arch: str, shape: Shape) -> None:
    a, b, c = operands(shape, 1)
    close(run(arch, shape.name, shape, a, b, c), a, b, c)


def _integers(shape: Shape, seed: int, unit: int) -> tuple[NDArray, NDArray, NDArray]:
    """Returns integers A and B of as many bits as the types represent, at most 12, times
    2 ** `unit`, and C: some fractions of the unit of A * B, some zeros, denormals and infinities.
    """
    rng = np.random.default_rng(seed)
    a, b, c = operands(shape, seed)
    scaled = []
    for x in (a, b):
        largest = 2 ** min(ml_dtypes.finfo(x.dtype).nmant + 1, 12) - 1
        signs = rng.choice([1, 1, 1, -1], (shape.blocks, shape.size, 1))
        values = signs * rng.integers(largest // 2, largest + 1, x.shape) * 2.0**unit
        values[:, rng.integers(shape.size), rng.integers(shape.depth)] *= 0
        scaled.append(values.astype(x.dtype))
    c = (c * rng.choice([0.25, 1e3, 1e6], c.shape) * 2.0 ** (2 * unit)).astype(np.float32)
    c[rng.random(c.shape) < 0.1] = -0.0
    c[rng.random(c.shape) < 0.1] = 3e-45
    c[rng.random(c.shape) < 0.1] = -np.inf
    return scaled[0], scaled[1], c


@pytest.mark.parametrize(("arch", "shape"), ALL, ids=[f"{a}-{s.name}" for a, s in ALL])
def test_product_of_integers(arch: str, shape: Shape) -> None:
    """Every sum of products of small integers is exact, so that only the sum with C rounds. The
    emulator computes these sums as integers.
    """
    if shape.a is np.int8:
        pytest.skip("test_product multiplies integers of 8 bits")
    narrow = ml_dtypes.finfo(shape.a).maxexp < 100 or ml_dtypes.finfo(shape.b).maxexp < 100
    for seed, unit in enumerate((0, -3) if narrow else (0, -40, -80, 50)):
        a, b, c = _integers(shape, seed, unit)
        if arch == "gfx90a" and shape.a is not np.float32:
            c[abs(c) < 1e-37] = 0  # its matrix units flush denormals
            if unit == -80:
                continue
        exact = np.einsum("nik,njk->nij", a.astype(np.float64), b.astype(np.float64))
        with np.errstate(over="ignore"):
            expected = (exact + c).astype(np.float32)
        np.testing.assert_array_equal(run(arch, shape.name, shape, a, b, c), expected)


def test_accumulator_registers() -> None:
    a, b, c = operands(FOUR, 2)
    close(run("gfx942", "in_agprs", FOUR, a, b, c), a, b, c)


@pytest.mark.parametrize("name", ["c_before_d", "c_behind_d"])
def test_c_overlaps_d(name: str) -> None:
    """A product whose C overlaps D by some registers, as compilers allocate registers for products
    with four registers of sums.
    """
    a, b, c = operands(HALVES, 2)
    close(run("gfx942", name, HALVES, a, b, c), a, b, c)


def test_one_block_of_a_serves_all() -> None:
    """The modifiers cbsz:2 abid:1: block 1 of A in each group of four is multiplied by all blocks
    of B.
    """
    a, b, c = operands(FOUR, 3)
    close(run("gfx942", "broadcast", FOUR, a, b, c), a[[1, 1, 1, 1]], b, c)


def test_lanes_of_b_rotate() -> None:
    """The modifier blgp:3: each group of 16 lanes uses B of the next group."""
    a, b, c = operands(FOUR, 4)
    close(run("gfx942", "rotate", FOUR, a, b, c), a, np.roll(b, -1, axis=0), c)


def test_mode_decides_about_denormals_of_f32_only() -> None:
    """MODE does not change the rounding of a matrix product, which is to nearest, and denormals of
    C and D are kept.
    """
    a, b, c = operands(HALVES, 5)
    a[0, 3], c[0, 3] = 0, 1e-40
    exact = np.einsum("nik,njk->nij", a.astype(np.float64), b.astype(np.float64)) + c
    assert np.array_equal(run("gfx942", "mode_halves", HALVES, a, b, c), exact.astype(np.float32))
    a, b, c = operands(FLOATS, 6)
    a[0, 3], b[0, :] = 1e-39, 2.0**127
    got, plain = (
        run("gfx942", name, FLOATS, a, b, c) for name in ("mode_floats", "f32_16x16x4_f32")
    )
    assert np.array_equal(got[0, 3], c[0, 3]) and not np.any(plain[0, 3] == c[0, 3])


@pytest.mark.parametrize("shape", [s for s in GFX90A if "f16" in s.name], ids=lambda s: s.name)
@pytest.mark.parametrize("place", ["a", "b", "c", "d"])
def test_mi200_flushes_denormals(shape: Shape, place: str) -> None:
    """Matrix products on MI200 flush denormals of f16 and bf16 in A, B, C and D. MIOpen's
    documentation states this for MI200 only.
    """
    a, b, c = (np.zeros_like(x) for x in operands(shape, 7))
    a[:, 3, 0], b[:, 5, 0] = 1, 1
    assert np.all(run("gfx90a", shape.name, shape, a, b, c)[:, 3, 5] == 1)
    small = ml_dtypes.finfo(shape.a).smallest_normal
    if place == "a":
        a[:, 3, 0] = small / 2
    elif place == "b":
        b[:, 5, 0] = small / 2
    elif place == "c":
        a[:, 3, 0], c[:, 3, 5] = 0, 1e-40
    elif shape.a is np.float16:
        pytest.skip("no sum of products of normal f16 is a denormal f32")
    else:
        a[:, 3, 0], b[:, 5, 0] = 2.0**-70, 2.0**-70
    assert not run("gfx90a", shape.name, shape, a, b, c).any()


def test_other_cdna_keeps_denormals() -> None:
    shape = HALVES
    a, b, c = (np.zeros_like(x) for x in operands(shape, 7))
    a[0, 3, 0], b[0, 5, 0] = np.finfo(np.float16).smallest_subnormal, 1
    got = run("gfx942", shape.name, shape, a, b, c)
    assert got[0, 3, 5] == 2.0**-24


def _doubles(values: NDArray[np.float64]) -> list[Words]:
    raw = np.ascontiguousarray(values).view(np.uint32).reshape(64, -1)
    return list(np.ascontiguousarray(raw.T))


@pytest.mark.parametrize(
    ("name", "size", "place"),
    [
        ("f64_16", 16, lambda r, lane: (lane * 0, 4 * r + lane // 16, lane % 16)),
        ("f64_4", 4, lambda r, lane: (lane // 4 % 4, lane // 16 + 0 * r, lane % 4)),
    ],
)
def test_doubles(name: str, size: int, place: Callable[..., tuple[NDArray, ...]]) -> None:
    """Matrix products of doubles. A lane holds the elements of one index of k: lane // 16. The
    instruction for 4 x 4 blocks has a neg modifier, which negates A here.
    """
    rng = np.random.default_rng(6)
    blocks, registers = (1, 4) if size == 16 else (4, 1)
    a, b = (rng.uniform(-2, 2, (blocks, size, 4)) for _ in range(2))
    c = rng.uniform(-2, 2, (blocks, size, size))
    line, block, k = LANE % size, LANE // size % blocks, LANE // 16
    where = place(np.arange(registers)[:, None], LANE[None, :])
    where = tuple(np.broadcast_to(x, (registers, 64)) for x in where)
    rows = [*_doubles(a[block, line, k]), *_doubles(b[block, line, k]), *_doubles(c[where].T)]
    out = suite("gfx942").run(name, rows)
    got = np.ascontiguousarray(out.T).view(np.float64).T
    d = np.zeros_like(c)
    d[where] = got
    sign = 1 if size == 16 else -1
    exact = np.einsum("nik,njk->nij", sign * a, b) + c
    assert np.abs(d - exact).max() < 1e-14
