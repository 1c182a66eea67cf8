"""SMFMAC of gfx942 and gfx950 against NumPy's product of the full matrices.

The layouts are from AMD's CDNA3 and CDNA4 instruction set documents, section "Sparse matrices". Of
every four elements of A along K only two are stored, and a 2-bit index for each says which of the
four it is. B is stored in runs of 16 bytes along K, which the groups of lanes hold in turn. If a
register holds several sets of indices, the modifiers cbsz and abid select one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from isa_matrix import LANE, places, product_case, span
from isa_program import Case, Suite, Words
from numpy.typing import NDArray

OUT, A, B, INDEX = 112, 80, 88, 96
PAIRS = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])


@dataclass(frozen=True)
class Shape:
    name: str
    size: int
    depth: int
    a: type
    b: type

    @property
    def bits(self) -> int:
        return 8 * np.dtype(self.b).itemsize

    @property
    def dense(self) -> int:
        """The number of elements of B in a lane; A stores half as many."""
        return self.size * self.depth // 64

    @property
    def result(self) -> type:
        return np.int32 if self.a is np.int8 else np.float32

    def depths(self) -> NDArray[np.int64]:
        """Returns, for each lane and element of its registers of B, the element's index along K."""
        run, groups = 128 // self.bits, 64 // self.size
        group, element = (LANE // self.size)[:, None], np.arange(self.dense)[None, :]
        return element // run * run * groups + run * group + element % run


def _shapes(deep: int, fp8: type, bf8: type) -> list[Shape]:
    """Returns the sparse products of an architecture: gfx942's shapes for deep = 1, otherwise those
    with twice the depth.
    """
    f16, bf16, i8 = np.float16, ml_dtypes.bfloat16, np.int8
    shapes = []
    for size, depth in ((16, 32 * deep), (32, 16 * deep)):
        halves = f"{size}x{size}x{depth}"
        bytes_ = f"{size}x{size}x{2 * depth}"
        shapes += [Shape(f"f32_{halves}_f16", size, depth, f16, f16)]
        shapes += [Shape(f"f32_{halves}_bf16", size, depth, bf16, bf16)]
        shapes += [Shape(f"i32_{bytes_}_i8", size, 2 * depth, i8, i8)]
        eight = {"fp8": fp8, "bf8": bf8}
        shapes += [
            Shape(f"f32_{bytes_}_{x}_{y}", size, 2 * depth, eight[x], eight[y])
            for x in eight
            for y in eight
        ]
    return shapes


OCP = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
SHAPES = {
    "gfx942": _shapes(1, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz),
    "gfx950": _shapes(1, *OCP) + _shapes(2, *OCP),
}
ALL = [(arch, shape) for arch, shapes in SHAPES.items() for shape in shapes]
# Instructions with several index sets in a register: (architecture, name, modifiers, the selected
# set).
SETS = [
    ("gfx942", "f32_16x16x32_f16", " abid:3", 3),
    ("gfx942", "f32_32x32x16_bf16", " abid:1", 1),
    ("gfx942", "f32_32x32x16_bf16", " cbsz:1 abid:1", 0),
    ("gfx942", "f32_16x16x64_fp8_bf8", " abid:1", 1),
    ("gfx950", "f32_16x16x64_f16", " abid:1", 1),
]


def _case(shape: Shape, tail: str = "", file: str = "v") -> Case:
    words = shape.dense * shape.bits // 32
    sources = [(A, words // 2), (B, words), (INDEX, 1)]
    texts = ", ".join(span(*source) for source in sources)
    return product_case(
        sources,
        (OUT, shape.size * shape.size // 64),
        lambda d: f"v_smfmac_{shape.name} {d}, {texts}{tail}",
        file,
    )


def _named(arch: str, name: str) -> Shape:
    return next(shape for shape in SHAPES[arch] if shape.name == name)


@cache
def suite(arch: str) -> Suite:
    cases = {shape.name: _case(shape) for shape in SHAPES[arch]}
    for number, (of, name, tail, _) in enumerate(SETS):
        if of == arch:
            cases[f"set{number}"] = _case(_named(arch, name), tail)
    first = SHAPES[arch][0]
    return Suite(arch, {**cases, "agpr": _case(first, "", "a")})


def _registers(values: NDArray) -> list[Words]:
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(64, -1)
    return list(np.ascontiguousarray(raw).view(np.uint32).T)


def _values(rng: np.random.Generator, dtype: type, shape: tuple[int, ...]) -> NDArray:
    if dtype is np.int8:
        return rng.integers(-128, 128, shape).astype(np.int8)
    return rng.uniform(-2, 2, shape).astype(dtype)


def check(arch: str, name: str, shape: Shape, seed: int, chosen_set: int = 0) -> None:
    rng = np.random.default_rng(seed)
    quads, stored = shape.depth // 4, shape.dense // 2
    pairs = PAIRS[rng.integers(0, len(PAIRS), (shape.size, quads))]  # (row, four, which two)
    values = _values(rng, shape.a, (shape.size, quads, 2))
    b = _values(rng, shape.b, (shape.size, shape.depth))
    full = np.zeros((shape.size, quads, 4), np.float64)
    np.put_along_axis(full, pairs, values.astype(np.float64), axis=2)
    exact = full.reshape(shape.size, -1) @ b.astype(np.float64).T
    c = rng.uniform(-900, 900, exact.shape).astype(shape.result)
    # The numbers of the groups of four elements along K that a lane holds, in the order of its
    # registers.
    fours = shape.depths()[:, ::4] // 4
    row = (LANE % shape.size)[:, None]
    bits = pairs[row, fours].reshape(64, stored).astype(np.uint64)
    word = (bits << np.arange(0, 2 * stored, 2, dtype=np.uint64)).sum(axis=1).astype(np.uint64)
    index = rng.integers(0, 2**32, 64, dtype=np.uint64)  # what the other sets hold does not count
    place, mask = 2 * stored * chosen_set, (1 << (2 * stored)) - 1
    index = index & np.uint64(0xFFFFFFFF & ~(mask << place)) | word << np.uint64(place)
    where = places(shape.size)
    rows = _registers(values[row, fours].reshape(64, stored))
    rows += _registers(b[row, shape.depths()])
    rows += [index.astype(np.uint32), *np.ascontiguousarray(c[where]).view(np.uint32)]
    d = np.zeros_like(c)
    d[where] = suite(arch).run(name, rows).view(shape.result)
    if shape.result is np.int32:
        assert np.array_equal(d, exact.astype(np.int64) + c)
    else:
        assert np.abs(d - (exact + c)).max() <= 2**-20 * np.abs(exact + c).max()


@pytest.mark.parametrize(("arch", "shape"), ALL, ids=[f"{a}-{s.name}" for a, s in ALL])
def test_product(arch: str, shape: Shape) -> None:
    check(arch, shape.name, shape, 1)


@pytest.mark.parametrize("number", range(len(SETS)))
def test_index_sets(number: int) -> None:
    arch, name, _, chosen = SETS[number]
    check(arch, f"set{number}", _named(arch, name), 2, chosen)


@pytest.mark.parametrize("arch", SHAPES)
def test_accumulator_registers(arch: str) -> None:
    """A sparse product with D in accumulation registers; the indices stay in ordinary vector
    registers.
    """
    check(arch, "agpr", SHAPES[arch][0], 3)


def test_unselected_elements_of_b_do_not_count() -> None:
    """An infinity in B at an index of k that A does not store is not multiplied."""
    shape = _named("gfx942", "f32_16x16x32_f16")
    values, b = np.ones((64, 4), np.float16), np.full((64, 8), np.inf, np.float16)
    b[:, [0, 3, 4, 7]] = 1
    index = np.full(64, 0b11001100, np.uint32)  # 0 and 3 of every four
    rows = [*_registers(values), *_registers(b), index, *np.zeros((4, 64), np.uint32)]
    assert np.all(suite("gfx942").run(shape.name, rows).view(np.float32) == 16)
