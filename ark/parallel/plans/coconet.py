"""Transforms of computation and communication, after CoCoNet (Jangda et al., ASPLOS 2022).

The transforms are functions on a `ParallelGraph`. A value is computed by all ranks, or by the ranks
of one pipeline stage. It is Local if each of these ranks has a partial sum of the value, Replicated
if each rank has the whole value, and Sliced(d) if each rank has a part along dimension d. Reading a
Local value gives its sum, so a read is an all-reduce.

Each transform checks its conditions and preserves the result. `autotune` selects the fastest of
several sequences of transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ark.collective.programs.attributes import program_of
from ark.errors import REFUSALS, ModelError, PlanError
from ark.ir.graph import Node
from ark.parallel.layout.moves import ring_volume
from ark.parallel.plans.times import Rates
from ark.parallel.transform import ParallelGraph, Piece, RankGraphs, annotate, materialise

LOCAL, REPLICATED, OTHER = "local", "replicated", "other"


def group_of(plan: ParallelGraph, node: Node) -> list[int]:
    """The ranks that compute a node: all ranks, or the ranks of a stage of a pipeline."""
    return sorted({rank for piece in plan.pieces(node) for rank in plan.ranks_of(piece)})


def layout(plan: ParallelGraph, node: Node) -> str | int:
    """The layout of a node's result: LOCAL, REPLICATED, the number of the sliced dimension, or
    OTHER.
    """
    pieces, group = plan.pieces(node), group_of(plan, node)
    ranks = [plan.ranks_of(piece) for piece in pieces]
    whole = tuple((0, n) for n in node.outputs[0].extents)
    if len(pieces) == 1 and pieces[0].output.share == (0, 1):
        return REPLICATED
    if sorted(ranks) != [[rank] for rank in group]:
        return OTHER
    if all(p.output.box == whole for p in pieces):
        return LOCAL
    cut = [d for d, side in enumerate(whole) if pieces[0].output.box[d] != side]
    return cut[0] if len(cut) == 1 and all(p.output.share == (0, 1) for p in pieces) else OTHER


def split(plan: ParallelGraph, node: Node, dimension: int = 0) -> Node:
    """Splits an AllReduce into ReduceScatter and AllGather. Each rank computes one part, along a
    dimension, of the sum of a Local value, and the readers gather the parts. Returns the node that
    computes the parts.

    Raises ModelError unless the value is Local and the dimension is divisible by the ranks.
    """
    if layout(plan, node) != LOCAL:
        raise ModelError(
            f"{node.name} has no all-reduce to split: its result is {layout(plan, node)}; split "
            "the op along a dimension that is summed over"
        )
    group = group_of(plan, node)
    copy = plan.op_copy(node)
    _slice(plan, copy, dimension, group)
    return copy


def _slice(plan: ParallelGraph, node: Node, dimension: int, group: Sequence[int]) -> None:
    """Splits a node so that each rank of a group computes an equal part of the result along a
    dimension.
    """
    (whole,) = plan.pieces(node)
    _divide(plan, whole, annotate(node).operands[-1][dimension], group)


def _divide(plan: ParallelGraph, whole: Piece, letter: str, group: Sequence[int]) -> None:
    for rank, piece in zip(group, plan.op_trans(whole, letter, len(group)), strict=True):
        plan.op_assign(piece, rank)


def reorder(plan: ParallelGraph, gathered: Node, computations: Sequence[Node]) -> None:
    """Moves computations on a Sliced value before its AllGather, so that each rank computes only
    its own part of them. The computations read the value directly or through other computations.
    Ops that read their results then gather the results instead of the value. A computation that
    does not depend on the value, such as the mask of a dropout, is cut like the computation that
    reads it.

    Raises ModelError if a computation is not Replicated, has no connection with the value, needs
    all of the value at once, or has a Local operand.
    """
    dimension, group = layout(plan, gathered), group_of(plan, gathered)
    if not isinstance(dimension, int):
        raise ModelError(f"{gathered.name} is {dimension}, not sliced; split it first")
    cut = {gathered.outputs[0].buffer.id: dimension}
    inside = {n.id for n in computations}
    writers = {n.outputs[0].buffer.id: n for n in plan.nodes}
    chosen: list[tuple[Node, str]] = []
    beside: dict[int, Node] = {}  # by buffer: computations that do not depend on the gathered value
    for node in (n for n in plan.nodes if n.id in inside):
        if layout(plan, node) != REPLICATED or group_of(plan, node) != group:
            raise ModelError(
                f"{node.name} is not replicated on the ranks {group} of {gathered.name}; remove it "
                "from the computations"
            )
        annotation = annotate(node)
        letters = set()
        for tensor, names in zip(node.inputs, annotation.operands, strict=False):
            writer = writers.get(tensor.buffer.id)
            if writer and writer.id not in inside and layout(plan, writer) == LOCAL:
                raise ModelError(
                    f"{node.name} reads {writer.name}, which is Local (each rank has other "
                    f"values), so it cannot be computed before the gather; split {writer.name} too"
                )
            if tensor.buffer.id in cut:
                letters.add(names[cut[tensor.buffer.id]])
        if not letters:
            beside[node.outputs[0].buffer.id] = node
            continue
        letter = _one_letter(node, letters)
        chosen.append((node, letter))
        if letter in annotation.operands[-1]:
            cut[node.outputs[0].buffer.id] = annotation.operands[-1].index(letter)
    for node, letter in list(chosen):
        for tensor, names in zip(node.inputs, annotate(node).operands, strict=False):
            other = beside.get(tensor.buffer.id) if letter in names else None
            if other is not None:
                del beside[tensor.buffer.id]
                read = annotate(other).operands[-1][names.index(letter)]
                chosen.append((other, _one_letter(other, {read})))
    for node in beside.values():
        _one_letter(node, set())
    for node, letter in chosen:
        _divide(plan, plan.pieces(node)[0], letter, group)


def _one_letter(node: Node, letters: set[str]) -> str:
    """Returns the only letter of a set. Raises ModelError unless the set has exactly one letter and
    the op may be cut along it.
    """
    annotation = annotate(node)
    if len(letters) != 1 or letters & (annotation.frozen | {"1"}):
        raise ModelError(
            f"{node.name} ({annotation}) does not read the sliced value along one dimension "
            "that can be cut; remove it from the computations"
        )
    return next(iter(letters))


def as_slice(plan: ParallelGraph, name: str, dimension: int = 0) -> int:
    """Shards a Replicated state: each rank keeps only its slice. Returns the number of elements of
    a slice.

    Computations on the replicated state are restricted to the slice. Raises ModelError, with the
    reader's name, if an op reads more than its slice.
    """
    kept = 0
    for node in plan.nodes:
        for at, tensor in enumerate(node.inputs):
            if tensor.buffer.name != name:
                continue
            annotation, group = annotate(node), group_of(plan, node)
            letter = annotation.operands[at][dimension]
            if layout(plan, node) == REPLICATED and letter in annotation.operands[-1]:
                _slice(plan, node, annotation.operands[-1].index(letter), group)
            part = tensor.extents[dimension] // len(group)
            for piece in plan.pieces(node):
                side = piece.inputs[at].box[dimension]
                for rank in plan.ranks_of(piece):
                    place = group.index(rank)
                    if side != (place * part, (place + 1) * part):
                        raise ModelError(
                            f"{name} cannot be kept in slices: {node.name} reads {list(side)} of "
                            f"it on rank {rank}; reorder that op before the gather"
                        )
            kept = max(kept, part * tensor.elements // tensor.shape[dimension])
    if not kept:
        raise ModelError(f"the graph reads no tensor named {name!r}")
    return kept


def fuse(plan: ParallelGraph, nodes: Sequence[Node]) -> None:
    """Makes nodes run consecutively: on each rank, no other op runs between the pieces of these
    nodes.

    A loop kernel is one kernel in any case; elementwise neighbours become one op when the graph is
    lowered. Raises ModelError if another op must run between two of the nodes.
    """
    inside = {n.id for n in nodes}
    readers: dict[int, list[Node]] = {}
    for node in plan.nodes:
        for tensor in node.inputs:
            readers.setdefault(tensor.buffer.id, []).append(node)
    after: set[int] = set()
    for node in plan.nodes:
        read = {t.buffer.id for t in node.inputs}
        written = [n for n in plan.nodes if n.outputs[0].buffer.id in read]
        follows = any(n.id in inside or n.id in after for n in written)
        if node.id not in inside and follows:
            after.add(node.id)
        elif node.id in inside and any(n.id in after for n in written):
            between = next(n.name for n in written if n.id in after)
            raise ModelError(
                f"{node.name} cannot be fused with the ops before {between}, which it reads; "
                f"fuse {between} too"
            )
    own = [p for n in plan.nodes if n.id in inside for p in plan.pieces(n)]
    for node in plan.nodes:
        if node.id not in inside:
            for piece in plan.pieces(node):
                for other in own:
                    first, then = (other, piece) if node.id in after else (piece, other)
                    if node.id in after or node.id < other.node.id:
                        plan.op_order(first, then)


def overlap(
    plan: ParallelGraph, producer: Node, consumer: Node, dimension: int, parts: int
) -> None:
    """Splits producer and consumer into chunks along a dimension of the producer's result, so that
    a chunk is sent as soon as it is computed.

    Raises ModelError unless the consumer reads the producer and computes each chunk from one chunk.
    """
    at = [i for i, t in enumerate(consumer.inputs) if t.buffer.id == producer.outputs[0].buffer.id]
    if len(at) != 1:
        raise ModelError(
            f"{consumer.name} must read {producer.name} exactly once to overlap with it"
        )
    first, then = annotate(producer), annotate(consumer)
    letters = first.operands[-1][dimension], then.operands[at[0]][dimension]
    if letters[0] in first.frozen | {"1"} or letters[1] not in then.operands[-1]:
        raise ModelError(
            f"{consumer.name} ({then}) needs all of {producer.name} ({first}) along dimension "
            f"{dimension} at once; overlap them along another"
        )
    if letters[1] in then.frozen:
        raise ModelError(f"{consumer.name} ({then}) is not cut along {letters[1]}")
    for node, letter in ((producer, letters[0]), (consumer, letters[1])):
        for piece in plan.pieces(node):
            ranks = plan.ranks_of(piece)
            for chunk in plan.op_trans(piece, letter, parts):
                plan.op_assign(chunk, *ranks)


@dataclass(frozen=True)
class Tuned:
    """The fastest of several variants. us: the predicted microseconds of each variant, by name.
    refused: the reasons why others could not be built, by name.
    """

    name: str
    ranks: RankGraphs
    us: dict[str, float]
    refused: dict[str, str]


def cost_us(graphs: RankGraphs, rates: Rates) -> float:
    """The predicted microseconds of the slowest rank: the sum of the times of its ops (by memory
    traffic and arithmetic), of its collectives (as rings) and of its sends.
    """
    ranks, slowest = len(graphs.graphs), 0.0
    for graph in graphs.graphs:
        total = 0.0
        for node in graph.nodes:
            moved = sum(t.nbytes for t in (*node.inputs, *node.outputs))
            if node.type in ("all_reduce", "collective"):
                program = program_of(node)
                kind = "all_reduce" if program is None else program.collective.value
                sent = ring_volume(kind, ranks, 1) * node.inputs[0].nbytes / ranks
                total += rates.step_us + sent / rates.link_bytes_per_us
            elif node.type == "send":
                total += rates.step_us / ranks + moved / rates.link_bytes_per_us
            elif node.type == "matmul":
                flops = 2.0 * node.outputs[0].elements * node.inputs[0].shape[-1]
                total += max(flops / rates.flops_per_us, moved / rates.memory_bytes_per_us)
            else:
                total += moved / rates.memory_bytes_per_us
        slowest = max(slowest, total)
    return slowest


def autotune(
    start: Callable[[], ParallelGraph],
    ways: Mapping[str, Callable[[ParallelGraph], None]],
    rates: Rates,
) -> Tuned:
    """Returns the fastest of several sequences of transforms. Each is applied to a plan of its own.

    start: creates a plan. ways: the sequences of transforms, by name. Raises PlanError if none can
    be applied.

    Examples:
        >>> with ark.use_model(ark.Model(0, 1)) as model:
        ...     y = ark.linear(ark.tensor([8, 16]), ark.tensor([32, 16]))
        >>> from ark.parallel.plans.times import Rates
        >>> rates = Rates(flops_per_us=1e6, memory_bytes_per_us=4e6, link_bytes_per_us=4e5)
        >>> def whole(plan):
        ...     plan.op_assign(plan.pieces(plan.nodes[0])[0], 0, 1)
        >>> def columns(plan):
        ...     for rank, piece in enumerate(plan.op_trans(plan.pieces(plan.nodes[0])[0], "y", 2)):
        ...         plan.op_assign(piece, rank)
        >>> ways = {"whole": whole, "columns": columns}
        >>> start = lambda: ark.parallel.ParallelGraph(model.graph, 2)
        >>> ark.parallel.autotune(start, ways, rates).name
        'columns'
    """
    costs: dict[str, tuple[float, RankGraphs]] = {}
    refused: dict[str, str] = {}
    for name, transform in ways.items():
        plan = start()
        try:
            transform(plan)
            graphs = materialise(plan)
        except REFUSALS as error:
            refused[name] = str(error)
            continue
        costs[name] = (cost_us(graphs, rates), graphs)
    if not costs:
        raise PlanError(f"every variant was refused: {refused}")
    best = min(costs, key=lambda name: costs[name][0])
    return Tuned(best, costs[best][1], {n: us for n, (us, _) in costs.items()}, refused)
