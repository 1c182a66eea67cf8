"""AMD's linear layers of one row and of several, executed on the emulator and compared with NumPy
in double precision. Some rows have a length that is a multiple of a wave's loads, others do not.
Some numbers of rows are multiples of the number of processors, others are not.
"""

from __future__ import annotations

import numpy as np
import pytest
from ark_rocm import backend
from ark_rocm.tasks import linear, linear_several

from ark.ir.dtype import DataType, bf16, fp16, fp32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.plan import kind as kinds
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.slow import in_turns, slow

pytestmark = pytest.mark.emulated("slow")

# The blocks: (input columns, hidden columns, output columns, type of the weights).
CASES = [
    (1024, 520, 37, bf16),
    (2048, 3072, 21, bf16),
    (520, 264, 100, fp16),
    (384, 96, 41, fp32),
    (72, 1024, 9, bf16),
    (1912, 2880, 25, bf16),  # on matrix units, where the last wave's part ends after the row
]
ARCHS = ("gfx942", "gfx1100")
LONG = (72, 14336, 9, bf16)  # 14 loads for a part of a row
# The blocks: (input rows, input columns, hidden columns, output columns). The cases differ in how
# many chunks of input columns a wave computes: none, one, several, or a part of one. A chunk has
# two products or four. Tasks have one or several groups of rows of weights.
SEVERAL = [
    (2, 1024, 544, 37),
    (5, 160, 1184, 21),
    (8, 2048, 96, 130),
    (16, 96, 2048, 9),
    (8, 2880, 96, 45),
    (12, 96, 8224, 9),  # nine chunks for each wave
]
UNIT_ARCHS = ("gfx942", "gfx950", "gfx90a")


def values(shape: tuple[int, ...], dtype: DataType, seed: int) -> np.ndarray:
    numbers = np.random.default_rng(seed).standard_normal(shape) / np.sqrt(shape[-1])
    return numbers.astype(dtype.to_numpy())


@pytest.mark.parametrize(
    ("arch", "k", "hidden", "n", "dtype"),
    [*in_turns(ARCHS, CASES), *(pytest.param(arch, *LONG, marks=slow) for arch in ARCHS)],
    indirect=["arch"],
)
def test_gated_block(arch: str, k: int, hidden: int, n: int, dtype: DataType) -> None:
    """A gated block of one row: y = x + down(silu(gate) * up), with gate and up of the normalised
    x. The block is two linear layers; the second layer reads the result of the first.
    """
    del arch
    got, want, bodies = gated_block(1, k, hidden, n, dtype)
    assert bodies == [linear.OneRow] * 2
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arch", "rows", "k", "hidden", "n"), in_turns(UNIT_ARCHS, SEVERAL), indirect=["arch"]
)
@pytest.mark.parametrize("given", [fp32, bf16])
def test_gated_block_of_several_rows(
    arch: str, rows: int, k: int, hidden: int, n: int, given: DataType
) -> None:
    """A gated block of several rows on matrix units. An infinity in one row does not affect the
    other rows.
    """
    del arch
    got, want, bodies = gated_block(rows, k, hidden, n, bf16, given, infinite=True)
    assert bodies == [linear_several.SeveralRows] * 2
    assert np.isfinite(want[:-1]).all()
    assert not np.isfinite(got[-1]).any()
    close = 1e-5 if given is fp32 else 0.02
    np.testing.assert_allclose(got[:-1], want[:-1], rtol=close, atol=close)


@pytest.mark.parametrize(
    ("arch", "rows", "k", "hidden", "n", "dtype"),
    in_turns(ARCHS, [(1, 1024, 520, 37, bf16), (1, 520, 264, 100, fp16), (5, 160, 1184, 21, bf16)]),
    indirect=["arch"],
)
def test_biases_are_added_before_the_epilogue(
    arch: str, rows: int, k: int, hidden: int, n: int, dtype: DataType
) -> None:
    del arch
    got, want, _ = gated_block(rows, k, hidden, n, dtype, biased=True)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arch", "rows", "k", "n"),
    in_turns(UNIT_ARCHS, [(8, 2048, 530), (12, 96, 9), (5, 160, 21)]),
    indirect=["arch"],
)
def test_infinite_elements_of_several_rows(arch: str, rows: int, k: int, n: int) -> None:
    """An output is infinite or NaN exactly where the sum of its products is."""
    del arch
    shapes = {"x": (rows, k), "w": (n, k), "residual": (rows, n)}
    types = {"w": bf16}
    given = {
        name: values(shape, types.get(name, fp32), i)
        for i, (name, shape) in enumerate(shapes.items())
    }
    given["x"][1, 3], given["x"][2, k - 5], given["x"][3, 9] = np.inf, -np.inf, np.nan
    given["x"][0, [3, k - 5]] = np.inf, -np.inf
    graph = Graph()
    t = {
        name: graph.tensor(shape, types.get(name, fp32), arena="state", name=name)
        for name, shape in shapes.items()
    }
    out = graph.tensor((rows, n), fp32, arena="state", name="y")
    operands = [t["x"], t["w"], t["residual"]]
    graph.add("linear", operands, [out], {"prologue": "none", "epilogue": "add"}, "linear")
    got, bodies = executed(graph, given)
    assert bodies == [linear_several.SeveralRows]
    wide = {name: array.astype(np.float64) for name, array in given.items()}
    with np.errstate(all="ignore"):
        want = wide["x"] @ wide["w"].T + wide["residual"]
    assert np.isposinf(want).any() and np.isneginf(want).any() and np.isnan(want).any()
    np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-5, atol=1e-5)


def executed(graph: Graph, given: dict[str, np.ndarray]) -> tuple[np.ndarray, list[type]]:
    """Runs two iterations of the graph. Returns the tensor y and the bodies of linear layers."""
    device = backend.open(0)
    try:
        planned = plan(graph, device.machine)
        verify([planned])
        layers = [kinds.signature(planned, op) for op in planned.ops if op.kind == "linear"]
        dialect = backend.dialect(device.machine.arch)
        bodies = [type(dialect.body(sig, device.machine)) for sig in layers]
        rows = given["x"].shape[0]
        assert rows > 1 or any(tensor.packet for tensor in planned.tensors)
        with Executor(planned, backend, device) as executor:
            for name, array in given.items():
                executor.write(name, array)
            executor.start(2).wait()
            return executor.read("y"), bodies
    finally:
        device.close()


def gated_block(
    rows: int,
    k: int,
    hidden: int,
    n: int,
    dtype: DataType,
    given_type: DataType = fp32,
    infinite: bool = False,
    biased: bool = False,
) -> tuple[np.ndarray, np.ndarray, list[type]]:
    """Returns the device's result, NumPy's, and the bodies of the two layers. given_type: of both
    inputs.
    """
    shapes = {"x": (rows, k), "norm": (k,), "first": (2 * hidden, k), "second": (n, hidden)}
    shapes["residual"] = (rows, n)
    if biased:
        shapes |= {"first bias": (2 * hidden,), "second bias": (n,)}
    types = {"first": dtype, "second": dtype, "x": given_type}
    given = {
        name: values(shape, types.get(name, fp32), i)
        for i, (name, shape) in enumerate(shapes.items())
    }
    given["norm"] *= np.sqrt(k, dtype=np.float32)
    if infinite:
        given["x"][-1, 3] = np.inf
    graph = Graph()
    t = {
        name: graph.tensor(shape, types.get(name, fp32), arena="state", name=name)
        for name, shape in shapes.items()
    }
    middle = graph.tensor((rows, hidden), given_type, name="middle")
    out = graph.tensor((rows, n), fp32, arena="state", name="y")
    norm = {"prologue": "rmsnorm", "eps": 1e-5, "epilogue": "swiglu", "bias": biased}
    biases = [[t[name]] if biased else [] for name in ("first bias", "second bias")]
    graph.add("linear", [t["x"], t["first"], t["norm"], *biases[0]], [middle], norm, "up")
    add = {"prologue": "none", "epilogue": "add", "bias": biased}
    graph.add("linear", [middle, t["second"], *biases[1], t["residual"]], [out], add, "down")
    got, bodies = executed(graph, given)
    wide = {name: array.astype(np.float64) for name, array in given.items()}
    with np.errstate(all="ignore"):
        squares = (wide["x"] ** 2).mean(-1, keepdims=True)
        gate_and_up = wide["x"] / np.sqrt(squares + 1e-5) * wide["norm"] @ wide["first"].T
        gate_and_up += wide.get("first bias", 0.0)
        gate, up = gate_and_up[:, 0::2], gate_and_up[:, 1::2]
        want = (gate / (1 + np.exp(-gate)) * up) @ wide["second"].T + wide["residual"]
        want += wide.get("second bias", 0.0)
    return got.reshape(want.shape), want, bodies
