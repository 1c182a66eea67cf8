"""From a checked ONNX model to a graph of ark: node by node, what is known beforehand computed.

Arithmetic on shapes and other small values that are known while the graph is built is done by
ONNX's own reference evaluator and leaves no node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

import ark
from ark.errors import BaseError, ModelError, UnsupportedError
from ark.interop.onnx import einsum as einsum
from ark.interop.onnx import elementwise as elementwise
from ark.interop.onnx import movement as movement
from ark.interop.onnx import norms as norms
from ark.interop.onnx import products as products
from ark.interop.onnx import quantize as quantize
from ark.interop.onnx import recurrent as recurrent
from ark.interop.onnx import reductions as reductions
from ark.interop.onnx import resize as resize
from ark.interop.onnx.load import OPSETS
from ark.interop.onnx.values import TABLE, Call, NeedsContents, Step, Value, data_type

MOST_FOLDED = 4096  # elements of all inputs of a node that is computed beforehand
MOST_MADE = 1 << 24  # elements of what it may make
_ALWAYS_FOLDED = ("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_GROWS = ("ConstantOfShape", "Expand", "Range", "Tile", "Pad", "Resize", "OneHot", "EyeLike")
_OWN = ("Constant", "Shape", "Size", "Dropout")


@dataclass
class Built:
    """A graph with what goes in and comes out. results: by name, a tensor or a known array."""

    model: ark.Model
    inputs: dict[str, Value]
    results: dict[str, Value]
    constants: list[tuple[ark.Tensor, np.ndarray]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


def build(
    proto: onnx.ModelProto,
    inputs: Mapping[str, tuple[tuple[int, ...], Any]],
    known: Mapping[str, np.ndarray],
    into: ark.Model | None = None,
) -> Built:
    """Builds the graph for inputs of these shapes and NumPy types; known: inputs' contents.

    into: the model that the graph becomes a part of; default a new one.

    NeedsContents where an operator must know what an input holds. UnsupportedError and ModelError
    name operator and node.
    """
    found = [o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")]
    version = found[0] if found else OPSETS[0]
    with ark.use_model(into or ark.Model(0, 1)) as model:
        values: dict[str, Value] = {}
        for tensor in proto.graph.initializer:
            values[tensor.name] = _weight(tensor)
        made = Built(model, {}, {})
        for name, (shape, dtype) in inputs.items():
            if name in known or 0 in shape:
                values[name] = Value(shape, array=known.get(name, np.zeros(shape, dtype)))
                continue
            made.inputs[name] = values[name] = _input(name, shape, dtype)
        _nodes(proto.graph, values, version, made)
        for output in proto.graph.output:
            made.results[output.name] = values[output.name]
    return made


def _nodes(graph: onnx.GraphProto, values: dict[str, Value], version: int, made: Built) -> None:
    """Builds a graph's nodes; values: by name, which those of the nodes join."""
    for place, node in enumerate(graph.node):
        label = node.name or f"number {place}"
        try:
            if node.op_type == "If" and not node.domain:
                _branch(node, values, version, made)
            else:
                _node(node, values, version, made)
        except (NeedsContents, MemoryError):
            raise
        except BaseError as error:
            kind = UnsupportedError if isinstance(error, UnsupportedError) else ModelError
            raise kind(f"{node.op_type} (node {label}): {error}") from error
        except (ValueError, TypeError, IndexError, KeyError, ArithmeticError) as error:
            raise ModelError(f"{node.op_type} (node {label}) is malformed: {error}") from error


def _branch(node: onnx.NodeProto, values: dict[str, Value], version: int, made: Built) -> None:
    """The nodes of the branch that an If takes; its condition must be known beforehand."""
    condition = values[node.input[0]]
    if condition.array is None:
        raise NeedsContents(condition.inputs)
    name = "then_branch" if bool(condition.array.item()) else "else_branch"
    (graph,) = (a.g for a in node.attribute if a.name == name)
    inner = dict(values)
    for tensor in graph.initializer:
        inner[tensor.name] = _weight(tensor)
    _nodes(graph, inner, version, made)
    for outer, result in zip(node.output, graph.output, strict=True):
        values[outer] = inner[result.name]


def _weight(tensor: onnx.TensorProto) -> Value:
    try:
        array = onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"the weight {tensor.name!r} is malformed: {error}") from error
    return Value(array.shape, array=array)


def _input(name: str, shape: tuple[int, ...], dtype: Any) -> Value:
    tensor = ark.tensor(list(shape) or [1], data_type(dtype))
    return Value(tuple(shape), tensor, inputs=frozenset([name]))


def _node(node: onnx.NodeProto, values: dict[str, Value], version: int, made: Built) -> None:
    given = [values[name] if name else None for name in node.input]
    while given and given[-1] is None:
        given.pop()
    if node.domain not in ("", "ai.onnx") or node.op_type not in TABLE:
        raise UnsupportedError("the operator is not built")  # of a graph within a graph
    since = onnx.defs.get_schema(node.op_type, version).since_version
    call = Call(node.op_type, given, _attributes(node), list(node.output), since, made.constants)
    seen = frozenset().union(*(v.inputs for v in given if v is not None))
    if _foldable(node.op_type, given):
        results: Any = _fold(node, given, version)
    else:
        results = TABLE[node.op_type](call)
    results = [results] if isinstance(results, Value) else list(results)
    if len(results) < sum(map(bool, node.output)):
        raise UnsupportedError(f"{len(node.output)} results of it are not built")
    for name, value in zip(node.output, results, strict=False):
        value.inputs = seen
        values[name] = value
    made.steps.append(Step(call, results))


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    found = {}
    for attribute in node.attribute:
        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        if isinstance(value, onnx.TensorProto):
            value = onnx.numpy_helper.to_array(value)
        found[attribute.name] = value
    return found


def _foldable(op: str, given: list[Value | None]) -> bool:
    """Is everything known that the node needs, and little enough?"""
    present = [v for v in given if v is not None]
    arrays = [v.array for v in present if v.array is not None]
    if op in _OWN or not given or len(arrays) < len(present):
        return False
    if op in _ALWAYS_FOLDED:
        return True
    if any(a.size == 0 for a in arrays):
        return True  # tensors have elements
    if sum(a.size for a in arrays) > MOST_FOLDED:
        return False
    return op not in _GROWS or _made_elements(op, arrays) <= MOST_MADE


def _made_elements(op: str, arrays: list[Any]) -> float:
    """About how many elements a node makes whose inputs say how many; floats do not overflow."""
    if op == "Range":
        start, limit, delta = (float(a.item()) for a in arrays)
        return abs(limit - start) / abs(delta) if delta else 0.0
    if op == "ConstantOfShape":
        return float(np.prod(arrays[0].astype(np.float64)))
    if op == "Expand":
        return float(np.prod(np.maximum(arrays[1], 1).astype(np.float64))) * arrays[0].size
    if op == "Tile":
        return float(np.prod(np.maximum(arrays[1], 1).astype(np.float64))) * arrays[0].size
    return float("inf")


def _fold(node: onnx.NodeProto, given: list[Value | None], version: int) -> list[Value]:
    """What ONNX's reference evaluator makes of one node."""
    feeds = {n: v.array for n, v in zip(node.input, given, strict=False) if n and v is not None}
    graph = onnx.helper.make_graph(
        [node],
        "one",
        [onnx.helper.make_empty_tensor_value_info(n) for n in feeds],
        [onnx.helper.make_empty_tensor_value_info(n) for n in node.output if n],
    )
    opset = onnx.helper.make_opsetid("", version)
    try:
        single = onnx.helper.make_model(graph, opset_imports=[opset])
        found = iter(ReferenceEvaluator(single).run(None, feeds))
    except Exception as error:  # whatever the library's code makes of odd values
        raise UnsupportedError(f"it cannot be computed: {error}") from error
    results = []
    for name in node.output:
        array = np.asarray(next(found)) if name else np.zeros(0)
        results.append(Value(array.shape, array=array))
    return results
