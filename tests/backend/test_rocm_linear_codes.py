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
    got, bodies, layers = executed(dtype, given, "rmsnorm")
    several = linear_several.SeveralRowsOfCodes
    assert bodies == [several if rows > 1 else linear_rows.OneRow]
    if rows == 1:
        assert layers == [k >= LEAST_MATRIX_COLUMNS]
    x = given["x"].astype(np.float64)
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * given["norm"]
    weights = row_values(dtype, stored).astype(np.float64)
    want = normed @ weights.T + given["residual"]
    most = np.abs(normed) @ np.abs(weights).T
    assert (np.abs(got - want) / most).max() < 1e-6


# The sizes of the input's elements, as powers of two.
SIZES = [(-110, -100), (-62, -28), (-20, 10), (55, 66), (90, 100), (-110, 60)]


@pytest.mark.parametrize("codes", [types.fp8_e4m3, types.fp8_e5m2], ids=lambda t: t.name)
@pytest.mark.parametrize(("least", "most"), SIZES)
@pytest.mark.parametrize("arch", ["gfx942"], indirect=True)
def test_codes_of_one_row_with_inputs_of_any_size(
    arch: str, codes: DataType, least: int, most: int
) -> None:
    """The input's three parts are exact for elements of any size."""
    del arch
    k, n = 2048, 70
    rng = np.random.default_rng(most - least)
    dtype = row_type(codes, k, k, fp32, False, bf16)
    stored = row_bytes(dtype, every_code(dtype, n, rng), rng.uniform(0.25, 4, (n, 1)), None)
    x = rng.standard_normal((1, k)) * np.exp2(rng.uniform(least, most, (1, k)))
    given = {"x": x.astype(np.float32), "w": stored, "residual": np.zeros((1, n), np.float32)}
    got, _, by_units = executed(dtype, given, "none")
    assert by_units == [True]
    weights = row_values(dtype, stored).astype(np.float64)
    x = given["x"].astype(np.float64)
    error = np.abs(got - x @ weights.T) / (np.abs(x) @ np.abs(weights).T)
    assert error.max() < 1e-6


@pytest.mark.parametrize("arch", ["gfx942"], indirect=True)
def test_infinite_inputs_of_one_row_of_codes(arch: str) -> None:
    del arch
    k, n = 2048, 70
    rng = np.random.default_rng(0)
    dtype = row_type(types.fp8_e4m3, k, k, fp32, False, bf16)
    stored = row_bytes(dtype, every_code(dtype, n, rng), rng.uniform(0.25, 4, (n, 1)), None)
    x = rng.standard_normal((1, k)).astype(np.float32)
    x[0, 77] = -np.inf
    given = {"x": x, "w": stored, "residual": np.zeros((1, n), np.float32)}
    got, _, by_units = executed(dtype, given, "none")
    assert by_units == [True]
    weights = row_values(dtype, stored).astype(np.float64)
    with np.errstate(all="ignore"):
        want = x.astype(np.float64) @ weights.T
    assert np.isposinf(want).any() and np.isneginf(want).any()
    np.testing.assert_array_equal(got, want)


def executed(
    dtype: DataType, given: dict[str, np.ndarray], prologue: str
) -> tuple[np.ndarray, list[type], list[bool]]:
    """Runs two iterations of a linear layer that adds a residual. Returns the result, the bodies of
    the layer, and for each layer of one row whether matrix units multiply it.
    """
    rows, n = given["residual"].shape
    k = given["x"].shape[1]
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
    attrs = {"prologue": prologue, "epilogue": "add"}
    if prologue == "rmsnorm":
        attrs["eps"] = 1e-5
    operands = [t[name] for name in ("x", "w", "norm", "residual") if name in t]
    graph.add("linear", operands, [out], attrs, "layer")
    device = backend.open(0)
    try:
        planned = plan(graph, device.machine)
        verify([planned])
        layers = [kinds.signature(planned, op) for op in planned.ops if op.kind == "linear_rows"]
        dialect = backend.dialect(device.machine.arch)
        bodies = [type(dialect.body(sig, device.machine)) for sig in layers]
        by_units = [
            linear_rows.matrix_of(layer, device.machine) is not None
            for layer in layers
            if rows == 1
        ]
        with Executor(planned, backend, device) as executor:
            for name, array in given.items():
                executor.write(name, array)
            executor.start(2).wait()
            return executor.read("y").reshape(rows, n), bodies, by_units
    finally:
        device.close()
