"""A spanning tree on the physical network, which ForestColl computes and from which programs are
made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ark.collective.forestcoll.cuts import Ints


@dataclass(frozen=True)
class Edge:
    """An edge of a tree from rank `src` to rank `dst`. `paths` lists (node ids, units); the units
    sum to the tree's count.

    A path starts at the sender, ends at the receiver and has only switches in between.
    """

    src: int
    dst: int
    paths: tuple[tuple[tuple[str, ...], int], ...]


@dataclass(frozen=True)
class Tree:
    """`count` equal spanning trees with the root `root`, a rank number. Each tree carries one unit
    of data.

    In a gathering tree, edges lead away from the root, and the edge to a rank precedes the edges
    from this rank. In a reducing tree, edges lead towards the root, and the edges to a rank precede
    the edge from this rank.
    """

    root: int
    count: int
    edges: tuple[Edge, ...]

    def depths(self) -> dict[int, int]:
        """Returns, for every rank, the number of edges between it and the root."""
        gathers = self.edges[0].src == self.root
        depth = {self.root: 0}
        for edge in self.edges if gathers else reversed(self.edges):
            near, far = (edge.src, edge.dst) if gathers else (edge.dst, edge.src)
            depth[far] = depth[near] + 1
        return depth

    @property
    def height(self) -> int:
        """Returns the number of edges on the longest path between the root and a rank."""
        return max(self.depths().values())

    def image(self, nodes: tuple[str, ...], moved: Sequence[int] | Ints) -> Tree:
        """Returns the tree in which node number i, whose name is nodes[i], is replaced by node
        number moved[i].
        """
        rename = {node: nodes[place] for node, place in zip(nodes, moved, strict=True)}
        edges = tuple(
            Edge(
                int(moved[edge.src]),
                int(moved[edge.dst]),
                tuple((tuple(rename[node] for node in path), units) for path, units in edge.paths),
            )
            for edge in self.edges
        )
        return Tree(int(moved[self.root]), self.count, edges)

    def reversed(self) -> Tree:
        """Returns the tree with its data flowing in the opposite direction, over the reverse
        links.
        """
        edges = tuple(
            Edge(edge.dst, edge.src, tuple((path[::-1], units) for path, units in edge.paths))
            for edge in reversed(self.edges)
        )
        return replace(self, edges=edges)
