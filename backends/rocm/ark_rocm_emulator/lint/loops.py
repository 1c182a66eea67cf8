"""Finds the loops of a function: blocks, dominators, back edges (Aho et al., section 9.6)."""

from __future__ import annotations

from collections.abc import Sequence

from .listing import Block


def _dominators(blocks: Sequence[Block], before: Sequence[list[int]]) -> list[set[int]]:
    every = set(range(len(blocks)))
    dominators = [set(every) for _ in blocks]
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for index in range(1, len(blocks)):
            sets = [dominators[p] for p in before[index]]
            new = {index} | (set.intersection(*sets) if sets else set())
            if new != dominators[index]:
                dominators[index], changed = new, True
    return dominators


def _reachable(blocks: Sequence[Block]) -> set[int]:
    seen, todo = {0}, [0]
    while todo:
        for follow in blocks[todo.pop()].follows:
            if follow not in seen:
                seen.add(follow)
                todo.append(follow)
    return seen


def natural_loops(blocks: Sequence[Block]) -> list[frozenset[int]]:
    """The natural loops as sets of block indices, one a header, in header order."""
    reachable = _reachable(blocks)
    before: list[list[int]] = [[] for _ in blocks]
    for index in sorted(reachable):
        for follow in blocks[index].follows:
            before[follow].append(index)
    dominators = _dominators(blocks, before)
    loops: dict[int, set[int]] = {}
    for tail in sorted(reachable):
        for head in blocks[tail].follows:
            if head in dominators[tail]:
                body = loops.setdefault(head, {head})
                todo = [tail]
                while todo:
                    index = todo.pop()
                    if index not in body:
                        body.add(index)
                        todo.extend(before[index])
    return [frozenset(loops[head]) for head in sorted(loops)]


def innermost_loops(blocks: Sequence[Block]) -> list[frozenset[int]]:
    """Those natural loops that hold no other loop."""
    loops = natural_loops(blocks)
    return [loop for loop in loops if not any(other < loop for other in loops)]
