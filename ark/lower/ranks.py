"""The plans of all ranks of a model. Ranks that do the same are planned once.

Two ranks do the same if their graphs are equal and no op's lowering depends on the rank but by
counting peers from it: then every rank's tasks are another's with the peers renamed. Called by
ark.models.generate and benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ark.ir.graph import Graph
from ark.lower import registry
from ark.lower.pipeline import Prepared, plan_prepared, prepare
from ark.machine import Machine
from ark.plan.rotated import Rotated
from ark.plan.types import Plan


def plan_ranks(
    graphs: Sequence[Graph],
    machine: Machine,
    options: Mapping[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
    drafted: Callable[[int, Plan], None] | None = None,
) -> Sequence[Plan]:
    """The plans of all ranks, in rank order, not verified. graphs: one a rank; options: as for
    ark.lower.pipeline.plan. drafted: as there, for each rank; the plan is that rank's or one that
    ark.plan.rotated.on_rank makes it of.
    """
    first, *others = graphs
    prepared = prepare(first, machine, options)
    if (
        others
        and all(_isomorphic(first, other) for other in others)
        and _counts_from_itself(prepared)
    ):
        return Rotated(plan_prepared(prepared, meta, _for_all(drafted, len(graphs))))
    each = [prepared, *(prepare(other, machine, options) for other in others)]
    tell = [partial(drafted, rank) if drafted else None for rank in range(len(graphs))]
    return [plan_prepared(p, meta, told) for p, told in zip(each, tell, strict=True)]


def _for_all(
    drafted: Callable[[int, Plan], None] | None, world: int
) -> Callable[[Plan], None] | None:
    """Tells of one plan for each rank."""
    if drafted is None:
        return None

    def tell(plan: Plan) -> None:
        for rank in range(world):
            drafted(rank, plan)

    return tell


def _counts_from_itself(prepared: Prepared) -> bool:
    nodes = (n for n in prepared.graph.nodes if not n.virtual)
    return not any(registry.get(n.type).names_ranks for n in nodes)


def _isomorphic(a: Graph, b: Graph) -> bool:
    """Are two ranks' graphs the same?"""
    return {**vars(a), "rank": 0} == {**vars(b), "rank": 0}
