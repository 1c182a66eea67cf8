"""The task kind `scatter`: updates of elements at given indices along one axis. Emitted by
ark.lower.ops.lookup.

`scatter` params: axis, function ("set", or the function that combines an update with the old
element), tile, span (indices along the axis that a task writes).

operands: indices, updates, [data], output. The updates have the shape of the indices, except that
indices of size 1 in the last dimension broadcast. The output has the updates' shape except along
the axis. With `data` the output is data with the updates applied; without it the output is updated
in place. The updates of a line are applied in order, so that results have the same bits in every
run. Negative indices count from the end. An index out of range ends the launch.

coord: the tile's first index in the shape with size 1 along the axis (four dimensions; more are
folded), and the first index of its span. There are several spans only if all lines have the same
indices; each task then reads all indices and applies the updates of its own span.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from ark.ir.fold import fold
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
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
)
from ark.tasks import expression, text
from ark.tasks.along import indices, join, lines
from ark.tasks.box_text import NAMES, declared, each_index, in_order, tile_type
from ark.tasks.elementwise import HEADERS, tile_box

INDICES_PER_ROUND = 4  # indices that a thread reads per round; ark_looks in scatter.h
UPDATES_PER_ROUND = 8  # updates that a thread loads and passes on per round
MAX_LANE_ELEMENTS_IN_FLIGHT = 4  # the most elements of an update that a lane has in flight
MIN_SHARED_MEMORY_LINES = 4  # shared memory is used if it holds at least this many lines
MIN_WARP_LINE_UPDATES = 16  # a line gets a warp of its own if it has at least this many updates


def same_places(shape: Sequence[int], axis: int) -> bool:
    """True if the same indices apply to all lines along the axis. shape: the shape of the index
    tensor.
    """
    return math.prod(lines(shape, axis)) == 1


class ScatterParams(Params, frozen=True):
    axis: Dim
    function: Literal["set", "add", "mul", "maximum", "minimum"]
    tile: Tile
    span: Size


class Scatter(TaskKind):
    name = "scatter"
    params = ScatterParams
    headers = (*HEADERS, *text.headers("scatter.h", "scatter_lines.h"))

    def check(self, sig: Signature) -> None:
        super().check(sig)
        params = sig.read(ScatterParams)
        copied = len(sig.operands) == 4
        count(sig, 4 if copied else 3)
        ids, updates, out = *sig.operands[:2], sig.operands[-1]
        axis = params.axis
        need(ids.dtype in INDEX_NAMES, f"indices are {ids.dtype}, expected int32 or int64")
        need(updates.dtype == out.dtype, f"updates have type {updates.dtype}, expected {out.dtype}")
        need(out.per_item == 1, f"{out.dtype} is not supported: several elements share a byte")
        need(
            out.dtype in (*FLOAT_NAMES, *INTEGER_NAMES) or params.function == "set",
            f"scatter of {out.dtype} supports only the function `set`",
        )
        need(
            len(ids.shape) == len(updates.shape) == len(out.shape) > axis
            and ids.shape[axis] == updates.shape[axis]
            and all(n in (1, m) for n, m in zip(ids.shape, updates.shape, strict=True))
            and lines(updates.shape, axis) == lines(out.shape, axis),
            f"updates of shape {list(updates.shape)} at indices of shape {list(ids.shape)} do not "
            f"fit an output of shape {list(out.shape)}",
        )
        covers(params.tile, lines(out.shape, axis))
        span, size = params.span, out.shape[axis]
        if copied:
            data = shaped(sig, 2, out.shape, out.dtype)
            need(
                _of_rows(sig) and data.strides[-1] == out.strides[-1] == 1,
                "the operand `data` is supported only if axis is the last dimension and each line "
                "has indices of its own",
            )
        need(
            span == size or (span < size and same_places(ids.shape, axis)),
            f"a task of {span} of {size} positions along the axis needs the same indices for all "
            f"lines, got indices of shape {list(ids.shape)}",
        )

    def places(self, sig: Signature) -> Places:
        params = sig.read(ScatterParams)
        shape, axis = sig.operands[-1].shape, params.axis
        tiles = box(fold(lines(shape, axis)), params.tile)
        return Places((*tiles.ranges, range(0, shape[axis], params.span)))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        params = sig.read(ScatterParams)
        axis = params.axis
        out = len(sig.operands) - 1
        lo, hi = tile_box(lines(sig.operands[out].shape, axis), coord[:-1], params.tile)
        accesses = []
        for i, operand in enumerate(sig.operands):
            n = operand.shape
            span = (coord[-1], coord[-1] + params.span)
            first, last = span if i == out else (0, n[axis])
            low = tuple(first if d == axis else min(b, n[d] - 1) for d, b in enumerate(lo))
            high = tuple(min(last if d == axis else e, n[d]) for d, e in enumerate(hi))
            if i < out or out == 2:
                accesses.append(Access(i, low, high))
            if i == out:
                accesses.append(Access(i, low, high, write=True))
        return accesses

    def scratch(self, sig: Signature, machine: Machine) -> int:
        if self._by_rows(sig, machine):
            return self._rooms(sig, machine) * _row_bytes(sig)
        if round_ := self._round(sig, machine):
            return _staged_bytes(sig) * math.prod(sig.read(ScatterParams).tile) * (round_ + 1)
        if not self._examined_by_block(sig, machine):
            return 0
        looks = INDICES_PER_ROUND * machine.warps * (2 * machine.lanes + 1)
        listed = INDICES_PER_ROUND * machine.warps * machine.lanes + machine.warps
        return 4 * (looks + listed * self._by_place(sig, machine))

    def _examined_by_block(self, sig: Signature, machine: Machine) -> bool:
        """True if all threads of a block together examine the indices, to find the updates that
        apply to the block's tile.
        """
        same = same_places(sig.operands[0].shape, sig.read(ScatterParams).axis)
        return same and machine.cooperative

    def _by_rows(self, sig: Signature, machine: Machine) -> bool:
        """True if each line (all elements along the axis) is updated by one warp."""
        copied, alone = len(sig.operands) == 4, not machine.cooperative
        return _of_rows(sig) and (
            copied or alone or sig.operands[1].shape[-1] >= MIN_WARP_LINE_UPDATES
        )

    def _rooms(self, sig: Signature, machine: Machine) -> int:
        """The number of lines that are kept in shared memory while they are updated; 0 for none."""
        room = machine.task_bytes
        rooms = min(machine.warps, room // _row_bytes(sig)) if len(sig.operands) == 4 else 0
        return rooms if rooms >= MIN_SHARED_MEMORY_LINES else 0

    def _round(self, sig: Signature, machine: Machine) -> int:
        """The number of updates per line that a block loads into shared memory at once. Each line
        is then updated by one warp. 0 if each line is updated by one thread.
        """
        params = sig.read(ScatterParams)
        many, count = sig.operands[0].shape[params.axis], math.prod(params.tile)
        if (
            many < MIN_WARP_LINE_UPDATES
            or not machine.cooperative
            or self._examined_by_block(sig, machine)
        ):
            return 0
        threads, room = machine.warps * machine.lanes, machine.task_bytes
        most = min(UPDATES_PER_ROUND * threads // count, room // _staged_bytes(sig) // count - 1)
        return max(0, min(most, many + machine.lanes - 1)) // machine.lanes * machine.lanes

    def _by_place(self, sig: Signature, machine: Machine) -> bool:
        """True if each warp updates its own part of the task's span of indices; False if each
        thread has elements at all indices of the span.
        """
        params = sig.read(ScatterParams)
        few = math.prod(params.tile) <= MAX_LANE_ELEMENTS_IN_FLIGHT * machine.lanes
        return few and params.span >= machine.warps

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(ScatterParams)
        if self._by_rows(sig, machine):
            return self._rows(name, sig, machine)
        ids, out = sig.operands[0], sig.operands[2]
        axis, tile = params.axis, params.tile
        names = indices(lines(out.shape, axis))
        names[axis] = "n"
        at = [text.offset(sig, i, names) for i in range(2)]
        names[axis] = "k"
        target = text.offset(sig, 2, names)
        compute = expression.value_type(out.dtype)
        now = text.load(sig, 2, "p2", target) if params.function != "set" else "0"
        more, joined = text.load(sig, 1, "p1", at[1]), join(params.function, out)
        update = (
            f"      const {compute} v = {joined}\n          ({now}, {more});\n"
            f"      {text.store(sig, 2, 'p2', target, 'v')}\n"
        )
        declare = text.operand(sig, 0, "p0") + text.operand(sig, 1, "p1")
        declare += text.operand(sig, 2, "p2", const=False)
        frame, many, size = fold(lines(out.shape, axis)), ids.shape[axis], out.shape[axis]
        span = (
            f"<{many}, {size}>(c, t.coord[4], t.coord[4] + {params.span}, "
            f"[&](int n) {{ (void)n; return p0[{at[0]}]; }}, "
        )
        updated = (
            f"        [&](int n) -> {compute} {{ (void)n; return {more}; }},\n"
            f"        [&](int k) -> {compute} {{ (void)k; return {now}; }},\n"
            f"        {joined},\n        [&](int k, {compute} v) {{ (void)k; "
            f"{text.store(sig, 2, 'p2', target, 'v')} }});\n"
        )
        at4, unused = declared(NAMES), "".join(f"(void){name}; " for name in NAMES)
        by_line = (
            f"        [&](int n, {at4}) -> {compute} {{ (void)n; {unused}return {more}; }},\n"
            f"        [&](int k, {at4}) -> {compute} {{ (void)k; {unused}return {now}; }},\n"
            f"        {joined},\n        [&](int k, {compute} v, {at4}) {{ (void)k; {unused}"
            f"{text.store(sig, 2, 'p2', target, 'v')} }});\n"
        )
        every = f"ark_each_update{span}[&](int n, int k) {{\n      (void)n; (void)k;\n"
        if self._examined_by_block(sig, machine) and self._by_place(sig, machine):
            bytes_before = 4 * INDICES_PER_ROUND * machine.warps * (2 * machine.lanes + 1)
            room = f"ARK_SCRATCH(c) + {bytes_before}"
            body = (
                f"  ark_each_update_found{span}ARK_SCRATCH(c), [&](const ArkUpdates& updates) {{\n"
                f"    ark_apply_updates_by_place<{compute}, {tile_type(tile, frame)}>(\n"
                f"        t.coord, updates, {room},\n{by_line}  }});\n"
            )
        elif self._examined_by_block(sig, machine):
            apply = f"    ark_apply_updates<{compute}>(updates,\n{updated}"
            body = (
                f"  ark_each_update_found{span}ARK_SCRATCH(c), [&](const ArkUpdates& updates) {{\n"
                f"{each_index(tile, frame, apply)}  }});\n"
            )
        elif round_ := self._round(sig, machine):
            body = (
                f"  ark_apply_lines<{compute}, {tile_type(tile, frame)}, {many}, {size}, {round_}>("
                f"c, t.coord,\n        ARK_SCRATCH(c),\n"
                f"        [&](int n, {at4}) {{ (void)n; {unused}return p0[{at[0]}]; }},\n{by_line}"
            )
        elif machine.cooperative:
            apply = (
                f"    ark_apply_line<{compute}, {many}, {size}>(c,\n"
                f"        [&](int n) {{ (void)n; return p0[{at[0]}]; }},\n{updated}"
            )
            body = each_index(tile, frame, apply)
        elif same_places(ids.shape, axis):  # one lookup for a row of neighbours
            body = f"  {every}{in_order(tile, frame, update)}  }});\n"
        else:
            look = f"      const int k = ark_looked_up(c, p0[{at[0]}], {size});\n"
            body = (
                f"  for (int n = 0; n < {many}; ++n) {{\n"
                f"{in_order(tile, frame, look + update)}  }}\n"
            )
        return text.function(name, declare + body)

    def _rows(self, name: str, sig: Signature, machine: Machine) -> str:
        """The body of the device function in which each line is updated by one warp (or by the only
        thread of a block).
        """
        params = sig.read(ScatterParams)
        ids, updates, out = *sig.operands[:2], sig.operands[-1]
        last, size, frame = (
            len(sig.operands) - 1,
            out.shape[-1],
            lines(out.shape, params.axis),
        )
        copied, compute = last == 3, expression.value_type(out.dtype)
        names = [*indices(frame)[:-1], "0"]
        vector = 16 // out.itemsize
        strides = [s for o in sig.operands[2:] for s in o.strides[:-1]]
        while vector > 1 and (size % vector or any(s % vector for s in strides)):
            vector //= 2
        vector = min(vector, 8) if copied else 1
        listed = (
            *(tile_type(params.tile, fold(frame)), updates.shape[-1], size),
            *(ids.strides[-1], updates.strides[-1], out.strides[-1]),
            *(copied, vector, self._rooms(sig, machine), compute),
        )
        now = text.load(sig, last, "line", "k") if params.function != "set" else "0"
        line, news = (f"{'const ' * c}{o.ctype}*" for c, o in ((0, out), (1, updates)))
        arguments = (
            *(text.place(sig, i, NAMES[:3], names) for i in (0, 1, 2)),
            text.place(sig, last, NAMES[:3], names, const=False),
            f"[]({news} p, ark_i64 n) -> {compute} {{ return {text.load(sig, 1, 'p', 'n')}; }}",
            f"[&]({line} line, ark_i64 k, {compute} more) {{ const {compute} v = "
            f"{join(params.function, out)}({now}, more); "
            f"{text.store(sig, last, 'line', 'k', 'v')} }}",
            text.addresses(sig, range(2, len(sig.operands))),
        )
        return text.call(name, "ark_scatter_lines", listed, arguments)


def _of_rows(sig: Signature) -> bool:
    """True if lines are along the last dimension and have different indices."""
    ids, out = sig.operands[0], sig.operands[-1]
    axis = sig.read(ScatterParams).axis
    return bool(axis == len(out.shape) - 1) and not same_places(ids.shape, axis)


def _staged_bytes(sig: Signature) -> int:
    """Bytes of shared memory for an update's index and value."""
    return 4 + (8 if expression.value_type(sig.operands[-1].dtype) == "ark_i64" else 4)


def _row_bytes(sig: Signature) -> int:
    """Bytes of a line in shared memory."""
    out = sig.operands[-1]
    return -(-out.shape[-1] * out.itemsize // 16) * 16


register(Scatter())
