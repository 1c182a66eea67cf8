"""Chooses the tiles of grouped convolutions of images with channels last. Called by
ark.lower.ops.windows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ark.ir.attributes import GroupedAttributes
from ark.ir.graph import Node
from ark.lower.depthwise_tiles import Window
from ark.machine import Machine
from ark.tasks.grouped import WEIGHT_SHARE, columns_per_thread, staged, thread_rounds
from ark.tasks.text import VECTOR_BYTES

LEAST_CHANNEL_BYTES = 64  # bytes of neighbouring channels that a tile should have
PADDING_BYTES = 16  # bytes that are added to each row in shared memory
MOST_IMAGES = 8  # images of a tile


@dataclass(frozen=True)
class _Work:
    """The work of a grouped convolution, from which the time of a task is predicted.

    thread_outputs: the number of outputs that a thread computes at once. each, rows: the numbers of
    input channels and of outputs of a group. depth: the number of multiplications of one result.
    itemsize: bytes of an element of the image.
    """

    given: Window
    machine: Machine
    thread_outputs: int
    each: int
    rows: int
    depth: int
    itemsize: int

    def us(self, tile: Sequence[int]) -> float:
        """The predicted microseconds of one task with this tile."""
        images, down, across, channels = tile
        given, costs = self.given, self.machine.costs
        window = given.size[1], given.stride[1], given.dilation[1]
        wide = columns_per_thread(tile, window, self.thread_outputs, self.machine)
        rounds = thread_rounds(tile, wide, self.thread_outputs, self.machine)
        results = rounds * (wide + WEIGHT_SHARE)
        threads = self.machine.warps * self.machine.lanes
        operations = 2.0 * results * threads * self.thread_outputs * self.depth
        elements = math.prod(staged(tile, given, (self.each, self.rows)))
        elements += rounds * self.depth * channels  # weights are read anew in each round
        elements += images * down * across * channels
        moved = elements * self.itemsize / costs.processor_rate
        return costs.task_us + operations / costs.scalar_rate + moved

    def fits(self, tile: Sequence[int]) -> bool:
        """True if shared memory holds what a task with this tile reads. Matrix units need that."""
        vector = VECTOR_BYTES // self.itemsize
        each = -(-self.each // vector) * vector
        pixels, channels = staged(tile, self.given, (each, self.rows))
        padded = PADDING_BYTES // self.itemsize  # added to each pixel and each row of weights
        depth = self.depth // self.each * each
        elements = pixels * (channels + padded) + depth * (tile[3] + padded)
        room = self.machine.task_bytes - PADDING_BYTES
        return elements * self.itemsize <= room


def grouped_tile(node: Node, machine: Machine) -> list[int]:
    """The tile of a convolution in groups with which the tasks are predicted to end earliest."""
    weight, source, out = *node.inputs[:2], node.outputs[0]
    attributes = node.read(GroupedAttributes)
    given = Window.of(attributes)
    each = weight.shape[0] // math.prod(given.size)
    channels = source.shape[1 if attributes.channels_first else 3]
    rows = out.shape[3] // (channels // each)
    size = source.dtype.itemsize
    vector = VECTOR_BYTES // size
    work = _Work(given, machine, math.gcd(rows, vector), each, rows, weight.shape[0], size)

    def ends(tile: tuple[int, ...]) -> tuple[bool, float]:
        tasks = math.prod(-(-n // t) for n, t in zip(out.shape, tile, strict=True))
        return not work.fits(tile), -(-tasks // machine.processors) * work.us(tile)

    best: tuple[int, ...] = min(_tiles(out.shape, math.lcm(rows, vector), size), key=ends)
    return list(best)


def _tiles(shape: Sequence[int], step: int, itemsize: int) -> Iterator[tuple[int, ...]]:
    """The candidate tiles (images, rows, columns, channels): all channels or a part of them (a
    multiple of `step`), a part of the rows and columns of one image, or several whole images.
    """
    images, down, across, channels = shape
    least = min(channels, -(-LEAST_CHANNEL_BYTES // (itemsize * step)) * step)
    wide = {min(channels, -(-c // step) * step) for c in _parts(channels) if c >= least}
    for c in sorted(wide | {channels}, reverse=True):
        yield from ((1, r, across, c) for r in _parts(down))
        yield from ((1, 1, w, c) for w in _parts(across)[1:])
        yield from ((i, down, across, c) for i in range(2, min(images, MOST_IMAGES) + 1))


def _parts(n: int) -> list[int]:
    """The possible tile sizes in a dimension of n elements, from n down: the size of the largest
    part, for any number of about equal parts.
    """
    return [size for size, _ in itertools.groupby(-(-n // k) for k in range(1, n + 1))]
