"""A graph as a row of blocks (a model's layers and what is around them), and which are isomorphic.

Blocks follow the scopes of names: all ops whose names agree up to the first number are one block.
Blocks of the same ops are split the same way by the search, which then is as large as one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ark.ir.graph import Node


@dataclass(frozen=True)
class ModelBlock:
    """Consecutive ops. numbered: it is one of several layers."""

    name: str
    nodes: tuple[Node, ...]
    numbered: bool


def blocks_of(nodes: Sequence[Node]) -> list[ModelBlock]:
    """The blocks in program order."""
    made: list[tuple[str, bool, list[Node]]] = []
    for node in nodes:
        parts = node.name.split(".")
        digits = [i for i, part in enumerate(parts) if part.isdecimal()]
        name = ".".join(parts[: digits[0] + 1]) if digits else node.name
        if not made or made[-1][0] != name:
            made.append((name, bool(digits), []))
        made[-1][2].append(node)
    return [ModelBlock(name, tuple(own), numbered) for name, numbered, own in made]


def isomorphic(blocks: Sequence[ModelBlock]) -> dict[int, int]:
    """By node id, the id of the first node that is its like: the same op of an equal block."""
    first: dict[tuple[object, ...], ModelBlock] = {}
    same: dict[int, int] = {}
    for block in blocks:
        model = first.setdefault(_signature(block), block)
        for node, like in zip(block.nodes, model.nodes, strict=True):
            same[node.id] = like.id
    return same


def _signature(block: ModelBlock) -> tuple[object, ...]:
    """What equal blocks have in common: their ops, sizes, and who reads whom."""
    place = {node.outputs[0].buffer.id: i for i, node in enumerate(block.nodes) if node.outputs}
    found: list[object] = []
    for node in block.nodes:
        reads = tuple(
            (t.shape, t.dtype.name, t.buffer.arena, place.get(t.buffer.id, -1)) for t in node.inputs
        )
        writes = tuple((t.shape, t.dtype.name, t.buffer.arena) for t in node.outputs)
        found.append((node.type, tuple(sorted(node.attrs.items(), key=str)), reads, writes))
    return tuple(map(repr, found))
