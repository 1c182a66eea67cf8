"""Builds the nodes of a graph whose images have channels as the last dimension: rows of channels,
one for each pixel. Convolutions are added by ark.lower.rewrite.channels_last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from msgspec import structs

from ark.ir.attributes import ReduceAttributes, RemapAttributes
from ark.ir.graph import Graph, Node
from ark.ir.graph_view import GraphView
from ark.ir.values import Tensor
from ark.lower.rewrite.convolutions import Convolution, image_of
from ark.lower.rewrite.image_concats import image_slots, joins_channels
from ark.lower.rewrite.image_layouts import (
    ImageNodes,
    images_with_channels_last,
    moves_channels,
    moves_images,
    moves_pixels,
    per_image,
    pools,
    reduces_places,
    reductions_over_images,
)
from ark.lower.rewrite.views import UNSEEN, whole
from ark.tasks import expression
from ark.tasks.node_expressions import expression_of, is_elementwise


class TurnedImages(ImageNodes):
    """Builds the nodes of a graph whose images have channels last. Such an image is stored as rows
    of channels: a matrix (n * places, channels) with one row for each pixel.
    """

    def __init__(self, graph: Graph, kept: frozenset[int], chosen: Collection[Convolution]) -> None:
        super().__init__(graph)
        worth, fine = images_with_channels_last(graph, chosen, kept)
        self.kept, self.worth, self.wanted = kept, worth, worth | fine
        gathered = {c.source.buffer.id for c in chosen if c.windows is not None or c.depthwise}
        self.slots = image_slots(graph, self.wanted, gathered)
        self.joined: dict[int, Tensor] = {}  # by buffer id of Slot: all rows of the concatenation
        # Ids of tensors that are not views of other tensors. The user may read these tensors by
        # name, so their shapes must not change.
        firsts = {t.buffer.id: t.id for t in reversed(graph.tensors)}
        self.own = frozenset(firsts.values())
        # For each buffer id, the image as rows of channels (one row per pixel), and the placement
        # (phase, processors) of the node that writes it.
        self.turned: dict[int, tuple[Tensor, Any]] = {}
        self.back: set[int] = set()  # ids of transposes back to channels first
        # For each removed transpose, by the id of its result's buffer: the tensor with the same
        # elements that is read instead.
        self.moved: dict[int, Tensor] = {}
        # By the id of a reduction over the places of each image: the reduction of its results over
        # all images. Both become one reduction of rows.
        self.over_images = reductions_over_images(graph, kept)
        self.joined_sums: set[int] = set()  # ids of reductions that are part of an earlier one

    def renamed(self, node: Node) -> Node:
        """A copy of the node that reads the sources of removed transposes instead of their
        results.
        """
        inputs = tuple(self._moved_view(t) for t in node.inputs)
        return node if inputs == node.inputs else dataclasses.replace(node, inputs=inputs)

    def _moved_view(self, tensor: Tensor) -> Tensor:
        source = self.moved.get(tensor.buffer.id)
        if source is None:
            return tensor
        return self.graph.tensor_like(tensor, source.buffer, tensor.name)

    def keep(self, node: Node) -> None:
        """Adds a node unchanged."""
        for tensor in node.outputs:
            self.turned.pop(tensor.buffer.id, None)
        self.nodes.append(node)

    def needed(self, kept: frozenset[int]) -> list[Node]:
        """The nodes of the new graph, without the transposes back to channels first whose results
        are not read.
        """
        before, read = self.graph.view.reads, GraphView(self.nodes).reads

        def dead(node: Node) -> bool:
            buffer = node.outputs[0].buffer
            passed = buffer.id in before and buffer.id not in read
            private = buffer.arena == "activation" and buffer.id not in kept
            return node.id in self.back and passed and private

        return [n for n in self.nodes if not dead(n)]

    def rows(self, tensor: Tensor, node: Node) -> Tensor | None:
        """The image as rows of channels (one row per pixel), if an earlier node in the same phase
        and on the same processors has computed this form; None otherwise.
        """
        rows = self.turned.get(tensor.buffer.id)
        image = image_of(tensor)
        if rows is None or image is None or rows[1] != node.placement:
            return None
        n, channels, places = image
        return rows[0] if rows[0].shape == (n * places, channels) else None

    def takes(self, node: Node) -> bool:
        """Adds the node to the new graph as an op on rows of channels, if the op supports this form
        and its inputs have it. Returns True if the node was added.
        """
        if node.hints or node.after:
            return False
        return (
            node.id in self.joined_sums
            or self.elementwise(node)
            or self.pool(node)
            or self.reduction(node)
            or self.pixels(node)
            or self.exchange(node)
            or self.concat(node)
            or self.to_last(node)
            or self.to_first(node)
        )

    def to_last(self, node: Node) -> bool:
        """Handles a transpose of an image to channels last. It is removed if an earlier node has
        computed these rows of channels. If its result cannot be replaced by these rows, the rows
        are copied to it. Returns True if the transpose was removed.
        """
        rows = self.rows(node.inputs[0], node) if moves_channels(node, to_last=True) else None
        if rows is None:
            return False
        out = node.outputs[0]
        if self._written_once(out) and whole(rows):
            self.moved[out.buffer.id] = rows
        else:
            self.keep(self.node(node, "copy", rows, self.view(out, rows.shape), {}))
        return True

    def to_first(self, node: Node) -> bool:
        """Handles a transpose of an image to channels first, and adds it to the new graph. If all
        ops that read its result can read its source, which has rows of channels, the transpose is
        removed later. Returns True if it was added.
        """
        out, source = node.outputs[0], node.inputs[0] if node.inputs else None
        if source is None or not moves_channels(node, to_last=False):
            return False
        fixed = source.buffer.id not in self.graph.view.writers or self._written_once(source)
        if out.buffer.id not in self.wanted or not fixed:
            return False
        n, channels, places = image_of(out) or (0, 0, 0)
        self.keep(node)
        self.back.add(node.id)
        self.turned[out.buffer.id] = self.view(source, [n * places, channels]), node.placement
        return True

    def _written_once(self, tensor: Tensor) -> bool:
        """True if one node writes the tensor's buffer, and no user or other kernel does."""
        buffer = tensor.buffer
        private = buffer.arena == "activation" and buffer.id not in self.kept
        return private and len(self.graph.view.writers.get(buffer.id, ())) <= 1

    def pool(self, node: Node) -> bool:
        """Adds a pool that reads rows of channels, if possible. Channels become a further dimension
        of the pool, in which a window has one element. Returns True if it was added.
        """
        out = node.outputs[0]
        if not pools(node) or out.buffer.id not in self.wanted or not whole(out):
            return False
        rows = [self.rows(t, node) for t in node.inputs]
        n, channels, *sizes = out.shape
        sources = [
            self.view(r, [1, n, *t.shape[2:], channels])
            for r, t in zip(rows, node.inputs, strict=True)
            if r is not None
        ]
        if len(sources) < len(rows):
            return False
        result = self.result(out, node.name)
        one = {"size": 1, "stride": 1, "dilation": 1, "before": 0}
        more = {**one, "sizes": channels, "shape": channels}
        longer = {key: [*node.attrs[key], n] for key, n in more.items() if key in node.attrs}
        inputs, view = tuple(sources), self.view(result, [1, n, *sizes, channels])
        attrs = {**node.attrs, **longer}
        self.nodes.append(dataclasses.replace(node, inputs=inputs, outputs=(view,), attrs=attrs))
        self.turn_back(node, result, out)
        return True

    def pixels(self, node: Node) -> bool:
        """Adds a copy of pixels by index arithmetic that reads rows of channels, if possible.
        Returns True if it was added.
        """
        out = node.outputs[0] if node.outputs else None
        if out is None or out.buffer.id not in self.wanted or not moves_pixels(node):
            return False
        rows = self.rows(node.inputs[0], node)
        if rows is None or not whole(rows):
            return False
        n, channels, *spatial = node.inputs[0].shape
        given = node.read(RemapAttributes)
        rules = [
            [[[d - 1, f] for d, f in terms], add, divide, edge]
            for terms, add, divide, edge in given.rules[2:]
        ]
        last = len(spatial) + 1
        rules = [[[[0, 1]], 0, 1, "fill"], *rules, [[[last, 1]], 0, 1, "fill"]]
        shape = [n, *out.shape[2:], channels]
        result = self.result(out, node.name)
        attrs = {"rules": rules, "fill": given.fill, "shape": shape}
        image, view = self.view(rows, [n, *spatial, channels]), self.view(result, shape)
        self.nodes.append(dataclasses.replace(node, inputs=(image,), outputs=(view,), attrs=attrs))
        self.turn_back(node, result, out)
        return True

    def exchange(self, node: Node) -> bool:
        """Adds a transpose that exchanges images and channels, if an earlier node has computed rows
        of channels: it is then a transpose of a matrix. Returns True if it was added.
        """
        rows = self.rows(node.inputs[0], node) if moves_images(node) else None
        if rows is None:
            return False
        out = self.view(node.outputs[0], (rows.shape[1], rows.shape[0]))
        self.keep(self.node(node, "transpose", rows, out, {"perm": [1, 0]}))
        return True

    def reduction(self, node: Node) -> bool:
        """Adds a reduction over all pixels of an image that reads rows of channels, if possible.
        Returns True if it was added.
        """
        rows = self.rows(node.inputs[0], node) if reduces_places(node) else None
        if rows is None:
            return False
        n, channels, places = node.inputs[0].shape
        last = self.over_images.get(node.id)
        if last is not None:
            self.joined_sums.add(last.id)
            inputs, outputs = (rows,), (self.view(last.outputs[0], [1, channels]),)
        else:
            inputs = (self.view(rows, [n, places, channels]),)
            outputs = (self.view(node.outputs[0], [n, 1, channels]),)
        axis = 1 if last is None else 0
        attrs = structs.replace(node.read(ReduceAttributes), axis=axis, keepdims=True).to_node()
        self.keep(dataclasses.replace(node, inputs=inputs, outputs=outputs, attrs=attrs))
        return True

    def elementwise(self, node: Node) -> bool:
        """Adds an elementwise op on rows of channels, if possible and if a reader of its result
        needs channels last. Returns True if it was added.
        """
        out = node.outputs[0]
        image = image_of(out)
        if not is_elementwise(node) or image is None or out.buffer.id not in self.wanted:
            return False
        if expression.places(expression_of(node)) or out.dtype.packed:
            return False
        n, channels, places = image
        several = any(per_image(t, out) for t in node.inputs)
        shape = (n, places, channels) if several else (n * places, channels)
        inputs = [self._as_rows(t, node, out, shape) for t in node.inputs]
        given = [t for t in inputs if t is not None]
        if len(given) < len(inputs) or not any(t.shape == shape for t in given):
            return False
        result = self.result(out, f"{node.name}.places")
        view = self.view(result, shape)
        self.nodes.append(dataclasses.replace(node, inputs=tuple(given), outputs=(view,)))
        self.turn_back(node, result, out)
        return True

    def concat(self, node: Node) -> bool:
        """Adds the copies of a concatenation along channels, if the ops that read it support
        channels last. An image that was written directly into the concatenation is not copied.
        Returns True if the copies were added.
        """
        out = node.outputs[0] if node.outputs else None
        if out is None or out.buffer.id not in self.wanted or not joins_channels(node):
            return False
        sources = [self.rows(t, node) for t in node.inputs]
        if out.buffer.id not in self.worth and None in sources:
            return False
        result = self.result(out, node.name)
        at = result.offsets[1]
        for tensor, source in zip(node.inputs, sources, strict=True):
            n, channels, places = image_of(tensor) or (0, 0, 0)
            target = self._slice(result, at, channels, node.name)
            if source is None:
                image = self.view(tensor, [n, channels, places])
                rows = self.view(target, [n, places, channels])
                self.nodes.append(self.node(node, "transpose", image, rows, {"perm": [0, 2, 1]}))
            elif (source.buffer.id, source.offsets) != (target.buffer.id, target.offsets):
                self.nodes.append(self.node(node, "copy", source, target, {}))
            slot = self.slots.get(tensor.buffer.id)
            if slot is not None and (slot.buffer, slot.first) == (self._root(out), at):
                self.turned[tensor.buffer.id] = target, node.placement
            at += channels
        self.turn_back(node, result, out)
        return True

    def _root(self, out: Tensor) -> int:
        """The id of the buffer of the longest concatenation of which an image is a part."""
        return self.slots[out.buffer.id].buffer

    def result(self, out: Tensor, name: str) -> Tensor:
        """The rows of channels to which an op writes an image: a slice of a concatenation's rows if
        the image is part of one.
        """
        n, channels, places = image_of(out) or (0, 0, 0)
        slot = self.slots.get(out.buffer.id)
        if slot is None:
            return self.graph.tensor((n * places, channels), out.dtype, name=name)
        if slot.buffer not in self.joined:
            shape = (n * places, slot.total)
            self.joined[slot.buffer] = self.graph.tensor(shape, out.dtype, name=name)
        return self._slice(self.joined[slot.buffer], slot.first, channels, name)

    def _slice(self, rows: Tensor, first: int, channels: int, name: str) -> Tensor:
        """A slice of each row of channels. first: the number of the first channel of the slice in
        the buffer. channels: the number of channels of the slice.
        """
        return self.graph.tensor(
            (rows.shape[0], channels),
            rows.dtype,
            buffer=rows.buffer,
            extents=rows.extents,
            offsets=(0, first),
            name=name,
        )

    def _as_rows(
        self, tensor: Tensor, node: Node, out: Tensor, shape: tuple[int, ...]
    ) -> Tensor | None:
        """An elementwise op's operand in a form that broadcasts to rows of channels. shape: the
        shape of these rows; the images are a dimension of their own if an operand differs between
        images. Four kinds of operands are supported: an image with channels last, one element for
        each channel, one element for each channel of each image, and a single element. None for any
        other operand.
        """
        if tensor.shape == out.shape:
            rows = self.rows(tensor, node)
            return None if rows is None else self.view(rows, shape)
        named = tensor.buffer.arena not in UNSEEN and tensor.id in self.own
        if named or not whole(tensor):
            return None
        if per_image(tensor, out):
            return self.view(tensor, [shape[0], 1, shape[-1]])
        given = (1,) * (len(out.shape) - len(tensor.shape)) + tensor.shape
        channel = 2 if len(given) > 3 and out.shape[1] == 1 else 1
        if any(m != 1 for d, m in enumerate(given) if d != channel):
            return None
        return self.view(tensor, [*[1] * (len(shape) - 1), given[channel]])

    def turn_back(self, like: Node, rows: Tensor, out: Tensor) -> None:
        """Adds a transpose from rows of channels to channels first, for nodes that read the image
        `out` in this layout.
        """
        n, channels, places = image_of(out) or (0, 0, 0)
        source, target = (
            self.view(rows, [n, places, channels]),
            self.view(out, [n, channels, places]),
        )
        back = self.node(like, "transpose", source, target, {"perm": [0, 2, 1]})
        self.back.add(back.id)
        self.nodes.append(back)
        self.turned[out.buffer.id] = rows, like.placement
