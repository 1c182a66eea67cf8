"""Computes the positions of nodes on the page.

Boxes are drawn as rings of ranks around their switch, grids as grids, fat trees in tiers, and all
other networks by distances. Coordinates are in units in which neighbouring nodes are about 1 apart;
the page scales them. Called by ark.collective.page.data.
"""

from __future__ import annotations

import cmath
import itertools
import math

import numpy as np

from ark.collective.topology import Topology

Place = tuple[float, float]
_ELLIPSE_WIDTH_TO_HEIGHT = 1.35  # boxes form an ellipse, because the page is wider than high


def layout(topology: Topology) -> dict[str, Place]:
    """Returns a position for every node. It is rounded, so that all machines give the same
    result.
    """
    boxes = topology.equal_boxes()
    if boxes:
        places = _in_boxes(topology, boxes)
    elif shape := _grid(topology):
        places = _on_grid(topology, shape)
    elif tiers := _tiers(topology):
        places = _in_tiers(topology, tiers)
    elif _star(topology):
        places = _in_boxes(topology, [list(range(len(topology.ranks)))])
    else:
        places = _by_distance(topology)
    return {node: (round(p.real, 3), round(p.imag, 3)) for node, p in places.items()}


def _star(topology: Topology) -> bool:
    """True if ranks reach each other only through switches, or all directly, as in a single box."""
    ranks = set(topology.ranks)
    direct = sum(a in ranks and b in ranks for a, b in topology.capacities())
    n = len(ranks)
    return direct in (0, n * (n - 1))


def _grid(topology: Topology) -> tuple[int, ...] | None:
    """Returns the side lengths of a mesh or torus of two or three dimensions, the fastest-varying
    one last; None for other networks.
    """
    if topology.switches:
        return None
    number = {rank: i for i, rank in enumerate(topology.ranks)}
    linked = {(number[a], number[b]) for a, b in topology.capacities()}
    count = len(number)
    sides = [side for side in range(2, count) if count % side == 0]
    shapes: list[tuple[int, ...]] = [(side, count // side) for side in sides]
    for a, b in itertools.product(sides, repeat=2):
        if count % (a * b) == 0 and count > a * b:
            shapes.append((a, b, count // (a * b)))
    for shape in sorted(shapes, key=lambda each: (max(each) - min(each), len(each), each)):
        steps = _steps(shape)
        if steps[False] <= linked <= steps[True]:
            return shape
    return None


def _steps(shape: tuple[int, ...]) -> dict[bool, set[tuple[int, int]]]:
    """Returns the pairs of neighbours in a grid, as {False: without links that wrap around, True:
    with such links}.
    """
    ranks = np.arange(math.prod(shape)).reshape(shape)
    inner: set[tuple[int, int]] = set()
    wrapped: set[tuple[int, int]] = set()
    for axis, side in enumerate(shape):
        after = np.roll(ranks, -1, axis)
        last = np.take(ranks, [side - 1], axis).ravel()
        for a, b in zip(ranks.ravel().tolist(), after.ravel().tolist(), strict=True):
            wrapped |= {(a, b), (b, a)}
            if a not in last:
                inner |= {(a, b), (b, a)}
    return {False: inner, True: wrapped}


def _on_grid(topology: Topology, shape: tuple[int, ...]) -> dict[str, complex]:
    """Positions of the nodes of a grid in rows and columns. The planes of a third dimension are
    drawn next to each other, each slightly lower than the previous one.
    """
    places = {}
    for rank, name in enumerate(topology.ranks):
        *plane, row, column = (int(i) for i in np.unravel_index(rank, shape))
        shift = complex(shape[-1] + 0.6, 0.35) * plane[0] if plane else 0
        places[name] = complex(column, row) + shift
    return places


def _tiers(topology: Topology) -> list[list[str]] | None:
    """Returns the tiers of a network of switches, such as a fat tree: the ranks, then the switches
    by their number of hops from a rank. Returns None if there are fewer than two tiers of switches,
    or if a link connects two nodes of one tier, because the network is then not a tree of switches.
    """
    near = _neighbours(topology)
    tier = dict.fromkeys(topology.ranks, 0)
    level = list(topology.ranks)
    tiers: list[list[str]] = []
    while level:
        tiers.append(level)
        level = sorted({x for node in level for x in near[node]} - tier.keys())
        tier.update(dict.fromkeys(level, len(tiers)))
    flat = any(abs(tier[a] - tier[b]) != 1 for a, b in topology.capacities())
    return None if flat or len(tiers) < 3 else tiers


def _in_tiers(topology: Topology, tiers: list[list[str]]) -> dict[str, complex]:
    """Positions of nodes in tiers. Ranks are at the bottom, under the switches to which they are
    attached. Every switch is above the middle of the nodes below it.
    """
    near = _neighbours(topology)
    up = {rank: sorted(near[rank]) for rank in tiers[0]}
    row = sorted(tiers[0], key=lambda rank: (up[rank], topology.ranks.index(rank)))
    width = len(row)
    across = {node: float(i) for i, node in enumerate(row)}
    places = {node: complex(across[node], 0.0) for node in row}
    for height, tier in enumerate(tiers[1:], 1):
        below = set(tiers[height - 1])
        middle = {}
        for node in tier:
            xs = [across[other] for other in near[node] & below]
            middle[node] = sum(xs) / len(xs)
        order = sorted(tier, key=lambda node: (middle[node], node))
        for i, node in enumerate(order):
            across[node] = (i + 0.5) * width / len(order) - 0.5
            places[node] = complex(across[node], -height * max(1.5, width / 9))
    return places


def _neighbours(topology: Topology) -> dict[str, set[str]]:
    near: dict[str, set[str]] = {node: set() for node in topology.nodes}
    for src, dst in topology.capacities():
        near[src].add(dst)
        near[dst].add(src)
    return near


def _in_boxes(topology: Topology, boxes: list[list[int]]) -> dict[str, complex]:
    near = _neighbours(topology)
    box_of = {topology.ranks[rank]: i for i, box in enumerate(boxes) for rank in box}
    homes = {s: {box_of[node] for node in near[s] if node in box_of} for s in topology.switches}
    fabric = [switch for switch in topology.switches if len(homes[switch]) != 1]
    ring = 0.0 if len(fabric) < 2 else max(0.5, 0.16 * len(fabric))
    radius = max(1.0, max(len(box) for box in boxes) / (2 * math.pi) * 0.95)
    spread = 0.0
    if len(boxes) > 1:
        apart = radius * 1.5 / math.sin(math.pi / len(boxes))
        spread = max(radius * 2.1, apart, radius + ring + (0.7 if ring else 0.0))
    places: dict[str, complex] = {}
    start = math.pi if len(boxes) == 2 else -math.pi * (3 / 4 if len(boxes) == 4 else 1 / 2)
    wide = _ELLIPSE_WIDTH_TO_HEIGHT if len(boxes) > 2 else 1.0
    centres = []
    for number, box in enumerate(boxes):
        spot = cmath.rect(spread, start + 2 * math.pi * number / len(boxes))
        centres.append(complex(spot.real * wide, spot.imag))
        for i, rank in enumerate(box):
            name = topology.ranks[rank]
            angle = -math.pi / 2 + 2 * math.pi * (i + 0.5) / len(box)
            places[name] = centres[-1] + cmath.rect(radius, angle)
    hubs: set[int] = set()
    for switch in topology.switches:
        if switch in fabric:
            continue
        ranks = sorted(node for node in near[switch] if node in box_of)
        number = min(homes[switch])
        home = centres[number]
        outward = sum(places[node] for node in ranks) / len(ranks) - home
        if 2 * len(ranks) > len(boxes[number]):
            outward = -home  # another switch of the whole box, which connects it to other boxes
        if 2 * len(ranks) > len(boxes[number]) and number not in hubs:
            hubs.add(number)
            places[switch] = home
        else:
            places[switch] = home + outward / (abs(outward) or 1) * radius * 1.45
    for i, switch in enumerate(fabric):
        places[switch] = cmath.rect(ring, 2 * math.pi * i / len(fabric) + 0.3)
    return places


def _by_distance(topology: Topology) -> dict[str, complex]:
    """Positions of nodes for any other network, by stress majorisation (Gansner, Koren and North,
    2004): the drawn distance of two nodes approximates the number of hops between them.
    """
    nodes = topology.nodes
    n = len(nodes)
    near = _neighbours(topology)
    number = {node: i for i, node in enumerate(nodes)}
    hops = np.full((n, n), float(n))
    for i, node in enumerate(nodes):
        hops[i, i] = 0
        frontier, depth, seen = [node], 0, {node}
        while frontier:
            for other in frontier:
                hops[i, number[other]] = depth
            frontier = sorted({x for other in frontier for x in near[other]} - seen)
            seen.update(frontier)
            depth += 1
    weight = np.where(hops > 0, 1 / np.maximum(hops, 1) ** 2, 0)
    angle = 2 * np.pi * np.arange(n) / n - np.pi / 2
    z = np.exp(1j * angle) * n / 6
    for _ in range(120):
        gap = z[:, None] - z[None, :]
        away = np.maximum(np.abs(gap), 1e-9)
        z = (weight * (z[None, :] + hops * gap / away)).sum(1) / weight.sum(1)
    return {node: complex(z[i]) * 1.3 for i, node in enumerate(nodes)}
