"""Lowering of transposes, embeddings and rope, which move rows or tiles."""

from __future__ import annotations

from collections.abc import Sequence

from ark.ir.attributes import TransposeAttributes
from ark.ir.fold import MAX_FOLDED_DIMS, fold
from ark.ir.graph import Node
from ark.ir.values import Tensor as IrTensor
from ark.ir.values import dense_view
from ark.lower.context import Lowering
from ark.lower.merge import bytes_of, merge_transposed, widen
from ark.lower.registry import get
from ark.lower.tiling import box_coords, box_tile, swept, transpose_tile
from ark.lower.unpack import convert, unpacked
from ark.tasks.remap import GatherParams
from ark.tasks.rope import RopeParams
from ark.tasks.tokens import EmbeddingParams
from ark.tasks.transpose import TransposeParams


def lower_transpose(lowering: Lowering, node: Node) -> None:
    source, out, order = node.inputs[0], node.outputs[0], node.read(TransposeAttributes).perm
    if source.dtype.packed and order[-1] == len(order) - 1:
        source, out = bytes_of(source), bytes_of(out)
    elif source.dtype.packed:
        codes = unpacked(lowering, out, fill=False)
        _permute(lowering, unpacked(lowering, source), codes, order)
        convert(lowering, codes, out)
        return
    _permute(lowering, source, out, order)


def _permute(lowering: Lowering, source: IrTensor, out: IrTensor, order: list[int]) -> None:
    hinted = lowering.tile(fold(out.shape))
    if hinted is None:
        source, out, order = merge_transposed(source, out, order)
    pad = max(0, MAX_FOLDED_DIMS - len(order))
    perm = [*range(pad), *(p + pad for p in order)]
    last = len(perm) - 1
    transposed = max(0, perm.index(last) - (last - 3))
    machine, itemsize = lowering.machine, out.dtype.itemsize
    tile = hinted or transpose_tile(out.shape, transposed, machine, itemsize)
    coords = box_coords(out.shape, tile)
    if transposed == 3 and not hinted:
        coords = swept(coords, machine)
    lowering.emit("transpose", TransposeParams(tuple(perm), tuple(tile)), [source, out], coords)


def whole_view(lowering: Lowering, tensor: IrTensor, shape: Sequence[int], fill: bool) -> IrTensor:
    """The tensor viewed in another shape. If its memory layout does not allow the view, a dense
    temporary of that shape. fill: True to emit a copy of the elements to the temporary.
    """
    if dense_view(tensor, shape) is None:
        copy = lowering.temp(tensor.shape, tensor.dtype, f"{tensor.name}.dense")
        if fill:
            move(lowering, tensor, copy)
        tensor = copy
    return lowering.view(tensor, shape)


def move(lowering: Lowering, source: IrTensor, target: IrTensor) -> None:
    """Emits a copy between two tensors of the same shape."""
    get("copy").lower(lowering, Node(0, "copy", "copy", (source,), (target,)))


def lower_embedding(lowering: Lowering, node: Node) -> None:
    ids, table = node.inputs
    out = node.outputs[0]
    rows, width = ids.elements, table.shape[1]
    index = whole_view(lowering, ids, (rows,), fill=True)
    target = whole_view(lowering, out, (rows, width), fill=False)
    asked = lowering.tile((1,) * (4 - len(out.shape)) + out.shape, fixed=(0, 1, 2))
    if asked or rows < lowering.machine.processors:
        _emit_rows(lowering, [index, table, target], asked[3] if asked else 0)
    else:
        _emit_tiles(lowering, index, table, target)
    if target.buffer.id != out.buffer.id:
        move(lowering, lowering.view(target, out.shape), out)


def _emit_rows(lowering: Lowering, operands: list[IrTensor], columns: int) -> None:
    """Emits the tasks of a lookup of rows: one task for each row or, if there are fewer rows than
    processors, for each part of a row. columns: the number of columns of a part; 0 to choose it
    here.
    """
    rows, width = operands[2].shape
    parts = max(1, min(width // 64, -(-lowering.machine.processors // rows)))
    columns = columns or -(-width // parts)
    params = EmbeddingParams(rows=1, columns=columns, dynamic=False)
    coords = [(r, c) for r in range(rows) for c in range(0, width, columns)]
    lowering.emit("embedding", params, operands, coords)


def _emit_tiles(lowering: Lowering, index: IrTensor, table: IrTensor, target: IrTensor) -> None:
    """Emits the tasks of a lookup of rows, each of which copies a tile of several rows, with the
    task kind of gathers.
    """
    table, target = widen(table, 3), widen(target, 3)
    tile = box_tile(target.shape, lowering.machine, itemsize=target.dtype.itemsize)
    params = GatherParams(axis=1, elements=False, from_end=False, tile=tuple(tile))
    lowering.emit("gather", params, [table, index, target], box_coords(target.shape, tile))


def lower_rope(lowering: Lowering, node: Node) -> None:
    out = node.outputs[0]
    tile = lowering.tile(fold(out.shape)) or box_tile(out.shape, lowering.machine)
    tile[3] += tile[3] % 2
    lowering.emit("rope", RopeParams(tuple(tile)), [*node.inputs, out], box_coords(out.shape, tile))
