"""Convolutions in groups of few channels, as nodes that read images with channels last, and the
results of torch in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import ark
from ark.frontend.model import current_model
from ark.frontend.tensor import Tensor


@dataclass(frozen=True)
class Grouped:
    """image: (n, height, width). groups: their number, and the channels and outputs of each. then:
    True to add a bias, an image and an activation, which become the epilogue.
    nan: True if a channel of the second group is NaN at one pixel, which no other group reads.
    channels_first: True if the image is stored as (n, channels, height, width).
    """

    image: tuple[int, int, int]
    groups: tuple[int, int, int]
    size: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    before: tuple[int, int] = (1, 1)
    then: bool = False
    nan: bool = False
    channels_first: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """Height and width of the result, with as much padding behind as before."""
        each = zip(self.image[1:], self.size, self.stride, self.dilation, self.before, strict=True)
        down, across = ((n + 2 * b - (k - 1) * d - 1) // s + 1 for n, k, s, d, b in each)
        return down, across

    def arrays(self, seed: int = 0) -> list[np.ndarray]:
        """The weights as (taps times channels, outputs), or as (channels times taps, outputs) for
        an image with channels first; the image; and with an epilogue the bias and the second image.
        """
        rng, (many, each, rows) = np.random.default_rng(seed), self.groups
        depth = self.size[0] * self.size[1] * each
        weight = rng.uniform(-1, 1, (depth, many * rows)) / np.sqrt(depth)
        given = [weight, rng.uniform(-1, 1, (*self.image, many * each))]
        if self.nan:
            given[1][0, 2, 3, each] = np.nan
        if self.channels_first:
            given[1] = np.ascontiguousarray(np.moveaxis(given[1], 3, 1))
        if self.then:
            shape = (self.image[0], *self.sizes, many * rows)
            given += [rng.uniform(-1, 1, many * rows), rng.uniform(-1, 1, shape)]
        return given

    def build(self, weight: Tensor, image: Tensor, *others: Tensor) -> Tensor:
        """Adds the convolution to the model that is being built."""
        model = current_model()
        shape = (self.image[0], *self.sizes, weight.ir.shape[1])
        out = Tensor(model.graph.tensor(shape, image.ir.dtype), model)
        names = ("size", "stride", "dilation", "before", "sizes")
        attrs: dict[str, Any] = {name: list(getattr(self, name)) for name in names}
        attrs |= {"channels_first": True} if self.channels_first else {}
        inputs = [weight.ir, image.ir]
        model.graph.add("grouped_convolution", inputs, [out.ir], attrs, "grouped")
        if not others:
            return ark.copy(out)
        biased = ark.add(ark.cast(out, ark.fp32), others[0])
        return ark.relu(ark.add(ark.cast(biased, image.dtype()), others[1]))

    def expected(self, weight: np.ndarray, image: np.ndarray, *others: np.ndarray) -> np.ndarray:
        import torch

        many, each, rows = self.groups
        if self.channels_first:
            table = weight.reshape(each, *self.size, many * rows).transpose(3, 0, 1, 2)
        else:
            table = weight.reshape(*self.size, each, many * rows).transpose(3, 2, 0, 1)
        first = torch.tensor(image)
        first = first if self.channels_first else first.permute(0, 3, 1, 2)
        form = {"stride": self.stride, "dilation": self.dilation, "padding": self.before}
        result = torch.nn.functional.conv2d(first, torch.tensor(table), groups=many, **form)
        last = np.asarray(result.permute(0, 2, 3, 1).numpy())
        return np.maximum(last + others[0] + others[1], 0) if others else last


CASES: Sequence[Grouped] = (
    Grouped((2, 9, 14), (6, 8, 8), then=True),
    Grouped((1, 12, 11), (4, 16, 16), stride=(2, 2), nan=True),
    Grouped((1, 7, 9), (3, 8, 8), before=(2, 1), nan=True),
    Grouped((2, 7, 7), (12, 4, 4), nan=True),
    Grouped((1, 8, 9), (2, 24, 24), then=True),
    Grouped((2, 5, 6), (3, 8, 16), (5, 2), (1, 2), (1, 2), (2, 1), nan=True),
    Grouped((1, 6, 7), (4, 16, 8), (1, 1), (2, 1), before=(0, 0)),
    Grouped((1, 10, 10), (5, 3, 5), (3, 2), dilation=(2, 1)),
    Grouped((3, 4, 3), (2, 48, 48), stride=(2, 1)),
    Grouped((2, 9, 13), (1, 3, 16), stride=(2, 2), then=True, channels_first=True),
    Grouped((1, 7, 6), (2, 8, 8), (2, 3), dilation=(2, 1), nan=True, channels_first=True),
)
