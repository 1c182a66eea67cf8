"""Finds images that can be written directly into a concatenation of channels. Called by
ark.lower.rewrite.channels_last.

With channels last, the result of a concatenation has one row of channels per pixel, and each
concatenated image is a slice of these rows. The op that computes the image writes this slice, so
that nothing is copied. In DenseNet (Huang et al. 2017), the inputs of a concatenation are
neighbouring slices of a longer concatenation; then it is itself a slice of the longer one.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from ark.ir.attributes import AxisAttributes
from ark.ir.graph import Graph, Node
from ark.lower.rewrite.views import whole
from ark.plan.types import BOX_ALIGNMENT_BYTES


@dataclass(frozen=True)
class Slot:
    """The position of an image's channels in the longest concatenation of which the image is a
    part. buffer: the id of the concatenation's buffer. first: the number of the image's first
    channel in the concatenation. total: the number of all channels of the concatenation.
    """

    buffer: int
    first: int
    total: int


def joins_channels(node: Node) -> bool:
    """True for a concatenation of images along their channels, if rows of channels of each image
    are a multiple of the alignment of box copies.
    """
    if node.type != "concat" or node.read(AxisAttributes).axis != 1:
        return False
    size, images = node.outputs[0].dtype.itemsize, (*node.inputs, *node.outputs)
    return all(
        len(t.shape) > 2
        and whole(t)
        and not t.dtype.packed
        and t.shape[1] * size % BOX_ALIGNMENT_BYTES == 0
        for t in images
    )


def image_slots(graph: Graph, wanted: Set[int], dense: Set[int]) -> dict[int, Slot]:
    """The slots of images (see Slot), by the ids of the images' buffers. An image has a slot if a
    concatenation in `wanted` reads it (ids of buffers that have channels last), unless it is in
    `dense` (ids of buffers whose rows of channels must be contiguous).
    """
    slots: dict[int, Slot] = {}
    writers = graph.view.writers
    for node in reversed(graph.nodes):
        out = node.outputs[0] if node.outputs else None
        if out is None or out.buffer.id not in wanted or not joins_channels(node):
            continue
        slot = slots.get(out.buffer.id) or _joined(node, slots)
        if slot is None:
            slot = Slot(out.buffer.id, 0, out.shape[1])
        slots[out.buffer.id] = slot
        first = slot.first
        for tensor in node.inputs:
            number, producers = tensor.buffer.id, writers.get(tensor.buffer.id, [])
            once = len(producers) < 2 and all(n.placement == node.placement for n in producers)
            if number not in slots and number not in dense and once:
                slots[number] = Slot(slot.buffer, first, slot.total)
            first += tensor.shape[1]
    return slots


def _joined(node: Node, slots: dict[int, Slot]) -> Slot | None:
    """The slot of a concatenation whose inputs are neighbouring slices of one longer concatenation;
    None if they are not.
    """
    begin = slots.get(node.inputs[0].buffer.id)
    if begin is None:
        return None
    first = begin.first
    for tensor in node.inputs:
        if slots.get(tensor.buffer.id) != Slot(begin.buffer, first, begin.total):
            return None
        first += tensor.shape[1]
    return begin
