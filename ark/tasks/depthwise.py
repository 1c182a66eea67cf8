"""The task kind `depthwise`: depthwise convolutions (one output for each channel) of images with
channels last, without matrix units. Emitted by ark.lower.ops.windows.

params: size, stride, dilation, before (two numbers each, see ark.tasks.windows; elements outside of
the input are zero), sizes (height and width of the result), expr as in ark.tasks.matmul, tile.

operands: weight (taps, channels), input (n, height, width, channels), output (n, height, width,
channels), and the further inputs of the expression, which broadcast to the output.

coord: the tile's first index of the output. Sums are in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import INT_MAX, Places, box, covers, need, shaped, typed
from ark.tasks import expression, text
from ark.tasks.box_text import NAMES, tile_type
from ark.tasks.convolution import ConvolutionParams, check_expression
from ark.tasks.elementwise import broadcast_access, tile_box
from ark.tasks.matmul_text import outputs
from ark.tasks.windows import reached, window_sizes

VECTOR_BYTES = 16  # bytes of neighbouring channels that a thread computes together
COLUMNS_PER_THREAD = (4, 2, 1)  # numbers of neighbouring results of a row that a thread may compute
MAX_LOADS = 16  # vectors of the image that a thread loads for one row of its windows


class Depthwise(TaskKind):
    name = "depthwise"
    params = ConvolutionParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        check_expression(sig)
        p = sig.read(ConvolutionParams)
        _, source, out = (typed(sig, index).shape for index in range(3))
        need(
            all(len(n) == 2 for n in (*window_sizes(p), p.sizes)),
            "the window parameters need two numbers each",
        )
        need(len(source) == 4, f"the input has {len(source)} dimensions, expected 4")
        shaped(sig, 0, (math.prod(p.size), source[3]))
        shaped(sig, 2, (source[0], *p.sizes, source[3]))
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
        return [
            Access(0, (0, lo[3]), (weight[0], hi[3])),
            Access(1, (lo[0], *low, lo[3]), (hi[0], *high, hi[3])),
            *(broadcast_access(sig, i, lo, hi) for i in range(3, len(sig.operands))),
            Access(2, lo, hi, write=True),
        ]

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        elements = math.prod(sig.read(ConvolutionParams).tile)
        return 2.0 * elements * sig.operands[0].shape[0], super().cost(sig, coord)[1]

    def headers(self) -> tuple[str, ...]:
        return tuple(map(text.header, ("box.h", "convolution.h", "depthwise.h")))

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        pack = _pack(sig)
        vectors = [0, 1, 2, *(i for i in range(3, len(sig.operands)) if _by_channel(sig, i))]
        asked = text.addresses(sig, vectors)
        body = _walk(sig, pack, machine)
        if pack > 1 and asked != "0u":
            body = (
                f"  if (ark_aligned({asked})) {{\n{body}  }} else {{\n"
                f"{_walk(sig, 1, machine)}  }}\n"
            )
        declare = text.operand(sig, 0, "p0") + text.operand(sig, 1, "p1") + outputs(sig)
        return text.function(name, declare + body)


def _by_channel(sig: Signature, index: int) -> bool:
    """True if the operand has an element for each channel."""
    return bool(sig.operands[index].shape) and sig.operands[index].shape[-1] > 1


def _pack(sig: Signature) -> int:
    """The number of neighbouring channels that a thread computes together."""
    pack = VECTOR_BYTES // sig.operands[1].itemsize
    read = [0, 1, 2, *(i for i in range(3, len(sig.operands)) if _by_channel(sig, i))]
    counts = [sig.operands[2].shape[3], sig.read(ConvolutionParams).tile[3]]
    for o in (sig.operands[i] for i in read):
        counts += [s for s, n in zip(o.strides[:-1], o.shape[:-1], strict=True) if n > 1]
    beside = all(sig.operands[i].strides[-1] == 1 for i in read)
    return pack if beside and all(n % pack == 0 for n in counts) else 1


def _columns(sig: Signature, pack: int, machine: Machine) -> int:
    """The number of neighbouring results of a row that a thread computes: as many as leave no
    thread of the block idle and need few registers.
    """
    p = sig.read(ConvolutionParams)
    images, rows, columns, channels = p.tile
    threads = machine.warps * machine.lanes

    def able(wide: int) -> bool:
        span = (wide - 1) * p.stride[1] + (p.size[1] - 1) * p.dilation[1] + 1
        units = images * rows * -(-columns // wide) * channels // pack
        return span <= MAX_LOADS and units >= threads

    return next(filter(able, COLUMNS_PER_THREAD), 1)


def _walk(sig: Signature, pack: int, machine: Machine) -> str:
    """Statements that compute the task's tile, `pack` channels at a time."""
    p, source, out = sig.read(ConvolutionParams), sig.operands[1], sig.operands[2]
    numbers = [n for pair in (*window_sizes(p), source.shape[1:3], p.sizes) for n in pair]
    window = f"ArkWindow<{', '.join(map(str, numbers))}>"
    constants = (window, tile_type(p.tile, out.shape), pack, _columns(sig, pack, machine))
    arguments = (
        f"[&](int tap, int i3) {{ return p0 + ({text.offset(sig, 0, ['tap', 'i3'])}); }}",
        f"[&](int i0, int i1, int i2, int i3) {{ (void)i0; "
        f"return p1 + ({text.offset(sig, 1, NAMES)}); }}",
        f"[&](int i0, int i1, int i2, int i3, const float (&sums)[{pack}]) {{\n"
        f"      (void)i0; (void)i1; (void)i2;\n{_finish(sig, pack)}  }}",
    )
    return f"  {text.called('ark_depthwise', constants, arguments)};\n"


def _finish(sig: Signature, pack: int) -> str:
    """C++ statements that apply the expression to the sums of `pack` channels and store them."""
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


register(Depthwise())
