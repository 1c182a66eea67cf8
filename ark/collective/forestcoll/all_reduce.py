"""Computes the best rate of an all-reduce by trees. Its roots may have unequal shares of the data,
and its two phases, summing and sending out, run at the same time.

An all-reduce sums each piece of the data on some rank, the piece's root, and sends the sum out from
there. While later pieces are still being summed, earlier ones are sent out, so both phases can use
a link at the same time. The rate is the solution of a linear programme. Its variables are the
roots' weights and each link's share for each phase; its constraints are cuts
(`ark.collective.forestcoll.programme`). A reduce-scatter followed by an all-gather is the special
case with equal weights and a fixed share of every link. `ark.collective.forestcoll.forest` calls
`optimal_all_reduce`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ark.collective.forestcoll.network import network
from ark.collective.forestcoll.optimum import balanced, optimal
from ark.collective.forestcoll.programme import Point, Programme
from ark.collective.forestcoll.symmetry import find_symmetry
from ark.collective.topology import Topology


@dataclass(frozen=True)
class AllReduceOptimum:
    """The best rate of an all-reduce by trees, in GB/s: the size of the reduced data divided by the
    time.

    `rate` can be attained, and no trees are faster than `bound`. At `rate`, the trees rooted at
    rank v sum `weights[v]` GB/s of the data. `gather` and `reduce` list, for each link in the order
    of `Topology.capacities`, the GB/s that the trees of each phase use: `gather` for sending out,
    `reduce` for summing. `uniform` is true if all roots have the same weight and each phase uses
    half of every link.
    """

    rate: Fraction
    bound: Fraction
    weights: tuple[Fraction, ...]
    gather: tuple[Fraction, ...]
    reduce: tuple[Fraction, ...]
    uniform: bool

    @property
    def exact(self) -> bool:
        """True if the rate is proven to be the best."""
        return self.rate == self.bound

    @property
    def gap(self) -> float:
        """The largest fraction of `bound` that better trees could gain: 1 - rate / bound."""
        return float(1 - self.rate / self.bound)


def optimal_all_reduce(topology: Topology, in_network: bool = False) -> AllReduceOptimum:
    """Returns the best rate of an all-reduce by trees, and the proof that no trees are faster.

    With `in_network`, switches that can multicast or sum do so. No trees are then faster than
    `bound`, and `ark.collective.forestcoll.forest` tries to attain this rate by drawing trees.
    """
    net = network(topology)
    reverse = topology.reverse()
    equal, backward = optimal(topology), optimal(reverse)
    # The gathering phase uses the fraction `share` of each link's bandwidth, the reducing phase the
    # rest. This value of `share` gives both phases the same rate.
    inverse = equal.inv_x + backward.inv_x
    share = equal.inv_x / inverse
    rate = net.ranks / inverse
    known = Point(
        rate,
        rate,
        (rate / net.ranks,) * net.ranks,
        (
            tuple(share * each for each in balanced(net).bandwidth),
            tuple((1 - share) * each for each in balanced(network(reverse)).bandwidth),
        ),
    )
    programme = Programme(net, two_way=True, in_network=in_network)
    symmetry = find_symmetry(net)
    for optimum, reducing in ((equal, False), (backward, True)):
        side = np.array([node in optimum.cut for node in topology.nodes])
        for moved in symmetry.images:
            image = np.empty_like(side)
            image[moved] = side
            programme.add(image, reducing)
    best = programme.solve(known)
    gather, reduce = best.shares
    uniform = best.rate == rate
    weights = best.weights[: net.ranks]
    return AllReduceOptimum(best.rate, best.bound, weights, gather, reduce, uniform)
