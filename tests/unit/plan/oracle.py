"""A check of plans that is independent of the verifier: brute force over bytes and graph paths.

The bytes of every access are listed as sets, and the order is reachability in a networkx graph. It
is slow and simple, for small plans only.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import networkx as nx
import numpy as np

from ark.ir.dtype import by_name
from ark.plan import kind as kinds
from ark.plan.types import ITERATION_BARRIER, Plan, Task

Node = tuple[int, int, int]  # phase, processor, position
RankNode = tuple[int, Node]


def tasks(plan: Plan) -> dict[Node, Task]:
    return {
        (n, p, i): task
        for n, phase in enumerate(plan.phases)
        for p, listed in enumerate(phase.processors)
        for i, task in enumerate(listed)
    }


def touched(plan: Plan, task: Task) -> list[tuple[str, frozenset[int], bool, bool]]:
    """Returns (space, bytes, write, append_only) of every access of a task. An operand that the op
    only has to follow counts as read in whole. External buffers and peers' buffers are spaces of
    their own.
    """
    op = plan.ops[task.op]
    sig = kinds.signature(plan, op)
    listed = [
        (op.operands[a.operand], a.lo, a.hi, a.write, a.append_only)
        for a in kinds.get(op.kind).accesses(sig, task.coord)
    ]
    for after in op.after:
        shape = plan.tensors[after].shape
        listed.append((after, (0,) * len(shape), shape, False, False))
    accesses = []
    for number, low, high, write, append_only in listed:
        tensor = plan.tensors[number]
        buffer = plan.buffers[tensor.buffer]
        size = 8 if tensor.packet else by_name(tensor.dtype).itemsize
        axes = [
            (np.arange(lo, hi) + o) * s
            for lo, hi, o, s in zip(low, high, tensor.offsets, tensor.strides, strict=True)
        ]
        elements = axes[0]
        for axis in axes[1:]:
            elements = (elements[:, None] + axis[None, :]).ravel()
        first = elements * size + buffer.offset
        every = (first[:, None] + np.arange(size)[None, :]).ravel()
        alone = buffer.arena == "external" or buffer.rank != plan.rank
        space = f"{buffer.arena} {buffer.rank} {buffer.id}" if alone else buffer.arena
        accesses.append((space, frozenset(every.tolist()), write, append_only))
    return accesses


def conflict(a: list, b: list) -> bool:
    """True if two tasks access a common byte and one of them writes it."""
    return bool(conflicts(a, b))


def conflicts(a: list, b: list) -> set[str]:
    """Returns the kinds of memory in which two tasks conflict. In "plain" memory the first task
    must have completed and its writes must be visible. In "packets" a load is itself a wait.
    """
    return {
        "packets" if x[0] == "packet" else "plain"
        for x, y in itertools.product(a, b)
        if x[0] == y[0] and (x[2] or y[2]) and not (x[3] and y[3] and x[2] != y[2]) and x[1] & y[1]
    }


def order(plan: Plan, number: int) -> nx.DiGraph:
    """Returns the happens-before order of one phase as a graph of tasks. An edge leads to the next
    task of a processor's list, from a signal to a wait for all signals of a counter, and from the
    writer of a packet to its reader.

    An edge with the attribute `packet` makes only the packet visible, not other writes. The node
    attribute `touched` has a task's accesses.
    """
    graph = nx.DiGraph()
    listed = {k: t for k, t in tasks(plan).items() if k[0] == number}
    graph.add_nodes_from((k, {"touched": touched(plan, t)}) for k, t in listed.items())
    packets: dict[Node, list] = {
        k: [a for a in accesses if a[0] == "packet"] for k, accesses in graph.nodes(data="touched")
    }
    for reader, writer in itertools.permutations([k for k, v in packets.items() if v], 2):
        for r, w in itertools.product(packets[reader], packets[writer]):
            if w[2] and not r[2] and r[1] & w[1]:
                graph.add_edge(writer, reader, packet=True)
    for n, p, i in listed:
        if i:
            graph.add_edge((n, p, i - 1), (n, p, i), packet=False)
    signals: dict[int, list[Node]] = {}
    for node, task in listed.items():
        for counter in task.signals:
            signals.setdefault(counter, []).append(node)
    for node, task in listed.items():
        for counter, threshold in task.waits:
            if threshold >= len(signals.get(counter, [])):
                edges = [(s, node) for s in signals.get(counter, [])]
                graph.add_edges_from(edges, packet=False)
    return graph


def reachable(graph: nx.DiGraph) -> dict[Any, frozenset[Any]]:
    """Returns, for each node of an acyclic graph, all nodes after it."""
    after: dict[Any, frozenset[Any]] = {}
    for node in reversed(list(nx.topological_sort(graph))):
        behind = list(graph.successors(node))
        after[node] = frozenset(behind).union(*(after[other] for other in behind))
    return after


def faults(plan: Plan, number: int) -> list[tuple[Node, Node]]:
    """Returns pairs of conflicting tasks of one phase that are not ordered as their ops are. Tasks
    that are not ordered before the iteration's end (the signal of the iteration barrier) are also
    returned, each in a pair with the task that gives this signal.
    """
    graph = order(plan, number)
    if not nx.is_directed_acyclic_graph(graph):
        return [((number, -1, -1), (number, -1, -1))]
    seen = nx.DiGraph((a, b) for a, b, packet in graph.edges(data="packet") if not packet)
    seen.add_nodes_from(graph)
    listed = {k: t for k, t in tasks(plan).items() if k[0] == number}
    touches = dict(graph.nodes(data="touched"))
    plain = reachable(seen)
    after = {"packets": {k: {*graph.successors(k)} | plain[k] for k in graph}, "plain": plain}
    pairs = []
    for a, b in itertools.combinations(sorted(listed), 2):
        if listed[a].op == listed[b].op:
            continue
        first, second = (a, b) if listed[a].op < listed[b].op else (b, a)
        hows = conflicts(touches[first], touches[second])
        if any(second not in after[how][first] for how in hows):
            pairs.append((first, second))
    openers = [k for k, t in listed.items() if ITERATION_BARRIER in t.signals]
    reached = {*openers, *(k for k in listed if not plain[k].isdisjoint(openers))}
    pairs += [(k, openers[0]) for k in listed if k not in reached]
    return pairs


def meetings(plans: Sequence[Plan], number: int) -> list[tuple[RankNode, RankNode]]:
    """Returns pairs of tasks of different ranks that conflict between iterations: both access the
    same memory and one writes it, or both signal the same counter, but nothing orders the first
    task in one iteration before the second task in the next one. It applies to ranks that begin
    iterations independently, and to plans without packets.
    """
    listed = {(p.rank, k): t for p in plans for k, t in tasks(p).items() if k[0] == number}
    signals: dict[tuple[int, str], list[RankNode]] = {}
    memory: dict[tuple[int, str], list[tuple[RankNode, bool, frozenset[int]]]] = {}
    for node, task in listed.items():
        plan = plans[node[0]]
        for counter in (plan.counters[c] for c in task.signals):
            signals.setdefault((counter.rank, counter.name), []).append(node)
        op = plan.ops[task.op]
        for access in kinds.get(op.kind).accesses(kinds.signature(plan, op), task.coord):
            tensor = plan.tensors[op.operands[access.operand]]
            buffer = plan.buffers[tensor.buffer]
            if buffer.arena != "symmetric":
                continue
            axes = zip(access.lo, access.hi, tensor.offsets, strict=True)
            box = np.ix_(*(np.arange(lo + o, hi + o) for lo, hi, o in axes))
            elements = frozenset(np.ravel_multi_index(box, tensor.extents).ravel().tolist())
            touch = node, access.write, elements
            memory.setdefault((buffer.rank, buffer.name), []).append(touch)
    met = [
        (a, b)
        for touches in memory.values()
        for a, b in itertools.permutations(touches, 2)
        if (a[1] or b[1]) and a[2] & b[2]
    ]
    graph = _two_iterations(plans, listed, signals)
    pairs = {(a[0], b[0]) for a, b in met}
    for nodes in signals.values():
        pairs |= set(itertools.permutations(nodes, 2))
    after = reachable(graph)
    return [(a, b) for a, b in sorted(pairs) if a[0] != b[0] and (1, b) not in after[0, a]]


def _two_iterations(
    plans: Sequence[Plan],
    listed: Mapping[RankNode, Task],
    signals: Mapping[tuple[int, str], Sequence[RankNode]],
) -> nx.DiGraph:
    """Returns happens-before of two iterations of all ranks, with nodes (iteration, (rank,
    node)).
    """
    graph = nx.DiGraph()
    for at, ((rank, (n, p, i)), task) in itertools.product((0, 1), listed.items()):
        here = at, (rank, (n, p, i))
        graph.add_node(here)
        if i:
            graph.add_edge((at, (rank, (n, p, i - 1))), here)
        elif at:
            barrier = signals[rank, plans[rank].counters[ITERATION_BARRIER].name]
            graph.add_edges_from(((0, s), here) for s in barrier)
        for counter, threshold in task.waits:
            by = signals.get((rank, plans[rank].counters[counter].name), [])
            if threshold >= len(by):
                graph.add_edges_from(((at, s), here) for s in by)
            elif threshold == 0 and at:
                graph.add_edges_from(((0, s), here) for s in by)
    return graph
