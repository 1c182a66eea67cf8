"""Removes the all-reduce of a single row, as in a decoder on several ranks. The linear layer before
the all-reduce writes its rank's addend ("share") as packets into a receive buffer of every rank.
Each op that reads the sum adds the shares of all ranks as it loads them, in rank order. The first
rank's share includes the residual. Listed in ark.lower.passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from msgspec import structs

from ark.backend.codegen.layout import RECORD_OPERANDS
from ark.ir.attributes import LinearAttributes
from ark.ir.dtype import fp32
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.pack_weights import writes
from ark.machine.capability import Capability
from ark.machine.variant import COMMUNICATE

LINEAR_ADD_OPERANDS = 4  # input, weight, residual and output; each further rank adds an output


def inline_all_reduce(graph: Graph, context: Context) -> Graph:
    """A copy of the graph without the all-reduces that can be inlined. The new graph's `received`
    has the ids of the buffers that hold shares as packets.

    An all-reduce is inlined under two conditions. A linear layer computes this rank's share, a row
    of fp32, for this all-reduce only. All readers of the result can add shares: they are linear
    layers of one row, or further inlined all-reduces that use the result as their residual.
    """
    machine, options, kept = context.machine, context.options, context.kept
    gated = machine.variant.role(COMMUNICATE) > 0
    packed = machine.has(Capability.PACKETS) and options.get("packets", True)
    far = len(set(options.get("hosts") or ())) > 1
    if far or graph.world_size == 1 or not packed or (machine.ring_bytes and not gated):
        return graph
    most = machine.costs.polled_elements if gated else machine.costs.packet_elements
    finder = _Finder(graph, most, kept)
    chosen = finder.choose()
    if not chosen:
        return graph
    replaced: dict[int, Node] = {}
    shares: dict[int, Tensor] = {}  # by the id of the sum that the shares replace
    buffers = []
    for number, node in enumerate(chosen):
        maker = finder.makers[node.inputs[0].id]
        every, outputs = _receive(graph, node, number)
        buffers += [t.buffer.id for t in outputs]
        shares[node.outputs[0].id] = every
        replaced[maker.id] = dataclasses.replace(
            maker,
            inputs=(*maker.inputs, *node.inputs[1:]),
            outputs=outputs,
            attrs=structs.replace(
                maker.read(LinearAttributes), epilogue="add" if len(node.inputs) > 1 else "store"
            ).to_node(),
        )
    removed = {n.id for n in chosen}
    order = {"ranks": graph.world_size, "first": -graph.rank % graph.world_size}
    nodes = []
    for node in graph.nodes:
        if node.id in removed:
            continue
        touched = node.id in replaced or any(t.id in shares for t in node.inputs)
        node = replaced.get(node.id, node)
        inputs = tuple(shares.get(t.id, t) for t in node.inputs)
        attrs = {**node.attrs, **order} if touched else node.attrs
        nodes.append(dataclasses.replace(node, inputs=inputs, attrs=attrs))
    inlined = graph.with_nodes(nodes)
    inlined.received = graph.received | frozenset(buffers)
    return inlined


def _receive(graph: Graph, node: Node, number: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The tensors that replace the result of an all-reduce. The first one, (ranks, n), is the
    receive buffer on this rank: row 0 is this rank's own share, followed by the shares of the next
    ranks in cyclic order. The tuple has the tensors to which this rank writes its share: in its own
    receive buffer and in that of each peer.
    """
    world, columns = graph.world_size, node.outputs[0].shape[1]
    name = f"shares.{node.phase}.{number}"
    rows = []
    for step in range(world):
        peer = (graph.rank + step) % world if step else -1
        buffer = graph.tensor((world, columns), fp32, arena="symmetric", rank=peer, name=name)
        row, shape = (world - step) % world, (1, columns)
        rows.append(dataclasses.replace(buffer, shape=shape, offsets=(row, 0), padded=shape))
    every = dataclasses.replace(rows[0], shape=(world, columns), padded=(world, columns))
    return every, tuple(rows)


class _Finder:
    def __init__(self, graph: Graph, limit: int, kept: frozenset[int]) -> None:
        self.graph, self.limit, self.kept = graph, limit, kept
        view = graph.view
        self.makers, self.reads, self.readers = view.makers, view.reads, view.readers
        self.writers = view.writers

    def choose(self) -> list[Node]:
        """The all-reduces to inline, in program order. It is the largest set for which all readers
        of the results can add shares.
        """
        candidates = {n.id: n for n in self.graph.nodes if n.type == "all_reduce" and self._fits(n)}
        while True:
            bad = [
                i
                for i, n in candidates.items()
                if not all(self._reads(r, n, candidates) for r in self.readers[n.outputs[0].id])
            ]
            if not bad:
                return [candidates[i] for i in sorted(candidates)]
            for i in bad:
                del candidates[i]

    def _fits(self, node: Node) -> bool:
        """True if an all-reduce of one row can be inlined: a linear layer computes this rank's
        share, and the residual is already computed when the layer runs.
        """
        share, out = node.inputs[0], node.outputs[0]
        maker = self.makers.get(share.id)
        world = self.graph.world_size
        if (
            maker is None
            or maker.type != "linear"
            or maker.read(LinearAttributes).epilogue != "store"
        ):
            return False
        plain = all(
            t.dtype == fp32
            and t.shape == out.shape
            and t.dense
            and t.nbytes == t.buffer.nbytes
            and t.buffer.arena == "activation"
            and t.buffer.id not in self.kept
            for t in (*node.inputs, out)
        )
        once = all(len(self.writers[t.buffer.id]) == 1 for t in (share, out))
        alone = once and self.reads[share.buffer.id] == 1 and len(maker.outputs) == 1
        same_lists = (maker.phase, maker.processors) == (node.phase, node.processors)
        read = world * out.shape[-1] <= self.limit
        room = LINEAR_ADD_OPERANDS + world - 1 <= RECORD_OPERANDS
        bare = not node.after and not self.graph.depends(out)
        one = len(out.shape) == 2 and out.shape[0] == 1
        fine = plain and alone and same_lists and read and room and bare and one
        return fine and all(self._held(t, maker, node) for t in node.inputs[1:])

    def _held(self, residual: Tensor, maker: Node, node: Node) -> bool:
        """True if the residual is written before the linear layer `maker` runs, and not changed
        between the layer and the all-reduce.
        """
        source = self.makers.get(residual.id)
        between = (n for n in self.graph.nodes if maker.id <= n.id < node.id)
        return (
            source is not None
            and source.id < maker.id
            and not any(residual.buffer.id in writes(n) for n in between)
        )

    def _reads(self, reader: Node, node: Node, candidates: Mapping[int, Node]) -> bool:
        """True if the reader can add the shares of all ranks itself instead of reading the
        all-reduce's result.
        """
        out = node.outputs[0]
        if self.reads[out.buffer.id] != len(self.readers[out.id]) or reader.phase != node.phase:
            return False
        first = reader.inputs[0].id == out.id
        if reader.type == "linear":
            return first and reader.inputs.count(out) == 1
        return reader.id in candidates and not first
