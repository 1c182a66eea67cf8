"""Converts ONNX operators that reduce, find indices of extremes, or scan along an axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import ark
from ark.interop.onnx.values import Call, Value, axis_of, in_fp32, operator, refuse, shaped
from ark.ir.dtype import FLOATS

MAX_RANKED_ROW_ELEMENTS = 2048  # of integers; each element is compared with all others of its row


def _squares(tensor: Any, axes: list[int]) -> Any:
    return ark.reduce_sum(ark.mul(tensor, tensor), axes)


_REDUCE: dict[str, Callable[[Any, list[int]], Any]] = {
    "ReduceSum": ark.reduce_sum,
    "ReduceMean": ark.reduce_mean,
    "ReduceMax": ark.reduce_max,
    "ReduceMin": ark.reduce_min,
    "ReduceProd": ark.reduce_prod,
    "ReduceL1": lambda t, axes: ark.reduce_sum(ark.abs(t), axes),
    "ReduceL2": lambda t, axes: in_fp32(lambda x: ark.sqrt(_squares(x, axes)), t),
    "ReduceSumSquare": lambda t, axes: in_fp32(lambda x: _squares(x, axes), t),
    "ReduceLogSum": lambda t, axes: in_fp32(lambda x: ark.ln(ark.reduce_sum(x, axes)), t),
    "ReduceLogSumExp": ark.logsumexp,
}


def _reduction(function: Callable[[Any, list[int]], Any]) -> Callable[[Call], Value]:
    def run(call: Call) -> Value:
        shape, tensor = call.shape(0), call.tensor(0)
        axes = call.integers(1) if call.has(1) else call.attribute("axes", [])
        if not axes and call.attribute("noop_with_empty_axes", 0):
            return shaped(function(ark.reshape(tensor, [*(shape or (1,)), 1]), [len(shape)]), shape)
        reduced = sorted({axis_of(a, len(shape)) for a in axes} or range(len(shape)))
        truth = tensor.ir.dtype == ark.bool
        tensor = ark.cast(tensor, ark.uint8) if truth else tensor
        tensor = function(tensor, reduced) if shape else function(tensor, [0])
        tensor = ark.cast(tensor, ark.bool) if truth else tensor
        if call.attribute("keepdims", 1):
            return shaped(tensor, [1 if d in reduced else n for d, n in enumerate(shape)])
        return shaped(tensor, [n for d, n in enumerate(shape) if d not in reduced])

    return run


for _name, _function in _REDUCE.items():
    operator(_name)(_reduction(_function))


def _extreme(function: Callable[..., Any]) -> Callable[[Call], Value]:
    def run(call: Call) -> Value:
        shape = call.shape(0)
        axis = axis_of(call.attribute("axis", 0), len(shape))
        last = bool(call.attribute("select_last_index", 0))
        indices = function(call.tensor(0), axis=axis, dtype=ark.int64, last=last)
        kept = [1] if call.attribute("keepdims", 1) else []
        return shaped(indices, [*shape[:axis], *kept, *shape[axis + 1 :]])

    return run


operator("ArgMax")(_extreme(ark.argmax))
operator("ArgMin")(_extreme(ark.argmin))


def along_last(tensor: Any, axis: int, function: Callable[[Any], Any]) -> Any:
    """Applies `function`, which works along the last dimension, along `axis`: the axis is moved to
    the end before and back afterwards.
    """
    rank = len(tensor.ir.shape)
    if axis == rank - 1:
        return function(tensor)
    order = [d for d in range(rank) if d != axis] + [axis]
    back = [order.index(d) for d in range(rank)]
    return ark.transpose(function(ark.transpose(tensor, order)), back)


@operator("Softmax")
def _softmax(call: Call) -> Value:
    shape = call.shape(0)
    axis = axis_of(call.attribute("axis", -1), len(shape))
    return shaped(along_last(call.tensor(0), axis, ark.softmax), shape)


@operator("LogSoftmax")
def _log_softmax(call: Call) -> Value:
    shape, tensor = call.shape(0), call.tensor(0)
    axis = axis_of(call.attribute("axis", -1), len(shape))
    return shaped(ark.sub(tensor, ark.logsumexp(tensor, [axis])), shape)


@operator("Hardmax")
def _hardmax(call: Call) -> Value:
    shape, tensor = call.shape(0), call.tensor(0)
    axis = axis_of(call.attribute("axis", -1), len(shape))
    place = ark.argmax(tensor, axis=axis, dtype=ark.int64)
    here = ark.equal(ark.iota(list(shape), axis, ark.int64), place)
    return shaped(ark.cast(here, tensor.ir.dtype), shape)


def _running(function: Callable[..., Any]) -> Callable[[Call], Value]:
    def run(call: Call) -> Value:
        shape = call.shape(0)
        axis = axis_of(int(call.array(1).item()), len(shape))
        exclusive = bool(call.attribute("exclusive", 0))
        reverse = bool(call.attribute("reverse", 0))
        return shaped(function(call.tensor(0), axis, exclusive, reverse), shape)

    return run


operator("CumSum")(_running(ark.cumsum))
operator("CumProd")(_running(ark.cumprod))


def _ranked(rows: Any, k: int, largest: bool, unsigned: bool) -> tuple[Any, Any]:
    """Computes TopK of integers by counting. For each element, the elements of its row that precede
    it in sorted order are counted. Their number is the position of the element in the result.
    """
    count, n = rows.ir.shape
    if n > MAX_RANKED_ROW_ELEMENTS:
        raise refuse(f"TopK of {n} integers")
    keys = ark.cast(rows, ark.int64)
    keys = ark.bitwise_xor(keys, -(2**63)) if unsigned else keys
    own, other = ark.reshape(keys, [count, n, 1]), ark.reshape(keys, [count, 1, n])
    ahead = ark.greater(other, own) if largest else ark.less(other, own)
    row, column = (ark.iota([1, n, n], d, ark.int32) for d in (1, 2))
    ties = ark.logical_and(ark.equal(other, own), ark.less(column, row))
    rank = ark.reduce_sum(ark.cast(ark.logical_or(ahead, ties), ark.int32), [2])
    rank = ark.reshape(rank, [count, n])
    places = ark.scatter_elements(
        ark.zeros([count, n], ark.int32), rank, ark.iota([count, n], 1, ark.int32), 1, "set"
    )[:, 0:k]
    places = ark.copy(places)
    return ark.gather_elements(rows, places, 1), places


@operator("TopK")
def _top_k(call: Call) -> list[Value]:
    shape, tensor, k = call.shape(0), call.tensor(0), int(call.array(1).item())
    axis = axis_of(call.attribute("axis", -1), len(shape))
    largest = bool(call.attribute("largest", 1))
    order = [d for d in range(len(shape)) if d != axis] + [axis]
    back = [order.index(d) for d in range(len(shape))]
    if axis != len(shape) - 1:
        tensor = ark.transpose(tensor, order)
    rows = ark.reshape(tensor, [-1, shape[axis]])
    if tensor.ir.dtype in FLOATS:
        values, places = ark.topk(rows, k, largest=largest)
    else:
        values, places = _ranked(rows, k, largest, call.value(0).kind == np.dtype(np.uint64))
    result = [*shape[:axis], k, *shape[axis + 1 :]]
    transposed = []
    for one in (values, ark.cast(places, ark.int64)):
        one = ark.reshape(one, [result[d] for d in order])
        transposed.append(one if axis == len(shape) - 1 else ark.transpose(one, back))
    return [shaped(one, result) for one in transposed]
