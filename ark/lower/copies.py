"""Emits tasks that copy whole tensors, tile by tile, within a rank's memory or to a peer's memory.
Called by the lowerings of ops that copy a tensor unchanged, and of ops that communicate.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.ir.values import Tensor as IrTensor
from ark.lower.context import Lowering
from ark.lower.engines import Engine
from ark.lower.merge import bytes_of
from ark.lower.tiling import box_coords, box_tile, swept
from ark.plan.groups import Group
from ark.plan.params import Params
from ark.tasks.combine import CombineParams, moved
from ark.tasks.elementwise import copy_params


def copy_box(lowering: Lowering, source: IrTensor, target: IrTensor, suffix: str) -> Group:
    """Emits tasks that copy a box (a rectangular part of a buffer) to another. The tiles depend on
    the shape only, so that the sending and the receiving rank of a channel compute equal tiles.
    """
    source, target = bytes_of(source), bytes_of(target)
    tile = box_tile(target.shape, lowering.machine, itemsize=target.dtype.itemsize)
    coords = swept(box_coords(target.shape, tile), lowering.machine)
    return lowering.emit("elementwise", copy_params(tile), [source, target], coords, suffix)


def dense(lowering: Lowering, tensor: IrTensor, suffix: str, fill: bool) -> IrTensor:
    """Returns a dense tensor with the shape of `tensor`: `tensor` itself if it is dense, otherwise
    a new temporary tensor. fill: True to emit tasks that copy the elements of `tensor` to the
    temporary one.
    """
    if tensor.dense:
        return tensor
    copy = lowering.temp(tensor.shape, tensor.dtype, f"{tensor.name}{suffix}")
    if fill:
        copy_box(lowering, tensor, copy, suffix)
    return copy


def move(
    lowering: Lowering,
    engine: Engine,
    source: IrTensor,
    target: IrTensor,
    coords: Sequence[tuple[int, int]],
    suffix: str = "",
) -> Group:
    """Emits tasks by which an engine (way of moving bytes to a peer) copies a dense tensor to or
    from a peer's memory. coords: the range of elements of each task.
    """
    flat = [lowering.flat(bytes_of(source)), lowering.flat(bytes_of(target))]
    if engine.proxied or lowering.far(source.buffer.rank, target.buffer.rank):
        return lowering.emit("transfer", Params(), flat, coords, suffix)
    return lowering.emit(engine.kind, CombineParams(moved(source.dtype)), flat, coords, suffix)
