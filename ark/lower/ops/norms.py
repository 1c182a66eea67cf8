"""Lowering of ops that compute each row of a matrix as a whole: norms, softmax and argmax."""

from __future__ import annotations

import math

from ark.errors import PlanError
from ark.ir.attributes import NormAttributes
from ark.ir.fold import fold
from ark.ir.graph import Node
from ark.ir.values import Tensor as IrTensor
from ark.ir.values import dense_view
from ark.lower.context import Lowering
from ark.lower.tiling import MAX_COORDINATE, box_coords
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.tasks.argmax import ArgMaxParams
from ark.tasks.row_norm import RowNormParams

MAX_INTERLEAVED_ITEMSIZE = 2  # bytes of elements whose rows are interleaved
PROCESSORS_PER_IDLE_ONE = 20  # at most one in this number of processors may have no rows
MAX_SHORT_ROW_ELEMENTS = 1024  # several rows with these elements in total take as long as one row


def lower_row_norm(lowering: Lowering, node: Node) -> None:
    """Emits the tasks of a softmax or norm, each of which computes whole rows. In general, each
    processor has one task. Several short rows are one task, because they take as long as one row.
    The rows of a large matrix are assigned to processors in turn, one row at a time, so that all
    processors read neighbouring rows at the same time.
    """
    others, params = list(node.inputs[1:]), node.read(NormAttributes)
    row = node.outputs[0].shape[-1:]
    others = [t if t.shape == row else lowering.view(t, row) for t in others]
    source, out, coords, rows = _row_tiles(lowering, node)
    many = _dealt(source, out, lowering.machine) if node.hints is None else 0
    if many:
        apart = (out.shape[0] // many, many, out.shape[1])
        source, out = lowering.view(source, apart), lowering.view(out, apart)
        coords = [(0, 0, i, 0) for i in range(many)]
        rows = apart[0]
    kind_params = RowNormParams(node.type, rows, params.eps, dealt=bool(many))
    lowering.emit("row_norm", kind_params, [source, *others, out], coords)


def lower_argmax(lowering: Lowering, node: Node) -> None:
    """Emits the tasks of an argmax. Rows are divided among tasks as by lower_row_norm."""
    source, out, coords, rows = _row_tiles(lowering, node)
    lowering.emit("argmax", ArgMaxParams(rows), [source, out], coords)


def _row_tiles(
    lowering: Lowering, node: Node
) -> tuple[IrTensor, IrTensor, list[tuple[int, ...]], int]:
    """The division of an op on rows into tasks: views of its input and result, the coordinates of
    the tasks, and the number of rows of each task.
    """
    source, out, machine = node.inputs[0], node.outputs[0], lowering.machine
    few = 1
    if node.hints is None and machine.cooperative:
        columns = source.shape[-1]
        few = min(2 * machine.warps, max(1, MAX_SHORT_ROW_ELEMENTS // columns))
        if 2 * columns <= machine.lanes:  # lanes of a warp share several rows
            few = min(8 * machine.warps, 2 * MAX_SHORT_ROW_ELEMENTS // columns)
    if node.hints is None and len(out.shape) > 2 and math.prod(out.shape[:-1]) <= MAX_COORDINATE:
        source, out = _flat(lowering, source, out)
    shape = fold(out.shape)
    rows = max(few, -(-shape[0] * shape[1] * shape[2] // machine.processors))
    rows = max(1, min(rows, shape[2]))
    asked = lowering.tile((*shape[:3], 1), fixed=(0, 1), shown=_whole_rows(node))
    if asked:
        rows = asked[2]
    return source, out, box_coords((*shape[:3], 1), (1, 1, rows, 1)), rows


def is_large(out: IrTensor, machine: Machine) -> bool:
    """True if the result is so large that its rows are assigned to processors one by one, in
    turn.
    """
    return out.nbytes >= machine.costs.deal_bytes


def _dealt(source: IrTensor, out: IrTensor, machine: Machine) -> int:
    """The number of processors to which the rows of a large matrix are assigned one by one, in
    turn, so that all processors read neighbouring rows at the same time; 0 if each task has
    consecutive rows.

    The result is 0 if rows are claimed at run time instead, or if too many processors would have no
    rows. It is also 0 for elements of more than MAX_INTERLEAVED_ITEMSIZE bytes: some backends load
    several rows ahead, and then consecutive rows are faster.
    """
    rows = out.shape[0]
    large = is_large(out, machine) and out.dtype.itemsize <= MAX_INTERLEAVED_ITEMSIZE
    if (
        not large
        or machine.has(Capability.CLAIMS)
        or not machine.cooperative
        or len(out.shape) != 2
        or source.shape != out.shape
    ):
        return 0
    if not (source.dense and out.dense):
        return 0
    some = range(
        machine.processors,
        machine.processors - machine.processors // PROCESSORS_PER_IDLE_ONE - 1,
        -1,
    )
    return next((p for p in some if p > 0 and rows % p == 0), 0)


def _flat(lowering: Lowering, source: IrTensor, out: IrTensor) -> tuple[IrTensor, IrTensor]:
    """The input and the output viewed as two-dimensional matrices, if their memory layout allows
    it; otherwise both unchanged.
    """
    rows = out.elements // out.shape[-1]
    flat = [(rows, t.shape[-1]) for t in (source, out)]
    if any(dense_view(t, dims) is None for t, dims in zip((source, out), flat, strict=True)):
        return source, out
    return lowering.view(source, flat[0]), lowering.view(out, flat[1])


def _whole_rows(node: Node) -> list[int] | None:
    """The tile of the user's hint, in which the last size, that of the whole row, is replaced by 1.
    None if the hint has no tile. Raises PlanError if the tile has only a part of a row.
    """
    if node.hints is None or node.hints.tile is None:
        return None
    *others, columns = node.hints.tile
    if columns < node.outputs[0].shape[-1]:
        raise PlanError(
            f"op {node.name!r}: the tile {list(node.hints.tile)} has a part of a row of "
            f"{node.outputs[0].shape[-1]} elements, but a task of {node.type} computes whole rows; "
            f"set the last size to {node.outputs[0].shape[-1]}"
        )
    return [*others, 1]
