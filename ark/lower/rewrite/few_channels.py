"""Pads the image of a convolution with few input channels, such as the first layer of an image
network, so that box copies can load its windows. Called by ark.lower.rewrite.convolutions.

A box copy can load only pixels whose channels are a multiple of 16 bytes. So the image is stored
with channels last, with zeros as further channels, and with zeros before and after each row. The
elements that a window has in one row are then contiguous in memory, and are loaded as if they were
the channels of one pixel (ark.tasks.matmul_windows). Only the image grows; the matrix of windows is
not stored.
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
    """The padded image of a convolution with few channels. shape: (n, spatial..., channels).
    window: the parameters of the convolution's windows over the padded image, in the form of
    fuse_windows.window. before: the number of padding pixels in front of each row. channels: the
    number of channels including padding.
    """

    shape: tuple[int, ...]
    window: dict[str, Any]
    before: int
    channels: int

    @property
    def depth(self) -> int:
        """The size of k, the dimension over which the convolution's product sums."""
        sizes: list[int] = self.window["size"]
        return math.prod(sizes) * self.channels

    def image_rules(self) -> list[Any]:
        """Rules that compute the padded image from the source: for each dimension of the source (n,
        channels, spatial...), how the index in that dimension follows from the indices of an
        element of the padded image.
        """
        count = len(self.window["size"])
        rules = [_same(0), _same(1 + count), *(_same(1 + d) for d in range(count))]
        rules[-1] = [[[count, 1]], -self.before, 1, "fill"]
        return rules

    def kernel_rules(self) -> list[Any]:
        """Rules that compute the weights with channels last: for each dimension of the source
        (outputs, channels, taps...), how the index in that dimension follows from the indices of an
        element of the result (outputs, taps..., channels).
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
    alignment = BOX_ALIGNMENT_BYTES // itemsize
    wide = -(-channels // alignment) * alignment
    row = (window["sizes"][-1] - 1) * window["stride"][-1] + window["size"][-1]
    shape = (n, *spatial[:-1], row, wide)
    inside = {**window, "before": [*window["before"][:-1], 0]}
    params = WindowParams.from_plan({**inside, "side": 0})
    if window["dilation"][-1] != 1 or not boxable(shape, _strides(shape), itemsize, params):
        return None
    return Padded(shape, inside, window["before"][-1], wide)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
