"""Chooses, by predicted time, how depthwise convolutions with channels last are divided: the tile
of the result that a task computes, and the patch of a tile that one thread computes. Called by
ark.lower.ops.windows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ark.ir.attributes import WindowAttributes
from ark.machine import Machine
from ark.tasks import depthwise_form
from ark.tasks.text import VECTOR_BYTES

MAX_ROUNDS = 4  # the most tasks per processor, or per task that shared memory requires
COLUMN_PARTS = (1, 2, 4)  # numbers of tiles into which a row of the image is divided
# The channels of an image are divided among tasks only if the image has at most this number of
# pixels. The part of an image with some of the channels consists of one run of bytes for each
# pixel, and the time to plan grows with the number of runs: 25 s for 768 x 768 pixels.
MAX_DIVIDED_PIXELS = 1 << 16

Tile = tuple[int, int, int, int]
Chosen = tuple[Tile, depthwise_form.Patch]


@dataclass(frozen=True)
class Window:
    """The window of a convolution. Its fields are those of ark.tasks.windows.Windows."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]

    @classmethod
    def of(cls, given: WindowAttributes) -> Window:
        """The window of a node's attributes."""
        return cls(*map(tuple, (given.size, given.stride, given.dilation, given.before)))


def depthwise_tile(
    given: WindowAttributes, shape: Sequence[int], itemsize: int, machine: Machine
) -> Chosen | None:
    """The tile (images, rows, columns, channels) and the patch (rows, columns) with the shortest
    predicted time. None if the machine runs a task in a single thread, if no tile fits into shared
    memory, or if the channels are not a multiple of a vector. shape: the shape of the result.
    """
    if not machine.cooperative or shape[3] * itemsize % VECTOR_BYTES:
        return None
    images, rows, columns, channels = shape
    return _chosen(Window.of(given), (images, rows, columns, channels), itemsize, machine)


@lru_cache(maxsize=512)
def _chosen(window: Window, shape: Tile, itemsize: int, machine: Machine) -> Chosen | None:
    threads, costs = machine.warps * machine.lanes, machine.costs
    room = machine.task_bytes
    thread_rate = costs.scalar_rate / 2 / threads  # instructions of a thread per microsecond

    @lru_cache(maxsize=512)
    def issued(patch: depthwise_form.Patch) -> int:
        return depthwise_form.instructions(window, patch, itemsize)

    def time(chosen: Chosen) -> tuple[float, float]:
        """The predicted microseconds of the processor that has the most tasks. The second number
        decides between equal times: the bytes that a task copies, in whole cache lines.
        """
        tile, patch = chosen
        tasks = _tasks(shape, tile)
        rate = min(costs.processor_rate, costs.cache_rate / min(tasks, machine.processors))
        pixel = -(-tile[3] * itemsize // machine.line_bytes) * machine.line_bytes
        copied = depthwise_form.copied(window, tile, patch)
        vectors = copied * itemsize / VECTOR_BYTES
        rounds = -(-depthwise_form.units(tile, patch) // threads)
        work = rounds * issued(patch) + vectors * depthwise_form.COPY_INSTRUCTIONS / threads
        moved = (copied / tile[3] + math.prod(tile[:3])) * pixel
        each = costs.task_us + costs.pass_us + moved / rate + work / thread_rate
        return -(-tasks // machine.processors) * each, copied / tile[3] * pixel

    whole = depthwise_form.shared_bytes(window, shape, (1, 1), itemsize)
    most = MAX_ROUNDS * max(machine.processors, -(-whole // max(1, room)))
    able = (
        (tile, patch)
        for tile in _tiles(shape, VECTOR_BYTES // itemsize)
        if _tasks(shape, tile) <= most
        and (tile[3] == shape[3] or shape[1] * shape[2] <= MAX_DIVIDED_PIXELS)
        for patch in depthwise_form.patches(window, tile)
        if depthwise_form.shared_bytes(window, tile, patch, itemsize) <= room
    )
    return min(able, key=time, default=None)


def _tasks(shape: Tile, tile: Tile) -> int:
    return math.prod(-(-n // t) for n, t in zip(shape, tile, strict=True))


def _tiles(shape: Tile, vector: int) -> Iterator[Tile]:
    """The tiles to compare. Rows, and vectors of `vector` channels, are divided into any number of
    about equal parts, columns into COLUMN_PARTS. A tile has several images only if it has all of
    their rows and columns.
    """
    images, height, width, channels = shape
    vectors = channels // vector
    several = sorted({-(-images // parts) for parts in range(1, images + 1)})
    parts = itertools.product(_parts(height), COLUMN_PARTS, _parts(vectors))
    for rows, columns, part_vectors in parts:
        plane = rows, -(-width // columns), part_vectors * vector
        for n in several if plane[:2] == (height, width) else (1,):
            yield (n, *plane)


def _parts(n: int) -> list[int]:
    """The possible tile sizes in a dimension of n elements: the size of the largest part, for any
    number of about equal parts.
    """
    return sorted({-(-n // parts) for parts in range(1, n + 1)})
