"""Converts ONNX operators that move elements: shapes, slices, concatenation, padding."""

from __future__ import annotations

import math

import numpy as np
import onnx

import ark
from ark.errors import ModelError
from ark.interop.onnx.carried import INTEGERS, cut
from ark.interop.onnx.values import (
    Call,
    Value,
    axis_of,
    data_type,
    join,
    kind_of,
    operator,
    refuse,
    shaped,
)


@operator("Shape")
def _shape(call: Call) -> Value:
    sizes = call.shape(0)[call.attribute("start", 0) : call.attribute("end")]
    return Value((len(sizes),), array=np.array(sizes, np.int64))


@operator("Size")
def _size(call: Call) -> Value:
    return Value((), array=np.array(math.prod(call.shape(0)), np.int64))


@operator("Constant")
def _constant(call: Call) -> Value:
    for name, dtype in (
        ("value", None),
        ("value_float", np.float32),
        ("value_floats", np.float32),
        ("value_int", np.int64),
        ("value_ints", np.int64),
        ("value_string", object),
        ("value_strings", object),
    ):
        if name in call.attributes:
            array = np.asarray(call.attributes[name], dtype)
            return Value(array.shape, array=array)
    raise refuse("a constant of this kind")


@operator("Reshape")
def _reshape(call: Call) -> Value:
    old, sizes = call.shape(0), call.integers(1)
    if not call.attribute("allowzero", 0):
        if any(n == 0 and d >= len(old) for d, n in enumerate(sizes)):
            raise ModelError(
                f"the shape {sizes} has a 0, which keeps the input's size, at a dimension that "
                f"the input {list(old)} does not have"
            )
        sizes = [old[d] if n == 0 else n for d, n in enumerate(sizes)]
    if sizes.count(-1) == 1:
        rest = -math.prod(sizes)
        if rest <= 0 or math.prod(old) % rest:
            raise ModelError(f"{list(old)} cannot be reshaped to {sizes}")
        sizes[sizes.index(-1)] = math.prod(old) // rest
    if math.prod(sizes) != math.prod(old) or min(sizes, default=1) < 0:
        raise ModelError(f"{list(old)} cannot be reshaped to {sizes}")
    return shaped(call.tensor(0), sizes)


@operator("Flatten")
def _flatten(call: Call) -> Value:
    shape = call.shape(0)
    axis = call.attribute("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    return shaped(call.tensor(0), (math.prod(shape[:axis]), math.prod(shape[axis:])))


@operator("Squeeze")
def _squeeze(call: Call) -> Value:
    shape = call.shape(0)
    axes = call.integers(1) if call.has(1) else [d for d, n in enumerate(shape) if n == 1]
    removed = {axis_of(a, len(shape)) for a in axes}
    if any(shape[d] != 1 for d in removed):
        raise ModelError(f"dimensions {sorted(removed)} of {list(shape)} are not all 1")
    return shaped(call.tensor(0), [n for d, n in enumerate(shape) if d not in removed])


@operator("Unsqueeze")
def _unsqueeze(call: Call) -> Value:
    axes, sizes = call.integers(1), list(call.shape(0))
    rank = len(sizes) + len(axes)
    for axis in sorted(axis_of(a, rank) for a in axes):
        sizes.insert(axis, 1)
    return shaped(call.tensor(0), sizes)


@operator("Transpose")
def _transpose(call: Call) -> Value:
    shape = call.shape(0)
    perm = call.attribute("perm", list(reversed(range(len(shape)))))
    if sorted(perm) != list(range(len(shape))):
        raise ModelError(f"{list(perm)} is not a permutation of {len(shape)} dimensions")
    if len(shape) < 2:
        return shaped(call.tensor(0), shape)
    return shaped(ark.transpose(call.tensor(0), list(perm)), [shape[d] for d in perm])


@operator("Concat")
def _concat(call: Call) -> Value:
    values = [call.value(i) for i in range(len(call.inputs))]
    return join(call, values, axis_of(call.attribute("axis"), len(values[0].shape)))


@operator("Split")
def _split(call: Call) -> list[Value]:
    shape = call.shape(0)
    axis = axis_of(call.attribute("axis", 0), len(shape))
    if call.has(1):
        sizes = call.integers(1)
    else:
        each = -(-shape[axis] // len(call.outputs))
        sizes = [each] * (len(call.outputs) - 1)
        sizes.append(shape[axis] - sum(sizes))
    return pieces(call, call.value(0), sizes, axis)


def pieces(call: Call, value: Value, sizes: list[int], axis: int) -> list[Value]:
    """Cuts a value along an axis into parts of these sizes."""
    shape, results = value.shape, []
    if sum(sizes) != shape[axis] or min(sizes, default=0) < 0:
        raise ModelError(f"the sizes {sizes} do not add up to the size {shape[axis]}")
    if value.array is not None:
        cuts = np.split(value.array, np.cumsum(sizes)[:-1], axis)
        return [Value(cut.shape, array=cut) for cut in cuts[: len(sizes)]]
    parts = iter(ark.split(call.on(value), [n for n in sizes if n], axis))
    for n in sizes:
        one = (*shape[:axis], n, *shape[axis + 1 :])
        part = shaped(next(parts), one) if n else Value(one, array=np.zeros(one, value.dtype))
        part.inputs, part.kind = value.inputs, value.kind
        results.append(part)
    return results


@operator("Slice")
def _slice(call: Call) -> Value:
    shape = call.shape(0)
    starts, ends = call.integers(1), call.integers(2)
    axes = call.integers(3) if call.has(3) else list(range(len(starts)))
    steps = call.integers(4) if call.has(4) else [1] * len(starts)
    begins, sizes, by = [0] * len(shape), list(shape), [1] * len(shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step == 0:
            raise ModelError("the step of a slice is 0; it must not be 0")
        d = axis_of(axis, len(shape))
        taken = range(*slice(start, end if end > -(2**62) else None, step).indices(shape[d]))
        begins[d], sizes[d], by[d] = taken.start, len(taken), step
    if math.prod(sizes) == 0:
        return Value(tuple(sizes), array=np.zeros(sizes, call.dtype(0).numpy))
    if all(step == 1 for step in by):
        box = tuple(slice(b, b + n) for b, n in zip(begins, sizes, strict=True))
        return shaped(call.tensor(0)[box], sizes)
    return shaped(ark.strided_slice(call.tensor(0), begins, sizes, by), sizes)


@operator("Pad")
def _pad(call: Call) -> Value:
    shape, pads = call.shape(0), call.integers(1)
    axes = call.integers(3) if call.has(3) else list(range(len(shape)))
    if len(pads) != 2 * len(axes):
        raise ModelError(f"it has {len(pads)} pads, but {len(axes)} axes need {2 * len(axes)}")
    pairs = [(0, 0)] * len(shape)
    for place, axis in enumerate(axes):
        pairs[axis_of(axis, len(shape))] = (pads[place], pads[place + len(axes)])
    value = call.array(2).item() if call.has(2) else 0
    result = [n + a + b for n, (a, b) in zip(shape, pairs, strict=True)]
    mode = call.attribute("mode", "constant")
    return shaped(ark.pad(call.tensor(0), pairs, mode, value), result)


@operator("Expand")
def _expand(call: Call) -> Value:
    shape = np.broadcast_shapes(call.shape(0), tuple(call.integers(1)))
    return shaped(ark.expand(call.tensor(0), list(shape) or [1]), shape)


@operator("Tile")
def _tile(call: Call) -> Value:
    repeats, shape = call.integers(1), call.shape(0)
    result = [n * r for n, r in zip(shape, repeats, strict=True)]
    return shaped(ark.tile(call.tensor(0), repeats) if shape else call.tensor(0), result)


@operator("ConstantOfShape")
def _constant_of_shape(call: Call) -> Value:
    filled = np.asarray(call.attribute("value", np.zeros(1, np.float32)))
    sizes = call.integers(0)
    tensor = ark.constant(filled.item(), sizes or [1], data_type(filled.dtype))
    return shaped(tensor, sizes)


@operator("Range")
def _range(call: Call) -> Value:
    start, limit, delta = (call.array(i).item() for i in range(3))
    dtype = call.dtype(0)
    count = max(0, math.ceil((limit - start) / delta)) if delta else 0
    steps = ark.mul(ark.iota([count], 0, dtype), delta)
    return shaped(ark.add(steps, start), (count,))


@operator("EyeLike")
def _eye(call: Call) -> Value:
    rows, columns = call.shape(0)
    made_of = call.attribute("dtype")
    dtype = data_type(onnx.helper.tensor_dtype_to_np_dtype(made_of)) if made_of else call.dtype(0)
    array = np.eye(rows, columns, call.attribute("k", 0)).astype(dtype.numpy)
    return Value((rows, columns), array=array)


@operator("Trilu")
def _trilu(call: Call) -> Value:
    diagonal = int(call.array(1).item()) if call.has(1) else 0
    function = ark.triu if call.attribute("upper", 1) else ark.tril
    return shaped(function(call.tensor(0), diagonal), call.shape(0))


@operator("DepthToSpace")
def _depth_to_space(call: Call) -> Value:
    n, c, h, w = call.shape(0)
    size = call.attribute("blocksize")
    if call.attribute("mode", "DCR") == "DCR":
        sizes, order = [n, size, size, c // size**2, h, w], [0, 3, 4, 1, 5, 2]
    else:
        sizes, order = [n, c // size**2, size, size, h, w], [0, 1, 4, 2, 5, 3]
    transposed = ark.transpose(ark.reshape(call.tensor(0), sizes), order)
    return shaped(transposed, (n, c // size**2, h * size, w * size))


@operator("SpaceToDepth")
def _space_to_depth(call: Call) -> Value:
    n, c, h, w = call.shape(0)
    size = call.attribute("blocksize")
    parts = ark.reshape(call.tensor(0), [n, c, h // size, size, w // size, size])
    parts = ark.reshape(call.tensor(0), [n, c, h // size, size, w // size, size])
    blocks_first = call.attribute("mode", "DCR") == "DCR"
    order = [0, 3, 5, 1, 2, 4] if blocks_first else [0, 1, 3, 5, 2, 4]
    transposed = ark.transpose(parts, order)
    return shaped(transposed, (n, c * size**2, h // size, w // size))


@operator("BitCast")
def _bit_cast(call: Call) -> Value:
    """Converts BitCast between integer types of the same width."""
    source = np.dtype(call.value(0).dtype)
    wanted = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(call.attribute("to")))
    if {source.kind, wanted.kind} - set("iub") or source.itemsize != wanted.itemsize:
        raise refuse(f"reading the bits of {source} as {wanted}")
    kind, tensor = kind_of(wanted), call.tensor(0)
    tensor = cut(tensor, kind) if kind in INTEGERS else ark.cast(tensor, data_type(wanted))
    value = shaped(tensor, call.shape(0))
    value.kind = kind
    return value
