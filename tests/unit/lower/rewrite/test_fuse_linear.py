"""Products of few rows that are fused with their neighbours: only if no other op needs, and no op
changes, what lies between.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_linear import MAX_COPIED_ROWS, fuse_linear
from tests.interpreter import Interpreter

ROWS, COLUMNS = 2, 16
OUTPUTS = MAX_COPIED_ROWS + 8  # so many that a layer does not repeat a norm that others read
Disturb = Callable[[ark.Tensor], object]


def nothing(t: ark.Tensor) -> None:
    pass


def read_in_another_shape(t: ark.Tensor) -> None:
    ark.exp(ark.reshape(t, [4, -1]), output=ark.tensor([4, t.shape()[1] // 2], name="other"))


def read_a_part(t: ark.Tensor) -> None:
    ark.exp(t[1:, 4:8], output=ark.tensor([1, 4], name="other"))


def change_a_part(t: ark.Tensor) -> None:
    ark.copy(0.5, output=t[1:, 4:8])


def change_all(t: ark.Tensor) -> None:
    ark.mul(t, 0.25, output=t)


@pytest.mark.parametrize("place", ["norm", "product", "bias"])
@pytest.mark.parametrize(
    "disturb", [nothing, read_in_another_shape, read_a_part, change_a_part, change_all]
)
def test_layers_are_fused_unless_other_ops_access_a_result_between(
    disturb: Disturb, place: str
) -> None:
    """disturb: an op on the result of the norm, the product or the sum with the bias."""
    after = {place: disturb}
    with ark.use_model(ark.Model()) as model:
        x, residual = ark.tensor([ROWS, COLUMNS]), ark.tensor([ROWS, OUTPUTS])
        rows = ark.rmsnorm(x, ark.parameter([COLUMNS]), 1e-5)
        after.get("norm", nothing)(rows)
        product = ark.linear(rows, ark.parameter([OUTPUTS, COLUMNS]))
        after.get("product", nothing)(product)
        biased = ark.add(product, ark.parameter([OUTPUTS]))
        after.get("bias", nothing)(biased)
        ark.add(biased, residual, output=ark.tensor([ROWS, OUTPUTS], name="result"))
    graph = model.graph
    rewritten = fuse_linear(graph, Context(registry.machine("cpu-2")))
    random = np.random.default_rng(0)
    written = {t.buffer.id for n in graph.nodes for t in n.outputs}
    contents: dict[int, np.ndarray] = {}
    results = []
    for each in (graph, rewritten):
        memory = Interpreter()
        for tensor in (t for n in graph.nodes for t in n.inputs if t.buffer.id not in written):
            if tensor.buffer.id not in contents:
                contents[tensor.buffer.id] = random.normal(size=tensor.shape)
            memory.view(tensor)[...] = contents[tensor.buffer.id]
        memory.run(each, 0)
        named = {t.name: t for n in each.nodes for t in n.outputs}
        results.append([memory.view(named[n]).copy() for n in ("result", "other") if n in named])
    assert len(results[0]) == len(results[1])
    for want, got in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    assert (len(rewritten.nodes) == 1) == (disturb is nothing)
