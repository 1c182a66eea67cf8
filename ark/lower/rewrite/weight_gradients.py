"""Finds the gradients of convolutions' weights that box copies can load as chunks of pixels
(ark.tasks.matmul_pixels). Called by ark.lower.rewrite.channels_last.

ark.ops.gradients.convolutions writes such a gradient as a product of the gradient of the result and
the matrix of windows, both with the pixels of all images as their last dimension. Here the matrix
is omitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ark.ir.attributes import MatmulAttributes, RemapAttributes
from ark.ir.graph import Graph, Node
from ark.ir.graph_view import WritesSoFar
from ark.lower.rewrite.fuse_chains import read_once
from ark.lower.rewrite.fuse_windows import steps_of
from ark.lower.rewrite.image_layouts import moves_images
from ark.lower.rewrite.views import whole
from ark.lower.window_cuts import window_cuts
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.types import BOX_ALIGNMENT_BYTES, BOX_ROW_BYTES
from ark.tasks.matmul_params import PixelParams
from ark.tasks.matmul_pixels import matrix_shape

LEAST_CHANNELS = 16  # of a power of two, so that every tile has whole elements of a window


@dataclass(frozen=True)
class WeightGradient:
    """The gradient of a convolution's weights. product: its matmul node. windows: the node that
    computes the matrix of windows. back, image: the transposes that exchange images and channels of
    the gradient of the result, and of the convolution's input. pixels: the parameters of the
    product over pixels. pitch: the length of its rows of pixels. numbers: of the windows.
    """

    product: Node
    windows: Node
    back: Node
    image: Node
    pixels: dict[str, Any]
    pitch: int
    numbers: dict[str, Any]

    @property
    def omitted(self) -> tuple[int, ...]:
        """The ids of the nodes that the product over pixels does not need."""
        return self.windows.id, self.back.id, self.image.id


def weight_gradients(
    graph: Graph, kept: frozenset[int], machine: Machine
) -> dict[int, WeightGradient]:
    """The gradients of weights that box copies can load by chunks, by the id of their product."""
    if not machine.has(Capability.WINDOW_BOXES):
        return {}
    private = read_once(graph, kept)
    copies: dict[int, tuple[int, Node]] = {}  # by buffer: index and node
    written = WritesSoFar()
    gradients: dict[int, WeightGradient] = {}
    for place, node in enumerate(graph.nodes):
        if node.type in ("remap", "transpose") and private(node.outputs[0]):
            copies[node.outputs[0].buffer.id] = place, node
        elif node.type == "matmul":
            first, back = copies.get(node.inputs[0].buffer.id, (-1, None))
            _, windows = copies.get(node.inputs[1].buffer.id, (-1, None))
            if back is not None and windows is not None:
                second, image = copies.get(windows.inputs[0].buffer.id, (-1, None))
                one = _gradient(node, windows, back, image, machine)
                since = min(first, second)
                sources = [t for n in (back, image) if n is not None for t in n.inputs]
                if one is not None and not written.behind(since, sources):
                    gradients[node.id] = one
        written.add(place, node)
    return gradients


def _gradient(
    product: Node, windows: Node, back: Node, image: Node | None, machine: Machine
) -> WeightGradient | None:
    """The gradient of weights that a product computes; None if box copies cannot load it."""
    if image is None or windows.type != "remap" or not (moves_images(back) and moves_images(image)):
        return None
    nodes = (product, windows, back, image)
    if any(n.hints or n.after or n.placement != product.placement for n in nodes):
        return None
    given, (left, right), out = product.read(MatmulAttributes), product.inputs, product.outputs[0]
    types = {t.dtype.name for t in (left, right, out)}
    able = {"fp32"} if given.tf32 else {"bf16", "fp16"}
    if given.transposes != (False, True) or len(types) != 1 or not types <= able:
        return None
    if len(left.shape) != 2 or len(right.shape) != 2 or not all(map(whole, (left, right, out))):
        return None
    numbers = _windows(windows)
    shape, source = back.outputs[0].shape, image.outputs[0].shape
    if numbers is None or len(shape) != 4 or len(source) != 4 or source != windows.inputs[0].shape:
        return None
    channels, size = source[0], left.dtype.itemsize
    if channels & (channels - 1) or channels < LEAST_CHANNELS or shape[0] % 8:
        return None
    if list(windows.read(RemapAttributes).shape[-3:]) != list(shape[1:]):
        return None
    vector = BOX_ALIGNMENT_BYTES // size
    pitch = -(-shape[3] // vector) * vector
    (high, wide), before, step = numbers["size"], numbers["before"][0], numbers["stride"][0]
    pixels = {
        "rows": high,
        "stride": step,
        "dilation": numbers["dilation"][0],
        "before": before,
        "pitch": pitch,
        "chunk": BOX_ROW_BYTES // size,
    }
    stored = step * wide * channels, source[1], -(-source[2] // step) * pitch
    planes = (shape[0], shape[1], shape[2] * pitch), stored
    rows, depth = matrix_shape(*planes, PixelParams.from_plan(pixels), 0)
    columns = high * wide * channels
    if not window_cuts((1, 1, rows, columns), depth, size, machine, False, stored[0]):
        return None
    return WeightGradient(product, windows, back, image, pixels, pitch, numbers)


def _windows(node: Node) -> dict[str, Any] | None:
    """Size, stride, dilation and padding of the windows that a node computes from an image with
    channels first and then images; None if the node computes something else, or single pixels at a
    stride, of which most of the image would be stored for nothing.
    """
    given, source = node.read(RemapAttributes), node.inputs[0]
    shape, rules = given.shape, given.rules
    if len(shape) != 7 or len(source.shape) != 4 or given.fill or shape[0] != 1:
        return None
    if rules[:2] != [[[[0, source.shape[0]], [1, 1]], 0, 1, "fill"], [[[4, 1]], 0, 1, "fill"]]:
        return None
    steps = steps_of(rules[2:], 2, 5)
    if steps is None or shape[1] != source.shape[0] or shape[2] < steps["stride"][0]:
        return None
    return {"size": list(shape[2:4]), **steps}
