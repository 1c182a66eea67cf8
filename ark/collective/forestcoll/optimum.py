"""Computes the best rate of a collective on a network: the optimum 1/x*, and the best rate of k
trees per rank.

An all-gather of M bytes over N ranks takes at least (M/N)(1/x*). For a node set S that does not
contain every rank, take the number of ranks in S divided by the bandwidth that leaves S; 1/x* is
the largest such ratio. Trees attain this bound (ForestColl, section 4). For a broadcast, only the
root counts as a rank in S. The search is a discrete Newton iteration with exact integers; each
round finds a cut that proves a higher bound.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from ark.collective.forestcoll.cuts import Ints, Mask
from ark.collective.forestcoll.network import Network, network
from ark.collective.forestcoll.programme import Point, Programme
from ark.collective.packages import require
from ark.collective.topology import Topology
from ark.errors import InternalError, InvalidUsageError, UnsupportedError

MOST_TREES = 1 << 20


@dataclass(frozen=True)
class Optimum:
    """The rate of a forest of `k` trees per root. Each tree carries 1/k of its root's data.

    `inv_x` is the time in seconds if each root has one GB of data. So if all roots together have M
    bytes, the time is M / roots * inv_x / 1e9 seconds. `lower_bound` is 1/x*; no schedule is
    faster. `cut` is the node set that proves it. `inv_x` and `lower_bound` are equal (`exact`)
    unless k was given. `scale` (U in the papers) times a link's bandwidth is the number of trees on
    the link at this rate.
    """

    inv_x: Fraction
    k: int
    roots: int
    scale: Fraction
    lower_bound: Fraction
    cut: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """True if the rate is the network's optimum, which no number of trees exceeds."""
        return self.inv_x == self.lower_bound

    @property
    def algbw(self) -> Fraction:
        """Returns the rate in GB/s: the bytes of the gathered result divided by the time. A result
        with one GB from each of the `roots` ranks takes `inv_x` seconds.
        """
        return self.roots / self.inv_x


def optimal(
    topology: Topology, k: int | None = None, roots: Mapping[str, int] | None = None
) -> Optimum:
    """Returns the least time per unit of data (1/x* of the paper), the cut of the topology that
    proves it, and the least number of trees that attains it. If k is given, returns the best rate
    of k trees.

    `roots` maps rank ids to the amount that each sends (all ranks 1 by default: all-gather).
    """
    net = network(topology, roots)
    if k is not None and not 1 <= k <= MOST_TREES:
        raise InvalidUsageError(f"k is {k}; expected a number of trees from 1 to {MOST_TREES}.")
    if unbalanced(net):
        point = _balance(net)
        net = replace(net, bandwidth=point.shares[0])
        best = replace(_newton(net), lower_bound=1 / point.bound)
    else:
        best = _newton(net)
    return best if k is None else _fixed(net, best, k)


def cut_optimum(topology: Topology, roots: Mapping[str, int] | None = None) -> Optimum:
    """Returns the optimum that the network's cuts allow if switches can multicast. It differs from
    the result of `optimal` only if some switch receives more than it can send on, or the reverse.
    To attain it, trees must use multicast.
    """
    return _newton(network(topology, roots))


def unbalanced(net: Network) -> bool:
    """True if some switch can receive more than it can send on, or the reverse."""
    passing = [Fraction(0)] * len(net.topology.nodes)
    for tail, head, bandwidth in zip(net.tails, net.heads, net.bandwidth, strict=True):
        passing[tail] -= bandwidth
        passing[head] += bandwidth
    return any(passing[net.ranks :])


def balanced(net: Network) -> Network:
    """Returns the network with only that part of every link that trees can use at the best rate.

    A switch that does not multicast sends on as much as it receives. So trees never need more of
    its incoming links than its outgoing links carry, nor the reverse. If the two are equal at all
    switches, all links are kept completely; at ranks they need not be equal.
    """
    return replace(net, bandwidth=_balance(net).shares[0]) if unbalanced(net) else net


def _balance(net: Network) -> Point:
    nothing = Point(Fraction(0), Fraction(0), (), ())
    point = Programme(net, net.demand).solve(nothing)
    if not point.rate:
        raise UnsupportedError(
            f"the optimal rate of {net.topology.name} was not found as a fraction, because its "
            "switches receive more or less than they send on; round its bandwidths to simpler ones."
        )
    return point


def _newton(net: Network) -> Optimum:
    """Finds 1/x* by Newton's method on cuts. Every round raises the bound."""
    common = math.lcm(*(each.denominator for each in net.bandwidth))
    capacity = net.capacity(Fraction(common))
    cuts = net.cuts()
    sides = []
    for rank in range(net.ranks):
        side = np.ones(len(net.topology.nodes), dtype=bool)
        side[rank] = False
        sides.append(side)
    bound = Fraction(0)
    while sides:
        ratios = [_ratio(net, capacity, side) for side in sides]
        first_best = max(range(len(sides)), key=ratios.__getitem__)
        if ratios[first_best] <= bound:
            raise InternalError("a violated cut does not raise the bound on the time 1/x*.")
        bound, side = ratios[first_best], sides[first_best]
        violations = cuts.violated(capacity * bound.numerator, net.demand * bound.denominator)
        sides = [violation.side for violation in violations]
    inv_x = bound * common
    k = bound.denominator // math.gcd(bound.denominator, *map(int, capacity))
    cut = tuple(node for node, inside in zip(net.topology.nodes, side, strict=True) if inside)
    return Optimum(inv_x, k, int(net.demand.sum()), k * inv_x, inv_x, cut)


def _ratio(net: Network, capacity: Ints, side: Mask) -> Fraction:
    demand = int(net.demand[side[: net.ranks]].sum())
    if not demand:
        return Fraction(0)  # all ranks except the only root, which needs no data
    return Fraction(demand, int(capacity[side[net.tails] & ~side[net.heads]].sum()))


def _fixed(net: Network, best: Optimum, k: int) -> Optimum:
    """Finds the best rate of k trees per root: the least scale U such that links of capacity
    floor(U b), where b is a link's bandwidth, can carry k trees per root (ForestColl, 5.5).

    U is at least k / x*. If every link has an equal reverse link, or there are no switches, k / x*
    + 1 / min b is always sufficient. In other networks `whole_units` drops units of capacity, so U
    may have to be larger, up to a multiple of the exact scale. Within this range, only the values
    of U at which floor(U b) of some link changes are tried.
    """
    low = k * best.inv_x
    distinct = sorted({each for each in net.bandwidth if each})
    high = low + 1 / distinct[0]
    points = {low} | {
        Fraction(units) / each
        for each in distinct
        for units in range(math.ceil(low * each), math.floor(high * each) + 1)
    }
    ordered = [*sorted(points), best.scale * -(-k // best.k)]
    cuts = net.cuts()

    def enough(scale: Fraction) -> bool:
        capacity = whole_units(net, net.capacity(scale))
        return not cuts.violated(capacity, net.demand * k, first_only=True)

    scale = ordered[bisect_left(ordered[:-1], True, key=enough)]
    return Optimum(scale / k, k, best.roots, scale, best.lower_bound, best.cut)


def whole_units(net: Network, capacity: Ints) -> Ints:
    """Returns the capacities, reduced by the fewest units such that each switch's inflow equals its
    outflow.

    Rounding down makes the two unequal only if a link and its reverse have different bandwidths.
    The units to drop are a least-cost flow from the switches that send too much to those that
    receive too much. It may pass through ranks, at which inflow and outflow may differ.
    """
    nodes, ranks = len(net.topology.nodes), net.ranks
    surplus = np.bincount(net.tails, capacity, nodes) - np.bincount(net.heads, capacity, nodes)
    surplus = surplus.astype(np.int64)
    surplus[:ranks] = 0
    if not surplus.any():
        return capacity
    solver = require("ortools.graph.python.min_cost_flow").SimpleMinCostFlow()
    arcs = solver.add_arcs_with_capacity_and_unit_cost(
        net.tails, net.heads, capacity, np.ones(len(capacity), dtype=np.int64)
    )
    every, unlimited = np.arange(ranks), np.full(ranks, nodes)
    endless, free = np.full(ranks, int(capacity.sum())), np.zeros(ranks, dtype=np.int64)
    solver.add_arcs_with_capacity_and_unit_cost(every, unlimited, endless, free)
    solver.add_arcs_with_capacity_and_unit_cost(unlimited, every, endless, free)
    supplies = np.append(surplus, -surplus.sum())
    solver.set_nodes_supplies(np.arange(nodes + 1), supplies)
    if solver.solve() != solver.OPTIMAL:
        raise InternalError("rounded capacities cannot be balanced.")
    balanced: Ints = capacity - solver.flows(arcs)
    return balanced
