"""KV caches: the ops that append rows to a cache or write one slot of it, and checks of caches.

ark.ops.attention reads caches; the fused ops of ark.ops.decoder also append to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.errors import ModelError
from ark.frontend.foreign import is_torch
from ark.frontend.model import Model
from ark.frontend.tensor import Tensor, TensorLike, as_tensor
from ark.ir.attributes import AppendAttributes
from ark.ir.dtype import DataType, RowType, by_name, cache_type
from ark.lower.ops.caches import lower_kv_append, lower_kv_cache_slot
from ark.lower.registry import register
from ark.ops.base import float_dtype, same_dtype
from ark.ops.tokens import by_sequence, check_position
from ark.tasks.cache_rows import LARGEST_CODES, LEAST_MAGNITUDE


def check_rows(op: str, rows: Tensor, columns: int) -> None:
    """Raises ModelError unless `rows` is a floating-point tensor of shape (any, columns)."""
    float_dtype(op, rows)
    if len(rows.ir.shape) != 2 or rows.ir.shape[1] != columns:
        raise ModelError(
            f"{op}: the input has shape {list(rows.ir.shape)}; expected (rows, {columns})"
        )


def cache_dtype(op: str, cache: Tensor) -> DataType:
    """The type of a KV cache: a floating-point type, or the row type of a quantised cache
    (ark.ir.dtype.cache_type). Raises ModelError for other types.
    """
    dtype, width = cache.ir.dtype, cache.ir.shape[-1] if cache.ir.shape else 0
    if not isinstance(dtype, RowType):
        return float_dtype(op, cache)
    named = dtype.codes.name in LARGEST_CODES and width == dtype.columns
    if not named or dtype != cache_type(dtype.codes.name, width, dtype.values):
        raise ModelError(
            f"{op}: the cache is {dtype.name} {list(cache.ir.shape)}; expected floats, or rows of "
            f"{' or '.join(LARGEST_CODES)} with one scale"
        )
    return dtype


def codes_of(dtype: DataType) -> str:
    """The name of the 8-bit type of a quantised cache's elements; "" for a floating-point cache."""
    return dtype.codes.name if isinstance(dtype, RowType) else ""


def as_stored(rows: np.ndarray, codes: str) -> np.ndarray:
    """The values that attention reads from a cache after rows (..., width) were stored in it. They
    differ from the rows if the cache quantises them. codes: the name of the type to which the cache
    quantises; "" for a floating-point cache, which stores rows unchanged.
    """
    if not codes:
        return rows
    numbers, scales = row_codes(rows, codes)
    values: np.ndarray = numbers.astype(rows.dtype) * scales.astype(rows.dtype)
    return values


def row_codes(rows: np.ndarray, codes: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantises rows (..., width) to the type named `codes`. Returns the quantised elements
    (..., width) and the scales (..., 1) in fp32.
    """
    largest, dtype = np.float32(LARGEST_CODES[codes]), by_name(codes).numpy
    rows = rows.astype(np.float32)
    most = np.maximum(np.abs(rows).max(axis=-1, keepdims=True), np.float32(LEAST_MAGNITUDE))
    scaled = rows * (largest / most)
    return (np.rint(scaled) if codes == "int8" else scaled).astype(dtype), most / largest


def check_cache(op: str, cache: Tensor, position: Tensor, rows: int = 1) -> tuple[int, int, int]:
    """Checks a cache and a position, and returns the sizes (heads, context, width) of the part of
    the cache that belongs to one sequence.

    rows: the number of rows that an op appends or that attend. `position` has one element, or one
    for each row if each row belongs to another sequence. Raises ModelError for a cache or position
    of another type or shape.
    """
    cache_dtype(op, cache)
    shape = cache.ir.shape
    if len(shape) != 3 or not cache.ir.dense:
        raise ModelError(
            f"{op}: the cache has shape {list(shape)}; expected (heads, context, width), dense"
        )
    sequences = check_position(op, position, rows)
    if shape[0] % sequences:
        raise ModelError(
            f"{op}: {shape[0]} heads of the cache are not divisible by {sequences} sequences"
        )
    return shape[0] // sequences, shape[1], shape[2]


def kv_append(cache: TensorLike, input: TensorLike, position: TensorLike, name: str = "") -> Tensor:
    """Appends rows to a KV cache in place, the first one at `position`; returns the updated cache.

    cache: (heads, context, width). input: (rows, heads * width), a row per token. position: (1,)
    int32. Rows beyond the context are dropped. In a quantised cache each row of a head has its own
    scale.

    If `position` has the shape (rows,), each row belongs to another sequence. The cache then has
    the heads of all sequences, (rows * heads, context, width).

    Examples:
        >>> cache, position = ark.tensor([1, 3, 2]), torch.tensor([1], dtype=torch.int32)
        >>> ark.kv_append(cache, torch.ones(1, 2), position).eval()
        tensor([[[0., 0.],
                 [1., 1.],
                 [0., 0.]]])
    """
    target, rows, at = as_tensor(cache), as_tensor(input), as_tensor(position)
    heads, _, width = check_cache("kv_append", target, at, rows.ir.shape[0])
    check_rows("kv_append", rows, heads * width)
    model = Model.get_model()
    updated = model.graph.rewrite(target.ir, name)
    attrs = AppendAttributes(codes=codes_of(target.ir.dtype)).to_node()
    model.graph.add("kv_append", [rows.ir, at.ir, target.ir], [updated], attrs, name)
    return Tensor(updated, model)


def _append(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    rows, position, cache = inputs
    if len(position) > 1:
        each = by_sequence(inputs, len(position), ())
        return [np.concatenate([_append(one, attrs)[0] for one in each])]
    heads, context, width = cache.shape
    updated, codes = cache.copy(), AppendAttributes.from_node(attrs).codes
    for r in range(len(rows)):
        if 0 <= int(position[0]) + r < context:
            row = as_stored(rows[r].reshape(heads, width), codes)
            updated[:, int(position[0]) + r] = row
    return [updated]


def kv_cache_slot(
    cache: TensorLike, token: TensorLike, position: TensorLike, name: str = ""
) -> Tensor:
    """Copies `token` to cache[position] in place; returns the copied values.

    cache: (max_seq, *slot), contiguous, a tensor of the model or a torch tensor. token: shape
    `slot`, of the cache's type: fp32, fp16 or bf16. position: (1,) int32, read when the kernel
    runs; nothing is written if it is outside of the cache. Calls for the same cache run in program
    order. Raises ModelError for other shapes or types or a cache that is not contiguous.

    Examples:
        >>> cache, position = ark.tensor([3, 2]), torch.tensor([1], dtype=torch.int32)
        >>> ark.kv_cache_slot(cache, torch.ones(2), position).eval()
        tensor([1., 1.])
    """
    if not isinstance(cache, Tensor) and is_torch(cache) and not cache.is_contiguous():
        raise ModelError("kv_cache_slot: the cache is not contiguous; pass cache.contiguous()")
    target, row, at = as_tensor(cache), as_tensor(token), as_tensor(position)
    float_dtype("kv_cache_slot", target)
    same_dtype("kv_cache_slot", target, row)
    check_position("kv_cache_slot", at)
    shape, slot = target.ir.shape, target.ir.shape[1:]
    if len(shape) < 2 or target.ir.extents[1:] != slot:
        raise ModelError(
            f"kv_cache_slot: the cache has shape {list(shape)} in memory of "
            f"{list(target.ir.extents)}; expected (max_seq, *slot), contiguous"
        )
    if row.ir.shape != slot:
        raise ModelError(
            f"kv_cache_slot: the token has shape {list(row.ir.shape)}; a slot of the cache has "
            f"{list(slot)}"
        )
    model = Model.get_model()
    kept = model.graph.rewrite(target.ir)
    taken = model.new_tensor(slot, row.ir.dtype, name=name)
    model.graph.add("kv_cache_slot", [row.ir, at.ir, target.ir], [kept, taken], {}, name)
    return Tensor(taken, model)


def _slot(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    token, position, cache = inputs
    updated = cache.copy()
    if 0 <= int(position[0]) < len(cache):
        updated[int(position[0])] = token
    return [updated, token]


register("kv_append", _append, lower_kv_append)


register("kv_cache_slot", _slot, lower_kv_cache_slot)
