"""Blocks whose rows are permuted to windows and back keep them in the order of windows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.ir.dtype import fp32
from ark.ir.graph import Graph
from ark.lower.rewrite.compose_remaps import compose_remaps
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.keep_row_order import keep_row_order
from tests.unit.lower.computed import computed
from tests.windows_of_images import image, roll, windows

SHAPE = (2, 12, 8, 6)
WIDTH = SHAPE[-1]
Mix = Callable[[Any], Any]


def norm(x: Any, weight: Any) -> Any:
    flat = ark.reshape(x, [math.prod(x.shape()) // WIDTH, WIDTH])
    return ark.reshape(ark.mul(ark.layernorm(flat), weight), x.shape())


def layer(x: Any, weight: Any) -> Any:
    flat = ark.reshape(x, [math.prod(x.shape()) // WIDTH, WIDTH])
    inner = ark.relu(ark.matmul(flat, weight, transpose_other=True))
    return ark.reshape(ark.matmul(inner, weight), x.shape())


def mixed(x: Any) -> Any:
    """Computes new rows for each window. Each new row depends on all rows of the window, as
    attention does.
    """
    *lead, high, wide, c = x.shape()
    flat = ark.reshape(x, [math.prod(lead), high * wide, c])
    scores = ark.matmul(flat, flat, transpose_other=True)
    return ark.reshape(ark.matmul(ark.softmax(scores), flat), x.shape())


def block(x: Any, vector: Any, matrix: Any, shift: int, mix: Mix = mixed, back: int = 0) -> Any:
    """A block with windows of 3 x 4. back: an additional shift at the end, after which the rows are
    not in their original order.
    """
    normed = norm(x, vector)
    shifted = roll(normed, 0, shift, shift, 0) if shift else normed
    result = image(mix(windows(shifted, 3, 4)))
    if shift or back:
        result = roll(result, 0, back - shift, back - shift, 0)
    y = ark.add(x, result)
    return ark.add(y, layer(norm(y, vector), matrix))


def twice(x: Any, vector: Any, matrix: Any) -> Any:
    return block(block(x, vector, matrix, 0), vector, matrix, 1)


def displaced(x: Any, vector: Any, matrix: Any) -> Any:
    return block(x, vector, matrix, 1, back=2)


def read_elsewhere(x: Any, vector: Any, matrix: Any) -> Any:
    """The rows of the first sum are also read by an op that needs their order."""
    normed = norm(x, vector)
    y = ark.add(x, image(mixed(windows(normed, 3, 4))))
    return ark.add(ark.add(y, layer(y, matrix)), roll(y, 0, 1, 0, 0))


def built(form: Any) -> tuple[Graph, dict[int, np.ndarray], Any, frozenset[int]]:
    """Returns the graph, its inputs by buffer, its result and the buffers that are kept."""
    rng = np.random.default_rng(2)
    model = ark.Model(0, 1)
    with ark.use_model(model):
        first = ark.tensor(SHAPE, fp32)
        vector, matrix = ark.tensor([1, WIDTH], fp32), ark.tensor([WIDTH, WIDTH], fp32)
        x = ark.relu(first)
        out = form(x, vector, matrix)
    inputs = {
        t.ir.buffer.id: rng.standard_normal(t.ir.shape).astype(np.float32)
        for t in (first, vector, matrix)
    }
    return model.graph, inputs, out.ir, frozenset({*inputs, out.ir.buffer.id})


@pytest.mark.parametrize(
    ("form", "copies"),
    [(twice, 3), (displaced, 2), (read_elsewhere, 3)],
    ids=["twice", "displaced", "read elsewhere"],
)
def test_rows_are_computed_as_before(form: Any, copies: int) -> None:
    """Results stay the same, and of two blocks' permutations three are left: to the first block's
    windows, from these to the second block's windows, and back.
    """
    graph, inputs, out, kept = built(form)
    context = Context(registry.machine("cpu"), {}, kept)
    moved = compose_remaps(keep_row_order(graph, context), context)
    assert sum(n.type in ("transpose", "remap") for n in moved.nodes) == copies
    want = computed(graph, inputs, out)
    got = computed(moved, inputs, out)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_block_whose_rows_do_not_come_back_is_left() -> None:
    graph, _, _, kept = built(displaced)
    assert keep_row_order(graph, Context(registry.machine("cpu"), {}, kept)) is graph


def test_block_in_several_phases_is_left() -> None:
    graph, _, _, kept = built(lambda *given: block(*given, 0))
    context = Context(registry.machine("cpu"), {}, kept)
    assert keep_row_order(graph, context) is not graph
    nodes = [dataclasses.replace(n, phase=1) if n.type == "transpose" else n for n in graph.nodes]
    divided = graph.with_nodes(nodes)
    assert keep_row_order(divided, context) is divided
