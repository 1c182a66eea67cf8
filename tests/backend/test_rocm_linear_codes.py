"""AMD's linear layers of one row and of several with quantised weights, executed on the emulator
and compared with NumPy in double precision: every type of codes, groups as wide as a wave's chunk
and narrower, one scale for a row, zeros, and rows that end within a chunk.
"""

from __future__ import annotations

import numpy as np
import pytest
from ark_rocm import backend
from ark_rocm.tasks import linear_rows, linear_several

from ark.ir import dtype as types
from ark.ir.dtype import DataType, bf16, fp16, fp32, row_type
from ark.ir.graph import Graph
from ark.ir.rows import row_bytes, row_values
from ark.lower.pipeline import plan
from ark.plan import kind as kinds
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.cases.codes import every_code
from tests.slow import in_turns

pytestmark = pytest.mark.emulated("slow")

# The layers: (codes, group size, type of scales, True if there are zero points, input rows,
# columns, rows of weights)
CASES: list[tuple[DataType, int, DataType, bool, int, int, int]] = [
    (types.fp4, 32, bf16, False, 8, 1120, 40),
    (types.fp4, 32, bf16, False, 1, 320, 24),
    (types.fp8_e4m3, 384, fp32, False, 1, 384, 30),
    (types.fp8_e4m3, 1096, fp32, False, 3, 1096, 600),
    (types.int4, 128, fp16, False, 16, 1152, 37),
    (types.uint4, 32, bf16, True, 5, 160, 130),
    (types.int8, 2048, bf16, False, 2, 2048, 21),
    (types.uint8, 64, fp16, True, 7, 192, 19),
    (types.fp8_e5m2, 128, fp32, False, 12, 256, 9),
    (types.fp8_e4m3, 2048, fp32, False, 1, 2048, 130),
    (types.int4, 128, bf16, False, 1, 3584, 70),
    (types.int8, 1920, fp32, False, 1, 1920, 33),
    (types.fp4, 32, bf16, False, 1, 4096, 21),
    (types.uint4, 32, fp16, True, 1, 4096, 50),
    (types.fp8_e5m2, 64, fp32, False, 1, 4096, 24),
]
LEAST_MATRIX_COLUMNS = 1792  # with one input row, matrix units multiply from here on
ARCHS = ("gfx942", "gfx950", "gfx90a")


@pytest.mark.parametrize(
    ("arch", "codes", "group", "scales", "zeros", "rows", "k", "n"),
    in_turns(ARCHS, CASES),
    indirect=["arch"],
)
def test_rows_read_codes(
    arch: str, codes: DataType, group: int, scales: DataType, zeros: bool, rows: int, k: int, n: int
) -> None:
    """A linear layer with quantised weights: x + rmsnorm(x) w^T. The error must not exceed that of
    sums in fp32.
    """
    del arch
    rng = np.random.default_rng(k + n)
    dtype = row_type(codes, k, group, scales, zeros, bf16)
    steps, offsets = (rng.uniform(0.25, 4, (n, dtype.groups)) for _ in range(2))
    stored = row_bytes(dtype, every_code(dtype, n, rng), steps, 3 * offsets if zeros else None)
    given = {
        "x": rng.standard_normal((rows, k)).astype(np.float32),
        "w": stored,
        "norm": rng.uniform(0.5, 1.5, k).astype(np.float32),
        "residual": rng.standard_normal((rows, n)).astype(np.float32),
    }
    graph = Graph()
    t = {
        name: graph.tensor(
            (n, k) if name == "w" else array.shape,
            dtype if name == "w" else fp32,
            arena="parameter" if name == "w" else "state",
            name=name,
        )
        for name, array in given.items()
    }
    out = graph.tensor((rows, n), fp32, arena="state", name="y")
    attrs = {"prologue": "rmsnorm", "eps": 1e-5, "epilogue": "add"}
    graph.add("linear", [t["x"], t["w"], t["norm"], t["residual"]], [out], attrs, "layer")
    device = backend.open(0)
    try:
        planned = plan(graph, device.machine)
        verify([planned])
        layers = [kinds.signature(planned, op) for op in planned.ops if op.kind == "linear_rows"]
        dialect = backend.dialect(device.machine.arch)
        bodies = [type(dialect.body(sig, device.machine)) for sig in layers]
        several = linear_several.SeveralRowsOfCodes
        assert bodies == [several if rows > 1 else linear_rows.OneRow]
        if rows == 1:
            by_units = linear_rows.matrix_of(layers[0], device.machine) is not None
            assert by_units == (k >= LEAST_MATRIX_COLUMNS)
        with Executor(planned, backend, device) as executor:
            for name, array in given.items():
                executor.write(name, array)
            executor.start(2).wait()
            got = executor.read("y")
    finally:
        device.close()
    x = given["x"].astype(np.float64)
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * given["norm"]
    weights = row_values(dtype, stored).astype(np.float64)
    want = normed @ weights.T + given["residual"]
    most = np.abs(normed) @ np.abs(weights).T
    assert (np.abs(got.reshape(want.shape) - want) / most).max() < 1e-6
