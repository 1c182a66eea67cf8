"""Reorders small independent ops so that those that can run at the same time are neighbours. For
example, an LSTM's cells, which the program lists step by step, run diagonal by diagonal.

A processor runs its tasks in list order. If ops have too few tasks to fill the machine, a task that
waits delays later tasks of its list that could run. So a run of small ops is sorted by the number
of ops on the longest path from each to the end of the run (highest level first: Hu, "Parallel
Sequencing and Assembly Line Problems", 1961). Ops that are ready at the same time become
neighbours, and run as late as their readers allow, so that few tensors are alive at the same time.
Rammer (Ma et al., OSDI 2020) calls these wavefronts. Listed in ark.lower.passes.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor, overlap
from ark.lower import registry
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.pack_weights import writes
from ark.machine import Machine
from ark.machine.variant import COMMUNICATE

# A run is reordered only if on average at least this many of its ops can run at the same time.
# A run with fewer concurrent ops is close to a chain, and program order is good enough.
MIN_MEAN_CONCURRENT_OPS = 2


def reorder_small_ops(graph: Graph, context: Context) -> Graph:
    """The graph with runs of small ops reordered; all dependences are kept.

    Returns the graph itself if the order does not change.
    """
    nodes: list[Node] = []
    for (_, small), run in _runs(graph.nodes, context.machines):
        nodes += _ordered(run) if small else run
    return graph if nodes == graph.nodes else graph.with_nodes(nodes)


def beside(nodes: Sequence[Node], machines: Sequence[Machine]) -> list[int]:
    """For each node, the number of ops that run at the same time, including itself. Two ops of a
    run of small ops count as concurrent if their longest paths to the end of the run have the same
    length. Ops of equal type and shape get the mean of their numbers, so that they get equal tiles
    and share one device function. machines: the machine of each phase.
    """
    ways: list[int] = []
    for (_, small), run in _runs(nodes, machines):
        levels = _levels(run)
        by_level = Counter(levels)
        ways += [by_level[n] if small and n else 1 for n in levels]
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    keys = [(n.type, *((t.dtype, t.shape) for t in (*n.inputs, *n.outputs))) for n in nodes]
    for key, number in zip(keys, ways, strict=True):
        alike[key].append(number)
    means = {key: round(sum(listed) / len(listed)) for key, listed in alike.items()}
    return [means[key] for key in keys]


def _runs(
    nodes: Sequence[Node], machines: Sequence[Machine]
) -> Iterator[tuple[tuple[int, bool], list[Node]]]:
    """Divides the nodes into runs: as many consecutive nodes of one phase as possible that are all
    small, or all not small. Yields each run with (phase, small).
    """
    for key, run in itertools.groupby(nodes, lambda n: (n.phase, _small(n, machines[n.phase]))):
        yield key, list(run)


def _small(node: Node, machine: Machine) -> bool:
    """True if the node may be reordered, and touches so few bytes that it cannot keep all
    processors busy.
    """
    if node.virtual:
        return True
    if machine.variant.role(COMMUNICATE):  # keep the order of the operand stream and of polls
        return False
    op = registry.get(node.type)
    asked = node.hints is not None or node.context is not None or node.processors is not None
    meets = op.names_ranks or op.iteration_barrier or op.all_ranks
    touched = sum(t.nbytes for t in (*node.inputs, *node.outputs))
    return (
        not (asked or meets or node.after)
        and touched <= machine.costs.idle_bytes * machine.processors
    )


def _ordered(run: list[Node]) -> list[Node]:
    levels = _levels(run)
    if MIN_MEAN_CONCURRENT_OPS * max(levels) > sum(not n.virtual for n in run):
        return run
    return [run[i] for i in sorted(range(len(run)), key=lambda i: (-levels[i], i))]


def _levels(run: Sequence[Node]) -> list[int]:
    """For each op the number of ops on the longest path from it to the end of the run; 0 for a
    virtual node.
    """
    reads: dict[int, list[tuple[Tensor, int]]] = defaultdict(list)  # by buffer, of later ops
    written: dict[int, list[tuple[Tensor, int]]] = defaultdict(list)
    levels = [0] * len(run)
    for place in range(len(run) - 1, -1, -1):
        node = run[place]
        if node.virtual:
            continue
        changed = {t.buffer.id for t in node.outputs} | set(writes(node))
        level = 1
        for tensor in (*node.inputs, *node.outputs):
            buffer = tensor.buffer.id
            later = written[buffer]
            if buffer in changed:
                later = later + reads[buffer]
            level = max(level, 1 + max((n for t, n in later if overlap(t, tensor)), default=0))
        levels[place] = level
        for tensor in node.inputs:
            reads[tensor.buffer.id].append((tensor, level))
        for tensor in (*node.inputs, *node.outputs):
            buffer = tensor.buffer.id
            if buffer in changed:
                reads[buffer] = [(t, n) for t, n in reads[buffer] if not _covers(tensor, t)]
                written[buffer] = [(t, n) for t, n in written[buffer] if not _covers(tensor, t)]
                written[buffer].append((tensor, level))
    return levels


def _covers(whole: Tensor, part: Tensor) -> bool:
    """True if each element of `part` is in `whole`."""
    if whole.extents != part.extents:
        return False
    dimensions = zip(whole.offsets, whole.shape, part.offsets, part.shape, strict=True)
    return all(a <= b and b + m <= a + n for a, n, b, m in dimensions)
