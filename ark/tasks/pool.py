"""The task kind `pool`: for each window of an image, the largest element, the place of this element
in the window, the sum or the mean. Emitted by ark.lower.ops.pools.

params: function, size, stride, dilation, before (one number per spatial dimension; `before` is the
padding before the first element), counted (a mean also counts padding), tile. The function argmax
stores the number of the window's element that is the largest (the first of equal ones).

operands: input (n, channels, spatial...), output. Elements outside of the input do not take part.

coord: the tile's first index of the output (four dimensions; more are folded).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from ark.ir.fold import fold
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import (
    INT_MAX,
    Params,
    Places,
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
from ark.tasks.elementwise import tile_box
from ark.tasks.windows import Margins, Steps, reached, vector, window_sizes

MAX_WINDOW_LOADS = 32  # a larger window is not loaded at once
VECTORS_IN_FLIGHT = 2


class PoolParams(Params, frozen=True):
    function: Literal["max", "argmax", "sum", "mean"]
    size: Steps
    stride: Steps
    dilation: Steps
    before: Margins
    counted: bool
    tile: Tile


class Pool(TaskKind):
    name = "pool"
    params = PoolParams
    headers = (*ALONG, text.header("pool.h"))

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 2)
        p = sig.read(PoolParams)
        source = typed(sig, 0).shape
        spatial = len(source) - 2
        need(
            all(len(numbers) == spatial for numbers in window_sizes(p)),
            f"the window parameters need one number for each spatial dimension of {list(source)}",
        )
        out = typed(sig, 1).shape
        need(
            len(out) == len(source) and out[:2] == source[:2],
            f"output {list(out)} does not have the batch and channels of the input",
        )
        shaped(sig, 1, out)
        for d in range(spatial):
            last = (out[2 + d] - 1) * p.stride[d] + (p.size[d] - 1) * p.dilation[d]
            need(last < INT_MAX, "window indices exceed 32 bits")
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

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        p = sig.read(PoolParams)
        alone = not machine.cooperative
        declare = text.operand(sig, 0, "p0") + text.operand(sig, 1, "p1", const=False)
        # If a window reaches outside of the input, many threads load the nearest element inside
        # instead and ignore it. The code then has no branches, so many loads are in flight at the
        # same time.
        if alone or math.prod(p.size) > MAX_WINDOW_LOADS:
            each = in_order if alone else each_index
            return text.function(
                name, declare + each(p.tile, fold(sig.operands[1].shape), _one(sig))
            )
        many, body = vector(p, p.tile, sig), _walk(sig)
        if many > 1:
            body = text.where_aligned(sig, (0, 1), _walk_vectors(sig, many), body)
        return text.function(name, declare + body)


def _names(sig: Signature) -> tuple[list[str], list[str]]:
    """Two lists of C++ texts: a result's indices, and the indices of an element of its window."""
    names = indices(sig.operands[1].shape)
    spatial = len(sig.operands[0].shape) - 2
    return list(names), [*names[:2], *(f"x{d}" for d in range(spatial))]


def _start(p: PoolParams) -> str:
    return "-ark_inf()" if p.function in ("max", "argmax") else "0.0f"


def _declared(p: PoolParams, size: str = "") -> str:
    """The C++ declaration of a running total; for argmax, also of a place."""
    places = f", place{size}" if p.function == "argmax" else ""
    return f"    float total{size}{places};\n"


def _cleared(p: PoolParams, at: str = "") -> str:
    """C++ statements that begin a total."""
    place = f" place{at} = -1.0f;" if p.function == "argmax" else ""
    return f"total{at} = {_start(p)};{place}"


def _place(sig: Signature) -> str:
    """The C++ text of the number of an element in its window."""
    p, (names, at) = sig.read(PoolParams), _names(sig)
    terms = [
        f"({at[2 + d]} + {p.before[d]} - {names[2 + d]} * {p.stride[d]}) / {p.dilation[d]}"
        f" * {math.prod(p.size[d + 1 :])}"
        for d in range(len(p.size))
    ]
    return " + ".join(terms)


def _join(sig: Signature, at: str, predicated: bool) -> str:
    """A C++ statement that adds the value v to a running total or, for max pooling, keeps the
    larger of the two.
    """
    p, total = sig.read(PoolParams), f"total{at}"
    if p.function == "argmax":
        there = f"{_there(sig)} && " if predicated else ""
        return (
            f"if ({there}(v > {total} || v != v || place{at} < 0.0f)) {{ {total} = v; "
            f"place{at} = static_cast<float>({_place(sig)}); }}"
        )
    return (
        f"{total} = v > {total} || v != v ? v : {total};"
        if p.function == "max"
        else f"{total} += v;"
    )


def _result(p: PoolParams, at: str = "") -> str:
    """The C++ text of a window's result, computed from its total. In it, the variable `many` is the
    number of the window's elements inside of the input.
    """
    if p.function == "argmax":
        return f"place{at}"
    total = f"total{at}"
    divisor = f"{math.prod(p.size)}" if p.counted else "(many > 0 ? many : 1)"
    return f"{total} / static_cast<float>({divisor})" if p.function == "mean" else total


def _over_window(sig: Signature, body: str, predicated: bool) -> str:
    """Statements that run `body` for each element of a window. predicated: True to load a
    value even for elements outside of the input, and ignore it. The code then has no branches.
    """
    source, p = sig.operands[0].shape, sig.read(PoolParams)
    names, _ = _names(sig)
    there = _there(sig) if predicated else "true"
    body += f"      many += {there};\n" if p.function == "mean" and not p.counted else ""
    for d in range(len(source) - 3, -1, -1):
        window = (*(numbers[d] for numbers in window_sizes(p)), source[2 + d])
        listed = ", ".join(map(str, window))
        callee, given = "ark_each_in_window", f"int x{d}"
        if predicated:
            callee, given = "ark_each_of_window", f"int x{d}, bool inside{d}"
        body = f"    {callee}<{listed}>({names[2 + d]}, [&]({given}) {{\n{body}    }});\n"
    return body


def _there(sig: Signature) -> str:
    return " && ".join(f"inside{d}" for d in range(len(sig.operands[0].shape) - 2))


def _total(sig: Signature, predicated: bool) -> str:
    """C++ statements that pool one window into `total`."""
    p = sig.read(PoolParams)
    load = text.load(sig, 0, "p0", text.offset(sig, 0, _names(sig)[1]))
    value = f"{_there(sig)} ? loaded : {_start(p)}" if predicated else "loaded"
    inner = (
        f"      const float loaded = {load};\n      const float v = {value};\n"
        f"      {_join(sig, '', predicated)}\n"
    )
    return (
        f"{_declared(p)}    {_cleared(p)}\n    int many = 0;\n    (void)many;\n"
        f"{_over_window(sig, inner, predicated)}"
    )


def _one(sig: Signature) -> str:
    """C++ statements that compute one window's result and store it."""
    store = text.store(sig, 1, "p1", text.offset(sig, 1, _names(sig)[0]), "made")
    result = _result(sig.read(PoolParams))
    return f"{_total(sig, False)}    const float made = {result};\n    {store}\n"


def _called(sig: Signature, callee: str, constants: str, body: str, given: str, store: str) -> str:
    """The text of a C++ call that runs `body` for each window of the tile and stores the value that
    it returns.
    """
    box_of = tile_type(sig.read(PoolParams).tile, fold(sig.operands[1].shape))
    at4 = ", ".join(f"int {i}" for i in NAMES)
    unused = " ".join(f"(void){i};" for i in NAMES)
    return (
        f"  {callee}<{box_of}{constants}>(t.coord,\n"
        f"      [&]({at4}) {{\n    {unused}\n{body}  }},\n"
        f"      [&]({given}, {at4}) {{ {unused} {store} }});\n"
    )


def _walk(sig: Signature) -> str:
    """Statements in which all threads compute the results of windows, one at a time."""
    store = text.store(sig, 1, "p1", text.offset(sig, 1, _names(sig)[0]), "made")
    body = f"{_total(sig, True)}    return {_result(sig.read(PoolParams))};\n"
    return _called(sig, "ark_each_window", "", body, "float made", store)


def _walk_vectors(sig: Signature, many: int) -> str:
    """Statements in which all threads compute the results of neighbouring windows as vectors."""
    p, out = sig.read(PoolParams), sig.operands[1]
    names, at = _names(sig)
    element = text.load(sig, 0, "loaded.v", "j")
    each = f"#pragma unroll\n    for (int j = 0; j < {many}; ++j)"
    inner = (
        f"      const auto loaded = ark_load_pack<{many}>(p0 + {text.offset(sig, 0, at)});\n"
        f"{each} {{\n      const float v = {_there(sig)} ? {element} : {_start(p)};\n"
        f"      {_join(sig, '[j]', True)}\n    }}\n"
    )
    body = (
        f"{_declared(p, f'[{many}]')}{each} {{ {_cleared(p, '[j]')} }}\n"
        f"    int many = 0;\n    (void)many;\n{_over_window(sig, inner, True)}"
        f"    ArkPack<{out.ctype}, {many}> made;\n"
        f"{each} {text.store(sig, 1, 'made.v', 'j', _result(p, '[j]'))}\n"
        "    return made;\n"
    )
    store = f"ark_store_pack<{many}>(p1 + {text.offset(sig, 1, names)}, made);"
    in_flight = VECTORS_IN_FLIGHT
    if math.prod(p.size) * in_flight > MAX_WINDOW_LOADS:
        in_flight = 1
    constants = f", {many}, {in_flight}"
    given = f"const ArkPack<{out.ctype}, {many}>& made"
    return _called(sig, "ark_each_window_pack", constants, body, given, store)


register(Pool())
