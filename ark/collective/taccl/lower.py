"""Converts ordered sends to a collective program. An all-gather that is run backwards becomes a
reduce-scatter.

A message of several chunks is one put. If the chunks' slots are not adjacent, the sender packs them
and the receiver unpacks them with copies. Called by ark.collective.taccl.
"""

from __future__ import annotations

from ark.collective.programs import IN, OUT, Collective, CollectiveProgram, ProgramBuilder, Span
from ark.collective.taccl.choices import Chunk
from ark.collective.taccl.logical import Edge, Logical
from ark.collective.taccl.ordering import Schedule
from ark.collective.taccl.routing import Routing

Plan = tuple[Logical, Routing, Schedule]


def lower(
    graph: Logical,
    collective: Collective,
    gathering: Plan | None,
    reducing: Plan | None,
    reduction: str | None,
    pieces: int,
) -> CollectiveProgram:
    """Writes the program. gathering: the routes and the order of sends of the phase that sends data
    out, or None if there is no such phase. reducing: the routes and the order of sends of the phase
    that reduces, or None. They are given for the reversed topology, because a reduction is an
    all-gather that runs backwards.
    """
    parts = graph.sketch.input_chunkup
    b = ProgramBuilder(
        f"taccl {collective.value} on {graph.topology.name}",
        collective,
        graph.ranks,
        graph.ranks * parts,
        reduction=reduction,
        pieces=pieces,
    )
    writer = _Writer(b, parts)
    if reducing:
        writer.reduce(*reducing)
    if gathering and collective is Collective.ALL_TO_ALL:
        writer.exchange(*gathering)
    elif gathering:
        writer.gather(*gathering, loaded=reducing is not None)
    writer.end()
    return b.build()


class _Writer:
    """Writes operations and assigns slots to every chunk on each rank. `used` counts the scratch
    slots in use. The size of the scratch buffer is known only at the end, when `end` adds the
    buffer to the builder.
    """

    def __init__(self, b: ProgramBuilder, parts: int) -> None:
        self.b, self.parts = b, parts
        self.used = [0] * b.ranks
        self.lies: dict[tuple[int, int], Span] = {}

    def room(self, rank: int, count: int) -> list[Span]:
        """Returns adjacent scratch slots on a rank."""
        first = self.used[rank]
        self.used[rank] += count
        return [Span("scratch", first + i) for i in range(count)]

    def end(self) -> None:
        """Adds the scratch buffer, if any of its slots is used."""
        if max(self.used):
            self.b.scratch(max(self.used))

    def gather(self, graph: Logical, routing: Routing, schedule: Schedule, loaded: bool) -> None:
        """Writes the gathering phase: every chunk is sent to its slot of `out` on every rank."""
        for number, chunk in enumerate(routing.chunks):
            place = Span(OUT, chunk.owner * self.parts + chunk.index)
            self.lies[number, chunk.owner] = place
            if not loaded:
                self.b.copy(chunk.owner, Span(IN, chunk.index), place)
        for send in schedule.sends:
            targets = [self.lies[c, routing.chunks[c].owner] for c in send.chunks]
            self.send(graph.edges[send.edge], send.chunks, targets)

    def exchange(self, graph: Logical, routing: Routing, schedule: Schedule) -> None:
        """Writes an all-to-all: every chunk is sent from its sender to its slot of `out` on its
        receiver.
        """
        for rank in range(self.b.ranks):
            own = rank * self.parts
            self.b.copy(rank, Span(IN, own, self.parts), Span(OUT, own, self.parts))
        for number, chunk in enumerate(routing.chunks):
            slot = chunk.wanted_by * self.parts + chunk.index
            self.lies[number, chunk.owner] = Span(IN, slot)
        for send in schedule.sends:
            edge = graph.edges[send.edge]
            chunks = [routing.chunks[c] for c in send.chunks]
            if any(chunk.wanted_by == edge.dst for chunk in chunks):
                spare = iter(self.room(edge.dst, sum(c.wanted_by != edge.dst for c in chunks)))
                targets = [
                    Span(OUT, chunk.owner * self.parts + chunk.index)
                    if chunk.wanted_by == edge.dst
                    else next(spare)
                    for chunk in chunks
                ]
            else:
                targets = self.room(edge.dst, len(chunks))
            self.send(edge, send.chunks, targets)

    def send(self, edge: Edge, chunks: tuple[int, ...], targets: list[Span]) -> None:
        """Writes the send of `chunks` over one link as a single put. If the chunks' slots are not
        adjacent, the sender packs them before the put; if the target slots are not adjacent, the
        receiver unpacks them.
        """
        sources = [self.lies[c, edge.src] for c in chunks]
        source, target = _joined(sources), _joined(targets)
        if source is None:
            packed = self.room(edge.src, len(chunks))
            for one, slot in zip(sources, packed, strict=True):
                self.b.copy(edge.src, one, slot)
            source = Span("scratch", packed[0].start, len(packed))
        landing = target
        if landing is None:
            landing = Span("scratch", self.room(edge.dst, len(chunks))[0].start, len(chunks))
        self.b.put(edge.src, edge.dst, source, landing, route=edge.route)
        for i, (c, slot) in enumerate(zip(chunks, targets, strict=True)):
            if target is None:
                self.b.copy(edge.dst, Span("scratch", landing.start + i), slot)
            self.lies[c, edge.dst] = slot

    def reduce(self, graph: Logical, routing: Routing, schedule: Schedule) -> None:
        """Writes the reducing phase, which is an all-gather that runs backwards: the leaves of each
        tree send first, and ranks add up the data that they receive.
        """
        waiting: dict[tuple[int, int], int] = {}
        arrived: dict[tuple[int, int], list[Span]] = {}
        for c, links in enumerate(routing.links):
            for e in links:
                key = (c, graph.edges[e].src)
                waiting[key] = waiting.get(key, 0) + 1
        sums: dict[tuple[int, int], Span] = {}
        backwards = sorted(schedule.sends, key=lambda s: (-s.end_us, -s.start_us, s.edge))
        for send in backwards:
            inner = [c for c in send.chunks if (c, graph.edges[send.edge].dst) in waiting]
            for c, slot in zip(
                inner, self.room(graph.edges[send.edge].dst, len(inner)), strict=True
            ):
                sums[c, graph.edges[send.edge].dst] = slot
        for send in backwards:
            edge = graph.edges[send.edge].reversed()
            for c in send.chunks:
                own = self.own(routing.chunks[c])
                self.lies[c, edge.src] = sums.get((c, edge.src), own)
            self.send(edge, send.chunks, self.room(edge.dst, len(send.chunks)))
            for c in send.chunks:
                key = (c, edge.dst)
                arrived.setdefault(key, []).append(self.lies.pop(key))
                waiting[key] -= 1
                if waiting[key] == 0:
                    self.sum(routing.chunks[c], edge.dst, arrived[key], sums.get(key))

    def own(self, chunk: Chunk) -> Span:
        """The slots that hold a rank's own contribution to a chunk."""
        return Span(IN, chunk.owner * self.parts + chunk.index)

    def sum(self, chunk: Chunk, rank: int, arrived: list[Span], target: Span | None) -> None:
        """Adds up a chunk on a rank, after the rank has received it from all its children in the
        tree.
        """
        final = rank == chunk.owner
        if final:
            whole = self.b.collective is Collective.ALL_REDUCE
            target = Span(OUT, chunk.index + (chunk.owner * self.parts if whole else 0))
        self.b.reduce(rank, [self.own(chunk), *arrived], target or arrived[0], final=final)


def _joined(spans: list[Span]) -> Span | None:
    """The slots as a single span if they are adjacent, otherwise None."""
    first = spans[0]
    if all(s.buffer == first.buffer and s.start == first.start + i for i, s in enumerate(spans)):
        return Span(first.buffer, first.start, len(spans))
    return None
