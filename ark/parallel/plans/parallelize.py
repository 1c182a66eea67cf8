"""`parallelize`: converts one model to graphs for the ranks of a mesh.

A named plan determines the letters (ark.parallel.transform.annotations) along which some ops are
split. The remaining choices, or all choices for "auto", are searched for the least predicted time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ark.errors import InvalidUsageError
from ark.frontend.model import Model
from ark.ir.graph import Graph, Node
from ark.machine import Machine
from ark.parallel.pipeline.named import PIPELINES
from ark.parallel.plans.blocks import blocks_of, isomorphic
from ark.parallel.plans.by_name import NAMED, copies_plan, offloaded, pipeline_plan
from ark.parallel.plans.choices import Choice, Costs, Option
from ark.parallel.plans.micro_batches import Pipeline
from ark.parallel.plans.rules import PLANS, allowed, roles_of
from ark.parallel.plans.search import Kept, Memory, Solution, search
from ark.parallel.plans.times import Rates, rates_of
from ark.parallel.plans.work import Whole, shares, whole
from ark.parallel.transform import ParallelGraph, Piece, RankGraphs, materialise
from ark.parallel.transform.materialise import IN_PLACE

LINK_GBPS = 50.0
STAGED = ("gpipe", "1f1b", "interleaved", "zero-bubble")
"""Pipelines whose stages may in turn be split over several ranks."""
UserPlan = Callable[[ParallelGraph], None]


@dataclass(frozen=True)
class Parallelized:
    """A model on ranks.

    ranks: the ranks' graphs, and the part of each external tensor that a rank holds. solution: the
    choices, their predicted time, and the bytes of parameters on a rank; None for a plan of the
    user. work: for each rank, its arithmetic as a fraction of a single device's. whole: the ops
    that several ranks compute redundantly, with their fraction of the work and the reason, the
    largest first.
    """

    plan: ParallelGraph
    ranks: RankGraphs
    solution: Solution | None
    work: tuple[float, ...]
    whole: tuple[Whole, ...]


def parallelize(
    model: Model | Graph,
    mesh: int | Sequence[int],
    plan: str | Sequence[str] | UserPlan = "auto",
    *,
    machine: Machine | None = None,
    link_gbps: float = LINK_GBPS,
    memory_bytes: int | None = None,
    cuts: Mapping[str, int] | None = None,
    micro_batches: int | None = None,
    offload: bool = False,
) -> Parallelized:
    """Splits a one-device model over ranks.

    Args:
        model: a model in which each op writes to memory of its own, or to memory that lasts.
            Several entry points, as in a decoder, are split the same way where they share memory.
        mesh: the number of ranks, or of ranks along each axis; ranks are numbered row by row.
        plan: a name of `PLANS` for all axes, or one name per axis. "auto" is the plan of the least
            predicted time. For a mesh of one axis: also the name of a pipeline, or `zero1`,
            `zero2`, `zero3`, `co-shard` (ark.parallel.plans.by_name). For a mesh of two axes: a
            name of `STAGED` and one of `PLANS` give stages whose ops are split. Or a function that
            splits a `ParallelGraph` into pieces and assigns them.
        machine: of each rank, for the prediction; a small CPU by default.
        link_gbps: GB/s at which a rank sends, for the prediction.
        memory_bytes: the memory of a rank for parameters; None: unlimited.
        cuts: the tensors that differ between the examples of a batch: by the name of the buffer,
            the dimension along which examples are. Plans that copy the model need it, and
            pipelines of graphs whose ops' names mark no stages (ark.parallel.plans.by_name). For
            the plan `interlaced` with such marks, cuts says how the shared layer is cut.
        micro_batches: of a pipeline of a graph without scopes; by default the largest number, up
            to twice the ranks, that divides the batch.
        offload: keep the optimizer's moments in host-mapped memory, under any plan. A rank then
            has no device memory for them; updates read and write them over the host's bus.

    Raises:
        InvalidUsageError: the plan does not exist, or the mesh is not valid. UnsupportedError: the
        graph cannot be split. PlanError: no plan fits into the memory.

    Examples:
        >>> with ark.use_model(ark.Model(0, 1)) as model:
        ...     x, up, down = ark.tensor([8, 16]), ark.tensor([32, 16]), ark.tensor([16, 32])
        ...     y = ark.linear(ark.relu(ark.linear(x, up)), down)
        >>> len(ark.parallelize(model, 2, "megatron").ranks.graphs)
        2
    """
    axes = (mesh,) if isinstance(mesh, int) else tuple(mesh)
    if not axes or any(not isinstance(n, int) or n < 1 for n in axes) or len(axes) > 3:
        raise InvalidUsageError(f"mesh={mesh!r} is not valid; give 1 to 3 numbers of at least 1")
    graph = model.graph if isinstance(model, Model) else model
    graph = offloaded(graph) if offload else graph
    if not 0 < link_gbps < math.inf:
        raise InvalidUsageError(f"link_gbps={link_gbps} must be above 0")
    split = ParallelGraph(graph, math.prod(axes))
    names = [] if callable(plan) else [plan] * len(axes) if isinstance(plan, str) else list(plan)
    rates = rates_of(machine, link_gbps) if machine else Rates(1e5, 1e4, link_gbps * 1e3)
    costs = Costs(axes, rates, nodes=split.nodes)
    if len(names) == 1 and names[0] in NAMED and (cuts or names[0] not in PLANS):
        plan = _by_name(names[0], graph, split.ranks, cuts or {}, costs, micro_batches)
    elif cuts or micro_batches:
        raise InvalidUsageError(
            "cuts and micro_batches are for copies of a model and pipelines along one axis, not "
            f"for {plan!r}; omit them, or pass cuts to ark.parallel.spread"
        )
    if callable(plan):
        plan(split)
        return _written(split, None, axes)
    staged = len(names) == len(axes) == 2 and names[0] in STAGED and names[1] in PLANS
    if staged:  # ops are split over the ranks of one stage only
        first, names, axes = names[0], names[1:], axes[1:]
        costs = Costs(axes, rates, nodes=split.nodes)
    unknown = [name for name in names if name not in PLANS]
    if unknown or len(names) != len(axes):
        raise InvalidUsageError(
            f"the plan {plan!r} does not fit a mesh of {len(axes)} axes; give one of "
            f"{', '.join(PLANS)} for each axis, for a mesh of one axis also one of "
            f"{', '.join(sorted(NAMED - set(PLANS)))}, or a function"
        )
    options = {n.id: costs.options(n, split.carried.get(n.id)) for n in split.nodes}
    roles = roles_of(split.nodes)
    able = {node.id: allowed(roles, node, options[node.id], names) for node in split.nodes}
    kept = _kept(split)
    _agree(kept, able, options)
    memory = None if memory_bytes is None else Memory(memory_bytes)
    like = isomorphic(blocks_of(split.nodes))
    solution = search(split.nodes, able, costs, memory, like, kept)
    for node in split.nodes:
        pieces = _split(split, node, solution.choices[node.id], axes)
        for at, piece in () if staged else pieces:
            split.op_assign(piece, *_ranks_at(at, axes))
    if staged:
        pipeline_plan(first, graph, _pipeline(first, {}, costs, None, axes[0]))(split)
    return _written(split, solution, axes)


def _written(split: ParallelGraph, solution: Solution | None, axes: Sequence[int]) -> Parallelized:
    return Parallelized(split, materialise(split), solution, shares(split), whole(split, axes))


def _by_name(
    name: str,
    graph: Graph,
    ranks: int,
    cuts: Mapping[str, int],
    costs: Costs,
    micro_batches: int | None,
) -> UserPlan:
    """The plan with the given name, which is the name of a pipeline or of a kind of copies of the
    model.
    """
    if name in PIPELINES:
        return pipeline_plan(name, graph, _pipeline(name, cuts, costs, micro_batches))
    if micro_batches is not None:
        raise InvalidUsageError(f"micro_batches is for pipelines, not for {name!r}; omit it")
    return copies_plan(name, graph, ranks, cuts)


def _pipeline(
    name: str, cuts: Mapping[str, int], costs: Costs, micro_batches: int | None, width: int = 1
) -> Pipeline:
    def load(node: Node) -> float:
        return min(o.us for o in costs.options(node))

    rate = costs.rates.link_bytes_per_us
    return Pipeline(name, cuts, micro_batches, load, rate, width)


def _kept(plan: ParallelGraph) -> list[Kept]:
    """The memory that ops update in place. For each such buffer, the ops that read or write it, in
    all entry points.
    """
    users: dict[int, list[tuple[int, int | None]]] = {}
    for node in plan.nodes:
        uses = [*enumerate(node.inputs), *((None, t) for t in node.outputs)]
        for at, tensor in uses:
            buffer = tensor.buffer.id
            twin = plan.versions[buffer][0] if buffer in plan.versions else buffer
            if twin in plan.twins:
                users.setdefault(twin, []).append((node.id, at))
    ops = {node.id: node.type for node in plan.nodes}
    return [one for one in users.values() if any(ops[i] in IN_PLACE for i, _ in one)]


def _agree(
    kept: Sequence[Kept], able: dict[int, list[Option]], options: Mapping[int, Sequence[Option]]
) -> None:
    """Makes the writers and readers of a buffer use it in one layout. kept: the users of each
    buffer that ops update in place. If there is no layout that the plan allows for all users of a
    buffer, these users keep only the option that splits nothing.
    """
    for users in kept:
        states = [
            {o.output if at is None else o.inputs[at] for o in able[node]} for node, at in users
        ]
        if not set.intersection(*states):
            for node, _ in users:
                able[node] = [o for o in options[node] if not any(o.choice)]


Place = tuple[int | None, ...]
"""The coordinate of a piece of an op along each axis of the mesh; None if all ranks of the axis
compute the piece.
"""


def _split(
    plan: ParallelGraph, node: Node, choice: Choice, mesh: Sequence[int]
) -> list[tuple[Place, Piece]]:
    """Splits a node along each axis of the mesh, as `choice` states. Returns the pieces with their
    coordinates in the mesh.
    """
    (whole,) = plan.pieces(node)
    pieces: list[tuple[Place, Piece]] = [((), whole)]
    for letter, count in zip(choice, mesh, strict=True):
        if letter is None:
            pieces = [((*at, None), piece) for at, piece in pieces]
        else:
            pieces = [
                ((*at, i), part)
                for at, piece in pieces
                for i, part in enumerate(plan.op_trans(piece, letter, count))
            ]
    return pieces


def _ranks_at(at: Place, mesh: Sequence[int]) -> list[int]:
    """The ranks that compute a piece with these coordinates in the mesh."""
    ranges = [range(n) if i is None else (i,) for i, n in zip(at, mesh, strict=True)]
    return [int(np.ravel_multi_index(place, tuple(mesh))) for place in product(*ranges)]
