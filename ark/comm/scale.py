"""Thousands of ranks on paper: the optimum of a quotient, and one tree that stands for all.

Networks of equal boxes look the same from every box. `optimal_by_symmetry` solves the optimum on a
quotient of a handful of nodes; `forest_by_symmetry` draws the trees of one rank an orbit and
expands any other rank's on demand. Users call them beyond the sizes for which
`ark.comm.forestcoll.forest` packs every tree.

The quotient is exact for any topology: where nodes are classed so that all nodes of a class have
equal capacity from and to every class, a flow between classes spreads evenly over their nodes, so
maximum flows to a class of one node are the same in both (Ramana et al. 1994, fractional
isomorphism). The group of symmetries is only used after it has been tested on every link.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ark.comm.forestcoll.cuts import Ints, RootedCuts
from ark.comm.forestcoll.isomorphic import draw
from ark.comm.forestcoll.network import Network, network
from ark.comm.forestcoll.optimum import Optimum, unbalanced
from ark.comm.forestcoll.symmetry import Symmetry, find_symmetry
from ark.comm.forestcoll.tree import Tree
from ark.comm.topology import Topology
from ark.errors import InternalError, UnsupportedError


@dataclass(frozen=True)
class SymmetricForest:
    """Trees of every rank, of which only those of `base`, one root an orbit, are stored."""

    topology: Topology
    optimum: Optimum
    symmetry: Symmetry
    base: tuple[Tree, ...]

    @property
    def height(self) -> int:
        """Returns the height of the tallest tree."""
        return max(tree.height for tree in self.base)

    def trees(self, rank: int) -> Iterator[Tree]:
        """Yields the k trees of a rank: the images of those of its representative."""
        moved = self.symmetry.image(self.symmetry.element_of[rank])
        for tree in self.base:
            if tree.root == self.symmetry.representative[rank]:
                yield tree.image(self.topology.nodes, moved)


def optimal_by_symmetry(topology: Topology, symmetry: Symmetry | None = None) -> Optimum:
    """Returns the optimum of all-gather, as `optimal` does, from one quotient a rank orbit."""
    net = network(topology)
    if unbalanced(net):
        raise UnsupportedError(
            f"a switch of {topology.name} receives more or less than it sends on; its optimum is "
            "found for the whole network only."
        )
    symmetry = symmetry or find_symmetry(net)
    common = math.lcm(*(each.denominator for each in net.bandwidth))
    capacity = net.capacity(Fraction(common))
    into = np.bincount(net.heads, capacity, len(topology.nodes))[: net.ranks].astype(np.int64)
    worst = int(into.argmin())
    bound = Fraction(net.ranks - 1, int(into[worst]))
    side = np.arange(len(topology.nodes)) != worst
    for sink in np.unique(symmetry.representative):
        classes = _classes(net, int(sink))
        quotient = _Quotient(net, capacity, classes, int(sink))
        while True:
            better = quotient.better_cut(bound)
            if better is None:
                break
            side = better
            leaving = int(capacity[side[net.tails] & ~side[net.heads]].sum())
            ratio = Fraction(int(side[: net.ranks].sum()), leaving)
            if ratio <= bound:
                raise InternalError("a quotient's cut does not raise the bound on 1/x*.")
            bound = ratio
    inv_x = bound * common
    k = bound.denominator // math.gcd(bound.denominator, *map(int, set(capacity)))
    cut = tuple(node for node, inside in zip(topology.nodes, side, strict=True) if inside)
    return Optimum(inv_x, k, net.ranks, k * inv_x, inv_x, cut)


class _Quotient:
    """The network of classes; class 0 is the sink alone, classes of ranks come first."""

    def __init__(self, net: Network, capacity: Ints, classes: Ints, sink: int) -> None:
        self._classes, self._sink = classes, sink
        count = int(classes.max()) + 1
        ranked = np.bincount(classes[: net.ranks], minlength=count)
        self._demand = ranked[ranked > 0].astype(np.int64)
        total: Counter[tuple[int, int]] = Counter()
        ends = zip(classes[net.tails], classes[net.heads], capacity, strict=True)
        for tail, head, units in ends:
            if tail != head:
                total[int(tail), int(head)] += int(units)
        self._capacity = np.array(list(total.values()), dtype=np.int64)
        tails, heads = np.array(list(total)).T
        self._cuts = RootedCuts(count, len(self._demand), tails, heads)

    def better_cut(self, bound: Fraction) -> np.ndarray | None:
        """Returns the nodes of a cut before the sink whose ratio is above the bound, or None."""
        found = self._cuts.violated(
            self._capacity * bound.numerator,
            self._demand * bound.denominator,
            orbits=[[int(self._classes[self._sink])]],
        )
        return found[0].side[self._classes] if found else None


def _classes(net: Network, sink: int) -> Ints:
    """Returns the coarsest classing in which `sink` is alone and classes have equal capacities."""
    nodes = len(net.topology.nodes)
    colour = [0 if node == sink else 1 if node < net.ranks else 2 for node in range(nodes)]
    arcs = list(zip(map(int, net.tails), map(int, net.heads), net.bandwidth, strict=True))
    while True:
        seen: list[list[tuple[int, bool, Fraction]]] = [[] for _ in range(nodes)]
        for tail, head, bandwidth in arcs:
            seen[tail].append((colour[head], True, bandwidth))
            seen[head].append((colour[tail], False, bandwidth))
        signatures = []
        for node in range(nodes):
            totals: dict[tuple[int, bool], Fraction] = {}
            for other, outward, bandwidth in seen[node]:
                totals[other, outward] = totals.get((other, outward), Fraction(0)) + bandwidth
            signatures.append((colour[node], tuple(sorted(totals.items()))))
        order = {signature: index for index, signature in enumerate(sorted(set(signatures)))}
        finer = [order[signature] for signature in signatures]
        if len(order) == len(set(colour)):
            return np.array(finer, dtype=np.int64)
        colour = finer


def forest_by_symmetry(topology: Topology) -> SymmetricForest:
    """Returns all-gather trees at the optimal rate; loads of all links are counted exactly.

    Raises UnsupportedError where no such trees are found within every link's bandwidth.
    """
    net = network(topology)
    symmetry = find_symmetry(net)
    optimum = optimal_by_symmetry(topology, symmetry)
    base = draw(net, symmetry, optimum.scale, optimum.k)
    if base is None:
        raise UnsupportedError(
            f"The trees of {topology.name} are too intertwined to be drawn from its symmetry; "
            "the optimum stands, and trees of up to 512 ranks are packed without symmetry."
        )
    return SymmetricForest(topology, optimum, symmetry, base)
