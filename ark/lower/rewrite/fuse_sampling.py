"""Fuses the search for the largest logits into the linear layer that computes them. Each task of
the layer stores its best candidates, and sampling chooses among the candidates only.

If each rank computes a share of the logits, the layer's tasks also send their logits and candidates
to every rank. The all-gather of logits is then removed, and one task waits for all shares. Listed
in ark.lower.passes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from msgspec import structs

from ark.backend.codegen.layout import RECORD_OPERANDS
from ark.ir.attributes import LinearAttributes
from ark.ir.dtype import fp32
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.context import Context
from ark.machine.variant import COMMUNICATE
from ark.tasks.linear_form import MATRIX_ROWS, MAX_UNIT_INPUT_ROWS, layer_tiles, narrow_rows

CHOOSE = {"sample": "choose", "sample_each": "choose_each"}


def fuse_sampling(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which layers that compute logits also search for the best candidates;
    the graph itself if no layer can.

    The tasks of such a layer read the token position before they wait for other tasks, so an
    earlier node of the phase must not have advanced the position.
    """
    rewritten = graph.with_nodes(graph.nodes)
    advanced: set[int] = set()  # phases whose position has advanced
    dropped: set[int] = set()  # indices of gathers that are replaced
    exchanges = 0
    before: list[int] = []  # indices of the last two nodes that have tasks
    for place, node in enumerate(graph.nodes):
        if node.type in CHOOSE and node.phase not in advanced and before:
            *others, last = before
            layer = graph.nodes[last]
            if _samples(layer, node, context):
                rewritten.nodes[last], rewritten.nodes[place] = _sampling(
                    rewritten, layer, node, context
                )
            elif others and _gives(graph, graph.nodes[others[-1]], layer, node, context):
                name = f"logits.{exchanges}"
                layer = graph.nodes[others[-1]]
                rewritten.nodes[others[-1]], rewritten.nodes[place] = _giving(
                    rewritten, layer, node, context, name
                )
                dropped.add(last)
                exchanges += 1
        if node.type == "advance":
            advanced.add(node.phase)
        if not node.virtual:
            before = [*before[-1:], place]
    if all(n is m for n, m in zip(graph.nodes, rewritten.nodes, strict=True)):
        return graph
    return rewritten.with_nodes(
        n for place, n in enumerate(rewritten.nodes) if place not in dropped
    )


def _makes(layer: Node, logits: Tensor, reader: Node) -> bool:
    """True if `layer` is a linear layer whose only result is the tensor `logits`, and runs in
    the same phase and on the same processors as the node that reads it.
    """
    return (
        layer.type == "linear"
        and layer.read(LinearAttributes).epilogue == "store"
        and [t.id for t in layer.outputs] == [logits.id]
        and (layer.phase, layer.processors) == (reader.phase, reader.processors)
        and not reader.after
    )


def _samples(layer: Node, node: Node, context: Context) -> bool:
    """True if the layer computes the logits that the sampling node reads, and the machine has a
    device function for this layer that also searches for the best candidates.
    """
    if not _makes(layer, node.inputs[0], node):
        return False
    (x, weight), machine = layer.inputs[:2], context.machines[node.phase]
    if x.shape[0] == 1:
        return True
    held, splits, _ = layer_tiles(layer, machine)
    return (
        machine.variant.role(COMMUNICATE) > 0
        and not layer.read(LinearAttributes).bias
        and x.shape[0] <= MAX_UNIT_INPUT_ROWS
        and narrow_rows(x.shape[0], weight, splits)
        and held in MATRIX_ROWS
    )


def _sampling(graph: Graph, layer: Node, node: Node, context: Context) -> tuple[Node, Node]:
    """The nodes that replace a layer and a sampling node: the layer, which also stores its best
    candidates, and a node that chooses among the candidates.
    """
    tiles = len(layer_tiles(layer, context.machines[node.phase])[2])
    rows = tiles * node.inputs[0].shape[0]
    candidates = graph.tensor((rows, 2), fp32, name=f"{node.name}.candidates")
    finding = dataclasses.replace(
        layer,
        inputs=(*layer.inputs, *node.inputs[1:3]),
        outputs=(*layer.outputs, candidates),
        attrs=_finding(layer, tiles=tiles),
    )
    return finding, _choosing(node, node.inputs[0], candidates, {**node.attrs, "tiles": tiles})


def _finding(layer: Node, **more: Any) -> dict[str, Any]:
    """The attributes of a linear layer that also stores the candidates among its logits."""
    given = layer.read(LinearAttributes)
    return structs.replace(given, epilogue="sample", **more).to_node()


def _choosing(node: Node, logits: Tensor, candidates: Tensor, attrs: dict[str, Any]) -> Node:
    return dataclasses.replace(
        node,
        type=CHOOSE[node.type],
        name=f"{node.name}.choose",
        inputs=(logits, *node.inputs[1:3], candidates, *node.inputs[3:]),
        attrs=attrs,
    )


def _gives(graph: Graph, layer: Node, gather: Node, node: Node, context: Context) -> bool:
    """True if the layer that computes logits can send its share of them to all ranks, so that
    the all-gather is not needed. All ranks must be on one host and begin iterations together, and a
    task's record must have room for the addresses on all peers.
    """
    if (gather.type, node.type) != ("all_gather_rotated", "sample"):
        return False
    share, world = gather.inputs[0], graph.world_size
    uses = sum(share.buffer.id in {t.buffer.id for t in n.inputs} for n in graph.nodes)
    return (
        _makes(layer, share, gather)
        and node.inputs[0].buffer.id == gather.outputs[0].buffer.id
        and not context.alone
        and len(set(context.options.get("hosts") or ())) <= 1
        and share.shape[0] == 1
        and share.dtype == fp32
        and share.buffer.arena == "activation"
        and share.buffer.id not in context.kept
        and uses == 1
        and len(layer.inputs) + 4 + 2 * (world - 1) <= RECORD_OPERANDS
    )


def _giving(
    graph: Graph, layer: Node, node: Node, context: Context, name: str
) -> tuple[Node, Node]:
    """The nodes that replace a layer, the all-gather of its logits and the sampling node: the
    layer, which sends logits and candidates to each rank, and a node that waits for the shares of
    all ranks and chooses. In both, the rank's own share comes first.
    """
    rank, world, share = graph.rank, graph.world_size, layer.outputs[0]
    tiles = len(layer_tiles(layer, context.machines[node.phase])[2])

    def places(size: tuple[int, int], axis: int, label: str) -> list[Tensor]:
        """The tensors to which this rank writes its part of a tensor that every rank holds: the
        part in its own memory first, then the part in the memory of each peer.
        """
        parts = []
        for step in range(world):
            peer = (rank + step) % world if step else -1
            whole = tuple(n * world if d == axis else n for d, n in enumerate(size))
            tensor = graph.tensor(whole, fp32, arena="symmetric", rank=peer, name=f"{name}.{label}")
            at = tuple((world - step) % world * n if d == axis else 0 for d, n in enumerate(size))
            parts.append(dataclasses.replace(tensor, shape=size, offsets=at, padded=size))
        return parts

    def all_ranks(part: Tensor) -> Tensor:
        whole = part.extents
        return dataclasses.replace(
            part, shape=whole, offsets=(0, 0), padded=whole, name=part.buffer.name
        )

    own, *logits = places((1, share.shape[1]), 1, "all")
    best, *candidates = places((tiles, 2), 0, "best")
    own = dataclasses.replace(own, name=share.name)
    peers = (t for pair in zip(logits, candidates, strict=True) for t in pair)
    giving = dataclasses.replace(
        layer,
        inputs=(*layer.inputs, *node.inputs[1:3]),
        outputs=(own, best, *peers),
        attrs=_finding(layer, tiles=tiles, shares=world, share=rank, counter=name),
    )
    given = {"tiles": tiles * world, "shares": world, "counter": name, "signals": tiles}
    return giving, _choosing(node, all_ranks(own), all_ranks(best), given)
