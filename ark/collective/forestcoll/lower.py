"""Converts a forest to a collective program, with puts along its trees and reductions where
branches meet.

A root's data are cut into one chunk for each unit that the root's trees carry. A tree that carries
several chunks moves them with one put (one-sided write). The program lists the operations level by
level, each level for all trees, so that they can run in this order. Called by
`ark.collective.synthesis`; users reach it by `ark.comm.synthesize`.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterator

from ark.collective.forestcoll.forest import Forest
from ark.collective.forestcoll.tree import Edge, Tree
from ark.collective.programs.builder import IN, OUT, ProgramBuilder
from ark.collective.programs.types import CollectiveProgram, OpRef, Span


def lower(
    forest: Forest,
    reduction: str = "sum",
    pieces: int = 1,
    window: int = 0,
    most_operations: int | None = None,
) -> CollectiveProgram:
    """Returns the program of a forest. Raises UnsupportedError if it has more than
    `most_operations` operations.

    Args:
        forest: the trees.
        reduction: an elementwise reduction of `ark.collective.programs.reductions`.
        pieces: cuts every chunk further, so that long paths are pipelined.
        window: how many puts of a gathering rank may be in flight over one link at a time, if their
            receivers forward the data; 0 means no limit. With a small window, data arrive one after
            another, not all at the end, and are forwarded sooner; but the latency of each put then
            counts.
    """
    everything = forest.reducing + forest.gathering
    unit = math.gcd(
        *(units for tree in everything for edge in tree.edges for _, units in edge.paths)
    )
    rooted = forest.collective in ("broadcast", "reduce")
    ranks = len(forest.topology.ranks)
    places = _places(forest.gathering or forest.reducing, unit, ranks)
    builder = ProgramBuilder(
        f"forestcoll k={forest.trees}{f' window={window}' if window else ''} "
        f"{forest.collective} on {forest.topology.name}",
        forest.collective,
        ranks,
        places[-1],
        reduction=reduction if forest.reducing else None,
        root=everything[0].root if rooted else None,
        pieces=pieces,
        most_operations=most_operations,
    )
    writer = _Writer(builder, forest, unit, places)
    if forest.reducing:
        writer.reduce()
    if forest.gathering:
        writer.gather(window)
    return builder.build()


def _places(trees: tuple[Tree, ...], unit: int, ranks: int) -> list[int]:
    """Returns, for every root in the order of ranks, the number of the first chunk of its data. The
    last entry is the total number of chunks.
    """
    chunks = [0] * ranks
    for tree in trees:
        chunks[tree.root] += tree.count // unit
    return [0, *itertools.accumulate(chunks)]


class _Writer:
    """Writes the operations of a forest's reducing and gathering phases. `places[root]` is the
    first chunk that the root owns.
    """

    def __init__(
        self, builder: ProgramBuilder, forest: Forest, unit: int, places: list[int]
    ) -> None:
        self._builder = builder
        self._forest = forest
        self._unit = unit
        self._places = places

    def gather(self, window: int) -> None:
        """Sends every root's data to `out` on all ranks. The data come from `in`, or from the
        reducing phase.
        """
        trees = self._forest.gathering
        firsts, totals = self._shares(trees)
        starts_in = not self._forest.reducing
        if starts_in:
            for root, chunks in totals.items():
                place = Span(OUT, self._places[root], chunks)
                self._builder.copy(root, Span(IN, 0, chunks), place)
        passing_on = [{edge.src for edge in tree.edges} for tree in trees]
        under_way: defaultdict[tuple[int, str], deque[OpRef]]
        under_way = defaultdict(lambda: deque(maxlen=window))
        for number, edge in _in_rounds(trees):
            root, first = trees[number].root, firsts[number]
            there = Span(OUT, self._places[root] + first, trees[number].count // self._unit)
            from_in = starts_in and edge.src == root
            here = Span(IN, first, there.count) if from_in else there
            for path, source, target in self._parts(edge, here, there):
                passes_on = edge.dst in passing_on[number]
                queue = under_way[edge.src, path[1]] if passes_on else deque()
                after = [queue[0]] if window and len(queue) == window else []
                queue.append(self._builder.put(edge.src, edge.dst, source, target, path, after))

    def reduce(self) -> None:
        """Reduces the contributions of all ranks into `out` on the root of each chunk."""
        trees = self._forest.reducing
        firsts, _ = self._shares(trees)
        scratch = self._builder.scratch(self._most_arrivals())
        used = [0] * len(self._forest.topology.ranks)
        arrived: dict[tuple[int, int], list[Span]] = {}
        own = [
            Span(IN, self._places[tree.root] + first, tree.count // self._unit)
            for tree, first in zip(trees, firsts, strict=True)
        ]
        for number, edge in _in_rounds(trees):
            partial = own[number]
            parts = arrived.pop((number, edge.src), [])
            if parts:
                self._builder.reduce(edge.src, [partial, *parts], parts[0])
                partial = parts[0]
            there = Span(scratch, used[edge.dst], partial.count)
            used[edge.dst] += partial.count
            arrived.setdefault((number, edge.dst), []).append(there)
            for path, source, target in self._parts(edge, partial, there):
                self._builder.put(edge.src, edge.dst, source, target, path)
        for number, tree in enumerate(trees):
            parts = arrived[number, tree.root]
            place = own[number].start if self._forest.gathering else firsts[number]
            result = Span(OUT, place, own[number].count)
            self._builder.reduce(tree.root, [own[number], *parts], result, final=True)

    def _parts(
        self, edge: Edge, here: Span, there: Span
    ) -> Iterator[tuple[tuple[str, ...], Span, Span]]:
        """Divides the transfer of an edge among its paths. Yields each path (node ids) with its
        part of the source slots `here` and its part of the destination slots `there`.
        """
        done = 0
        for path, units in edge.paths:
            count = units // self._unit
            source = Span(here.buffer, here.start + done, count)
            yield path, source, Span(there.buffer, there.start + done, count)
            done += count

    def _most_arrivals(self) -> int:
        """Returns the largest number of chunks that arrive on one rank in the reducing phase."""
        slots = [0] * len(self._forest.topology.ranks)
        for tree in self._forest.reducing:
            for edge in tree.edges:
                slots[edge.dst] += tree.count // self._unit
        return max(slots)

    def _shares(self, trees: tuple[Tree, ...]) -> tuple[list[int], dict[int, int]]:
        """Returns, for each tree, its first chunk within its root's data, and for each root the
        number of chunks.
        """
        used: dict[int, int] = {}
        firsts = []
        for tree in trees:
            firsts.append(used.get(tree.root, 0))
            used[tree.root] = firsts[-1] + tree.count // self._unit
        return firsts, used


def _in_rounds(trees: tuple[Tree, ...]) -> list[tuple[int, Edge]]:
    """Returns (tree number, edge) in rounds over all trees. In this order each sender has received
    the data before it sends them.

    Gathering starts at the roots, reducing at the ranks farthest from the roots.
    """
    rounds = []
    for number, tree in enumerate(trees):
        depth = tree.depths()
        for edge in tree.edges:
            away = depth[edge.dst] > depth[edge.src]
            rounds.append((depth[edge.src] if away else -depth[edge.src], number, edge))
    return [(number, edge) for _, number, edge in sorted(rounds, key=lambda each: each[:2])]
