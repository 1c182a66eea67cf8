"""Lowering of reductions over one dimension. If rows are long, several tasks reduce parts of each
row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ark.ir.attributes import ReduceAttributes
from ark.ir.dtype import FLOATS, fp32, int64
from ark.ir.fold import MAX_FOLDED_DIMS, fold
from ark.ir.graph import Node
from ark.ir.values import Tensor as IrTensor
from ark.ir.values import dense_view
from ark.lower.context import Lowering
from ark.lower.tiling import box_coords, box_tile
from ark.machine import Machine
from ark.tasks import expression
from ark.tasks.reduce import SECTOR_BYTES, ReduceParams

REDUCE_COLUMNS = 64  # neighbouring results of a task that does not reduce the last dimension


MIN_SPLIT_ELEMENTS = 16384  # fewest elements of a part


def _insert(tensor: IrTensor, axis: int) -> IrTensor:
    """The tensor with a dimension of size 1 inserted before dimension `axis`."""

    def widen(dims: tuple[int, ...], fill: int) -> tuple[int, ...]:
        return (*dims[:axis], fill, *dims[axis:])

    return dataclasses.replace(
        tensor,
        shape=widen(tensor.shape, 1),
        extents=widen(tensor.extents, 1),
        offsets=widen(tensor.offsets, 0),
        padded=widen(tensor.padded, 1),
    )


def lower_reduce(lowering: Lowering, node: Node) -> None:
    """Emits the tasks of a reduction, each of which reduces whole rows or columns. If there are few
    long rows, tasks first reduce parts of the rows to a temporary, and further tasks reduce the
    temporary to the result.
    """
    source, out = node.inputs[0], node.outputs[0]
    given = node.read(ReduceAttributes)
    axis, function = given.axis, given.function
    if function in _PAIRS:
        _lower_pair(lowering, node)
        return
    count, term = source.shape[axis], given.term
    if len(out.shape) < len(source.shape):
        out = _insert(out, axis)
    outer, inner = math.prod(source.shape[:axis]), math.prod(source.shape[axis + 1 :])
    cut = node.hints is not None and node.hints.cuts
    squares = function == "squares"
    lines = cut or squares or outer * inner > 1
    across = 0 if lines else _across(count, source, lowering.machine)
    if across and dense_view(out, (1, 1)) and not (term and expression.places(term)):
        whole = _views(lowering, node, (1, count // across, across, 1))
        if whole is not None:
            _lower_swept(lowering, node, whole, across)
            return
    share = lowering.share if lowering.machine.cooperative else 1.0
    wide = cut or squares or share < 1.0
    narrow = 0 if wide else _narrow(node, outer, inner, lowering.machine)
    if narrow:
        _emit_reduce(lowering, function, axis, count, node.inputs, out, term, columns=narrow)
        return
    splits = 1 if cut else _splits(outer, count, inner, lowering.machine, share)
    parts = _views(lowering, node, (outer, splits, count // splits, inner)) if splits > 1 else None
    part_term = term if term is None else _counted(term, count // splits, inner)
    if parts is None or dense_view(out, (outer, 1, inner)) is None:
        _emit_reduce(lowering, function, axis, count, node.inputs, out, term)
        return
    dtype = int64 if squares else fp32 if out.dtype in FLOATS else out.dtype
    if inner == 1:
        parts = [lowering.view(t, t.shape[:3]) for t in parts]
        part = lowering.temp((outer, splits, 1), dtype, f"{node.name}.partial")
        out = lowering.view(out, (outer, 1))
    else:
        part = lowering.temp((outer, splits, 1, inner), dtype, f"{node.name}.partial")
        out = lowering.view(out, (outer, 1, inner))
    first = {"mean": "sum", "squares": "moments"}.get(function, function)
    _emit_reduce(lowering, first, 2, count, parts, part, part_term, ".partial")
    shape = (outer, splits) if inner == 1 else (outer, splits, inner)
    _emit_reduce(lowering, function, 1, count, [lowering.view(part, shape)], out)


_PAIRS = {"moments": ("mean_of_moments", "squares"), "sums": ("first_sum", "second_sum")}


def _lower_pair(lowering: Lowering, node: Node) -> None:
    """Emits the tasks of two reductions of the same columns: means and sums of squared differences
    from them, or a sum of elements and one of terms. If columns are divided into parts, both
    results of a part are computed at once.
    """
    source, given = node.inputs[0], node.read(ReduceAttributes)
    axis, term = given.axis, given.term
    shape, count = source.shape, source.shape[axis]
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    narrow = _narrow(node, outer, inner, lowering.machine)
    splits = 1 if narrow else _splits(outer, count, inner, lowering.machine)
    parts = _views(lowering, node, (outer, splits, count // splits, inner)) if splits > 1 else None
    first, second = node.outputs
    if parts is None or any(dense_view(t, (outer, 1, inner)) is None for t in node.outputs):
        functions = ("mean", "squares") if given.function == "moments" else ("sum", "sum")
        _emit_reduce(lowering, functions[0], axis, count, [source], first, columns=narrow)
        _emit_reduce(lowering, functions[1], axis, count, node.inputs, second, term, columns=narrow)
        return
    part = lowering.temp((outer, splits, 1, inner), int64, f"{node.name}.partial")
    counted = term if term is None else _counted(term, count // splits, inner)
    _emit_reduce(lowering, given.function, 2, count, parts, part, counted, ".partial")
    words = lowering.view(part, (outer, splits, inner))
    for function, out in zip(_PAIRS[given.function], node.outputs, strict=True):
        result = lowering.view(out, (outer, 1, inner))
        _emit_reduce(lowering, function, 1, count, [words], result)


def _views(lowering: Lowering, node: Node, parts: Sequence[int]) -> list[IrTensor] | None:
    """The inputs viewed in four dimensions. These are all dimensions before the reduced axis, the
    axis divided into two dimensions (with the sizes `parts`), and all dimensions after the axis.

    An input with size 1 along one of these groups of dimensions has size 1 in the view. None if an
    input cannot be viewed in this way.
    """
    shape, axis = node.inputs[0].shape, node.read(ReduceAttributes).axis
    groups = (shape[:axis], shape[axis : axis + 1], shape[axis + 1 :])
    views = []
    for tensor in node.inputs:
        wide = (1,) * (len(shape) - len(tensor.shape)) + tensor.shape
        own = (wide[:axis], wide[axis : axis + 1], wide[axis + 1 :])
        whole = [a == b for a, b in zip(own, groups, strict=True)]
        if not all(w or math.prod(a) == 1 for w, a in zip(whole, own, strict=True)):
            return None
        flags = (whole[0], whole[1], whole[1], whole[2])
        dims = [n if w else 1 for n, w in zip(parts, flags, strict=True)]
        if dense_view(tensor, dims) is None:
            return None
        views.append(lowering.view(tensor, dims))
    return views


def _across(count: int, source: IrTensor, machine: Machine) -> int:
    """A long row of a 16-bit type may be viewed as a matrix, whose columns are reduced first.
    Returns the number of columns of this matrix, or 0 if the row is not reduced in this way.

    With this view, blocks read neighbouring memory at the same time. On an H100, 64M elements of
    bf16 took 48 us with it, and 80 us if each processor reduced a distant part of the row. The
    result is 0 for few elements, or if the machine runs a task in a single thread.
    """
    if not machine.cooperative or source.dtype.itemsize != 2:
        return 0
    if count < machine.processors * MIN_SPLIT_ELEMENTS:
        return 0
    most = range(machine.processors, machine.processors // 2, -1)
    return next((REDUCE_COLUMNS * p for p in most if count % (REDUCE_COLUMNS * p) == 0), 0)


def _counted(term: expression.Tree, part: int, inner: int) -> expression.Tree:
    """Adapts the expression of a reduction's terms to a view in which the reduced axis is divided
    into two dimensions. Element indices in the expression still count from the first element of the
    whole axis.
    """
    if not expression.places(term):
        return term
    along = -1 if inner == 1 else -2
    whole = ["add", ["mul", expression.index(along - 1), expression.number(part)]]
    return expression.counted(term, [*whole, expression.index(along)])


def _lower_swept(lowering: Lowering, node: Node, inputs: Sequence[IrTensor], across: int) -> None:
    """Emits the reduction of a long row in two steps. The row is viewed as a matrix of `across`
    columns: the first step reduces each column, the second step reduces the columns' results.

    inputs: the node's inputs, with the columns in the second to last of four dimensions.
    """
    given = node.read(ReduceAttributes)
    out, function, count = node.outputs[0], given.function, node.inputs[0].elements
    dtype = fp32 if out.dtype in FLOATS else out.dtype
    part = lowering.temp((1, across), dtype, f"{node.name}.partial")
    first = "sum" if function == "mean" else function
    seen = [lowering.view(t, t.shape[1:3]) for t in inputs]
    _emit_reduce(lowering, first, 0, count, seen, part, given.term, ".partial")
    _emit_reduce(lowering, function, 1, count, [part], lowering.view(out, (1, 1)))


def _splits(outer: int, count: int, inner: int, machine: Machine, share: float = 1.0) -> int:
    """The number of equal parts into which the `count` elements along the axis are divided. It is
    large enough to keep this share of the processors busy, unless parts would have too few
    elements.
    """
    tasks, processors = outer * -(-inner // REDUCE_COLUMNS), math.ceil(machine.processors * share)
    if 2 * tasks > processors:
        return 1
    least = count * min(inner, REDUCE_COLUMNS) // MIN_SPLIT_ELEMENTS
    wanted = min(-(-processors // tasks), least)
    parts = [p for p in range(1, wanted + 1) if count % p == 0]
    # If each row is divided into p parts, there are tasks * p tasks. The busiest processor then
    # computes ceil(tasks * p / processors) parts, each of which is 1 / p of a row. The p with the
    # least work for this processor is chosen.
    return min(parts, key=lambda p: -(-tasks * p // processors) / p, default=1)


def _narrow(node: Node, outer: int, inner: int, machine: Machine) -> int:
    """The columns of a task if each task reduces a few whole columns; 0 if columns are divided into
    parts, or if tasks of REDUCE_COLUMNS columns keep the processors busy.

    A few columns may take as long as the parts of more columns, a second task and the
    synchronisation before it, although short parts of rows are read at a lower rate.
    """
    source, costs = node.inputs[0], machine.costs
    count = source.shape[node.read(ReduceAttributes).axis]
    splits = _splits(outer, count, inner, machine)
    if splits == 1 or inner == 1 or not machine.cooperative:
        return 0
    columns = SECTOR_BYTES // source.dtype.itemsize
    while columns < REDUCE_COLUMNS and outer * -(-inner // columns) > machine.processors:
        columns *= 2
    full = [t.dtype.itemsize for t in node.inputs if t.shape == source.shape]

    def moved(rows: int, columns: int) -> int:
        """The bytes whose reading takes as long as that of so many rows of a few columns."""
        return rows * sum(columns * size + costs.column_row_bytes for size in full)

    more = moved(count, columns) - moved(count // splits, REDUCE_COLUMNS)
    sums = splits * REDUCE_COLUMNS * fp32.itemsize  # bytes that the second task reads
    return columns if more <= (costs.task_us + costs.signal_us) * costs.column_rate + sums else 0


def _emit_reduce(
    lowering: Lowering,
    function: str,
    axis: int,
    count: int,
    inputs: Sequence[IrTensor],
    out: IrTensor,
    term: expression.Tree | None = None,
    suffix: str = "",
    columns: int = 0,
) -> None:
    source = inputs[0]
    rank = len(source.shape)
    place = axis + max(0, MAX_FOLDED_DIMS - rank)
    tile = box_tile(out.shape, lowering.machine, source.shape[axis])
    asked = lowering.tile(fold(out.shape), shown=_beside_axis(lowering.node, axis))
    if asked:
        tile = asked
    elif columns:
        tile = [1, 1, 1, min(columns, out.shape[-1])]
    elif axis != rank - 1 and out.shape[-1] > tile[3]:
        tile = [1, 1, 1, max(tile[3], min(REDUCE_COLUMNS, out.shape[-1]))]
    params = ReduceParams(function, place, count, tuple(tile), None if term is None else list(term))
    lowering.emit("reduce", params, [*inputs, out], box_coords(out.shape, tile), suffix)


def _beside_axis(node: Node | None, axis: int) -> list[int] | None:
    """The tile of the user's hint. If the result does not have the reduced dimension, a size of 1
    is inserted for this dimension. None if the hint has no tile.
    """
    if node is None or node.hints is None or node.hints.tile is None:
        return None
    if node.read(ReduceAttributes).keepdims:
        return None
    left = len(node.inputs[0].shape) - 1 - len(node.hints.tile)
    sizes = [1] * left + list(node.hints.tile)
    return [*sizes[:axis], 1, *sizes[axis:]]
