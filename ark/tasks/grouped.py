"""The task kind `grouped_convolution`: convolutions in groups of few channels, of images with
channels last, without matrix units. Emitted by ark.lower.ops.windows.

params: as those of ark.tasks.depthwise.

operands: weight (depth, outputs), input (n, height, width, channels), output (n, height, width,
outputs), and the further inputs of the expression, which broadcast to the output. The depth is the
elements of the window times the channels of a group; the channels are the inner dimension. The
outputs of a group are neighbours.

coord: the tile's first index of the output. Sums are in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import INT_MAX, Places, box, covers, need, typed
from ark.tasks import expression, text
from ark.tasks.box_text import NAMES, tile_type
from ark.tasks.convolution import ConvolutionParams, check_expression
from ark.tasks.elementwise import broadcast_access, tile_box
from ark.tasks.matmul_text import outputs
from ark.tasks.windows import Windows, reached, window_sizes

VECTOR_BYTES = 16  # most bytes of neighbouring channels of the image that a thread loads at once
COLUMNS_PER_THREAD = (4, 2, 1)  # numbers of neighbouring results of a row that a thread may compute
WEIGHT_SHARE = 2  # the time for loading weights, in times of multiplying them for one result
MAX_LOADS = 12  # vectors of the image that a thread loads for one row of its windows


class GroupedConvolution(TaskKind):
    name = "grouped_convolution"
    params = ConvolutionParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        p = sig.read(ConvolutionParams)
        check_expression(sig, p.expr)
        weight, source, out = (typed(sig, index).shape for index in range(3))
        need(
            all(len(n) == 2 for n in (*window_sizes(p), p.sizes)),
            "the window parameters need two numbers each",
        )
        need(len(weight) == 2, f"the weights have {len(weight)} dimensions, expected 2")
        need(len(source) == 4, f"the input has {len(source)} dimensions, expected 4")
        need(
            out == (source[0], *p.sizes, weight[1]),
            f"the output has shape {list(out)}, expected {[source[0], *p.sizes, weight[1]]}",
        )
        taps = math.prod(p.size)
        each = weight[0] // taps
        need(
            each > 0 and weight[0] % taps == 0 and source[3] % each == 0,
            f"weights {list(weight)} do not fit windows {list(p.size)} of input {list(source)}",
        )
        groups = source[3] // each
        need(out[3] % groups == 0, f"{out[3]} outputs are not divisible into {groups} groups")
        for d in range(2):
            last = (p.sizes[d] - 1) * p.stride[d] + (p.size[d] - 1) * p.dilation[d]
            need(last < INT_MAX, "window indices exceed 32 bits")
        covers(p.tile, out)

    def places(self, sig: Signature) -> Places:
        return box(sig.operands[2].shape, sig.read(ConvolutionParams).tile)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        weight, source, out = (o.shape for o in sig.operands[:3])
        p = sig.read(ConvolutionParams)
        lo, hi = tile_box(out, coord, p.tile)
        ranges = [(a, b - 1) for a, b in zip(lo[1:3], hi[1:3], strict=True)]
        low, high = reached(p, source[1:3], ranges)
        each, rows = widths(sig)
        first, end = lo[3] // rows * each, -(-hi[3] // rows) * each
        return [
            Access(0, (0, lo[3]), (weight[0], hi[3])),
            Access(1, (lo[0], *low, first), (hi[0], *high, end)),
            *(broadcast_access(sig, i, lo, hi) for i in range(3, len(sig.operands))),
            Access(2, lo, hi, write=True),
        ]

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        elements = math.prod(sig.read(ConvolutionParams).tile)
        return 2.0 * elements * sig.operands[0].shape[0], super().cost(sig, coord)[1]

    def headers(self) -> tuple[str, ...]:
        return tuple(map(text.header, ("box.h", "convolution.h", "grouped.h")))

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        packs = vectors(sig)
        body = _walk(sig, packs, machine)
        return text.function(name, declared(sig) + where_aligned(sig, machine, packs, body))


def widths(sig: Signature) -> tuple[int, int]:
    """The numbers of channels and of outputs of a group."""
    weight, source, out = (o.shape for o in sig.operands[:3])
    each = weight[0] // math.prod(sig.read(ConvolutionParams).size)
    return each, out[3] // (source[3] // each)


def staged(tile: Sequence[int], p: Windows, widths_of_a_group: tuple[int, int]) -> tuple[int, int]:
    """The pixels that a tile's results read, and the channels that they read of each."""
    images, down, across, channels = tile
    each, rows = widths_of_a_group
    high, wide = (
        (n - 1) * s + (k - 1) * d + 1
        for n, s, k, d in zip((down, across), p.stride, p.size, p.dilation, strict=True)
    )
    return images * high * wide, -(-channels // rows) * each


def _by_channel(sig: Signature, index: int) -> bool:
    """True if the operand has an element for each channel."""
    return bool(sig.operands[index].shape) and sig.operands[index].shape[-1] > 1


def where_aligned(sig: Signature, machine: Machine, packs: tuple[int, int], body: str) -> str:
    """Statements that run the body, which accesses `packs` elements at once (as `vectors` returns),
    if all addresses are aligned, and otherwise compute the tile element by element.
    """
    read = [0, 1, 2, *(i for i in range(3, len(sig.operands)) if _by_channel(sig, i))]
    asked = text.addresses(sig, read)
    if packs == (1, 1) or asked == "0u":
        return body
    single = _walk(sig, (1, 1), machine)
    return f"  if (ark_aligned({asked})) {{\n{body}  }} else {{\n{single}  }}\n"


def vectors(sig: Signature) -> tuple[int, int]:
    """The number of neighbouring outputs of a group that a thread computes together, and the number
    of neighbouring channels of a group that it loads at once.
    """
    each, rows = widths(sig)
    stored = [0, 2, *(i for i in range(3, len(sig.operands)) if _by_channel(sig, i))]
    return _pack(sig, stored, [rows, sig.read(ConvolutionParams).tile[3]]), _pack(sig, [1], [each])


def _pack(sig: Signature, operands: Sequence[int], counts: Sequence[int]) -> int:
    """The elements of a vector, as many as divide `counts` and the strides of these operands."""
    numbers = list(counts)
    for o in (sig.operands[i] for i in operands):
        numbers += [s for s, n in zip(o.strides[:-1], o.shape[:-1], strict=True) if n > 1]
    if any(sig.operands[i].strides[-1] != 1 for i in operands):
        return 1
    return math.gcd(VECTOR_BYTES // sig.operands[1].itemsize, *numbers)


def columns_per_thread(
    tile: Sequence[int], window: tuple[int, int, int], pack: int, machine: Machine
) -> int:
    """The number of neighbouring results of a row that a thread computes, of those that need few
    registers: the one with which the last thread ends earliest. window: the kernel's size, stride
    and dilation across. pack: the neighbouring outputs that a thread computes.
    """
    size, stride, dilation = window

    def able(wide: int) -> bool:
        return (wide - 1) * stride + (size - 1) * dilation < MAX_LOADS

    def ends(wide: int) -> int:
        return thread_rounds(tile, wide, pack, machine) * (wide + WEIGHT_SHARE)

    return min(filter(able, COLUMNS_PER_THREAD), key=ends, default=1)


def thread_rounds(tile: Sequence[int], wide: int, pack: int, machine: Machine) -> int:
    """How many times a thread computes `wide` neighbouring results for `pack` outputs."""
    images, rows, columns, channels = tile
    units = images * rows * -(-columns // wide) * -(-channels // pack)
    return -(-units // (machine.warps * machine.lanes))


def _walk(sig: Signature, packs: tuple[int, int], machine: Machine) -> str:
    """Statements that compute the task's tile. packs: as by `vectors`."""
    p = sig.read(ConvolutionParams)
    across = p.size[1], p.stride[1], p.dilation[1]
    columns = columns_per_thread(p.tile, across, packs[0], machine)
    constants = (*types(sig), *widths(sig), *packs, columns)
    return f"  {text.called('ark_grouped', constants, functions(sig, packs[0]))};\n"


def types(sig: Signature) -> tuple[str, str]:
    """The texts of the C++ types of the window and of the tile."""
    p, out = sig.read(ConvolutionParams), sig.operands[2]
    sizes = sig.operands[1].shape[1:3]
    numbers = [n for pair in (*window_sizes(p), sizes, p.sizes) for n in pair]
    return f"ArkWindow<{', '.join(map(str, numbers))}>", tile_type(p.tile, out.shape)


def declared(sig: Signature) -> str:
    """The declarations of the operands' pointers that the functions of `functions` use."""
    return text.operand(sig, 0, "p0") + text.operand(sig, 1, "p1") + outputs(sig)


def functions(sig: Signature, pack: int) -> tuple[str, ...]:
    """The texts of the functions that a body calls: the address of weights, the address of
    channels, and the one that applies the expression to `pack` sums and stores the results.
    """
    return (
        f"[&](int k, int i3) {{ return p0 + ({text.offset(sig, 0, ['k', 'i3'])}); }}",
        f"[&](int i0, int i1, int i2, int i3) {{ (void)i0; "
        f"return p1 + ({text.offset(sig, 1, NAMES)}); }}",
        f"[&](int i0, int i1, int i2, int i3, const float (&sums)[{pack}]) {{\n"
        f"      (void)i0; (void)i1; (void)i2;\n{_finish(sig, pack)}  }}",
    )


def _finish(sig: Signature, pack: int) -> str:
    """C++ statements that apply the expression to the sums of `pack` outputs and store them."""
    expr = sig.read(ConvolutionParams).expr
    lines, leaves = [], [("sums[j]", "float")]
    for i in range(3, len(sig.operands)):
        at = text.offset(sig, i, NAMES)
        if _by_channel(sig, i):
            lines.append(f"const auto e{i} = ark_load_pack<{pack}>(p{i} + ({at}));")
            leaves.append((text.load(sig, i, f"e{i}.v", "j"), text.loaded(sig, i)))
        else:
            lines.append(f"const auto e{i} = {text.load(sig, i, f'p{i}', at)};")
            leaves.append((f"e{i}", text.loaded(sig, i)))
    writer = expression.Writer(leaves, text.literal)
    value = "sums[j]" if expr is None else writer.write(expr)[0]
    out = sig.operands[2]
    lines += [
        f"ArkPack<{out.ctype}, {pack}> made;",
        f"#pragma unroll\n      for (int j = 0; j < {pack}; ++j) {{",
        *writer.statements,
        text.store(sig, 2, "made.v", "j", value),
        "}",
        f"ark_store_pack<{pack}>(po + ({text.offset(sig, 2, NAMES)}), made);",
    ]
    return "".join(f"      {line}\n" for line in lines)


register(GroupedConvolution())
