"""The offsets of elements behind transposes and copies, compared with NumPy on an array that holds
each element's own offset.
"""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import ark
from ark.ir.dtype import fp32
from ark.ir.graph import Node
from ark.lower.rewrite.strided import Place, Writes, origins, place_of, rows_of
from tests.slow import examples


def factored(draw: st.DrawFn, total: int) -> list[int]:
    """Draws a shape with `total` elements, as a product of random factors."""
    sizes = []
    while total > 1 and len(sizes) < 5:
        size = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
        sizes.append(size)
        total //= size
    return [*sizes, total]


def listed(place: Place) -> np.ndarray:
    """Returns the offsets of a place's elements in order."""
    offsets = np.array([place.start])
    for runs in place.axes:
        for count, step in runs:
            offsets = (offsets[:, None] + np.arange(count) * step).reshape(-1)
    return offsets


@given(st.data())
@settings(max_examples=examples(300), deadline=None)
def test_every_origin_holds_the_same_elements(data: st.DataObject) -> None:
    total = data.draw(st.sampled_from([12, 24, 36, 60, 64]))
    shape = factored(data.draw, total)
    model = ark.Model(0, 1)
    buffers: dict[int, np.ndarray] = {}
    with ark.use_model(model):
        x = ark.tensor(shape, fp32)
        if data.draw(st.booleans()):  # of half of the rows
            half = shape[0] // 2
            x = x[half:]
        whole = np.arange(total)
        buffers[x.ir.buffer.id] = whole
        seen = whole.reshape(shape)[-x.ir.shape[0] :]
        for _ in range(data.draw(st.integers(1, 3))):
            order = data.draw(st.permutations(range(len(x.ir.shape))))
            x, seen = ark.transpose(x, order), seen.transpose(order)
            buffers[x.ir.buffer.id] = seen.reshape(-1)
            sizes = factored(data.draw, x.ir.elements)
            x, seen = ark.reshape(x, sizes), seen.reshape(sizes)
            buffers[x.ir.buffer.id] = seen.reshape(-1)
        size = x.ir.shape[0]
        begin = data.draw(st.integers(0, size - 1))
        end = data.draw(st.integers(begin + 1, size))
        x, seen = x[begin:end], seen[begin:end]
    last: dict[int, tuple[int, Node]] = {}
    for place, node in enumerate(model.graph.nodes):
        for tensor in node.outputs:
            last[tensor.buffer.id] = (place, node)
    axes = [(d,) for d in range(len(x.ir.shape))]
    listed_origins = list(origins(place_of(x.ir, axes), Writes(last), 0))
    assert listed_origins
    for place in listed_origins:
        assert (buffers[place.buffer.id][listed(place)] == seen.reshape(-1)).all()
        runs = [math.prod(count for count, _ in axis) for axis in place.axes]
        assert runs == list(x.ir.shape)


def test_rows_are_boxes_of_their_buffer() -> None:
    """A part of a projection's result is read as a box of its buffer: the second part of (batch 2,
    rows 5, 3 parts of 4 heads of 8 elements).
    """
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.tensor((2, 5, 96), fp32)
        part = ark.reshape(x[:, :, 32:64], [2, 5, 4, 8])
        turned = ark.transpose(part, [0, 2, 1, 3])
    last: dict[int, tuple[int, Node]] = {}
    for place, node in enumerate(model.graph.nodes):
        for tensor in node.outputs:
            last[tensor.buffer.id] = (place, node)
    *_, first = origins(place_of(turned.ir, ((0, 1), (2,), (3,))), Writes(last), 0)
    rows = rows_of(first, 4, 2 * 5 * 96)
    assert rows is not None
    assert (rows.shape, rows.extents, rows.offsets) == ((2, 5, 32), (2, 5, 96), (0, 0, 32))
    assert rows_of(first, 8, 2 * 5 * 96) is None
