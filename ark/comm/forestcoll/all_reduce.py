"""How fast an all-reduce can be: the linear programme over root weights, link shares and cuts.

An all-reduce sums each piece of the data on some rank, its root, and sends the sum out from there.
Roots need not carry equal shares, and the two directions need not use a link in turn: while later
pieces are still being summed, earlier ones are sent out. Let root v sum w_v GB/s, and let link e
give x_e GB/s to the gathering trees and y_e to the reducing ones. By Edmonds (1973) trees exist
exactly where x(out of S) >= w(S) and y(into S) >= w(S) for every node set S that lacks some rank;
with x_e + y_e <= b_e, and as much of x and of y leaving every switch as enters it, the largest sum
of w is the rate that trees can reach, and reducing first and gathering then is the case of equal
weights and x = y = b / 2. Cuts are generated as they are violated; the solver works in floating
point, and what it says is turned into fractions that prove themselves: a feasible point, checked by
maximum flows in integers, below, and a combination of cuts above. Where the two differ the gap is
stated. `ark.comm.forestcoll.forest` and the command line call `optimal_all_reduce`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ark.comm.forestcoll.cuts import Ints, Mask, RootedCuts
from ark.comm.forestcoll.optimum import Network, network, optimal
from ark.comm.forestcoll.symmetry import find_symmetry
from ark.comm.packages import require
from ark.comm.topology import Topology
from ark.errors import InternalError

_DENOMINATORS = (12, 120, 5040, 1 << 20)
_SLACK = 1e-9
_MOST_ROUNDS = 200

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class AllReduceOptimum:
    """The rate of an all-reduce: bytes of the data per time, GB/s.

    `rate` is what trees reach whose root v sums `weights[v]` GB/s, where the links, in the order of
    `Topology.capacities`, give `gather` GB/s to the gathering trees and `reduce` to the reducing
    ones. No trees do better than `bound`. `uniform` tells that all roots have the same weight and
    that both directions take half of every link.
    """

    rate: Fraction
    bound: Fraction
    weights: tuple[Fraction, ...]
    gather: tuple[Fraction, ...]
    reduce: tuple[Fraction, ...]
    uniform: bool

    @property
    def exact(self) -> bool:
        """Tells whether the rate is proven to be the best."""
        return self.rate == self.bound

    @property
    def gap(self) -> float:
        """Returns by how much, at most, some trees could be faster, as a share of the bound."""
        return float(1 - self.rate / self.bound)


def optimal_all_reduce(topology: Topology) -> AllReduceOptimum:
    """Returns the best rate of an all-reduce by trees, and the proof that none is better."""
    net = network(topology)
    equal = optimal(topology)
    backward = optimal(topology.reverse())
    # Links' shares p and 1 - p for gathering and reducing: both at the same rate.
    inverse = equal.inv_x + backward.inv_x
    share = equal.inv_x / inverse
    rate = net.ranks / inverse
    uniform = AllReduceOptimum(
        rate,
        rate,
        (rate / net.ranks,) * net.ranks,
        tuple(share * each for each in net.bandwidth),
        tuple((1 - share) * each for each in net.bandwidth),
        True,
    )
    programme = _Programme(net)
    symmetry = find_symmetry(net)
    for optimum, reducing in ((equal, False), (backward, True)):
        side = np.array([node in optimum.cut for node in topology.nodes])
        for moved in symmetry.elements():
            image = np.empty_like(side)
            image[moved] = side
            programme.add(image, reducing)
    best = programme.solve(uniform)
    return best if best.rate > rate else _bounded(uniform, best.bound)


def _bounded(point: AllReduceOptimum, bound: Fraction) -> AllReduceOptimum:
    return AllReduceOptimum(
        point.rate, bound, point.weights, point.gather, point.reduce, point.uniform
    )


@dataclass(frozen=True)
class _Cut:
    """The row x(out of S) >= w(S), or y(into S) >= w(S) where it is of the reducing trees."""

    side: Mask
    reducing: bool
    row: Any


class _Programme:
    """The linear programme with the cuts found so far; links are numbered as in the network."""

    def __init__(self, net: Network) -> None:
        self._net = net
        self._unit = max(net.bandwidth)
        self._tails, self._heads = net.tails, net.heads
        self._flows = (
            RootedCuts(len(net.topology.nodes), net.ranks, net.tails, net.heads),
            RootedCuts(len(net.topology.nodes), net.ranks, net.heads, net.tails),
        )
        pywraplp = require("ortools.linear_solver.pywraplp")
        self._solver = solver = pywraplp.Solver.CreateSolver("GLOP")
        self._infinity = solver.infinity()
        limits = [float(each / self._unit) for each in net.bandwidth]
        # By direction: gathering first.
        self._links = [[solver.NumVar(0, limit, "") for limit in limits] for _ in range(2)]
        self._weights = [solver.NumVar(0, self._infinity, "") for _ in range(net.ranks)]
        for one, other, limit in zip(*self._links, limits, strict=True):
            row = solver.RowConstraint(-self._infinity, limit, "")
            row.SetCoefficient(one, 1)
            row.SetCoefficient(other, 1)
        self._kept = [
            [self._conserved(links, switch) for switch in range(net.ranks, len(net.topology.nodes))]
            for links in self._links
        ]
        objective = solver.Objective()
        for weight in self._weights:
            objective.SetCoefficient(weight, 1)
        objective.SetMaximization()
        self._cuts: dict[tuple[bool, bytes], _Cut] = {}
        for rank in range(net.ranks):
            side = np.ones(len(net.topology.nodes), dtype=bool)
            side[rank] = False
            self.add(side, False)
            self.add(side, True)

    def _conserved(self, links: list[Any], switch: int) -> Any:
        row = self._solver.RowConstraint(0, 0, "")
        for link in np.flatnonzero((self._tails == switch) | (self._heads == switch)):
            row.SetCoefficient(links[link], 1 if self._tails[link] == switch else -1)
        return row

    def _crossing(self, side: Mask, reducing: bool) -> Ints:
        """Returns the links that a cut counts: out of the set, or into it."""
        near, far = (self._heads, self._tails) if reducing else (self._tails, self._heads)
        return np.flatnonzero(side[near] & ~side[far])

    def add(self, side: Mask, reducing: bool) -> bool:
        """Adds a cut; False if it is there already."""
        key = (reducing, side.tobytes())
        if key in self._cuts:
            return False
        row = self._solver.RowConstraint(0, self._infinity, "")
        for link in self._crossing(side, reducing):
            row.SetCoefficient(self._links[reducing][link], 1)
        for rank in np.flatnonzero(side[: self._net.ranks]):
            row.SetCoefficient(self._weights[rank], -1)
        self._cuts[key] = _Cut(side, reducing, row)
        return True

    def solve(self, known: AllReduceOptimum) -> AllReduceOptimum:
        """Returns the best point found, or `known` with the bound where it is not bettered."""
        for _ in range(_MOST_ROUNDS):
            if self._solver.Solve() != self._solver.OPTIMAL:
                break
            if self._solver.Objective().Value() <= float(known.rate / self._unit) * (1 + _SLACK):
                return _bounded(known, self._bound(known.rate))
            values = [np.array([v.solution_value() for v in each]) for each in self._links]
            weights = np.array([v.solution_value() for v in self._weights])
            if self._separate(values, weights):
                continue
            point = self._exact(values, weights)
            if point is not None:
                return _bounded(point, self._bound(point.rate))
            break
        return _bounded(known, self._bound(known.rate))

    def _separate(self, values: list[Floats], weights: Floats) -> bool:
        """Adds cuts that the floating-point solution breaks; True if there was a new one."""
        scale = 1e9
        demand = np.floor(weights * scale).astype(np.int64)
        added = False
        for reducing, flows in enumerate(self._flows):
            capacity = np.ceil(values[reducing] * scale).astype(np.int64)
            for violation in flows.violated(capacity, demand):
                if violation.deficit > len(capacity) + 10:
                    added |= self.add(violation.side, bool(reducing))
        return added

    def _exact(self, values: list[Floats], weights: Floats) -> AllReduceOptimum | None:
        """Returns the solution as fractions that prove feasible, of the smallest denominators that
        lose nothing.
        """
        best: AllReduceOptimum | None = None
        hoped = self._solver.Objective().Value()
        for largest in _DENOMINATORS:
            shares = [[_near(value, largest) for value in each] for each in values]
            exact = [_near(value, largest) for value in weights]
            total = sum(exact, Fraction(0))
            better = best is None or total * self._unit > best.rate
            if total and better and self._feasible(shares, exact):
                gather, reduce = (tuple(s * self._unit for s in each) for each in shares)
                scaled = tuple(each * self._unit for each in exact)
                rate = total * self._unit
                best = AllReduceOptimum(rate, rate, scaled, gather, reduce, False)
                if total >= hoped * (1 - _SLACK):
                    break
        return best

    def _feasible(self, shares: list[list[Fraction]], weights: list[Fraction]) -> bool:
        net = self._net
        for one, other, bandwidth in zip(*shares, net.bandwidth, strict=True):
            if one < 0 or other < 0 or one + other > bandwidth / self._unit:
                return False
        for each in shares:
            for switch in range(net.ranks, len(net.topology.nodes)):
                passing = (
                    each[link] * (1 if self._tails[link] == switch else -1)
                    for link in np.flatnonzero((self._tails == switch) | (self._heads == switch))
                )
                if sum(passing):
                    return False
        common = math.lcm(*(each.denominator for each in (*shares[0], *shares[1], *weights)))
        if common * len(weights) * sum(weights) > 1 << 50:
            return False
        demand = np.array([int(each * common) for each in weights], dtype=np.int64)
        for flows, each in zip(self._flows, shares, strict=True):
            capacity = np.array([int(share * common) for share in each], dtype=np.int64)
            if flows.violated(capacity, demand, first_only=True):
                return False
        return True

    def _bound(self, hoped: Fraction) -> Fraction:
        """Returns what the solver's multipliers, as fractions, prove to be an upper bound.

        Weak duality: any multipliers of cuts that count every root at least once in all give one;
        the denominators are raised until the proof meets the rate that is hoped for.
        """
        proofs = []
        for largest in _DENOMINATORS:
            proofs += [bound * self._unit for bound in self._proofs(largest)]
            if proofs and min(proofs) <= hoped:
                break
        if not proofs:
            raise InternalError("the cuts of an all-reduce prove no bound.")
        return max(min(proofs), hoped)

    def _proofs(self, largest: int) -> Iterator[Fraction]:
        ranks, nodes = self._net.ranks, len(self._net.topology.nodes)
        counted = [Fraction(0)] * ranks
        through = [[Fraction(0)] * len(self._tails) for _ in range(2)]
        for cut in self._cuts.values():
            weight = _near(abs(cut.row.dual_value()), largest)
            if not weight:
                continue
            for rank in np.flatnonzero(cut.side[:ranks]):
                counted[rank] += weight
            for link in self._crossing(cut.side, cut.reducing):
                through[cut.reducing][link] += weight
        least = min(counted)
        if least <= 0:
            return
        for sign in (1, -1):
            price = [Fraction(0)] * len(self._tails)
            for reducing in range(2):
                potential = [Fraction(0)] * ranks + [
                    sign * _near(row.dual_value(), largest) for row in self._kept[reducing]
                ]
                assert len(potential) == nodes
                for link, weight in enumerate(through[reducing]):
                    rise = potential[self._heads[link]] - potential[self._tails[link]]
                    price[link] = max(price[link], weight + rise)
            total = sum(
                (cost * each for cost, each in zip(price, self._net.bandwidth, strict=True)),
                Fraction(0),
            )
            yield total / self._unit / least


def _near(value: float, largest: int) -> Fraction:
    return Fraction(value).limit_denominator(largest)
