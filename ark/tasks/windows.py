"""Tiles of pooling: the largest element, the sum or the mean of a window around every element.

params: function, size, stride, dilation, before (one number a spatial dimension: the window's, in
indices; `before` of them lie in front of the input), counted (a mean counts what lies outside of
the input), tile. operands: input (n, channels, spatial...), output. What lies outside of the input
does not take part. coord: the tile's first index of the output (four, more are folded).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from ark.ir.fold import fold
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import INT_MAX, Params, Places, Tile, box, count, covers, need, shaped, typed
from ark.tasks import text
from ark.tasks.along import ALONG, indices
from ark.tasks.pointwise import each_index, in_order, tile_box

Step = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Steps = Annotated[tuple[Step, ...], msgspec.Meta(min_length=1, max_length=3)]
Margin = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
Margins = Annotated[tuple[Margin, ...], msgspec.Meta(min_length=1, max_length=3)]


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
        p = sig.params
        source = typed(sig, 0).shape
        spatial = len(source) - 2
        need(
            all(len(p[key]) == spatial for key in ("size", "stride", "dilation", "before")),
            f"a window of {list(p['size'])} does not fit {list(source)}",
        )
        out = typed(sig, 1).shape
        need(len(out) == len(source) and out[:2] == source[:2], f"{list(out)} is no pooling")
        shaped(sig, 1, out)
        for d in range(spatial):
            last = (out[2 + d] - 1) * p["stride"][d] + (p["size"][d] - 1) * p["dilation"][d]
            need(last < INT_MAX, "a window reaches further than can be counted")
            first = (out[2 + d] - 1) * p["stride"][d] - p["before"][d]
            need(
                p["before"][d] < p["size"][d] * p["dilation"][d] and first < source[2 + d],
                "a window lies outside of the input",
            )
        covers(p["tile"], out)

    def places(self, sig: Signature) -> Places:
        return box(fold(sig.operands[1].shape), sig.params["tile"])

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        source, out = (o.shape for o in sig.operands)
        p = sig.params
        lo, hi = tile_box(out, coord, p["tile"])
        low, high = list(lo[:2]), list(hi[:2])
        for d, n in enumerate(source[2:]):
            first = lo[2 + d] * p["stride"][d] - p["before"][d]
            last = (hi[2 + d] - 1) * p["stride"][d] - p["before"][d]
            last += (p["size"][d] - 1) * p["dilation"][d]
            low.append(min(max(first, 0), n - 1))
            high.append(max(min(last, n - 1), 0) + 1)
        return [Access(0, tuple(low), tuple(high)), Access(1, lo, hi, write=True)]

    def headers(self) -> tuple[str, ...]:
        return ALONG

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        source, out = (o.shape for o in sig.operands)
        p = sig.params
        names = indices(out)
        spatial = len(source) - 2
        at = [*names[:2], *(f"x{d}" for d in range(spatial))]
        load = text.load(sig, 0, "p0", text.offset(sig, 0, at))
        join = (
            "total = v > total || v != v ? v : total;" if p["function"] == "max" else "total += v;"
        )
        inner = f"      const float v = {load};\n      {join}\n      ++many;\n"
        for d in range(spatial - 1, -1, -1):
            window = (
                *(p[key][d] for key in ("size", "stride", "dilation", "before")),
                source[2 + d],
            )
            inner = (
                f"    ark_each_in_window<{', '.join(map(str, window))}>({names[2 + d]}, "
                f"[&](int x{d}) {{\n{inner}    }});\n"
            )
        full = 1
        for n in p["size"]:
            full *= n
        divisor = f"{full}" if p["counted"] else "(many > 0 ? many : 1)"
        result = f"total / static_cast<float>({divisor})" if p["function"] == "mean" else "total"
        start = "-ark_inf()" if p["function"] == "max" else "0.0f"
        body = (
            f"    float total = {start};\n    int many = 0;\n    (void)many;\n{inner}"
            f"    {text.store(sig, 1, 'p1', text.offset(sig, 1, names), result)}\n"
        )
        declare = text.operand(sig, 0, "p0") + text.operand(sig, 1, "p1", const=False)
        each = in_order if machine.has("single_thread") else each_index
        return text.function(name, declare + each(p["tile"], fold(out), body))


register(Pool())
