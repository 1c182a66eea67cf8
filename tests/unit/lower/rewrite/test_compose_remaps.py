"""Copies by index arithmetic that follow each other become one copy with the same elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.ir.dtype import fp32
from ark.lower.rewrite.compose_remaps import compose_remaps
from ark.lower.rewrite.context import Context
from tests.unit.lower.computed import computed
from tests.windows_of_images import image, roll, windows

SHAPE = (2, 12, 8, 5)


def steps(x: Any, *begins: int) -> Any:
    """Takes every second row, and of these every second column. begins: the first row and the first
    column.
    """
    n, h, w, c = x.shape()
    rows = ark.strided_slice(x, [0, begins[0], 0, 0], [n, h // 2, w, c], [1, 2, 1, 1])
    return ark.strided_slice(rows, [0, 0, begins[1], 0], [n, h // 2, w // 2, c], [1, 1, 2, 1])


def merged(x: Any, corners: tuple[tuple[int, int], ...]) -> Any:
    return ark.concat([steps(x, *corner) for corner in corners], 3)


FORMS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "shifted windows": (lambda x: windows(roll(x, 0, 2, 3, 0), 3, 4), 1),
    "shifted back": (lambda x: roll(image(windows(x, 3, 4)), 0, -2, -3, 0), 1),
    "shifted twice": (lambda x: roll(roll(x, 0, 2, 3, 0), 1, 11, 7, 0), 1),
    "windows, shifted among themselves": (
        lambda x: windows(roll(image(roll(windows(x, 3, 4), 0, 1, 0, 0, 0, 0)), 0, 1, 1, 0), 4, 2),
        1,
    ),
    "every other": (lambda x: steps(x, 1, 0), 1),
    "merged": (lambda x: merged(x, ((0, 0), (1, 0), (0, 1), (1, 1))), 1),
    "merged in another order": (lambda x: merged(x, ((1, 1), (0, 1), (1, 0), (0, 0))), 1),
    "merged without digits": (lambda x: merged(x, ((0, 0), (1, 1), (1, 0), (0, 1))), 5),
    "flipped and shifted": (lambda x: roll(ark.flip(x, 1), 0, 5, 0, 0), 2),
    "padded": (lambda x: roll(ark.pad(x, [(0, 0), (1, 1), (0, 0), (0, 0)]), 0, 3, 0, 0), 2),
    "without whole rows": (lambda x: ark.transpose(roll(x, 0, 1, 1, 0), [0, 3, 1, 2]), 2),
    "copied twice": (lambda x: ark.add(windows(roll(x, 0, 1, 1, 0), 3, 4), 1.0), 2),
}


@pytest.mark.parametrize("name", FORMS)
def test_chain_is_one_copy_of_the_same_elements(name: str) -> None:
    build, left = FORMS[name]
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.tensor(SHAPE, fp32, name="x")
        out = build(x)
    kept = frozenset({x.ir.buffer.id, out.ir.buffer.id})
    graph = compose_remaps(model.graph, Context(registry.machine("cpu"), {}, kept))
    assert sum(not n.virtual for n in graph.nodes) == left
    given = {x.ir.buffer.id: np.arange(math.prod(SHAPE), dtype=np.float32)}
    want = computed(model.graph, given, out.ir)
    np.testing.assert_array_equal(computed(graph, given, out.ir), want)


def test_source_that_is_overwritten_is_not_read_late() -> None:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.tensor(SHAPE, fp32, name="x")
        shifted = roll(x, 0, 2, 3, 0)
        ark.copy(ark.mul(x, 2.0), x)
        out = windows(shifted, 3, 4)
    kept = frozenset({x.ir.buffer.id, out.ir.buffer.id})
    graph = compose_remaps(model.graph, Context(registry.machine("cpu"), {}, kept))
    assert [n.type for n in graph.nodes if not n.virtual].count("transpose") == 1
