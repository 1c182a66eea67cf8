"""Code that the task kinds of convolutions with channels last (NHWC) share: checks, accesses and
costs, and the texts of the functions that their device functions call. Used by ark.tasks.depthwise
and ark.tasks.grouped.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from ark.plan.kind import Access, Signature, TaskKind
from ark.plan.params import INT_MAX, Places, box, covers, need, typed
from ark.tasks import expression, text
from ark.tasks.box_text import NAMES, tile_type
from ark.tasks.convolution import ConvolutionParams, check_expression
from ark.tasks.elementwise import broadcast_access, tile_box
from ark.tasks.matmul_text import outputs
from ark.tasks.windows import reached, window_sizes


class GroupedParams(ConvolutionParams, frozen=True):
    channels_first: bool = False


class ChannelsLastKind(TaskKind):
    """The base class of the task kinds of convolutions with channels last (NHWC). Operands: weight
    (depth, outputs), input (n, height, width, channels), output (n, height, width, outputs), and
    the further inputs of the expression. GroupedParams may instead state that the input is (n,
    channels, height, width).
    """

    params: type[ConvolutionParams] = ConvolutionParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        p = sig.read(self.params)
        check_expression(sig, p.expr)
        source, out = (typed(sig, index).shape for index in (1, 2))
        need(
            all(len(n) == 2 for n in (*window_sizes(p), p.sizes)),
            "the window parameters need two numbers each",
        )
        need(len(source) == 4, f"the input has {len(source)} dimensions, expected 4")
        self.check_shapes(sig, p)
        for d in range(2):
            last = (p.sizes[d] - 1) * p.stride[d] + (p.size[d] - 1) * p.dilation[d]
            need(last < INT_MAX, "window indices exceed 32 bits")
        covers(p.tile, out)

    @abstractmethod
    def check_shapes(self, sig: Signature, p: ConvolutionParams) -> None:
        """Raises PlanError unless the shapes of weight, input and output fit each other."""

    def places(self, sig: Signature) -> Places:
        return box(sig.operands[2].shape, sig.read(self.params).tile)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        weight, out = sig.operands[0].shape, sig.operands[2].shape
        p = sig.read(self.params)
        lo, hi = tile_box(out, coord, p.tile)
        ranges = [(a, b - 1) for a, b in zip(lo[1:3], hi[1:3], strict=True)]
        order = order_of(p)
        low, high = reached(p, image(sig, p)[1:3], ranges)
        each, rows = widths(sig, p)
        begin = lo[0], *low, lo[3] // rows * each
        end = hi[0], *high, -(-hi[3] // rows) * each
        return [
            Access(0, (0, lo[3]), (weight[0], hi[3])),
            Access(1, tuple(begin[d] for d in order), tuple(end[d] for d in order)),
            *(broadcast_access(sig, i, lo, hi) for i in range(3, len(sig.operands))),
            Access(2, lo, hi, write=True),
        ]

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        elements = math.prod(sig.read(self.params).tile)
        return 2.0 * elements * sig.operands[0].shape[0], super().cost(sig, coord)[1]


def order_of(p: ConvolutionParams) -> tuple[int, int, int, int]:
    """The order of the input's dimensions: element d is the place of input dimension d in the order
    (n, height, width, channels).
    """
    return (0, 3, 1, 2) if isinstance(p, GroupedParams) and p.channels_first else (0, 1, 2, 3)


def image(sig: Signature, p: ConvolutionParams) -> list[int]:
    """The input's sizes, as (n, height, width, channels)."""
    shape, order = sig.operands[1].shape, order_of(p)
    return [shape[order.index(d)] for d in range(4)]


def widths(sig: Signature, p: ConvolutionParams) -> tuple[int, int]:
    """The number of input channels and the number of output channels of a group."""
    weight, out = sig.operands[0].shape, sig.operands[2].shape
    each = weight[0] // math.prod(p.size)
    return each, out[3] // (image(sig, p)[3] // each)


def by_channel(sig: Signature, index: int) -> bool:
    """True if the operand has a separate element for each channel."""
    return bool(sig.operands[index].shape) and sig.operands[index].shape[-1] > 1


def by_vectors(sig: Signature) -> list[int]:
    """The operands that are accessed in vectors of channels."""
    return [0, 1, 2, *(i for i in range(3, len(sig.operands)) if by_channel(sig, i))]


def strides_of_vectors(sig: Signature, operands: Sequence[int]) -> list[int] | None:
    """The strides of the given operands in elements, except those of the channels. Access in
    vectors requires that they are multiples of a vector's elements. None if the channels of one of
    the operands are not contiguous.
    """
    chosen = [sig.operands[i] for i in operands]
    if any(o.strides[-1] != 1 for o in chosen):
        return None
    return [s for o in chosen for s, n in zip(o.strides[:-1], o.shape[:-1], strict=True) if n > 1]


def declared(sig: Signature) -> str:
    """C++ declarations of pointers to the weights, the input, the output and the further inputs."""
    return text.operand(sig, 0, "p0") + text.operand(sig, 1, "p1") + outputs(sig)


def types(sig: Signature, p: ConvolutionParams) -> tuple[str, str]:
    """The C++ types of the window and of the tile."""
    sizes = image(sig, p)[1:3]
    numbers = [n for pair in (*window_sizes(p), sizes, p.sizes) for n in pair]
    return f"ArkWindow<{', '.join(map(str, numbers))}>", tile_type(p.tile, sig.operands[2].shape)


def addresses(sig: Signature, p: ConvolutionParams) -> tuple[str, str]:
    """The texts of two C++ functions: one returns the address of weights, the other the address of
    channels of an image's pixel.
    """
    names = [NAMES[d] for d in order_of(p)]
    return (
        f"[&](int k, int i3) {{ return p0 + ({text.offset(sig, 0, ['k', 'i3'])}); }}",
        f"[&](int i0, int i1, int i2, int i3) {{ (void)i0; "
        f"return p1 + ({text.offset(sig, 1, names)}); }}",
    )


def finish(sig: Signature, p: ConvolutionParams, vector: int, held: Mapping[int, str]) -> str:
    """C++ statements that apply the expression to the sums of `vector` outputs and store them.
    held: the names of the vectors of operands that are loaded before.
    """
    lines, leaves = [], [("sums[j]", "float")]
    for i in range(3, len(sig.operands)):
        at = text.offset(sig, i, NAMES)
        if by_channel(sig, i):
            if i not in held:
                lines.append(f"const auto e{i} = ark_load_pack<{vector}>(p{i} + ({at}));")
            name = held.get(i, f"e{i}")
            leaves.append((text.load(sig, i, f"{name}.v", "j"), text.loaded(sig, i)))
        else:
            lines.append(f"const auto e{i} = {text.load(sig, i, f'p{i}', at)};")
            leaves.append((f"e{i}", text.loaded(sig, i)))
    writer = expression.Writer(leaves, text.literal)
    value = "sums[j]" if p.expr is None else writer.write(p.expr)[0]
    lines += [
        f"ArkPack<{sig.operands[2].ctype}, {vector}> made;",
        f"#pragma unroll\n      for (int j = 0; j < {vector}; ++j) {{",
        *writer.statements,
        text.store(sig, 2, "made.v", "j", value),
        "}",
        f"ark_store_pack<{vector}>(po + ({text.offset(sig, 2, NAMES)}), made);",
    ]
    return "".join(f"      {line}\n" for line in lines)
