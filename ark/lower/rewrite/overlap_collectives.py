"""Fuses a matmul and the collective before or after it into one node, so that tiles are sent while
others are multiplied (ark.lower.ops.communication.overlapped). The pairs are a matmul and the
all-reduce or reduce-scatter of its result, and an all-gather of rows and the matmul that reads
them.

Two ops are fused only if no other op reads the tensor between them, this tensor is too large for
packets, and the user's call of the collective selects no algorithm or engine. Listed in
ark.lower.passes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ark.collective.programs.attributes import CollectiveAttributes, program_of
from ark.ir.attributes import MatmulAttributes, OverlappedAttributes
from ark.ir.graph import Graph, Node
from ark.ir.graph_view import touched
from ark.ir.values import Buffer, Tensor
from ark.lower.engines import AUTO, ONE_SHOT, PACKET, in_packets, measured
from ark.lower.products import GATHER, SHARE, SUM
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_linear import operands_unchanged
from ark.machine import Machine
from ark.plan.types import MAX_OPERANDS

COLLECTIVES = {SUM: "all_reduce", SHARE: "reduce_scatter", GATHER: "all_gather"}


def overlap_collectives(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which matmuls and collectives are fused, if the option `overlap` is
    set; otherwise the graph itself. Measurements are in docs/history/performance.md.
    """
    machine, options, kept = context.machine, context.options, context.kept
    wanted = bool(options.get("overlap"))
    far = len(set(options.get("hosts") or ())) > 1
    if not wanted or far or graph.world_size == 1 or 2 * graph.world_size >= MAX_OPERANDS:
        return graph
    return _Finder(graph, machine, options, kept).rewritten()


class _Finder:
    def __init__(
        self, graph: Graph, machine: Machine, options: Mapping[str, Any], kept: frozenset[int]
    ) -> None:
        self.graph, self.machine, self.options, self.kept = graph, machine, options, kept
        self.uses, self.writers = graph.view.working.touches, graph.view.working.writers
        self.replaced: dict[int, Node] = {}
        self.replaced_makers: set[int] = set()

    def rewritten(self) -> Graph:
        for node in self.graph.nodes:
            if node.virtual or node.hints:
                continue
            writers = self.writers.get(node.inputs[0].buffer.id) if node.inputs else None
            maker = writers[-1] if writers else None
            if (
                maker is None
                or maker.hints
                or maker.phase != node.phase
                or maker.id in self.replaced_makers
            ):
                continue
            kind = _kind(maker, node)
            if (
                kind
                and self._between(kind, maker, node)
                and operands_unchanged(self.graph, None, maker, node)
            ):
                self.replaced[node.id] = _joined(kind, maker, node)
                self.replaced_makers.add(maker.id)
        left = (n for n in self.graph.nodes if n.id not in self.replaced_makers)
        graph = self.graph.with_nodes(self.replaced.get(n.id, n) for n in left)
        for node in self.replaced.values():
            if node.type == SUM:
                self._open_to_peers(graph, node.outputs[0].buffer, node)
        return graph

    def _between(self, kind: str, maker: Node, node: Node) -> bool:
        """True if `node` reads all of the result of `maker`, no other node accesses this result,
        and it is too large for packets.
        """
        read, produced = node.inputs[0], maker.outputs[0]
        return (
            len(maker.outputs) == 1
            and self.uses[produced.buffer.id] == 2
            and produced.buffer.id not in self.kept
            and produced.buffer.arena == "activation"
            and read.dense
            and produced.dense
            and read.nbytes == produced.nbytes
            and not self._in_packets(kind, read.nbytes)
        )

    def _in_packets(self, kind: str, nbytes: int) -> bool:
        measurement = measured(self.options, self.machine, COLLECTIVES[kind], ONE_SHOT, nbytes)
        return in_packets(self.machine, nbytes) if measurement == AUTO else measurement == PACKET

    def _open_to_peers(self, graph: Graph, buffer: Buffer, node: Node) -> None:
        """Moves the result of a fused all-reduce to symmetric memory, so that peers can write their
        parts of the result directly. Does nothing if the buffer also holds other tensors or if the
        caller accesses it; peers then write to another buffer, from which the parts are copied.
        """
        out = node.outputs[0]
        once = sum(t.buffer.id == buffer.id for n in graph.nodes for t in n.outputs) == 1
        first = next(n for n in graph.nodes if buffer.id in {t.buffer.id for t in touched(n)})
        private = buffer.arena == "activation" and buffer.id not in self.kept
        if not (private and once and first.id == node.id and out.nbytes == buffer.nbytes):
            return
        number = sum(b.name.startswith(f"{SUM}.") and b.rank < 0 for b in graph.buffers)
        opened = graph.buffer("symmetric", buffer.nbytes, -1, f"{SUM}.{number}")

        def moved(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(
                dataclasses.replace(t, buffer=opened) if t.buffer.id == buffer.id else t
                for t in tensors
            )

        graph.nodes = [
            dataclasses.replace(
                n, inputs=moved(n.inputs), outputs=moved(n.outputs), after=moved(n.after)
            )
            for n in graph.nodes
        ]


def _kind(maker: Node, node: Node) -> str:
    """The type of the node into which two neighbours are fused; "" if they are not fused."""
    if _plain_product(maker):
        if node.type == "all_reduce":  # a rank that sums a part does not have peers' residuals
            return "" if node.inputs[1:] else SUM
        if _by_default(node, "reduce_scatter", "sum"):
            return SHARE
    elif _by_default(maker, "all_gather", None) and _plain_product(node):
        rows = (
            maker.outputs[0].shape == node.inputs[0].shape
            and not node.read(MatmulAttributes).transpose_a
        )
        return GATHER if rows and len(maker.inputs[0].shape) == 2 else ""
    return ""


def _plain_product(node: Node) -> bool:
    """True for a product of two matrices without an epilogue."""
    return (
        node.type == "matmul"
        and not node.read(MatmulAttributes).gated
        and node.read(MatmulAttributes).finish is None
        and all(len(t.shape) == 2 for t in (*node.inputs, *node.outputs))
    )


def _by_default(node: Node, collective: str, reduction: str | None) -> bool:
    program = program_of(node)
    return (
        program is not None
        and (program.collective.value, program.name) == (collective, ONE_SHOT)
        and program.reduction == reduction
        and all(o.divide == 1 for ops in program.operations for o in ops)
        and node.read(CollectiveAttributes).engine in ("", AUTO)
    )


def _joined(kind: str, maker: Node, node: Node) -> Node:
    product = node if kind == GATHER else maker
    rows = math.prod(product.outputs[0].shape[:-1])
    attrs = OverlappedAttributes(*product.read(MatmulAttributes).transposes, rows).to_node()
    inputs, name = (*maker.inputs, *node.inputs[1:]), f"{maker.name}.{node.name}"
    placed = dataclasses.replace(node, processors=node.processors or maker.processors)
    return placed.fused(kind, inputs, node.outputs, attrs, (maker, node), name)
