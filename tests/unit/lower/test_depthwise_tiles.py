"""Depthwise convolutions with channels last: the tile of each task, and the patch of results that
each thread computes.
"""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from ark.backend import registry
from ark.ir.attributes import ConvolutionAttributes
from ark.lower.depthwise_tiles import depthwise_tile
from ark.machine.capability import Capability
from ark.plan import kind as kinds
from ark.plan.signature import OperandType, Signature
from ark.tasks import depthwise_form
from ark.tasks.text import VECTOR_BYTES


def convolution(
    size: tuple[int, int], stride: int = 1, dilation: int = 1, before: int = 0
) -> ConvolutionAttributes:
    return ConvolutionAttributes(
        size=list(size),
        sizes=[1, 1],
        stride=[stride] * 2,
        dilation=[dilation] * 2,
        before=[before] * 2,
    )


@pytest.mark.parametrize("name", ["h200", "a100", "mi300x"])
@pytest.mark.parametrize("seed", range(6))
def test_tile_fits_into_shared_memory_and_registers(name: str, seed: int) -> None:
    draw = random.Random(seed)
    machine = registry.machine(name)
    for variant in range(len(machine.variants)):
        model = machine.under(variant)
        window = convolution(
            (draw.randint(1, 7), draw.randint(1, 7)), draw.randint(1, 3), draw.randint(1, 2)
        )
        itemsize = draw.choice((2, 4))
        vector = VECTOR_BYTES // itemsize
        shape = (draw.randint(1, 9), draw.randint(1, 60), draw.randint(1, 60), 3 * vector)
        chosen = depthwise_tile(window, shape, itemsize, model)
        if chosen is None:
            continue
        tile, (rows, columns) = chosen
        assert tile[3] % vector == 0
        assert all(1 <= t <= n for t, n in zip(tile, shape, strict=True))
        assert rows <= tile[1] and columns <= tile[2]
        needed = depthwise_form.shared_bytes(window, tile, (rows, columns), itemsize)
        assert needed <= model.shared_bytes - model.ring_bytes
        wide = (columns - 1) * window.stride[1] + (window.size[1] - 1) * window.dilation[1] + 1
        assert 2 * (rows * columns + wide) <= depthwise_form.MAX_HELD_ELEMENTS


def test_every_processor_gets_about_the_same_work() -> None:
    """The convolutions of ConvNeXt's four stages are one task for each of at least 0.8 of the
    processors of an H200.
    """
    machine = registry.machine("h200").using("matrix")
    for side, channels in ((56, 96), (28, 192), (14, 384), (7, 768)):
        shape = (8, side, side, channels)
        chosen = depthwise_tile(convolution((7, 7), before=3), shape, 2, machine)
        assert chosen is not None
        tasks = math.prod(-(-n // t) for n, t in zip(shape, chosen[0], strict=True))
        assert 0.8 * machine.processors <= tasks <= machine.processors, (side, chosen)


def test_images_stay_in_memory_where_they_cannot_be_copied() -> None:
    machine, window = registry.machine("h200").using("matrix"), convolution((3, 3), before=1)
    assert depthwise_tile(window, (1, 16, 16, 64), 2, machine) is not None
    assert depthwise_tile(window, (1, 16, 16, 60), 2, machine) is None  # no whole vectors
    alone = machine.with_capabilities(Capability.SINGLE_THREAD)
    assert depthwise_tile(window, (1, 16, 16, 64), 2, alone) is None
    small = dataclasses.replace(machine, shared_bytes=machine.ring_bytes + 256)
    assert depthwise_tile(window, (1, 16, 16, 64), 2, small) is None


@pytest.mark.parametrize("side", [384, 512, 1024])
def test_channels_of_large_images_are_not_divided(side: int) -> None:
    """All channels of a large image are in one tile. A part of the channels is contiguous within a
    pixel only, so the planner would get a range of bytes for each pixel (768 x 768 took 25 s).
    """
    machine, window = registry.machine("h200").using("matrix"), convolution((3, 3), before=1)
    chosen = depthwise_tile(window, (1, side, side, 64), 2, machine)
    assert chosen is not None and chosen[0][3] == 64


def test_row_of_the_image_is_loaded_once_for_all_rows_of_a_patch() -> None:
    """With windows of seven rows, a patch of two result rows reads eight rows of the image, one
    more than a patch of one row. Each image row is loaded and converted once. The number of
    additional instructions equals the one counted by hand.
    """
    window = convolution((7, 7))
    one, two = (depthwise_form.instructions(window, (n, 7), 2) for n in (1, 2))
    row = 13 * (depthwise_form.LOAD_INSTRUCTIONS + 2) + depthwise_form.ROW_INSTRUCTIONS
    sums = 7 * (2 * 7 + depthwise_form.LOAD_INSTRUCTIONS) + depthwise_form.SUMS_INSTRUCTIONS
    skipped = depthwise_form.SUMS_INSTRUCTIONS * (8 * 2 - 7)
    assert two - one == row + 7 * sums + 14 * depthwise_form.RESULT_INSTRUCTIONS + skipped
    assert depthwise_form.units((2, 5, 13, 8), (2, 7)) == 2 * 3 * 2 * 4
    assert depthwise_form.copied(window, (2, 5, 13, 8), (2, 7)) == 2 * (6 + 6) * (14 + 6) * 8


def test_cost_of_a_task_counts_its_instructions() -> None:
    """In the first stage of ConvNeXt, a task with patches costs at least 1.4 times its number of
    multiply-adds, because loads and conversions count too. Without patches the cost is the number
    of multiply-adds.
    """
    machine = registry.machine("h200").using("matrix")
    tile, patch = (1, 12, 56, 32), (3, 7)
    given = {"size": [7, 7], "stride": [1, 1], "dilation": [1, 1], "before": [3, 3]}
    given |= {"sizes": [56, 56], "tile": [*tile]}
    weight, image = (
        OperandType("bf16", shape, strides)
        for shape, strides in (
            ((49, 96), (96, 1)),
            ((8, 56, 56, 96), (56 * 56 * 96, 56 * 96, 96, 1)),
        )
    )
    kind, places = kinds.get("depthwise"), (0, 0, 0, 0)
    multiplied = 2.0 * 49 * math.prod(tile)
    plain = Signature("depthwise", given, (weight, image, image))
    patched = Signature("depthwise", {**given, "patch": [*patch]}, (weight, image, image))
    for sig in (plain, patched):
        kind.check(sig)
    assert kind.cost(plain, places)[0] == multiplied and kind.scratch(plain, machine) == 0
    each = depthwise_form.instructions(convolution((7, 7)), patch, 2)
    assert kind.cost(patched, places)[0] == 2.0 * 4 * 8 * 16 * each > 1.4 * multiplied
    assert kind.scratch(patched, machine) == 18 * 62 * 32 * 2 + 49 * 32 * 4
