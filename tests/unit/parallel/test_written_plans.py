"""Runs the example of docs/parallel.md, a parallel plan that a user has written in twenty lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

import ark
from ark.parallel import parallelize
from ark.parallel.transform import View, whole_of
from tests.cases.transform import inputs_of, on_cpu_ranks, on_ranks_in_numpy, one_device, traced

PAGE = Path(__file__).parents[3] / "docs" / "parallel.md"


def written() -> Any:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (text,) = (b for b in blocks if "def rows_and_columns" in b)
    text = text.partition("\n\n\nmade = ")[0]
    assert len(text.splitlines()) <= 20
    results: dict[str, Any] = {}
    exec(text, results)
    return results["rows_and_columns"]


def perceptron() -> Any:
    x, up, down = ark.tensor((8, 12)), ark.parameter((16, 12)), ark.parameter((12, 16))
    hidden = ark.relu(ark.linear(x, up, name="up"), name="relu")
    return ark.add(ark.linear(hidden, down, name="down"), x)


def test_plan_of_the_page() -> None:
    graph = traced(perceptron)
    inputs = inputs_of(graph, 6)
    want = one_device(graph, inputs)
    split = parallelize(graph, 4, written())
    np.testing.assert_array_equal(on_ranks_in_numpy(split.plan, inputs), want)
    weights = {t.buffer.name for t in graph.tensors if t.buffer.arena == "parameter"}
    for held in split.ranks.held:
        assert {held[name].shape for name in weights} == {(8, 12), (12, 8)}
    parts = on_cpu_ranks(split.ranks, inputs, {graph.nodes[-1].outputs[0].buffer.id})
    assert {v.box for v, _ in parts} == {((0, 4), (0, 12)), ((4, 8), (0, 12))}
    np.testing.assert_array_equal(whole_of(graph, parts), want)


def test_views_meet_where_boxes_and_shares_of_values_do() -> None:
    """Which parts of a tensor overlap, checked by hand: boxes (its left and right half) and parts
    of a sum (halves and quarters).
    """
    whole = View(1, ((0, 4), (0, 8)))
    left, right = whole.cut(1, 0, 2), whole.cut(1, 1, 2)
    assert left.box == ((0, 4), (0, 4)) and not left.meets(right) and left.meets(whole)
    first, second = whole.partial(0, 2), whole.partial(1, 2)
    assert not first.meets(second) and first.meets(whole) and second.meets(whole)
    fourths = [whole.partial(i, 4) for i in range(4)]
    assert [f.meets(first) for f in fourths] == [True, True, False, False]
    assert first.partial(1, 2).share == (1, 4) and first.partial(1, 2).meets(fourths[1])
    assert not left.partial(0, 2).meets(right.partial(0, 2))
    assert not View(2, whole.box).meets(whole)
