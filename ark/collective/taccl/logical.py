"""Computes the logical links that a sketch allows, with their costs and symmetries.

A logical link connects two ranks and has one route through the topology. The routing model chooses
among these links. `default_sketch` is in this module because it tests which symmetries hold.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np

from ark.collective.groups import generated
from ark.collective.simulate import Routes
from ark.collective.taccl.sketch import Sketch
from ark.collective.topology import Topology
from ark.errors import ModelError

Permutation = tuple[int, ...]
_MOST_SYMMETRIES = 4096
_MAX_SPLIT_CHUNK_RANKS = 32  # with more ranks, two chunks per rank make the search slow


@dataclass(frozen=True)
class Edge:
    """A logical link from rank `src` to rank `dst`.

    `alpha_us` is the latency of the link's route. `gbps` is the bandwidth of the route's slowest
    link, or a part of it if the sketch divides this bandwidth among several logical links. `sender`
    is the local number of the sending rank if the link leaves a box, otherwise None. A reversed
    link has the same `sender`.
    """

    src: int
    dst: int
    route: tuple[str, ...]
    alpha_us: float
    gbps: float
    sender: int | None = None

    def reversed(self) -> Edge:
        """The logical link in the opposite direction. A reduction is an all-gather that runs
        backwards over reversed links.
        """
        return dataclasses.replace(self, src=self.dst, dst=self.src, route=self.route[::-1])


@dataclass(frozen=True)
class Logical:
    """The logical links (connections of two ranks by one route) that a sketch allows. per_box: the
    number of ranks of a box.
    """

    topology: Topology
    sketch: Sketch
    edges: tuple[Edge, ...]
    per_box: int

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.topology.ranks)

    def reversed(self) -> Logical:
        """The network with all links reversed. An all-gather on it, run backwards, is a
        reduce-scatter on this network.
        """
        edges = tuple(sorted((e.reversed() for e in self.edges), key=lambda e: (e.src, e.dst)))
        return dataclasses.replace(self, topology=self.topology.reverse(), edges=edges)


def logical(topology: Topology, sketch: Sketch) -> Logical:
    """The logical links that the sketch allows on the topology. Raises ModelError if sketch and
    topology do not match.
    """
    ranks = len(topology.ranks)
    if ranks % sketch.nnodes:
        raise ModelError(
            f"The sketch deals ranks to {sketch.nnodes} boxes, but {topology.name} has {ranks} "
            "ranks; nnodes must divide them."
        )
    per_box = ranks // sketch.nnodes
    for name, locals_ in _mentioned(sketch):
        wrong = next((x for x in locals_ if x >= per_box), None)
        if wrong is not None:
            raise ModelError(
                f"The sketch's {name} names local rank {wrong}, but a box has ranks 0 to "
                f"{per_box - 1}."
            )
    routes = Routes(topology)
    split = dict(sketch.beta_split)
    edges = []
    for box in range(sketch.nnodes):
        for a, b in _inside(topology, sketch, routes, per_box, box * per_box):
            edges.append(_edge(topology, routes, box * per_box + a, box * per_box + b))
    for a, b in _between(sketch, per_box):
        for one, other in itertools.permutations(range(sketch.nnodes), 2):
            edge = _edge(topology, routes, one * per_box + a, other * per_box + b)
            edges.append(dataclasses.replace(edge, sender=a, gbps=edge.gbps / split.get(a, 1)))
    return Logical(topology, sketch, tuple(sorted(edges, key=lambda e: (e.src, e.dst))), per_box)


def _mentioned(sketch: Sketch) -> list[tuple[str, list[int]]]:
    def local_ranks(table: object) -> list[int]:
        rows = table if isinstance(table, tuple) else ()
        return [x for i, js in rows for x in (i, *js)]

    return [
        ("switches", [x for row in sketch.switches for x in row]),
        ("intranode_conn", local_ranks(sketch.intranode_conn)),
        ("internode_conn", local_ranks(sketch.internode_conn)),
        ("gpus_to_sender_rev_map", local_ranks(sketch.senders)),
        ("beta_split", [i for i, _ in sketch.beta_split]),
    ]


def _inside(
    topology: Topology, sketch: Sketch, routes: Routes, per_box: int, base: int
) -> list[tuple[int, int]]:
    """Pairs of local ranks in a box that may exchange data directly."""
    if sketch.intranode == "switch":
        pairs = {p for row in sketch.switches for p in itertools.permutations(row, 2)}
    elif sketch.intranode == "relay":
        pairs = {(i, j) for i, js in sketch.intranode_conn for j in js if i != j}
    else:
        names = topology.ranks[base : base + per_box]
        pairs = {
            (a, b)
            for a, b in itertools.permutations(range(per_box), 2)
            if (names[a], names[b]) in routes.capacity
        }
    return sorted(pairs)


def _between(sketch: Sketch, per_box: int) -> list[tuple[int, int]]:
    """Pairs (local sender, local receiver) of ranks that connect boxes."""
    if sketch.internode_conn == "direct-map":
        return [(i, i) for i in range(per_box)]
    if isinstance(sketch.internode_conn, str):
        return list(itertools.product(range(per_box), range(per_box)))
    return [(i, j) for i, js in sketch.internode_conn for j in js]


def _edge(topology: Topology, routes: Routes, src: int, dst: int) -> Edge:
    names = topology.ranks
    route = routes.default(names[src], names[dst])
    relay = next((node for node in route[1:-1] if node in names), None)
    if relay is not None:
        raise ModelError(
            f"The sketch joins {names[src]} to {names[dst]}, but every path between them in "
            f"{topology.name} passes the rank {relay}; omit that connection."
        )
    gbps = min(routes.capacity[hop] for hop in itertools.pairwise(route))
    return Edge(src, dst, route, routes.latency_us(route), float(gbps))


def shift(ranks: int, offset: int, group: int) -> Permutation:
    """The permutation that shifts every rank by `offset` within its group of `group` consecutive
    ranks; the last ranks of a group follow as its first.
    """
    return tuple(r // group * group + (r % group + offset) % group for r in range(ranks))


def broken_symmetry(graph: Logical, permutation: Permutation) -> str | None:
    """The reason, as a clause, why the permutation is not a symmetry of the logical links; None if
    it is one.
    """
    known = {(e.src, e.dst): (e.alpha_us, e.gbps, e.sender is None) for e in graph.edges}
    for (src, dst), cost in sorted(known.items()):
        image = (permutation[src], permutation[dst])
        if known.get(image) != cost:
            fault = "is missing" if image not in known else "has another cost"
            return f"the image {image[0]} > {image[1]} of the link {src} > {dst} {fault}"
    sketch, size = graph.sketch, graph.per_box
    if sketch.senders or sketch.relay_map:
        for owner in range(graph.ranks):
            for sender in range(size):
                box = owner // size * size
                allowed = sketch.leaves_through(owner % size, sender)
                moved = permutation[owner] % size, permutation[box + sender] % size
                if allowed != sketch.leaves_through(*moved):
                    return f"rank {owner} and its image leave their boxes through different senders"
    return None


def symmetries(graph: Logical) -> list[Permutation]:
    """All permutations that the sketch's offsets generate, the identity first. Raises an error if
    one is not a symmetry.
    """
    ranks = graph.ranks
    generators = []
    for offset, group in graph.sketch.symmetry_offsets:
        if ranks % group:
            raise ModelError(
                f"The sketch's symmetry [{offset}, {group}] needs groups of {group} ranks, but "
                f"the topology's {ranks} ranks are not a multiple of {group}."
            )
        permutation = shift(ranks, offset, group)
        if why := broken_symmetry(graph, permutation):
            raise ModelError(f"The sketch's symmetry [{offset}, {group}] does not hold: {why}.")
        generators.append(permutation)
    permutations = generated(ranks, [np.array(each) for each in generators], most=_MOST_SYMMETRIES)
    if permutations is None:
        raise ModelError(
            f"The sketch's symmetries generate more than {_MOST_SYMMETRIES} permutations; "
            "use fewer or larger offsets."
        )
    return [tuple(map(int, image)) for image in permutations.images]


def default_sketch(topology: Topology, chunkup: int | None = None) -> Sketch:
    """A sketch that is made from the topology only. It has the topology's boxes, all connections
    inside them, and connections from rank i to rank i between them.

    Connections inside a box are the direct links if these connect all its ranks, otherwise all
    pairs of ranks whose route passes no other rank. If boxes are unknown, or cannot be connected in
    this way, all ranks form one box. The symmetries are those shifts of boxes, and of ranks inside
    boxes, that leave the links unchanged. `chunkup` is the sketch's input_chunkup; by default 2, or
    1 for networks with more than 32 ranks. Raises ModelError if no such sketch connects all ranks.
    """
    ranks = len(topology.ranks)
    if chunkup is None:
        chunkup = 2 if ranks <= _MAX_SPLIT_CHUNK_RANKS else 1
    boxes = topology.equal_boxes()
    consecutive = boxes is not None and [r for box in boxes for r in box] == list(range(ranks))
    counts = [len(boxes), 1] if boxes is not None and consecutive else [1]
    for nnodes, inside in itertools.product(counts, ("none", "switch", "relay")):
        sketch = _proposed(topology, nnodes, inside, chunkup)
        graph = None if sketch is None else _joining_all(topology, sketch)
        if sketch is not None and graph is not None:
            return dataclasses.replace(sketch, symmetry_offsets=_offsets(graph))
    raise ModelError(
        f"No default sketch joins all ranks of {topology.name}; give a sketch of your own."
    )


def _proposed(topology: Topology, nnodes: int, inside: str, chunkup: int) -> Sketch | None:
    """A sketch for boxes of equal size. inside: the kind of connections inside a box. None if it
    does not add any connection.
    """
    per_box = len(topology.ranks) // nnodes
    names = set(topology.ranks[:per_box])
    direct = any(link.src in names and link.dst in names for link in topology.links)
    sketch = Sketch(nnodes=nnodes, input_chunkup=chunkup)
    if inside == "none":
        return sketch if direct else None
    if inside == "switch":
        everyone = (tuple(range(per_box)),)
        return dataclasses.replace(sketch, intranode="switch", switches=everyone)
    routes = Routes(topology)
    boxes = [topology.ranks[box * per_box :][:per_box] for box in range(nnodes)]
    rows = tuple(
        (a, tuple(b for b in range(per_box) if b != a and _free(routes, boxes, a, b)))
        for a in range(per_box)
    )
    return dataclasses.replace(sketch, intranode="relay", intranode_conn=rows)


def _free(routes: Routes, boxes: list[tuple[str, ...]], a: int, b: int) -> bool:
    """True if, in every box, the route from its rank number a to its rank number b passes no other
    rank.
    """
    ranks = {rank for box in boxes for rank in box}
    return all(ranks.isdisjoint(routes.default(box[a], box[b])[1:-1]) for box in boxes)


def _joining_all(topology: Topology, sketch: Sketch) -> Logical | None:
    """The logical links of a sketch if every rank can reach every other rank over them, otherwise
    None.
    """
    try:
        graph = logical(topology, sketch)
    except ModelError:
        return None
    for ends in ((0, 1), (1, 0)):
        pairs = [(edge.src, edge.dst) for edge in graph.edges]
        reached, waiting = {0}, [0]
        while waiting:
            here = waiting.pop()
            new = {pair[ends[1]] for pair in pairs if pair[ends[0]] == here} - reached
            reached |= new
            waiting += new
        if len(reached) != graph.ranks:
            return None
    return graph


def _offsets(graph: Logical) -> tuple[tuple[int, int], ...]:
    ranks, per_box = graph.ranks, graph.per_box
    offsets = []
    if per_box < ranks and broken_symmetry(graph, shift(ranks, per_box, ranks)) is None:
        offsets.append((per_box, ranks))
    for offset in range(1, per_box):
        holds = per_box % offset == 0 and broken_symmetry(graph, shift(ranks, offset, per_box))
        if holds is None:
            offsets.append((offset, per_box))
            break
    return tuple(offsets)
