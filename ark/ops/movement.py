"""Ops that move elements: transpose, embedding, rope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.errors import InvalidUsageError, ModelError
from ark.frontend.tensor import NullTensor, Tensor, TensorLike, as_tensor
from ark.ir.attributes import TransposeAttributes
from ark.ir.fold import FOLDED, fold
from ark.ir.graph import Node
from ark.ir.values import MAX_DIMS, dense_view, whole
from ark.ir.values import Tensor as IrTensor
from ark.lower.context import Lowering
from ark.lower.merge import bytes_of, merge_transposed, widen
from ark.lower.registry import get, register
from ark.lower.tiling import box_coords, box_tile, swept, transpose_tile
from ark.lower.unpack import convert, unpacked
from ark.ops.base import broadcast, float_dtype, index_dtype, result, same_dtype
from ark.tasks.movement import RopeParams, TransposeParams
from ark.tasks.remap import GatherParams
from ark.tasks.tokens import EmbeddingParams

MANY_ROWS = 4  # a processor: from then on the rows that are looked up are tiles, not a task each


def transpose(
    input: TensorLike, perm: Sequence[int], output: TensorLike | None = NullTensor, name: str = ""
) -> Tensor:
    """Permutes dimensions: result dimension i is input dimension perm[i]; any type.

    InvalidUsageError if perm does not name each dimension once.

    Example:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.transpose(x, [1, 0]).eval()
        tensor([[0., 3.],
                [1., 4.],
                [2., 5.]])
    """
    tensor = as_tensor(input)
    shape = tensor.ir.shape
    if not isinstance(perm, Sequence) or isinstance(perm, str) or len(perm) > MAX_DIMS:
        raise InvalidUsageError(f"transpose: {perm!r} is no list of at most {MAX_DIMS} dimensions")
    order = [whole("transpose", p) for p in perm]
    if sorted(order) != list(range(len(shape))):
        raise InvalidUsageError(
            f"transpose: {order} must name each of the {len(shape)} dimensions of {list(shape)} "
            "once"
        )
    attrs = TransposeAttributes(perm=order).to_node()
    dims = [shape[p] for p in order]
    return result("transpose", [tensor], dims, tensor.ir.dtype, output, attrs, name)


def _lower_transpose(lowering: Lowering, node: Node) -> None:
    source, out, order = node.inputs[0], node.outputs[0], node.read(TransposeAttributes).perm
    if source.dtype.packed and order[-1] == len(order) - 1:
        source, out = bytes_of(source), bytes_of(out)
    elif source.dtype.packed:
        made = unpacked(lowering, out, fill=False)
        _permute(lowering, unpacked(lowering, source), made, order)
        convert(lowering, made, out)
        return
    _permute(lowering, source, out, order)


def _permute(lowering: Lowering, source: IrTensor, out: IrTensor, order: list[int]) -> None:
    hinted = lowering.tile(fold(out.shape))
    if hinted is None:
        source, out, order = merge_transposed(source, out, order)
    pad = max(0, FOLDED - len(order))
    perm = [*range(pad), *(p + pad for p in order)]
    last = len(perm) - 1
    transposed = max(0, perm.index(last) - (last - 3))
    machine, itemsize = lowering.machine, out.dtype.itemsize
    tile = hinted or transpose_tile(out.shape, transposed, machine, itemsize)
    coords = box_coords(out.shape, tile)
    if transposed == 3 and not hinted:
        coords = swept(coords, machine)
    lowering.emit("transpose", TransposeParams(tuple(perm), tuple(tile)), [source, out], coords)


def _transpose(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    return [inputs[0].transpose(TransposeAttributes.from_node(attrs).perm)]


def embedding(
    input: TensorLike, weight: TensorLike, output: TensorLike | None = NullTensor, name: str = ""
) -> Tensor:
    """Rows of `weight` (rows, dim) by int32 or int64 index: (...) to (..., dim).

    An index that is out of range ends the run with a GpuError that names it.

    Example:
        >>> ark.embedding(torch.tensor([2, 0]), torch.arange(6.0).reshape(3, 2)).eval()
        tensor([[4., 5.],
                [0., 1.]])
    """
    ids, table = as_tensor(input), as_tensor(weight)
    index_dtype("embedding", ids)
    dtype = float_dtype("embedding", table)
    if len(table.ir.shape) != 2 or len(ids.ir.shape) >= MAX_DIMS:
        raise ModelError(
            f"embedding: the weight has shape {list(table.ir.shape)} and the indices "
            f"{list(ids.ir.shape)}; expected (rows, dim) and at most {MAX_DIMS - 1} dimensions"
        )
    shape = (*ids.ir.shape, table.ir.shape[1])
    return result("embedding", [ids, table], shape, dtype, output, name=name)


def whole_view(lowering: Lowering, tensor: IrTensor, shape: Sequence[int], fill: bool) -> IrTensor:
    """The tensor in another shape, or a temporary that can be seen so (filled if asked)."""
    if dense_view(tensor, shape) is None:
        made = lowering.temp(tensor.shape, tensor.dtype, f"{tensor.name}.dense")
        if fill:
            move(lowering, tensor, made)
        tensor = made
    return lowering.view(tensor, shape)


def move(lowering: Lowering, source: IrTensor, target: IrTensor) -> None:
    """Adds the tasks of a copy between two tensors of one shape."""
    get("copy").lower(lowering, Node(0, "copy", "copy", (source,), (target,)))


def _lower_embedding(lowering: Lowering, node: Node) -> None:
    ids, table = node.inputs
    out = node.outputs[0]
    rows, width = ids.elements, table.shape[1]
    index = whole_view(lowering, ids, (rows,), fill=True)
    target = whole_view(lowering, out, (rows, width), fill=False)
    asked = lowering.tile((1,) * (4 - len(out.shape)) + out.shape, fixed=(0, 1, 2))
    if asked or rows < MANY_ROWS * lowering.machine.processors:
        _emit_rows(lowering, [index, table, target], asked[3] if asked else 0)
    else:
        _emit_tiles(lowering, index, table, target)
    if target.buffer.id != out.buffer.id:
        move(lowering, lowering.view(target, out.shape), out)


def _emit_rows(lowering: Lowering, operands: list[IrTensor], columns: int) -> None:
    """A task a row, or a part of a row where rows are fewer than processors; columns.

    Of a part, or 0.
    """
    rows, width = operands[2].shape
    parts = max(1, min(width // 64, -(-lowering.machine.processors // rows)))
    columns = columns or -(-width // parts)
    params = EmbeddingParams(rows=1, columns=columns, dynamic=False)
    coords = [(r, c) for r in range(rows) for c in range(0, width, columns)]
    lowering.emit("embedding", params, operands, coords)


def _emit_tiles(lowering: Lowering, index: IrTensor, table: IrTensor, target: IrTensor) -> None:
    """Tiles of many rows, as of any gather."""
    table, target = widen(table, 3), widen(target, 3)
    tile = box_tile(target.shape, lowering.machine, itemsize=target.dtype.itemsize)
    params = GatherParams(axis=1, elements=False, from_end=False, tile=tuple(tile))
    lowering.emit("gather", params, [table, index, target], box_coords(target.shape, tile))


def _embedding(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    return [inputs[1][inputs[0].astype(np.int64)]]


def rope(
    input: TensorLike, other: TensorLike, output: TensorLike | None = NullTensor, name: str = ""
) -> Tensor:
    """Multiplies neighbours (2i, 2i+1) of the last dimension as complex numbers.

    `other` holds (cos, sin) pairs for a rotary embedding (Su et al. 2021); leading dimensions
    broadcast, the last must be equal and even. fp32, fp16, bf16.

    Example:
        >>> ark.rope(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]])).eval()
        tensor([[-2.,  1.]])
    """
    left, right = as_tensor(input), as_tensor(other)
    float_dtype("rope", left)
    dtype = same_dtype("rope", left, right)
    width = left.ir.shape[-1]
    if width % 2 or right.ir.shape[-1] != width:
        raise ModelError(
            f"rope: the last dimensions are {width} and {right.ir.shape[-1]}; they must be equal "
            "and even, because elements rotate in pairs"
        )
    shape = broadcast(left.ir.shape, right.ir.shape, "rope")
    return result("rope", [left, right], shape, dtype, output, name=name)


def _lower_rope(lowering: Lowering, node: Node) -> None:
    out = node.outputs[0]
    tile = lowering.tile(fold(out.shape)) or box_tile(out.shape, lowering.machine)
    tile[3] += tile[3] % 2
    lowering.emit("rope", RopeParams(tuple(tile)), [*node.inputs, out], box_coords(out.shape, tile))


def _rope(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    a, b = np.broadcast_arrays(*inputs)
    out = np.empty(a.shape, np.float64)
    out[..., 0::2] = a[..., 0::2] * b[..., 0::2] - a[..., 1::2] * b[..., 1::2]
    out[..., 1::2] = a[..., 0::2] * b[..., 1::2] + a[..., 1::2] * b[..., 0::2]
    return [out]


register("transpose", _transpose, _lower_transpose, aliasing="none")
register("embedding", _embedding, _lower_embedding, aliasing="none")
register("rope", _rope, _lower_rope, aliasing="exact")
