"""Finds the places in memory from which an operand's elements can be read, including the sources
from which they were copied. A transpose, or a copy into another shape, writes elements that already
exist elsewhere in memory. An op that supports strides can read them there, and the copy is not
needed. Called by ark.lower.rewrite.fuse_attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ark.ir.attributes import TransposeAttributes
from ark.ir.graph import Graph, Node
from ark.ir.values import Buffer, Tensor, row_major
from ark.lower.rewrite.views import whole

COPIES = ("transpose", "reshape")

Run = tuple[int, int]  # (steps, elements per step)


@dataclass(frozen=True)
class Place:
    """The positions of a tensor's elements in a buffer. start: the offset of the first element.
    axes: for each axis of the tensor, a list of runs, the outermost run first. A run (count, step)
    has `count` positions that are `step` elements apart; an axis may need several nested runs.
    """

    buffer: Buffer
    start: int
    axes: tuple[tuple[Run, ...], ...]


@dataclass(frozen=True)
class Writes:
    """For each buffer id, the last node that writes the buffer before a given position in program
    order, and the node's index.
    """

    last: Mapping[int, tuple[int, Node]]

    def copy_of(self, buffer: Buffer) -> Node | None:
        """The transpose or copy that wrote the whole buffer. None if the buffer was written in
        another way, or if the copy's source has changed since.
        """
        place, node = self.last.get(buffer.id, (-1, None))
        if node is None or node.type not in COPIES or not whole(node.outputs[0]):
            return None
        source, out = node.inputs[0], node.outputs[0]
        current = self.last.get(source.buffer.id, (-1, None))[0] < place
        plain = not source.dtype.packed and source.dtype == out.dtype and node.hints is None
        return node if current and plain and buffer.arena == "activation" else None


def place_of(tensor: Tensor, axes: Sequence[Sequence[int]]) -> Place:
    """The positions of a tensor's elements. axes: the axes of the result, each as the list of the
    tensor's dimensions that it consists of.
    """
    start = sum(o * s for o, s in zip(tensor.offsets, tensor.strides, strict=True))
    runs = (_merged([(tensor.shape[d], tensor.strides[d]) for d in axis]) for axis in axes)
    return Place(tensor.buffer, start, tuple(runs))


def origins(place: Place, writes: Writes, phase: int) -> Iterator[Place]:
    """All places in memory that hold the same elements: the given one, the source from which it was
    copied, the source of that copy, and so on. phase: only copies of this phase are followed.
    """
    origin: Place | None = place
    while origin is not None:
        yield origin
        copy = writes.copy_of(origin.buffer)
        origin = _behind(origin, copy) if copy is not None and copy.phase == phase else None


def _behind(place: Place, copy: Node) -> Place | None:
    """The positions of the elements in the source from which `copy` wrote them; None if they are
    not regularly strided there.
    """
    source, out = copy.inputs[0], copy.outputs[0]
    if copy.type == "transpose":
        sizes, steps = out.shape, [source.strides[d] for d in copy.read(TransposeAttributes).perm]
    else:
        sizes, steps = source.shape, list(source.strides)
    dense = row_major(sizes)
    digits = [place.start // d % n for d, n in zip(dense, sizes, strict=True)]
    reach = list(digits)
    axes = []
    for runs in place.axes:
        composed: list[Run] = []
        for run in runs:
            parts = _split(run, sizes, dense)
            if parts is None:
                return None
            for dim, count, step in parts:
                reach[dim] += (count - 1) * step
                composed.append((count, step * steps[dim]))
        axes.append(_merged(composed))
    if any(r >= n for r, n in zip(reach, sizes, strict=True)):
        return None  # indices would carry into the next dimension, so strides are not regular
    start = sum(o * s for o, s in zip(source.offsets, source.strides, strict=True))
    start += sum(digit * step for digit, step in zip(digits, steps, strict=True))
    return Place(source.buffer, start, tuple(axes))


def _split(
    run: Run, sizes: Sequence[int], dense: Sequence[int]
) -> list[tuple[int, int, int]] | None:
    """Divides a run of strided elements of a dense array into one run for each dimension of the
    array that it crosses: (dimension, count, step), the outermost first. None if it cannot be
    divided. sizes, dense: the sizes and strides of the array.
    """
    count, stride = run
    parts: list[tuple[int, int, int]] = []
    while count > 1:
        dim = next((d for d, n in enumerate(sizes) if dense[d] <= stride < dense[d] * n), None)
        if dim is None or stride % dense[dim]:
            return None
        step = stride // dense[dim]
        if (count - 1) * step < sizes[dim]:
            parts.append((dim, count, step))
            break
        within = sizes[dim] // step
        if sizes[dim] % step or count % within:
            return None
        parts.append((dim, within, step))
        count, stride = count // within, dense[dim] * sizes[dim]
    return parts[::-1]


def _merged(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs of strided elements, with neighbouring runs merged if one continues the other. Empty
    for a single element.
    """
    result: list[Run] = []
    for count, stride in runs:
        if count == 1:
            continue
        if result and result[-1][1] == count * stride:
            result[-1] = (result[-1][0] * count, stride)
        else:
            result.append((count, stride))
    return tuple(result)


@dataclass(frozen=True)
class Rows:
    """A three-dimensional view (batch, rows, columns) of a buffer: its shape, the sizes of the
    buffer in these dimensions (extents), and the offsets in it.
    """

    shape: tuple[int, int, int]
    extents: tuple[int, int, int]
    offsets: tuple[int, int, int]

    def tensor(self, graph: Graph, like: Tensor, place: Place) -> Tensor:
        """The view as a new tensor on the buffer of `place`, with the type and name of `like`."""
        return graph.tensor(
            self.shape,
            like.dtype,
            buffer=place.buffer,
            extents=self.extents,
            offsets=self.offsets,
            name=like.name,
        )


def rows_of(place: Place, heads: int, items: int) -> Rows | None:
    """A view (batch, rows, columns of all heads) of elements whose axes are batch and heads, rows,
    and columns of a head. None if heads are not adjacent in memory, or rows are not regularly
    strided. items: elements of the buffer.
    """
    lead, rows, columns = place.axes
    if len(rows) != 1 or len(columns) != 1 or columns[0][1] != 1:
        return None
    (length, step), width = rows[0], columns[0][0]
    if heads > 1:
        if not lead or lead[-1] != (heads, width):
            return None
        lead = lead[:-1]
    if len(lead) > 1:
        return None
    batch, apart = lead[0] if lead else (1, items // step * step)
    if apart % step or items % apart or not apart:
        return None
    offsets = (place.start // apart, place.start % apart // step, place.start % step)
    shape, extents = (batch, length, heads * width), (items // apart, apart // step, step)
    inside = all(o + n <= e for o, n, e in zip(offsets, shape, extents, strict=True))
    return Rows(shape, extents, offsets) if inside else None


def heads_of(place: Place) -> int:
    """The number of heads whose columns are adjacent in memory; 1 if they are not adjacent."""
    lead, _, columns = place.axes
    side = bool(lead) and len(columns) == 1 and lead[-1][1] == columns[0][0]
    return lead[-1][0] if side else 1


def items_of(tensor: Tensor) -> int:
    """The number of elements of the tensor's type that its buffer holds."""
    return tensor.buffer.nbytes // tensor.dtype.itemsize if math.prod(tensor.shape) else 0
