"""The gradient of looked-up elements, one of each line, compares indices and scatters nothing."""

from __future__ import annotations

import numpy as np
import pytest

import ark
from tests.interpreter import Interpreter

torch = pytest.importorskip("torch")


def _types(graph: object) -> list[str]:
    return [node.type for node in graph.nodes]  # type: ignore[attr-defined]


def test_cross_entropy_has_a_gradient_without_scatters() -> None:
    """The gradient of the logits reads the log softmax once, and equals torch's in float64. Rows
    that are ignored have none.
    """
    rows, classes = 6, 5
    random = np.random.default_rng(3)
    logits, targets = random.normal(size=(rows, classes)), random.integers(0, classes, rows)
    targets[2] = -100
    with ark.use_model(ark.Model(0, 1)) as model:
        x, ids = ark.tensor([rows, classes]), ark.tensor([rows], ark.int32)
        (gradient,) = ark.grad(ark.cross_entropy(x, ids), [x])
    types = _types(model.graph)
    assert "scatter_elements" not in types
    sums = [n for n in model.graph.nodes if n.type == "reduce_sum"]
    assert all(n.inputs[0].shape != (rows, classes) for n in sums)
    memory = Interpreter()
    memory.view(x.ir)[...] = logits
    memory.view(ids.ir)[...] = targets
    memory.run(model.graph, 0)
    leaf = torch.tensor(logits, requires_grad=True)
    torch.nn.functional.cross_entropy(leaf, torch.tensor(targets)).backward()
    np.testing.assert_allclose(memory.view(gradient.ir), leaf.grad.numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_elements_of_each_line_along_any_axis(axis: int) -> None:
    """The gradient of gather_elements with one index for each line equals torch's."""
    shape = (3, 4, 5)
    random = np.random.default_rng(axis)
    one = [1 if d == axis else n for d, n in enumerate(shape)]
    source, weights = random.normal(size=shape), random.normal(size=one)
    indices = random.integers(-shape[axis], shape[axis], one)  # negative ones count from the end
    with ark.use_model(ark.Model(0, 1)) as model:
        x, ids, w = ark.tensor(shape), ark.tensor(one, ark.int64), ark.tensor(one)
        (gradient,) = ark.grad([ark.gather_elements(x, ids, axis)], [x], [w])
    assert "scatter_elements" not in _types(model.graph)
    memory = Interpreter()
    for tensor, array in ((x, source), (ids, indices), (w, weights)):
        memory.view(tensor.ir)[...] = array
    memory.run(model.graph, 0)
    leaf = torch.tensor(source, requires_grad=True)
    torch.gather(leaf, axis, torch.tensor(indices % shape[axis])).backward(torch.tensor(weights))
    np.testing.assert_allclose(memory.view(gradient.ir), leaf.grad.numpy(), rtol=1e-6)


def test_several_elements_of_a_line_are_scattered() -> None:
    """With two indices of a line, which may be equal, updates are added."""
    with ark.use_model(ark.Model(0, 1)) as model:
        x, ids = ark.tensor([3, 4]), ark.tensor([3, 2], ark.int32)
        ark.grad([ark.gather_elements(x, ids, 1)], [x], [ark.tensor([3, 2])])
    assert "scatter_elements" in _types(model.graph)


@pytest.mark.parametrize("rows", [2, 8, 9])
def test_table_of_few_rows_has_a_gradient_without_scatters(rows: int) -> None:
    """The gradient of rows that are looked up many times, also by negative numbers, equals torch's.
    In a table of few rows it is a sum of all updates with the row's number.
    """
    random = np.random.default_rng(rows)
    indices = random.integers(-rows, rows, (5, 6))
    weights = random.normal(size=(5, 6, 3))
    weights[0, 0] = np.inf  # stays in its own row
    with ark.use_model(ark.Model(0, 1)) as model:
        ids, table, w = ark.tensor([5, 6], ark.int64), ark.tensor([rows, 3]), ark.tensor([5, 6, 3])
        (gradient,) = ark.grad([ark.embedding(ids, table)], [table], [w])
    assert ("scatter_elements" in _types(model.graph)) == (rows > 8)
    memory = Interpreter()
    memory.view(ids.ir)[...] = indices
    memory.view(w.ir)[...] = weights
    memory.run(model.graph, 0)
    want = torch.zeros(rows, 3, dtype=torch.float64)
    updates = torch.tensor(weights).reshape(30, 3)
    want.index_add_(0, torch.tensor(indices % rows).reshape(30), updates)
    np.testing.assert_allclose(memory.view(gradient.ir), want.numpy(), rtol=1e-6, atol=1e-9)
