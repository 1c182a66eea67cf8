"""The task kind `grouped_convolution`: convolutions in groups of few channels, of images with
channels last, without matrix units. Emitted by ark.lower.ops.windows.

params: as those of ark.tasks.convolution; and channels_first, True if the input has channels first,
as the few channels of a network's input.

operands: weight (depth, outputs), input (n, height, width, channels) or (n, channels, height,
width), output (n, height, width, outputs), and the further inputs of the expression, which
broadcast to the output. The depth is the number of elements of the window times the channels of a
group. The channels are the inner dimension of the depth, or the outer one if the input has channels
first. The outputs of a group are neighbours.

coord: the tile's first index of the output. Sums are in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ark.machine import Machine
from ark.plan.kind import Signature, register
from ark.plan.params import need
from ark.tasks import text
from ark.tasks.channels_last import (
    ChannelsLastKind,
    GroupedParams,
    addresses,
    by_channel,
    by_vectors,
    declared,
    finish,
    image,
    strides_of_vectors,
    types,
    widths,
)
from ark.tasks.convolution import ConvolutionParams
from ark.tasks.windows import Windows, spans

COLUMNS_PER_THREAD = (4, 2, 1)  # numbers of neighbouring results of a row that a thread may compute
WEIGHT_SHARE = 2  # the time for loading weights, in times of multiplying them for one result
MAX_ROW_VECTORS = 12  # vectors of the image that a thread loads for one row of its windows


class GroupedConvolution(ChannelsLastKind):
    name = "grouped_convolution"
    params = GroupedParams
    headers = text.headers("box.h", "convolution.h", "channels_last.h", "grouped.h")

    def check_shapes(self, sig: Signature, p: ConvolutionParams) -> None:
        weight, out, source = sig.operands[0].shape, sig.operands[2].shape, image(sig, p)
        need(len(weight) == 2, f"the weights have {len(weight)} dimensions, expected 2")
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

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        return write(name, sig, machine, _walk(sig, vectors(sig), machine))


def write(name: str, sig: Signature, machine: Machine, body: str) -> str:
    """The text of a task's device function. body: statements that compute the tile with vector
    accesses (see `vectors`). If an address is not aligned for vectors, the function computes the
    tile element by element instead.
    """
    if vectors(sig) != (1, 1):
        body = text.where_aligned(sig, by_vectors(sig), body, _walk(sig, (1, 1), machine))
    return text.function(name, declared(sig) + body)


def staged(tile: Sequence[int], p: Windows, widths_of_a_group: tuple[int, int]) -> tuple[int, int]:
    """The number of pixels of the image that a tile's results read, and the number of channels that
    they read of each pixel.
    """
    images, down, across, channels = tile
    each, rows = widths_of_a_group
    return images * math.prod(spans(p, down, across)), -(-channels // rows) * each


def vectors(sig: Signature) -> tuple[int, int]:
    """The number of neighbouring outputs of a group that a thread computes together, and the number
    of neighbouring channels of a group that it loads at once.
    """
    p = sig.read(GroupedParams)
    each, rows = widths(sig, p)
    stored = [0, 2, *(i for i in range(3, len(sig.operands)) if by_channel(sig, i))]
    vector = _vector(sig, stored, [rows, p.tile[3]])
    return vector, 1 if p.channels_first else _vector(sig, [1], [each])


def _vector(sig: Signature, operands: Sequence[int], counts: Sequence[int]) -> int:
    """The number of elements of a vector: the largest one that divides all `counts` and all strides
    of these operands.
    """
    strides = strides_of_vectors(sig, operands)
    if strides is None:
        return 1
    return math.gcd(text.VECTOR_BYTES // sig.operands[1].itemsize, *counts, *strides)


def columns_per_thread(
    tile: Sequence[int], window: tuple[int, int, int], vector: int, machine: Machine
) -> int:
    """The number of neighbouring results of a row that a thread computes. Of the numbers that need
    few registers, it is the one with which the slowest thread has the least work. window: the
    kernel's size, stride and dilation across. vector: the neighbouring outputs that a thread
    computes.
    """
    size, stride, dilation = window

    def able(wide: int) -> bool:
        return (wide - 1) * stride + (size - 1) * dilation < MAX_ROW_VECTORS

    def ends(wide: int) -> int:
        return thread_rounds(tile, wide, vector, machine) * (wide + WEIGHT_SHARE)

    return min(filter(able, COLUMNS_PER_THREAD), key=ends, default=1)


def thread_rounds(tile: Sequence[int], wide: int, vector: int, machine: Machine) -> int:
    """The number of steps of a thread, each of which computes `wide` neighbouring results for
    `vector` outputs.
    """
    images, rows, columns, channels = tile
    units = images * rows * -(-columns // wide) * -(-channels // vector)
    return -(-units // (machine.warps * machine.lanes))


def _walk(sig: Signature, vector_sizes: tuple[int, int], machine: Machine) -> str:
    """Statements in which all threads compute a tile. vector_sizes: the result of `vectors`."""
    p = sig.read(GroupedParams)
    across = p.size[1], p.stride[1], p.dilation[1]
    columns = columns_per_thread(p.tile, across, vector_sizes[0], machine)
    first = str(p.channels_first).lower()
    constants = (*types(sig, p), first, *widths(sig, p), *vector_sizes, columns)
    return f"  {text.called('ark_grouped', constants, functions(sig, vector_sizes[0]))};\n"


def functions(sig: Signature, vector: int) -> tuple[str, ...]:
    """The texts of three functions that a device function calls: the address of weights, the
    address of channels, and a function that applies the expression to `vector` sums and stores the
    results.
    """
    p = sig.read(GroupedParams)
    statements = finish(sig, p, vector, {})
    return (
        *addresses(sig, p),
        f"[&](int i0, int i1, int i2, int i3, const float (&sums)[{vector}]) {{\n"
        f"      (void)i0; (void)i1; (void)i2;\n{statements}  }}",
    )


register(GroupedConvolution())
