"""The gradients of convolutions, which are products of weights and a matrix of windows.

The gradient of the image is another convolution: the gradient of the result is convolved with the
flipped weights, in which inputs and outputs are exchanged. If the windows have strides, zeros are
inserted between the elements of the gradient first. The gradient of the weights is one product that
sums over all positions of all images. Both products can then read windows in the image, as that of
the convolution itself can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ark.frontend.tensor import Tensor
from ark.ir.attributes import MatmulAttributes
from ark.ir.graph import Node
from ark.lower.rewrite.fuse_windows import window
from ark.lower.rewrite.views import whole
from ark.ops.elementwise import cast
from ark.ops.gradients.table import Call, Gradients
from ark.ops.indexing import Rule, remap, same
from ark.ops.linear_algebra import matmul
from ark.ops.movement import transpose
from ark.ops.views import reshape
from ark.ops.windows import multiplied, window_matrix

# Zeros are inserted into the gradient if they make it at most this number of times as large.
MOST_ZEROS = 4


def convolution_gradients(call: Call, given: Tensor) -> Gradients | None:
    """The gradients of the weights and of the matrix of windows, if the product `call.node` is a
    convolution of several images; None otherwise. If the gradient of the image does not need that
    of the matrix, it is passed to the image.
    """
    weight, table = call.node.inputs[:2]
    plain = call.node.read(MatmulAttributes).transposes == (False, False)
    if not plain or len(weight.shape) != 4 or len(table.shape) != 4 or not whole(table):
        return None
    n, groups, depth, _ = table.shape
    alike = weight.dtype == table.dtype == given.ir.dtype
    if not alike or weight.shape != (1, groups, weight.shape[2], depth):
        return None
    maker = call.maker(table)
    if maker is not None and maker.type == "remap" and whole(maker.outputs[0]):
        numbers = window(maker, groups)
        if numbers is None or maker.inputs[0].shape[0] != n:
            return None
        return _Convolution(call, given, maker, numbers).gradients()
    if n == 1:
        return None  # any product of one matrix has this form; the common rule suits it
    pixels = {"size": [1], "stride": [1], "dilation": [1], "before": [0]}
    return _Convolution(call, given, None, {**pixels, "sizes": [table.shape[3]]}).gradients()


class _Convolution:
    """A convolution whose gradients are computed. maker: the node that computed the matrix of
    windows; None if the image itself is that matrix. numbers: the sizes, strides and margins of the
    windows (ark.ir.attributes.WindowAttributes).
    """

    def __init__(
        self, call: Call, given: Tensor, maker: Node | None, numbers: dict[str, list[int]]
    ) -> None:
        self.call, self.maker = call, maker
        self.size, self.sizes = list(numbers["size"]), list(numbers["sizes"])
        self.stride, self.dilation = numbers["stride"], numbers["dilation"]
        self.before = numbers["before"]
        weight, table = call.node.inputs[:2]
        self.image = maker.inputs[0] if maker is not None else table
        self.n, self.groups, depth, self.places = table.shape
        self.rows, self.taps = weight.shape[2], math.prod(self.size)
        self.channels = depth // self.taps  # of a group
        self.spatial = list(self.image.shape[2:]) if maker is not None else [self.places]
        self.given = reshape(given, [self.n, self.groups * self.rows, *self.sizes])
        self.tf32 = call.node.read(MatmulAttributes).tf32

    def gradients(self) -> Gradients | None:
        right = None
        if self.call.wanted[1]:
            right = self._of_image()
            if right is None:
                return None
            if self.maker is not None:
                self.call.passed.append((self.image, right))
                right = None
            else:
                right = reshape(right, self.call.shape(1))
        return [self._of_weights() if self.call.wanted[0] else None, right]

    def _of_weights(self) -> Tensor:
        """The gradient of the weights: one product of the gradient and the windows, whose summed
        dimension has the positions of all images.
        """
        groups, channels, count = self.groups, self.channels, len(self.sizes)
        image = reshape(self.call.value(self.image), [self.n, groups * channels, *self.spatial])
        first = _channels_first(image)
        if self.maker is not None:
            rules: list[Rule] = [[[[0, channels], [1, 1]], 0, 1, "fill"], same(2 + count)]
            rules += [
                [
                    [[2 + d, self.dilation[d]], [3 + count + d, self.stride[d]]],
                    -self.before[d],
                    1,
                    "fill",
                ]
                for d in range(count)
            ]
            shape = [groups, channels, *self.size, self.n, *self.sizes]
            first = remap("windows", first, shape, rules)
        many = self.n * self.places
        lead = [groups] if groups > 1 else []
        back = reshape(_channels_first(self.given), [*lead, self.rows, many])
        table = reshape(first, [*lead, channels * self.taps, many])
        product = matmul(back, table, transpose_other=True, tf32=self.tf32)
        gradient = reshape(product, self.call.shape(0))
        dtype = self.call.node.inputs[0].dtype
        return gradient if gradient.ir.dtype == dtype else cast(gradient, dtype)

    def _of_image(self) -> Tensor | None:
        """The gradient of the image (n, channels, spatial...); None if it must be computed from the
        gradient of the matrix of windows.
        """
        steps = math.prod(self.stride)
        before = [
            (k - 1) * d - b for k, d, b in zip(self.size, self.dilation, self.before, strict=True)
        ]
        single = self.taps == 1
        if min(before) < 0 or not (steps == 1 or single or steps <= MOST_ZEROS < self.taps):
            return None
        given, spatial, count = self.given, self.spatial, len(self.size)
        if steps > 1 and not single:
            # Element o of the gradient moves to o * stride.
            sizes = [(n - 1) * s + 1 for n, s in zip(self.sizes, self.stride, strict=True)]
            given = _spread(given, sizes, self.stride, [0] * count)
        elif single:
            spatial, before = self.sizes, [0] * count
        rules: list[Rule] = [
            [[[3 + d, self.dilation[d]], [3 + count + d, 1]], -before[d], 1, "fill"]
            for d in range(count)
        ]
        windows = window_matrix(given, self.groups, self.size, rules, spatial)
        turned = self._turned()
        image = multiplied(turned, windows, self.groups, spatial, None, "gradient", self.tf32)
        if single and spatial != self.spatial:
            image = _spread(image, self.spatial, self.stride, self.before)
        return image

    def _turned(self) -> Tensor:
        """The weights as (groups * channels, outputs of a group, elements of the window in reverse
        order).
        """
        groups, weight = self.groups, self.call.input(0)
        if self.taps == 1:
            split = reshape(weight, [groups, self.rows, self.channels])
            turned = transpose(split, [0, 2, 1])
            return reshape(turned, [groups * self.channels, self.rows, *self.size])
        split = reshape(weight, [groups, self.rows, self.channels, *self.size])
        flipped: list[Rule] = [[[[3 + d, -1]], k - 1, 1, "fill"] for d, k in enumerate(self.size)]
        shape = [groups, self.channels, self.rows, *self.size]
        turned = remap("flipped", split, shape, [same(0), same(2), same(1), *flipped])
        return reshape(turned, [groups * self.channels, self.rows, *self.size])


def _channels_first(image: Tensor) -> Tensor:
    """An image (n, channels, spatial...) with exchanged dimensions n and channels."""
    return transpose(image, [1, 0, *range(2, len(image.ir.shape))])


def _spread(
    image: Tensor, spatial: Sequence[int], stride: Sequence[int], before: Sequence[int]
) -> Tensor:
    """An image whose pixel o is moved to o * stride - before, with zeros at all other pixels.
    spatial: the sizes of the result.
    """
    rules: list[Rule] = [same(0), same(1)]
    rules += [[[[2 + d, 1]], before[d], stride[d], "exact"] for d in range(len(spatial))]
    return remap("spread", image, [*image.ir.shape[:2], *spatial], rules)
