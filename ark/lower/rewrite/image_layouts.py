"""Determines which images have channels as their last dimension, and builds the nodes that
transpose images and multiply their windows. Called by ark.lower.rewrite.turned_images.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from msgspec import structs

from ark.ir.attributes import (
    MatmulAttributes,
    ReduceAttributes,
    RemapAttributes,
    TransposeAttributes,
)
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor, dense_view
from ark.lower.rewrite.convolutions import Convolution, image_of
from ark.lower.rewrite.fuse_chains import read_once
from ark.lower.rewrite.fuse_reduction_terms import REDUCTIONS
from ark.lower.rewrite.image_concats import joins_channels
from ark.lower.rewrite.views import UNSEEN, whole
from ark.tasks.node_expressions import is_elementwise

# Reductions that can be computed in two steps: reducing the places of each image, and then the
# results of all images, is the same as reducing places and images at once.
JOINED = tuple(f"reduce_{f}" for f in ("sum", "mean", "max", "min", "prod"))


def pools(node: Node) -> bool:
    """True for a pool of an image with one or two spatial dimensions, or the gradient of one."""
    known = node.type in ("pool", "unpool") and len(node.outputs[0].shape) <= 4
    return known and all(map(whole, node.inputs))


def reduces_places(node: Node) -> bool:
    """True if the node reduces each channel of an image to one element (for example, a global
    mean) and the user cannot read the result by name.
    """
    source, out = node.inputs[0] if node.inputs else None, node.outputs[0]
    if source is None or node.type not in REDUCTIONS or len(node.inputs) > 1:
        return False
    image = len(source.shape) == 3 and node.read(ReduceAttributes).axis == 2 and whole(source)
    return image and whole(out) and out.buffer.arena in UNSEEN


def reductions_over_images(graph: Graph, kept: frozenset[int]) -> dict[int, Node]:
    """The pairs of reductions of which the first reduces the places of each image and the second
    the results of all images, so that one value is left for each channel. Key: the first one's id.
    """
    private, view = read_once(graph, kept), graph.view
    pairs: dict[int, Node] = {}
    for node in graph.nodes:
        if node.type not in JOINED or len(node.inputs) > 1 or node.hints or node.after:
            continue
        source, out = node.inputs[0], node.outputs[0]
        before = view.writers.get(source.buffer.id, [])
        if len(before) != 1 or not private(source) or not reduces_places(before[0]):
            continue
        (first,) = before
        alike = first.type == node.type and first.placement == node.placement
        images, channels, _ = first.inputs[0].shape
        one = node.read(ReduceAttributes).axis == 0 and source.shape[0] == images
        alone = whole(out) and out.elements == channels and len(view.writers[out.buffer.id]) == 1
        unseen = out.buffer.arena == "activation" and out.buffer.id not in kept
        if alike and one and alone and unseen and out.dtype == first.outputs[0].dtype:
            pairs[first.id] = node
    return pairs


def moves_channels(node: Node, to_last: bool) -> bool:
    """True for a transpose of an image from channels first to channels last, or back."""
    if node.type != "transpose" or node.hints is not None or node.after:
        return False
    perm = node.read(TransposeAttributes).perm
    last = len(perm) - 1
    wanted = [0, *range(2, last + 1), 1] if to_last else [0, last, *range(1, last)]
    return last > 1 and perm == wanted and whole(node.inputs[0]) and whole(node.outputs[0])


def moves_images(node: Node) -> bool:
    """True for a transpose of images (n, channels, places...) that exchanges their first two
    dimensions. The images of each channel then follow each other.
    """
    if node.type != "transpose" or node.hints is not None or node.after:
        return False
    perm = node.read(TransposeAttributes).perm
    exchanged = len(perm) > 2 and perm == [1, 0, *range(2, len(perm))]
    return exchanged and whole(node.inputs[0]) and whole(node.outputs[0])


def moves_pixels(node: Node) -> bool:
    """True for a copy by index arithmetic from one image to another, in which each pixel keeps its
    image and its channels. Margins or zeros between pixels, for example, are added in this way.
    """
    if node.type != "remap" or node.hints is not None or node.after:
        return False
    source, out = node.inputs[0], node.outputs[0]
    given = node.read(RemapAttributes)
    if not 3 <= len(source.shape) == len(out.shape) or not (whole(source) and whole(out)):
        return False
    kept = all(given.rules[d] == [[[d, 1]], 0, 1, "fill"] for d in (0, 1))
    pixels = all(t[0] > 1 for rule in given.rules[2:] for t in rule[0])
    return kept and pixels and source.shape[:2] == out.shape[:2]


def per_image(tensor: Tensor, out: Tensor) -> bool:
    """True if an operand of an elementwise op has one element for each channel of each image."""
    image, given = image_of(out), image_of(tensor)
    if image is None or len(tensor.shape) != len(out.shape) or image[0] == 1:
        return False
    return given == (*image[:2], 1) != image


def images_with_channels_last(
    graph: Graph, chosen: Collection[Convolution], kept: frozenset[int]
) -> tuple[set[int], set[int]]:
    """Returns two sets of buffer ids of images.

    Images in the first set should be stored with channels last, because this saves time. They are
    images whose windows a convolution reads, or which it cannot load with channels first. They are
    also images from which elementwise ops, pools or concatenations compute another image of the
    set. Images in the second set may be stored with channels last at no cost, because all ops that
    read them support it.
    """
    readers = graph.view.reads
    able: Counter[int] = Counter()
    worth: set[int] = set()
    fine: set[int] = set()
    by_node = {c.product.id: c for c in chosen}
    laid = {c.windows.id for c in chosen if c.windows is not None and not (c.padded or c.few)}
    for node in reversed(graph.nodes):
        for tensor in node.outputs:
            number, private = tensor.buffer.id, tensor.buffer.arena == "activation"
            if private and number not in kept and 0 < readers[number] == able[number]:
                fine.add(number)
        written = {t.buffer.id for t in node.outputs}
        read: list[Tensor] = []
        if node.id in laid:
            worth.add(node.inputs[0].buffer.id)
            read = [node.inputs[0]]
        elif node.id in by_node and by_node[node.id].windows is None:
            read = [by_node[node.id].source]
            pays = by_node[node.id].unaligned or written & worth
            worth |= {read[0].buffer.id} if pays else set()
        elif is_elementwise(node) and written & (worth | fine):
            image = image_of(node.outputs[0])
            read = [t for t in node.inputs if image is not None and image_of(t) == image]
            worth |= {t.buffer.id for t in read} if written & worth else set()
        elif (pools(node) or moves_pixels(node)) and written & (worth | fine):
            read = list(node.inputs)
            worth |= {read[0].buffer.id} if written & worth else set()
        elif joins_channels(node) and written & (worth | fine):
            read = list(node.inputs)
            worth |= {t.buffer.id for t in read} if written & worth else set()
        elif reduces_places(node) or moves_images(node):
            read = [node.inputs[0]]
        elif moves_channels(node, to_last=True) and not written & (worth | fine):
            read = [node.inputs[0]]
            worth.add(read[0].buffer.id)
        able.update(t.buffer.id for t in read)
    return worth, fine


class ImageNodes:
    """Builds nodes that transpose images, gather their windows and multiply the windows by weights.
    number: the id of the node that was added last.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.number = max((n.id for n in graph.nodes), default=0)
        self.nodes: list[Node] = []

    def turn(self, like: Node, tensor: Tensor, shape: Sequence[int]) -> Node:
        """A node that views the tensor in the given three dimensions and transposes the last
        two.
        """
        first, channels, places = shape
        name = f"{like.name}.channels_last"
        out = self.graph.tensor((first, places, channels), tensor.dtype, name=name)
        return self.node(like, "transpose", self.view(tensor, shape), out, {"perm": [0, 2, 1]})

    def turn_weights(self, like: Node, weight: Tensor, shape: Sequence[int]) -> Node:
        """A node that views the weights of a convolution as (groups, outputs, channels, taps) and
        transposes them to (taps, channels, groups, outputs).
        """
        groups, outputs, channels, taps = shape
        name = f"{like.name}.channels_last"
        out = self.graph.tensor((taps, channels, groups, outputs), weight.dtype, name=name)
        attrs = {"perm": [3, 2, 0, 1]}
        return self.node(like, "transpose", self.view(weight, shape), out, attrs)

    def windows(self, node: Node, source: Tensor, window: dict[str, Any]) -> Node:
        """A node that computes the windows (n, places..., window..., channels) of an input with
        channels last.
        """
        count = len(window["size"])
        shape = [source.shape[0], *window["sizes"], *window["size"], source.shape[-1]]
        rules: list[Any] = [[[[0, 1]], 0, 1, "fill"]]
        for d in range(count):
            terms = [[1 + count + d, window["dilation"][d]], [1 + d, window["stride"][d]]]
            rules.append([terms, -window["before"][d], 1, "fill"])
        rules.append([[[1 + 2 * count, 1]], 0, 1, "fill"])
        return self.remap(node, source, shape, rules, node.name)

    def remap(
        self, like: Node, source: Tensor, shape: Sequence[int], rules: list[Any], name: str
    ) -> Node:
        """A node that gathers elements by index arithmetic, with zeros outside of the source."""
        out = self.graph.tensor(shape, source.dtype, name=name)
        attrs = {"rules": rules, "fill": 0.0, "shape": list(shape)}
        return self.node(like, "remap", source, out, attrs)

    def product(self, product: Node, inputs: tuple[Tensor, Tensor], out: Tensor) -> Node:
        given = product.read(MatmulAttributes)
        given = structs.replace(given, transpose_a=False, transpose_b=True)
        return dataclasses.replace(product, inputs=inputs, outputs=(out,)).with_attributes(given)

    def node(self, like: Node, type: str, source: Tensor, out: Tensor, attrs: Any) -> Node:
        """A new node with one input. It copies the placement (phase, processors) and the ordering
        constraints of the node `like`.
        """
        self.number += 1
        return like.beside(self.number, type, [source], out, attrs, out.name or like.name)

    def view(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """A whole tensor viewed in another shape, or a slice of rows of channels viewed with other
        dimensions before the channels.
        """
        if tensor.shape == tuple(shape):
            return tensor
        view = dense_view(tensor, shape)
        if view is None:
            assert len(tensor.shape) == 2 and tensor.shape[1] == shape[-1]
            zeros = [0] * (len(shape) - 1)
            view = (*shape[:-1], tensor.extents[1]), (*zeros, tensor.offsets[1])
        extents, offsets = view
        return self.graph.tensor(
            shape,
            tensor.dtype,
            buffer=tensor.buffer,
            extents=extents,
            offsets=offsets,
            name=tensor.name,
        )
