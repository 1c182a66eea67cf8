"""Computes and checks the trees of a collective on a topology. This is the interface of ForestColl
to the rest of ark: `forest` runs the steps (optimum, then isomorphic trees or packing) and returns
a `Forest`; `trees` returns only the trees. Every forest is checked against the topology before it
is returned. Called by `ark.collective.forestcoll.lower` and the command line.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from ark.collective.forestcoll.all_reduce import AllReduceOptimum, optimal_all_reduce
from ark.collective.forestcoll.cuts import Ints
from ark.collective.forestcoll.in_network import draw_joint, loads
from ark.collective.forestcoll.isomorphic import draw
from ark.collective.forestcoll.network import Network, network
from ark.collective.forestcoll.optimum import Optimum, balanced, cut_optimum, optimal, whole_units
from ark.collective.forestcoll.packing import Branching, packed_trees
from ark.collective.forestcoll.switches import Direct, remove_switches
from ark.collective.forestcoll.symmetry import find_symmetry, unmoved
from ark.collective.forestcoll.tree import Edge, Tree
from ark.collective.topology import Topology
from ark.errors import InternalError, InvalidUsageError, UnsupportedError

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")
_MAX_RANKS_TIMES_LINKS = 1 << 21  # limit of ranks times links if trees are packed one by one
_MOST_EDGES = 1 << 21  # limit of edges of all trees together
_MOST_TREES = 1 << 14


@dataclass(frozen=True)
class Forest:
    """The trees of one collective. Data is first summed along the `reducing` trees towards their
    roots, and then sent from the roots along the `gathering` trees. A collective without one of
    these phases has no trees for it.

    A Tree stands for `count` equal trees, each of which carries one unit of data. If `optimum` is
    an `Optimum`, it is the optimal rate of one phase, and a unit is 1/k of the data that one root
    sends or receives. If `optimum` is an `AllReduceOptimum`, the two phases of the all-reduce run
    at the same time. Each phase then uses a part of every link's bandwidth, and `optimum` is the
    optimal rate of both phases together.
    """

    topology: Topology
    collective: str
    optimum: Optimum | AllReduceOptimum
    reducing: tuple[Tree, ...] = ()
    gathering: tuple[Tree, ...] = ()
    reducing_optimum: Optimum | None = None  # of an all-reduce's reducing phase, if different

    @property
    def algbw(self) -> Fraction:
        """Returns the algorithm bandwidth in GB/s: the bytes of the whole data divided by the time.
        For an all-reduce the time is that of both phases.
        """
        if isinstance(self.optimum, AllReduceOptimum):
            return self.optimum.rate
        if self.collective != "all_reduce":
            return self.optimum.algbw
        other = self.reducing_optimum or self.optimum
        return self.optimum.roots / (self.optimum.inv_x + other.inv_x)

    @property
    def trees(self) -> int:
        """Returns the number of trees, each carrying one unit of data, of the root that has the
        most in a phase.
        """
        units: Counter[int] = Counter()
        for tree in self.gathering or self.reducing:
            units[tree.root] += tree.count
        return max(units.values())

    @property
    def height(self) -> int:
        """Returns the height of the tallest tree."""
        return max(tree.height for tree in self.reducing + self.gathering)


def trees(topology: Topology, k: int | None = None, root: str | None = None) -> tuple[Tree, ...]:
    """Returns the gathering trees of all ranks or, for a broadcast, of one rank; see `forest`."""
    return forest(topology, "all_gather" if root is None else "broadcast", k, root).gathering


def forest(
    topology: Topology,
    collective: str = "all_gather",
    k: int | None = None,
    root: str | None = None,
) -> Forest:
    """Returns trees with which the collective runs at the optimal rate. If k is given, there are k
    trees per root, and the rate is the best one for k trees.

    `root`, a rank's id, is for broadcast and reduce only. Raises TopologyError for an invalid
    topology. Raises UnsupportedError if the trees would not fit into memory, or if the network is
    too large for packing (2^21 ranks times links) and not symmetric enough to need none.
    """
    if collective not in COLLECTIVES:
        raise InvalidUsageError(
            f"ForestColl has no collective {collective!r}; it has {', '.join(COLLECTIVES)}."
        )
    rooted = collective in ("broadcast", "reduce")
    if rooted != (root is not None):
        raise InvalidUsageError(
            f"{collective} was given root {root}; broadcast and reduce need a root, and the other "
            "collectives have none."
        )
    roots = None if root is None else {root: 1}
    reverse = topology.reverse()
    if collective in ("all_gather", "broadcast"):
        optimum, gathering = _gathering(topology, k, roots)
        return Forest(topology, collective, optimum, gathering=gathering)
    if collective in ("reduce_scatter", "reduce"):
        optimum, outward = _gathering(reverse, k, roots)
        return Forest(topology, collective, optimum, reducing=_reversed(outward))
    result = None
    if k is None:
        result = _joint(topology) or _weighted(topology)
    return result or _in_two_phases(topology, k)


def _in_two_phases(topology: Topology, k: int | None) -> Forest:
    """Returns an all-reduce that is a reduce-scatter followed by an all-gather."""
    reverse = topology.reverse()
    optimum, gathering = _gathering(topology, k, None)
    other, outward = optimum, gathering
    if reverse.capacities() != topology.capacities() or reverse.multicast != topology.multicast:
        other, outward = _gathering(reverse, k, None)
    trees_a_root = math.lcm(optimum.k, other.k)
    gathering = _finer(gathering, trees_a_root // optimum.k)
    reducing = _reversed(_finer(outward, trees_a_root // other.k))
    return Forest(topology, "all_reduce", optimum, reducing, gathering, other)


def _joint(topology: Topology) -> Forest | None:
    """Returns an all-reduce whose trees use switches that multicast or sum; None if such an
    all-reduce is not faster than one without them.
    """
    if not (topology.multicast or topology.reduces):
        return None
    drawn = draw_joint(topology)
    if drawn is None or drawn[0] <= optimal_all_reduce(topology).rate:
        return None
    rate, bound, drawn_trees = drawn
    net = network(topology)
    k = sum(tree.count for tree in drawn_trees) // net.ranks
    check(net, net.ranks * k / rate, net.demand * k, drawn_trees, topology.multicast)
    even = (rate / net.ranks,) * net.ranks
    optimum = AllReduceOptimum(rate, bound, even, (), (), True)
    return Forest(topology, "all_reduce", optimum, _reversed(drawn_trees), drawn_trees)


def _finer(trees: tuple[Tree, ...], times: int) -> tuple[Tree, ...]:
    """Returns the same trees with finer units: every unit of data is divided into `times` units."""
    return tuple(
        Tree(
            tree.root,
            tree.count * times,
            tuple(
                replace(edge, paths=tuple((path, units * times) for path, units in edge.paths))
                for edge in tree.edges
            ),
        )
        for tree in trees
    )


def _weighted(topology: Topology) -> Forest | None:
    """Returns an all-reduce whose roots sum unequal shares of the data. Returns None if equal
    shares are as fast, or if only equal shares are possible. (Replacing switches by direct links
    requires that the capacity into each node equals the capacity out of it.)
    """
    best = optimal_all_reduce(topology)
    if best.uniform or len(topology.ranks) * len(topology.links) > _MAX_RANKS_TIMES_LINKS:
        return None
    fractions = (*best.weights, *best.gather, *best.reduce)
    units = math.lcm(*(each.denominator for each in fractions))
    demand = np.array([int(each * units) for each in best.weights], dtype=np.int64)
    common = math.gcd(*map(int, demand), *(int(each * units) for each in fractions))
    demand //= common
    if demand.sum() > _MOST_TREES:
        return None
    scale = Fraction(units, common)
    net = replace(network(topology), demand=demand)
    reverse = replace(net, tails=net.heads, heads=net.tails, topology=topology.reverse())
    outcome = []
    for each, shares in ((net, best.gather), (reverse, best.reduce)):
        part = replace(each, bandwidth=shares)
        try:
            packed = _spanning_trees(part, part.capacity(scale), demand)
        except InternalError:
            return None
        check(part, scale, demand, packed)
        outcome.append(packed)
    return Forest(topology, "all_reduce", best, _reversed(outcome[1]), outcome[0])


def _reversed(trees: tuple[Tree, ...]) -> tuple[Tree, ...]:
    return tuple(tree.reversed() for tree in trees)


def _gathering(
    topology: Topology, k: int | None, roots: dict[str, int] | None
) -> tuple[Optimum, tuple[Tree, ...]]:
    if topology.multicast and k is None:
        best, net = cut_optimum(topology, roots), network(topology, roots)
        drawn = _isomorphic(net, best)
        if drawn is not None:
            check(net, best.scale, net.demand * best.k, drawn, topology.multicast)
            return best, drawn
    optimum = optimal(topology, k, roots)
    net = balanced(network(topology, roots))
    demand = net.demand * optimum.k
    if (net.demand > 0).sum() * (net.ranks - 1) > _MOST_EDGES:
        raise UnsupportedError(
            f"{topology.name} has {net.ranks} ranks. One tree for each rank has {net.ranks - 1} "
            f"edges, and all trees together would have more than {_MOST_EDGES}, the limit. The "
            "optimal bandwidth can be computed without the trees; it has no such limit."
        )
    result = _isomorphic(net, optimum)
    if result is None:
        _check_packable(net)
        result = _spanning_trees(net, whole_units(net, net.capacity(optimum.scale)), demand)
    check(net, optimum.scale, demand, result, topology.multicast)
    return optimum, result


def _check_packable(net: Network) -> None:
    size = net.ranks * len(net.tails)
    if size > _MAX_RANKS_TIMES_LINKS:
        raise UnsupportedError(
            f"{net.topology.name} has {net.ranks} ranks and {len(net.tails)} links. Its trees are "
            "not symmetric, so that each must be found separately, which is supported only if "
            f"ranks times links are at most {_MAX_RANKS_TIMES_LINKS}. Try a smaller k, or a "
            "network of equal boxes; the optimal bandwidth can be computed without the trees."
        )


def _isomorphic(net: Network, optimum: Optimum) -> tuple[Tree, ...] | None:
    """Returns trees for all roots that are images of a few trees under a symmetry of the network;
    None if this method finds none.
    """
    even = net.demand.min() == net.demand.max()
    if not even and not net.topology.multicast:
        return None
    symmetry = find_symmetry(net) if even else unmoved(net)
    base = draw(net, symmetry, optimum.scale, optimum.k)
    if base is None:
        return None
    nodes = net.topology.nodes
    images = [tree.image(nodes, moved) for moved in symmetry.images for tree in base]
    return tuple(sorted(images, key=lambda tree: tree.root))


def _spanning_trees(net: Network, capacities: Ints, demand: Ints) -> tuple[Tree, ...]:
    """Returns trees that are packed one by one between ranks after switches have been removed.
    Their edges have the physical paths through the switches.
    """
    nodes = len(net.topology.nodes)
    matrix = np.zeros((nodes, nodes), dtype=np.int64)
    matrix[net.tails, net.heads] = capacities
    direct = remove_switches(matrix, demand)
    packed = packed_trees(direct.matrix, demand)
    return tuple(_with_paths(net.topology, direct, branching) for branching in packed)


def _with_paths(topology: Topology, direct: Direct, branching: Branching) -> Tree:
    """Returns the tree with the physical path of each edge. The paths are taken, one unit after
    another, from `direct.paths`.
    """
    edges = []
    for src, dst in branching.edges:
        paths = []
        needed = branching.count
        left = direct.paths[src, dst]
        while needed:
            path, units = left.pop()
            taken = min(units, needed)
            if units > taken:
                left.append((path, units - taken))
            paths.append((tuple(topology.nodes[node] for node in path), taken))
            needed -= taken
        edges.append(Edge(src, dst, tuple(paths)))
    return Tree(branching.root, branching.count, tuple(edges))


def check(
    net: Network,
    scale: Fraction,
    demand: Ints,
    gathering: Sequence[Tree],
    multicast: Sequence[str] = (),
) -> None:
    """Raises InternalError unless the trees have the required properties.

    Each tree spans all ranks from its root. The trees of a root sum to its demand. The trees on
    every physical link are at most `scale` times its bandwidth. A switch in `multicast` may forward
    a tree's data to several receivers.
    """
    ranks, switches = net.topology.ranks, set(net.topology.switches)
    rooted: Counter[int] = Counter()
    for tree in gathering:
        reached = {tree.root}
        for edge in tree.edges:
            if edge.src not in reached or edge.dst in reached:
                raise InternalError(
                    f"a tree of rank {tree.root} has the edge {edge}, which does not lead from a "
                    "rank that the tree has reached to another one."
                )
            reached.add(edge.dst)
            if sum(units for _, units in edge.paths) != tree.count:
                raise InternalError(f"the paths of {edge} do not carry {tree.count} units.")
            for path, _ in edge.paths:
                ends = (ranks[edge.src], ranks[edge.dst])
                if (path[0], path[-1]) != ends or not switches.issuperset(path[1:-1]):
                    raise InternalError(
                        f"a path of {edge} does not lead from {ends[0]} to {ends[1]}."
                    )
        if len(reached) != len(ranks):
            raise InternalError(f"a tree of rank {tree.root} does not reach every rank.")
        rooted[tree.root] += tree.count
    expected = {rank: int(each) for rank, each in enumerate(demand) if each}
    if rooted != expected:
        raise InternalError(f"trees per root are {dict(rooted)}; expected {expected}.")
    nodes = net.topology.nodes
    joined = zip(map(int, net.tails), map(int, net.heads), strict=True)
    names = ((nodes[tail], nodes[head]) for tail, head in joined)
    capacities = dict(zip(names, net.bandwidth, strict=True))
    for link, units in loads(gathering, multicast).items():
        if link not in capacities or units > scale * capacities[link]:
            raise InternalError(
                f"link {link[0]} -> {link[1]} carries {units} trees, above its capacity."
            )
