"""The double binary tree: two trees with half of the data each, so that all links are used.

Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"
(Parallel Computing 2009). With boxes, a tree connects one rank of each box; the other ranks of the
box are a chain that begins with this rank. There are two trees for every local rank number, as in
NCCL. Called by `ark.collective.classics`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ark.collective.programs import IN, OUT, ProgramBuilder, Span


def binary_tree(n: int) -> list[int | None]:
    """The parent of each node in a binary tree over 0..n-1 in which every odd node is a leaf. Node
    0 is the root, whose parent is None.
    """
    parents: list[int | None] = []
    for node in range(n):
        low = node & -node
        up = node ^ low | low << 1
        parents.append(None if node == 0 else up if up < n else node ^ low)
    return parents


def two_trees(members: list[int]) -> list[dict[int, int | None]]:
    """Two trees over `members`, as {rank: parent}. The second tree is the first one mirrored, or
    shifted if the number of members is odd.
    """
    n = len(members)
    parents = binary_tree(n)
    if n % 2:
        twin = [members[(i + 1) % n] for i in range(n)]
    else:
        twin = [members[n - 1 - i] for i in range(n)]
    return [
        {names[i]: None if up is None else names[up] for i, up in enumerate(parents)}
        for names in (members, twin)
    ]


def top_down(tree: dict[int, int | None]) -> list[int]:
    """The ranks of a tree in a fixed order, in which parents precede children."""
    depth: dict[int, int] = {}

    def level(rank: int) -> int:
        parent = tree[rank]
        if rank not in depth:
            depth[rank] = 0 if parent is None else level(parent) + 1
        return depth[rank]

    return sorted(tree, key=lambda rank: (level(rank), rank))


def reduce_up(
    b: ProgramBuilder, tree: dict[int, int | None], index: int, received: str, trees: int = 2
) -> None:
    """Adds operations that sum part number `index` of the data towards the root of a tree. The
    result is in the root's `out`. The data have one part for each of the `trees` trees.
    """
    half = b.chunks // trees
    start = index * half
    children: dict[int, list[int]] = {rank: [] for rank in tree}
    for rank, parent in tree.items():
        if parent is not None:
            children[parent].append(rank)
    for rank in reversed(top_down(tree)):
        arrivals = [
            Span(received, i * b.chunks + start, half) for i, _ in enumerate(children[rank])
        ]
        total = Span(IN, start, half)
        parent = tree[rank]
        if arrivals:
            target = Span(OUT, start, half)
            b.reduce(rank, [total, *arrivals], target, final=parent is None)
            total = target
        if parent is not None:
            number = sorted(children[parent]).index(rank)
            b.put(rank, parent, total, Span(received, number * b.chunks + start, half))


def broadcast_down(
    b: ProgramBuilder, tree: dict[int, int | None], index: int, trees: int = 2
) -> None:
    """Sends part `index` of `out` from the root of a tree to all ranks. `out` has one part per
    tree.
    """
    size = b.chunks // trees
    span = Span(OUT, index * size, size)
    for rank in top_down(tree):
        parent = tree[rank]
        if parent is not None:
            b.put(parent, rank, span, span)


def chained_trees(boxes: Sequence[Sequence[int]]) -> list[dict[int, int | None]]:
    """Two trees for every local rank number, as {rank: parent}.

    The trees connect the ranks with this number in all boxes. In each box, the other ranks are a
    chain that begins with this rank. If there is a single box, there are two trees over all of its
    ranks.
    """
    if len(boxes) == 1:
        return two_trees(list(boxes[0]))
    trees = []
    for place in range(len(boxes[0])):
        chains = [[*box[place:], *box[:place]] for box in boxes]
        behind = {rank: before for chain in chains for before, rank in itertools.pairwise(chain)}
        trees += [{**tree, **behind} for tree in two_trees([chain[0] for chain in chains])]
    return trees


def all_reduce_trees(b: ProgramBuilder, boxes: Sequence[Sequence[int]]) -> None:
    """An all-reduce by trees. Every tree sums its part of the data towards its root, then sends the
    sum from the root to all ranks.
    """
    received = b.scratch((3 if len(boxes) > 1 else 2) * b.chunks, "receive")
    trees = chained_trees(boxes)
    for index, tree in enumerate(trees):
        reduce_up(b, tree, index, received, len(trees))
    for index, tree in enumerate(trees):
        broadcast_down(b, tree, index, len(trees))


def _under_root(b: ProgramBuilder, root: int) -> list[dict[int, int | None]]:
    """Two trees for a root that is outside of them: they contain all ranks except `root`, and
    `root` becomes the parent of both trees' roots.
    """
    trees = two_trees([rank for rank in range(b.ranks) if rank != root])
    return [
        {root: None, **{rank: root if up is None else up for rank, up in tree.items()}}
        for tree in trees
    ]


def broadcast_trees(b: ProgramBuilder, root: int) -> None:
    """A broadcast by two trees that contain all ranks except the root. The root sends half of the
    data into each tree.
    """
    b.copy(root, Span(IN, 0, b.chunks), Span(OUT, 0, b.chunks))
    for index, tree in enumerate(_under_root(b, root)):
        broadcast_down(b, tree, index)


def reduce_trees(b: ProgramBuilder, root: int) -> None:
    """A reduce by two trees, each of which contains all ranks but the root. The trees send their
    sums to the root.
    """
    received = b.scratch(2 * b.chunks, "receive")
    for index, tree in enumerate(_under_root(b, root)):
        reduce_up(b, tree, index, received)
