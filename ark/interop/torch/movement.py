"""ATen operators that move elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ark
from ark.interop.torch.values import Call, Value, axis_of, cast, operator, refuse
from ark.ops.indexing import remap, same

_VIEWS = (
    "view",
    "_unsafe_view",
    "reshape",
    "_reshape_copy",
    "flatten",
    "squeeze",
    "squeeze_copy",
    "unsqueeze",
    "unsqueeze_copy",
    "view_copy",
)


@operator(
    *(f"{name}.default" for name in _VIEWS),
    "squeeze.dim",
    "squeeze.dims",
    "flatten.using_ints",
)
def _view(call: Call, x: Value, *_: Any, **__: Any) -> Any:
    """Converts operators that change only the shape. Returns the tensor itself, which the caller
    then converts to the shape of the result.
    """
    return x.tensor


@operator("permute.default", "permute_copy.default")
def _permute(call: Call, x: Value, order: Sequence[int]) -> Any:
    if not x.shape:
        return x.tensor
    return _turned(x, [axis_of(d, len(x.shape)) for d in order])


def _turned(x: Value, order: Sequence[int]) -> Any:
    """Converts a transposition. If only dimensions of one element change places, it needs no op and
    is a view.
    """
    moved = [d for d in order if x.shape[d] > 1]
    if moved == sorted(moved):
        return ark.reshape(x.tensor, [x.shape[d] for d in order])
    return ark.transpose(x.tensor, list(order))


@operator("t.default")
def _t(call: Call, x: Value) -> Any:
    return _turned(x, [1, 0]) if len(x.shape) == 2 else x.tensor


@operator("transpose.int")
def _transpose(call: Call, x: Value, a: int, b: int) -> Any:
    order = list(range(len(x.shape)))
    if not order:
        return x.tensor
    order[a], order[b] = order[b], order[a]
    return _turned(x, order)


@operator("expand.default", "expand_copy.default")
def _expand(call: Call, x: Value, sizes: Sequence[int], implicit: bool = False) -> Any:
    if math.prod(call.shape) == math.prod(x.shape):  # no elements are added
        return x.tensor
    return ark.expand(x.tensor, list(call.shape) or [1])


@operator("slice.Tensor", "slice_copy.Tensor")
def _slice(
    call: Call,
    x: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    axis = axis_of(dim, len(x.shape))
    begin, _, stride = slice(start, end, step).indices(x.shape[axis])
    if stride != 1:
        begins = [begin if d == axis else 0 for d in range(len(x.shape))]
        steps = [stride if d == axis else 1 for d in range(len(x.shape))]
        return ark.strided_slice(x.tensor, begins, call.shape, steps)
    return part(x.tensor, axis, begin, call.shape[axis])


def part(tensor: ark.Tensor, axis: int, begin: int, count: int) -> ark.Tensor:
    whole = [slice(None)] * len(tensor.ir.shape)
    whole[axis] = slice(begin, begin + count)
    return tensor[tuple(whole)]


@operator("select.int", "select_copy.int")
def _select(call: Call, x: Value, dim: int, index: int) -> Any:
    axis = axis_of(dim, len(x.shape))
    return part(x.tensor, axis, index % x.shape[axis], 1)


@operator("narrow.default")
def _narrow(call: Call, x: Value, dim: int, start: int, length: int) -> Any:
    return part(x.tensor, axis_of(dim, len(x.shape)), start, length)


@operator("split_with_sizes.default", "split.Tensor", "split_with_sizes_copy.default")
def _split(call: Call, x: Value, sizes: Any, dim: int = 0) -> list[Any]:
    axis, at = axis_of(dim, len(x.shape)), 0
    length = x.shape[axis]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - begin) for begin in range(0, length, max(sizes, 1))]
    pieces = []
    for place, size in enumerate(sizes):  # a part that is not used has no expected shape
        pieces.append(part(x.tensor, axis, at, size) if call.wants(place) else None)
        at += size
    return pieces


@operator("unbind.int", "unbind_copy.int")
def _unbind(call: Call, x: Value, dim: int = 0) -> list[Any]:
    axis = axis_of(dim, len(x.shape))
    return [part(x.tensor, axis, at, 1) for at in range(x.shape[axis])]


@operator("cat.default")
def _cat(call: Call, values: Sequence[Value], dim: int = 0) -> Any:
    return ark.concat([cast(v, call.dtype) for v in values], axis_of(dim, len(call.shape)))


@operator("stack.default")
def _stack(call: Call, values: Sequence[Value], dim: int = 0) -> Any:
    axis = axis_of(dim, len(call.shape))
    shape = list(values[0].shape)
    wide = [ark.reshape(cast(v, call.dtype), [*shape[:axis], 1, *shape[axis:]]) for v in values]
    return ark.concat(wide, axis)


def _pairs(pads: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """The paddings of an operator as pairs (before, after), the first dimension first. pads:
    torch's list, in which the last dimension comes first.
    """
    pairs = [(0, 0)] * rank
    for place in range(len(pads) // 2):
        pairs[rank - 1 - place] = (pads[2 * place], pads[2 * place + 1])
    return pairs


@operator("constant_pad_nd.default")
def _constant_pad(call: Call, x: Value, pads: Sequence[int], value: float = 0) -> Any:
    if not any(pads):
        return x.tensor
    return ark.pad(x.tensor, _pairs(pads, len(x.shape)), value=float(value))


for _count in (1, 2, 3):

    @operator(f"reflection_pad{_count}d.default")
    def _reflect(call: Call, x: Value, pads: Sequence[int]) -> Any:
        return ark.pad(x.tensor, _pairs(pads, len(x.shape)), "reflect")

    @operator(f"replication_pad{_count}d.default")
    def _replicate(call: Call, x: Value, pads: Sequence[int]) -> Any:
        return ark.pad(x.tensor, _pairs(pads, len(x.shape)), "edge")


@operator("flip.default")
def _flip(call: Call, x: Value, dims: Sequence[int]) -> Any:
    return ark.flip(x.tensor, [axis_of(d, len(x.shape)) for d in dims])


@operator("roll.default")
def _roll(call: Call, x: Value, shifts: Any, dims: Any = ()) -> Any:
    listed = [shifts] if isinstance(shifts, int) else list(shifts)
    axes = [dims] if isinstance(dims, int) else list(dims)
    tensor = x.tensor if axes else ark.reshape(x.tensor, [math.prod(x.shape)])
    shape, moved = tensor.ir.shape, [0] * len(tensor.ir.shape)
    for shift, dim in zip(listed, axes or [0], strict=True):
        axis = axis_of(dim, len(shape))
        moved[axis] = (moved[axis] - shift) % shape[axis]
    turned = [d for d, at in enumerate(moved) if at]
    if len(turned) > 1:
        rules = [[[[d, 1]], at, 1, "wrap"] for d, at in enumerate(moved)]
        return remap("roll", tensor, shape, rules)
    for d in turned:
        parts = [part(tensor, d, moved[d], shape[d] - moved[d]), part(tensor, d, 0, moved[d])]
        tensor = ark.concat(parts, d)
    return tensor


@operator("unfold.default")
def _unfold(call: Call, x: Value, dimension: int, size: int, step: int) -> Any:
    """Converts unfold: overlapping windows along a dimension. The elements of a window form the
    last dimension of the result.
    """
    if not x.shape:
        raise refuse("unfold of a tensor without dimensions")
    axis, rank = axis_of(dimension, len(x.shape)), len(x.shape)
    rules = [same(d) for d in range(rank)]
    rules[axis] = [[[axis, step], [rank, 1]], 0, 1, "fill"]
    shape = [(n - size) // step + 1 if d == axis else n for d, n in enumerate(x.shape)]
    return remap("unfold", x.tensor, [*shape, size], rules)


@operator("repeat.default")
def _repeat(call: Call, x: Value, repeats: Sequence[int]) -> Any:
    lead = [1] * (len(repeats) - len(x.shape))
    return ark.tile(ark.reshape(x.tensor, [*lead, *x.shape] or [1]), list(repeats) or [1])


@operator("tril.default")
def _tril(call: Call, x: Value, diagonal: int = 0) -> Any:
    return ark.tril(x.tensor, diagonal)


@operator("triu.default")
def _triu(call: Call, x: Value, diagonal: int = 0) -> Any:
    return ark.triu(x.tensor, diagonal)
