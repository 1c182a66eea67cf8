"""Products with k split into parts on AMD's matrix units, executed on the emulator with its checks
and compared with NumPy in double precision: the loops of all tiles, a shorter last part, and the
same bits in every run.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from ark_rocm import backend

from ark.ir.dtype import DataType, bf16, fp16, fp32
from ark.ir.graph import Graph
from ark.lower.cuts import key
from ark.lower.pipeline import plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.slow import in_turns

emulator = pytest.importorskip("ark_rocm_emulator")

pytestmark = pytest.mark.emulated("slow")

ARCHS = ("gfx942", "gfx1100", "gfx90a", "gfx950")
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-23}
# The products: (rows of a, columns of b, k, transposes, types of a, b and the result, rows and
# columns of a tile and parts of k).
CASES = [
    (64, 128, 512, (False, True), (bf16, bf16, bf16), (64, 128, 4)),
    (40, 96, 200, (False, False), (fp16, fp16, fp32), (40, 48, 2)),
    (64, 70, 328, (True, False), (bf16, bf16, fp32), (64, 48, 3)),
    (48, 128, 260, (False, True), (fp32, bf16, fp32), (48, 32, 3)),
]
# These cases take the loop for large tiles, with incomplete last tiles, a last part of k that is
# not a multiple of a loop step, and operands whose k is contiguous.
LARGE = [
    (100, 256, 512, (False, True), (bf16, bf16, fp32), (100, 128, 3)),
    (200, 130, 328, (False, False), (bf16, bf16, bf16), (200, 128, 3)),
    (128, 256, 328, (True, True), (bf16, bf16, fp32), (128, 256, 3)),
    (256, 128, 256, (True, False), (bf16, bf16, bf16), (256, 128, 2)),
]


@pytest.mark.parametrize(
    ("arch", "m", "n", "k", "transposes", "dtypes", "cut"),
    in_turns(ARCHS, CASES),
    indirect=["arch"],
)
def test_parts_of_k(
    arch: str,
    m: int,
    n: int,
    k: int,
    transposes: tuple[bool, bool],
    dtypes: tuple[DataType, DataType, DataType],
    cut: tuple[int, int, int],
) -> None:
    assert "ark_matrix_tile<" in multiply(m, n, k, transposes, dtypes, cut)


@pytest.mark.parametrize(
    ("arch", "m", "n", "k", "transposes", "dtypes", "cut"),
    in_turns(("gfx942", "gfx950", "gfx90a"), LARGE, count=2),
    indirect=["arch"],
)
def test_parts_of_k_in_large_tiles(
    arch: str,
    m: int,
    n: int,
    k: int,
    transposes: tuple[bool, bool],
    dtypes: tuple[DataType, DataType, DataType],
    cut: tuple[int, int, int],
) -> None:
    high, wide = (size if size in (128, 256) else -(-size // 128) * 128 for size in cut[:2])
    assert f"ark_large_tile<{high}, {wide}," in multiply(m, n, k, transposes, dtypes, cut)


def multiply(
    m: int,
    n: int,
    k: int,
    transposes: tuple[bool, bool],
    dtypes: tuple[DataType, DataType, DataType],
    cut: tuple[int, int, int],
) -> str:
    """Runs a product with this cut twice and compares it. Returns its source."""
    ta, tb = transposes
    graph, rng = Graph(), np.random.default_rng(m)
    a = graph.tensor((k, m) if ta else (m, k), dtypes[0], arena="state", name="a")
    b = graph.tensor((n, k) if tb else (k, n), dtypes[1], arena="state", name="b")
    c = graph.tensor((m, n), dtypes[2], name="c")
    graph.add("matmul", [a, b], [c], {"transpose_a": ta, "transpose_b": tb}, "product")
    x, y = (rng.standard_normal(t.shape).astype(t.dtype.to_numpy()) for t in (a, b))
    got = []
    with contextlib.closing(backend.open(0)) as device:
        options = {"cuts": {key((1, 1, m, n), k, dtypes[0].itemsize): list(cut)}}
        planned = plan(graph, device.machine, options)
        verify([planned])
        assert [op.params.get("splits") for op in planned.ops] == [cut[2], None]
        with Executor(planned, backend, device) as executor:
            source = executor.program.emitted.source.text
            executor.write("a", x)
            executor.write("b", y)
            for seed in (1, 2):
                emulator.set_option("seed", seed)
                executor.start(1).wait(60)
                got.append(executor.read("c"))
    assert (got[0] == got[1]).all()
    left, right = x.astype(np.float64), y.astype(np.float64)
    left, right = left.T if ta else left, right.T if tb else right
    exact, scale = left @ right, np.sqrt(left**2 @ right**2)
    # The rounding of the result, and of the steps of fp32 sums.
    bound = ROUNDING[dtypes[2].name] * np.abs(exact) + 2.0**-22 * np.sqrt(k) * scale
    assert (np.abs(got[0].astype(np.float64) - exact) <= bound).all()
    return source
