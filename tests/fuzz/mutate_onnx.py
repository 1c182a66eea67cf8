"""Hostile ONNX files: truncated, cyclic, with wrong types, or with any field of any message
changed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor
from onnx import parser

from tests.fuzz import mutate

# Each model takes a float tensor x of shape (2, 4).
MODELS = (
    """<ir_version: 8, opset_import: ["": 17]>
    rows (float[2,4] x) => (float[4,2] y)
    <float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}, int64[2] sizes = {4, -1}, float b = {0.5},
     int64[1] zero = {0}, int64[1] end = {4}, int64[1] one = {1}> {
      p = MatMul (x, w)
      q = Add (p, b)
      s = Softmax <axis: int = 1> (q)
      c = Cast <to: int = 10> (s)
      f = Cast <to: int = 1> (c)
      part = Slice (f, zero, end, one, one)
      y = Reshape (part, sizes)
    }""",
    """<ir_version: 8, opset_import: ["": 17]>
    picture (float[2,4] x) => (float[2,3] y)
    <float[1,1,1,2] k = {1, -1}, int64[4] sizes = {2, 1, 1, 4}> {
      r = Reshape (x, sizes)
      f = Conv <pads: ints = [0,0,0,1], kernel_shape: ints = [1,2], strides: ints = [1,1]> (r, k)
      m = MaxPool <kernel_shape: ints = [1,2]> (f)
      n = Relu (m)
      y = Flatten <axis: int = 1> (n)
    }""",
    """<ir_version: 8, opset_import: ["": 17, "own": 1]>
    calls (float[2,4] x) => (float[n,4] y)
    <int64[3] rows = {1, 0, 1}> {
      t = own.twice (x)
      g = Gather <axis: int = 0> (t, rows)
      m = ReduceMean <axes: ints = [1], keepdims: int = 1> (g)
      d = Sub (g, m)
      y = Concat <axis: int = 0> (d, t)
    }
    <domain: "own", opset_import: ["": 17, "own": 1]>
    twice (a) => (b) { b = Add (a, a) }""",
    """<ir_version: 8, opset_import: ["": 19]>
    turns (float[2,4] x) => (float[2,4] y, float[n,2,4] all)
    <int64 count = {3}, bool yes = {1}, float scale = {0.5}, uint8 point = {3}> {
      h = HannWindow <periodic: int = 0> (count)
      y, all = Loop (count, yes, x) <body = once (int64 i, bool go, float[2,4] s)
        => (bool on, float[2,4] t, float[2,4] each) {
          q = QuantizeLinear (s, scale, point)
          each = DequantizeLinear (q, scale, point)
          t = Sub (each, x)
          on = Identity (go)
      }>
    }""",
    """<ir_version: 8, opset_import: ["": 17]>
    chosen (float[2,4] x) => (float[n] y, float[2,3,2] z)
    <float least = {0.1}, int64[1] zero = {0}, int64 step = {2}, int64 length = {4}> {
      g = Greater (x, least)
      i = NonZero (g)
      j = Transpose (i)
      y = GatherND (x, j)
      z = STFT <onesided: int = 1> (x, step, , length)
    }""",
)
NUMBERS = (0, 1, -1, 2, 3, 7, 10, 16, 17, 26, 255, 2**31 - 1, -(2**31), 2**62, -(2**63))
FLOATS = (0.0, -1.0, 1e30, float("inf"), float("nan"))
TEXTS = ("", "x", "y", "w", "a", "t", "own", "twice", "Add", "Loop", "LSTM", "Cast", "no such")
PLACES = ("/etc/passwd", "../x", "w.bin", "", "\x00")


@cache
def _models() -> tuple[onnx.ModelProto, ...]:
    return tuple(parser.parse_model(text) for text in MODELS)


def of_model(rng: random.Random) -> bytes:
    """Returns the bytes of a mutated model of MODELS."""
    model = onnx.ModelProto()
    model.CopyFrom(rng.choice(_models()))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice((_circle, _another_type, _outside, _recursion, _field, _field, _field))(
            model, rng
        )
    data = model.SerializeToString()
    how = rng.random()
    if how < 0.1:
        return data[: rng.randrange(len(data))]
    return mutate.of_bytes(data, rng) if how < 0.3 else data


def _circle(model: onnx.ModelProto, rng: random.Random) -> None:
    """Lets a node read its own result or a later node's, so that the graph has a cycle."""
    nodes = model.graph.node
    if nodes:
        place = rng.randrange(len(nodes))
        later = nodes[rng.randrange(place, len(nodes))]
        if nodes[place].input and later.output:
            nodes[place].input[0] = later.output[0]


def _another_type(model: onnx.ModelProto, rng: random.Random) -> None:
    """Changes the type of an input, an output or a weight."""
    graph = model.graph
    ports = [v.type.tensor_type for v in (*graph.input, *graph.output)]
    if graph.initializer and rng.random() < 0.5:
        rng.choice(graph.initializer).data_type = rng.randrange(30)
    elif ports:
        rng.choice(ports).elem_type = rng.randrange(30)


def _outside(model: onnx.ModelProto, rng: random.Random) -> None:
    """Changes a weight to external data, in a file at a hostile path."""
    if model.graph.initializer:
        weight = rng.choice(model.graph.initializer)
        for name in ("raw_data", "float_data", "int64_data"):
            weight.ClearField(name)
        weight.data_location = onnx.TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=rng.choice(PLACES))


def _recursion(model: onnx.ModelProto, rng: random.Random) -> None:
    """Adds a function that calls itself."""
    for function in model.functions:
        if not function.node:
            continue
        function.node[0].op_type, function.node[0].domain = function.name, function.domain


def _field(model: onnx.ModelProto, rng: random.Random) -> None:
    """Changes any field of any message: it gets another value, or entries are dropped, doubled or
    exchanged.
    """
    message, field = rng.choice(list(_places(model)))
    if field.is_repeated:
        entries = getattr(message, field.name)
        at = rng.randrange(len(entries))
        move = rng.randrange(4)
        if move == 0:
            del entries[at]
        elif move == 1:
            entries.extend([entries[at]])
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            other = type(entries[at])()
            other.CopyFrom(rng.choice(entries))
            entries[at].CopyFrom(other)
        else:
            entries[at] = _value(field, rng)
    elif field.type == FieldDescriptor.TYPE_MESSAGE or rng.random() < 0.2:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(field, rng))


def _places(message: Any) -> Iterator[tuple[Any, FieldDescriptor]]:
    """Yields all fields that are set in a message and in the messages within it, each with its
    message.
    """
    for field, value in message.ListFields():
        yield message, field
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else (value,):
                yield from _places(inner)


def _value(field: FieldDescriptor, rng: random.Random) -> Any:
    """Returns a hostile value of a field's type."""
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 3, 64)))
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return rng.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return rng.choice(field.enum_type.values).number
    number = rng.choice(NUMBERS)
    wide = field.type in (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)
    number = number if wide or abs(number) < 2**31 else 2**31 - 1
    return abs(number) % 2**63 if field.type == FieldDescriptor.TYPE_UINT64 else number
