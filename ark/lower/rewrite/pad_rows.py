"""Stores rows of odd length that products read or write at multiples of 16 bytes.

Box copies and vector accesses need rows that begin at multiples of 16 bytes. For example, rows of
50257 16-bit elements are stored 50264 elements apart. Only activations that are not accessed from
outside of the graph are changed: all tensors on such a buffer get the new distance between rows.

The pass runs after all fusions. align_operands, which runs before them, makes no copies of operands
that `padded_rows` selects. Operands that are not selected any more after fusions are copied here.
Listed in ark.lower.passes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from ark.ir.graph import Graph
from ark.ir.values import Buffer, Tensor
from ark.lower.rewrite.align_operands import lay_out
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.odd_rows import padded_rows, pitch


def pad_rows(graph: Graph, context: Context) -> Graph:
    """A copy of the graph with padded rows."""
    chosen = padded_rows(graph, context)
    moved: dict[int, Buffer] = {}

    def laid(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        return tuple(_laid(t, moved) if t.buffer.id in chosen else t for t in tensors)

    padded = graph.with_nodes(
        dataclasses.replace(n, inputs=laid(n.inputs), outputs=laid(n.outputs), after=laid(n.after))
        for n in graph.nodes
    )
    padded.tensors = list(graph.tensors)
    padded.buffers = [moved.get(b.id, b) for b in graph.buffers]
    return lay_out(padded if chosen else graph, context)


def _laid(tensor: Tensor, moved: dict[int, Buffer]) -> Tensor:
    """The tensor with padded rows. moved: the new buffers, by their id."""
    extents = (*tensor.extents[:-1], pitch(tensor))
    nbytes = tensor.dtype.nbytes(math.prod(extents))
    buffer = moved.setdefault(tensor.buffer.id, dataclasses.replace(tensor.buffer, nbytes=nbytes))
    return dataclasses.replace(tensor, extents=extents, buffer=buffer)
