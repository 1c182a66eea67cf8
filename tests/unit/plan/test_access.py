"""Which boxes share bytes, compared with sets of bytes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ark.plan.access import Region, region
from ark.plan.boxes import tile_boxes
from ark.plan.kind import Access
from ark.plan.types import PlanBuffer, PlanTensor
from tests.slow import examples

BUFFER_BYTES = 480


@st.composite
def touched(draw: Any) -> tuple[PlanTensor, int, list[Access]]:
    """Draws a tensor in a small buffer, the size of an element in bytes, and the boxes that tasks
    0, 1, ... access.
    """
    itemsize = draw(st.sampled_from([1, 2, 4]))
    room = BUFFER_BYTES // itemsize
    extents: list[int] = []
    for _ in range(draw(st.sampled_from([1, 2, 3, 4, 4, 4]))):
        extents.append(draw(st.integers(min(2, room), max(1, min(5, room)))))
        room //= extents[-1]
    low = [draw(st.integers(0, min(1, n - 1))) for n in extents]
    shape = [draw(st.integers(1, n - b)) for n, b in zip(extents, low, strict=True)]
    tensor = PlanTensor(0, "t", "fp32", tuple(shape), tuple(extents), tuple(low), 0)
    boxes = []
    for _ in range(draw(st.integers(1, 4))):
        lo = tuple(draw(st.integers(0, n - 1)) for n in shape)
        hi = tuple(draw(st.integers(b + 1, n)) for b, n in zip(lo, shape, strict=True))
        boxes.append(Access(0, lo, hi, write=True))
    return tensor, itemsize, boxes


def bytes_of(tensor: PlanTensor, itemsize: int, box: Access, start: int) -> set[int]:
    addresses = set()
    for index in itertools.product(*(range(a, b) for a, b in zip(box.lo, box.hi, strict=True))):
        places = zip(index, tensor.offsets, tensor.strides, strict=True)
        element = sum((i + o) * s for i, o, s in places)
        addresses.update(range(start + element * itemsize, start + (element + 1) * itemsize))
    return addresses


def bytes_of_combs(of: Region, box: int) -> set[int]:
    own, begin = of.combs, of.base + int(of.boxes.begin[box])
    numbers = np.arange(own.many[box])
    return {
        begin + int(start) + tooth * int(own.step[box]) + byte
        for start in own.starts(np.full(len(numbers), box), numbers)
        for tooth in range(int(own.count[box]))
        for byte in range(int(own.length[box]))
    }


@given(left=touched(), right=touched(), shift=st.integers(0, 40))
@settings(max_examples=examples(1000), deadline=None, derandomize=True)
def test_overlaps_are_exact(left: Any, right: Any, shift: int) -> None:
    """`overlaps` finds exactly the boxes of two regions that share bytes. shift: the distance of
    the two buffers in their arena; 0 for the same buffer.
    """
    regions = []
    for start, (tensor, itemsize, boxes) in ((0, left), (shift, right)):
        buffer = PlanBuffer(0, "b", "activation", BUFFER_BYTES, start)
        rows = [(i, i) for i in range(len(boxes))]
        packed = tile_boxes(boxes[0], rows, [(b.lo, b.hi) for b in boxes], tensor.strides, itemsize)
        regions.append(region(0, packed, tensor, buffer))
    if regions[0].same_frame(regions[1]) and shift:
        return  # one buffer has one address
    hits = set(zip(*(v.tolist() for v in regions[0].overlaps(regions[1])), strict=True))
    for i, a in enumerate(left[2]):
        for j, b in enumerate(right[2]):
            one = bytes_of(left[0], left[1], a, 0)
            other = bytes_of(right[0], right[1], b, shift)
            assert ((i, j) in hits) == bool(one & other)
            runs, length = regions[0].runs(i)
            assert {n for r in runs for n in range(int(r), int(r) + length)} == one
            assert bytes_of_combs(regions[0], i) == one
