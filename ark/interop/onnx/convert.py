"""Converts a checked ONNX model to a graph of ark, node by node, and folds constants.

Shape arithmetic and other small values that are known while the graph is built are computed by
ONNX's reference evaluator and need no node. Graphs within nodes become parts of the graph, and so
do the functions by which the standard defines some operators. Called by ark.interop.onnx.model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

import ark
from ark.errors import BaseError, ModelError, UnsupportedError
from ark.interop.onnx import carried as carried
from ark.interop.onnx import control as control
from ark.interop.onnx import einsum as einsum
from ark.interop.onnx import elementwise as elementwise
from ark.interop.onnx import functions
from ark.interop.onnx import host as host
from ark.interop.onnx import lookup as lookup
from ark.interop.onnx import movement as movement
from ark.interop.onnx import norms as norms
from ark.interop.onnx import pooling as pooling
from ark.interop.onnx import products as products
from ark.interop.onnx import quantize as quantize
from ark.interop.onnx import recurrent as recurrent
from ark.interop.onnx import reductions as reductions
from ark.interop.onnx import resize as resize
from ark.interop.onnx import sampling as sampling
from ark.interop.onnx import spectral as spectral
from ark.interop.onnx import trees as trees
from ark.interop.onnx.fold import fold, foldable
from ark.interop.onnx.load import OPSETS
from ark.interop.onnx.values import (
    TABLE,
    Body,
    Call,
    ContentsNeededError,
    Step,
    Value,
    data_type,
    kind_of,
)

MOST_NODES = 1 << 16  # the most nodes of a graph whose loops are unrolled
Values = dict[str, Value | None]


_MALFORMED = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError)


@dataclass
class Built:
    """A graph of ark, converted from an ONNX model, with its inputs and results. results: the
    outputs by name; a result that is known while the graph is built is an array instead of a
    tensor.
    """

    model: ark.Model
    inputs: dict[str, Value]
    results: dict[str, Value]
    constants: list[tuple[ark.Tensor, np.ndarray]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    bodies: int = 0  # graphs within nodes; a loop's body is counted for each iteration


def build(
    proto: onnx.ModelProto,
    inputs: Mapping[str, tuple[tuple[int, ...], Any]],
    known: Mapping[str, np.ndarray],
    into: ark.Model | None = None,
) -> Built:
    """Builds the graph for inputs of these shapes and NumPy types.

    known: the contents of some inputs. into: the model to which the nodes are added; by default a
    new one. Raises ContentsNeededError if an operator needs the contents of an input, and
    UnsupportedError or ModelError, which name operator and node, for other problems.
    """
    with ark.use_model(into or ark.Model(0, 1)) as model:
        values: Values = {tensor.name: _weight(tensor) for tensor in proto.graph.initializer}
        built = Built(model, {}, {})
        for name, (shape, dtype) in inputs.items():
            if name in known or 0 in shape:
                values[name] = Value(shape, array=known.get(name, np.zeros(shape, dtype)))
                continue
            built.inputs[name] = values[name] = _input(name, shape, dtype)
        whole = frozenset(n for n, (_, t) in inputs.items() if np.dtype(t).kind in "iub")
        _Builder(built, whole).nodes(proto.graph.node, values, _opsets(proto.opset_import))
        for output in proto.graph.output:
            value = values[output.name]
            if value is None:
                raise UnsupportedError(f"the output {output.name!r} is an optional without a value")
            built.results[output.name] = value
    return built


def _opsets(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """The version of each domain's operators (opset), by the domain's name."""
    given = {"" if i.domain == "ai.onnx" else i.domain: i.version for i in imports}
    return {"": OPSETS[0], **given}


@dataclass(frozen=True)
class _Builder:
    """Builds nodes into a graph. whole: names of the model's inputs that have integer types."""

    built: Built
    whole: frozenset[str]

    def nodes(
        self, nodes: Iterable[onnx.NodeProto], values: Values, opsets: Mapping[str, int]
    ) -> None:
        """Builds nodes in their order. values: the values by name, to which the results are
        added.
        """
        for place, node in enumerate(nodes):
            label = node.name or f"number {place}"
            try:
                self._node(node, values, opsets)
            except ContentsNeededError as error:
                error.place = place  # the outermost graph sets this last, so its node counts
                raise
            except (MemoryError, RecursionError):
                raise
            except BaseError as error:
                kind = UnsupportedError if isinstance(error, UnsupportedError) else ModelError
                raise kind(f"{node.op_type} (node {label}): {error}") from error
            except _MALFORMED as error:
                raise ModelError(f"{node.op_type} (node {label}) is malformed: {error}") from error

    def _node(self, node: onnx.NodeProto, values: Values, opsets: Mapping[str, int]) -> None:
        given = [values[name] if name else None for name in node.input]
        while given and given[-1] is None:
            given.pop()
        domain = "" if node.domain == "ai.onnx" else node.domain
        version = opsets.get(domain, 1)
        operator = TABLE.get(f"{domain}::{node.op_type}" if domain else node.op_type)
        if operator is None and functions.has_body(node, version):
            results = self._function(node, given, version)
        elif operator is None:
            # Operators are checked before the conversion, except those of graphs within nodes,
            # which may belong to a branch that is never taken.
            raise UnsupportedError("the operator is not supported")
        else:
            results = self._operator(operator, node, given, values, opsets)
        if len(results) < max((i for i, name in enumerate(node.output, 1) if name), default=0):
            raise UnsupportedError(
                f"the operator has {len(node.output)} outputs, which is not supported"
            )
        seen = frozenset[str]().union(*(v.inputs for v in given if v is not None))
        for name, value in zip(node.output, results, strict=False):
            if value is not None:
                value.inputs |= seen
            values[name] = value

    def _operator(
        self,
        operator: Any,
        node: onnx.NodeProto,
        given: list[Value | None],
        values: Values,
        opsets: Mapping[str, int],
    ) -> list[Value | None]:
        domain = "" if node.domain == "ai.onnx" else node.domain
        schema = functions.schema_of(node, opsets.get(domain, 1))
        call = Call(
            node.op_type,
            given,
            functions.attributes(node),
            list(node.output),
            schema.since_version,
            self.built.constants,
            self._bodies(node, values, opsets),
            self.whole,
        )
        if not call.bodies and not domain and foldable(node.op_type, given):
            results: Any = fold(node, given, opsets[""])
        else:
            results = carried.run(call, operator, schema)
        results = [results] if results is None or isinstance(results, Value) else list(results)
        if not call.bodies:
            self.built.steps.append(Step(call, results))
        return list(results)

    def _function(
        self, node: onnx.NodeProto, given: list[Value | None], version: int
    ) -> list[Value | None]:
        try:
            body = functions.body_of(node, version, given)
        except Exception as error:  # onnx's code may raise any error
            raise UnsupportedError(f"its definition cannot be expanded: {error}") from error
        inner: Values = dict.fromkeys(body.input)
        inner.update(zip(body.input, given, strict=False))
        self.nodes(body.node, inner, _opsets(body.opset_import))
        wanted = zip(body.output, node.output, strict=False)
        return [inner[name] if outer else None for name, outer in wanted]

    def _bodies(
        self, node: onnx.NodeProto, values: Values, opsets: Mapping[str, int]
    ) -> dict[str, Body]:
        def build(graph: onnx.GraphProto, given: Sequence[Value | None]) -> list[Value | None]:
            self.built.bodies += 1
            if max(self.built.bodies, len(self.built.steps)) > MOST_NODES:
                raise UnsupportedError(f"loops that make a graph of more than {MOST_NODES} nodes")
            inner = dict(values)
            inner.update({tensor.name: _weight(tensor) for tensor in graph.initializer})
            inner.update({i.name: v for i, v in zip(graph.input, given, strict=True)})
            self.nodes(graph.node, inner, opsets)
            return [inner[output.name] for output in graph.output]

        graphs = (a for a in node.attribute if a.type == onnx.AttributeProto.GRAPH)
        return {a.name: Body(a.g, build) for a in graphs}


def _weight(tensor: onnx.TensorProto) -> Value:
    try:
        array = onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"the weight {tensor.name!r} is malformed: {error}") from error
    return Value(array.shape, array=array)


def _input(name: str, shape: tuple[int, ...], dtype: Any) -> Value:
    tensor = ark.tensor(list(shape) or [1], data_type(dtype))
    return Value(tuple(shape), tensor, inputs=frozenset([name]), kind=kind_of(dtype))
