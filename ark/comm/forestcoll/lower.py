"""Turns a forest into a collective program: puts along its trees, reductions where branches meet.

`ark.comm.synthesize`, the command line and the planner call it. A root's data is cut into as many
chunks as its trees need; a tree for several chunks moves them with one put. Operations are issued
level by level over all trees, which is the order in which they can run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ark.comm.forestcoll.forest import Forest
from ark.comm.forestcoll.tree import Edge, Tree
from ark.comm.program.builder import IN, OUT, ProgramBuilder
from ark.comm.program.types import CollectiveProgram, Span


def lower(forest: Forest, reduction: str = "sum", pieces: int = 1) -> CollectiveProgram:
    """Returns the program; `pieces` cuts every chunk further so that long paths are pipelined.

    `reduction` names an elementwise reduction of `ark.comm.program.reductions`.
    """
    everything = forest.reducing + forest.gathering
    unit = math.gcd(
        *(units for tree in everything for edge in tree.edges for _, units in edge.paths)
    )
    per_root = forest.optimum.k // unit
    rooted = forest.collective in ("broadcast", "reduce")
    ranks = len(forest.topology.ranks)
    builder = ProgramBuilder(
        f"forestcoll k={forest.optimum.k} {forest.collective} on {forest.topology.name}",
        forest.collective,
        ranks,
        per_root if rooted else per_root * ranks,
        reduction=reduction if forest.reducing else None,
        root=everything[0].root if rooted else None,
        pieces=pieces,
    )
    writer = _Writer(builder, forest, unit, 0 if rooted else per_root)
    if forest.reducing:
        writer.reduce()
    if forest.gathering:
        writer.gather()
    return builder.build()


class _Writer:
    """Writes the two phases; `stride` is how many chunks each root owns (0: one root owns all)."""

    def __init__(self, builder: ProgramBuilder, forest: Forest, unit: int, stride: int) -> None:
        self._builder = builder
        self._forest = forest
        self._unit = unit
        self._stride = stride

    def gather(self) -> None:
        """Every root's data ends in `out` on all ranks, from `in` or from the reducing phase."""
        reduced = bool(self._forest.reducing)
        firsts = self._first_chunks(self._forest.gathering)
        if not reduced:
            for root, chunks in self._chunks_of_roots().items():
                own = Span(IN, 0, chunks)
                self._builder.copy(root, own, Span(OUT, root * self._stride, chunks))
        levels = [_levels(tree) for tree in self._forest.gathering]
        for level in range(max(map(len, levels))):
            for tree, first, edges in zip(self._forest.gathering, firsts, levels, strict=True):
                for edge in edges[level] if level < len(edges) else ():
                    for path, offset, count in self._parts(edge):
                        there = Span(OUT, tree.root * self._stride + first + offset, count)
                        here = there
                        if edge.src == tree.root and not reduced:
                            here = Span(IN, first + offset, count)
                        self._builder.put(edge.src, edge.dst, here, there, route=path)

    def reduce(self) -> None:
        """Every rank's contribution ends, reduced, in `out` on the root of its chunks."""
        forest = self._forest
        firsts = self._first_chunks(forest.reducing)
        whole = forest.collective == "all_reduce"
        name = self._builder.scratch(self._scratch_slots())
        used = [0] * len(forest.topology.ranks)
        arrived: dict[tuple[int, int], list[Span]] = {}
        levels = [_levels(tree.reversed())[::-1] for tree in forest.reducing]
        tallest = max(map(len, levels))
        for level in range(tallest + 1):
            for number, (tree, first) in enumerate(zip(forest.reducing, firsts, strict=True)):
                count = tree.count // self._unit
                place = tree.root * self._stride + first
                step = level - (tallest - len(levels[number]))
                if step == len(levels[number]):
                    sources = [Span(IN, place, count), *arrived.pop((number, tree.root))]
                    result = Span(OUT, place if whole else first, count)
                    self._builder.reduce(tree.root, sources, result, final=True)
                    continue
                for edge in levels[number][step] if step >= 0 else ():
                    sender = edge.dst  # of the outward edge
                    own = Span(IN, place, count)
                    inputs = arrived.pop((number, sender), [])
                    if inputs:
                        self._builder.reduce(sender, [own, *inputs], inputs[0])
                        own = inputs[0]
                    there = Span(name, used[edge.src], count)
                    used[edge.src] += count
                    arrived.setdefault((number, edge.src), []).append(there)
                    for path, offset, part in self._parts(edge):
                        self._builder.put(
                            sender,
                            edge.src,
                            Span(own.buffer, own.start + offset, part),
                            Span(there.buffer, there.start + offset, part),
                            route=path[::-1],
                        )

    def _scratch_slots(self) -> int:
        """Returns the most chunks that arrive on one rank while reducing."""
        slots = [0] * len(self._forest.topology.ranks)
        for tree in self._forest.reducing:
            for edge in tree.edges:
                slots[edge.dst] += tree.count // self._unit
        return max(slots)

    def _first_chunks(self, trees: tuple[Tree, ...]) -> list[int]:
        """Returns, tree by tree, the first of its chunks within its root's data."""
        used = [0] * len(self._forest.topology.ranks)
        firsts = []
        for tree in trees:
            firsts.append(used[tree.root])
            used[tree.root] += tree.count // self._unit
        return firsts

    def _chunks_of_roots(self) -> dict[int, int]:
        chunks: dict[int, int] = {}
        for tree in self._forest.gathering:
            chunks[tree.root] = chunks.get(tree.root, 0) + tree.count // self._unit
        return chunks

    def _parts(self, edge: Edge) -> Iterator[tuple[tuple[str, ...], int, int]]:
        """Yields (path, first chunk, chunks) for each path of the edge."""
        offset = 0
        for path, units in edge.paths:
            yield path, offset, units // self._unit
            offset += units // self._unit


def _levels(tree: Tree) -> list[list[Edge]]:
    """Returns the edges of a gathering tree by their distance from the root."""
    depth = {tree.root: 0}
    levels: list[list[Edge]] = []
    for edge in tree.edges:
        level = depth[edge.src]
        depth[edge.dst] = level + 1
        if level == len(levels):
            levels.append([])
        levels[level].append(edge)
    return levels
