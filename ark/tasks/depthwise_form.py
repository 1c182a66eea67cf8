"""Sizes for depthwise convolutions with channels last that read the image from shared memory. A
patch is the rows and columns of results that a thread computes, for two channels. This module
computes the possible patches of a tile, and the shared memory and instructions that they need.

Called by ark.tasks.depthwise, and by the lowering, which chooses the patch and the tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ark.tasks.text import VECTOR_BYTES
from ark.tasks.windows import Windows, spans

PATCH_CHANNELS = 2  # neighbouring channels of a thread
FACTOR_BYTES = 4  # weights in shared memory are fp32
MAX_PATCH_SIDE_PIXELS = 16  # rows and columns of a patch
MAX_HELD_ELEMENTS = 104  # sums of a patch and elements of an image row that a thread holds
CONVERTED_BYTES = 2  # an element of this size takes an instruction to become fp32
LOAD_INSTRUCTIONS = 2  # a load from shared memory takes as long as this many instructions
ROW_INSTRUCTIONS = 12  # for a row of the image, besides its loads: address and branches
SUMS_INSTRUCTIONS = 4  # for each row of sums to which a row of the image is added
RESULT_INSTRUCTIONS = 3  # for a result: conversion, address, store
COPY_INSTRUCTIONS = 16  # for a copy of VECTOR_BYTES

Patch = tuple[int, int]


def units(tile: Sequence[int], patch: Patch) -> int:
    """The number of patches of a tile. A patch is the part of the results that a thread computes at
    a time, for two channels.
    """
    images, rows, columns, channels = tile
    return images * -(-rows // patch[0]) * -(-columns // patch[1]) * channels // PATCH_CHANNELS


def copied(p: Windows, tile: Sequence[int], patch: Patch) -> int:
    """The number of elements of the image that a task copies to shared memory."""
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
    """The number of instructions that a thread executes for a patch (the results that it computes
    at a time).
    """
    (rows, columns), (down, across) = patch, p.size
    converted = PATCH_CHANNELS if itemsize == CONVERTED_BYTES else 0
    lines, read = (
        len({place * p.stride[d] + tap * p.dilation[d] for place in range(n) for tap in range(k)})
        for d, (n, k) in enumerate(((rows, down), (columns, across)))
    )
    line = read * (LOAD_INSTRUCTIONS + converted) + ROW_INSTRUCTIONS
    sums = across * (PATCH_CHANNELS * columns + LOAD_INSTRUCTIONS) + SUMS_INSTRUCTIONS
    results = PATCH_CHANNELS * rows * columns * RESULT_INSTRUCTIONS
    return lines * (line + SUMS_INSTRUCTIONS * rows) + rows * down * sums + results


def patches(p: Windows, tile: Sequence[int]) -> Iterator[Patch]:
    """The candidates for the patch (rows and columns of results that a thread computes at a time).
    They divide the tile into parts as equal as possible and fit into registers.
    """
    sides = [sorted({-(-n // parts) for parts in range(1, n + 1)}) for n in tile[1:3]]
    for columns in sides[1]:
        most = MAX_HELD_ELEMENTS // PATCH_CHANNELS - spans(p, 1, columns)[1]
        if columns <= MAX_PATCH_SIDE_PIXELS:
            yield from (
                (n, columns) for n in sides[0] if n <= MAX_PATCH_SIDE_PIXELS and n * columns <= most
            )
