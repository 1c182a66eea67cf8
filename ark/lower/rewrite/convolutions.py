"""Finds the convolutions that are faster if the channels of their images are the last dimension. In
the graph a convolution is a matrix product whose right operand is a matrix of windows, or the image
itself if windows are single pixels. Called by ark.lower.rewrite.channels_last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ark.ir.attributes import MatmulAttributes
from ark.ir.graph import Graph, Node
from ark.ir.graph_view import WritesSoFar
from ark.ir.values import Tensor
from ark.lower.rewrite.few_channels import Padded, padded
from ark.lower.rewrite.fuse_chains import read_once
from ark.lower.rewrite.fuse_windows import window
from ark.lower.rewrite.views import whole
from ark.lower.window_cuts import window_cuts
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.types import BOX_ALIGNMENT_BYTES

# Transposing an image saves time if the product has at least `least_work` multiplications. If box
# copies cannot load the image's rows of pixels, this fraction of `least_work` suffices.
UNALIGNED_SHARE = 1 / 16

# Without matrix units, channels of a grouped convolution are moved to the last dimension if the
# numbers of channels and of outputs of a group are multiples of MIN_GROUP_CHANNELS and at most
# MAX_GROUP_CHANNELS.
MIN_GROUP_CHANNELS, MAX_GROUP_CHANNELS = 4, 32
# With matrix units, the channels are moved if both numbers are multiples of a vector's length and
# at most MAX_UNIT_GROUP_CHANNELS.
MAX_UNIT_GROUP_CHANNELS = 64

# Windows of a 16-bit image with at most MOST_CHANNELS_IN_PLACE channels are read from the image in
# place, as groups on matrix units, if they have at most MOST_TAPS_IN_PLACE elements (taps). Box
# copies of so few bytes take longer: for 16 images of 3x224x224 and 32 outputs, 73 us on an H200,
# besides 33 us for the padded image.
MOST_CHANNELS_IN_PLACE, MOST_TAPS_IN_PLACE = 4, 25

# The parameters of the windows of a convolution with kernel size 1.
PIXEL = {"size": [1], "stride": [1], "dilation": [1], "before": [0]}


@dataclass(frozen=True)
class Convolution:
    """A convolution.

    windows: the node that computes the matrix of windows; None if the image itself is that matrix.
    product: the matmul node. numbers: sizes and strides of the windows. source: the image as (n,
    channels, spatial dimensions...). padded: how the image is padded to more channels, if its
    channels are not a multiple of 16 bytes. few: True if it has few channels and threads read its
    windows from the image with channels first. This applies to 16-bit images on machines with
    mma.sync, and to all images if there are fewer outputs than any tile of matrix units has.
    depthwise: True if each channel is a group of its own, with one output. grouped: True if it has
    several groups of few channels. unaligned: True if it reads the image itself and box copies
    cannot load rows of pixels. Transposing the image then pays off even if no other op reads it.
    first: True if the channels of its result are not a multiple of 16 bytes, so that they stay
    first.
    """

    windows: Node | None
    product: Node
    numbers: dict[str, Any]
    source: Tensor
    padded: Padded | None = None
    few: bool = False
    depthwise: bool = False
    grouped: bool = False
    unaligned: bool = False
    first: bool = False

    @property
    def by_groups(self) -> bool:
        """True for a convolution in groups, or of few channels and outputs, which the matrix units
        of warpgroups do not compute.
        """
        return self.depthwise or self.grouped or self.few


def convolutions(graph: Graph, kept: frozenset[int], machine: Machine) -> dict[int, Convolution]:
    """The convolutions that are faster with channels last, by the id of their matmul node. If box
    copies can load windows, they include convolutions of fp32 for which the user allows tf32, and
    convolutions of few channels.
    """
    private = read_once(graph, kept)
    windows: dict[int, tuple[int, Node]] = {}  # by buffer: index and node
    written = WritesSoFar()
    listed: dict[int, Convolution] = {}
    for place, node in enumerate(graph.nodes):
        if node.type == "remap" and private(node.outputs[0]) and whole(node.outputs[0]):
            windows[node.outputs[0].buffer.id] = place, node
        elif node.type == "matmul" and [len(t.shape) for t in node.inputs] == [4, 4]:
            at, before = windows.get(node.inputs[1].buffer.id, (place, None))
            one = _fits(before, node, machine)
            if one is not None and not written.behind(at, [one.source]):
                listed[node.id] = one
        written.add(place, node)
    return listed


def least_work(machine: Machine) -> float:
    """The smallest number of multiplications of a product for which transposing its image saves
    time.
    """
    return machine.costs.turned_work


def image_of(tensor: Tensor) -> tuple[int, int, int] | None:
    """The sizes (n, channels, places) of an image, where places is the number of its pixels; None
    if the tensor is not a whole image.
    """
    if not whole(tensor) or len(tensor.shape) < 3:
        return None
    shape = list(tensor.shape)
    if len(shape) > 3 and shape[1] == 1:  # one group
        del shape[1]
    return shape[0], shape[1], math.prod(shape[2:])


def _fits(windows: Node | None, product: Node, machine: Machine) -> Convolution | None:
    """The convolution that a product computes, if it is faster with channels last; None otherwise.
    Three conditions apply. Its types must be 16-bit (or fp32 as tf32, where supported). Its
    channels must be a multiple of 16 bytes, or paddable to one. It must be depthwise, or have
    groups of few channels, or have a single group and be large enough (windows of single pixels may
    have any size). windows: the node that computes the product's right operand; None if that is the
    image.
    """
    if product.hints or (windows is not None and windows.placement != product.placement):
        return None
    weight, table, out = *product.inputs, product.outputs[0]
    given = product.read(MatmulAttributes)
    turned = given.transposes == (True, False)
    plain = turned or given.transposes == (False, False)
    types = {t.dtype.name for t in (weight, table, out)}
    boxes = machine.has(Capability.WINDOW_BOXES)
    able = {"bf16", "fp16", "fp32"} if boxes and given.tf32 else {"bf16", "fp16"}
    if not plain or len(types) != 1 or not types <= able:
        return None
    source = table if windows is None else windows.inputs[0]
    if not all(map(whole, (weight, source, table, out))):
        return None
    n, groups, depth, places = table.shape
    rows = out.shape[2]
    if weight.shape != (1, groups, *((depth, rows) if turned else (rows, depth))):
        return None
    if turned and (groups > 1 or windows is not None):
        return None
    numbers = dict(PIXEL, sizes=[places]) if windows is None else window(windows, groups)
    if numbers is None or math.prod(numbers["sizes"]) != places or source.shape[0] != n:
        return None
    channels = depth // math.prod(numbers["size"])
    alignment = BOX_ALIGNMENT_BYTES // table.dtype.itemsize
    if groups > 1:
        depthwise = rows == channels == 1 and groups % alignment == 0
        plane = windows is None or len(numbers["size"]) == 2
        if depthwise and plane:
            return Convolution(windows, product, numbers, source, depthwise=True)
        units = table.dtype.itemsize == 2 and rows % alignment == channels % alignment == 0
        most = (
            MAX_UNIT_GROUP_CHANNELS
            if units and machine.has(Capability.MMA_SYNC)
            else MAX_GROUP_CHANNELS
        )
        few = windows is not None and max(rows, channels) <= most
        even = rows % MIN_GROUP_CHANNELS == 0 and channels % MIN_GROUP_CHANNELS == 0
        sizes = groups * channels, groups * rows
        if not (few and even and plane and all(n % alignment == 0 for n in sizes)):
            return None
        return Convolution(windows, product, numbers, source, grouped=True)
    least = least_work(machine)
    uneven = boxes and places > 1 and places % alignment > 0
    if uneven:
        least *= UNALIGNED_SHARE
    large = n * rows * places * depth >= least
    if windows is not None and not large:
        return None
    if rows % alignment:
        loaded = boxes and windows is not None and channels % alignment == places % alignment == 0
        return Convolution(windows, product, numbers, source, first=True) if loaded else None
    if channels % alignment == 0:
        unaligned = uneven and large and windows is None
        return Convolution(windows, product, numbers, source, unaligned=unaligned)
    shape, size = (1, 1, n * places, rows), table.dtype.itemsize
    if not boxes or windows is None:
        return None
    if not window_cuts(shape, depth, size, machine):
        few = channels <= MAX_GROUP_CHANNELS and len(numbers["size"]) == 2
        return Convolution(windows, product, numbers, source, few=True) if few else None
    taps = math.prod(numbers["size"])
    units = size == 2 and machine.has(Capability.MMA_SYNC) and channels <= MOST_CHANNELS_IN_PLACE
    few = units and len(numbers["size"]) == 2 and taps <= MOST_TAPS_IN_PLACE
    image = padded(source, numbers)
    if image is None and not few:
        return None
    return Convolution(windows, product, numbers, source, image, few=few)
