"""Computes the bandwidths, latencies and costs of a topology from measured times of puts (one-sided
writes) between pairs of ranks, which `ark topo measure` measures. `fit` computes a latency and a
bandwidth from the times of one pair. `measured` computes the figures of every link from all pairs
whose routes use the link.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from ark.collective.topology.costs import CostModel, Protocol
from ark.collective.topology.model import Link, Topology

_LEAST_GBPS = Fraction(1, 1000)
_MAX_EQUAL_RATIO = 1.15  # links whose figures differ by less count as equal


@dataclass(frozen=True)
class Line:
    """The time of a put as a function of its size: n bytes take alpha_us + n / gbps / 1e3
    microseconds.
    """

    alpha_us: float
    gbps: float


@dataclass(frozen=True)
class Pair:
    """The measurements between the ranks with numbers `one` and `other`, which put data to each
    other at the same time. lines: for each protocol, the time of a put as a linear function of its
    size. put_overhead_us: the time that one more put takes. local_gbps: the rate at which a sum
    reads and writes bytes of local memory; None if the sum was too short to measure.
    """

    one: int
    other: int
    lines: Mapping[str, Line]
    put_overhead_us: float
    local_gbps: float | None


def fit(sizes: Sequence[int], times_us: Sequence[float]) -> Line:
    """Fits a line (a latency and a bandwidth) to measured times of puts, with the least sum of
    squared relative errors. The latency and the time per byte are at least 0.

    sizes: bytes, with at least two different values. times_us: microseconds, above 0. If the times
    do not fit a line, because other programs delayed the ranks, the bandwidth is limited to twice
    the largest one that any single size reached.
    """
    n, t = np.array(sizes, float), np.array(times_us, float)
    rows = np.stack([1 / t, n / t], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(rows, np.ones(len(t)), rcond=None)
    if alpha < 0:
        alpha, beta = 0.0, float((n / t).sum() / ((n / t) ** 2).sum())
    beta = max(beta, float((t / n).min()) / 2)
    return Line(float(alpha), 1e-3 / float(beta))


def measured(
    topology: Topology, pairs: Sequence[Pair], routes: Mapping[tuple[int, int], Sequence[str]]
) -> Topology:
    """Returns the topology with its links and costs computed from the pairs.

    A link gets the bandwidth of the fastest pair whose route uses the link, because slower pairs
    were limited by other links. It gets the least latency per hop of all pairs whose routes use it.
    Figures are rounded to two digits. Links whose figures differ only by noise get equal figures,
    so that symmetric networks have symmetric trees. Links that no route uses are unchanged. The
    cost of a protocol is its additional time compared with the fastest protocol, as the median over
    pairs.

    routes: for each pair of rank numbers, the node ids of its route.
    """
    gbps: dict[tuple[str, str], float] = {}
    latency: dict[tuple[str, str], float] = {}
    for pair in pairs:
        best = max(line.gbps for line in pair.lines.values())
        alpha = min(line.alpha_us for line in pair.lines.values())
        for ends in ((pair.one, pair.other), (pair.other, pair.one)):
            way = routes[ends]
            for hop in itertools.pairwise(way):
                gbps[hop] = max(gbps.get(hop, 0.0), best)
                latency[hop] = min(latency.get(hop, alpha), alpha / (len(way) - 1))
    links = []
    rates, late = _smoothed(gbps.values()), _smoothed(latency.values())
    for link in topology.links:
        hop = link.src, link.dst
        if hop in gbps:
            exact = max(_LEAST_GBPS, Fraction(f"{rates[gbps[hop]]:.2g}"))
            link = Link(*hop, exact, round(late[latency[hop]], 3))
        links.append(link)
    return replace(topology, links=tuple(dict.fromkeys(links)), costs=_costs(pairs))


def _smoothed(figures: Iterable[float]) -> dict[float, float]:
    """Groups figures that differ only by noise. Maps each figure to the median of its group, in
    which the greatest figure is at most _MAX_EQUAL_RATIO times the least.
    """
    groups: list[list[float]] = []
    for figure in sorted(figures):
        if not groups or figure > _MAX_EQUAL_RATIO * groups[-1][0]:
            groups.append([])
        groups[-1].append(figure)
    return {figure: statistics.median(group) for group in groups for figure in group}


def _costs(pairs: Sequence[Pair]) -> CostModel:
    protocols = []
    for name in dict.fromkeys(name for pair in pairs for name in pair.lines):
        share, late = [], []
        for pair in pairs:
            if name in pair.lines:
                line = pair.lines[name]
                share.append(line.gbps / max(each.gbps for each in pair.lines.values()))
                late.append(line.alpha_us - min(each.alpha_us for each in pair.lines.values()))
        median = round(statistics.median(share), 3)
        protocols.append(Protocol(name, max(median, 0.001), round(statistics.median(late), 3)))
    sums = [pair.local_gbps for pair in pairs if pair.local_gbps is not None]
    return CostModel(
        round(statistics.median(pair.put_overhead_us for pair in pairs), 3),
        round(statistics.median(sums), 3) if sums else None,
        tuple(protocols),
    )
