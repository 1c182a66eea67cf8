"""Stages 2 and 3 of TACCL: they order the sends on every link, and merge sends.

Stage 2 is a greedy list schedule. Of the chunks that wait for a link, the one with the longest
remaining path is sent first; of several, the one with the shortest path so far. Stage 3 merges up
to six consecutive sends on a link between boxes into one message, which costs one alpha (latency).
It tries each number of merged sends and keeps the schedule that ends first. Shah et al. (NSDI
2023), sections 5.2 and 5.3.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ark.collective.taccl.logical import Logical
from ark.collective.taccl.routing import Routing
from ark.errors import InternalError

MAX_GROUPED_TRANSFERS = 6


@dataclass(frozen=True)
class Send:
    """Chunks that cross a logical link as one message. chunks: their indices in the routing. edge:
    the index of the link.
    """

    chunks: tuple[int, ...]
    edge: int
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Schedule:
    """All sends, ordered by start time, and the time at which the last one ends."""

    sends: tuple[Send, ...]
    time_us: float


def order(
    graph: Logical, routing: Routing, chunk_bytes: float, deadline: float = math.inf
) -> Schedule:
    """Orders the routed chunks. Sends between boxes are merged if the schedule then ends sooner.

    deadline: the time, by time.monotonic(), at which the search for merged sends ends. A schedule
    that is unfinished at this time is dropped.
    """
    scheduler = _Scheduler(graph, routing, chunk_bytes)
    singles = [(c, e) for c, links in enumerate(routing.links) for e in links]
    best = scheduler.run([((c,), e) for c, e in singles])
    if best is None:
        raise InternalError("A chunk's route does not begin at the rank that has the chunk.")
    if any(graph.edges[e].sender is not None for _, e in singles):
        plain = best
        for count in range(2, MAX_GROUPED_TRANSFERS + 1):
            if time.monotonic() > deadline:
                break
            limit = best.time_us * (1 - 1e-9)
            best = scheduler.run(_merge(graph, plain, count), limit, deadline) or best
    return best


def _merge(graph: Logical, plain: Schedule, count: int) -> list[tuple[tuple[int, ...], int]]:
    """Groups consecutive sends on every link between boxes, `count` sends per group."""
    queues: dict[int, list[int]] = {}
    groups: list[tuple[tuple[int, ...], int]] = []
    for send in plain.sends:
        if graph.edges[send.edge].sender is None:
            groups.append((send.chunks, send.edge))
        else:
            queues.setdefault(send.edge, []).extend(send.chunks)
    for edge, queue in sorted(queues.items()):
        for i in range(0, len(queue), count):
            groups.append((tuple(sorted(queue[i : i + count])), edge))
    return groups


class _Scheduler:
    """Computes schedules of the sends of one routing. A message of n chunks occupies its logical
    link for alpha + n beta (latency, and the time of a chunk at the link's bandwidth). It occupies
    each physical link of its route for its bytes divided by the bandwidth of that link.
    """

    def __init__(self, graph: Logical, routing: Routing, chunk_bytes: float) -> None:
        self.graph, self.routing = graph, routing
        capacity = graph.topology.capacities()
        links = {pair: i for i, pair in enumerate(capacity)}
        self.links = len(links)
        self.alpha = [e.alpha_us for e in graph.edges]
        self.beta = [chunk_bytes / e.gbps / 1e3 for e in graph.edges]
        self.holds = [
            [(links[hop], chunk_bytes / float(capacity[hop]) / 1e3) for hop in pairwise(e.route)]
            for e in graph.edges
        ]
        self.uses = [[*(i for i, _ in held), self.links + e] for e, held in enumerate(self.holds)]
        self.ahead, self.behind = self._distances()

    def _distances(self) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
        """Two tables by (chunk, logical link): the number of links on the longest part of the
        chunk's path after this link, and the number of links before it.
        """
        ahead: dict[tuple[int, int], int] = {}
        behind: dict[tuple[int, int], int] = {}
        for chunk, path in enumerate(self.routing.links):
            depth = {self.routing.chunks[chunk].owner: 0}
            for e in path:
                edge = self.graph.edges[e]
                behind[chunk, e] = depth[edge.src]
                depth[edge.dst] = depth[edge.src] + 1
            longest: dict[int, int] = {}
            for e in reversed(path):
                edge = self.graph.edges[e]
                ahead[chunk, e] = longest.get(edge.dst, 0)
                longest[edge.src] = max(longest.get(edge.src, 0), ahead[chunk, e] + 1)
        return ahead, behind

    def run(
        self,
        groups: Sequence[tuple[tuple[int, ...], int]],
        limit: float = math.inf,
        deadline: float = math.inf,
    ) -> Schedule | None:
        """The greedy schedule of messages (chunks, edge).

        Returns None if messages wait for each other, if not all of them end before `limit`
        microseconds, or if not all of them are ordered at `deadline` (by time.monotonic()).
        """
        edges = self.graph.edges
        groups = sorted(groups, key=lambda group: self._rank(*group))
        here = {(c, chunk.owner) for c, chunk in enumerate(self.routing.chunks)}
        waits = [0] * len(groups)
        leaving: dict[tuple[int, int], list[int]] = {}
        for g, (chunks, e) in enumerate(groups):
            for c in chunks:
                if (c, edges[e].src) not in here:
                    waits[g] += 1
                    leaving.setdefault((c, edges[e].src), []).append(g)
        # Groups of messages that can start, sorted by the earliest possible start, then by the key
        # of the greedy choice.
        heap = [(0.0, g) for g in range(len(groups)) if not waits[g]]
        heapq.heapify(heap)
        free = [0.0] * (self.links + len(edges))
        sends: list[Send] = []
        while heap:
            when, g = heapq.heappop(heap)
            chunks, e = groups[g]
            start = max([free[i] for i in self.uses[e]])
            if start > when + 1e-9:
                heapq.heappush(heap, (start, g))
                continue
            start = max(start, when)
            end = start + self.alpha[e] + len(chunks) * self.beta[e]
            if end >= limit or (not len(sends) % 4096 and time.monotonic() > deadline):
                return None
            for i, held in self.holds[e]:
                free[i] = start + len(chunks) * held
            free[self.links + e] = end
            sends.append(Send(chunks, e, start, end))
            for c in chunks:
                for follower in leaving.get((c, edges[e].dst), ()):
                    waits[follower] -= 1
                    if not waits[follower]:
                        heapq.heappush(heap, (end, follower))
        if len(sends) < len(groups):
            return None
        return Schedule(tuple(sends), max((s.end_us for s in sends), default=0.0))

    def _rank(self, chunks: tuple[int, ...], e: int) -> tuple[int, int, int, int]:
        """The key of the greedy choice; the smallest key comes first. No two messages have equal
        keys.
        """
        if self.graph.sketch.enforce_ordering and self.graph.edges[e].sender is not None:
            return 0, 0, chunks[0], e
        far = max(self.ahead[c, e] for c in chunks)
        come = min(self.behind[c, e] for c in chunks)
        return -far, come, chunks[0], e
