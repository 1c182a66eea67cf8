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
from ark.plan.kind import Signature, register
from ark.plan.params import shaped
from ark.tasks import depthwise_form, text
from ark.tasks.box_text import NAMES
from ark.tasks.channels_last import (
    ChannelsLastKind,
    addresses,
    by_channel,
    by_vectors,
    declared,
    finish,
    strides_of_vectors,
    types,
)
from ark.tasks.convolution import ConvolutionParams

COLUMNS_PER_THREAD = (4, 2, 1)  # numbers of neighbouring results of a row that a thread may compute
MAX_ROW_VECTORS = 16  # vectors of the image that a thread loads for one row of its windows


Side = Annotated[int, Meta(ge=1, le=depthwise_form.MAX_PATCH_SIDE_PIXELS)]


class DepthwiseParams(ConvolutionParams, frozen=True):
    patch: tuple[Side, Side] | None = None


class Depthwise(ChannelsLastKind):
    name = "depthwise"
    params = DepthwiseParams
    headers = text.headers("box.h", "convolution.h", "channels_last.h", "depthwise.h")

    def check_shapes(self, sig: Signature, p: ConvolutionParams) -> None:
        source = sig.operands[1].shape
        shaped(sig, 0, (math.prod(p.size), source[3]))
        shaped(sig, 2, (source[0], *p.sizes, source[3]))

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        """With a patch (results computed from shared memory), the cost counts a thread's
        instructions, each as one multiplication with an addition.
        """
        p, (operations, moved) = sig.read(DepthwiseParams), super().cost(sig, coord)
        if p.patch is None or _vector(sig) == 1:
            return operations, moved
        each = depthwise_form.instructions(p, p.patch, sig.operands[1].itemsize)
        return 2.0 * depthwise_form.units(p.tile, p.patch) * each, moved

    def rounds(self, sig: Signature, machine: Machine) -> int:
        return 1 if sig.read(DepthwiseParams).patch is None else 2  # the copy, then the sums

    def scratch(self, sig: Signature, machine: Machine) -> int:
        p = sig.read(DepthwiseParams)
        if p.patch is None or _vector(sig) == 1:
            return 0
        return depthwise_form.shared_bytes(p, p.tile, p.patch, sig.operands[1].itemsize)

    def texts(self, sig: Signature) -> tuple[str, ...]:
        patch = sig.read(DepthwiseParams).patch
        if patch is None:
            return ()
        return tuple(map(text.header, ("pack_copies.h", "depthwise_patches.h")))

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        vector, patch = _vector(sig), sig.read(DepthwiseParams).patch
        body = _patches(sig, patch) if patch and vector > 1 else _walk(sig, vector, machine)
        if vector > 1:
            body = text.where_aligned(sig, by_vectors(sig), body, _walk(sig, 1, machine))
        return text.function(name, declared(sig) + body)


def _vector(sig: Signature) -> int:
    """The number of neighbouring channels that a thread computes together."""
    vector = text.VECTOR_BYTES // sig.operands[1].itemsize
    strides = strides_of_vectors(sig, by_vectors(sig))
    if strides is None:
        return 1
    counts = (sig.operands[2].shape[3], sig.read(DepthwiseParams).tile[3], *strides)
    return vector if all(n % vector == 0 for n in counts) else 1


def _columns(sig: Signature, vector: int, machine: Machine) -> int:
    """The number of neighbouring results of a row that a thread computes: as many as leave no
    thread of the block idle and need few registers.
    """
    p = sig.read(DepthwiseParams)
    images, rows, columns, channels = p.tile
    threads = machine.warps * machine.lanes

    def able(wide: int) -> bool:
        span = (wide - 1) * p.stride[1] + (p.size[1] - 1) * p.dilation[1] + 1
        units = images * rows * -(-columns // wide) * channels // vector
        return span <= MAX_ROW_VECTORS and units >= threads

    return next(filter(able, COLUMNS_PER_THREAD), 1)


def _walk(sig: Signature, vector: int, machine: Machine) -> str:
    """Statements in which all threads compute the task's tile, `vector` neighbouring channels at a
    time.
    """
    p, loaded = sig.read(DepthwiseParams), {i: f"e{i}" for i in _held_operands(sig)}
    constants = (*types(sig, p), vector, _columns(sig, vector, machine))
    arguments = (
        *addresses(sig, p),
        f"[&](int i0, int i1, int i2, int i3, const float (&sums)[{vector}]) {{\n"
        f"      (void)i0; (void)i1; (void)i2;\n"
        f"{_held(sig, vector, 'const auto ')}{finish(sig, p, vector, loaded)}  }}",
    )
    return f"  {text.called('ark_depthwise', constants, arguments)};\n"


def _patches(sig: Signature, patch: tuple[int, int]) -> str:
    """Statements that compute the task's tile from a copy of the image in shared memory."""
    pair, held = depthwise_form.PATCH_CHANNELS, ""
    for i in _held_operands(sig):
        held += f"    ArkPack<{sig.operands[i].ctype}, {pair}> e{i};\n"
    p, image = sig.read(DepthwiseParams), sig.operands[1]
    scratch = depthwise_form.shared_bytes(p, p.tile, patch, image.itemsize)
    loaded = {i: f"loaded.e{i}" for i in _held_operands(sig)}
    constants = (*types(sig, p), *patch, scratch, image.ctype)
    arguments = (
        "ARK_SCRATCH(c)",
        *addresses(sig, p),
        "[&](int i3) {\n      (void)i3;\n      ArkLoaded loaded;\n"
        f"{_held(sig, pair, 'loaded.')}      return loaded;\n  }}",
        f"[&](int i0, int i1, int i2, int i3, const float (&sums)[{pair}], "
        "const ArkLoaded& loaded) {\n      (void)i0; (void)i1; (void)i2; (void)loaded;\n"
        f"{finish(sig, p, pair, loaded)}  }}",
    )
    call = text.called("ark_depthwise_patches", constants, arguments)
    return f"  struct ArkLoaded {{\n{held}  }};\n  {call};\n"


def _held_operands(sig: Signature) -> list[int]:
    """The operands of the expression that have the same elements for all pixels."""
    return [
        i
        for i in range(3, len(sig.operands))
        if by_channel(sig, i) and all(n == 1 for n in sig.operands[i].shape[:-1])
    ]


def _held(sig: Signature, vector: int, name: str) -> str:
    """C++ statements that load, for `vector` channels, the elements of the operands that are equal
    for all pixels (`_held_operands`). name: the text before the name of each variable.
    """
    loads = (
        f"{name}e{i} = ark_load_pack<{vector}>(p{i} + ({text.offset(sig, i, NAMES)}));"
        for i in _held_operands(sig)
    )
    return "".join(f"      {line}\n" for line in loads)


register(Depthwise())
