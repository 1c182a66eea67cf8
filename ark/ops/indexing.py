"""Ops that move elements by index arithmetic: concat, split, expand, tile, pad, flip,
strided_slice.

pad, flip, strided_slice and tile lower to the task kind `remap` (ark.tasks.remap), which supports
all types except those of 4 bits. split returns views; concat and expand support all types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.errors import InvalidUsageError, ModelError
from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.attributes import AxisAttributes, RemapAttributes
from ark.ir.values import whole
from ark.lower.ops.indexing import lower_concat, lower_remap
from ark.lower.registry import register
from ark.ops.base import broadcast, check_dims, positive_axis, result, same_dtype
from ark.ops.elementwise import composed, scalar
from ark.tasks.along import lines

Rule = list[Any]
MODES = {"constant": "fill", "edge": "edge", "reflect": "reflect", "wrap": "wrap"}


def same(dimension: int, edge: str = "fill") -> Rule:
    """The rule (see ark.tasks.remap) for a dimension in which the source index equals the result
    index.
    """
    return [[[dimension, 1]], 0, 1, edge]


def remap(
    op: str,
    tensor: Tensor,
    shape: Sequence[int],
    rules: Sequence[Rule],
    fill: float = 0.0,
    output: Any = None,
    name: str = "",
) -> Tensor:
    """Adds a `remap` node, which copies elements by index arithmetic, and returns its result of the
    given shape. rules: one per dimension of the input (ark.tasks.remap). fill: the value of
    elements that the rules place outside of the input.
    """
    if tensor.ir.dtype.packed:
        raise ModelError(f"{op} of {tensor.ir.dtype.name} is not supported; ark.cast it to int8")
    dims = check_dims(op, shape)
    attrs = {"rules": [list(r) for r in rules], "fill": float(fill), "shape": dims}
    return result("remap", [tensor], dims, tensor.ir.dtype, output, attrs, name or op)


def _remap(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The NumPy reference of `remap`, which computes source indices dimension by dimension."""
    source, given = inputs[0], RemapAttributes.from_node(attrs)
    grid = np.indices(given.shape)
    inside = np.ones(given.shape, bool)
    places = []
    for (terms, shift, divide, edge), n in zip(given.rules, source.shape, strict=True):
        at = sum((grid[d] * f for d, f in terms), np.zeros(given.shape, np.int64)) + shift
        if edge == "exact":
            inside &= at % divide == 0
        at = at // divide
        if edge in ("fill", "exact"):
            inside &= (at >= 0) & (at < n)
        if edge == "reflect":
            at = np.abs((at + n - 1) % max(1, 2 * n - 2) - (n - 1)) if n > 1 else at * 0
        places.append(at % n if edge == "wrap" else np.clip(at, 0, n - 1))
    return [np.where(inside, source[tuple(places)], given.fill)]


def pad(
    input: TensorLike,
    pads: Sequence[tuple[int, int]],
    mode: str = "constant",
    value: float = 0.0,
    output: Output = None,
    name: str = "",
) -> Tensor:
    """Adds elements at the start and end of every dimension.

    pads: for each dimension the numbers of elements (before, after), as in numpy.pad; a negative
    number removes elements. mode: constant (the added elements are `value`), edge (they repeat the
    outermost element), reflect (they mirror the input without repeating the outermost element) or
    wrap (they continue periodically). Types of 8 bits or more. Raises InvalidUsageError for another
    mode or number of pairs.

    Examples:
        >>> ark.pad(torch.ones(2), [(1, 2)]).eval()
        tensor([0., 1., 1., 0., 0.])
    """
    tensor = as_tensor(input)
    shape = tensor.ir.shape
    if mode not in MODES:
        raise InvalidUsageError(f"pad: the mode is {mode!r}; expected one of {', '.join(MODES)}")
    if len(pads) != len(shape):
        raise InvalidUsageError(
            f"pad: {len(pads)} pairs were given for {len(shape)} dimensions; give one pair for each"
        )
    pads = [(whole("pad", a), whole("pad", b)) for a, b in pads]
    dims = [n + a + b for n, (a, b) in zip(shape, pads, strict=True)]
    fill = scalar("pad", value, tensor.ir.dtype)
    rules = [[[[d, 1]], -a, 1, MODES[mode]] for d, (a, _) in enumerate(pads)]
    return remap("pad", tensor, dims, rules, fill, output, name)


def flip(input: TensorLike, axis: int | Sequence[int], name: str = "") -> Tensor:
    """Reverses the order of elements along one axis or several; types of 8 bits or more.

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.flip(x, axis=1).eval()
        tensor([[2., 1., 0.],
                [5., 4., 3.]])
    """
    tensor = as_tensor(input)
    shape = tensor.ir.shape
    axes = [axis] if isinstance(axis, int) else list(axis)
    flipped = {positive_axis("flip", a, len(shape)) for a in axes}
    rules = [
        [[[d, -1]], n - 1, 1, "fill"] if d in flipped else same(d) for d, n in enumerate(shape)
    ]
    return remap("flip", tensor, shape, rules, name=name)


def strided_slice(
    input: TensorLike,
    begins: Sequence[int],
    sizes: Sequence[int],
    steps: Sequence[int],
    name: str = "",
) -> Tensor:
    """Takes sizes[d] elements of each dimension d: those at begins[d] + i * steps[d].

    Steps may be negative. Types of 8 bits or more. Raises InvalidUsageError for elements outside of
    the input.

    Examples:
        >>> ark.strided_slice(torch.arange(6.0), begins=[5], sizes=[3], steps=[-2]).eval()
        tensor([5., 3., 1.])
    """
    tensor = as_tensor(input)
    shape = tensor.ir.shape
    if not len(begins) == len(sizes) == len(steps) == len(shape):
        raise InvalidUsageError(f"strided_slice: give {len(shape)} begins, sizes and steps each")
    for b, s, n, size in zip(begins, steps, shape, sizes, strict=True):
        if not (0 <= b < n and 0 <= b + (size - 1) * s < n and size > 0):
            raise InvalidUsageError(
                f"strided_slice: {size} elements from index {b} with step {s} exceed the {n} "
                "elements of the dimension"
            )
    rules = [[[[d, s]], b, 1, "fill"] for d, (b, s) in enumerate(zip(begins, steps, strict=True))]
    return remap("strided_slice", tensor, sizes, rules, name=name)


def tile(input: TensorLike, repeats: Sequence[int], name: str = "") -> Tensor:
    """Repeats the tensor repeats[d] times along each dimension d, as numpy.tile does.

    Raises InvalidUsageError unless each dimension has a number of at least 1.

    Examples:
        >>> ark.tile(torch.tensor([[1.0, 2.0]]), [2, 2]).eval()
        tensor([[1., 2., 1., 2.],
                [1., 2., 1., 2.]])
    """
    tensor = as_tensor(input)
    shape = tensor.ir.shape
    if len(repeats) != len(shape) or any(r < 1 for r in repeats):
        raise InvalidUsageError(
            f"tile: the repeats are {list(repeats)}; give one number of repetitions for each "
            f"dimension of {list(shape)}"
        )
    dims = [n * int(r) for n, r in zip(shape, repeats, strict=True)]
    return remap("tile", tensor, dims, [same(d, "wrap") for d in range(len(dims))], name=name)


def expand(
    input: TensorLike, shape: Sequence[int], output: Output = None, name: str = ""
) -> Tensor:
    """Copies the tensor to the shape to which its own shape and `shape` broadcast; any type.

    Raises ModelError if the two shapes do not broadcast.

    Examples:
        >>> ark.expand(torch.tensor([1.0, 2.0]), [2, 2]).eval()
        tensor([[1., 2.],
                [1., 2.]])
    """
    tensor = as_tensor(input)
    dims = broadcast(tensor.ir.shape, check_dims("expand", shape), "expand")
    attrs = {"expr": ["input", 0], "shape": dims}
    return result("expand", [tensor], dims, tensor.ir.dtype, output, attrs, name)


def concat(
    inputs: Sequence[TensorLike], axis: int, output: Output = None, name: str = ""
) -> Tensor:
    """Concatenates tensors of one type along `axis`.

    For 4-bit types and the last axis, all tensors except the last one must have an even size along
    it, because two elements share a byte. Raises InvalidUsageError without a tensor, ModelError if
    other dimensions differ or such a size is odd.

    Examples:
        >>> x = torch.ones(1, 2)
        >>> ark.concat([x, x], axis=0).eval()
        tensor([[1., 1.],
                [1., 1.]])
    """
    tensors = [as_tensor(t) for t in inputs]
    if not tensors:
        raise InvalidUsageError("concat needs at least one tensor")
    dtype = same_dtype("concat", *tensors)
    first = tensors[0].ir.shape
    axis = positive_axis("concat", axis, len(first))
    for t in tensors:
        if lines(t.ir.shape, axis) != lines(first, axis) or len(t.ir.shape) != len(first):
            raise ModelError(
                f"concat: shapes {list(first)} and {list(t.ir.shape)} differ in other dimensions "
                f"than axis {axis}"
            )
    uneven = [t for t in tensors[:-1] if t.ir.shape[axis] % dtype.per_item]
    if uneven and axis == len(first) - 1:
        raise ModelError(
            f"concat: a row of {uneven[0].ir.shape[axis]} elements of {dtype.name} ends within a "
            "byte, which it would share with the next tensor: ark.cast it to int8"
        )
    dims = list(first)
    dims[axis] = sum(t.ir.shape[axis] for t in tensors)
    return result("concat", tensors, dims, dtype, output, AxisAttributes(axis=axis).to_node(), name)


def _concat(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    return [np.concatenate(inputs, AxisAttributes.from_node(attrs).axis)]


def split(input: TensorLike, sizes: Sequence[int], axis: int, name: str = "") -> list[Tensor]:
    """Divides a tensor of any type along `axis` into parts of the given sizes; returns views.

    Raises InvalidUsageError if the sizes do not add up to the axis's size, or if the axis does not
    exist.

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> [part.shape() for part in ark.split(ark.placeholder([2, 3], data=x), [1, 2], axis=1)]
        [[2, 1], [2, 2]]
    """
    tensor = as_tensor(input)
    shape = tensor.ir.shape
    axis = positive_axis("split", axis, len(shape))
    if sum(sizes) != shape[axis] or any(n < 1 for n in sizes):
        raise InvalidUsageError(f"split: {list(sizes)} do not add up to {shape[axis]}")
    parts, at = [], 0
    for n in sizes:
        whole = [slice(None)] * len(shape)
        whole[axis] = slice(at, at + n)
        parts.append(tensor[tuple(whole)])
        at += n
    return parts


register("remap", _remap, lower_remap, aliasing="none")
register("concat", _concat, lower_concat, aliasing="none")
composed("expand")
