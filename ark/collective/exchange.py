"""Computes an all-to-all as a multicommodity flow. The results are a lower bound on its time, the
paths of the data, and the program.

Every rank sends the same amount to every other rank, or as many chunks as `counts` states. The
least time is that of the largest concurrent flow (Shahrokhi and Matula 1990), a linear program with
one flow per source.

The dual values of this linear program can be read as lengths of links. Any choice of lengths proves
a bound on the time. The bound is a quotient: the distances of all chunks are added up, and the sum
is divided by the sum over all links of capacity times length. The dual values are converted to
fractions, so the bound is exact whatever the solver's rounding. The flow is divided into paths, and
their amounts are rounded to whole parts of a chunk; the loss is reported.
`ark.collective.synthesis` calls `exchange_program`, `ark.collective.bounds` calls `exchange`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from ark.collective.forestcoll.network import Network, network
from ark.collective.packages import require
from ark.collective.programs import (
    IN,
    OUT,
    Collective,
    CollectiveProgram,
    Counts,
    ProgramBuilder,
    Span,
)
from ark.collective.programs.types import check_counts
from ark.collective.topology import Topology
from ark.errors import InternalError, UnsupportedError

_PARTS_PER_CHUNK = (1, 2, 3, 4, 6, 8, 12, 16)
_MAX_TIME_RATIO = Fraction(101, 100)
_MOST_VARIABLES = 250_000
_DENOMINATORS = (60, 5040, 1 << 20)
_MIN_FLOW = 1e-7

Path = tuple[int, ...]
Shares = dict[tuple[int, int], list[tuple[Path, int]]]


@dataclass(frozen=True)
class Exchange:
    """Paths of an all-to-all. Every rank s sends one chunk, or the number of chunks in `counts`, to
    every other rank t.

    A chunk is cut into `parts` equal parts, and `shares[s, t]` lists (path as node numbers, how
    many of the pair's parts use the path). Times are in seconds if a chunk has one GB: `inv_rate`
    is the time with these paths, and no schedule is faster than `lower_bound`.
    """

    topology: Topology
    lower_bound: Fraction
    inv_rate: Fraction
    parts: int
    shares: Shares
    counts: Counts


def exchange(topology: Topology, counts: Counts | None = None) -> Exchange:
    """Computes the paths of an all-to-all and the lower bound on its time. Raises UnsupportedError
    if the network is too large.
    """
    net = network(topology)
    variables = net.ranks * len(net.tails)
    if variables > _MOST_VARIABLES:
        raise UnsupportedError(
            f"an all-to-all on {topology.name} is a linear program of {variables} variables (ranks "
            f"times links); at most {_MOST_VARIABLES} are supported. Use another algorithm."
        )
    rows = ((1,) * net.ranks,) * net.ranks if counts is None else counts
    check_counts(Collective.ALL_TO_ALL, net.ranks, rows)
    if not any(n for r, row in enumerate(rows) for s, n in enumerate(row) if r != s):
        return Exchange(topology, Fraction(0), Fraction(0), 1, {}, rows)
    flows, lengths = _solve(net, rows)
    bound = max(_bound(net, lengths, largest, rows) for largest in _DENOMINATORS)
    paths = {
        (source, sink): each
        for source in range(net.ranks)
        for sink, each in _paths(net, source, flows[source], rows[source]).items()
    }
    best: Exchange | None = None
    for parts in _PARTS_PER_CHUNK:
        shares = {
            pair: _rounded(each, parts * rows[pair[0]][pair[1]]) for pair, each in paths.items()
        }
        result = Exchange(topology, bound, _time(net, shares, parts), parts, shares, rows)
        if best is None or result.inv_rate < best.inv_rate:
            best = result
        if best.inv_rate <= bound * _MAX_TIME_RATIO:
            break
    assert best is not None
    return best


def _solve(net: Network, counts: Counts) -> tuple[np.ndarray, np.ndarray]:
    """Returns the flow of every source on every link, in chunks, and the lengths (dual values) of
    the links.
    """
    solver = require("ortools.linear_solver.pywraplp").Solver.CreateSolver("GLOP")
    infinity, links = solver.infinity(), len(net.tails)
    time = solver.NumVar(0, infinity, "")
    unit = max(net.bandwidth)
    flow = [[solver.NumVar(0, infinity, "") for _ in range(links)] for _ in range(net.ranks)]
    rows = []
    for link, bandwidth in enumerate(net.bandwidth):
        row = solver.RowConstraint(-infinity, 0, "")
        row.SetCoefficient(time, -float(bandwidth / unit))
        for source in range(net.ranks):
            row.SetCoefficient(flow[source][link], 1)
        rows.append(row)
    for source in range(net.ranks):
        for node in range(len(net.topology.nodes)):
            if node == source:
                continue
            stays = counts[source][node] if node < net.ranks else 0
            row = _kept(solver, net, flow[source], node, stays)
    solver.Objective().SetCoefficient(time, 1)
    solver.Objective().SetMinimization()
    if solver.Solve() != solver.OPTIMAL:
        raise InternalError(f"the solver found no flow of an all-to-all on {net.topology.name}.")
    lengths = np.array([abs(row.dual_value()) for row in rows])
    # Of all flows with the best rate, the solver takes one with the least total distance, so that
    # no path makes a detour.
    time.SetUb(time.solution_value() * (1 + 1e-9))
    solver.Objective().SetCoefficient(time, 0)
    for each in itertools.chain(*flow):
        solver.Objective().SetCoefficient(each, 1)
    if solver.Solve() != solver.OPTIMAL:
        raise InternalError(f"the solver found no least flow on {net.topology.name}.")
    return np.array([[each.solution_value() for each in row] for row in flow]), lengths


def _kept(solver: Any, net: Network, flow: list[Any], node: int, stays: int) -> Any:
    """Adds the constraint of flow conservation: the inflow of `node` minus its outflow equals
    `stays`, the amount that this node consumes. Returns the constraint.
    """
    row = solver.RowConstraint(stays, stays, "")
    for link in np.flatnonzero(net.heads == node):
        row.SetCoefficient(flow[link], 1)
    for link in np.flatnonzero(net.tails == node):
        row.SetCoefficient(flow[link], -1)
    return row


def _bound(net: Network, lengths: np.ndarray, largest: int, counts: Counts) -> Fraction:
    """Returns the exact lower bound on the time that these lengths of links prove. The lengths are
    rounded to fractions first; any lengths prove a valid bound.
    """
    top = float(lengths.max())
    exact = [Fraction(float(each) / top).limit_denominator(largest) for each in lengths]
    common = math.lcm(*(each.denominator for each in exact))
    if common > 1 << 40:
        return Fraction(0)
    whole = [int(each * common) for each in exact]
    offered = sum(
        (bandwidth * each for bandwidth, each in zip(net.bandwidth, whole, strict=True)),
        Fraction(0),
    )
    count = len(net.topology.nodes)
    distance = np.full((count, count), 1 << 50, dtype=np.int64)
    distance[np.arange(count), np.arange(count)] = 0
    distance[net.tails, net.heads] = whole
    for middle in range(count):
        through = distance[:, middle, None] + distance[None, middle, :]
        np.minimum(distance, through, out=distance)
    travelled = distance[: net.ranks, : net.ranks] * np.array(counts, dtype=object)
    return Fraction(int(travelled.sum())) / offered


def _paths(
    net: Network, source: int, flow: np.ndarray, counts: Sequence[int]
) -> dict[int, list[tuple[Path, float]]]:
    """Returns, for every other rank, the paths of the source's flow to it."""
    left = flow.copy()
    out: list[list[int]] = [[] for _ in net.topology.nodes]
    for link in np.flatnonzero(flow > _MIN_FLOW):
        out[net.tails[link]].append(int(link))
    paths: dict[int, list[tuple[Path, float]]] = {}
    for sink in range(net.ranks):
        if sink == source or not counts[sink]:
            continue
        needed, each = float(counts[sink]), []
        while needed > _MIN_FLOW:
            links = _widest(net, out, left, source, sink)
            if links is None:
                break
            taken = min(needed, *(float(left[link]) for link in links))
            left[links] -= taken
            needed -= taken
            each.append(((source, *(int(net.heads[link]) for link in links)), taken))
        paths[sink] = each
    return paths


def _widest(
    net: Network, out: list[list[int]], left: np.ndarray, source: int, sink: int
) -> list[int] | None:
    """Returns the links of the path that can carry the most remaining flow (Dijkstra); of several,
    the shortest. None if no path is left.
    """
    seen: dict[int, tuple[int, int]] = {}
    waiting: list[tuple[float, int, int, int, int]] = [(-np.inf, 0, source, -1, -1)]
    while waiting:
        width, hops, node, link, before = heapq.heappop(waiting)
        if node in seen:
            continue
        seen[node] = (link, before)
        if node == sink:
            links = []
            while node != source:
                link, node = seen[node]
                links.append(link)
            return links[::-1]
        for onward in out[node]:
            if left[onward] > _MIN_FLOW and int(net.heads[onward]) not in seen:
                narrow = max(width, -float(left[onward]))
                heapq.heappush(waiting, (narrow, hops + 1, int(net.heads[onward]), onward, node))
    return None


def _rounded(paths: list[tuple[Path, float]], parts: int) -> list[tuple[Path, int]]:
    """Rounds the amounts of flow on paths to whole numbers of parts, by the method of largest
    remainders. Returns the paths with these numbers.
    """
    total = sum(amount for _, amount in paths)
    exact = [amount / total * parts for _, amount in paths]
    counts = [int(each) for each in exact]
    order = sorted(range(len(paths)), key=lambda i: (counts[i] - exact[i], len(paths[i][0]), i))
    for i in order[: parts - sum(counts)]:
        counts[i] += 1
    return [(path, count) for (path, _), count in zip(paths, counts, strict=True) if count]


def _time(net: Network, shares: Shares, parts: int) -> Fraction:
    load: dict[tuple[int, int], int] = dict.fromkeys(
        zip(map(int, net.tails), map(int, net.heads), strict=True), 0
    )
    for paths in shares.values():
        for path, count in paths:
            for hop in itertools.pairwise(path):
                load[hop] += count
    return max(
        Fraction(units, parts) / bandwidth
        for units, bandwidth in zip(load.values(), net.bandwidth, strict=True)
    )


def exchange_program(topology: Topology, pieces: int, counts: Counts | None) -> CollectiveProgram:
    """Returns the program that sends data along the paths. A rank on a path stores data before it
    forwards them.
    """
    flows = exchange(topology, counts)
    ranks = len(topology.ranks)
    finer = tuple(tuple(n * flows.parts for n in row) for row in flows.counts)
    builder = ProgramBuilder(
        f"flow all_to_all on {topology.name}",
        "all_to_all",
        ranks,
        max(map(sum, finer)),
        pieces=pieces,
        counts=None if counts is None else finer,
    )
    relayed = [0] * ranks
    jobs = []
    for (source, sink), paths in sorted(flows.shares.items()):
        first = 0
        for path, count in paths:
            jobs.append((source, sink, first, count, list(_hops(topology, path))))
            first += count
    for *_, count, hops in jobs:
        for hop in hops[:-1]:
            relayed[hop[-1]] += count
    scratch = builder.scratch(max(relayed)) if any(relayed) else ""
    for rank in range(ranks):
        own, result = builder.exchanged(rank, rank)
        if own.count:
            builder.copy(rank, own, result)
    used = [0] * ranks
    waiting = []
    for source, sink, first, count, hops in jobs:
        sent, result = builder.exchanged(source, sink)
        here = Span(IN, sent.start + first, count)
        waiting.append((source, here, Span(OUT, result.start + first, count), hops))
    while waiting:  # appends hops of all paths in an order in which they can run
        onward = []
        for rank, here, last, hops in waiting:
            (_, *route, peer), *rest = hops[0], *hops[1:]
            there = last
            if rest:
                there = Span(scratch, used[peer], here.count)
                used[peer] += here.count
                onward.append((peer, there, last, rest))
            names = [topology.nodes[node] for node in hops[0]]
            builder.put(rank, peer, here, there, names if route else ())
        waiting = onward
    return builder.build()


def _hops(topology: Topology, path: Path) -> Iterator[Path]:
    """Yields the sections of a path between consecutive ranks."""
    begin = 0
    for place in range(1, len(path)):
        if path[place] < len(topology.ranks):
            yield path[begin : place + 1]
            begin = place
