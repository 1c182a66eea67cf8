"""Tiles of pooling: the largest element, the sum or the mean of a window around every element.

params: function, size, stride, dilation, before (one number a spatial dimension: the window's, in
indices; `before` of them lie in front of the input), counted (a mean counts what lies outside of
the input), tile. operands: input (n, channels, spatial...), output. What lies outside of the input
does not take part. coord: the tile's first index of the output (four, more are folded).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

import msgspec

from ark.ir.fold import fold
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import (
    INT_MAX,
    Params,
    Places,
    Size,
    Tile,
    box,
    count,
    covers,
    need,
    shaped,
    typed,
)
from ark.tasks import text
from ark.tasks.along import ALONG, indices
from ark.tasks.box_text import NAMES, each_index, in_order, tile_type
from ark.tasks.pointwise import tile_box

MOST_TOGETHER = 32  # places of a window whose loads are under way at once
Step = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Steps = Annotated[tuple[Step, ...], msgspec.Meta(min_length=1, max_length=3)]
Margin = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
Margins = Annotated[tuple[Margin, ...], msgspec.Meta(min_length=1, max_length=3)]
Sizes = Annotated[tuple[Size, ...], msgspec.Meta(min_length=1, max_length=3)]


class Windows(Protocol):
    """Sizes, strides, dilations and margins before an input of windows, one a dimension."""

    @property
    def size(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def dilation(self) -> tuple[int, ...]: ...
    @property
    def before(self) -> tuple[int, ...]: ...


class PlacedWindows(Windows, Protocol):
    """Windows that say how many places there are, one number a dimension."""

    @property
    def sizes(self) -> tuple[int, ...]: ...


def window_sizes(p: Windows) -> tuple[tuple[int, ...], ...]:
    """Size, stride, dilation and margin, each by dimension."""
    return p.size, p.stride, p.dilation, p.before


def index_ranges(sizes: Sequence[int], first: int, end: int) -> list[tuple[int, int]]:
    """By dimension of `sizes` the first and the last index of places from `first` on, below `end`;
    places are counted as rows of memory are.
    """
    found: list[tuple[int, int]] = []
    last = end - 1
    whole = False  # a run of several indices further out has all of these
    for d, n in enumerate(sizes):
        step = math.prod(sizes[d + 1 :])
        a, b = first // step % n, last // step % n
        found.append((0, n - 1) if whole else (a, b))
        whole = whole or a != b
    return found


def reached(
    p: Windows, sizes: Sequence[int], ranges: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """The box of an input's spatial indices, of `sizes`, that the windows of these places reach;
    at least one index of each.
    """
    low: list[int] = []
    high: list[int] = []
    for d, ((first, last), n) in enumerate(zip(ranges, sizes, strict=True)):
        begin = first * p.stride[d] - p.before[d]
        end = last * p.stride[d] - p.before[d] + (p.size[d] - 1) * p.dilation[d]
        low.append(min(max(begin, 0), n - 1))
        high.append(max(min(end, n - 1), 0) + 1)
    return low, high


class PoolParams(Params, frozen=True):
    function: Literal["max", "sum", "mean"]
    size: Steps
    stride: Steps
    dilation: Steps
    before: Margins
    counted: bool
    tile: Tile


class Pool(TaskKind):
    name = "pool"
    params = PoolParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 2)
        p = sig.read(PoolParams)
        source = typed(sig, 0).shape
        spatial = len(source) - 2
        need(
            all(len(numbers) == spatial for numbers in window_sizes(p)),
            f"a window of {list(p.size)} does not fit {list(source)}",
        )
        out = typed(sig, 1).shape
        need(len(out) == len(source) and out[:2] == source[:2], f"{list(out)} is no pooling")
        shaped(sig, 1, out)
        for d in range(spatial):
            last = (out[2 + d] - 1) * p.stride[d] + (p.size[d] - 1) * p.dilation[d]
            need(last < INT_MAX, "a window reaches further than can be counted")
            first = (out[2 + d] - 1) * p.stride[d] - p.before[d]
            need(
                p.before[d] < p.size[d] * p.dilation[d] and first < source[2 + d],
                "a window lies outside of the input",
            )
        covers(p.tile, out)

    def places(self, sig: Signature) -> Places:
        return box(fold(sig.operands[1].shape), sig.read(PoolParams).tile)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        source, out = (o.shape for o in sig.operands)
        p = sig.read(PoolParams)
        lo, hi = tile_box(out, coord, p.tile)
        ranges = [(a, b - 1) for a, b in zip(lo[2:], hi[2:], strict=True)]
        low, high = reached(p, source[2:], ranges)
        box_of = (*lo[:2], *low), (*hi[:2], *high)
        return [Access(0, *box_of), Access(1, lo, hi, write=True)]

    def headers(self) -> tuple[str, ...]:
        return ALONG

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        source, out = (o.shape for o in sig.operands)
        p = sig.read(PoolParams)
        names = indices(out)
        spatial = len(source) - 2
        at = [*names[:2], *(f"x{d}" for d in range(spatial))]
        load = text.load(sig, 0, "p0", text.offset(sig, 0, at))
        most, counts = p.function == "max", p.function == "mean" and not p.counted
        start = "-ark_inf()" if most else "0.0f"
        join = "total = v > total || v != v ? v : total;" if most else "total += v;"
        # Many threads load something where there is nothing, so that a window's loads, and those of
        # several windows, are under way together.
        together = not machine.has(Capability.SINGLE_THREAD) and math.prod(p.size) <= MOST_TOGETHER
        there = " && ".join(f"inside{d}" for d in range(spatial)) if together else "true"
        value = f"{there} ? loaded : {start}" if together else "loaded"
        inner = (
            f"      const float loaded = {load};\n      const float v = {value};\n      {join}\n"
        )
        inner += f"      many += {there};\n" if counts else ""
        for d in range(spatial - 1, -1, -1):
            window = (
                *(numbers[d] for numbers in window_sizes(p)),
                source[2 + d],
            )
            listed = ", ".join(map(str, window))
            callee, given = "ark_each_in_window", f"int x{d}"
            if together:
                callee, given = "ark_each_of_window", f"int x{d}, bool inside{d}"
            inner = f"    {callee}<{listed}>({names[2 + d]}, [&]({given}) {{\n{inner}    }});\n"
        divisor = f"{math.prod(p.size)}" if p.counted else "(many > 0 ? many : 1)"
        result = f"total / static_cast<float>({divisor})" if p.function == "mean" else "total"
        total = f"    float total = {start};\n    int many = 0;\n    (void)many;\n{inner}"
        store = text.store(sig, 1, "p1", text.offset(sig, 1, names), "made")
        declare = text.operand(sig, 0, "p0") + text.operand(sig, 1, "p1", const=False)
        if not together:
            body = f"{total}    const float made = {result};\n    {store}\n"
            each = in_order if machine.has(Capability.SINGLE_THREAD) else each_index
            return text.function(name, declare + each(p.tile, fold(out), body))
        at4 = ", ".join(f"int {i}" for i in NAMES)
        unused = " ".join(f"(void){i};" for i in NAMES)
        walk = (
            f"  ark_each_window<{tile_type(p.tile, fold(out))}>(t.coord,\n"
            f"      [&]({at4}) {{\n    {unused}\n{total}    return {result};\n  }},\n"
            f"      [&](float made, {at4}) {{ {unused} {store} }});\n"
        )
        return text.function(name, declare + walk)


register(Pool())
