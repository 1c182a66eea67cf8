"""The task kind `convolution`, which reads windows directly from the image (implicit GEMM) without
matrix units. Emitted by ark.lower.ops.windows.

params: size, stride, dilation, before (one number per spatial dimension, see ark.tasks.windows;
elements outside of the input are zero), sizes (of the result's spatial dimensions), expr as in
ark.tasks.matmul, tile.

operands: weight (1, groups, outputs, depth), input (n, channels, spatial...), output (n, groups,
outputs, places), and the further inputs of the expression. The depth is a group's channels times
the elements of the window.

coord: the indices of the tile's first element in the output; all of a tile has the same n. Sums are
in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import INT_MAX, Params, Places, Tile, box, covers, need, typed
from ark.tasks import expression, text
from ark.tasks.elementwise import broadcast_access, broadcasts, tile_box
from ark.tasks.matmul_text import finish, outputs
from ark.tasks.matmul_windows import MAX_ROWS_PER_THREAD, begins
from ark.tasks.windows import Margins, Sizes, Steps, index_ranges, reached, window_sizes

COLUMN_ROWS = (8, 4, 2, 1)  # numbers of results in one image column that a thread may compute
MOST_TAPS, MOST_DEPTH, MOST_SPAN = 7, 64, 32  # window elements, channels, input rows of a thread


class ConvolutionParams(Params, frozen=True):
    size: Steps
    stride: Steps
    dilation: Steps
    before: Margins
    sizes: Sizes
    tile: Tile
    expr: list[Any] | None = None


class Convolution(TaskKind):
    name = "convolution"
    params = ConvolutionParams
    headers = text.headers("convolution.h")

    def check(self, sig: Signature) -> None:
        super().check(sig)
        p = sig.read(ConvolutionParams)
        check_expression(sig, p.expr)
        weight, source, out = (typed(sig, index).shape for index in range(3))
        spatial = len(source) - 2
        numbers = (*window_sizes(p), p.sizes)
        need(
            all(len(n) == spatial for n in numbers),
            f"the window parameters need one number for each spatial dimension of {list(source)}",
        )
        need(len(weight) == len(out) == 4, "weight and output must have four dimensions")
        n, groups, rows, places = out
        need(
            places == math.prod(p.sizes),
            f"the output has {places} positions, expected {list(p.sizes)}",
        )
        need(
            source[0] == n and source[1] % groups == 0,
            f"the input has shape {list(source)}, expected {n} images with a multiple of {groups} "
            "channels",
        )
        depth = source[1] // groups * math.prod(p.size)
        need(sig.operands[0].strides[3] == 1, "rows of weights must be contiguous")
        need(
            weight == (1, groups, rows, depth),
            f"weights have shape {list(weight)}, expected {[1, groups, rows, depth]}",
        )
        for d in range(spatial):
            last = (p.sizes[d] - 1) * p.stride[d] + (p.size[d] - 1) * p.dilation[d]
            need(last < INT_MAX, "window indices exceed 32 bits")
        covers(p.tile, out)
        need(p.tile[0] == 1, f"a tile must be part of one image, got {p.tile[0]} images")

    def places(self, sig: Signature) -> Places:
        return box(sig.operands[2].shape, sig.read(ConvolutionParams).tile)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        weight, source, out = (o.shape for o in sig.operands[:3])
        p = sig.read(ConvolutionParams)
        lo, hi = tile_box(out, coord, p.tile)
        each = source[1] // out[1]
        low, high = reached(p, source[2:], index_ranges(p.sizes, lo[3], hi[3]))
        return [
            Access(0, (0, lo[1], lo[2], 0), (1, hi[1], hi[2], weight[3])),
            Access(1, (lo[0], lo[1] * each, *low), (hi[0], hi[1] * each, *high)),
            *(broadcast_access(sig, i, lo, hi) for i in range(3, len(sig.operands))),
            Access(2, lo, hi, write=True),
        ]

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        elements = math.prod(sig.read(ConvolutionParams).tile)
        return 2.0 * elements * sig.operands[0].shape[3], super().cost(sig, coord)[1]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        p, source, out = sig.read(ConvolutionParams), sig.operands[1], sig.operands[2].shape
        if high := column_rows(sig, machine):
            return _columns(name, sig, high)
        taps, each = math.prod(p.size), source.shape[1] // out[1]
        constants = (*p.tile[1:], *out[1:], each, taps, source.strides[1], 1, MAX_ROWS_PER_THREAD)
        weights = text.offset(sig, 0, ["0", "g", "m", f"(channel * {taps} + tap)"])
        body = (
            text.operand(sig, 0, "p0")
            + text.operand(sig, 1, "p1")
            + outputs(sig)
            + "  const int i0 = t.coord[0];\n  (void)i0;\n"
        )
        begin = begins(
            p,
            source.shape[2:],
            "n",
            lambda x: text.offset(sig, 1, ["i0", f"(g * {each})", *x]),
        )
        arguments = (
            *(f"t.coord[{d}]" for d in (1, 2, 3)),
            f"[&](int g, int m, int channel, int tap) {{ (void)g; return p0 + ({weights}); }}",
            f"[&](int g, int tap, int n) -> decltype(p1) {{\n    (void)g;\n{begin}  }}",
            f"[&](int i1, int m, int n, float sum) {{\n      (void)i1;\n"
            f"{finish(sig, 'sum', 'm', 'n')}  }}",
        )
        body += f"  {text.called('ark_convolution', constants, arguments)};\n"
        return text.function(name, body)


def check_expression(sig: Signature, expr: list[Any] | None) -> None:
    """Raises PlanError unless the expression of a convolution is valid. It may read the operands
    from number 3 on, which must broadcast to the output (operand 2).
    """
    others = sig.operands[3:]
    need(len(sig.operands) >= 3, "the output operand is missing")
    need(expr is not None or not others, "additional operands need an expression, got none")
    if expr is not None:
        expression.check(expr, ["fp32", *(o.dtype for o in others)])
        need(
            not expression.places(expr),
            "the expression of a convolution cannot use the indices of elements",
        )
    for index in range(3, len(sig.operands)):
        broadcasts(sig, index, 2)


def column_rows(sig: Signature, machine: Machine) -> int:
    """The number of neighbouring results in one column of the image that a thread computes. 0 if
    threads do not compute columns. Only depthwise convolutions (one output channel per group) whose
    tiles are whole image rows are computed by columns.
    """
    p, out = sig.read(ConvolutionParams), sig.operands[2].shape
    groups, _, places = p.tile[1:]
    if len(p.size) != 2 or out[2] != 1 or places % p.sizes[1]:
        return 0
    if max(p.size) > MOST_TAPS or sig.operands[0].shape[3] > MOST_DEPTH:
        return 0
    threads, reach = machine.warps * machine.lanes, (p.size[0] - 1) * p.dilation[0]

    def busies(high: int) -> bool:
        bands = -(-places // p.sizes[1] // high)
        return groups * bands * p.sizes[1] >= threads

    fits = (r for r in COLUMN_ROWS if (r - 1) * p.stride[0] + reach < MOST_SPAN)
    able = list(fits)
    return next(filter(busies, able), able[-1] if able else 0)


def _columns(name: str, sig: Signature, high: int) -> str:
    """The text of a device function in which each thread computes `high` results in one column of
    the image.
    """
    p, source, out = sig.read(ConvolutionParams), sig.operands[1], sig.operands[2].shape
    taps, each = math.prod(p.size), source.shape[1] // out[1]
    numbers = [n for pair in (*window_sizes(p), source.shape[2:], p.sizes) for n in pair]
    window = f"ArkWindow<{', '.join(map(str, numbers))}>"
    weights = text.offset(sig, 0, ["0", "g", "0", f"(channel * {taps} + tap)"])
    places = text.offset(sig, 1, ["i0", f"(g * {each} + channel)", "y", "x"])
    arguments = (
        *(f"t.coord[{d}]" for d in (1, 3)),
        f"[&](int g, int channel, int tap) {{ return p0 + ({weights}); }}",
        f"[&](int g, int channel, int y, int x) {{ return p1 + ({places}); }}",
        f"[&](int i1, int m, int n, float sum) {{\n      (void)i1;\n      (void)m;\n"
        f"{finish(sig, 'sum', 'm', 'n')}  }}",
    )
    constants = (window, p.tile[1], p.tile[3], out[1], each, high)
    return text.function(
        name,
        text.operand(sig, 0, "p0")
        + text.operand(sig, 1, "p1")
        + outputs(sig)
        + "  const int i0 = t.coord[0];\n  (void)i0;\n"
        + f"  {text.called('ark_convolution_columns', constants, arguments)};\n",
    )


register(Convolution())
