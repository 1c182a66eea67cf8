"""Creates the plans of all ranks of a model. If all ranks do the same work, one plan is computed
and the others are derived from it.

Ranks do the same work if their graphs are equal and the lowering of every op numbers peers relative
to its own rank. Then the tasks of a rank are those of another rank with the peers renumbered. One
difference is allowed: if every rank stores all of a parameter and reads a part of it, the offset of
the part may grow by a fixed step from rank to rank. Called by ark.models.plans and benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ark.ir.graph import Graph
from ark.ir.values import Tensor
from ark.lower import registry
from ark.lower.pipeline import plan_prepared, unscheduled
from ark.lower.prepare import Prepared, prepare
from ark.machine import Machine
from ark.plan.rotated import Moved, Rotated, on_rank
from ark.plan.types import Plan


def plan_ranks(
    graphs: Sequence[Graph],
    machine: Machine,
    options: Mapping[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
    drafted: Callable[[int, Plan], None] | None = None,
) -> Sequence[Plan]:
    """The plans of all ranks, in rank order. They are not verified here. graphs: one per rank.
    options: see ark.lower.pipeline.plan. drafted: a function that is called for each rank, with the
    rank and a plan that is not scheduled yet (see plan_prepared). It is the rank's own plan, or the
    plan from which ark.plan.rotated.on_rank derives it.
    """
    first, *others = graphs
    prepared = prepare(first, machine, options)
    if others and _counts_from_itself(prepared):
        moved = _moved(graphs, prepared, machine)
        if moved is not None:
            drafts = plan_prepared(prepared, meta, _for_all(drafted, len(graphs)))
            return Rotated(drafts, moved)
    each = [prepared, *(prepare(other, machine, options) for other in others)]
    tell = [partial(drafted, rank) if drafted else None for rank in range(len(graphs))]
    return [plan_prepared(p, meta, symmetry) for p, symmetry in zip(each, tell, strict=True)]


def _for_all(
    drafted: Callable[[int, Plan], None] | None, world: int
) -> Callable[[Plan], None] | None:
    """A function of one plan that calls `drafted` with this plan for every rank; None if `drafted`
    is None.
    """
    if drafted is None:
        return None

    def tell(plan: Plan) -> None:
        for rank in range(world):
            drafted(rank, plan)

    return tell


def _counts_from_itself(prepared: Prepared) -> bool:
    nodes = (n for n in prepared.graph.nodes if not n.virtual)
    return not any(registry.get(n.type).names_ranks for n in nodes)


def _moved(graphs: Sequence[Graph], prepared: Prepared, machine: Machine) -> Moved | None:
    """If all ranks do the same work, returns the tensors whose offsets differ between ranks, each
    with the difference of the offset from one rank to the next. Returns None if the ranks do
    different work, so that their plans cannot be derived from one plan.
    """
    first, second, *others = graphs
    steps = _steps(first, second)
    if steps is None:
        return None
    for rank, other in enumerate(others, 2):
        further = {t: tuple(rank * s for s in step) for t, step in steps.items()}
        if _steps(first, other) != further:
            return None
    if not steps:
        return {}
    # The lowering may view a tensor in other dimensions, in which its offsets are different
    # numbers. So the difference between neighbouring ranks is computed from the lowered plans of
    # two ranks.
    mine = unscheduled(prepared)
    theirs = unscheduled(prepare(second, machine, prepared.options))
    if len(mine.tensors) != len(theirs.tensors):
        return None
    pairs = zip(mine.tensors, theirs.tensors, strict=True)
    moved = {
        a.id: tuple(n - o for o, n in zip(a.offsets, b.offsets, strict=True))
        for a, b in pairs
        if a.offsets != b.offsets and len(a.offsets) == len(b.offsets)
    }
    return moved if on_rank(mine, 1, moved) == theirs else None


def _steps(a: Graph, b: Graph) -> dict[int, tuple[int, ...]] | None:
    """The differences between the graphs of two ranks: by tensor id, the difference of the offsets
    of views of parameters. Only parameters that no op writes may have different offsets. None if
    the graphs differ in anything else.
    """
    written = {t.buffer.id for n in a.nodes if not n.virtual for t in n.outputs}
    steps: dict[int, tuple[int, ...]] = {}
    for mine, theirs in zip(a.tensors, b.tensors, strict=False):
        constant = mine.buffer.arena == "parameter" and mine.buffer.id not in written
        if constant and mine.offsets != theirs.offsets and len(mine.shape) == len(theirs.shape):
            ends = zip(mine.offsets, theirs.offsets, strict=True)
            steps[mine.id] = tuple(end - begin for begin, end in ends)

    def back(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if steps.keys().isdisjoint(t.id for t in tensors):
            return tensors
        return tuple(
            replace(t, offsets=tuple(o - s for o, s in zip(t.offsets, steps[t.id], strict=True)))
            if t.id in steps
            else t
            for t in tensors
        )

    nodes = [
        replace(n, inputs=back(n.inputs), outputs=back(n.outputs), after=back(n.after))
        for n in b.nodes
    ]
    tensors = list(back(tuple(b.tensors)))
    own = {**a.state(), "rank": 0}
    same = own == {**b.state(), "rank": 0, "nodes": nodes, "tensors": tensors}
    return steps if same else None
