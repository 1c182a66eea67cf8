"""A linear layer between two transposes of its rows: the transposes are removed if they cancel and
every row is computed independently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ark
from ark.backend import registry
from ark.ir.graph import Graph
from ark.lower.rewrite.cancel_transposes import cancel_transposes
from ark.lower.rewrite.context import Context
from tests.slow import examples
from tests.unit.lower.computed import computed


class Turned:
    """A linear layer, a bias and a relu between two transposes of the rows. Holds the graph, the
    inputs' values by buffer, the result and the expected values. row: the bias differs by row.
    """

    def __init__(
        self, sizes: Sequence[int], perm: Sequence[int], back: Sequence[int], row: bool = False
    ) -> None:
        rng, rank, rows = np.random.default_rng(0), len(sizes), math.prod(sizes)
        x, w = rng.normal(size=(*sizes, 4)), rng.normal(size=(6, 4))
        b = rng.normal(size=(rows, 6) if row else (6,))
        values = [v.astype(np.float32) for v in (x, w, b)]
        model, lead = ark.Model(), [sizes[d] for d in perm]
        with ark.use_model(model):
            tensors = [ark.tensor(list(v.shape), ark.fp32) for v in values]
            turned = ark.reshape(ark.transpose(tensors[0], [*perm, rank]), [rows, 4])
            y = ark.relu(ark.linear(turned, tensors[1]) + tensors[2])
            y = ark.reshape(y, [*lead, 2, 3])
            self.result = ark.transpose(y, [*back, rank, rank + 1]).ir
        self.graph = model.graph
        self.inputs = {t.ir.buffer.id: v for t, v in zip(tensors, values, strict=True)}
        left = np.transpose(values[0], [*perm, rank]).reshape(rows, 4)
        y = np.maximum(left @ values[1].T + values[2], 0).reshape(*lead, 2, 3)
        self.wanted = np.transpose(y, [*back, rank, rank + 1])

    def rewritten(self) -> Graph:
        return cancel_transposes(self.graph, Context(registry.machine("h200"), {}, frozenset()))


def transposes(graph: Graph) -> int:
    return [n.type for n in graph.nodes].count("transpose")


@pytest.mark.parametrize(("back", "left"), [((1, 2, 0), 0), ((2, 1, 0), 1), ((0, 1, 2), 1)])
def test_transpose_that_is_undone_is_left_out(back: Sequence[int], left: int) -> None:
    program = Turned((3, 4, 5), (2, 0, 1), back)
    assert transposes(program.graph) == 2
    assert transposes(program.rewritten()) == left


def test_rows_with_biases_of_their_own_stay_transposed() -> None:
    assert transposes(Turned((3, 4, 5), (2, 0, 1), (1, 2, 0), row=True).rewritten()) == 2


@given(st.data())
@settings(max_examples=examples(100), deadline=None)
def test_results_are_those_of_the_transposed_rows(data: Any) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    perm, back = (data.draw(st.permutations(range(len(sizes)))) for _ in range(2))
    program = Turned(sizes, perm, back, row=data.draw(st.booleans()))
    for graph in (program.graph, program.rewritten()):
        result = computed(graph, program.inputs, program.result)
        np.testing.assert_allclose(result, program.wanted, rtol=1e-5, atol=1e-5)


def trained(sizes: Sequence[int], read: str = "") -> tuple[Graph, dict[int, np.ndarray], list[Any]]:
    """Two linear layers between transposes of their rows, and their gradients. Returns the graph,
    the inputs' values by buffer, and the results with their expected values. read: what else reads
    the second layer's rows: an op that depends on their order, or ("kept") the caller.
    """
    rng, (first, second) = np.random.default_rng(0), sizes
    shapes = ((first, second, 4), (6, 4), (6,), (3, 6), (first, second, 3))
    values = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    x, w, b, v, given = values
    with ark.use_model(ark.Model()) as model:
        tensors = [ark.tensor(list(shape), ark.fp32) for shape in shapes]
        turned = ark.reshape(ark.transpose(tensors[0], [1, 0, 2]), [first * second, 4])
        y = ark.relu(ark.linear(turned, tensors[1]) + tensors[2])
        y = ark.reshape(ark.linear(y, tensors[3]), [second, first, 3])
        result = ark.transpose(y, [1, 0, 2])
        if read == "first":
            ark.exp(ark.reshape(y, [first * second, 3])[:1])
        elif read == "softmax":
            ark.softmax(ark.reshape(y, [second, first * 3]))
        elif read == "sums":
            ark.reduce_sum(ark.reshape(y, [first * second, 3]), 1)
        elif read == "broadcast":
            every = ark.reshape(y, [1, first * second * 3])
            wide = ark.linear(
                ark.reshape(y, [first * second, 3]), ark.tensor([every.shape()[1], 3])
            )
            wide = ark.reshape(ark.mul(wide, every), [second, first, -1])
            ark.exp(ark.transpose(wide, [1, 0, 2]))
        elif read == "scaled":
            scaled = ark.mul(y, ark.tensor([second, 1, 1], ark.fp32))
            ark.exp(ark.transpose(scaled, [1, 0, 2]))
        got = [result, *ark.grad([result], tensors[:4], [tensors[4]])]
    inputs = {t.ir.buffer.id: value for t, value in zip(tensors, values, strict=True)}
    rows, slopes = x.reshape(-1, 4), given.reshape(-1, 3)
    inner = np.maximum(rows @ w.T + b, 0)
    back = slopes @ v * (inner > 0)
    if read == "kept":
        got.append(y)
    gradients = [(back @ w).reshape(x.shape), back.T @ rows, back.sum(0), slopes.T @ inner]
    wanted = [(inner @ v.T).reshape(given.shape), *gradients]
    return model.graph, inputs, [(g.ir, want) for g, want in zip(got, [*wanted, y], strict=False)]


def cancelled(graph: Graph, results: Sequence[Any], named: bool = True) -> Graph:
    """The rewritten graph. named: True if the planner is told the results; they are unread."""
    kept = frozenset(tensor.buffer.id for tensor, _ in results if named)
    return cancel_transposes(graph, Context(registry.machine("h200"), {}, kept))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("sizes", [(3, 4), (2, 2), (1, 5), (5, 7)])
def test_rows_that_gradients_read_keep_their_order(sizes: Sequence[int], named: bool) -> None:
    graph, inputs, results = trained(sizes)
    rewritten = cancelled(graph, results, named)
    assert transposes(graph) == 4
    assert transposes(rewritten) == (4 if sizes[0] == 1 else 2)  # kept results are copies
    for tensor, want in results:
        for each in (graph, rewritten):
            got = computed(each, inputs, tensor).reshape(want.shape)
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("read", ["first", "softmax", "sums", "broadcast", "scaled", "kept"])
def test_rows_whose_order_is_needed_stay_transposed(read: str) -> None:
    graph, inputs, results = trained((3, 4), read)
    for named in (True, read == "kept"):
        rewritten = cancelled(graph, results, named)
        assert transposes(rewritten) == transposes(graph)
        tensor, want = results[0]
        np.testing.assert_allclose(computed(rewritten, inputs, tensor), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_that_are_placed_side_by_side_are_joined_there(parts: int) -> None:
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(5, 2, 4)).astype(np.float32) for _ in range(parts)]
    with ark.use_model(ark.Model()) as model:
        tensors = [ark.tensor([5, 2, 4], ark.fp32) for _ in range(parts)]
        joined = ark.reshape(ark.concat([ark.relu(t) for t in tensors], 0), [parts, 5, 2, 4])
        result = ark.transpose(joined, [1, 2, 0, 3]).ir
    inputs = {t.ir.buffer.id: v for t, v in zip(tensors, values, strict=True)}
    graph = cancelled(model.graph, [(result, None)])
    assert transposes(model.graph) == 1
    assert transposes(graph) == 0
    want = np.maximum(np.stack(values, 2), 0)
    np.testing.assert_array_equal(computed(graph, inputs, result), want)


@pytest.mark.parametrize("changed", [0, 1])
def test_parts_that_change_before_the_transpose_are_joined_before(changed: int) -> None:
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(5, 2, 4)).astype(np.float32) for _ in range(2)]
    with ark.use_model(ark.Model()) as model:
        tensors = [ark.tensor([5, 2, 4], ark.fp32) for _ in range(2)]
        parts = [ark.relu(t) for t in tensors]
        joined = ark.reshape(ark.concat(parts, 0), [2, 5, 2, 4])
        ark.copy(tensors[0][1:3], output=parts[changed][1:3])
        result = ark.transpose(joined, [1, 2, 0, 3]).ir
    inputs = {t.ir.buffer.id: v for t, v in zip(tensors, values, strict=True)}
    graph = cancelled(model.graph, [(result, None)])
    want = np.maximum(np.stack(values, 2), 0)
    np.testing.assert_array_equal(computed(graph, inputs, result), want)
