"""The AMD matmul bodies, executed on the emulator and compared with NumPy in double precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from ark_rocm import backend

from ark.ir.dtype import DataType, bf16, fp16
from ark.ir.model import Graph
from ark.model import Model, use_model
from ark.ops.linear_algebra import matmul
from ark.plan.planner import plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from ark.tensor import Tensor

emulator = pytest.importorskip("ark_rocm_emulator")

# (batch and rows of a, columns of b, k, transposes, input type)
CASES = [
    ((), 128, 128, 64, (False, True), bf16),
    ((), 137, 45, 260, (True, False), fp16),
    ((), 37, 45, 51, (False, False), fp16),
    ((), 64, 200, 96, (False, False), bf16),
    ((), 9, 33, 40, (True, True), bf16),
    ((3,), 130, 70, 33, (False, True), fp16),
]
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-23}


@pytest.fixture(scope="module", params=["gfx942", "gfx1100", "gfx90a", "gfx950"])
def arch(request: pytest.FixtureRequest) -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(emulator.emulated(request.param))
        yield request.param


def values(shape: tuple[int, ...], dtype: DataType, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype.to_numpy())


@pytest.mark.parametrize(("batch", "m", "n", "k", "transposes", "dtype"), CASES)
def test_matmul(
    arch: str,
    batch: tuple[int, ...],
    m: int,
    n: int,
    k: int,
    transposes: tuple[bool, bool],
    dtype: DataType,
) -> None:
    ta, tb = transposes
    model = Model()
    graph: Graph = model.graph
    with use_model(model):
        shapes = ((*batch, *((k, m) if ta else (m, k))), (*batch, *((n, k) if tb else (k, n))))
        a, b = (
            Tensor(graph.tensor(shape, dtype, arena="state", name=name), model)
            for name, shape in zip("ab", shapes, strict=True)
        )
        out = matmul(a, b, transpose_input=ta, transpose_other=tb, name="c")
    device = backend.open(0)
    with contextlib.closing(device):
        made = plan(graph, device.machine, {"pinned": (out.ir.buffer.id,)})
        verify([made])
        with Executor(made, backend, device) as executor:
            assert "ark_matrix_tile<" in executor.program.emitted.source.text
            x, y = (values(shape, dtype, seed) for seed, shape in enumerate(shapes))
            executor.write("a", x)
            executor.write("b", y)
            executor.start(1).wait(60)
            found = executor.read("c").astype(np.float64)
    left, right = x.astype(np.float64), y.astype(np.float64)
    left = left.swapaxes(-1, -2) if ta else left
    right = right.swapaxes(-1, -2) if tb else right
    bound = ROUNDING[dtype.name] * np.abs(left @ right) + 4e-7 * (np.abs(left) @ np.abs(right))
    assert (np.abs(found - left @ right) <= bound).all()
