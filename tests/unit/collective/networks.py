"""Networks for the tests of ForestColl, and checks that follow its definitions."""

import itertools
import random
from fractions import Fraction

from ark.collective.topology import Link, Topology


def random_eulerian(seed):
    """Returns a topology of 2 to 8 nodes, up to 3 of them switches, made of random cycles.

    Most have two parts that are joined by thin cycles, so that the worst cut does not always
    separate a single rank.
    """
    rng = random.Random(seed)
    count = rng.randint(2, 8)
    switches = rng.randint(0, min(3, count - 2))
    nodes = [f"n{index}" for index in range(count)]
    rng.shuffle(nodes)
    parts = [nodes[: count // 2], nodes[count // 2 :]] if seed % 4 and count >= 4 else [nodes]
    cycles = [(rng.sample(nodes, count), Fraction(rng.randint(1, 2), rng.choice([1, 1, 2])))]
    for _ in range(rng.randint(0, 2 * count)):
        part = rng.choice(parts)
        units = Fraction(rng.randint(1, 6 * len(parts) ** 2), rng.choice([1, 1, 1, 2, 3]))
        cycles.append((rng.sample(part, rng.randint(2, len(part))), units))
    total = {}
    for cycle, units in cycles:
        for src, dst in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            total[src, dst] = total.get((src, dst), 0) + units
    links = tuple(Link(*pair, bandwidth, 0.5) for pair, bandwidth in sorted(total.items()))
    names = sorted(nodes)
    kinds = rng.sample(names, count)
    return Topology(
        f"random {seed}", tuple(kinds[: count - switches]), tuple(kinds[count - switches :]), links
    )


def planes(boxes, gpus, nvswitches, fabrics, seed):
    """Returns boxes whose ranks are each on several switches. The boxes are alike, but their links
    are listed in random order.
    """
    ranks = [f"g{rank}" for rank in range(boxes * gpus)]
    switches = [f"net{index}" for index in range(fabrics)]
    ends = [(rank, switch, Fraction(25)) for rank in ranks for switch in switches]
    for box, plane in itertools.product(range(boxes), range(nvswitches)):
        switches.append(f"s{box}.{plane}")
        ends += [(rank, switches[-1], Fraction(225, 2)) for rank in ranks[box * gpus :][:gpus]]
    rng = random.Random(seed)
    rng.shuffle(ends)
    rng.shuffle(switches)
    links = [link for a, b, rate in ends for link in (Link(a, b, rate), Link(b, a, rate))]
    return Topology("planes", tuple(ranks), tuple(switches), tuple(links))


def brute_force(topology, weight=None):
    """Returns 1/x*, the largest ratio of data to capacity over all cuts."""
    capacity = topology.capacities()
    best = Fraction(0)
    for size in range(1, len(topology.nodes)):
        for side in itertools.combinations(topology.nodes, size):
            if not set(topology.ranks) <= set(side):
                inside = sum(
                    (weight or {}).get(node, not weight) for node in side if node in topology.ranks
                )
                leaving = sum(
                    each for (src, dst), each in capacity.items() if src in side and dst not in side
                )
                best = max(best, Fraction(inside) / leaving)
    return best


def verify(topology, trees):
    """Checks by its definition a forest of trees for an all-gather, independently of the checks in
    ark.
    """
    ranks = topology.ranks
    capacity = topology.capacities()
    load = dict.fromkeys(capacity, 0)
    copies = dict.fromkeys(range(len(ranks)), 0)
    for tree in trees.gathering:
        parent = {edge.dst: edge.src for edge in tree.edges}
        assert len(parent) == len(tree.edges) == len(ranks) - 1
        assert tree.root not in parent
        for rank in list(parent):
            seen = set()
            while rank != tree.root:
                assert rank not in seen
                seen.add(rank)
                rank = parent[rank]
        copies[tree.root] += tree.count
        for edge in tree.edges:
            assert sum(units for _, units in edge.paths) == tree.count
            for path, units in edge.paths:
                assert (path[0], path[-1]) == (ranks[edge.src], ranks[edge.dst])
                assert all(node in topology.switches for node in path[1:-1])
                for link in itertools.pairwise(path):
                    load[link] += units
    optimum = trees.optimum
    assert set(copies.values()) == {optimum.k}
    assert all(load[link] <= optimum.scale * capacity[link] for link in capacity)
    assert optimum.inv_x == optimum.scale / optimum.k
