"""The AMD matmul bodies, executed on the emulator and compared with NumPy in double precision."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator

import numpy as np
import pytest
from ark_rocm import backend

from ark.ir.dtype import DataType, bf16, fp8_e4m3, fp8_e5m2, fp16, fp32, int8, int32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.slow import in_turns

emulator = pytest.importorskip("ark_rocm_emulator")

pytestmark = pytest.mark.emulated("slow")

# The products: (batch, rows of a, columns of b, k, transposes, types of a, b and the result).
CASES = [
    ((), 128, 128, 64, (False, True), (bf16, bf16, bf16)),
    ((), 137, 45, 260, (True, False), (fp16, fp16, fp32)),
    ((), 37, 45, 51, (False, False), (fp16, fp16, fp16)),
    ((), 64, 200, 96, (False, False), (bf16, bf16, fp32)),
    ((), 9, 33, 40, (True, True), (bf16, bf16, fp16)),
    # The blocks of this product do not divide evenly among waves. In its loop with bounds checks
    # clang once omitted a wait state.
    ((), 65, 35, 43, (False, False), (bf16, bf16, bf16)),
    ((3,), 130, 70, 33, (False, True), (fp16, fp16, bf16)),
    ((), 16, 96, 256, (False, True), (fp32, bf16, fp32)),
    ((2,), 130, 70, 45, (True, False), (fp32, bf16, fp32)),
    # 8-bit floats, multiplied in pairs along k or converted to bf16.
    ((), 20, 24, 64, (False, True), (fp8_e4m3, fp8_e5m2, fp32)),
    ((), 70, 45, 130, (False, True), (fp8_e4m3, fp8_e4m3, fp32)),
    ((), 128, 128, 256, (False, True), (fp8_e4m3, fp8_e4m3, bf16)),
    ((2,), 33, 40, 51, (False, True), (fp8_e4m3, fp8_e4m3, fp32)),
    ((), 24, 40, 96, (True, False), (fp8_e5m2, fp8_e5m2, fp16)),
    # Bodies without matrix units: products of pairs along k, and of integers.
    ((), 1, 128, 256, (False, True), (bf16, bf16, bf16)),
    ((), 2, 24, 64, (False, True), (int8, int8, int32)),
]
ARCHS = ("gfx942", "gfx1100", "gfx90a", "gfx950")
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-23, "int32": 0.0}


@pytest.fixture(scope="module")
def arch(request: pytest.FixtureRequest) -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(emulator.emulated(request.param))
        yield request.param


def values(shape: tuple[int, ...], dtype: DataType, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype.to_numpy())


# The products: (rows of a, columns of b, k, transposes, types, tile). Some have an incomplete last
# tile of rows and of columns. Odd sizes, a k that is not a multiple of a loop step, and rows not
# aligned to 16 bytes take the loop with bounds checks. The numbers of loop steps over k are one,
# even and odd; no data past the last step is loaded.
LARGE = [
    (512, 256, 128, (False, True), (bf16, bf16, bf16), (256, 256)),
    (260, 300, 96, (False, False), (fp16, fp16, fp32), (256, 256)),
    (300, 262, 96, (True, False), (bf16, bf16, fp32), (256, 256)),
    (308, 268, 96, (True, False), (bf16, bf16, fp32), (256, 256)),
    (140, 308, 64, (True, False), (bf16, bf16, bf16), (128, 256)),
    (257, 259, 64, (True, True), (fp16, fp16, fp16), (256, 256)),
    (300, 140, 64, (True, True), (bf16, bf16, fp32), (256, 128)),
    (130, 300, 70, (False, True), (bf16, bf16, bf16), (128, 256)),
    (200, 130, 160, (False, False), (fp16, fp16, fp32), (128, 128)),
    (304, 140, 32, (True, False), (bf16, bf16, fp32), (256, 128)),
    (256, 256, 224, (False, True), (bf16, bf16, fp32), (256, 128)),
    (128, 256, 192, (False, False), (bf16, bf16, fp32), (128, 128)),
    (128, 512, 288, (True, True), (bf16, bf16, fp32), (128, 256)),
]


@pytest.mark.parametrize("arch", ARCHS, indirect=True)
def test_fp16_keeps_denormals_and_infinities(arch: str) -> None:
    x = values((32, 64), fp16, 3) * np.float16(2.0**-16)  # most are below 2^-14
    y = values((32, 64), fp16, 4) * np.float16(2.0**6)
    exact = x.astype(np.float64) @ y.astype(np.float64).T
    result = product(x, y)
    assert (np.abs(x) < 2.0**-14).mean() > 0.9
    assert np.abs(result - exact).max() <= 2.0**-20 * np.abs(exact).max()
    x[3, 5], x[4, 6], y[7, 5] = np.inf, np.nan, np.float16(2.0**-24)
    with np.errstate(invalid="ignore"):
        exact = x.astype(np.float64) @ y.astype(np.float64).T
    result = product(x, y)
    assert (np.isnan(result) == np.isnan(exact)).all() and (
        np.isinf(result) == np.isinf(exact)
    ).all()
    assert np.isinf(result[3]).all() and np.isnan(result[4]).all()


@pytest.mark.parametrize(
    ("arch", "left", "right"),
    in_turns(
        ("gfx950", "gfx942", "gfx90a", "gfx1100"),
        [(fp8_e4m3, fp8_e4m3), (fp8_e5m2, fp8_e5m2), (fp8_e5m2, fp8_e4m3)],
    ),
    indirect=["arch"],
)
def test_floats_of_8_bits_keep_every_value(arch: str, left: DataType, right: DataType) -> None:
    """Products of 8-bit floats keep all 256 values of either operand, among them subnormals, both
    zeros, infinities and NaN.
    """
    for side in (0, 1):
        types = (left, right) if side == 0 else (right, left)
        x = np.zeros((256, 128), types[0].to_numpy())
        x[np.arange(256), np.arange(256) % 128] = np.arange(256, dtype=np.uint8).view(x.dtype)
        y = np.ones((16, 128), types[1].to_numpy())
        got = product(x, y, types) if side == 0 else product(y, x, types[::-1]).T
        exact = np.arange(256, dtype=np.uint8).view(x.dtype).astype(np.float64)
        np.testing.assert_array_equal(got, np.repeat(exact[:, None], 16, 1))


def product(
    x: np.ndarray, y: np.ndarray, types: tuple[DataType, DataType] = (fp16, fp16)
) -> np.ndarray:
    """Returns x y^T of these types, in fp32, from the device."""
    graph = Graph()
    a = graph.tensor(x.shape, types[0], arena="state", name="a")
    b = graph.tensor(y.shape, types[1], arena="state", name="b")
    c = graph.tensor((len(x), len(y)), fp32, name="c")
    graph.add("matmul", [a, b], [c], {"transpose_a": False, "transpose_b": True}, "product")
    with contextlib.closing(backend.open(0)) as device:
        planned = plan(graph, device.machine, {"fuse": False})
        with Executor(planned, backend, device) as executor:
            executor.write("a", x)
            executor.write("b", y)
            executor.start(1).wait(60)
            return executor.read("c").astype(np.float64)


@pytest.mark.parametrize(
    ("arch", "m", "n", "k", "transposes", "dtypes", "tile"),
    in_turns(("gfx950", "gfx942", "gfx90a"), LARGE, count=7),  # large tiles need MFMA
    indirect=["arch"],
)
def test_large_tiles(
    arch: str,
    m: int,
    n: int,
    k: int,
    transposes: tuple[bool, bool],
    dtypes: tuple[DataType, DataType, DataType],
    tile: tuple[int, int],
) -> None:
    if arch == "gfx90a" and fp16 in dtypes[:2]:
        pytest.skip("fp16 is split into bf16 there, in the loop for small tiles")
    source = multiply(arch, (), m, n, k, transposes, dtypes, tile)
    assert f"ark_large_tile<{tile[0]}, {tile[1]}," in source


@pytest.mark.parametrize(
    ("arch", "batch", "m", "n", "k", "transposes", "dtypes"),
    in_turns(ARCHS, CASES),
    indirect=["arch"],
)
def test_matmul(
    arch: str,
    batch: tuple[int, ...],
    m: int,
    n: int,
    k: int,
    transposes: tuple[bool, bool],
    dtypes: tuple[DataType, DataType, DataType],
) -> None:
    source = multiply(arch, batch, m, n, k, transposes, dtypes)
    units = m > 8 and dtypes[0] is not int8
    assert (re.search(r"ark_(matrix|large|pairs)_tile<\d", source) is not None) == units
    sides = {dtypes[0].name, dtypes[1].name}
    native = {"gfx942": {"fp8_e4m3"}, "gfx950": {"fp8_e4m3", "fp8_e5m2"}}.get(arch, set())
    pairs = sides <= native and transposes == (False, True) and k % 2 == 0
    assert ("ark_pairs_tile<" in source.partition("task_0")[2]) == pairs


def multiply(
    arch: str,
    batch: tuple[int, ...],
    m: int,
    n: int,
    k: int,
    transposes: tuple[bool, bool],
    dtypes: tuple[DataType, DataType, DataType],
    tile: tuple[int, int] | None = None,
) -> str:
    """Runs a product, with the given tile if there is one, and compares it. Returns its source."""
    ta, tb = transposes
    graph = Graph()
    a = graph.tensor((*batch, *((k, m) if ta else (m, k))), dtypes[0], arena="state", name="a")
    b = graph.tensor((*batch, *((n, k) if tb else (k, n))), dtypes[1], arena="state", name="b")
    c = graph.tensor((*batch, m, n), dtypes[2], name="c")
    graph.add("matmul", [a, b], [c], {"transpose_a": ta, "transpose_b": tb}, "product")
    x, y = values(a.shape, dtypes[0], 1), values(b.shape, dtypes[1], 2)
    device = backend.open(0)
    with contextlib.closing(device):
        machine = device.machine
        if tile:
            large = ((*tile, 1.0),)
            machine = dataclasses.replace(machine, tile=tile, large_tiles=large, processors=2)
        planned = plan(graph, machine, {"fuse": False})
        verify([planned])
        with Executor(planned, backend, device) as executor:
            source = executor.program.emitted.source.text
            executor.write("a", x)
            executor.write("b", y)
            executor.start(1).wait(60)
            results = executor.read("c").astype(np.float64)
    left, right = x.astype(np.float64), y.astype(np.float64)
    left = left.swapaxes(-1, -2) if ta else left
    right = right.swapaxes(-1, -2) if tb else right
    exact, scale = left @ right, np.sqrt(left**2 @ right**2)
    # The rounding of the result, and of the steps of fp32 sums.
    bound = ROUNDING[dtypes[2].name] * np.abs(exact) + 2.0**-22 * np.sqrt(k) * scale
    assert (np.abs(results - exact) <= bound).all()
    return source
