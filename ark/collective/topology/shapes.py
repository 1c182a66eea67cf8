"""Builds regular networks of ranks without boxes: rings, grids, hypercubes, full meshes, stars, fat
trees. Each link has a reverse link. Except in fat trees, all links have the same `bandwidth` in
GB/s each way and `latency_us` in microseconds. Rank ids are "g0", "g1", ...; in grids the last
dimension varies fastest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from ark.collective.topology.model import Link, Topology
from ark.errors import InvalidUsageError

LATENCY_US = 0.7


def duplex(src: str, dst: str, bandwidth: Fraction | int, latency_us: float) -> list[Link]:
    """Returns a pair of links between two nodes, one in each direction."""
    exact = Fraction(bandwidth)
    return [Link(src, dst, exact, latency_us), Link(dst, src, exact, latency_us)]


def _from_pairs(
    name: str,
    count: int,
    pairs: Iterable[tuple[int, int]],
    bandwidth: Fraction | int,
    latency_us: float,
) -> Topology:
    links: list[Link] = []
    for a, b in pairs:
        links += duplex(f"g{a}", f"g{b}", bandwidth, latency_us)
    return Topology(name, tuple(f"g{rank}" for rank in range(count)), (), tuple(links))


def ring(n: int, bandwidth: Fraction | int = 1, latency_us: float = LATENCY_US) -> Topology:
    """Returns n ranks in a cycle, n >= 2."""
    return torus((_at_least("ring", n, 2),), bandwidth, latency_us, name=f"ring{n}")


def full_mesh(n: int, bandwidth: Fraction | int = 1, latency_us: float = LATENCY_US) -> Topology:
    """Returns n ranks with a link between any two of them, n >= 2."""
    pairs = itertools.combinations(range(_at_least("full mesh", n, 2)), 2)
    return _from_pairs(f"full{n}", n, pairs, bandwidth, latency_us)


def star(n: int, bandwidth: Fraction | int = 1, latency_us: float = LATENCY_US / 2) -> Topology:
    """Returns n ranks on one switch "s0", n >= 2. The latency is that of each of the two hops
    between ranks.
    """
    _at_least("star", n, 2)
    ranks = tuple(f"g{rank}" for rank in range(n))
    links = [link for rank in ranks for link in duplex(rank, "s0", bandwidth, latency_us)]
    return Topology(f"star{n}", ranks, ("s0",), tuple(links))


def mesh(
    shape: Sequence[int], bandwidth: Fraction | int = 1, latency_us: float = LATENCY_US
) -> Topology:
    """Returns a grid without wrap-around links. Every dimension is at least 1, and there are at
    least 2 ranks.
    """
    name = "mesh" + "x".join(map(str, shape))
    return _grid(name, shape, False, bandwidth, latency_us)


def torus(
    shape: Sequence[int],
    bandwidth: Fraction | int = 1,
    latency_us: float = LATENCY_US,
    name: str | None = None,
) -> Topology:
    """Returns a grid with wrap-around links. A dimension of 2 has one link between its ranks, not
    two.
    """
    return _grid(name or "torus" + "x".join(map(str, shape)), shape, True, bandwidth, latency_us)


def fat_tree(
    shape: Sequence[int], bandwidth: Fraction | int = 1, latency_us: float = LATENCY_US / 2
) -> Topology:
    """Returns a fat tree with three tiers of switches. `shape` is (pods, leaves per pod, ranks per
    leaf), each at least 1. A leaf is a switch of the lowest tier.

    `bandwidth` is the bandwidth of a rank. A pod has two switches "agg<pod>.<i>", to which each of
    its leaves is connected. Switches "core<i>.<j>" connect agg<pod>.<i> of all pods. The links from
    a leaf upwards have together half of the bandwidth of the leaf's ranks. The links out of a pod
    have together half of the bandwidth that its leaves have upwards.
    """
    name = "fattree" + "x".join(map(str, shape))
    if len(shape) != 3:
        raise InvalidUsageError(
            f"{name}: a fat tree takes three numbers: pods, leaves per pod and ranks per leaf."
        )
    pods, leaves, below = (_at_least(name, size, 1) for size in shape)
    ranks = [f"g{rank}" for rank in range(_at_least(name, math.prod(shape), 2))]
    up = Fraction(bandwidth) * below / 4  # from a leaf to each of its pod's two switches
    links = []
    for rank, own in enumerate(ranks):
        links += duplex(own, f"leaf{rank // below}", bandwidth, latency_us)
    for leaf, each in itertools.product(range(pods * leaves), range(2)):
        links += duplex(f"leaf{leaf}", f"agg{leaf // leaves}.{each}", up, latency_us)
    for pod, each, core in itertools.product(range(pods), range(2), range(2)):
        links += duplex(f"agg{pod}.{each}", f"core{each}.{core}", up * leaves / 4, latency_us)
    switches = dict.fromkeys(link.dst for link in links if link.dst not in set(ranks))
    return Topology(name, tuple(ranks), tuple(switches), tuple(links))


def hypercube(
    dimensions: int, bandwidth: Fraction | int = 1, latency_us: float = LATENCY_US
) -> Topology:
    """Returns 2**dimensions ranks, dimensions >= 1. Ranks whose numbers differ in one bit are
    connected.
    """
    _at_least("hypercube", dimensions, 1)
    name = f"hypercube{dimensions}"
    return _grid(name, (2,) * dimensions, False, bandwidth, latency_us)


def _grid(
    name: str, shape: Sequence[int], wrap: bool, bandwidth: Fraction | int, latency_us: float
) -> Topology:
    for size in shape:
        _at_least(name, size, 1)
    _at_least(name, math.prod(shape), 2)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    pairs = []
    for place in itertools.product(*(range(size) for size in shape)):
        rank = sum(at * stride for at, stride in zip(place, strides, strict=True))
        for at, size, stride in zip(place, shape, strides, strict=True):
            if at + 1 < size:
                pairs.append((rank, rank + stride))
            elif wrap and size > 2:
                pairs.append((rank, rank - at * stride))
    return _from_pairs(name, math.prod(shape), pairs, bandwidth, latency_us)


def _at_least(subject: str, value: int, least: int) -> int:
    if value < least:
        raise InvalidUsageError(f"{subject}: {value} is too small; the least is {least}.")
    return value
