"""ATen operators that read or replace elements by indices. The indices are tensors, or constants of
the graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ark
from ark.interop.torch.movement import part
from ark.interop.torch.values import Call, Value, axis_of, cast, operator, refuse


@operator("embedding.default")
def _embedding(call: Call, weight: Value, ids: Value, *_: Any, **__: Any) -> Any:
    return ark.embedding(ids.tensor, weight.tensor)


@operator("index_select.default")
def _index_select(call: Call, x: Value, dim: int, ids: Value) -> Any:
    return ark.gather(x.tensor, ids.tensor, axis_of(dim, len(x.shape)))


@operator("gather.default")
def _gather(call: Call, x: Value, dim: int, ids: Value, **_: Any) -> Any:
    return ark.gather_elements(x.tensor, ids.tensor, axis_of(dim, len(x.shape)))


@operator("index.Tensor", "_unsafe_index.Tensor")
def _index(call: Call, x: Value, indices: Sequence[Value | None]) -> Any:
    table, at, axis = _as_one_index(x, indices)
    return ark.gather(table, at, axis)


def _as_one_index(x: Value, indices: Sequence[Value | None]) -> tuple[ark.Tensor, ark.Tensor, int]:
    """Combines the indices of neighbouring dimensions to one index. Returns the tensor with these
    dimensions joined, the index into the joined dimension, and the number of that dimension. An
    index of a single dimension may still count from the end.
    """
    places = [d for d, i in enumerate(indices) if i is not None]
    indexed = [i for i in indices if i is not None]
    if any(i.dtype.is_floating_point or i.tensor.ir.dtype == ark.bool for i in indexed):
        raise refuse("an index of bool")
    first, last = places[0], places[-1]
    if places != list(range(first, last + 1)):
        raise refuse("an index of dimensions that are not adjacent")
    total: Any = None
    for place, value in zip(places, indexed, strict=True):
        n = x.shape[place]
        at = cast(value, ark.int64)
        if len(places) > 1:
            at = ark.where(ark.less(at, 0), ark.add(at, n), at)
        total = at if total is None else ark.add(ark.mul(total, n), at)
    many = math.prod(x.shape[first : last + 1])
    table = ark.reshape(x.tensor, [*x.shape[:first], many, *x.shape[last + 1 :]])
    return table, total, first


@operator("index_put.default", "_unsafe_index_put.default")
def _index_put(
    call: Call,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
) -> Any:
    """Converts index_put, into which torch decomposes index_add and the gradient of an embedding.
    With `accumulate`, the values are added to the elements in the order of their rows.
    """
    table, at, axis = _as_one_index(x, indices)
    before, after = table.ir.shape[:axis], table.ir.shape[axis + 1 :]
    wide = [*before, *at.ir.shape, *after]
    padded = [*[1] * (len(wide) - len(values.shape)), *values.shape]
    new = ark.reshape(cast(values, call.dtype), padded)
    new = new if padded == wide else ark.expand(new, wide)
    many = math.prod(at.ir.shape)
    new = ark.reshape(new, [*before, many, *after])
    at = ark.reshape(at, [*[1] * len(before), many, *[1] * len(after)])
    return ark.scatter_elements(table, at, new, axis, "add" if accumulate else "set")


def _scattered(reduction: str) -> Any:
    def run(call: Call, x: Value, dim: int, ids: Value, source: Any) -> Any:
        shape = list(ids.shape) or [1]
        if isinstance(source, Value):
            new = source.tensor
            for d, n in enumerate(shape):
                new = part(new, d, 0, n) if new.ir.shape[d] != n else new
        else:
            new = ark.constant(source, shape, call.dtype)
        axis = axis_of(dim, len(x.shape))
        return ark.scatter_elements(x.tensor, ids.tensor, new, axis, reduction)

    return run


operator("scatter.src", "scatter.value")(_scattered("set"))
operator("scatter_add.default")(_scattered("add"))


@operator("select_scatter.default")
def _select_scatter(call: Call, x: Value, source: Value, dim: int, index: int) -> Any:
    axis = axis_of(dim, len(x.shape))
    at = index % x.shape[axis]
    wide = [1 if d == axis else n for d, n in enumerate(x.shape)]
    return _replaced(x.tensor, ark.reshape(source.tensor, wide), axis, at)


@operator("slice_scatter.default")
def _slice_scatter(
    call: Call,
    x: Value,
    source: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    axis = axis_of(dim, len(x.shape))
    begin, _, stride = slice(start, end, step).indices(x.shape[axis])
    if stride != 1:
        line = [n if d == axis else 1 for d, n in enumerate(source.shape)]
        at = ark.add(ark.mul(ark.iota(line, axis, ark.int64), stride), begin)
        return ark.scatter_elements(x.tensor, at, source.tensor, axis)
    return _replaced(x.tensor, source.tensor, axis, begin)


def _replaced(tensor: ark.Tensor, new: ark.Tensor, axis: int, begin: int) -> ark.Tensor:
    """The tensor, with the part of an axis that begins at `begin` replaced by `new`."""
    n, count = tensor.ir.shape[axis], new.ir.shape[axis]
    parts = [new]
    if begin:
        parts.insert(0, part(tensor, axis, 0, begin))
    if begin + count < n:
        parts.append(part(tensor, axis, begin + count, n - begin - count))
    return ark.concat(parts, axis) if len(parts) > 1 else ark.copy(new)
