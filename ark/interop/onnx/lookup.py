"""Operators that read or write elements by index."""

from __future__ import annotations

import math

import numpy as np

import ark
from ark.interop.onnx.values import Call, Value, axis_of, data_type, operator, shaped

_REDUCTIONS = {"none": "set", "add": "add", "mul": "mul", "max": "maximum", "min": "minimum"}


@operator("Gather")
def _gather(call: Call) -> Value:
    shape, wanted = call.shape(0), call.shape(1)
    axis = axis_of(call.attribute("axis", 0), len(shape))
    result = (*shape[:axis], *wanted, *shape[axis + 1 :])
    return shaped(ark.gather(call.tensor(0), call.tensor(1), axis), result)


@operator("GatherElements")
def _gather_elements(call: Call) -> Value:
    axis = axis_of(call.attribute("axis", 0), len(call.shape(0)))
    return shaped(ark.gather_elements(call.tensor(0), call.tensor(1), axis), call.shape(1))


@operator("GatherND")
def _gather_nd(call: Call) -> Value:
    shape, wanted, batch = call.shape(0), call.shape(1), call.attribute("batch_dims", 0)
    result = (*wanted[:-1], *shape[batch + wanted[-1] :])
    return shaped(ark.gather_nd(call.tensor(0), call.tensor(1), batch), result)


@operator("ScatterElements")
def _scatter_elements(call: Call) -> Value:
    axis = axis_of(call.attribute("axis", 0), len(call.shape(0)))
    how = _REDUCTIONS[call.attribute("reduction", "none")]
    x, places, new = (call.tensor(i) for i in range(3))
    return shaped(ark.scatter_elements(x, places, new, axis, how), call.shape(0))


@operator("ScatterND")
def _scatter_nd(call: Call) -> Value:
    how = _REDUCTIONS[call.attribute("reduction", "none")]
    x, places, new = (call.tensor(i) for i in range(3))
    return shaped(ark.scatter_nd(x, places, new, how), call.shape(0))


@operator("OneHot")
def _one_hot(call: Call) -> Value:
    depth = int(call.array(1).item())
    off, on = call.array(2).tolist()
    shape = list(call.shape(0))
    axis = axis_of(call.attribute("axis", -1), len(shape) + 1)
    ids = call.tensor(0)
    if ids.ir.dtype in (ark.fp32, ark.fp16, ark.bf16):
        ids = ark.cast(ids, ark.int64)
    tensor = ark.one_hot(ids, depth, data_type(call.array(2).dtype), axis, off, on)
    return shaped(tensor, [*shape[:axis], depth, *shape[axis:]])


@operator("ReverseSequence")
def _reverse_sequence(call: Call) -> Value:
    """Converts ReverseSequence, which reverses the first elements of each row. An input has the
    number of these elements for each row.
    """
    shape, tensor = call.shape(0), call.tensor(0)
    batch, time = call.attribute("batch_axis", 1), call.attribute("time_axis", 0)
    lengths = ark.reshape(call.tensor(1), [n if d == batch else 1 for d, n in enumerate(shape)])
    place = ark.iota(list(shape), time, ark.int64)
    back = ark.sub(ark.sub(ark.expand(lengths, list(shape)), place), 1)
    places = ark.where(ark.greater_equal(back, 0), back, place)
    return shaped(ark.gather_elements(tensor, places, time), shape)


@operator("Compress")
def _compress(call: Call) -> Value:
    """Converts Compress: the slices that a condition selects. The contents of the condition must be
    known while the graph is built.
    """
    kept = np.flatnonzero(call.array(1))
    axis, shape, tensor = call.attribute("axis"), call.shape(0), call.tensor(0)
    if axis is None:
        axis, shape, tensor = 0, (math.prod(shape),), ark.reshape(tensor, [-1])
    axis = axis_of(axis, len(shape))
    result = (*shape[:axis], len(kept), *shape[axis + 1 :])
    if not len(kept):
        return Value(result, array=np.zeros(result, call.value(0).dtype))
    return shaped(ark.gather(tensor, call.constant(kept), axis), result)


@operator("TensorScatter")
def _tensor_scatter(call: Call) -> Value:
    """Converts TensorScatter, which writes new elements into a cache. For each entry of the batch,
    an index states the position of the first new element.
    """
    shape, new = call.shape(0), call.shape(1)
    axis = axis_of(call.attribute("axis", -2), len(shape))
    step = ark.iota(list(new), axis, ark.int64)
    if call.has(2):
        first = ark.reshape(call.tensor(2), [-1, *[1] * (len(shape) - 1)])
        step = ark.add(step, first)
    if call.attribute("mode", "linear") == "circular":
        step = ark.mod(step, shape[axis])
    return shaped(ark.scatter_elements(call.tensor(0), step, call.tensor(1), axis, "set"), shape)
