"""Convolutions in groups on mma.sync, for bf16 and fp16: of images with channels last, if a group's
channels and outputs are multiples of eight, and of images with channels first that have at most
eight channels. grouped.h has the device code. The vendor-independent body computes all other cases.
Called through the dialect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ark.backend.codegen.body import Body
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.channels_last import GroupedParams, types, widths
from ark.tasks.grouped import functions, staged, vectors, write
from ark_cuda.tasks import inline

TYPES = ("bf16", "fp16")
VECTOR_ELEMENTS = 8  # channels of one window element: half of the k of an instruction
MOST_WEIGHTS = 88  # registers for weights of a thread
MOST_BANDS = 4  # parts of a tile that are copied one after another
BLOCK_ROWS = 16  # results of an instruction


@dataclass(frozen=True)
class _Shape:
    """The template arguments of ark_groups. blocks: blocks of 16 results of a warp. outputs: blocks
    of eight outputs. bands: parts of a tile. nbytes: bytes of shared memory.
    """

    blocks: int
    outputs: int
    bands: int
    nbytes: int


def _few(sig: Signature) -> int:
    """The number of channels of an image with channels first, all of which form one group; 0 for
    other images.
    """
    p, channels = sig.read(GroupedParams), sig.operands[1].shape[1]
    one = p.channels_first and widths(sig, p)[0] == channels <= VECTOR_ELEMENTS
    return channels if one else 0


def _widths(sig: Signature) -> tuple[int, int]:
    """The number of channels of a group as stored in shared memory, and the number of outputs of a
    group.
    """
    each, rows = widths(sig, sig.read(GroupedParams))
    return (VECTOR_ELEMENTS if _few(sig) else each), rows


def _shape(sig: Signature, machine: Machine) -> _Shape | None:
    """How the warps compute a tile. None if only the vendor-independent body supports the
    signature.
    """
    p = sig.read(GroupedParams)
    each, rows = _widths(sig)
    images, down, across, channels = p.tile
    able = (
        machine.has(Capability.MMA_SYNC)
        and not inline.leads(machine)
        and {o.dtype for o in sig.operands[:3]} in ({t} for t in TYPES)
        and not any(o.packet for o in sig.operands)
        and vectors(sig) == (VECTOR_ELEMENTS, 1 if _few(sig) else VECTOR_ELEMENTS)
        and channels % rows == 0
    )
    if not able:
        return None
    depth = math.prod(p.size) * each
    halves = 4 * -(-depth // (4 * VECTOR_ELEMENTS))
    counts = range(1, rows // VECTOR_ELEMENTS + 1)
    fits = [n for n in counts if rows // VECTOR_ELEMENTS % n == 0 and n * halves <= MOST_WEIGHTS]
    lines = images * down
    band = -(-lines // MOST_BANDS)
    pixels, read = staged(p.tile, p, (each, rows))
    pixel, weight = (16 * (n // VECTOR_ELEMENTS | 1) for n in (read, channels))
    nbytes = 16 + depth * weight + pixels * pixel
    if not fits or nbytes > machine.task_bytes:
        return None
    blocks = 2 if band * across > BLOCK_ROWS else 1
    return _Shape(blocks, max(fits), -(-lines // band), nbytes)


class Groups(Body):
    """Convolutions in groups on mma.sync."""

    kind = "grouped_convolution"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return _shape(sig, machine) is not None

    def headers(self, machine: Machine) -> tuple[str, ...]:
        return tuple(map(inline.header, ("async_copies.h", "mma.h", "grouped.h")))

    def scratch(self, sig: Signature, machine: Machine) -> int:
        shape = _shape(sig, machine)
        assert shape is not None
        return shape.nbytes

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        shape = _shape(sig, machine)
        assert shape is not None
        p, source = sig.read(GroupedParams), sig.operands[1]
        few, sizes = _few(sig), (shape.blocks, shape.outputs, shape.bands)
        channels = few or source.shape[3]
        constants = (source.ctype, *types(sig, p), *_widths(sig), channels, few, *sizes)
        call = text.called("ark_groups", constants, functions(sig, 2))
        return write(name, sig, machine, f"  {call};\n")
