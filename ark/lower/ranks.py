"""The plans of all ranks of a model. Ranks that do the same are planned once.

Two ranks do the same if their graphs are equal and no op's lowering depends on the rank but by
counting peers from it: then every rank's tasks are another's with the peers renamed. Called by
ark.models.generate and benchmarks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ark.ir.graph import Graph
from ark.lower import registry
from ark.lower.pipeline import Prepared, plan, plan_prepared, prepare
from ark.machine import Machine
from ark.plan.rotated import Rotated
from ark.plan.types import Plan


def plan_ranks(
    graphs: Sequence[Graph],
    machine: Machine,
    options: Mapping[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Sequence[Plan]:
    """The plans of all ranks, in rank order, not verified. graphs: one a rank; options: as for
    ark.lower.pipeline.plan.
    """
    first, *others = graphs
    if others and all(_alike(first, other) for other in others):
        prepared = prepare(first, machine, options)
        if _counts_from_itself(prepared):
            return Rotated(plan_prepared(prepared, meta))
    return [plan(graph, machine, options, meta) for graph in graphs]


def _counts_from_itself(prepared: Prepared) -> bool:
    nodes = (n for n in prepared.graph.nodes if not n.virtual)
    return not any(registry.get(n.type).names_ranks for n in nodes)


def _alike(a: Graph, b: Graph) -> bool:
    """Are two ranks' graphs the same?"""
    return {**vars(a), "rank": 0} == {**vars(b), "rank": 0}
