"""`parallelize`: one model in, its graphs on the ranks of a mesh out.

A named plan says by which letters some ops are split (ark.parallel.transform.annotations); what it
leaves open, and all of "auto", is searched for the least predicted time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ark.errors import InvalidUsageError
from ark.frontend.model import Model
from ark.ir.graph import Graph, Node
from ark.machine import Machine
from ark.parallel.plans.choices import Choice, Costs, Option, Rates
from ark.parallel.plans.search import Found, search
from ark.parallel.transform import ParallelGraph, Piece, RankGraphs, materialise
from ark.parallel.transform.materialise import RESULTS

LINK_GBPS = 50.0
UserPlan = Callable[[ParallelGraph], None]
Rule = Callable[[Node, str], bool]


def _weights(node: Node) -> bool:
    """Is it a product with a parameter?"""
    return node.type == "matmul" and any(t.buffer.arena == "parameter" for t in node.inputs)


def _last(node: Node) -> str:
    """The last dimension of a node's result, as a state."""
    return str(len(node.outputs[0].shape) - 1)


def _replicated(node: Node, state: str) -> bool:
    """Every rank computes everything."""
    return state == "R"


def _data(node: Node, state: str) -> bool:
    """Each rank some rows of every result."""
    return state == "0"


def _column(node: Node, state: str) -> bool:
    """Products with parameters by the columns of their result."""
    return state == _last(node) if _weights(node) else True


def _row(node: Node, state: str) -> bool:
    """Products with parameters by what they sum over: partial sums."""
    return state == "V" if _weights(node) else True


def _megatron(node: Node, state: str) -> bool:
    """Products with parameters by columns or as partial sums, the rest whole or by columns.

    What the caller reads is whole on every rank.
    """
    if node.outputs[0].buffer.arena in RESULTS:
        return state == "R"
    return state in ("V" if _weights(node) else "R", _last(node))


def _sequence(node: Node, state: str) -> bool:
    """As megatron, but the rest is split too: what it would do alike on all ranks, by rows."""
    return state in ("V", _last(node)) if _weights(node) else state not in ("R", "V")


def _auto(node: Node, state: str) -> bool:
    """Whatever is fastest."""
    return True


PLANS: dict[str, Rule] = {
    "replicated": _replicated,
    "data": _data,
    "column": _column,
    "row": _row,
    "megatron": _megatron,
    "sequence": _sequence,
    "auto": _auto,
}
"""By name: may a node's result lie so along an axis of the mesh?"""


@dataclass(frozen=True)
class Parallelized:
    """A model on ranks. ranks: their graphs, and what each holds of what the caller fills.

    found: the choices, their predicted time and the parameters' bytes of a rank; None for a plan of
    the user's.
    """

    plan: ParallelGraph
    ranks: RankGraphs
    found: Found | None


def parallelize(
    model: Model | Graph,
    mesh: int | Sequence[int],
    plan: str | Sequence[str] | UserPlan = "auto",
    *,
    machine: Machine | None = None,
    link_gbps: float = LINK_GBPS,
    memory_bytes: int | None = None,
) -> Parallelized:
    """Splits a one-device model over ranks.

    Args:
        model: a model with one entry whose ops write to memory of their own.
        mesh: how many ranks, or how many along each axis; ranks are numbered row by row.
        plan: a name of `PLANS`, for all axes or one an axis; "auto" for the least predicted time;
            or a function that splits and assigns the pieces of a `ParallelGraph`.
        machine: of each rank, for the prediction; a small CPU by default.
        link_gbps: GB/s at which a rank sends, for the prediction.
        memory_bytes: what a rank has for parameters; None: enough.

    Raises:
        InvalidUsageError: no such plan, or a mesh of no ranks. UnsupportedError: a graph that
        cannot be split. PlanError: nothing fits into the memory.
    """
    axes = (mesh,) if isinstance(mesh, int) else tuple(mesh)
    if not axes or any(not isinstance(n, int) or n < 1 for n in axes) or len(axes) > 3:
        raise InvalidUsageError(f"the mesh is {mesh!r}; give 1 to 3 numbers of at least 1")
    graph = model.graph if isinstance(model, Model) else model
    made = ParallelGraph(graph, math.prod(axes))
    if callable(plan):
        plan(made)
        return Parallelized(made, materialise(made), None)
    names = [plan] * len(axes) if isinstance(plan, str) else list(plan)
    unknown = [name for name in names if name not in PLANS]
    if unknown or len(names) != len(axes):
        raise InvalidUsageError(
            f"the plan {plan!r} is none for {len(axes)} axes; give one of {', '.join(PLANS)}, or "
            "one for each axis, or a function"
        )
    if not 0 < link_gbps < math.inf:
        raise InvalidUsageError(f"link_gbps is {link_gbps}; give more than 0")
    flops, bandwidth = (machine.tflops, machine.bandwidth_gbps) if machine else (0.1, 10.0)
    costs = Costs(axes, Rates(flops * 1e6, bandwidth * 1e3, link_gbps * 1e3))
    allowed = {node.id: _allowed(node, costs.options(node), names) for node in made.nodes}
    found = search(made.nodes, allowed, costs, memory_bytes)
    for node in made.nodes:
        _split(made, node, found.choices[node.id], axes)
    return Parallelized(made, materialise(made), found)


def _allowed(node: Node, options: Sequence[Option], names: Sequence[str]) -> list[Option]:
    """The options that each axis' plan allows; where it allows none, the axis splits nothing."""
    kept = list(options)
    for axis, name in enumerate(names):
        able = [o for o in kept if PLANS[name](node, o.output[axis])]
        kept = able or [o for o in kept if o.choice[axis] is None]
    return kept


def _split(plan: ParallelGraph, node: Node, choice: Choice, mesh: Sequence[int]) -> None:
    """Splits a node axis by axis and gives the pieces to the ranks of their coordinates."""
    (whole,) = plan.pieces(node)
    pieces: list[tuple[tuple[int | None, ...], Piece]] = [((), whole)]
    for letter, count in zip(choice, mesh, strict=True):
        if letter is None:
            pieces = [((*at, None), piece) for at, piece in pieces]
        else:
            pieces = [
                ((*at, i), part)
                for at, piece in pieces
                for i, part in enumerate(plan.op_trans(piece, letter, count))
            ]
    for at, piece in pieces:
        ranges = [range(n) if i is None else (i,) for i, n in zip(at, mesh, strict=True)]
        ranks = [int(np.ravel_multi_index(place, tuple(mesh))) for place in product(*ranges)]
        plan.op_assign(piece, *ranks)
