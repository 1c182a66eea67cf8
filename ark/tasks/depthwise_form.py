"""How a depthwise convolution with channels last is computed from shared memory: the patch of
results that a thread computes, the tile of a task, and what both need.

Called by ark.tasks.depthwise, and by the lowering, which chooses both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from ark.tasks.windows import Windows

VECTOR_BYTES = 16  # bytes of neighbouring channels that one copy moves
PATCH_CHANNELS = 2  # neighbouring channels of a thread
FACTOR_BYTES = 4  # weights in shared memory are fp32
MAX_SIDE = 8  # rows and columns of a patch
MAX_HELD = 104  # sums of a patch and elements of an image row that a thread holds
CONVERTED_BYTES = 2  # an element of this size takes an instruction to become fp32
ROW_INSTRUCTIONS = 12  # of a row of the image besides its loads: its place, its branches
SUMS_INSTRUCTIONS = 4  # of a row of sums that a row of the image is added to
RESULT_INSTRUCTIONS = 2  # of a result: conversion, address, store
COPY_INSTRUCTIONS = 12  # of a copy of VECTOR_BYTES

Patch = tuple[int, int]


def spans(p: Windows, rows: int, columns: int) -> Patch:
    """The rows and columns of the image that a box of results reads."""
    high, wide = (
        (n - 1) * p.stride[d] + (p.size[d] - 1) * p.dilation[d] + 1
        for d, n in enumerate((rows, columns))
    )
    return high, wide


def units(tile: Sequence[int], patch: Patch) -> int:
    """The number of patches of a tile, each of two channels."""
    images, rows, columns, channels = tile
    return images * -(-rows // patch[0]) * -(-columns // patch[1]) * channels // PATCH_CHANNELS


def copied(p: Windows, tile: Sequence[int], patch: Patch) -> int:
    """The elements of the image that a task copies to shared memory."""
    whole = (-(-n // side) * side for n, side in zip(tile[1:3], patch, strict=True))
    return tile[0] * math.prod(spans(p, *whole)) * tile[3]


def image_bytes(p: Windows, tile: Sequence[int], patch: Patch, itemsize: int) -> int:
    """The bytes of shared memory for a task's part of the image."""
    return -(-copied(p, tile, patch) * itemsize // VECTOR_BYTES) * VECTOR_BYTES


def shared_bytes(p: Windows, tile: Sequence[int], patch: Patch, itemsize: int) -> int:
    """The bytes of shared memory for a task's part of the image and its weights."""
    weights = FACTOR_BYTES * math.prod(p.size) * tile[3]
    return image_bytes(p, tile, patch, itemsize) + weights


def instructions(p: Windows, patch: Patch, itemsize: int) -> int:
    """The instructions of a thread for a patch."""
    (rows, columns), (down, across) = patch, p.size
    high, wide = spans(p, rows, columns)
    converted = PATCH_CHANNELS if itemsize == CONVERTED_BYTES else 0
    read = len({a * p.stride[1] + k * p.dilation[1] for a in range(columns) for k in range(across)})
    lines = len({r * p.stride[0] + k * p.dilation[0] for r in range(rows) for k in range(down)})
    each = PATCH_CHANNELS * across * columns + across + SUMS_INSTRUCTIONS
    line = read * (1 + converted) + ROW_INSTRUCTIONS + SUMS_INSTRUCTIONS * rows
    assert wide >= read and high >= lines
    return lines * line + rows * down * each + PATCH_CHANNELS * rows * columns * RESULT_INSTRUCTIONS


def task_instructions(
    p: Windows, tile: Sequence[int], patch: Patch, itemsize: int, threads: int
) -> int:
    """The instructions that all threads of a block issue for a task. Threads without a patch count
    too, because the task takes as long as those that have one.
    """
    copies = copied(p, tile, patch) * itemsize // VECTOR_BYTES * COPY_INSTRUCTIONS
    rounds = -(-units(tile, patch) // threads)
    return rounds * threads * instructions(p, patch, itemsize) + copies


def patches(p: Windows, tile: Sequence[int]) -> Iterator[Patch]:
    """The patches that a tile may have."""
    for rows, columns in itertools.product(range(1, MAX_SIDE + 1), repeat=2):
        held = PATCH_CHANNELS * (rows * columns + spans(p, 1, columns)[1])
        if rows <= tile[1] and columns <= tile[2] and held <= MAX_HELD:
            yield rows, columns
