"""Named plans for `parallelize` that depend on how a graph is written: pipelines, and the copies of
ZeRO.

A pipeline reads the scopes in ops' names: `f0-3` is the forward pass of micro-batch 3 through stage
0, and `b0-3` is its backward pass. `g` and `h` are earlier forward passes (3F1B). `fin-3` and
`bin-3` are the layer that all ranks share (interlaced), and `u0` is the update of stage 0's
parameters. In a graph without such scopes ark.parallel.plans.micro_batches determines stages and
micro-batches. Copies of a model read `cuts`, which names the tensors that differ between examples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from ark.errors import InvalidUsageError, ModelError
from ark.ir.graph import Graph, Node
from ark.parallel.pipeline.named import PIPELINES, list_schedule, named
from ark.parallel.plans.micro_batches import Pipeline, directed, handed_on, widened
from ark.parallel.plans.pipelined import pipelined
from ark.parallel.plans.prediction import COPIES
from ark.parallel.plans.spread import spread
from ark.parallel.plans.staged import SHARED
from ark.parallel.transform import ParallelGraph

UserPlan = Callable[[ParallelGraph], None]
SCOPE = re.compile(r"([a-z])([0-9]+|in)-([0-9]+)\.|u([0-9]+)\.")
CO_SHARD_PARTS = 2  # parts of a rank's work that are computed one after the other (co-shard)
Place = tuple[str, int] | list[int]
"""A block of a pipeline, as its name and micro-batch. For the update of parameters, a list of the
stages whose parameters are updated.
"""


def place_of(node: Node) -> Place:
    """The pipeline block of a node, from the first scope in its name.

    Raises ModelError if the scope is not the name of a block.

    Examples:
        >>> with ark.use_model(ark.Model(0, 1)) as model:
        ...     with model.graph.scope("f0-3"):
        ...         y = ark.relu(ark.tensor([4]))
        >>> ark.parallel.place_of(model.graph.nodes[0])
        ('f0', 3)
    """
    match = SCOPE.match(node.name)
    if not match:
        raise ModelError(
            f"{node.name} has no pipeline scope, but other ops have; put it in a scope such as "
            "f0-3 (forward, stage 0, micro-batch 3), b0-3 (back) or u0 (update)"
        )
    way, stage, number, updated = match.groups()
    return [int(updated)] if updated is not None else (f"{way}{stage}", int(number))


def pipeline_plan(name: str, graph: Graph, how: Pipeline) -> UserPlan:
    """The plan of a pipeline over the stages and micro-batches of a graph. They come from the
    graph's scopes, or without scopes from ark.parallel.plans.staged.

    how: the parameters of the pipeline. In a graph with scopes, its field `cuts` is the argument of
    `spread` for the layer that all ranks share. The plan raises ModelError for ops that belong to
    no block, and InvalidUsageError if the number of micro-batches or layers does not fit the
    pipeline.
    """

    def plan(split: ParallelGraph) -> None:
        if any(SCOPE.match(node.name) for node in split.nodes):
            if how.micro_batches is not None:
                raise InvalidUsageError(
                    "the graph's scopes set its micro-batches; omit micro_batches"
                )
            _by_scopes(split, how)
        else:
            how.place(split, graph)

    return plan


def _by_scopes(graph: ParallelGraph, how: Pipeline) -> None:
    """Assigns the nodes of a graph to ranks according to the scopes in their names, which are
    blocks and micro-batches.
    """
    name, width, long = how.name, how.width, graph.ranks // how.width
    places = {node.id: place_of(node) for node in graph.nodes}
    blocks = {i: place for i, place in places.items() if isinstance(place, tuple)}
    count = 1 + max((number for _, number in blocks.values()), default=0)
    if count % how.pairs:
        raise InvalidUsageError(
            "chimera sends half of the micro-batches from either end, but their number "
            f"{count} is odd; use an even number"
        )
    named_blocks = {i: f"{block}-{number}" for i, (block, number) in blocks.items()}
    handing = handed_on(graph.nodes, named_blocks) if name == "zero-bubble" else None
    if how.cuts:
        shared = {i for i, (block, _) in blocks.items() if block[1:] == SHARED}
        spread(how.cuts, among=lambda node: node.id in shared)(graph)

    def block_of(node: Node) -> Place:
        place = places[node.id]
        if isinstance(place, list):
            ranks = [stage % long for stage in place]
            if how.pairs == 2:
                return sorted({*ranks, long - 1 - ranks[0]})
            return [rank * width + i for rank in ranks for i in range(width)]
        block, number = place
        if handing is not None and block[0] == "b" and node.id not in handing:
            return f"w{block[1:]}", number
        return directed(block, number, long) if how.pairs == 2 else place

    inference = not any(block[0] == "b" for block, _ in blocks.values())
    order = list_schedule(named(name, long, inference=inference), count // how.pairs)
    pipelined(widened(order, width), block_of)(graph)


def copies_plan(name: str, graph: Graph, ranks: int, cuts: Mapping[str, int]) -> UserPlan:
    """The plan of copies of the model that work on different data.

    With ZeRO 1 and 2 each rank updates a part of each parameter, from gradients that are reduced in
    parts. With ZeRO 3 each rank also stores only that part. cuts: for each tensor that differs
    between examples, the name of its buffer and the dimension that counts examples.
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
    """The names and shapes of the parameters that the graph updates, and of the optimizer's state.
    State is memory with the shape of a parameter that is read before it is written.
    """
    first: dict[int, bool] = {}  # by buffer: True if its first access is a read
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


def offloaded(graph: Graph) -> Graph:
    """A copy of the graph whose optimizer keeps its state in host-mapped memory. Updates read and
    write it there. Raises ModelError if the graph updates no parameters.
    """
    _, moments = _updated(graph)
    if not moments:
        raise ModelError("the graph has no optimizer whose moments could be offloaded")
    names = {name for name, _ in moments}
    return graph.in_arenas({b.id: "host" for b in graph.buffers if b.name in names})


NAMED = frozenset((*PIPELINES, *COPIES))
"""The names of all plans in this module."""
