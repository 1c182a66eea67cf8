"""Finds routes through a topology: default routes of puts, checked routes of puts that name one,
and boxes of ranks.

The simulator adds data to the links of these routes. TACCL also takes its paths from them.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import defaultdict

from ark.collective.programs import CollectiveProgram, OpRef
from ark.collective.programs.order import describe
from ark.collective.topology import Topology
from ark.errors import ModelError

Cost = tuple[int, int, int]


class Routes:
    """The routes of one topology.

    A default route passes the fewest ranks. Of several such routes, it is the one with the fewest
    links, then the one with the most bandwidth, then the one whose node ids sort first.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.capacity = topology.capacities()
        self.latency: dict[tuple[str, str], float] = {}
        for link in topology.links:
            pair = (link.src, link.dst)
            self.latency[pair] = min(self.latency.get(pair, link.latency_us), link.latency_us)
        # The length of a link is a whole number proportional to its inverse bandwidth. Sums of
        # whole numbers are exact, so routes of equal length compare as equal.
        scale = math.lcm(*(bandwidth.numerator for bandwidth in self.capacity.values()))
        self._next: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for (src, dst), bandwidth in sorted(self.capacity.items()):
            self._next[src].append((dst, int(scale / bandwidth)))
        self._ranks = frozenset(topology.ranks)
        self._trees: dict[str, dict[str, str]] = {}

    def default(self, src: str, dst: str) -> tuple[str, ...]:
        """The node ids of the default route from `src` to `dst`. Raises ModelError if there is no
        path.
        """
        if src not in self._trees:
            self._trees[src] = self._shortest(src)
        parent = self._trees[src]
        if dst not in parent:
            raise ModelError(
                f"In the topology {self.topology.name} no path leads from {src} to {dst}; "
                "add links, or use an algorithm that does not need one."
            )
        route = [dst]
        while route[-1] != src:
            route.append(parent[route[-1]])
        return tuple(reversed(route))

    def latency_us(self, route: tuple[str, ...]) -> float:
        """The sum of the latencies of a route's links, in microseconds."""
        return sum(self.latency[hop] for hop in itertools.pairwise(route))

    def of_put(self, program: CollectiveProgram, ref: OpRef) -> tuple[str, ...]:
        """The route of a put. If the program names a route, it is checked."""
        op = program.op(ref)
        names = self.topology.ranks
        src, dst = names[ref.rank], names[op.peer or 0]
        if not op.route:
            return self.default(src, dst)
        hops = list(itertools.pairwise(op.route))
        missing = next((hop for hop in hops if hop not in self.capacity), None)
        if (op.route[0], op.route[-1]) != (src, dst) or missing:
            fault = f"there is no link from {missing[0]} to {missing[1]}" if missing else ""
            raise ModelError(
                f"{describe(program, ref)} names the route {' > '.join(op.route)}, but "
                f"{fault or f'it must lead from {src} to {dst}'} in {self.topology.name}; "
                "simulate the program on the topology that it was made for."
            )
        return op.route

    def _shortest(self, src: str) -> dict[str, str]:
        parent: dict[str, str] = {}
        heap: list[tuple[Cost, str, str]] = [((0, 0, 0), src, src)]
        while heap:
            cost, node, before = heapq.heappop(heap)
            if node in parent:
                continue
            parent[node] = before
            through = cost[0] + (node in self._ranks and node != src)
            for after, inverse in self._next[node]:
                if after not in parent:
                    total = (through, cost[1] + 1, cost[2] + inverse)
                    heapq.heappush(heap, (total, after, node))
        return parent


@functools.lru_cache(maxsize=8)
def routes_of(topology: Topology) -> Routes:
    """Returns the routes of a topology, which are cached for all simulations of it."""
    return Routes(topology)
