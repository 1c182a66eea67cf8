"""Computes the best rate of trees by a linear programme over cuts, if the weights of the roots and
the shares of the links are free.

Let root v send w_v GB/s, and let gathering trees (which send data out from the roots) use x_e GB/s
of link e. By Edmonds (1973) such trees exist if and only if x(out of S) >= w(S) for every node set
S that does not contain every rank. For reducing trees, which sum data towards the roots, the
condition is the same with the capacity into S. A switch cannot multicast, so its outflow equals its
inflow. The constraint of a cut is added when a solution violates it.

The solver works in floating point. Its solution is converted to fractions, which prove two bounds
on the rate. The lower bound is a feasible point, checked by maximum flows in integers. The upper
bound is a combination of cuts (weak duality). If the bounds differ, the caller reports the gap.
Used by `ark.collective.forestcoll.optimum` and `all_reduce`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ark.collective.forestcoll.cuts import Ints, Mask, RootedCuts
from ark.collective.forestcoll.network import Network
from ark.collective.packages import require
from ark.errors import InternalError

_DENOMINATORS = (12, 120, 5040, 1 << 20)
_RELATIVE_TOLERANCE = 1e-9
_MOST_ROUNDS = 200

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """A solution of the linear programme: a rate in GB/s that trees attain, and an upper bound on
    the rate of any trees. `weights` are the GB/s that each rank sends or sums as a root. `shares`
    has a tuple with the GB/s of each link for the gathering trees and, with `two_way`, a second
    tuple for the reducing trees.
    """

    rate: Fraction
    bound: Fraction
    weights: tuple[Fraction, ...]
    shares: tuple[tuple[Fraction, ...], ...]


@dataclass(frozen=True)
class _Cut:
    """A constraint of the linear programme, for a set S of nodes: the trees' capacity out of S is
    at least the weight of the roots in S, x(out of S) >= w(S). For reducing trees it is the
    capacity into S, y(into S) >= w(S).
    """

    side: Mask
    reducing: bool
    row: Any


class Programme:
    """The programme with the cuts added so far. Links are numbered as in the network.

    If `demand` is given, the roots' weights are a rate times `demand`, and the rate is maximised.
    Otherwise the weights are free, and their sum is maximised. With `two_way` every link is shared
    by gathering and reducing trees. `in_network` permits what switches can compute. In gathering
    trees, a switch that multicasts may send more than it receives. In reducing trees, a switch that
    sums may receive more than it sends. A switch that does both may be a root. The rate is then
    only an upper bound, and other modules draw trees that attain it.
    """

    def __init__(
        self,
        net: Network,
        demand: Ints | None = None,
        two_way: bool = False,
        in_network: bool = False,
    ) -> None:
        self._net = net
        self._unit = max(net.bandwidth)
        self._tails, self._heads = net.tails, net.heads
        nodes = len(net.topology.nodes)
        ways = ((net.tails, net.heads), (net.heads, net.tails))[: 1 + two_way]
        number = {node: index for index, node in enumerate(net.topology.nodes)}
        able = (net.topology.multicast, net.topology.reduces) if in_network else ((), ())
        copying = [{number[node] for node in nodes_able} for nodes_able in able]
        switch_roots = sorted(copying[0] & copying[1])
        # The weight of root v is the sum, over i, of coefficients[v, i] times variable i.
        self._roots: Ints = np.array([*range(net.ranks), *switch_roots], dtype=np.int64)
        self._coefficients = (
            np.eye(len(self._roots), dtype=np.int64) if demand is None else demand[:, None]
        )
        teams = [[switch] for switch in switch_roots]
        self._flows = [RootedCuts(nodes, net.ranks, *way, teams) for way in ways]
        pywraplp = require("ortools.linear_solver.pywraplp")
        self._solver = solver = pywraplp.Solver.CreateSolver("GLOP")
        self._infinity = solver.infinity()
        limits = [float(each / self._unit) for each in net.bandwidth]
        self._links = [[solver.NumVar(0, limit, "") for limit in limits] for _ in ways]
        count = self._coefficients.shape[1]
        self._rates = [solver.NumVar(0, self._infinity, "") for _ in range(count)]
        for link, limit in enumerate(limits):
            row = solver.RowConstraint(-self._infinity, limit, "")
            for links in self._links:
                row.SetCoefficient(links[link], 1)
        switches = range(net.ranks, nodes)
        self._kept = [
            {each: self._conserved(links, each) for each in switches if each not in free}
            for links, free in zip(self._links, copying, strict=False)
        ]
        objective = solver.Objective()
        for rate in self._rates:
            objective.SetCoefficient(rate, 1)
        objective.SetMaximization()
        self._cuts: dict[tuple[bool, bytes], _Cut] = {}
        for rank in range(net.ranks):
            side = np.ones(nodes, dtype=bool)
            side[rank] = False
            for reducing in range(len(ways)):
                self.add(side, bool(reducing))

    def _conserved(self, links: list[Any], switch: int) -> Any:
        row = self._solver.RowConstraint(0, 0, "")
        for link in np.flatnonzero((self._tails == switch) | (self._heads == switch)):
            row.SetCoefficient(links[link], 1 if self._tails[link] == switch else -1)
        return row

    def _crossing(self, side: Mask, reducing: bool) -> Ints:
        """Returns the links that a cut counts: the links out of the set or, for reducing trees,
        into the set.
        """
        near, far = (self._heads, self._tails) if reducing else (self._tails, self._heads)
        return np.flatnonzero(side[near] & ~side[far])

    def add(self, side: Mask, reducing: bool) -> bool:
        """Adds the cut of a node set. Returns False if the programme has it already."""
        key = (reducing, side.tobytes())
        if key in self._cuts:
            return False
        row = self._solver.RowConstraint(0, self._infinity, "")
        for link in self._crossing(side, reducing):
            row.SetCoefficient(self._links[reducing][link], 1)
        inside = self._coefficients[side[self._roots]].sum(axis=0)
        for rate, count in zip(self._rates, inside, strict=True):
            if count:
                row.SetCoefficient(rate, -float(count))
        self._cuts[key] = _Cut(side, reducing, row)
        return True

    def solve(self, known: Point) -> Point:
        """Returns the best solution that is found. If its rate is not above that of `known`,
        returns `known` with the new bound.
        """
        for _ in range(_MOST_ROUNDS):
            if self._solver.Solve() != self._solver.OPTIMAL:
                break
            if self._solver.Objective().Value() <= float(known.rate / self._unit) * (
                1 + _RELATIVE_TOLERANCE
            ):
                break
            values = [np.array([v.solution_value() for v in each]) for each in self._links]
            rates = np.array([v.solution_value() for v in self._rates])
            if self._separate(values, rates):
                continue
            point = self._exact(values, rates)
            if point is not None and point.rate > known.rate:
                known = point
            break
        return replace(known, bound=self._bound(known.rate))

    def _separate(self, values: list[Floats], rates: Floats) -> bool:
        """Adds cuts that the floating-point solution violates. Returns True if at least one is
        new.
        """
        scale = 1e9
        demand = np.floor(self._coefficients @ rates * scale).astype(np.int64)
        added = False
        for reducing, flows in enumerate(self._flows):
            capacity = np.ceil(values[reducing] * scale).astype(np.int64)
            for violation in flows.violated(capacity, demand):
                if violation.deficit > len(capacity) + 10:
                    added |= self.add(violation.side, bool(reducing))
        return added

    def _exact(self, values: list[Floats], rates: Floats) -> Point | None:
        """Returns the solution as fractions that prove it feasible. Denominators are as small as
        possible without lowering the rate.
        """
        best: Point | None = None
        hoped = self._solver.Objective().Value()
        for largest in _DENOMINATORS:
            shares = [[_near(value, largest) for value in each] for each in values]
            exact = [_near(value, largest) for value in rates]
            total = sum(exact, Fraction(0))
            if not total or (best is not None and total * self._unit <= best.rate):
                continue
            weights = [
                sum((int(c) * rate for c, rate in zip(row, exact, strict=True) if c), Fraction(0))
                for row in self._coefficients
            ]
            if not self._feasible(shares, weights):
                continue
            best = Point(
                total * self._unit,
                total * self._unit,
                tuple(each * self._unit for each in weights),
                tuple(tuple(share * self._unit for share in each) for each in shares),
            )
            if total >= hoped * (1 - _RELATIVE_TOLERANCE):
                break
        return best

    def _feasible(self, shares: list[list[Fraction]], weights: list[Fraction]) -> bool:
        net = self._net
        for *given, bandwidth in zip(*shares, net.bandwidth, strict=True):
            if min(given) < 0 or sum(given) > bandwidth / self._unit:
                return False
        for each, kept in zip(shares, self._kept, strict=True):
            for switch in kept:
                passing = (
                    each[link] * (1 if self._tails[link] == switch else -1)
                    for link in np.flatnonzero((self._tails == switch) | (self._heads == switch))
                )
                if sum(passing):
                    return False
        common = math.lcm(*(each.denominator for each in (*itertools.chain(*shares), *weights)))
        if common * len(weights) * sum(weights) > 1 << 50:
            return False
        demand = np.array([int(each * common) for each in weights], dtype=np.int64)
        for flows, each in zip(self._flows, shares, strict=True):
            capacity = np.array([int(share * common) for share in each], dtype=np.int64)
            if flows.violated(capacity, demand, first_only=True):
                return False
        return True

    def _bound(self, hoped: Fraction) -> Fraction:
        """Returns the upper bound that the solver's dual values, as fractions, prove.

        The bound is a sum of cut constraints with nonnegative factors. It is valid if the factors
        of each rate in this sum are at least 1. Denominators are raised until the proof attains the
        expected rate.
        """
        proofs = []
        for largest in _DENOMINATORS:
            proofs += [bound * self._unit for bound in self._proofs(largest)]
            if proofs and min(proofs) <= hoped:
                break
        if not proofs:
            raise InternalError(f"the cuts of {self._net.topology.name} prove no bound of rates.")
        return max(min(proofs), hoped)

    def _proofs(self, largest: int) -> Iterator[Fraction]:
        counted = [Fraction(0)] * len(self._rates)
        through = [[Fraction(0)] * len(self._tails) for _ in self._links]
        for cut in self._cuts.values():
            weight = _near(abs(cut.row.dual_value()), largest)
            if not weight:
                continue
            for place, count in enumerate(self._coefficients[cut.side[self._roots]].sum(axis=0)):
                counted[place] += weight * int(count)
            for link in self._crossing(cut.side, cut.reducing):
                through[cut.reducing][link] += weight
        least = min(counted)
        if least <= 0:
            return
        for sign in (1, -1):
            price = [Fraction(0)] * len(self._tails)
            for kept, weights in zip(self._kept, through, strict=True):
                potential = [Fraction(0)] * len(self._net.topology.nodes)
                for switch, row in kept.items():
                    potential[switch] = sign * _near(row.dual_value(), largest)
                for link, weight in enumerate(weights):
                    rise = potential[self._heads[link]] - potential[self._tails[link]]
                    price[link] = max(price[link], weight + rise)
            total = sum(
                (cost * each for cost, each in zip(price, self._net.bandwidth, strict=True)),
                Fraction(0),
            )
            yield total / self._unit / least


def _near(value: float, largest: int) -> Fraction:
    return Fraction(value).limit_denominator(largest)
