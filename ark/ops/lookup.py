"""Gather and scatter ops: they read or update elements at indices that are tensors.

They support all types except those of 4 bits. Their task kinds are in ark.tasks.remap and
ark.tasks.scatter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.errors import ModelError
from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.attributes import AxisAttributes, ScatterAttributes
from ark.ir.dtype import int64
from ark.lower.ops.lookup import lower_gather, lower_gather_elements, lower_scatter
from ark.lower.registry import register
from ark.ops.base import check_dims, index_dtype, positive_axis, result, same_dtype
from ark.ops.elementwise import add, cast, mul
from ark.ops.logic import greater_equal, less, logical_or
from ark.ops.selection import iota, where
from ark.ops.views import reshape

OUTSIDE_INDEX = 1 << 40  # larger than any dimension


def gather(
    input: TensorLike, indices: TensorLike, axis: int = 0, output: Output = None, name: str = ""
) -> Tensor:
    """The slices of `input` along `axis` at the given indices, as numpy.take.

    For axis 1, result[a, i..., b] = input[a, indices[i...], b]: the indices' shape replaces the
    axis. indices: int32 or int64; negative ones count from the end. An index out of range ends the
    run with a GpuError that names it.

    Examples:
        >>> ark.gather(torch.arange(6.0).reshape(2, 3), torch.tensor([2, 0]), axis=1).eval()
        tensor([[2., 0.],
                [5., 3.]])
    """
    tensor, ids = as_tensor(input), as_tensor(indices)
    index_dtype("gather", ids)
    _whole("gather", tensor)
    shape = tensor.ir.shape
    axis = positive_axis("gather", axis, len(shape))
    dims = check_dims("gather", (*shape[:axis], *ids.ir.shape, *shape[axis + 1 :]))
    attrs = AxisAttributes(axis=axis).to_node()
    return result("gather", [tensor, ids], dims, tensor.ir.dtype, output, attrs, name)


def _whole(op: str, tensor: Tensor) -> None:
    if tensor.ir.dtype.packed:
        raise ModelError(f"{op} of {tensor.ir.dtype.name} is not supported; ark.cast it to int8")


def _gather(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    return [np.take(inputs[0], inputs[1].astype(np.int64), AxisAttributes.from_node(attrs).axis)]


def gather_elements(
    input: TensorLike, indices: TensorLike, axis: int = 0, output: Output = None, name: str = ""
) -> Tensor:
    """One element per index: for axis 1, result[i, j] = input[i, indices[i, j]], as torch.gather.

    indices: as many dimensions as the input, and in dimensions other than `axis` at most its sizes.
    The result has the indices' shape. Types and errors as for gather.

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.gather_elements(x, torch.tensor([[0], [2]]), axis=1).eval()
        tensor([[0.],
                [5.]])
    """
    tensor, ids = as_tensor(input), as_tensor(indices)
    index_dtype("gather_elements", ids)
    _whole("gather_elements", tensor)
    shape, wanted = tensor.ir.shape, ids.ir.shape
    axis = positive_axis("gather_elements", axis, len(shape))
    if len(shape) != len(wanted) or any(
        n > m for d, (n, m) in enumerate(zip(wanted, shape, strict=True)) if d != axis
    ):
        raise ModelError(
            f"gather_elements: indices of shape {list(wanted)} do not fit a tensor of shape "
            f"{list(shape)}; expected the same number of dimensions, and no size larger than the "
            f"tensor's, except in dimension {axis}"
        )
    attrs = AxisAttributes(axis=axis).to_node()
    return result("gather_elements", [tensor, ids], wanted, tensor.ir.dtype, output, attrs, name)


def _gather_elements(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    source, ids = inputs
    axis = AxisAttributes.from_node(attrs).axis
    box = tuple(slice(None) if d == axis else slice(n) for d, n in enumerate(ids.shape))
    return [np.take_along_axis(source[box], ids.astype(np.int64), axis)]


def _linear(ids: Tensor, shape: Sequence[int]) -> Tensor:
    """Converts index tuples to flat (row-major) indices into a tensor of shape `shape`.

    ids: (..., len(shape)); the last dimension has the elements of a tuple. Returns one int64 index
    for each tuple. If an index of a tuple is out of range, the flat index is out of range, too.
    """
    total: Any = None
    outside: Any = None
    for d, n in enumerate(shape):
        one = [slice(None)] * len(ids.ir.shape)
        one[-1] = slice(d, d + 1)
        at = cast(ids[tuple(one)], int64)
        at = where(less(at, 0), add(at, n), at)
        odd = logical_or(less(at, 0), greater_equal(at, n))
        outside = odd if outside is None else logical_or(outside, odd)
        step = math.prod(shape[d + 1 :])
        at = mul(at, step) if step != 1 else at
        total = at if total is None else add(total, at)
    total = where(outside, OUTSIDE_INDEX, total)
    return reshape(total, [math.prod(ids.ir.shape[:-1])])


def gather_nd(
    input: TensorLike, indices: TensorLike, batch_dims: int = 0, name: str = ""
) -> Tensor:
    """The parts of the input at index tuples, as ONNX's GatherND.

    indices: (..., r), tuples of r indices, one for each of the input's first r dimensions. The
    result is (..., rest), where `rest` are the input's other dimensions. batch_dims: the number of
    leading dimensions that input and indices have in common. Raises ModelError for other shapes.

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.gather_nd(x, torch.tensor([[0, 2], [1, 0]])).eval()
        tensor([2., 3.])
    """
    tensor, ids = as_tensor(input), as_tensor(indices)
    index_dtype("gather_nd", ids)
    _whole("gather_nd", tensor)
    shape, wanted = tensor.ir.shape, ids.ir.shape
    depth = wanted[-1]
    if batch_dims + depth > len(shape) or wanted[:batch_dims] != shape[:batch_dims]:
        raise ModelError(
            f"gather_nd: indices of shape {list(wanted)} and batch_dims={batch_dims} do not fit a "
            f"tensor of shape {list(shape)}"
        )
    batch = math.prod(shape[:batch_dims])
    many = math.prod(wanted[batch_dims:-1])
    inner = shape[batch_dims + depth :]
    places = math.prod(shape[batch_dims : batch_dims + depth])
    at = _linear(ids, shape[batch_dims : batch_dims + depth])
    if batch > 1:
        base = mul(iota([batch, many], 0, int64), places)
        at = reshape(add(reshape(at, [batch, many]), base), [batch * many])
    table = reshape(tensor, [batch * places, math.prod(inner)])
    rows = gather(table, at, 0, name=name or "gather_nd")
    return reshape(rows, [*wanted[:-1], *inner] or [1])


def scatter_elements(
    input: TensorLike,
    indices: TensorLike,
    updates: TensorLike,
    axis: int = 0,
    reduction: str = "set",
    output: Output = None,
    name: str = "",
) -> Tensor:
    """The input with elements updated: for axis 1, result[i, indices[i, j]] = updates[i, j].

    reduction: `set` replaces an element by the update; `add`, `mul`, `maximum` and `minimum`
    combine both. Updates of the same element are applied in order. updates: the indices' shape and
    the input's type; indices of size 1 in a dimension other than `axis` broadcast to the updates.
    output: may be the input itself, which is then updated in place. Raises ModelError for other
    shapes or another reduction.

    Examples:
        >>> x, indices = torch.zeros(1, 3), torch.tensor([[2, 2]])
        >>> ark.scatter_elements(x, indices, torch.tensor([[1.0, 5.0]]), 1, "add").eval()
        tensor([[0., 0., 6.]])
    """
    tensor, ids, new = as_tensor(input), as_tensor(indices), as_tensor(updates)
    index_dtype("scatter_elements", ids)
    _whole("scatter_elements", tensor)
    dtype = same_dtype("scatter_elements", tensor, new)
    shape, wanted = tensor.ir.shape, new.ir.shape
    axis = positive_axis("scatter_elements", axis, len(shape))
    broadcasts = len(ids.ir.shape) == len(wanted) and all(
        n in (1, m) and (n == m or d != axis)
        for d, (n, m) in enumerate(zip(ids.ir.shape, wanted, strict=True))
    )
    if (
        reduction not in ("set", "add", "mul", "maximum", "minimum")
        or not broadcasts
        or len(shape) != len(wanted)
        or any(n > m for d, (n, m) in enumerate(zip(wanted, shape, strict=True)) if d != axis)
    ):
        raise ModelError(
            f"scatter_elements: the tensor has shape {list(shape)}, the indices "
            f"{list(ids.ir.shape)}, the updates {list(wanted)}, and the reduction is "
            f"{reduction!r}; expected updates no larger than the tensor (except along the axis), "
            "indices that broadcast to the updates, and the reduction set, add, mul, maximum or "
            "minimum"
        )
    checked: Any = reduction
    attrs = ScatterAttributes(axis=axis, function=checked).to_node()
    return result("scatter_elements", [tensor, ids, new], shape, dtype, output, attrs, name)


def _scatter(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    source, ids, updates = inputs
    given = ScatterAttributes.from_node(attrs)
    updated, axis = source.copy(), given.axis
    joins = {"add": np.add, "mul": np.multiply, "maximum": np.maximum, "minimum": np.minimum}
    grid: list[np.ndarray] = list(np.indices(updates.shape))
    at = np.broadcast_to(ids, updates.shape).astype(np.int64)
    grid[axis] = np.where(at < 0, at + source.shape[axis], at)
    if given.function == "set":
        for place in np.ndindex(*updates.shape):
            updated[tuple(g[place] for g in grid)] = updates[place]
    else:
        joins[given.function].at(updated, tuple(grid), updates)
    return [updated]


def scatter_nd(
    input: TensorLike,
    indices: TensorLike,
    updates: TensorLike,
    reduction: str = "set",
    name: str = "",
) -> Tensor:
    """The input with the parts at index tuples replaced by updates, as ONNX's ScatterND.

    indices: (..., r), tuples of r indices, one for each of the input's first r dimensions. updates:
    (..., rest), where `rest` are the input's other dimensions. Types and reduction as for
    scatter_elements. Raises ModelError for other shapes.

    Examples:
        >>> ark.scatter_nd(torch.zeros(3), torch.tensor([[1]]), torch.tensor([5.0])).eval()
        tensor([0., 5., 0.])
    """
    tensor, ids, new = as_tensor(input), as_tensor(indices), as_tensor(updates)
    index_dtype("scatter_nd", ids)
    shape, wanted = tensor.ir.shape, ids.ir.shape
    depth = wanted[-1]
    inner = shape[depth:]
    if depth > len(shape) or new.ir.shape not in ((*wanted[:-1], *inner), (1,)):
        raise ModelError(
            f"scatter_nd: updates of shape {list(new.ir.shape)} at indices of shape "
            f"{list(wanted)} do not fit a tensor of shape {list(shape)}; expected updates of shape "
            f"{[*wanted[:-1], *inner]}"
        )
    many = math.prod(wanted[:-1])
    at = reshape(_linear(ids, shape[:depth]), [many, 1])
    table = reshape(tensor, [math.prod(shape[:depth]), math.prod(inner)])
    rows = reshape(new, [many, math.prod(inner)])
    updated = scatter_elements(table, at, rows, 0, reduction, name=name or "scatter_nd")
    return reshape(updated, shape)


register("gather", _gather, lower_gather, aliasing="none")
register("gather_elements", _gather_elements, lower_gather_elements, aliasing="none")
register("scatter_elements", _scatter, lower_scatter, aliasing="first")
