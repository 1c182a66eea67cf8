"""Regions of elementwise ops that are fused into one op: results equal NumPy's, and ops that must
not be fused stay separate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend.registry import machine
from ark.frontend.model import Model, use_model
from ark.lower import registry
from ark.lower.pipeline import plan
from ark.lower.prepare import prepare
from ark.ops.fusion import STAGES
from tests.emulated import few_emulated


def kinds(build: Callable[[], Any]) -> list[str]:
    """Returns the kinds of the ops in a model's plan."""
    ark.Model.reset()
    build()
    return [op.kind for op in plan(Model.get_model().graph, machine("cpu-2")).ops]


def steps(x: Any, y: Any, sum_over: Callable[[Any], Any], width: int = 12) -> list[Any]:
    """Computes two results by a few dependent steps, with NumPy's arrays or ark's tensors
    as input.
    """
    values = [x * 0.5, x + y]
    for _ in range(width):
        values.append(values[-1] * 0.25 + values[-2] * y)
    first, second = sum_over(values[-1]), sum_over(values[-2] * values[0])
    return [first / (1.0 + second * second), second - y * first]


@pytest.mark.parametrize(
    "shape", few_emulated([[3, 5, 70], [7, 300], [2, 3, 4, 64]], [3, 5, 70], [2, 3, 4, 64])
)
def test_sums_between_functions(backend: str, shape: list[int]) -> None:
    axis = len(shape) - 2
    small = [1 if d == axis else n for d, n in enumerate(shape)]
    random = np.random.default_rng(1)
    arrays = [random.uniform(-1, 1, s).astype(np.float32) for s in (shape, small)]
    x, y = (ark.tensor(s) for s in (shape, small))
    outputs = steps(x, y, lambda t: ark.reduce_sum(t, axis))
    ark.copy(outputs[1], output=y)  # in place: all elements have read y before
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(arrays[0])
        y.from_numpy(arrays[1])
        runtime.run()
        results = [outputs[0].to_numpy(), y.to_numpy()]
    want = steps(*(a.astype(np.float64) for a in arrays), lambda t: t.sum(axis, keepdims=True))
    for got, wanted in zip(results, want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


def test_sums_between_functions_become_one_op() -> None:
    ark.init(backend="cpu")

    def build(width: int) -> Callable[[], Any]:
        return lambda: steps(
            ark.tensor([3, 5, 70]), ark.tensor([3, 1, 70]), lambda t: ark.reduce_sum(t, 1), width
        )

    assert kinds(build(12)) == ["fusion"]
    assert "fusion" not in kinds(build(2))  # few results are shared, so chains suffice


def test_unread_intermediates_are_not_written() -> None:
    ark.init(backend="cpu")

    def build() -> Any:
        x, y = ark.tensor([3, 5, 70]), ark.tensor([3, 1, 70])
        dead = [x * float(i) for i in range(2, 80)]  # each would be an operand
        outputs = steps(x, y, lambda t: ark.reduce_sum(t, 1))
        ark.copy(outputs[1], output=y)
        return dead

    assert kinds(build) == ["fusion"]


def test_overwritten_memory_ends_a_region() -> None:
    """A region of fused ops ends at an op that reads memory which an earlier op of the region has
    overwritten.
    """
    ark.init(backend="cpu")
    random = np.random.default_rng(2)
    given = random.uniform(-1, 1, (2, 128)).astype(np.float32)
    x = ark.tensor([2, 128])
    values = [x * 0.5, x + 1.0]
    for _ in range(12):
        values.append(values[-1] * 0.25 + values[-2])
    ark.copy(values[-1], output=x)
    late = x * 2.0  # reads the overwritten x
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(given)
        runtime.run()
        results, after = x.to_numpy(), late.to_numpy()
    want = [given * 0.5, given + 1.0]
    for _ in range(12):
        want.append(want[-1] * 0.25 + want[-2])
    np.testing.assert_allclose(results, want[-1], rtol=1e-5)
    np.testing.assert_allclose(after, 2 * want[-1], rtol=1e-5)


def test_reference_of_a_joined_node_equals_numpy() -> None:
    """The NumPy reference of a `fusion` node, which tests of whole graphs use, equals the separate
    ops.
    """
    ark.init(backend="cpu")
    shapes = [3, 5, 70], [3, 1, 70]
    outputs = steps(*(ark.tensor(s) for s in shapes), lambda t: ark.reduce_sum(t, 1))
    assert len(outputs) == 2
    prepared = prepare(Model.get_model().graph, machine("cpu-2")).graph
    (node,) = (n for n in prepared.nodes if not n.virtual)
    assert node.type == "fusion" and all(node.attrs[s] for s in STAGES if s != "first")
    random = np.random.default_rng(3)
    arrays = [random.uniform(-1, 1, t.shape) for t in node.inputs]
    results = registry.get("fusion").reference(arrays, node.attrs)
    by_shape = {a.shape: a for a in arrays}
    x, y = (by_shape[tuple(s)] for s in shapes)
    want = steps(x, y, lambda t: t.sum(1, keepdims=True))
    for got, wanted in zip(results, want, strict=True):
        np.testing.assert_allclose(got, wanted)


@pytest.mark.parametrize("dtype", few_emulated((ark.fp32, ark.bf16), ark.fp32))
def test_results_that_one_op_reads_twice(backend: str, dtype: Any) -> None:
    """Results that one op reads twice: x is doubled repeatedly, which is exact in every type."""
    x = ark.tensor([2, 300], dtype)
    doubled = x
    for _ in range(12):
        doubled = ark.add(doubled, doubled)
    array = np.random.default_rng(3).uniform(-1, 1, (2, 300)).astype(dtype.numpy)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(array)
        runtime.run()
        got = doubled.to_numpy().astype(np.float32)
    np.testing.assert_array_equal(got, 4096 * array.astype(np.float32))


@pytest.mark.parametrize("dtype", [ark.fp32, ark.bf16])
def test_small_chain_is_one_op_where_hand_overs_are_slow(dtype: Any) -> None:
    model = Model()
    with use_model(model):
        doubled = ark.tensor([4096], dtype)
        for _ in range(12):
            doubled = ark.add(doubled, doubled)
    assert [op.kind for op in plan(model.graph, machine("h100")).ops] == ["fusion"]
