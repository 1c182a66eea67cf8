"""Removes the switches from a network, preserving every cut: the second step of ForestColl.

Packing needs a network that has only ranks, because a switch that cannot multicast must not be a
branching node of a tree. To remove switch w, capacity on the links (u, w) and (w, t) is exchanged
for capacity on a direct link (u, t), as long as every cut keeps the capacity for its demand. In
Eulerian networks a complete exchange is always possible (ForestColl, section 5.3; Jackson 1988).
Exchanges are not made one at a time. Instead, an even distribution of all capacity over pairs (u,
t) is proposed and checked at once. If it violates a cut, the pairs that this cut excludes are not
used any more, and the remaining capacity is distributed again. `ark.collective.forestcoll.forest`
calls `remove_switches`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ark.collective.forestcoll.cuts import Ints, Mask, Violation, violated_in
from ark.errors import InternalError

Path = tuple[int, ...]
Paths = dict[tuple[int, int], list[tuple[Path, int]]]


@dataclass(frozen=True)
class Direct:
    """A network that has only ranks: units of capacity for each pair of ranks, and the physical
    paths of these units.

    `paths[u, t]` lists (path, units). A path runs from u through switches to t, and the units of a
    pair sum to `matrix[u, t]`.
    """

    matrix: Ints
    paths: Paths


def remove_switches(capacity: Ints, demand: Ints) -> Direct:
    """Returns the network without its switches, which are the nodes from number len(demand) on.

    `capacity` is a square matrix, ranks first; at every node inflow equals outflow. `demand` is the
    number of trees rooted at each rank; every cut must have the capacity for it.
    """
    matrix = capacity.copy()
    paths: Paths = {(u, t): [((u, t), int(matrix[u, t]))] for u, t in _pairs(matrix)}
    for switch in range(len(demand), len(matrix)):
        before = matrix
        matrix = _remove(matrix, switch, demand)
        _join(paths, before, matrix, switch)
    ranks = len(demand)
    return Direct(np.ascontiguousarray(matrix[:ranks, :ranks]), paths)


def _pairs(matrix: Ints) -> list[tuple[int, int]]:
    return [(int(u), int(t)) for u, t in zip(*np.nonzero(matrix), strict=True)]


def _remove(matrix: Ints, switch: int, demand: Ints) -> Ints:
    """Returns the capacity matrix without a switch: all capacity of links through `switch` has been
    exchanged for capacity of direct links between its neighbours.
    """
    dead = np.zeros(matrix.shape, dtype=bool)
    parts = _parts_without(matrix, switch)
    while matrix[:, switch].any():
        exchanges = _propose(matrix, switch, dead, parts)
        if not len(exchanges):
            raise InternalError(f"switch {switch} cannot be replaced by links of its neighbours.")
        good, bad = 0, len(exchanges) + 1
        while bad - good > 1:
            tried = bad - 1 if bad > len(exchanges) else (good + bad) // 2
            if violated_in(_exchange(matrix, switch, exchanges[:tried]), demand, first_only=True):
                bad = tried
            else:
                good = tried
        matrix = _exchange(matrix, switch, exchanges[:good])
        if good < len(exchanges):
            matrix = _exchange_some(matrix, switch, exchanges[good], demand, dead)
    return matrix


def _exchange_some(matrix: Ints, switch: int, exchange: Ints, demand: Ints, dead: Mask) -> Ints:
    """Makes a part of one exchange, as large as the cuts allow. In `dead`, marks the pairs of nodes
    that the limiting cut excludes from further exchanges.

    Every cut that an exchange affects loses exactly the exchanged units. So the largest deficit
    after the whole exchange is the number of units that must not be exchanged.
    """
    violations = violated_in(_exchange(matrix, switch, exchange[None]), demand)
    worst: Violation = max(violations, key=lambda violation: violation.deficit)
    exchange = exchange.copy()
    exchange[2] -= worst.deficit
    same_side = ~worst.side if worst.side[switch] else worst.side
    dead[np.ix_(same_side, same_side)] = True
    return _exchange(matrix, switch, exchange[None])


def _exchange(matrix: Ints, switch: int, exchanges: Ints) -> Ints:
    """Returns the matrix after exchanges. exchanges: rows (u, t, units); a row with u = t drops the
    units.
    """
    matrix = matrix.copy()
    u, t, units = exchanges.T
    np.subtract.at(matrix, (u, switch), units)
    np.subtract.at(matrix, (switch, t), units)
    real = u != t
    np.add.at(matrix, (u[real], t[real]), units[real])
    return matrix


def _propose(matrix: Ints, switch: int, dead: Mask, parts: Ints) -> Ints:
    """Returns exchanges, rows (u, t, units), that distribute the switch's capacity evenly.

    Pairs that only this switch connects get capacity first, then other pairs; units that no pair
    can use are dropped last. The nodes are ordered so that neighbours in the order are from
    different parts of the network. So pairing each node with the next one connects different parts.
    """
    into, out = matrix[:, switch].copy(), matrix[switch, :].copy()
    ports = np.nonzero(into + out)[0]
    place = {
        int(node): sum(parts[other] == parts[node] for other in ports[:index])
        for index, node in enumerate(ports)
    }
    ports = np.array(sorted(ports, key=lambda node: (place[int(node)], parts[node])))
    rows: list[Ints] = []
    for stage in ("apart", "near", "drop"):
        offsets = [0] if stage == "drop" else range(1, len(ports))
        levels = []
        for offset in offsets:
            u, t = ports, np.roll(ports, -offset)
            fits = ~dead[u, t]
            if stage != "drop":
                fits &= (parts[u] != parts[t]) == (stage == "apart")
            if fits.any():
                levels.append((u[fits], t[fits]))
        _fill(into, out, levels, rows)
    return np.concatenate(rows) if rows else np.zeros((0, 3), dtype=np.int64)


def _fill(into: Ints, out: Ints, levels: list[tuple[Ints, Ints]], rows: list[Ints]) -> None:
    """Adds exchanges for the remaining capacity to `rows`, in rounds with equal shares. into, out:
    for each node, the remaining capacity to and from the switch. levels: groups of pairs (u, t) of
    nodes, each of which gets the same share in a round.
    """
    while levels:
        left = np.concatenate([np.minimum(into[u], out[t]) for u, t in levels])
        if not left.any():
            return
        share = max(1, int(left[left > 0].min()) // len(levels))
        for u, t in levels:
            units = np.minimum(np.minimum(into[u], out[t]), share)
            some = units > 0
            if some.any():
                into[u] -= units
                out[t] -= units
                rows.append(np.stack([u[some], t[some], units[some]], axis=1))


def _parts_without(matrix: Ints, switch: int) -> Ints:
    """Returns, for each node, the number of the connected part to which it belongs without
    `switch`.
    """
    linked = (matrix + matrix.T) > 0
    linked[switch, :] = linked[:, switch] = False
    parts = np.full(len(matrix), -1, dtype=np.int64)
    for start in range(len(matrix)):
        if parts[start] >= 0:
            continue
        frontier = np.zeros(len(matrix), dtype=bool)
        frontier[start] = True
        while frontier.any():
            parts[frontier] = start
            frontier = linked[frontier].any(axis=0) & (parts < 0)
    return parts


def _join(paths: Paths, before: Ints, after: Ints, switch: int) -> None:
    """Updates the physical paths after the removal of a switch. The units of the paths of (u,
    switch) and (switch, t) are joined to paths of the pairs (u, t) whose capacity has grown.
    """
    for u, t in _pairs(np.maximum(after - before, 0)):
        units = int(after[u, t] - before[u, t])
        while units:
            first, first_units = paths[u, switch].pop()
            second, second_units = paths[switch, t].pop()
            taken = min(units, first_units, second_units)
            paths.setdefault((u, t), []).append((_without_loops(first + second[1:]), taken))
            if first_units > taken:
                paths[u, switch].append((first, first_units - taken))
            if second_units > taken:
                paths[switch, t].append((second, second_units - taken))
            units -= taken
    for node in range(len(after)):
        paths.pop((node, switch), None)
        paths.pop((switch, node), None)


def _without_loops(path: Path) -> Path:
    """Returns the path without cycles."""
    short: list[int] = []
    for node in path:
        if node in short:
            del short[short.index(node) :]
        short.append(node)
    return tuple(short)
