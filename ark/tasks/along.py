"""Tiles that walk along one axis: running sums, and stores at given indices. A line is one
thread's, or shared by a warp or the block where it is long.

`scan` params: axis (of the operands' own dimensions), function, exclusive, reverse, tile. operands:
input, output, of one shape. `scatter` params: axis, function ("set", or how an update is joined
with what is there), tile, span (places along the axis that a task writes to). operands: indices,
updates (of the shape of indices, which may be one index wide and broadcast), output, which holds
the data before and has the updates' shape beside the axis. Along a line updates are applied in
order. Indices below 0 count from the end; one out of range ends the launch.

coord: the tile's first index of the shape with one index along the axis (four, more are folded);
for `scatter` also the first of its places. Only where all lines have the same indices are there
several spans: a task looks at all indices and does what is for its own places.
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
    Size,
    Tile,
    box,
    count,
    covers,
    need,
    shaped,
    typed,
)
from ark.tasks import expression, text
from ark.tasks.pointwise import HEADERS, NAMES, each_index, in_order, tile_box, tile_type

LOOKS = 4  # indices that a thread looks at in a round, as ark_looks of along.h
AHEAD = 8  # elements of a running sum that a thread has under way
SIDE_BY_SIDE = 4  # elements of an update that a lane has under way at once, at most
ALONG = (*HEADERS, text.header("folds.h"), text.header("along.h"))


def lines(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """The shape with one index along the axis."""
    return (*shape[:axis], 1, *shape[axis + 1 :])


def same_places(shape: Sequence[int], axis: int) -> bool:
    """Have all lines along the axis the same indices, which are of this shape?"""
    return math.prod(lines(shape, axis)) == 1


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
        return ALONG

    def scratch(self, sig: Signature, machine: Machine) -> int:
        pieces = _pieces(sig, machine)
        if not pieces or pieces[1] == 1:
            return 0
        size = 8 if expression.value_type(sig.operands[0].dtype) == "ark_i64" else 4
        return 2 * size * machine.lanes * machine.warps

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        shape, axis = sig.operands[1].shape, sig.params["axis"]
        names = indices(lines(shape, axis))
        names[axis] = "k"
        at = [text.offset(sig, i, names) for i in range(2)]
        compute = expression.value_type(sig.operands[0].dtype)
        flags = [str(sig.params[flag]).lower() for flag in ("reverse", "exclusive")]
        start = f"{compute}({1 if sig.params['function'] == 'mul' else 0})"
        given = (
            f"        [&](int k) -> {compute} {{ return {text.load(sig, 0, 'p0', at[0])}; }},\n"
            f"        {join(sig.params['function'], sig.operands[0])},\n"
            f"        [&](int k, {compute} total) {{ {text.store(sig, 1, 'p1', at[1], 'total')} }}"
        )
        declare = text.operand(sig, 0, "p0") + text.operand(sig, 1, "p1", const=False)
        tile, frame = sig.params["tile"], fold(lines(shape, axis))
        pieces = _pieces(sig, machine)
        if not pieces:
            constants = ", ".join((str(shape[axis]), *flags, compute))
            body = f"    ark_scan_line<{constants}>({start},\n{given});\n"
            return text.function(name, declare + each_index(tile, frame, body))
        along, team = pieces
        listed = (shape[axis], *flags, str(along).lower(), team, AHEAD, compute)
        body = (
            f"    ark_scan_pieces<{', '.join(map(str, listed))}>({start}, inside,\n{given},\n"
            "        ARK_SCRATCH(c), parity);\n"
        )
        unused = " ".join(f"(void){n};" for n in NAMES)
        walk = (
            f"  int parity = 0;\n  ark_each_line<{tile_type(tile, frame)}, "
            f"{1 if along else machine.lanes}, {team}>(t.coord,\n"
            f"      [&](bool inside, {', '.join(f'int {n}' for n in NAMES)}) {{\n    {unused}\n"
            f"{body}  }});\n"
        )
        return text.function(name, declare + walk)


def _pieces(sig: Signature, machine: Machine) -> tuple[bool, int] | None:
    """How the threads of a block share lines of a scan: whether lanes go along a line, and how many
    warps have one; None where each thread has lines to itself.
    """
    shape, axis, tile = sig.operands[1].shape, sig.params["axis"], sig.params["tile"]
    shared = any(o.per_item > 1 for o in sig.operands)
    if machine.has("single_thread") or shared or shape[axis] < machine.lanes:
        return None
    if axis != len(shape) - 1 and 2 * tile[3] >= machine.lanes:
        return (False, machine.warps) if shape[axis] >= AHEAD * machine.warps else None
    return True, 1 if math.prod(tile) >= machine.warps else machine.warps


class ScatterParams(Params, frozen=True):
    axis: Dim
    function: Literal["set", "add", "mul", "maximum", "minimum"]
    tile: Tile
    span: Size


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
        span, size = sig.params["span"], out.shape[axis]
        need(
            span == size or (span < size and same_places(ids.shape, axis)),
            f"{size} places are written to in spans of {span} at {list(ids.shape)}",
        )

    def places(self, sig: Signature) -> Places:
        shape, axis = sig.operands[2].shape, sig.params["axis"]
        tiles = box(fold(lines(shape, axis)), sig.params["tile"])
        return Places((*tiles.ranges, range(0, shape[axis], sig.params["span"])))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        axis = sig.params["axis"]
        lo, hi = tile_box(lines(sig.operands[2].shape, axis), coord[:-1], sig.params["tile"])
        found = []
        for i, operand in enumerate(sig.operands):
            n = operand.shape
            first, last = (coord[-1], coord[-1] + sig.params["span"]) if i == 2 else (0, n[axis])
            low = tuple(first if d == axis else min(b, n[d] - 1) for d, b in enumerate(lo))
            high = tuple(min(last if d == axis else e, n[d]) for d, e in enumerate(hi))
            found.append(Access(i, low, high))
            if i == 2:
                found.append(Access(i, low, high, write=True))
        return found

    def headers(self) -> tuple[str, ...]:
        return ALONG

    def scratch(self, sig: Signature, machine: Machine) -> int:
        if not self._together(sig, machine):
            return 0
        found = LOOKS * machine.warps * (2 * machine.lanes + 1)
        listed = LOOKS * machine.warps * machine.lanes + machine.warps
        return 4 * (found + listed * self._by_place(sig, machine))

    def _together(self, sig: Signature, machine: Machine) -> bool:
        """Do all threads of a block look for the updates of their places?"""
        same = same_places(sig.operands[0].shape, sig.params["axis"])
        return same and not machine.has("single_thread")

    def _by_place(self, sig: Signature, machine: Machine) -> bool:
        """Has each warp places of its own? Else a thread has elements of all places."""
        few = math.prod(sig.params["tile"]) <= SIDE_BY_SIDE * machine.lanes
        return few and sig.params["span"] >= machine.warps

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        ids, _, out = sig.operands
        axis, tile = sig.params["axis"], sig.params["tile"]
        names = indices(lines(out.shape, axis))
        names[axis] = "n"
        at = [text.offset(sig, i, names) for i in range(2)]
        names[axis] = "k"
        target = text.offset(sig, 2, names)
        compute = expression.value_type(out.dtype)
        now = text.load(sig, 2, "p2", target) if sig.params["function"] != "set" else "0"
        more, joined = text.load(sig, 1, "p1", at[1]), join(sig.params["function"], out)
        update = (
            f"      const {compute} v = {joined}\n          ({now}, {more});\n"
            f"      {text.store(sig, 2, 'p2', target, 'v')}\n"
        )
        declare = text.operand(sig, 0, "p0") + text.operand(sig, 1, "p1")
        declare += text.operand(sig, 2, "p2", const=False)
        frame, many, size = fold(lines(out.shape, axis)), ids.shape[axis], out.shape[axis]
        span = (
            f"<{many}, {size}>(c, t.coord[4], t.coord[4] + {sig.params['span']}, "
            f"[&](int n) {{ (void)n; return p0[{at[0]}]; }}, "
        )
        every = f"ark_each_update{span}[&](int n, int k) {{\n      (void)n; (void)k;\n"
        if self._together(sig, machine) and self._by_place(sig, machine):
            at4 = ", ".join(f"int {name}" for name in NAMES)
            unused = "".join(f"(void){name}; " for name in NAMES)
            room = f"ARK_SCRATCH(c) + {4 * LOOKS * machine.warps * (2 * machine.lanes + 1)}"
            body = (
                f"  ark_each_update_found{span}ARK_SCRATCH(c), [&](const ArkUpdates& updates) {{\n"
                f"    ark_apply_updates_by_place<{compute}, {tile_type(tile, frame)}>(\n"
                f"        t.coord, updates, {room},\n"
                f"        [&](int n, {at4}) -> {compute} {{ (void)n; {unused}return {more}; }},\n"
                f"        [&](int k, {at4}) -> {compute} {{ (void)k; {unused}return {now}; }},\n"
                f"        {joined},\n        [&](int k, {compute} v, {at4}) {{ (void)k; {unused}"
                f"{text.store(sig, 2, 'p2', target, 'v')} }});\n  }});\n"
            )
        elif self._together(sig, machine):
            apply = (
                f"    ark_apply_updates<{compute}>(updates,\n"
                f"        [&](int n) -> {compute} {{ (void)n; return {more}; }},\n"
                f"        [&](int k) -> {compute} {{ (void)k; return {now}; }},\n"
                f"        {joined},\n        [&](int k, {compute} v) {{ (void)k; "
                f"{text.store(sig, 2, 'p2', target, 'v')} }});\n"
            )
            body = (
                f"  ark_each_update_found{span}ARK_SCRATCH(c), [&](const ArkUpdates& updates) {{\n"
                f"{each_index(tile, frame, apply)}  }});\n"
            )
        elif not machine.has("single_thread"):
            body = each_index(tile, frame, f"{every}{update}  }});\n")
        elif same_places(ids.shape, axis):  # one lookup for a row of neighbours
            body = f"  {every}{in_order(tile, frame, update)}  }});\n"
        else:
            look = f"      const int k = ark_looked_up(c, p0[{at[0]}], {size});\n"
            body = (
                f"  for (int n = 0; n < {many}; ++n) {{\n"
                f"{in_order(tile, frame, look + update)}  }}\n"
            )
        return text.function(name, declare + body)


register(Scan())
register(Scatter())
