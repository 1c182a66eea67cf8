"""Lowers a graph node by node, in program order, with the lowering function of each op. Called by
ark.lower.pipeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ark.errors import PlanError
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.log import about
from ark.lower import registry
from ark.lower.context import Lowering
from ark.lower.registry import Aliasing
from ark.lower.siblings import shares
from ark.machine import Machine
from ark.plan.groups import Group


def begins_alone(graph: Graph) -> bool:
    """True if a rank may begin its next iteration before its peers have ended the current one.
    Additional waits then keep data from being overwritten before a peer has read it.

    All ranks of a model get the same result, because an op that requires all ranks to begin
    iterations together is in the graphs of all ranks.
    """
    nodes = [n for n in graph.nodes if not n.virtual]
    lockstep = any(registry.get(n.type).iteration_barrier for n in nodes)
    lockstep = lockstep or any(b.arena == "symmetric" for b in graph.buffers)
    return graph.world_size > 1 and not lockstep


def meets_peers(graph: Graph) -> bool:
    """True if the graph has an op in which all ranks take part, such as an all-reduce."""
    return any(registry.get(n.type).all_ranks for n in graph.nodes if not n.virtual)


def lower_nodes(
    graph: Graph, machines: Sequence[Machine], options: Mapping[str, Any], alone: bool
) -> list[Group]:
    """The groups of tasks of all nodes, in program order. graph: a private copy, to which temporary
    tensors are added. machines: one for each phase. alone: True if the rank may begin iterations
    without its peers.
    """
    lowering = Lowering(graph, machines[0], options, alone)
    for node, share in zip(list(graph.nodes), shares(graph.nodes), strict=True):
        if node.virtual:
            continue
        lowering.share = share
        lowering.node, lowering.machine = node, machines[node.phase]
        about(f"phase {graph.phases[node.phase]}")
        op = registry.get(node.type)
        lowering.cut = False
        if op.aliasing == "any":
            op.lower(lowering, node)
            _followed(lowering, node)
            continue
        private, moves = _break_aliasing(lowering, node, op.aliasing)
        op.lower(lowering, private)
        _followed(lowering, node)
        for source, target in moves:
            registry.get("copy").lower(
                lowering,
                dataclasses.replace(
                    node, type="copy", inputs=(source,), outputs=(target,), attrs={}, hints=None
                ),
            )
    return lowering.groups


def _followed(lowering: Lowering, node: Node) -> None:
    """Raises PlanError if the user's hints for the node set a tile, but the tasks that its lowering
    has emitted do not have this tile.
    """
    asked = node.hints is not None and (node.hints.tile or node.hints.tasks)
    if asked and not lowering.cut:
        raise PlanError(
            f"op {node.name!r}: the tasks of {node.type} are not tiles of its result, so Tile and "
            "NumTasks are not supported; remove them from its configuration"
        )


def _break_aliasing(
    lowering: Lowering, node: Node, aliasing: Aliasing
) -> tuple[Node, list[tuple[Tensor, Tensor]]]:
    """Replaces outputs of a node that share memory with an input by temporary tensors. Returns the
    changed node, and pairs (temporary, output) that must be copied afterwards.

    Tasks of one op run in any order, so a task must not overwrite an element that another task
    still reads. No temporary is needed if an output is exactly the memory of an input, and each
    output element depends only on the input elements at the same position. aliasing: "exact" if all
    inputs of the op are read in this way, "first" if only the first input is.
    """
    safe = {"exact": len(node.inputs), "first": 1}.get(aliasing, 0)
    outputs, moves = [], []
    for out in node.outputs:
        aliased = any(
            t.buffer.id == out.buffer.id and not (i < safe and _same_place(t, out))
            for i, t in enumerate(node.inputs)
        )
        if aliased:
            temp = lowering.temp(out.shape, out.dtype, f"{node.name}.unaliased")
            moves.append((temp, out))
            out = temp
        outputs.append(out)
    return dataclasses.replace(node, outputs=tuple(outputs)), moves


def _same_place(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.extents, a.offsets, a.dtype) == (b.shape, b.extents, b.offsets, b.dtype)
