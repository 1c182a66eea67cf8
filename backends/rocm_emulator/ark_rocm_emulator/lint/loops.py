"""Finds the loops of a function from its blocks, dominators and back edges (Aho et al., section
9.6).

The lint checks whether scratch is used in a loop, and which loops only poll.
"""

from __future__ import annotations

from collections.abc import Sequence

from .listing import Block


def _order(blocks: Sequence[Block]) -> list[int]:
    """The reachable blocks, each before its successors except along back edges."""
    seen, finished = {0}, []
    todo = [(0, iter(blocks[0].follows))]
    while todo:
        index, follows = todo[-1]
        fresh = next((f for f in follows if f not in seen), None)
        if fresh is None:
            finished.append(index)
            todo.pop()
        else:
            seen.add(fresh)
            todo.append((fresh, iter(blocks[fresh].follows)))
    return finished[::-1]


def _immediate_dominators(order: Sequence[int], before: Sequence[list[int]]) -> dict[int, int]:
    """Each block's closest dominator (Cooper, Harvey and Kennedy's simple, fast algorithm)."""
    place = {index: k for k, index in enumerate(order)}
    above = {0: 0}

    def meet(left: int, right: int) -> int:
        while left != right:
            if place[left] > place[right]:
                left = above[left]
            else:
                right = above[right]
        return left

    changed = True
    while changed:
        changed = False
        for index in order[1:]:
            known = [p for p in before[index] if p in above]
            new = known[0]
            for other in known[1:]:
                new = meet(new, other)
            if above.get(index) != new:
                above[index], changed = new, True
    return above


def _dominates(above: dict[int, int], head: int, tail: int) -> bool:
    while tail != head and tail != 0:
        tail = above[tail]
    return tail == head


def natural_loops(blocks: Sequence[Block]) -> list[frozenset[int]]:
    """The natural loops as sets of block indices, one for each header, in header order."""
    order = _order(blocks)
    before: list[list[int]] = [[] for _ in blocks]
    for index in order:
        for follow in blocks[index].follows:
            before[follow].append(index)
    above = _immediate_dominators(order, before)
    loops: dict[int, set[int]] = {}
    for tail in order:
        for head in blocks[tail].follows:
            if _dominates(above, head, tail):
                body = loops.setdefault(head, {head})
                todo = [tail]
                while todo:
                    index = todo.pop()
                    if index not in body:
                        body.add(index)
                        todo.extend(before[index])
    return [frozenset(loops[head]) for head in sorted(loops)]


def innermost_loops(blocks: Sequence[Block]) -> list[frozenset[int]]:
    """The natural loops that contain no other loop."""
    loops = natural_loops(blocks)
    return [loop for loop in loops if not any(other < loop for other in loops)]
