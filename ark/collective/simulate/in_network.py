"""Finds puts that a switch can merge: copies of the same data, and parts of the same sum.

If a switch multicasts (NVLS, InfiniBand), puts from one source to several ranks use the links
before the switch once. If it sums (NVLS, SHARP), puts whose data are summed on arrival use the
links behind it once. Programs do not mark such puts; the simulator finds them and treats each group
as one flow. Called by the engine.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from ark.collective.programs import CollectiveProgram, Kind, OpRef, steps
from ark.collective.topology import Topology

Hop = tuple[str, str]


def joined(program: CollectiveProgram, topology: Topology) -> list[list[OpRef]]:
    """Returns the groups of puts, two or more each, that switches may merge into one flow.

    The puts of a group use the same offset in the buffers of all their ranks, as the loads and
    stores of switches require. They are preceded by equally many puts in their chains of
    dependencies, so that no put of a group waits for another.
    """
    groups: defaultdict[object, list[OpRef]] = defaultdict(list)
    step = steps(program) if topology.multicast or topology.reduces else {}
    taken: set[OpRef] = set()
    if topology.reduces:
        for ref in program.refs():
            op = program.op(ref)
            if op.kind is Kind.REDUCE:
                for dep in op.deps:
                    put = program.op(dep)
                    if put.kind is Kind.PUT and put.peer == ref.rank and put.dst in op.srcs:
                        groups["sum", ref, put.srcs, step[dep]].append(dep)
        taken = {ref for group in groups.values() if len(group) > 1 for ref in group}
    if topology.multicast:
        for ref in program.refs():
            op = program.op(ref)
            if op.kind is Kind.PUT and ref not in taken:
                groups["copy", ref.rank, op.srcs, op.dst, step[ref]].append(ref)
    return [group for group in groups.values() if len(group) > 1]


def crossings(
    routes: Sequence[tuple[str, ...]], copying: bool, capable: frozenset[str]
) -> dict[Hop, int]:
    """Returns how often a group's flow crosses each link.

    If routes separate (copying) or meet (sums) at a switch in `capable`, the switch merges them
    into one flow. Any other node forwards each route separately.
    """
    ways = [route if copying else route[::-1] for route in routes]
    children: defaultdict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
    ends: defaultdict[tuple[str, ...], int] = defaultdict(int)
    for way in ways:
        ends[way] += 1
        for length in range(1, len(way)):
            children[way[:length]].add(way[: length + 1])
    flows: dict[tuple[str, ...], int] = {}
    for prefix in sorted({*children, *ends}, key=len, reverse=True):
        below = [flows[child] for child in children[prefix]]
        own = ends[prefix]
        flows[prefix] = max([own, *below]) if prefix[-1] in capable else own + sum(below)
    total: defaultdict[Hop, int] = defaultdict(int)
    for prefix, count in flows.items():
        if len(prefix) > 1:
            hop = prefix[-2:] if copying else prefix[:-3:-1]
            total[hop[0], hop[1]] += count
    return dict(total)


def hops(route: tuple[str, ...]) -> dict[Hop, int]:
    """Returns the links of one put, each with a count of 1."""
    return dict.fromkeys(itertools.pairwise(route), 1)
