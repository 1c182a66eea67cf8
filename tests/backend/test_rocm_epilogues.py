"""Ops fused after a product on AMD's matrix units, executed on the emulator with its checks and
compared with NumPy in double precision: expressions, gates and rotations, in the loop for large
tiles and in the general one, in whole and incomplete tiles, and after partial products over parts
of k.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ark_rocm import backend

import ark
from ark.frontend.model import Model, use_model
from ark.frontend.tensor import Tensor
from ark.ir.dtype import DataType, bf16, fp16, fp32
from ark.lower.cuts import key
from ark.lower.pipeline import plan as make_plan
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.projection import Projection
from tests.slow import in_turns

pytestmark = pytest.mark.emulated("slow")

ARCHS = ("gfx942", "gfx1100", "gfx90a", "gfx950")
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-23}


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


ENDS: dict[str, tuple[Callable[..., Any], Callable[..., np.ndarray]]] = {
    "all": (
        lambda p, bias, column, rest: ark.gelu(p * column + bias) * 0.5 + rest,
        lambda p, bias, column, rest: gelu(p * column + bias) * 0.5 + rest,
    ),
    "residual": (lambda p, bias, column, rest: rest + p, lambda p, b, c, rest: rest + p),
    "gates": (lambda *_: None, lambda p, *_: silu(p[:, ::2]) * p[:, 1::2]),
}
# The products: (epilogue, rows, columns, k, transposes of a and b, types of a, of b and of the
# epilogue's operands, tile and parts of k)
CASES = [
    ("all", 64, 128, 96, (False, True), (bf16, bf16, bf16), (64, 128, 1)),
    ("all", 37, 45, 51, (False, False), (fp16, fp16, fp32), (37, 32, 1)),
    ("gates", 64, 128, 96, (False, True), (bf16, bf16, bf16), (64, 128, 1)),
    ("all", 40, 96, 260, (True, False), (bf16, bf16, bf16), (40, 48, 2)),
    ("residual", 48, 136, 64, (False, True), (fp32, bf16, fp32), (48, 64, 1)),
    ("gates", 20, 80, 64, (False, True), (fp16, fp16, fp16), (20, 48, 1)),
]
LARGE = [
    ("all", 256, 256, 64, (False, True), (bf16, bf16, bf16), (256, 256, 1)),
    ("all", 200, 140, 96, (True, False), (bf16, bf16, fp32), (200, 128, 1)),
    ("residual", 100, 300, 264, (False, True), (bf16, bf16, fp32), (100, 256, 1)),
    ("residual", 128, 256, 256, (False, True), (bf16, bf16, bf16), (128, 128, 2)),
    ("gates", 128, 272, 96, (False, True), (bf16, bf16, bf16), (128, 128, 1)),
    ("gates", 130, 256, 64, (False, False), (bf16, bf16, fp32), (128, 256, 1)),
]


@pytest.mark.parametrize(
    ("arch", "end", "m", "n", "k", "transposes", "dtypes", "cut"),
    in_turns(ARCHS, CASES, count=4),
    indirect=["arch"],
)
def test_epilogues_of_products_equal_numpy(
    arch: str,
    end: str,
    m: int,
    n: int,
    k: int,
    transposes: tuple[bool, bool],
    dtypes: tuple[DataType, DataType, DataType],
    cut: tuple[int, int, int],
) -> None:
    assert "ark_matrix_tile<" in follow(end, m, n, k, transposes, dtypes, cut)


@pytest.mark.parametrize(
    ("arch", "end", "m", "n", "k", "transposes", "dtypes", "cut"),
    in_turns(("gfx942", "gfx950", "gfx90a"), LARGE, count=3),
    indirect=["arch"],
)
def test_epilogues_of_large_tiles_equal_numpy(
    arch: str,
    end: str,
    m: int,
    n: int,
    k: int,
    transposes: tuple[bool, bool],
    dtypes: tuple[DataType, DataType, DataType],
    cut: tuple[int, int, int],
) -> None:
    assert "ark_large_tile<" in follow(end, m, n, k, transposes, dtypes, cut)


def follow(
    end: str,
    m: int,
    n: int,
    k: int,
    transposes: tuple[bool, bool],
    dtypes: tuple[DataType, DataType, DataType],
    cut: tuple[int, int, int],
) -> str:
    """Runs a product with this cut and epilogue and compares the result. Returns its source."""
    build, wanted = ENDS[end]
    ta, tb = transposes
    wide = n // 2 if end == "gates" else n
    shapes = {"a": (k, m) if ta else (m, k), "b": (n, k) if tb else (k, n)}
    shapes |= {"bias": (n,), "column": (m, 1), "rest": (m, n)}
    types = (dtypes[0], dtypes[1], *(dtypes[2],) * 3)
    model = Model()
    with use_model(model):

        def state(name: str, shape: tuple[int, ...], dtype: DataType) -> Tensor:
            return Tensor(model.graph.tensor(shape, dtype, arena="state", name=name), model)

        inputs = [state(name, shapes[name], t) for name, t in zip(shapes, types, strict=True)]
        out = state("out", (m, wide), dtypes[2])
        product = Tensor(model.graph.tensor((m, n), dtypes[2]), model)
        attrs = {"transpose_a": ta, "transpose_b": tb}
        model.graph.add("matmul", [t.ir for t in inputs[:2]], [product.ir], attrs, "product")
        if end == "gates":
            model.graph.add("swiglu_pairs", [product.ir], [out.ir], {}, "gates")
        else:
            ark.copy(build(product, *inputs[2:]), out)
    options = {"cuts": {key((1, 1, m, n), k, dtypes[0].itemsize): list(cut)}}
    with contextlib.closing(backend.open(0)) as device:
        planned = make_plan(model.graph, device.machine, options)
        verify([planned])
        kinds = ["matmul"] if cut[2] == 1 else ["matmul", "elementwise"]
        assert [op.kind for op in planned.ops] == kinds
        params = planned.ops[0].params
        assert ((*params["tile"], params.get("splits", 1))) == cut
        source, result, given = run(planned, device, np.random.default_rng(m))
    x, y, *others = (given.get(name, np.zeros(1)).astype(np.float64) for name in shapes)
    x, y = x.T if ta else x, y.T if tb else y
    exact = wanted(x @ y, *others)
    # The derivatives of the epilogues are little above 1, except those of gates, which multiply two
    # results.
    scale = np.sqrt((x**2 @ y**2).max()) * (np.abs(x @ y).max() if end == "gates" else 4.0)
    # A product with an epilogue is not rounded to its own type in between.
    bound = ROUNDING[dtypes[2].name] * np.abs(exact) + 2.0**-20 * np.sqrt(k) * scale
    assert (np.abs(result.astype(np.float64) - exact) <= bound).all()
    return source


def run(
    planned: Plan, device: Any, rng: np.random.Generator
) -> tuple[str, np.ndarray, dict[str, np.ndarray]]:
    """Runs a plan. Returns its source, its result and its inputs."""
    read = {planned.tensors[t].name for op in planned.ops for t in op.operands}
    with Executor(planned, backend, device) as executor:
        given = {}
        for tensor in planned.tensors:
            if tensor.name in read & {"a", "b", "bias", "column", "rest"}:
                kind = executor.read(tensor.name)
                given[tensor.name] = rng.standard_normal(kind.shape).astype(kind.dtype)
                executor.write(tensor.name, given[tensor.name])
        executor.start(1).wait(60)
        return executor.program.emitted.source.text, executor.read("out"), given


PROJECTIONS = [
    (Projection(128, 64, 3, 1, 64, 300), (128, 128)),
    (Projection(130, 96, 2, 1, 64, 150), (128, 256)),
    (Projection(40, 64, 2, 1, 64, 60, fp16), (40, 128)),
]


@pytest.mark.parametrize(
    ("arch", "projection", "cut"),
    in_turns(("gfx942", "gfx1100", "gfx950"), PROJECTIONS),
    indirect=["arch"],
)
def test_rotated_projection_equals_numpy(
    arch: str, projection: Projection, cut: tuple[int, int]
) -> None:
    position = 33
    given = projection.random(np.random.default_rng(7))
    with contextlib.closing(backend.open(0)) as device:
        cuts = {key((1, 1, projection.rows, projection.columns), projection.k, 2): [*cut, 1]}
        planned = projection.plan(device.machine, variant=None, cuts=cuts)
        assert [op.kind for op in planned.ops] == ["matmul"]
        with Executor(planned, backend, device) as executor:
            for name, array in given.items():
                executor.write(name, array)
            executor.write("position", np.array([position]))
            executor.start(1).wait(60)
            got = {n: executor.read(n).copy() for n in ("queries", "keys", "values")}
    for name, right in projection.expected(given, position).items():
        atol = np.sqrt(projection.k) * 2.0**-10
        np.testing.assert_allclose(
            got[name].astype(np.float64), right, rtol=2.0**-7, atol=atol, err_msg=name
        )
