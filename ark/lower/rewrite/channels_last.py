"""Moves the channels of convolutions to the last dimension (NHWC) if matrix units compute the
products.

A convolution is written as a product with a matrix of windows (ark.ops.windows). With channels
first, elements that are neighbours in this matrix are not neighbours in the image, so they are
copied one by one. With channels last they are neighbours in both, and are copied by vector accesses
or loaded directly by box copies (ark.lower.rewrite.fuse_windows). An image is transposed once for
all ops that read it. Elementwise ops between convolutions keep channels last. A result is
transposed back only if an op that reads it needs channels first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

from msgspec import structs

from ark.ir.attributes import MatmulAttributes
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.cuts import box_costs
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.convolutions import Convolution, convolutions, image_of
from ark.lower.rewrite.turned_images import TurnedImages
from ark.lower.rewrite.weight_gradients import WeightGradient, weight_gradients
from ark.lower.window_cuts import divides_windows
from ark.lower.work_times import TRANSPOSED_TRAFFIC_FACTOR
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.types import BOX_ALIGNMENT_BYTES, BOX_ROW_BYTES

# Windows of single pixels.
PIXELS = {"size": [1, 1], "stride": [1, 1], "dilation": [1, 1], "before": [0, 0]}


def channels_last(graph: Graph, context: Context, boxed: bool = True) -> Graph:
    """A copy of the graph in which convolutions, and the ops between them, have channels as the
    last dimension. boxed: True to include depthwise convolutions, convolutions in groups of few
    channels, and convolutions with too few channels or outputs for a vector access. For these,
    channels last is faster only if box copies load the windows of other convolutions.
    """
    machine, kept = context.machine, context.kept
    if not machine.coalesces:
        return graph
    listed = convolutions(graph, kept, machine)
    plain = {n: c for n, c in listed.items() if not (c.padded or c.by_groups or c.first)}
    chosen = listed if boxed else plain
    if all(c.by_groups for c in chosen.values()):  # these alone do not justify transposes
        chosen = {n: dataclasses.replace(c, few=False) for n, c in chosen.items() if c.padded}
    if not chosen:
        return graph
    writer = _Convolutions(graph, kept, chosen.values(), machine)
    laid = {c.windows.id for c in chosen.values() if c.windows is not None}
    summed = weight_gradients(graph, kept, machine) if boxed else {}
    laid.update(number for one in summed.values() for number in one.omitted)
    for node in graph.nodes:
        node = writer.renamed(node)
        if node.id in chosen:
            writer.convolution(chosen[node.id])
        elif node.id in summed:
            writer.weight_gradient(summed[node.id])
        elif node.id not in laid and not writer.takes(node):
            writer.keep(node)
    return graph.with_nodes(writer.needed(kept))


def _plane(key: str, values: Sequence[int]) -> list[int]:
    """A parameter of a convolution's windows (such as "stride"), with one value for each of two
    spatial dimensions. For a convolution with one spatial dimension, a value for the missing first
    dimension is added.
    """
    missing = 0 if key == "before" else 1
    return [*[missing] * (2 - len(values)), *values]


class _Convolutions(TurnedImages):
    """Builds the nodes of a graph whose convolutions have channels last."""

    def __init__(
        self,
        graph: Graph,
        kept: frozenset[int],
        chosen: Collection[Convolution],
        machine: Machine,
    ) -> None:
        super().__init__(graph, kept, chosen)
        self.machine = machine

    def convolution(self, one: Convolution) -> None:
        """Adds a convolution to the new graph: a transpose of its image, unless an earlier node has
        transposed it, and the product.
        """
        if one.by_groups:
            self._by_groups(one)
            return
        product, out = one.product, one.product.outputs[0]
        wanted = out.buffer.id in self.wanted
        sides = self._padded_sides(one) if one.padded else self._sides(one)
        if sides is None:
            self.keep(product)
            return
        flat, table = sides
        (outputs, depth), n, places = flat.shape, out.shape[0], out.shape[-1]
        whole_rows = places * out.dtype.itemsize % BOX_ALIGNMENT_BYTES == 0
        if one.first or (not wanted and whole_rows and not self._divides(one, flat)):
            inputs = (
                self.view(flat, [1, 1, outputs, depth]),
                self.view(table, [n, 1, places, depth]),
            )
            self.keep(self.product(product, inputs, out))
            return
        # The result is stored with channels last if the ops that read it need this layout, if its
        # rows with channels first would be unaligned, or if k is divided into parts.
        between = self.result(out, f"{product.name}.places")
        self.nodes.append(self.product(product, (table, flat), between))
        self.turn_back(product, between, out)

    def _divides(self, one: Convolution, weight: Tensor) -> bool:
        """True if the convolution's product with the windows as its left operand, whose k may be
        divided into parts, is predicted to save more time than it takes to transpose its result.
        """
        out, machine = one.product.outputs[0], self.machine
        size, (outputs, depth) = out.dtype.itemsize, weight.shape
        channels = depth // math.prod(one.numbers["size"])
        boxes = machine.has(Capability.WINDOW_BOXES) and channels * size % BOX_ROW_BYTES == 0
        if one.windows is None or not boxes:
            return False
        n, places = out.shape[0], out.shape[-1]
        turned = TRANSPOSED_TRAFFIC_FACTOR * out.nbytes / box_costs(machine).laid_rate
        turned += machine.costs.signal_us
        shape, flat = (n, 1, outputs, places), (1, 1, n * places, outputs)
        return divides_windows(shape, depth, size, machine, flat, turned)

    def _sides(self, one: Convolution) -> tuple[Tensor, Tensor] | None:
        """Both operands of a convolution's product, with channels last: the weights as (outputs,
        k), and the windows as a matrix with one row for each image and position of the window. None
        if the image has channels first and transposing it does not pay off.
        """
        product, windows = one.product, one.windows
        n, channels, _ = image_of(one.source) or (0, 0, 0)
        weight = product.inputs[0]
        rows = self._source_rows(one)
        if rows is None:
            return None
        outputs, depth = product.outputs[0].shape[2], product.inputs[1].shape[2]
        if windows is None and product.read(MatmulAttributes).transpose_a:
            kernel = self.turn(product, weight, [1, depth, outputs])
            self.nodes.append(kernel)
            return self.view(kernel.outputs[0], [outputs, depth]), rows
        if windows is None:
            return self.view(weight, [outputs, depth]), rows
        image = self.view(rows, [n, *one.source.shape[2:], channels])
        self.nodes.append(self.windows(windows, image, one.numbers))
        taps = math.prod(one.numbers["size"])
        places = math.prod(one.numbers["sizes"])
        table = self.view(self.nodes[-1].outputs[0], [n * places, depth])
        if taps == 1:
            return self.view(weight, [outputs, depth]), table
        kernel = self.turn(product, weight, [outputs, channels, taps])
        self.nodes.append(kernel)
        return self.view(kernel.outputs[0], [outputs, depth]), table

    def _source_rows(self, one: Convolution) -> Tensor | None:
        """The convolution's image as rows of channels, one row per pixel. If no earlier node has
        computed this layout, a new node transposes the image. None if the image has channels first
        and transposing it costs more than it saves.
        """
        product, like = one.product, one.windows or one.product
        n, channels, places = image_of(one.source) or (0, 0, 0)
        rows = self.rows(one.source, product)
        worth = one.windows is not None or one.unaligned
        worth = worth or product.outputs[0].buffer.id in self.worth
        if rows is None and not worth:
            return None
        if rows is None or like.after:
            last = self.turn(like, one.source, [n, channels, places])
            self.nodes.append(last)
            rows = self.view(last.outputs[0], [n * places, channels])
            self.turned[one.source.buffer.id] = rows, product.placement
        return rows

    def weight_gradient(self, one: WeightGradient) -> None:
        """Adds the gradient of a convolution's weights, which sums over the pixels of images with
        channels first. The order of its result is changed to channels before elements of the
        window.
        """
        product, out, numbers = one.product, one.product.outputs[0], one.numbers
        back = self._planes(one.back, one.pitch)
        image = self._planes(one.image, one.pitch, numbers)
        rows, channels = back.shape[0], one.image.inputs[0].shape[1]
        taps = out.shape[1] // channels
        sums = self.graph.tensor((rows, taps * channels), out.dtype, name=f"{product.name}.taps")
        attributes = structs.replace(product.read(MatmulAttributes), pixels=one.pixels)
        node = dataclasses.replace(product, inputs=(back, image), outputs=(sums,))
        self.nodes.append(node.with_attributes(attributes))
        source = self.view(sums, [rows, taps, channels])
        target = self.view(out, [rows, channels, taps])
        self.nodes.append(self.node(product, "transpose", source, target, {"perm": [0, 2, 1]}))

    def _planes(self, node: Node, pitch: int, numbers: dict[str, Any] | None = None) -> Tensor:
        """Adds a copy of an image to channels first and then images, in rows of `pitch` pixels, for
        each column of a window, as ark.tasks.matmul_pixels describes. Returns its result (rows, n,
        pixels). `node` exchanges the first two dimensions. numbers: of the windows; None for an
        image of the size of the gradient.
        """
        source = node.inputs[0]
        n, channels, high, wide = source.shape
        given = numbers or PIXELS
        (_, columns), (down, across) = given["size"], given["stride"]
        apart, before = given["dilation"][1], given["before"][1]
        rows = self.rows(source, node)
        rules = [
            [[[3, 1]], 0, 1, "fill"],
            [[[4, down], [0, 1]], 0, 1, "fill"],
            [[[5, across], [1, apart]], -before, 1, "fill"],
        ]
        channel = [[[2, 1]], 0, 1, "fill"]
        if rows is not None:
            source = self.view(rows, [n, high, wide, channels])
            rules.append(channel)
        else:
            rules.insert(1, channel)
        places = -(-high // down)
        shape = (down, columns, channels, n, places, pitch)
        copy = self.remap(node, source, shape, rules, f"{node.name}.pixels")
        self.nodes.append(copy)
        return self.view(copy.outputs[0], [down * columns * channels, n, places * pitch])

    def _by_groups(self, one: Convolution) -> None:
        """Adds a convolution in groups, which reads and writes images as rows of channels (one row
        per pixel). If a group has few channels and outputs, the convolution reads the image with
        channels first.
        """
        product, out = one.product, one.product.outputs[0]
        rows = one.source if one.few else self._source_rows(one)
        if rows is None:
            self.keep(product)
            return
        n, channels, *_ = one.source.shape
        taps, groups = math.prod(one.numbers["size"]), out.shape[1]
        shape = groups, product.inputs[0].shape[2], channels // groups, taps
        outputs = groups * shape[1]
        if one.depthwise:
            kernel = self.turn(product, product.inputs[0], [1, channels, taps])
        elif one.few:
            kernel = self.turn(product, product.inputs[0], [1, outputs, channels * taps])
        else:
            kernel = self.turn_weights(product, product.inputs[0], shape)
        weight = self.view(kernel.outputs[0], [taps * shape[2], outputs])
        numbers = {key: _plane(key, values) for key, values in one.numbers.items()}
        places = math.prod(numbers["sizes"])
        sizes = one.source.shape[2:] if one.windows is not None else (1, places)
        result = self.graph.tensor((n * places, outputs), out.dtype, name=f"{product.name}.places")
        image = one.source if one.few else self.view(rows, [n, *sizes, channels])
        node = dataclasses.replace(
            product,
            type="depthwise" if one.depthwise else "grouped_convolution",
            inputs=(weight, image),
            outputs=(self.view(result, [n, *numbers["sizes"], outputs]),),
            attrs={**numbers, "channels_first": True} if one.few else numbers,
            after=(*(one.windows.after if one.windows is not None else ()), *product.after),
        )
        self.nodes += [kernel, node]
        self.turn_back(product, result, self.view(out, [n, outputs, places]))

    def _padded_sides(self, one: Convolution) -> tuple[Tensor, Tensor] | None:
        """The two operands of a convolution's product, as `_sides` returns them, for a convolution
        of few channels, whose image is padded to more channels.
        """
        product, windows, padded = one.product, one.windows, one.padded
        if windows is None or padded is None:
            return None
        size, channels = padded.window["size"], one.source.shape[1]
        outputs = product.inputs[0].shape[2]
        weight = self.view(product.inputs[0], [outputs, channels, *size])
        name = f"{product.name}.channels_last"
        image = self.remap(windows, one.source, padded.shape, padded.image_rules(), name)
        shape = (outputs, *size, padded.channels)
        kernel = self.remap(product, weight, shape, padded.kernel_rules(), name)
        laid = self.windows(windows, image.outputs[0], padded.window)
        self.nodes += [image, laid, kernel]
        places = math.prod(padded.window["sizes"]) * one.source.shape[0]
        table = self.view(laid.outputs[0], [places, padded.depth])
        return self.view(kernel.outputs[0], [outputs, padded.depth]), table
