"""Runs models in several kernels (stages), if the graph depends on contents of inputs that are
known only at run time.

The graph is cut at the first node that needs such contents. The nodes before the cut become a
kernel, whose results include the contents. If the node can be built once they are known, it becomes
the first node of the remaining part; otherwise the host computes it. The remaining part is handled
as a model of its own, which may be cut again. Control flow that a kernel cannot execute is executed
by the host; its branches and bodies are models. Called by ark.interop.onnx.model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx

from ark.errors import UnsupportedError
from ark.interop.onnx import host
from ark.interop.onnx.load import nodes, opset

MOST_STAGES = 32
MAX_HOST_ITERATIONS = 1 << 20  # of one loop that the host executes
Values = dict[str, np.ndarray]


class StagesNeededError(UnsupportedError):
    """Raised if one graph is required but the model needs several."""


class Model(Protocol):
    """The interface of a model that computes one part of the graph."""

    def run(self, inputs: Mapping[str, Any]) -> list[np.ndarray]:
        """Runs the part; returns its outputs in their order."""

    def close(self) -> None:
        """Frees the kernels' memory."""


# A function that creates the model of one part of a divided graph. The number is the part's depth:
# the number of parts before it.
Make = Callable[[onnx.ModelProto, int], Model]


@dataclass(frozen=True)
class _Part:
    """One part of a divided graph: the model that computes it, with the names of its inputs and
    outputs.
    """

    model: Model
    inputs: list[str]
    outputs: list[str]

    def run(self, values: Mapping[str, np.ndarray]) -> Values:
        results = self.model.run({n: values[n] for n in self.inputs if n in values})
        return dict(zip(self.outputs, results, strict=True))


class Stages:
    """A model whose graph is cut at one node: the nodes before it are one part, and the remaining
    nodes are another. place: the node's index in the graph. on_host: True if the host computes the
    node.
    """

    def __init__(
        self, proto: onnx.ModelProto, place: int, on_host: bool, depth: int, make: Make
    ) -> None:
        if depth >= MOST_STAGES:
            raise UnsupportedError(f"the model has more than {MOST_STAGES} stages")
        self._proto, self._make, self._depth = proto, make, depth
        graph = proto.graph
        self.node = graph.node[place]
        late, behind, ahead = set(self.node.output), [], list(graph.node[:place])
        for other in graph.node[place + 1 :]:
            if late & _used(other):
                late |= set(other.output)
                behind.append(other)
            else:
                ahead.append(other)
        self._behind = behind if on_host else [self.node, *behind]
        self._outputs = [output.name for output in graph.output]
        self._needed = set(self._outputs).union(_used(self.node), *map(_used, behind))
        live = sorted(self._needed & {name for one in ahead for name in one.output})
        self.on_host = on_host or not live
        if not live and not on_host:
            if self.node.op_type not in ("If", "Loop"):
                raise UnsupportedError("a shape depends on values that are known only at run time")
            self._behind = behind
        inputs = {port.name for port in graph.input}
        kept = self._needed & inputs | set(_used(self.node)) | set(self._outputs)
        self._constants = {
            t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer if t.name in kept
        }
        self._changing = inputs.union(live, self.node.output)
        self._first = self._part(ahead, graph.input, live, True) if live else None
        self._rest: _Part | None = None
        self._bodies: dict[str, _Part] = {}

    def run(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Computes the outputs of the whole graph. arrays: its inputs by name."""
        values = {**self._constants, **arrays}
        if self._first is not None:
            values |= self._first.run(values)
        if self.on_host:
            values |= self._computed(values)
        if self._behind:
            if self._rest is None:
                wanted = self._needed.union(*map(_used, self._behind)) & self._changing
                ports = [_port(n, values[n]) for n in sorted(wanted & set(values))]
                self._rest = self._part(self._behind, ports, self._outputs, False)
            values |= self._rest.run(values)
        return [values[name] for name in self._outputs]

    def _computed(self, values: Values) -> Values:
        """The results of the node at which the graph is cut, computed by the host. They are
        returned by name.
        """
        if self.node.op_type == "If":
            taken = bool(values[self.node.input[0]].item())
            results = self._body("then_branch" if taken else "else_branch", [], values)
        elif self.node.op_type == "Loop":
            results = self._loop(values)
        else:
            version = opset(self._proto, "the model")
            given = [values[name] if name else None for name in self.node.input]
            results = host.computed(self.node, given, version)
        return {n: a for n, a in zip(self.node.output, results, strict=False) if n}

    def _loop(self, values: Values) -> list[np.ndarray]:
        """Executes a Loop on the host until its condition is false or its maximum number of
        iterations is reached.
        """
        most, goes_on, *state = [values[n] if n else None for n in self.node.input]
        turns = MAX_HOST_ITERATIONS if most is None else int(most.item())
        count, turn = len(state), 0
        columns: list[list[np.ndarray]] = [[] for _ in self.node.output[count:]]
        on = goes_on is None or bool(goes_on.item())
        while on and turn < turns:
            if turn >= MAX_HOST_ITERATIONS:
                raise UnsupportedError(f"a loop of more than {MAX_HOST_ITERATIONS} iterations")
            first = [np.array(turn, np.int64), np.array(True)]
            after, *results = self._body("body", [*first, *state], values)
            on, state, turn = bool(after.item()), list(results[:count]), turn + 1
            for column, result in zip(columns, results[count:], strict=True):
                column.append(result)
        stacked = [np.stack(column) if column else _EMPTY for column in columns]
        return [*(s for s in state if s is not None), *stacked]

    def _body(
        self, name: str, given: Sequence[np.ndarray | None], values: Values
    ) -> list[np.ndarray]:
        """The results of a graph within the node. given: the graph's inputs. values: the values of
        the outer graph.
        """
        (graph,) = (a.g for a in self.node.attribute if a.name == name)
        here = {port.name: a for port, a in zip(graph.input, given, strict=True) if a is not None}
        part = self._bodies.get(name)
        if part is None:
            around = {n: values[n] for n in _used_in(graph) if n in values}
            ports = [_port(n, a) for n, a in sorted({**around, **here}.items())]
            outputs = [output.name for output in graph.output]
            part = self._part(list(graph.node), ports, outputs, False, graph.initializer)
            self._bodies[name] = part
        return list(part.run({**values, **here}).values())

    def _part(
        self,
        chosen: Sequence[onnx.NodeProto],
        inputs: Iterable[onnx.ValueInfoProto],
        outputs: Sequence[str],
        defaults: bool,
        weights: Iterable[onnx.TensorProto] = (),
    ) -> _Part:
        """A part of the graph as a model: those of the `chosen` nodes on which `outputs` depend.
        defaults: True if the part's inputs may have initialisers.
        """
        needed, kept = set(outputs), list[onnx.NodeProto]()
        for node in reversed(chosen):
            if needed & set(node.output):
                kept.insert(0, node)
                needed |= _used(node)
        ports = [port for port in inputs if port.name in needed]
        given = set() if defaults else {port.name for port in ports}
        every = [*weights, *self._proto.graph.initializer]
        types = {output.name: output for output in self._proto.graph.output}
        empty = onnx.helper.make_empty_tensor_value_info
        graph = onnx.helper.make_graph(
            kept,
            self._proto.graph.name,
            ports,
            [types.get(name) or empty(name) for name in outputs],
            [t for t in every if t.name in needed - given],
        )
        model = onnx.helper.make_model(graph, opset_imports=self._proto.opset_import)
        names = [port.name for port in ports]
        return _Part(self._make(model, self._depth + 1), names, list(outputs))

    def close(self) -> None:
        """Frees the kernels' memory."""
        for part in (self._first, self._rest, *self._bodies.values()):
            if part is not None:
                part.model.close()


_EMPTY = np.zeros(0, np.float32)


def _port(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    elements = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return onnx.helper.make_tensor_value_info(name, elements, None)


def _used(node: onnx.NodeProto) -> set[str]:
    """The names of the values that a node reads, including the values that graphs within the node
    read.
    """
    used = set(node.input)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            used |= _used_in(attribute.g)
    return used - {""}


def _used_in(graph: onnx.GraphProto) -> set[str]:
    used = {output.name for output in graph.output}
    return used.union(*(inner.input for inner in nodes(graph)))
