"""Computes lower bounds on the time of a collective on a network: no algorithm can be faster. The
bounds consider bandwidth only, not latency. `ark topo` and its HTML page (ark.collective.page)
print the bound next to every predicted time.
"""

from __future__ import annotations

from fractions import Fraction

from ark.collective.exchange import exchange
from ark.collective.forestcoll import cut_optimum, optimal, optimal_all_reduce
from ark.collective.programs import Collective, Counts
from ark.collective.topology import Topology


def least_us(
    topology: Topology,
    collective: Collective | str,
    size_bytes: int,
    root: int | None = None,
    counts: Counts | None = None,
) -> float:
    """Returns the time in microseconds that every schedule needs at least, for data of
    `size_bytes`.

    `size_bytes` is defined as in `ark.collective.simulate.simulate`. `root` is a rank's number, for
    broadcast and reduce. `counts` are those of an all-to-all with unequal parts. An all-gather and
    a reduce-scatter are bounded by the cuts of the network (ForestColl), a broadcast and a reduce
    by its cuts around the root (Edmonds 1973), an all-reduce by a linear program over cuts in which
    ranks may sum unequal shares of the data, and an all-to-all by multicommodity flow. If the
    topology has a switch that multicasts or sums, the bounds take this into account, except that of
    an all-to-all. Raises UnsupportedError if the network is too large for the flow.
    """
    asked = Collective(collective)
    ranks = len(topology.ranks)
    able = bool(topology.multicast or topology.reduces)
    if asked is Collective.ALL_TO_ALL:
        seconds = exchange(topology, counts).lower_bound
        seconds /= ranks if counts is None else max(map(sum, counts))
    elif asked is Collective.ALL_REDUCE:
        seconds = 1 / optimal_all_reduce(topology, able).bound
    else:
        network = topology.reverse() if asked.reduces else topology
        roots = {topology.ranks[root or 0]: 1} if asked.rooted else None
        best = cut_optimum(network, roots) if able else optimal(network, roots=roots)
        seconds = best.lower_bound / (1 if asked.rooted else ranks)
    return float(Fraction(size_bytes) * seconds) / 1e3
