"""Ops that allocate memory or view it: tensor, parameter, placeholder, slices, reshape, identity,
detach, sharding and noop.

They add no tasks, except that reshape copies if a view of the new shape is impossible. A view is a
tensor on the same buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ark.errors import InvalidUsageError, ModelError, UnsupportedError
from ark.frontend.model import Model
from ark.frontend.tensor import Parameter, Tensor, TensorLike, as_tensor
from ark.ir.attributes import ShapeAttributes
from ark.ir.dtype import DataType, byte, fp32
from ark.ir.values import MAX_DIMS, dense_view, whole
from ark.lower.ops.views import lower_reshape

if TYPE_CHECKING:
    import torch
from ark.lower.registry import register
from ark.ops.base import check_dims, positive_axis


def _layout(op: str, rank: int, **given: Any) -> dict[str, tuple[int, ...]]:
    for name, dims in given.items():
        if not isinstance(dims, Sequence) or isinstance(dims, str):
            raise InvalidUsageError(f"{op}: {name} is {dims!r}; it must be a list of sizes")
        if dims and len(dims) != rank:
            raise InvalidUsageError(
                f"{op}: {name} {list(dims)} has {len(dims)} dimensions, the shape has {rank}"
            )
    names = {"strides": "extents", "padded_shape": "padded", "offsets": "offsets"}
    return {names[name]: tuple(int(n) for n in dims) for name, dims in given.items()}


def new_tensor(
    op: str,
    arena: str,
    shape: Any,
    dtype: DataType,
    strides: Any,
    offsets: Any,
    padded_shape: Any,
    name: str,
) -> Tensor:
    """A tensor on a new buffer of `arena`. op: the function that the user called, for errors.
    Raises InvalidUsageError or ModelError for a layout that is not valid.
    """
    dims = check_dims(op, shape)
    if not isinstance(dtype, DataType):
        raise InvalidUsageError(f"{op}: {dtype!r} is not a data type; pass for example ark.fp16")
    layout = _layout(op, len(dims), strides=strides, offsets=offsets, padded_shape=padded_shape)
    model = Model.get_model()
    return Tensor(model.new_tensor(dims, dtype, arena=arena, name=name, **layout), model)


def tensor(
    shape: Sequence[int],
    dtype: DataType = fp32,
    strides: Sequence[int] = (),
    offsets: Sequence[int] = (),
    padded_shape: Sequence[int] = (),
    rank: int = -1,
    name: str = "",
) -> Tensor:
    """A tensor of any type that keeps its contents between iterations; initially zero.

    The host can read and write it between launches. shape: at most 8 dimensions of at least 1.
    strides: the size of the whole buffer in each dimension; by default padded_shape. padded_shape:
    by default the shape. offsets: the index of the tensor's first element in the buffer, per
    dimension. Raises ModelError if the tensor does not fit into the buffer.

    Examples:
        >>> ark.tensor([2, 3], ark.bf16).shape()
        [2, 3]
    """
    if rank not in (-1, Model.get_rank()):
        raise UnsupportedError(
            f"tensor: memory of rank {rank} cannot be viewed from rank {Model.get_rank()}; use "
            "ark.send and ark.recv"
        )
    return new_tensor("tensor", "state", shape, dtype, strides, offsets, padded_shape, name)


def parameter(
    shape: Sequence[int],
    dtype: DataType = fp32,
    strides: Sequence[int] = (),
    offsets: Sequence[int] = (),
    padded_shape: Sequence[int] = (),
    name: str = "",
) -> Parameter:
    """A weight of a model: as ark.tensor, but ark.Module collects it, and matmuls may prefetch it.

    Examples:
        >>> ark.parameter([2, 3]).shape()
        [2, 3]
    """
    memory = new_tensor(
        "parameter", "parameter", shape, dtype, strides, offsets, padded_shape, name
    )
    return Parameter(memory)


def placeholder(
    shape: Sequence[int],
    dtype: DataType = fp32,
    strides: Sequence[int] = (),
    offsets: Sequence[int] = (),
    padded_shape: Sequence[int] = (),
    rank: int = -1,
    data: torch.Tensor | int = 0,
    name: str = "",
) -> Tensor:
    """A tensor on memory that the caller owns.

    data: a torch tensor, a device address, or 0 if the memory is bound later by the argument
    tensor_mappings of Runtime.launch or Runtime.run. Shape, type, strides, offsets and errors as
    for ark.tensor.

    Examples:
        >>> x = ark.placeholder([2], data=torch.ones(2))
        >>> (x + x).eval()
        tensor([2., 2.])
    """
    memory = new_tensor(
        "placeholder", "external", shape, dtype, strides, offsets, padded_shape, name
    )
    memory.bind(data)
    return memory


def refer(base: Tensor, shape: Sequence[int], offsets: Sequence[int], name: str = "") -> Tensor:
    """A view of a box of a tensor. shape: the sizes of the box. offsets: the index of its first
    element in the tensor.
    """
    source = base.ir
    graph = base.model.graph
    view = graph.tensor(
        shape,
        source.dtype,
        buffer=source.buffer,
        extents=source.extents,
        offsets=[o + s for o, s in zip(source.offsets, offsets, strict=True)],
        name=name or source.name,
    )
    graph.inherit(view, source)
    return Tensor(view, base.model)


def as_bytes(base: Tensor, nbytes: int) -> Tensor:
    """A view of the first `nbytes` bytes of a dense tensor, of type `byte`."""
    source, graph = base.ir, base.model.graph
    start = sum(o * s for o, s in zip(source.offsets, source.strides, strict=True))
    view = graph.tensor(
        [nbytes],
        byte,
        buffer=source.buffer,
        extents=[source.buffer.nbytes],
        offsets=[source.dtype.nbytes(start)],
        name=source.name,
    )
    graph.inherit(view, source)
    return Tensor(view, base.model)


def reinterpret(base: Tensor, dtype: DataType, name: str = "") -> Tensor:
    """A view of the tensor's bytes as elements of type `dtype`. The old or new type must be `byte`.

    The last dimension is scaled by the ratio of the element sizes. Raises ModelError if its bytes
    are not a whole number of new elements.
    """
    source, graph = base.ir, base.model.graph
    size, old = dtype.itemsize, source.dtype.itemsize
    rows = [(*source.shape[:-1],), (*source.extents[:-1],), (*source.offsets[:-1],)]
    lasts = [source.shape[-1] * old, source.extents[-1] * old, source.offsets[-1] * old]
    if dtype.packed or source.dtype.packed or any(n % size for n in lasts):
        raise ModelError(
            f"cast: rows of {lasts[0]} bytes that begin {lasts[1]} bytes apart do not consist of "
            f"whole elements of {dtype.name}"
        )
    shape, extents, offsets = ((*r, n // size) for r, n in zip(rows, lasts, strict=True))
    view = graph.tensor(
        shape,
        dtype,
        buffer=source.buffer,
        extents=extents,
        offsets=offsets,
        name=name or source.name,
    )
    graph.inherit(view, source)
    return Tensor(view, base.model)


def reshape(
    input: TensorLike, shape: Sequence[int], allowzero: bool = False, name: str = ""
) -> Tensor:
    """The same elements in another shape; a view if the memory layout allows it, else a copy.

    One size of `shape` may be -1 and is computed from the others. A size of 0 keeps the input's
    size of that dimension, or with allowzero raises ModelError. Any type. Raises ModelError if the
    shapes have different numbers of elements.

    Examples:
        >>> x = ark.iota([2, 3], axis=1, dtype=ark.int32)
        >>> ark.reshape(x, [3, -1]).eval()
        tensor([[0, 1],
                [2, 0],
                [1, 2]], dtype=torch.int32)
    """
    base = as_tensor(input)
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise InvalidUsageError(f"reshape: the shape {shape!r} is not a list of sizes")
    dims = [whole("reshape", n) for n in shape]
    if len(dims) > MAX_DIMS:
        raise InvalidUsageError(f"reshape: {dims} has more than {MAX_DIMS} dimensions")
    old = base.ir.shape
    for d, size in enumerate(dims):
        if size == 0 and not allowzero and d < len(old):
            dims[d] = old[d]
    if dims.count(-1) > 1 or any(n < -1 or n == 0 for n in dims):
        raise ModelError(f"reshape: {list(shape)} does not fit {base.ir.elements} elements")
    if -1 in dims:
        rest = -math.prod(dims)
        dims[dims.index(-1)] = base.ir.elements // rest
    dims = dims or [1]
    if math.prod(dims) != base.ir.elements:
        raise ModelError(
            f"reshape: a tensor of shape {list(old)} has {base.ir.elements} elements and cannot "
            f"be viewed as {list(shape)}"
        )
    graph = base.model.graph
    layout = dense_view(base.ir, dims)
    if layout is None:
        view = base.model.new_tensor(dims, base.ir.dtype, name=name)
        graph.add("reshape", [base.ir], [view], {"shape": tuple(dims)}, name)
        return Tensor(view, base.model)
    extents, offsets = layout
    view = graph.tensor(
        dims,
        base.ir.dtype,
        buffer=base.ir.buffer,
        extents=extents,
        offsets=offsets,
        name=name or base.ir.name,
    )
    graph.inherit(view, base.ir)
    return Tensor(view, base.model)


def identity(input: TensorLike, deps: Sequence[TensorLike] = (), name: str = "") -> Tensor:
    """A view of the whole tensor, whose readers run after all tensors of `deps` are written.

    Any shape and type.

    Examples:
        >>> x = torch.tensor([-1.0, 2.0])
        >>> ark.identity(ark.relu(x)).eval()
        tensor([0., 2.])
    """
    base = as_tensor(input)
    view = refer(base, base.ir.shape, [0] * len(base.ir.shape), name)
    base.model.graph.depend(view.ir, [as_tensor(d).ir for d in deps])
    return view


def detach(input: TensorLike, name: str = "") -> Tensor:
    """A view of the whole tensor through which no gradient flows; any shape and type.

    Examples:
        >>> x = torch.tensor([-1.0, 2.0])
        >>> ark.detach(ark.relu(x)).eval()
        tensor([0., 2.])
    """
    base = as_tensor(input)
    view = refer(base, base.ir.shape, [0] * len(base.ir.shape), name)
    base.model.graph.detached.add(view.ir.id)
    return view


def sharding(input: TensorLike, axis: int, dim_per_shard: int, name: str = "") -> list[Tensor]:
    """Divides a tensor of any type along `axis` into views of size `dim_per_shard`.

    Raises ModelError if `dim_per_shard` does not divide the axis.

    Examples:
        >>> [part.shape() for part in ark.sharding(ark.tensor([4, 6]), axis=1, dim_per_shard=2)]
        [[4, 2], [4, 2], [4, 2]]
    """
    base = as_tensor(input)
    shape = base.ir.shape
    axis = positive_axis("sharding", axis, len(shape))
    if dim_per_shard < 1 or shape[axis] % dim_per_shard:
        raise ModelError(
            f"sharding: dimension {axis} of {list(shape)} cannot be cut into pieces of "
            f"{dim_per_shard}; use a divisor of {shape[axis]}"
        )
    dims = [dim_per_shard if d == axis else n for d, n in enumerate(shape)]
    return [
        refer(base, dims, [at if d == axis else 0 for d in range(len(shape))], name)
        for at in range(0, shape[axis], dim_per_shard)
    ]


def noop(input: TensorLike, name: str = "") -> None:
    """Adds a node that uses the tensor and computes nothing; any shape and type.

    Examples:
        >>> ark.noop(torch.tensor([1.0]))
    """
    base = as_tensor(input)
    base.model.graph.add("noop", [base.ir], [], {}, name, virtual=True)


def _reshape_reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    return [np.reshape(inputs[0], ShapeAttributes.from_node(attrs).shape)]


register("reshape", _reshape_reference, lower_reshape)
