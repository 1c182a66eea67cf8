"""Draws trees of an all-reduce for switches that multicast and sum (NVLS, SHARP), and computes
their loads.

Each tree is used in both phases of the all-reduce: sums are computed along its reversed edges, and
the results are sent out along its edges. If a switch multicasts, the data of one sender crosses the
links to the switch once for all branches. If a switch sums, the sum for one receiver crosses the
links from the switch once. The two phases use opposite directions of the ranks' links, so they can
run at the same time. `ark.collective.forestcoll.forest` calls `draw_joint` if there are such
switches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from fractions import Fraction

from ark.collective.forestcoll.all_reduce import optimal_all_reduce
from ark.collective.forestcoll.isomorphic import draw
from ark.collective.forestcoll.network import network
from ark.collective.forestcoll.symmetry import find_symmetry
from ark.collective.forestcoll.tree import Tree
from ark.collective.simulate.in_network import crossings
from ark.collective.topology import Topology

_MOST_TREES = 4  # limit per root
_SLACK = (Fraction(1), Fraction(17, 16), Fraction(9, 8), Fraction(5, 4), Fraction(3, 2))


def loads(trees: Sequence[Tree], able: Collection[str]) -> Counter[tuple[str, str]]:
    """Returns the number of data units that the trees send over every link. At a switch in `able`,
    which can multicast (or sum), the paths of a tree from one sender count as one flow.
    """
    load: Counter[tuple[str, str]] = Counter()
    capable = frozenset(able)
    for tree in trees:
        sent: defaultdict[int, list[tuple[str, ...]]] = defaultdict(list)
        for edge in tree.edges:
            for path, units in edge.paths:
                if units == tree.count:
                    sent[edge.src].append(path)
                else:  # the paths carry different data, which cannot be merged
                    for link, times in crossings([path], True, frozenset()).items():
                        load[link] += times * units
        for paths in sent.values():
            for link, times in crossings(paths, True, capable).items():
                load[link] += times * tree.count
    return load


def draw_joint(topology: Topology) -> tuple[Fraction, Fraction, tuple[Tree, ...]] | None:
    """Returns trees for an all-reduce, as (rate, bound, trees): the rate in GB/s that the trees
    attain, an upper bound on the rate of any trees, and the trees. Returns None if no trees are
    found.

    Only networks in which every link has a reverse link with the same bandwidth are supported. The
    trees of all roots are images of a few trees under the network's symmetry, so every root has the
    same number of trees.
    """
    capacities = topology.capacities()
    if topology.reverse().capacities() != capacities:
        return None
    net = network(topology)
    symmetry = find_symmetry(net)
    bound = optimal_all_reduce(topology, in_network=True).bound
    for slack in _SLACK:
        for k in range(1, _MOST_TREES + 1):
            base = draw(net, symmetry, slack * net.ranks * k / bound, k, reversed_too=True)
            if base is None:
                continue
            trees = tuple(
                tree.image(topology.nodes, moved) for moved in symmetry.images for tree in base
            )
            load = loads(trees, topology.multicast)
            for (src, dst), units in loads(trees, topology.reduces).items():
                load[dst, src] += units
            slowest = max(Fraction(units) / capacities[link] for link, units in load.items())
            ordered = tuple(sorted(trees, key=lambda tree: tree.root))
            return net.ranks * k / slowest, bound, ordered
    return None
