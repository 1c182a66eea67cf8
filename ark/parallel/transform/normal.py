"""Converts a graph to normal form, in which it can be split over ranks. In normal form, all ops
read a buffer in the same shape. Memory that keeps its contents from the previous iteration is
separate from the memory that the current iteration writes.

In an ordinary graph, a view is not a node, and optimizers write parameters in place. In normal
form, a view of another shape is a node `reshape` with its own tensor. A read of memory that the
iteration writes later becomes a read of a twin, a buffer with the previous iteration's value. Each
entry point that writes such memory has its own version of it. ark.parallel.transform.materialise
updates the twins.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ark.errors import UnsupportedError
from ark.ir.graph import Graph, Node
from ark.ir.values import Buffer, Tensor

LASTING = ("parameter", "state", "external", "host")
RESHAPE = "reshape"


@dataclass(frozen=True)
class Normal:
    """A graph in normal form, which has the buffers of the original graph. twins: for each twin (a
    buffer with the value of the previous iteration), the buffer of the original graph. versions:
    for each buffer that an iteration of a phase writes, the twin with its previous value and the
    phase.
    """

    graph: Graph
    twins: dict[int, int]
    versions: dict[int, tuple[int, int]]


def normal(graph: Graph) -> Normal:
    """Converts a graph to normal form. Raises UnsupportedError if ops write only parts of memory
    that lasts.

    Other graphs that cannot be split are refused by ParallelGraph.
    """
    return _Normal(graph).run()


class _Normal:
    def __init__(self, graph: Graph) -> None:
        self.nodes = [n for n in graph.nodes if not n.virtual]
        self.result = Graph(graph.rank, graph.world_size)
        self.result.buffers, self.result.tensors = list(graph.buffers), list(graph.tensors)
        self.result.phases = graph.phases
        # For each phase and buffer, the number of the first node that writes the buffer.
        self.first: dict[tuple[int, int], int] = {}
        # For each phase and buffer, the tensors of the buffer that nodes write.
        self.writes: dict[tuple[int, int], list[Tensor]] = {}
        self.phases: dict[int, set[int]] = {}  # by buffer: the phases that write it
        self.extents: dict[int, tuple[int, ...]] = {}  # the shape in which a buffer is split
        self.twins: dict[int, int] = {}
        self.twin_of: dict[int, int] = {}
        self.versions: dict[int, tuple[int, int]] = {}
        self.version_of: dict[tuple[int, int], Buffer] = {}
        self.shaped: dict[tuple[int, tuple[int, ...], int], Tensor] = {}

    def run(self) -> Normal:
        for (
            tensor
        ) in self.result.tensors:  # the first tensor on lasting memory has the caller's shape
            if tensor.buffer.arena in LASTING:
                self.extents.setdefault(tensor.buffer.id, tensor.extents)
        for number, node in enumerate(self.nodes):
            for out in node.outputs:
                self.writes.setdefault((node.phase, out.buffer.id), []).append(out)
                self.first.setdefault((node.phase, out.buffer.id), number)
                self.phases.setdefault(out.buffer.id, set()).add(node.phase)
                self.extents.setdefault(out.buffer.id, out.extents)
        for node in self.nodes:
            for tensor in node.inputs:
                self.extents.setdefault(tensor.buffer.id, tensor.extents)
        for number, node in enumerate(self.nodes):
            for tensor in node.inputs:
                if self._reads_before(number, node, tensor.buffer):
                    self._twin(node, tensor)
        for number, node in enumerate(self.nodes):
            inputs = tuple(self._input(number, node, t) for t in node.inputs)
            outputs = tuple(self._on(t, self._version(node, t.buffer)) for t in node.outputs)
            self.result.nodes.append(
                dataclasses.replace(node, id=len(self.result.nodes), inputs=inputs, outputs=outputs)
            )
        return Normal(self.result, self.twins, self.versions)

    def _reads_before(self, number: int, node: Node, buffer: Buffer) -> bool:
        """True if the node reads the previous iteration's value of memory that this iteration
        writes.
        """
        if buffer.arena not in LASTING or buffer.id not in self.phases:
            return False
        return number <= self.first.get((node.phase, buffer.id), len(self.nodes))

    def _twin(self, node: Node, tensor: Tensor) -> None:
        """Creates a twin of a buffer, which holds the buffer's value of the previous iteration.
        Also creates a version of the buffer for each phase that writes it. Does nothing if they
        exist.
        """
        buffer = tensor.buffer
        if buffer.id in self.twin_of:
            return
        for phase in self.phases[buffer.id]:
            writes = self.writes[phase, buffer.id]
            if len(writes) != 1 or writes[0].shape != writes[0].extents:
                raise UnsupportedError(
                    f"{node.name} reads {tensor.name or 'memory'} that is later written in parts "
                    "or more than once; in a graph that is split every op writes to its own "
                    "memory, and memory that survives an iteration is written whole by one op"
                )
        twin = self._another(buffer)
        self.twin_of[buffer.id] = twin.id
        self.twins[twin.id] = buffer.id
        for number, phase in enumerate(sorted(self.phases[buffer.id])):
            version = self._another(buffer) if number else buffer
            self.versions[version.id] = (twin.id, phase)
            self.version_of[buffer.id, phase] = version

    def _another(self, buffer: Buffer) -> Buffer:
        copy = self.result.buffer(buffer.arena, buffer.nbytes, name=buffer.name)
        self.extents[copy.id] = self.extents[buffer.id]
        return copy

    def _version(self, node: Node, buffer: Buffer) -> Buffer:
        """The buffer in normal form that receives the value which a phase writes to `buffer`.
        Raises UnsupportedError if several phases write memory whose previous value is not read.
        """
        if len(self.phases.get(buffer.id, ())) > 1 and buffer.id not in self.twin_of:
            raise UnsupportedError(
                f"{node.name} writes memory that another entry point also writes and no op reads; "
                "in a graph that is split each entry point writes to its own memory"
            )
        return self.version_of.get((buffer.id, node.phase), buffer)

    def _on(self, tensor: Tensor, buffer: Buffer) -> Tensor:
        if tensor.buffer.id == buffer.id:
            return tensor
        return self._add(dataclasses.replace(tensor, buffer=buffer))

    def _input(self, number: int, node: Node, tensor: Tensor) -> Tensor:
        buffer = tensor.buffer
        if self._reads_before(number, node, buffer):
            tensor = self._on(tensor, self.result.buffers[self.twin_of[buffer.id]])
        elif buffer.id in self.phases:
            tensor = self._on(tensor, self._version(node, buffer))
        if tensor.extents != self.extents[tensor.buffer.id]:
            tensor = self._shaped(node, tensor)
        return tensor

    def _shaped(self, node: Node, tensor: Tensor) -> Tensor:
        """The tensor in the shape that the node uses. A `reshape` node copies its whole buffer, and
        the tensor is a part of the copy.
        """
        key = (tensor.buffer.id, tensor.extents, node.phase)
        if key not in self.shaped:
            extents = self.extents[tensor.buffer.id]
            zeros = (0,) * len(extents)
            whole = self._add(
                dataclasses.replace(
                    tensor, shape=extents, extents=extents, offsets=zeros, padded=extents
                )
            )
            reshaped = self.result.tensor(tensor.extents, tensor.dtype, name=tensor.name)
            scope = node.name.rpartition(".")[0]
            self.result.nodes.append(
                Node(
                    len(self.result.nodes),
                    RESHAPE,
                    f"{scope}.{RESHAPE}" if scope else RESHAPE,
                    (whole,),
                    (reshaped,),
                    phase=node.phase,
                )
            )
            self.shaped[key] = reshaped
        return self._add(dataclasses.replace(tensor, buffer=self.shaped[key].buffer))

    def _add(self, tensor: Tensor) -> Tensor:
        copy = dataclasses.replace(tensor, id=len(self.result.tensors))
        self.result.tensors.append(copy)
        return copy
