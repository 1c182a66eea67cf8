"""A graph in the form that is split: every operand in one shape, and what lasts apart from what
this iteration writes.

Views make no node, and optimizers write parameters in place. Here a view of another shape becomes
a node `reshape` on a tensor of its own, and a read of memory that the iteration writes later reads
a twin: what the iteration before left. ark.parallel.transform.materialise brings twins up to date.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ark.errors import UnsupportedError
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor

LASTING = ("parameter", "state", "external")
RESHAPE = "reshape"


@dataclass(frozen=True)
class Normal:
    """graph: with the buffers of the one it was made of. twins: by a twin's buffer, the written."""

    graph: Graph
    twins: dict[int, int]


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
        self.first: dict[int, int] = {}
        self.extents: dict[int, tuple[int, ...]] = {}
        self.twins: dict[int, int] = {}
        self.twin_of: dict[int, int] = {}
        self.shaped: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def run(self) -> Normal:
        for number, node in enumerate(self.nodes):
            for out in node.outputs:
                self.first.setdefault(out.buffer.id, number)
                self.extents.setdefault(out.buffer.id, out.extents)
        for node in self.nodes:
            for tensor in node.inputs:
                self.extents.setdefault(tensor.buffer.id, tensor.extents)
        for number, node in enumerate(self.nodes):
            inputs = tuple(self._input(number, node, t) for t in node.inputs)
            self.made.nodes.append(
                dataclasses.replace(node, id=len(self.made.nodes), inputs=inputs)
            )
        return Normal(self.made, self.twins)

    def _input(self, number: int, node: Node, tensor: Tensor) -> Tensor:
        buffer = tensor.buffer
        if number <= self.first.get(buffer.id, -1) and buffer.arena in LASTING:
            tensor = self._before(node, tensor)
        if tensor.extents != self.extents[buffer.id]:
            tensor = self._shaped(node, tensor)
        return tensor

    def _before(self, node: Node, tensor: Tensor) -> Tensor:
        """The tensor on the twin of its memory."""
        buffer = tensor.buffer
        writes = [o for n in self.nodes for o in n.outputs if o.buffer.id == buffer.id]
        if len(writes) != 1 or writes[0].shape != writes[0].extents:
            raise UnsupportedError(
                f"{node.name} reads {tensor.name or 'memory'} that is later written in parts or "
                "more than once; in a graph that is split every op writes to memory of its own, "
                "and one op all of what lasts"
            )
        if buffer.id not in self.twin_of:
            twin = self.made.buffer(buffer.arena, buffer.nbytes, name=buffer.name)
            self.twin_of[buffer.id] = twin.id
            self.twins[twin.id] = buffer.id
            self.extents[twin.id] = self.extents[buffer.id]
        twin = self.made.buffers[self.twin_of[buffer.id]]
        return self._add(dataclasses.replace(tensor, buffer=twin))

    def _shaped(self, node: Node, tensor: Tensor) -> Tensor:
        """The tensor on a reshaped copy of all of its memory."""
        key = (tensor.buffer.id, tensor.extents)
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
