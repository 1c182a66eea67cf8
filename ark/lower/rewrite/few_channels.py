"""Convolutions of few input channels, such as the first layer of an image network.

Box copies load positions whose channels fill whole packs, and a position with few channels does not
fill a line. So the image is stored with channels last, padded with zeros to a pack, and with zeros
on both sides of each row. The taps of a window's row are then contiguous in memory and are loaded
as one position (ark.tasks.matmul_windows). Only the image grows, by the padding; the matrix of
windows is not stored. Called by ark.lower.rewrite.convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ark.ir.values import Tensor
from ark.plan.types import BOX_ALIGNMENT_BYTES
from ark.tasks.matmul_params import WindowParams
from ark.tasks.matmul_windows import boxable


@dataclass(frozen=True)
class Padded:
    """The padded image of a convolution. shape: (n, spatial..., channels). window: its windows, in
    the form of fuse_windows.window. before: padding elements in front of each row. channels: their
    number including padding.
    """

    shape: tuple[int, ...]
    window: dict[str, Any]
    before: int
    channels: int

    @property
    def depth(self) -> int:
        """The number of elements of k."""
        sizes: list[int] = self.window["size"]
        return math.prod(sizes) * self.channels

    def image_rules(self) -> list[Any]:
        """For each dimension of the source (n, channels, spatial...), the rule that gives an
        element's index from its indices in the padded image.
        """
        count = len(self.window["size"])
        rules = [_same(0), _same(1 + count), *(_same(1 + d) for d in range(count))]
        rules[-1] = [[[count, 1]], -self.before, 1, "fill"]
        return rules

    def kernel_rules(self) -> list[Any]:
        """For each dimension of the source (outputs, channels, taps...), the rule that gives an
        element's index from its indices in (outputs, taps..., channels).
        """
        count = len(self.window["size"])
        return [_same(0), _same(1 + count), *(_same(1 + d) for d in range(count))]


def _same(dimension: int) -> list[Any]:
    return [[[dimension, 1]], 0, 1, "fill"]


def padded(source: Tensor, window: dict[str, Any]) -> Padded | None:
    """The padded image of a convolution; None if its windows cannot be loaded as boxes. source: (n,
    channels, spatial...). window: in the form of fuse_windows.window.
    """
    n, channels, *spatial = source.shape
    itemsize = source.dtype.itemsize
    pack = BOX_ALIGNMENT_BYTES // itemsize
    wide = -(-channels // pack) * pack
    row = (window["sizes"][-1] - 1) * window["stride"][-1] + window["size"][-1]
    shape = (n, *spatial[:-1], row, wide)
    inside = {**window, "before": [*window["before"][:-1], 0]}
    params = WindowParams.from_plan({**inside, "side": 0})
    if window["dilation"][-1] != 1 or not boxable(shape, _strides(shape), itemsize, params):
        return None
    return Padded(shape, inside, window["before"][-1], wide)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
