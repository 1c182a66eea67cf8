"""The least time of a collective on a network, whatever the algorithm: what times compare with.

Latency is left out. `ark.cli.topo` and the page print it beside every predicted time.
"""

from __future__ import annotations

from fractions import Fraction

from ark.collective import Collective
from ark.comm.exchange import exchange
from ark.comm.forestcoll import optimal, optimal_all_reduce
from ark.comm.topology import Topology


def least_us(
    topology: Topology, collective: Collective | str, size_bytes: int, root: int | None = None
) -> float:
    """Returns the time in microseconds that no schedule beats, for data of `size_bytes`.

    Sizes are those of `ark.comm.simulate.simulate`; `root` is a rank's number, for broadcast and
    reduce. The bounds: cuts for gathering and scattering (ForestColl), for one root (Edmonds 1973),
    weighted roots for an all-reduce (where switches sum, the cuts between any two ranks), and
    multicommodity flow for an all-to-all. Raises UnsupportedError
    where the network is too large for the last.
    """
    asked = Collective(collective)
    ranks = len(topology.ranks)
    if asked is Collective.ALL_REDUCE and topology.reduces:
        # Of any ranks, what the others hear, or say, of every sum crosses once.
        both = (topology, topology.reverse())
        seconds = max(optimal(each, roots={topology.ranks[0]: 1}).lower_bound for each in both)
    elif asked is Collective.ALL_REDUCE:
        seconds = 1 / optimal_all_reduce(topology).bound
    elif asked is Collective.ALL_TO_ALL:
        seconds = exchange(topology).lower_bound / ranks
    elif asked.rooted:
        network = topology.reverse() if asked.reduces else topology
        seconds = optimal(network, roots={topology.ranks[root or 0]: 1}).lower_bound
    else:
        network = topology.reverse() if asked.reduces else topology
        seconds = optimal(network).lower_bound / ranks
    return float(Fraction(size_bytes) * seconds) / 1e3
