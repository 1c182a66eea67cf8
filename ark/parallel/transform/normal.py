"""A graph in the form that is split: every operand in one shape, and what lasts apart from what
this iteration writes.

Views make no node, and optimizers write parameters in place. Here a view of another shape becomes
a node `reshape` on a tensor of its own, and a read of memory that the iteration writes later reads
a twin: what the iteration before left. Each entry point that writes such memory has a version of
its own. ark.parallel.transform.materialise updates twins.
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
    """graph: with the buffers of the one it was made of. twins: by a twin's buffer, the buffer of
    that graph. versions: by a buffer that an iteration of a phase writes, (twin, phase).
    """

    graph: Graph
    twins: dict[int, int]
    versions: dict[int, tuple[int, int]]


def normal(graph: Graph) -> Normal:
    """The graph in normal form; UnsupportedError where what lasts is written in parts.

    What cannot be split for another reason is refused by ParallelGraph.
    """
    return _Normal(graph).run()


class _Normal:
    def __init__(self, graph: Graph) -> None:
        self.nodes = [n for n in graph.nodes if not n.virtual]
        self.made = Graph(graph.rank, graph.world_size)
        self.made.buffers, self.made.tensors = list(graph.buffers), list(graph.tensors)
        self.made.phases = graph.phases
        self.first: dict[tuple[int, int], int] = {}  # by phase and buffer
        self.writes: dict[tuple[int, int], list[Tensor]] = {}  # likewise
        self.phases: dict[int, set[int]] = {}  # that write a buffer
        self.extents: dict[int, tuple[int, ...]] = {}  # the shape in which a buffer is split
        self.twins: dict[int, int] = {}
        self.twin_of: dict[int, int] = {}
        self.versions: dict[int, tuple[int, int]] = {}
        self.version_of: dict[tuple[int, int], Buffer] = {}
        self.shaped: dict[tuple[int, tuple[int, ...], int], Tensor] = {}

    def run(self) -> Normal:
        for (
            tensor
        ) in self.made.tensors:  # the first one on memory that lasts has the caller's shape
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
            self.made.nodes.append(
                dataclasses.replace(node, id=len(self.made.nodes), inputs=inputs, outputs=outputs)
            )
        return Normal(self.made, self.twins, self.versions)

    def _reads_before(self, number: int, node: Node, buffer: Buffer) -> bool:
        """Does the node read what an iteration before has left of memory that is written?"""
        if buffer.arena not in LASTING or buffer.id not in self.phases:
            return False
        return number <= self.first.get((node.phase, buffer.id), len(self.nodes))

    def _twin(self, node: Node, tensor: Tensor) -> None:
        """Sees to it that a buffer has a twin, and a version for each phase that writes it."""
        buffer = tensor.buffer
        if buffer.id in self.twin_of:
            return
        for phase in self.phases[buffer.id]:
            writes = self.writes[phase, buffer.id]
            if len(writes) != 1 or writes[0].shape != writes[0].extents:
                raise UnsupportedError(
                    f"{node.name} reads {tensor.name or 'memory'} that is later written in parts "
                    "or more than once; in a graph that is split every op writes to memory of its "
                    "own, and one op all of what lasts"
                )
        twin = self._another(buffer)
        self.twin_of[buffer.id] = twin.id
        self.twins[twin.id] = buffer.id
        for number, phase in enumerate(sorted(self.phases[buffer.id])):
            version = self._another(buffer) if number else buffer
            self.versions[version.id] = (twin.id, phase)
            self.version_of[buffer.id, phase] = version

    def _another(self, buffer: Buffer) -> Buffer:
        made = self.made.buffer(buffer.arena, buffer.nbytes, name=buffer.name)
        self.extents[made.id] = self.extents[buffer.id]
        return made

    def _version(self, node: Node, buffer: Buffer) -> Buffer:
        """What the node's phase writes of a buffer. UnsupportedError where several phases write
        memory of which nobody reads what was there.
        """
        if len(self.phases.get(buffer.id, ())) > 1 and buffer.id not in self.twin_of:
            raise UnsupportedError(
                f"{node.name} writes memory that another entry writes too and none reads; in a "
                "graph that is split an entry writes to memory of its own"
            )
        return self.version_of.get((buffer.id, node.phase), buffer)

    def _on(self, tensor: Tensor, buffer: Buffer) -> Tensor:
        if tensor.buffer.id == buffer.id:
            return tensor
        return self._add(dataclasses.replace(tensor, buffer=buffer))

    def _input(self, number: int, node: Node, tensor: Tensor) -> Tensor:
        buffer = tensor.buffer
        if self._reads_before(number, node, buffer):
            tensor = self._on(tensor, self.made.buffers[self.twin_of[buffer.id]])
        elif buffer.id in self.phases:
            tensor = self._on(tensor, self._version(node, buffer))
        if tensor.extents != self.extents[tensor.buffer.id]:
            tensor = self._shaped(node, tensor)
        return tensor

    def _shaped(self, node: Node, tensor: Tensor) -> Tensor:
        """The tensor on a reshaped copy of all of its memory."""
        key = (tensor.buffer.id, tensor.extents, node.phase)
        if key not in self.shaped:
            extents = self.extents[tensor.buffer.id]
            zeros = (0,) * len(extents)
            whole = self._add(
                dataclasses.replace(
                    tensor, shape=extents, extents=extents, offsets=zeros, padded=extents
                )
            )
            made = self.made.tensor(tensor.extents, tensor.dtype, name=tensor.name)
            scope = node.name.rpartition(".")[0]
            self.made.nodes.append(
                Node(
                    len(self.made.nodes),
                    RESHAPE,
                    f"{scope}.{RESHAPE}" if scope else RESHAPE,
                    (whole,),
                    (made,),
                    phase=node.phase,
                )
            )
            self.shaped[key] = made
        return self._add(dataclasses.replace(tensor, buffer=self.shaped[key].buffer))

    def _add(self, tensor: Tensor) -> Tensor:
        made = dataclasses.replace(tensor, id=len(self.made.tensors))
        self.made.tensors.append(made)
        return made
