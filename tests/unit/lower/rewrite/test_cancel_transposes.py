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
