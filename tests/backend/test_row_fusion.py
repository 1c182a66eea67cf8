"""Sums over rows that are one op with the elementwise ops around them (ark/lower/rewrite/
fuse_rows.py), beside torch: gradients of norms, with scale and residual.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.ir.dtype import DataType
from ark.lower.pipeline import plan
from tests.emulated import few_emulated

torch = pytest.importorskip("torch")

# rows, columns: several rows per warp, odd rows, rows of several warps, single elements
SHAPES = ((70, 768), (3, 1000), (9, 2048), (5, 333), (2, 64))
TOLERANCE = {ark.fp32: 2e-5, ark.bf16: 3e-2, ark.fp16: 4e-3}


def _gradients(rows: int, columns: int, dtype: DataType, norm: str) -> tuple[list[Any], list[Any]]:
    """Adds a norm with a scale, and a residual to its gradient. Returns the given tensors, and the
    gradients of rows and scale.
    """
    x, given, residual = (ark.tensor([rows, columns], dtype) for _ in range(3))
    scale = ark.tensor([columns], dtype)
    if norm == "layernorm":
        result = ark.mul(ark.layernorm(x, eps=1e-5), scale)
    else:
        result = ark.rmsnorm(x, scale, eps=1e-5)
    back, slope = ark.grad([result], [x, scale], [given])
    total = ark.add(back, residual)
    return [x, given, residual, scale], [total, slope]


def _in_torch(arrays: list[np.ndarray], norm: str) -> list[np.ndarray]:
    x, given, residual, scale = (torch.tensor(a.astype(np.float64)) for a in arrays)
    x.requires_grad_()
    scale.requires_grad_()
    function = getattr(
        torch.nn.functional, {"layernorm": "layer_norm", "rmsnorm": "rms_norm"}[norm]
    )
    result = function(x, x.shape[-1:], eps=1e-5) * scale
    back, slope = torch.autograd.grad(result, [x, scale], given)
    return [(back + residual).numpy(), slope.numpy()]


@pytest.mark.parametrize(
    "dtype", few_emulated((ark.fp32, ark.bf16, ark.fp16), ark.bf16), ids=lambda t: t.name
)
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_gradients_of_norms_equal_those_of_torch(backend: str, norm: str, dtype: DataType) -> None:
    random = np.random.default_rng(4)
    cases = []
    for rows, columns in SHAPES:
        given, kept = _gradients(rows, columns, dtype, norm)
        arrays = [random.normal(0.5, 2.0, t.shape()).astype(dtype.numpy) for t in given]
        cases.append((given, kept, arrays))
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for given, _, arrays in cases:
            for tensor, array in zip(given, arrays, strict=True):
                tensor.from_numpy(array)
        runtime.run()
        results = [[t.to_numpy().astype(np.float64) for t in kept] for _, kept, _ in cases]
    for (_, _, arrays), got in zip(cases, results, strict=True):
        for a, b in zip(got, _in_torch(arrays, norm), strict=True):
            bound = TOLERANCE[dtype]
            np.testing.assert_allclose(a, b, rtol=bound, atol=bound * np.abs(b).max())


@pytest.mark.parametrize("machine", ["h200", "mi300x", "cpu-2"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_gradient_of_rows_is_one_op(norm: str, machine: str) -> None:
    with ark.use_model(ark.Model()) as model:
        _gradients(256, 768, ark.bf16, norm)
    planned = plan(model.graph, registry.machine(machine))
    kinds = [op.kind for op in planned.ops]
    assert kinds.count("row_fusion") == 1
    assert kinds.count("reduce") <= 2  # the scale's gradient, of one or two stages
