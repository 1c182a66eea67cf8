"""The task kind `depthwise`: depthwise convolutions (one output for each channel) of images with
channels last, without matrix units. Emitted by ark.lower.ops.windows.

params: size, stride, dilation, before (two numbers each, see ark.tasks.windows; elements outside of
the input are zero), sizes (height and width of the result), expr as in ark.tasks.matmul, tile, and
patch (rows and columns of the result that a thread computes for two channels from a copy of the
image in shared memory; without a patch, threads load the image from global memory).

operands: weight (taps, channels), input (n, height, width, channels), output (n, height, width,
channels), and the further inputs of the expression, which broadcast to the output.

coord: the tile's first index of the output. Sums are in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import INT_MAX, Places, box, covers, need, shaped, typed
from ark.tasks import depthwise_form, expression, text
from ark.tasks.box_text import NAMES, tile_type
from ark.tasks.convolution import ConvolutionParams, check_expression
from ark.tasks.elementwise import broadcast_access, tile_box
from ark.tasks.matmul_text import outputs
from ark.tasks.windows import reached, window_sizes

COLUMNS_PER_THREAD = (4, 2, 1)  # numbers of neighbouring results of a row that a thread may compute
MAX_LOADS = 16  # vectors of the image that a thread loads for one row of its windows


Side = Annotated[int, Meta(ge=1, le=depthwise_form.MAX_SIDE)]


class DepthwiseParams(ConvolutionParams, frozen=True):
    patch: tuple[Side, Side] | None = None


class Depthwise(TaskKind):
    name = "depthwise"
    params = DepthwiseParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        p = sig.read(DepthwiseParams)
        check_expression(sig, p.expr)
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
        return box(sig.operands[2].shape, sig.read(DepthwiseParams).tile)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        weight, source, out = (o.shape for o in sig.operands[:3])
        p = sig.read(DepthwiseParams)
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
        """With a patch, each instruction of a thread counts as much as a multiplication with an
        addition.
        """
        p, moved = sig.read(DepthwiseParams), super().cost(sig, coord)[1]
        if p.patch is None or _pack(sig) == 1:
            return 2.0 * math.prod(p.tile) * sig.operands[0].shape[0], moved
        each = depthwise_form.instructions(p, p.patch, sig.operands[1].itemsize)
        return 2.0 * depthwise_form.units(p.tile, p.patch) * each, moved

    def rounds(self, sig: Signature, machine: Machine) -> int:
        return 1 if sig.read(DepthwiseParams).patch is None else 2  # the copy, then the sums

    def scratch(self, sig: Signature, machine: Machine) -> int:
        p = sig.read(DepthwiseParams)
        if p.patch is None or _pack(sig) == 1:
            return 0
        return depthwise_form.shared_bytes(p, p.tile, p.patch, sig.operands[1].itemsize)

    def headers(self) -> tuple[str, ...]:
        return tuple(map(text.header, ("box.h", "convolution.h", "depthwise.h")))

    def texts(self, sig: Signature) -> tuple[str, ...]:
        patch = sig.read(DepthwiseParams).patch
        return () if patch is None else (text.header("depthwise_patches.h"),)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        pack = _pack(sig)
        vectors = [0, 1, 2, *(i for i in range(3, len(sig.operands)) if _by_channel(sig, i))]
        asked = text.addresses(sig, vectors)
        patch = sig.read(DepthwiseParams).patch
        body = _patches(sig, patch) if patch and pack > 1 else _walk(sig, pack, machine)
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
    pack = depthwise_form.VECTOR_BYTES // sig.operands[1].itemsize
    read = [0, 1, 2, *(i for i in range(3, len(sig.operands)) if _by_channel(sig, i))]
    counts = [sig.operands[2].shape[3], sig.read(DepthwiseParams).tile[3]]
    for o in (sig.operands[i] for i in read):
        counts += [s for s, n in zip(o.strides[:-1], o.shape[:-1], strict=True) if n > 1]
    beside = all(sig.operands[i].strides[-1] == 1 for i in read)
    return pack if beside and all(n % pack == 0 for n in counts) else 1


def _columns(sig: Signature, pack: int, machine: Machine) -> int:
    """The number of neighbouring results of a row that a thread computes: as many as leave no
    thread of the block idle and need few registers.
    """
    p = sig.read(DepthwiseParams)
    images, rows, columns, channels = p.tile
    threads = machine.warps * machine.lanes

    def able(wide: int) -> bool:
        span = (wide - 1) * p.stride[1] + (p.size[1] - 1) * p.dilation[1] + 1
        units = images * rows * -(-columns // wide) * channels // pack
        return span <= MAX_LOADS and units >= threads

    return next(filter(able, COLUMNS_PER_THREAD), 1)


def _walk(sig: Signature, pack: int, machine: Machine) -> str:
    """Statements that compute the task's tile, `pack` channels at a time."""
    constants = (*_constants(sig), pack, _columns(sig, pack, machine))
    arguments = (
        *_places(sig),
        f"[&](int i0, int i1, int i2, int i3, const float (&sums)[{pack}]) {{\n"
        f"      (void)i0; (void)i1; (void)i2;\n"
        f"{_held(sig, pack, 'const auto ')}{_finish(sig, pack, '')}  }}",
    )
    return f"  {text.called('ark_depthwise', constants, arguments)};\n"


def _patches(sig: Signature, patch: tuple[int, int]) -> str:
    """Statements that compute the task's tile from a copy of the image in shared memory."""
    pair, held = depthwise_form.PATCH_CHANNELS, ""
    for i in _held_operands(sig):
        held += f"    ArkPack<{sig.operands[i].ctype}, {pair}> e{i};\n"
    p, image = sig.read(DepthwiseParams), sig.operands[1]
    scratch = depthwise_form.shared_bytes(p, p.tile, patch, image.itemsize)
    constants = (*_constants(sig), *patch, scratch, image.ctype)
    arguments = (
        "ARK_SCRATCH(c)",
        *_places(sig),
        "[&](int i3) {\n      (void)i3;\n      ArkLoaded loaded;\n"
        f"{_held(sig, pair, 'loaded.')}      return loaded;\n  }}",
        f"[&](int i0, int i1, int i2, int i3, const float (&sums)[{pair}], "
        "const ArkLoaded& loaded) {\n      (void)i0; (void)i1; (void)i2; (void)loaded;\n"
        f"{_finish(sig, pair, 'loaded.')}  }}",
    )
    call = text.called("ark_depthwise_patches", constants, arguments)
    return f"  struct ArkLoaded {{\n{held}  }};\n  {call};\n"


def _constants(sig: Signature) -> tuple[str, str]:
    """The C++ types of the window and of the tile."""
    p, source, out = sig.read(DepthwiseParams), sig.operands[1], sig.operands[2]
    numbers = [n for pair in (*window_sizes(p), source.shape[1:3], p.sizes) for n in pair]
    return f"ArkWindow<{', '.join(map(str, numbers))}>", tile_type(p.tile, out.shape)


def _places(sig: Signature) -> tuple[str, str]:
    """C++ functions that return the addresses of a weight and of an element of the image."""
    return (
        f"[&](int tap, int i3) {{ return p0 + ({text.offset(sig, 0, ['tap', 'i3'])}); }}",
        f"[&](int i0, int i1, int i2, int i3) {{ (void)i0; "
        f"return p1 + ({text.offset(sig, 1, NAMES)}); }}",
    )


def _held_operands(sig: Signature) -> list[int]:
    """The operands of the expression that have the same elements for all pixels."""
    return [
        i
        for i in range(3, len(sig.operands))
        if _by_channel(sig, i) and all(n == 1 for n in sig.operands[i].shape[:-1])
    ]


def _held(sig: Signature, pack: int, name: str) -> str:
    """C++ statements that load the elements of `_held_operands` for `pack` channels. name: the text
    before the name of each.
    """
    loads = (
        f"{name}e{i} = ark_load_pack<{pack}>(p{i} + ({text.offset(sig, i, NAMES)}));"
        for i in _held_operands(sig)
    )
    return "".join(f"      {line}\n" for line in loads)


def _finish(sig: Signature, pack: int, held: str) -> str:
    """C++ statements that apply the expression to the sums of `pack` channels and store them.
    held: the text before the names of loaded elements of `_held_operands`.
    """
    expr, before = sig.read(DepthwiseParams).expr, _held_operands(sig)
    lines, leaves = [], [("sums[j]", "float")]
    for i in range(3, len(sig.operands)):
        at = text.offset(sig, i, NAMES)
        if _by_channel(sig, i):
            if i not in before:
                lines.append(f"const auto e{i} = ark_load_pack<{pack}>(p{i} + ({at}));")
            name = f"{held}e{i}" if i in before else f"e{i}"
            leaves.append((text.load(sig, i, f"{name}.v", "j"), text.loaded(sig, i)))
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
