"""The network on which a collective runs: ranks, switches and the directed links between them.

Every algorithm in `ark.collective` takes a `Topology`, which builders, files and detection create.
A topology is an immutable value. Its bandwidths are exact fractions in GB/s, so optima that are
computed from them are exact too.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from ark.collective.packages import require
from ark.collective.topology.costs import CostModel
from ark.errors import InvalidUsageError, ModelError

if TYPE_CHECKING:
    import networkx


class TopologyError(ModelError):
    """The error for a topology that contradicts itself. fault: a short name of the fault, with
    which the message begins.
    """

    def __init__(self, fault: str, message: str) -> None:
        super().__init__(f"{fault}: {message}")
        self.fault = fault
        self.message = message


MOST_GBPS = Fraction(10**9)  # the least bandwidth is its inverse; times and rates are floats


@dataclass(frozen=True)
class Link:
    """One directed link: `bandwidth` in GB/s (1e9 bytes a second), `latency_us` in microseconds.

    Raises TopologyError for a bandwidth that is not an exact number (an integer or a Fraction), or
    that is above 10^9 or below 10^-9 GB/s.
    """

    src: str
    dst: str
    bandwidth: Fraction
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        where = f"link {self.src} -> {self.dst}"
        object.__setattr__(self, "bandwidth", exact_bandwidth(self.bandwidth, where))


def exact_bandwidth(value: object, where: str) -> Fraction:
    """Returns a bandwidth in GB/s as a fraction. A float is refused with an error that states which
    fraction to write.
    """
    if isinstance(value, float) and math.isfinite(value):
        raise TopologyError(
            "bad bandwidth",
            f'{where} has {value!r}; bandwidths are exact, write "{Fraction(repr(value))}".',
        )
    if isinstance(value, bool) or not isinstance(value, (int, Fraction)):
        raise TopologyError(
            "bad bandwidth",
            f"{where} has {value!r:.60}; expected an integer or a Fraction in GB/s.",
        )
    if value > 0 and not 1 / MOST_GBPS <= value <= MOST_GBPS:
        raise TopologyError(
            "bad bandwidth",
            f"{where} has a value {'above' if value > 1 else 'below'} the range; expected "
            "1/10^9 to 10^9 GB/s.",
        )
    return Fraction(value)


@dataclass(frozen=True)
class Topology:
    """A network. The position of an id in `ranks` is its rank number.

    `boxes` has a tuple of rank ids for each machine, if machines are known. `multicast` lists the
    switches that can copy data to several links, `reduces` the switches that can sum data from
    several links. `costs` has measured costs of puts and sums. Raises TopologyError if ids repeat,
    if a link names an unknown node, connects a node to itself or has no positive bandwidth, or if
    boxes do not contain every rank exactly once. `validate` checks further requirements of
    algorithms.
    """

    name: str
    ranks: tuple[str, ...]
    switches: tuple[str, ...]
    links: tuple[Link, ...]
    boxes: tuple[tuple[str, ...], ...] = ()
    multicast: tuple[str, ...] = ()
    reduces: tuple[str, ...] = ()
    costs: CostModel | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        counts = Counter(self.nodes)
        repeated = sorted(node for node, count in counts.items() if count > 1)
        if repeated:
            raise TopologyError(
                "duplicate node", f"the id {repeated[0]!r} is used more than once; ids are unique."
            )
        if self.boxes and sorted(itertools.chain(*self.boxes)) != sorted(self.ranks):
            raise TopologyError(
                "bad boxes",
                "the boxes, taken together, must name every rank once and nothing else.",
            )
        for able in (*self.multicast, *self.reduces):
            if able not in self.switches:
                raise TopologyError(
                    "unknown node",
                    f"{able!r} is listed as multicast or reducing, but is not a switch.",
                )
        for link in self.links:
            where = f"link {link.src} -> {link.dst}"
            for end in (link.src, link.dst):
                if end not in counts:
                    raise TopologyError(
                        "unknown node",
                        f"{where} names {end!r}, which is neither a rank nor a switch.",
                    )
            if link.src == link.dst:
                raise TopologyError("self link", f"{where} joins a node to itself; remove it.")
            if link.bandwidth == 0:
                raise TopologyError(
                    "zero capacity", f"{where} has bandwidth 0; remove it or give it one above 0."
                )
            if link.bandwidth < 0:
                raise TopologyError(
                    "negative bandwidth",
                    f"{where} has bandwidth {link.bandwidth}; a bandwidth is above 0 GB/s.",
                )
            if not (math.isfinite(link.latency_us) and link.latency_us >= 0):
                raise TopologyError(
                    "bad latency",
                    f"{where} has latency {link.latency_us} us; a latency is 0 us or more.",
                )

    @property
    def nodes(self) -> tuple[str, ...]:
        """Returns the ranks, then the switches."""
        return self.ranks + self.switches

    def capacities(self) -> dict[tuple[str, str], Fraction]:
        """Returns the GB/s of each (src, dst), in the order of `links`. Parallel links are added
        up.
        """
        total: dict[tuple[str, str], Fraction] = {}
        for link in self.links:
            pair = (link.src, link.dst)
            total[pair] = total.get(pair, Fraction(0)) + link.bandwidth
        return total

    def graph(self) -> networkx.DiGraph:
        """Returns a networkx graph. Its nodes have `kind`; its edges have `bandwidth` and
        `latency_us`.

        Parallel links become one edge with the sum of their bandwidths and the least latency.
        """
        graph = require("networkx").DiGraph(name=self.name)
        graph.add_nodes_from(self.ranks, kind="rank")
        graph.add_nodes_from(self.switches, kind="switch")
        latency: dict[tuple[str, str], float] = {}
        for link in self.links:
            pair = (link.src, link.dst)
            latency[pair] = min(latency.get(pair, math.inf), link.latency_us)
        for pair, bandwidth in self.capacities().items():
            graph.add_edge(*pair, bandwidth=bandwidth, latency_us=latency[pair])
        return graph

    def reverse(self) -> Topology:
        """Returns the topology with every link reversed. The trees of a reduction are computed as
        trees of an all-gather on it.
        """
        links = tuple(Link(k.dst, k.src, k.bandwidth, k.latency_us) for k in self.links)
        return replace(self, links=links, multicast=self.reduces, reduces=self.multicast)

    def subgroup(self, members: Sequence[int], relay: bool = True) -> Topology:
        """Returns the network of a group of ranks, numbered in the order of `members`.

        The other ranks forward data like switches. If `relay` is False, they are removed together
        with their links. Raises InvalidUsageError if a member is not a rank or occurs twice.
        """
        if len(set(members)) != len(members) or not set(members) <= set(range(len(self.ranks))):
            raise InvalidUsageError(
                f"the group {list(members)} of {self.name} is not valid; give different ranks from "
                f"0 to {len(self.ranks) - 1}."
            )
        ranks = tuple(self.ranks[member] for member in members)
        others = tuple(rank for rank in self.ranks if rank not in ranks)
        kept = {*ranks, *self.switches, *(others if relay else ())}
        links = tuple(link for link in self.links if {link.src, link.dst} <= kept)
        if not relay:  # removes switches that the group's ranks cannot reach
            graph = require("networkx").DiGraph((link.src, link.dst) for link in links)
            graph.add_nodes_from(kept)
            far = require("networkx").descendants(graph, ranks[0]) if ranks else set()
            kept = {*ranks, *far}
            links = tuple(link for link in links if {link.src, link.dst} <= kept)
        boxes = (tuple(rank for rank in box if rank in ranks) for box in self.boxes)
        return replace(
            self,
            name=f"{self.name} ({len(ranks)} of {len(self.ranks)} ranks)",
            ranks=ranks,
            switches=tuple(s for s in (*self.switches, *(others if relay else ())) if s in kept),
            links=links,
            multicast=tuple(s for s in self.multicast if s in kept),
            reduces=tuple(s for s in self.reduces if s in kept),
            boxes=tuple(box for box in boxes if box),
        )

    def equal_boxes(self) -> list[list[int]] | None:
        """Returns the rank numbers of each box, if there are at least two boxes and all have the
        same size, which is above 1.

        Otherwise returns None: for a single box, for ranks without boxes, and for boxes of
        different sizes.
        """
        number = {rank: index for index, rank in enumerate(self.ranks)}
        boxes = sorted(sorted(number[rank] for rank in box) for box in self.boxes)
        sizes = {len(box) for box in boxes}
        return boxes if len(boxes) > 1 and len(sizes) == 1 and min(sizes) > 1 else None

    def validate(self) -> None:
        """Raises TopologyError unless spanning trees exist.

        The possible faults are: there are no ranks, a switch has no outgoing link, or the network
        is not connected.
        """
        if not self.ranks:
            raise TopologyError("no ranks", f"topology {self.name!r} has no node of kind 'rank'.")
        capacities = self.capacities()
        into = {node: Fraction(0) for node in self.nodes}
        out = dict(into)
        for (src, dst), bandwidth in capacities.items():
            out[src] += bandwidth
            into[dst] += bandwidth
        for switch in self.switches:
            if into[switch] and not out[switch]:
                raise TopologyError(
                    "switch without exit", f"links enter switch {switch} and none leaves it."
                )
        self._check_connected(capacities)

    def _check_connected(self, capacities: Iterable[tuple[str, str]]) -> None:
        onward: dict[str, list[str]] = {node: [] for node in self.nodes}
        back: dict[str, list[str]] = {node: [] for node in self.nodes}
        for src, dst in capacities:
            onward[src].append(dst)
            back[dst].append(src)
        start = self.ranks[0]
        for neighbours, how in ((onward, "cannot be reached from"), (back, "has no path to")):
            seen = {start}
            stack = [start]
            while stack:
                for node in neighbours[stack.pop()]:
                    if node not in seen:
                        seen.add(node)
                        stack.append(node)
            lost = [node for node in self.nodes if node not in seen]
            if lost:
                raise TopologyError(
                    "disconnected",
                    f"node {lost[0]} {how} {start}; every node needs a path to every other.",
                )
