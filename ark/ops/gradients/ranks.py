"""The gradient rules of collectives, as in torch.distributed.nn.

A rank's gradient of a tensor is the gradient of the sum of the outputs of all ranks, not only of
its own outputs. Every rank must request the same gradients in the same order.
"""

from __future__ import annotations

from ark.collective.programs.attributes import CollectiveAttributes
from ark.collective.programs.types import Collective
from ark.ops.communication.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from ark.ops.elementwise import mul, zeros
from ark.ops.gradients.table import Call, Gradients, refuse, rule


@rule("all_reduce")
def _all_reduce(call: Call) -> Gradients:
    given = call.gradient()
    graph = given.model.graph
    return [all_reduce(given, graph.rank, graph.world_size)]


@rule("collective")
def _collective(call: Call) -> Gradients:
    program, given = call.node.read(CollectiveAttributes).program, call.gradient()
    graph = given.model.graph
    rank, world = graph.rank, graph.world_size
    kind, reduction = program.collective, program.reduction
    if reduction not in (None, "sum", "mean"):
        raise refuse(call, f"the input of a reduction by {reduction!r}")
    if reduction == "mean":
        given = mul(given, 1.0 / world)
    if kind is Collective.ALL_REDUCE:
        return [all_reduce(given, rank, world)]
    if kind is Collective.ALL_GATHER:
        return [reduce_scatter(given, rank, world)]
    if kind is Collective.REDUCE_SCATTER:
        return [all_gather(given, rank, world)]
    if kind is Collective.ALL_TO_ALL:
        return [all_to_all(given, rank, world)]
    if kind is Collective.BROADCAST:
        total = all_reduce(given, rank, world)
        return [total if rank == program.root else zeros(given.ir.shape, given.ir.dtype)]
    raise refuse(call, f"the input of a {kind.value}")
