"""Changes the order of gathered logits, if only sampling reads them: each rank stores its own share
first, then the share of the next rank, and so on in cyclic order.

Then all ranks do the same work, with peers numbered relative to the own rank, so that one plan
serves all ranks (ark.lower.ranks). The sampling op derives from the rank's number to which token
the first logit belongs. Listed in ark.lower.passes.
"""

from __future__ import annotations

import dataclasses

from ark.collective.programs.attributes import program_of
from ark.ir.graph import Graph, Node
from ark.lower.rewrite.context import Context

ONE_SHOT = "one_shot"


def rotate_logits(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which all-gathers of logits for sampling store the rank's own share
    first.
    """
    kept = context.kept
    uses = graph.view.working.touches
    gathers = {n.outputs[0].buffer.id: n for n in graph.nodes if _plain_gather(n)}
    rewritten: set[int] = set()
    for node in graph.nodes:
        logits = node.inputs[0] if node.type == "sample" else None
        gather = gathers.get(logits.buffer.id) if logits is not None else None
        if gather is None or logits is None or uses[logits.buffer.id] != 2:
            continue
        whole = logits.dense and gather.outputs[0].dense
        fits = whole and logits.nbytes == gather.outputs[0].nbytes == logits.buffer.nbytes
        private = logits.buffer.arena == "activation" and logits.buffer.id not in kept
        if fits and private and node.phase == gather.phase:
            rewritten |= {gather.id, node.id}
    world = graph.world_size
    return graph.with_nodes(_rewritten(n, world) if n.id in rewritten else n for n in graph.nodes)


def _plain_gather(node: Node) -> bool:
    program = program_of(node)
    return program is not None and (program.collective.value, program.name) == (
        "all_gather",
        ONE_SHOT,
    )


def _rewritten(node: Node, world: int) -> Node:
    if node.type == "sample":
        return dataclasses.replace(node, attrs={**node.attrs, "shares": world})
    return dataclasses.replace(node, type="all_gather_rotated", attrs={})
