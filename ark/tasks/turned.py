"""Copies by index arithmetic (the task kind ark.tasks.remap) in which the source's last dimension
becomes the output's fourth-last one, and zeros are outside of the source. An example is the copy of
an image with channels last to channels first, with zeros behind each row. The elements pass through
shared memory, so that neighbouring threads read and write neighbouring memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ark.ir.fold import MAX_FOLDED_DIMS, fold
from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.box_text import NAMES, tile_type
from ark.tasks.transpose import TRANSPOSE_TILE_ELEMENTS, square_bytes

MIN_CHANNELS = 16  # with fewer, most of a square would be empty
THREAD_BYTES_IN_FLIGHT = 128  # bytes of loads that a thread has in flight
# A task takes as long as so many squares more than it copies: it waits for the first loads and for
# the last stores. On an H200, tasks of 3 squares took 6.1 us.
TASK_SQUARES = 4


def turns(rules: Sequence[Any], fill: float, source: Any, out: Any) -> bool:
    """True if a copy with these rules has this form. source, out: the tensors, or the types of the
    operands. A rule is (terms, add, divide, edge).
    """
    at = len(out.shape) - MAX_FOLDED_DIMS
    if at < 0 or fill or out.shape[at] < MIN_CHANNELS or source.shape[-1] != out.shape[at]:
        return False
    *others, (terms, add, divide, _) = rules
    channels = [tuple(term) for term in terms] == [(at, 1)] and (add, divide) == (0, 1)
    apart = all(d != at for rule in others for d, _ in rule[0])
    zeros = all(rule[3] in ("fill", "exact") for rule in rules)
    beside = source.strides[-1] == out.strides[-1] == 1 and out.strides[-2] == out.shape[-1]
    return channels and apart and zeros and beside


def turned_tile(shape: Sequence[int], itemsize: int, processors: int) -> list[int]:
    """The tile of an output of this shape: a square's channels, and whole rows of places, of one
    image or of several whole images. The processors end first with it, if a task takes the time of
    its squares and of TASK_SQUARES more.
    """
    channels, images, high, wide = shape[-MAX_FOLDED_DIMS:]
    vector, side = text.VECTOR_BYTES // itemsize, TRANSPOSE_TILE_ELEMENTS
    whole = high * wide % vector == 0
    each = math.gcd(channels, side) if channels > side else channels
    outer = math.prod(shape[:-MAX_FOLDED_DIMS]) * (channels // each)

    def rounds(tile: tuple[int, int]) -> tuple[int, int]:
        many, rows = tile
        tasks = outer * -(-images // many) * -(-high // rows)
        squares = many * -(-rows * wide // side)
        return -(-tasks // processors) * (TASK_SQUARES + squares), -squares

    parts = [r for r in range(1, high) if not whole or r * wide % vector == 0]
    tiles = [*((1, rows) for rows in parts), *((many, high) for many in range(1, images + 1))]
    many, rows = min(tiles, key=rounds)
    return [each, many, rows, wide]


def serves(sig: Signature, tile: Sequence[int], machine: Machine) -> bool:
    """True if threads can share squares of the task's tile: it has whole rows of places, and all of
    its channels have the same other indices.
    """
    shape = sig.operands[1].shape
    whole = tile[3] == shape[-1] and shape[-MAX_FOLDED_DIMS] % tile[0] == 0
    return machine.cooperative and whole


def scratch(sig: Signature) -> int:
    """Bytes of shared memory that a task needs."""
    return square_bytes(sig.operands[0].itemsize)


def turned_text(
    name: str,
    sig: Signature,
    tile: Sequence[int],
    machine: Machine,
    places: Sequence[str],
    conditions: Sequence[str],
) -> str:
    """The source of the device function. places: the texts of the source's indices. conditions:
    under which they are inside of it.
    """
    source, out = sig.operands
    vector = text.VECTOR_BYTES // out.itemsize
    shape, steps = fold(out.shape), out.strides[-MAX_FOLDED_DIMS:]
    plane = shape[2] * shape[3]
    lengths = (shape[0], tile[0], plane, tile[2] * tile[3] if tile[2] < shape[2] else plane)
    strides = [s for s in (*source.strides, *out.strides[:-2]) if s != 1]
    while vector > 1 and any(n % vector for n in (*lengths, *strides)):
        vector //= 2
    square = TRANSPOSE_TILE_ELEMENTS * TRANSPOSE_TILE_ELEMENTS
    held = -(-square // (machine.lanes * machine.warps)) * out.itemsize
    many = max(1, THREAD_BYTES_IN_FLIGHT // held) if vector > 1 else 1
    listed = ", ".join(f"int {n}" for n in NAMES)
    unused = "".join(f"(void){n}; " for n in NAMES)
    at = f"{text.pointer(sig, 0)} + ({text.offset(sig, 0, places)})"
    inside = " && ".join(conditions) or "true"
    pointed = f"const {source.ctype}*"
    origin = f"[&]({listed}) -> {pointed} {{ {unused}return {inside} ? {at} : nullptr; }}"
    to = text.place(sig, 1, NAMES, text.indices(out.shape, NAMES), const=False)
    box = tile_type(tile, shape)
    constants = (box, TRANSPOSE_TILE_ELEMENTS, vector, many, out.ctype)
    arguments = (str(steps[0]), origin, to, text.addresses(sig, (0, 1)))
    return text.call(name, "ark_turned_tile", constants, arguments)
