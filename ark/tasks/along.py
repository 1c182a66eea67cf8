"""Tiles that walk along one axis, a thread a line: running sums, and stores at given indices.

`scan` params: axis (of the operands' own dimensions), function, exclusive, reverse, tile. operands:
input, output, of one shape. `scatter` params: axis, function ("set", or how an update is joined
with what is there), tile. operands: indices, updates (of the shape of indices, which may be one
index wide and broadcast), output, which holds the data before and has the updates' shape beside the
axis. Along a line updates are applied in order. Indices below 0 count from the end; one out of
range ends the launch.

coord: the tile's first index of the shape with one index along the axis (four, more are folded).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from ark.ir.fold import fold
from ark.machine import Machine
from ark.plan.kind import Access, OperandType, Signature, TaskKind, register
from ark.plan.params import (
    FLOAT_NAMES,
    INDEX_NAMES,
    INTEGER_NAMES,
    Dim,
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
from ark.tasks import expression, text
from ark.tasks.pointwise import HEADERS, NAMES, each_index, in_order, tile_box


def lines(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """The shape with one index along the axis."""
    return (*shape[:axis], 1, *shape[axis + 1 :])


def indices(shape: Sequence[int]) -> list[str]:
    """Texts of the index in every dimension of a shape."""
    return text.indices(shape, NAMES)[-len(shape) :]


def join(function: str, operand: OperandType) -> str:
    """A function of two values that joins them as the operand's type computes."""
    compute = expression.value_type(operand.dtype)
    tree = ["input", 1] if function == "set" else [function, ["input", 0], ["input", 1]]
    writer = expression.Writer([("now", compute), ("more", compute)], text.literal)
    result, _ = writer.write(tree)
    lines = "".join(f"{line} " for line in writer.statements)
    return f"[&]({compute} now, {compute} more) {{ (void)now; {lines}return {result}; }}"


class ScanParams(Params, frozen=True):
    axis: Dim
    function: Literal["add", "mul"]
    exclusive: bool
    reverse: bool
    tile: Tile


class Scan(TaskKind):
    name = "scan"
    params = ScanParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 2)
        source = typed(sig, 0, *FLOAT_NAMES, *INTEGER_NAMES)
        axis = sig.params["axis"]
        need(axis < len(source.shape), f"{list(source.shape)} has no axis {axis}")
        shaped(sig, 1, source.shape, source.dtype)
        covers(sig.params["tile"], lines(source.shape, axis))

    def places(self, sig: Signature) -> Places:
        return box(fold(lines(sig.operands[1].shape, sig.params["axis"])), sig.params["tile"])

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        shape, axis = sig.operands[1].shape, sig.params["axis"]
        lo, hi = tile_box(lines(shape, axis), coord, sig.params["tile"])
        hi = (*hi[:axis], shape[axis], *hi[axis + 1 :])
        return [Access(0, lo, hi), Access(1, lo, hi, write=True)]

    def headers(self) -> tuple[str, ...]:
        return (*HEADERS, text.header("along.h"))

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        shape, axis = sig.operands[1].shape, sig.params["axis"]
        names = indices(lines(shape, axis))
        names[axis] = "k"
        at = [text.offset(sig, i, names) for i in range(2)]
        compute = expression.value_type(sig.operands[0].dtype)
        flags = (sig.params["reverse"], sig.params["exclusive"])
        constants = ", ".join([str(shape[axis]), *(str(f).lower() for f in flags), compute])
        start = "1" if sig.params["function"] == "mul" else "0"
        body = (
            f"    ark_scan_line<{constants}>({start},\n"
            f"        [&](int k) -> {compute} {{ return {text.load(sig, 0, 'p0', at[0])}; }},\n"
            f"        {join(sig.params['function'], sig.operands[0])},\n"
            f"        [&](int k, {compute} total) {{ {text.store(sig, 1, 'p1', at[1], 'total')} }}"
            ");\n"
        )
        declare = text.operand(sig, 0, "p0") + text.operand(sig, 1, "p1", const=False)
        frame = fold(lines(shape, axis))
        return text.function(name, declare + each_index(sig.params["tile"], frame, body))


class ScatterParams(Params, frozen=True):
    axis: Dim
    function: Literal["set", "add", "mul", "maximum", "minimum"]
    tile: Tile


class Scatter(TaskKind):
    name = "scatter"
    params = ScatterParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 3)
        ids, updates, out = sig.operands
        axis = sig.params["axis"]
        need(ids.dtype in INDEX_NAMES, f"indices are {ids.dtype}")
        need(updates.dtype == out.dtype, f"{updates.dtype} is not stored as {out.dtype}")
        need(out.per_item == 1, f"{out.dtype} has several elements in a byte")
        need(
            out.dtype in (*FLOAT_NAMES, *INTEGER_NAMES) or sig.params["function"] == "set",
            f"{out.dtype} is not calculated with",
        )
        need(
            len(ids.shape) == len(updates.shape) == len(out.shape) > axis
            and ids.shape[axis] == updates.shape[axis]
            and all(n in (1, m) for n, m in zip(ids.shape, updates.shape, strict=True))
            and lines(updates.shape, axis) == lines(out.shape, axis),
            f"{list(updates.shape)} at {list(ids.shape)} do not fit {list(out.shape)}",
        )
        covers(sig.params["tile"], lines(out.shape, axis))

    def places(self, sig: Signature) -> Places:
        return box(fold(lines(sig.operands[2].shape, sig.params["axis"])), sig.params["tile"])

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        axis = sig.params["axis"]
        lo, hi = tile_box(lines(sig.operands[2].shape, axis), coord, sig.params["tile"])
        found = []
        for i, operand in enumerate(sig.operands):
            n = operand.shape
            low = tuple(0 if n[d] == 1 else b for d, b in enumerate(lo))
            high = tuple(n[d] if d == axis or n[d] == 1 else e for d, e in enumerate(hi))
            found.append(Access(i, low, high))
            if i == 2:
                found.append(Access(i, low, high, write=True))
        return found

    def headers(self) -> tuple[str, ...]:
        return (*HEADERS, text.header("along.h"))

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        ids, _, out = sig.operands
        axis = sig.params["axis"]
        names = indices(lines(out.shape, axis))
        names[axis] = "n"
        at = [text.offset(sig, i, names) for i in range(2)]
        names[axis] = "k"
        target = text.offset(sig, 2, names)
        compute = expression.value_type(out.dtype)
        now = text.load(sig, 2, "p2", target) if sig.params["function"] != "set" else "0"
        update = (
            f"      const {compute} v = {join(sig.params['function'], out)}\n"
            f"          ({now}, {text.load(sig, 1, 'p1', at[1])});\n"
            f"      {text.store(sig, 2, 'p2', target, 'v')}\n"
        )
        declare = text.operand(sig, 0, "p0") + text.operand(sig, 1, "p1")
        declare += text.operand(sig, 2, "p2", const=False)
        frame, tile = fold(lines(out.shape, axis)), sig.params["tile"]
        many, size = ids.shape[axis], out.shape[axis]
        every = (
            f"  ark_each_update<{many}, {size}>(c, [&](int n) {{ (void)n; return p0[{at[0]}]; }}"
        )
        every += ", [&](int n, int k) {\n      (void)n; (void)k;\n"
        if not machine.has("single_thread"):
            body = each_index(tile, frame, f"{every}{update}  }});\n")
        elif math.prod(lines(ids.shape, axis)) == 1:  # one lookup for a row of neighbours
            body = f"{every}{in_order(tile, frame, update)}  }});\n"
        else:
            look = f"      const int k = ark_looked_up(c, p0[{at[0]}], {size});\n"
            body = (
                f"  for (int n = 0; n < {many}; ++n) {{\n"
                f"{in_order(tile, frame, look + update)}  }}\n"
            )
        return text.function(name, declare + body)


register(Scan())
register(Scatter())
