"""Ops whose output shares memory with inputs of other ops, and chains fused into one op, compared
with NumPy.
"""

from __future__ import annotations

import numpy as np
import pytest

import ark
from tests.cases.ops import FLOATS, UNARY, integers, values
from tests.opcheck import TOLERANCE, Case, check


@pytest.mark.emulated("gfx1100")
def test_elementwise_ops_in_place_equal_numpy(backend: str) -> None:
    """Ops whose output is a part of an input's memory give the result of program order, in whatever
    order tasks run.
    """
    shift = ark.tensor([4096])
    moved = ark.add(shift[:-1], 1.0, output=shift[1:])
    square = ark.tensor([96, 96])
    product = ark.matmul(square, square, output=square)
    transposed = ark.tensor([80, 80])
    flipped = ark.transpose(transposed, [1, 0], output=transposed)
    rows = ark.tensor([40, 33])
    normed = ark.softmax(rows, output=rows)
    arrays = {
        id(t): values(*t.shape(), seed=20).astype(np.float32)
        for t in (shift, square, transposed, rows)
    }
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for tensor in (shift, square, transposed, rows):
            tensor.from_numpy(arrays[id(tensor)])
        runtime.run()
        np.testing.assert_allclose(moved.to_numpy(), arrays[id(shift)][:-1] + 1)
        wide = arrays[id(square)].astype(np.float64)
        np.testing.assert_allclose(product.to_numpy(), wide @ wide, rtol=1e-3, atol=1e-3)
        np.testing.assert_array_equal(flipped.to_numpy(), arrays[id(transposed)].T)
        e = np.exp(arrays[id(rows)].astype(np.float64))
        np.testing.assert_allclose(normed.to_numpy(), e / e.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.emulated("gfx942")
def test_chains_become_one_op(backend: str) -> None:
    """A chain of elementwise ops becomes one op, which reads each input once and writes only the
    result.
    """

    def gate(a: ark.Tensor, b: ark.Tensor, row: ark.Tensor) -> ark.Tensor:
        return ark.cast(ark.mul(ark.gelu(ark.add(a, row)), ark.sub(1.0, b)), ark.fp32)

    def want(a: np.ndarray, b: np.ndarray, row: np.ndarray) -> np.ndarray:
        return UNARY["gelu"](a + row) * (1 - b)

    cases = []
    for dtype in FLOATS:
        inputs = [(values(*s, seed=n), dtype) for n, s in enumerate([(19, 48), (19, 48), (48,)])]
        cases.append(Case(f"gate {dtype}", inputs, gate, want, TOLERANCE[dtype.name]))
    whole = [(integers(7, 9, seed=1), ark.int32)]
    cases.append(
        Case(
            "integers to floats",
            whole,
            lambda t: ark.mul(ark.cast(ark.add(ark.mul(t, 3), t), ark.fp32), 0.5),
            lambda x: (x * 3 + x) * 0.5,
        )
    )
    rounded = [(values(400, seed=2), ark.fp32)]
    cases.append(
        Case(
            "a cast rounds",
            rounded,
            lambda t: ark.sub(ark.cast(ark.cast(t, ark.bf16), ark.fp32), t),
            lambda x: x.astype(np.float32).astype(ark.bf16.numpy).astype(np.float64) - x,
        )
    )
    check(cases)
    plan = ark.Runtime.last_plan
    assert len(plan.inner.ops) <= len(cases)
    assert {op.kind for op in plan.inner.ops} <= {"elementwise", "fusion"}
