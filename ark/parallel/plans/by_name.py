"""Named plans that follow from how a graph is written: pipelines and ZeRO's copies, for
`parallelize`.

A pipeline reads the scopes of ops: `f0-3` is the forward pass of micro-batch 3 through stage 0,
`b0-3` its backward pass, `g` and `h` earlier passes (3F1B), `fin-3` and `bin-3` the layer that all
ranks share (interlaced), `u0` the update of stage 0's parameters. Without such scopes the graph is
one micro-batch, and its layers are divided into stages of about equal time. Copies of a model read
`cuts`, which names the tensors that differ between examples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ark.errors import InvalidUsageError, ModelError
from ark.ir.graph import Graph, Node
from ark.parallel.pipeline import Schedule
from ark.parallel.pipeline.named import PIPELINES, STAGES_PER_DEVICE, list_schedule, named
from ark.parallel.plans.blocks import blocks_of
from ark.parallel.plans.pipelined import pipelined
from ark.parallel.plans.prediction import COPIES
from ark.parallel.plans.spread import spread
from ark.parallel.plans.stages import partition
from ark.parallel.transform import ParallelGraph

UserPlan = Callable[[ParallelGraph], None]
SCOPE = re.compile(r"([a-z])([0-9]+|in)-([0-9]+)\.|u([0-9]+)\.")
SHARED = "in"  # the block on all ranks
CO_SHARD_PARTS = 2  # of a rank's work, computed one after the other (co-shard)
Place = tuple[str, int] | list[int]
"""A block's name and its micro-batch, or the stages whose parameters an op updates."""


def place_of(node: Node) -> Place:
    """The block of a node, from its first scope; raises ModelError if it names none."""
    match = SCOPE.match(node.name)
    if not match:
        raise ModelError(
            f"{node.name} has no pipeline scope, but other ops have; put it in a scope such as "
            "f0-3 (forward, stage 0, micro-batch 3), b0-3 (back) or u0 (update)"
        )
    way, stage, number, updated = match.groups()
    return [int(updated)] if updated is not None else (f"{way}{stage}", int(number))


def pipeline_plan(
    name: str, cuts: Mapping[str, int], loads: Callable[[Node], float], width: int = 1
) -> UserPlan:
    """A pipeline of that name over the stages and micro-batches of a graph.

    cuts: as in `spread`, for the layer that all ranks share. loads: the approximate time of an op,
    used if stages are not written down. width: ranks of a stage, which are neighbours; an op that
    has been split into `width` pieces is shared by them, any other op is computed by each.

    The plan raises ModelError for ops in no block, InvalidUsageError if the number of micro-batches
    or layers does not fit the pipeline.
    """

    def plan(graph: ParallelGraph) -> None:
        long = graph.ranks // width
        stages = long * (STAGES_PER_DEVICE if name == "interleaved" else 1)
        if any(SCOPE.match(node.name) for node in graph.nodes):
            places = {node.id: place_of(node) for node in graph.nodes}
        else:
            places = _dealt(graph.nodes, stages, loads)
        blocks = [place for place in places.values() if isinstance(place, tuple)]
        count = 1 + max((number for _, number in blocks), default=0)
        pairs = 2 if name == "chimera" else 1
        if count % pairs:
            raise InvalidUsageError(
                "chimera sends half of the micro-batches from either end, but their number "
                f"{count} is odd; use an even number"
            )
        handing = _handing(graph.nodes, places) if name == "zero-bubble" else None
        if cuts:
            shared = {i for i, p in places.items() if isinstance(p, tuple) and p[0][1:] == SHARED}
            spread(cuts, among=lambda node: node.id in shared)(graph)

        def block_of(node: Node) -> Place:
            place = places[node.id]
            if isinstance(place, list):
                ranks = [stage % long for stage in place]
                if pairs == 2:
                    return sorted({*ranks, long - 1 - ranks[0]})
                return [rank * width + i for rank in ranks for i in range(width)]
            block, number = place
            if handing is not None and block[0] == "b" and node.id not in handing:
                return f"w{block[1:]}", number
            if pairs == 1:
                return place
            pair, up = divmod(number, 2)
            stage = int(block[1:])
            at = long - 1 - stage if up else stage
            return f"{block[0]}{at}.{'up' if up else 'down'}", pair

        inference = not any(block[0] == "b" for block, _ in blocks)
        order = list_schedule(named(name, long, inference=inference), count // pairs)
        pipelined(_widened(order, width), block_of)(graph)

    return plan


def _widened(schedule: Schedule, width: int) -> Schedule:
    """The schedule with `width` devices in place of each device."""
    entries = (
        replace(e, devices=tuple(d * width + i for d in e.devices for i in range(width)))
        for e in schedule.entries
    )
    return replace(schedule, entries=tuple(entries))


def copies_plan(name: str, graph: Graph, ranks: int, cuts: Mapping[str, int]) -> UserPlan:
    """Copies of the model on different data. ZeRO 1 and 2: each rank updates its part of a
    parameter, from gradients that are reduced in parts. ZeRO 3: it also stores only that part.

    cuts: for each buffer that differs between examples, by name, the dimension of examples.
    """
    if not cuts:
        raise InvalidUsageError(
            f"the plan {name} divides the batch; name the tensors that hold it and their batch "
            'dimension, as in cuts={"tokens": 0} (names of buffers: tensor.ir.buffer.name)'
        )
    parameters, moments = _updated(graph)
    cut_parameters, _, cut_moments = COPIES[name]
    own = [*(parameters if cut_parameters else ()), *(moments if cut_moments else ())]
    parts = {b: 0 for b, size in own if size and size[0] % ranks == 0}
    return spread({**cuts, **parts}, CO_SHARD_PARTS if name == "co-shard" else 1)


def _updated(graph: Graph) -> tuple[list[tuple[str, tuple[int, ...]]], ...]:
    """Names and sizes of the parameters that the graph updates, and of the optimizer's state:
    memory of a parameter's size that is read and then written.
    """
    first: dict[int, bool] = {}  # by buffer: True if it is read before it is written
    written = {}
    for node in graph.nodes:
        for tensor in node.inputs:
            first.setdefault(tensor.buffer.id, True)
        for tensor in node.outputs:
            first.setdefault(tensor.buffer.id, False)
            written[tensor.buffer.id] = tensor
    lasting = [t for i, t in written.items() if first[i]]
    owned = [t for t in lasting if t.buffer.arena == "parameter"]
    sizes = {t.extents for t in owned}
    kept = [t for t in lasting if t.buffer.arena != "parameter" and t.extents in sizes]
    return tuple([(t.buffer.name, t.extents) for t in group] for group in (owned, kept))


def _dealt(nodes: Sequence[Node], stages: int, loads: Callable[[Node], float]) -> dict[int, Place]:
    """One micro-batch: consecutive layers form each stage, of about equal time."""
    blocks = blocks_of(nodes)
    times = [sum(loads(node) for node in block.nodes) for block in blocks]
    stage_of = partition(times, stages, [False] * len(blocks))
    pairs = zip(blocks, stage_of, strict=True)
    return {node.id: (f"f{stage}", 0) for block, stage in pairs for node in block.nodes}


def _handing(nodes: Sequence[Node], places: Mapping[int, Place]) -> set[int]:
    """Nodes of the backward pass that another block waits for; the others compute weights'
    gradients.
    """
    writers = {t.buffer.id: places[n.id] for n in nodes for t in n.outputs}
    wanted: set[int] = set()
    awaited: set[int] = set()
    for node in reversed(nodes):
        place = places[node.id]
        if isinstance(place, list) or place[0][0] != "b":
            continue
        if any(t.buffer.id in wanted for t in node.outputs):
            awaited.add(node.id)
            wanted |= {t.buffer.id for t in node.inputs}
        else:
            wanted |= {t.buffer.id for t in node.inputs if writers.get(t.buffer.id, place) != place}
    return awaited


NAMED = frozenset((*PIPELINES, *COPIES))
"""Names that this module knows."""
