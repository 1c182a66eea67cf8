"""Executes layout conversions on NumPy arrays, device by device. It is the reference for the tasks
of the steps and for the search.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ark.parallel.layout.moves import D, R, Step, moved
from ark.parallel.layout.types import Layout

Shards = list[np.ndarray]


def scatter(parts: Sequence[np.ndarray], layout: Layout) -> Shards:
    """Returns each device's shard of a tensor that is the sum of `parts`, one part for each value
    split.
    """
    coordinates = layout.coordinates()
    return [parts[row[1]][_box(row, layout, parts[0].shape)].copy() for row in coordinates]


def places(layout: Layout, steps: Sequence[Step]) -> np.ndarray:
    """Returns, for each device, its coordinates after the steps: the number of its replica, of its
    value split (partial sum), and of its block in each dimension.
    """
    coordinates = layout.coordinates()
    for step in steps:
        coordinates = moved(coordinates, step.source, step.target, step.ranks)
    return coordinates


def gather(
    shards: Shards, layout: Layout, coordinates: np.ndarray, shape: Sequence[int]
) -> list[np.ndarray]:
    """Returns the whole tensor as each replica holds it, with value splits added up."""
    result = [np.zeros(shape, shards[0].dtype) for _ in range(layout.replicas)]
    for shard, row in zip(shards, coordinates, strict=True):
        result[row[0]][_box(row, layout, shape)] += shard
    return result


def _box(row: np.ndarray, layout: Layout, shape: Sequence[int]) -> tuple[slice, ...]:
    sizes = layout.block(shape)
    return tuple(slice(i * n, (i + 1) * n) for i, n in zip(row[2:], sizes, strict=True))


def run(shards: Shards, steps: Sequence[Step]) -> tuple[Shards, float]:
    """Returns the shards after the steps, and the largest number of elements that a device sent, by
    the volumes of ring algorithms.
    """
    sent = 0.0
    for step in steps:
        result: Shards = list(shards)
        for group in step.groups:
            inputs = [shards[device] for device in group]
            for device, output in zip(group, _group_step(step, inputs), strict=True):
                result[device] = output
        shards = result
        sent += step.elements
    return shards, sent


def _group_step(step: Step, blocks: Shards) -> Shards:
    """Executes one step of a conversion within a group of devices. Returns the group's new shards,
    by position in the group.
    """
    count, source, target = step.ranks, step.source - D, step.target - D
    if step.op == "all_reduce":
        return [sum(blocks[1:], blocks[0])] * count
    if step.op == "all_gather":
        return [np.concatenate(blocks, axis=source)] * count
    if step.op == "reduce_scatter":
        return np.split(sum(blocks[1:], blocks[0]), count, axis=target)
    if step.op == "slice":
        return [np.split(b, count, axis=target)[i] for i, b in enumerate(blocks)]
    if step.op == "value_split":
        return [b if i == 0 else np.zeros_like(b) for i, b in enumerate(blocks)]
    parts = [np.split(block, count, axis=target) for block in blocks]
    return [np.concatenate([p[i] for p in parts], axis=source) for i in range(count)]


def replicas_agree(shards: Shards, coordinates: np.ndarray) -> bool:
    """True if devices with the same value split and block hold equal arrays."""
    seen: dict[tuple[int, ...], np.ndarray] = {}
    for shard, row in zip(shards, coordinates.tolist(), strict=True):
        if not np.array_equal(seen.setdefault(tuple(row[R + 1 :]), shard), shard):
            return False
    return True
