"""Divides a graph into blocks (a model's layers and the parts around them), and finds isomorphic
blocks.

Blocks follow from the scopes in ops' names: consecutive ops whose names agree up to the first
number form a block. The search splits isomorphic blocks in the same way, so its size is that of one
layer. Called by ark.parallel.plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ark.ir.graph import Node


@dataclass(frozen=True)
class ModelBlock:
    """Consecutive ops of a graph. numbered: True if the block is one of several layers."""

    name: str
    nodes: tuple[Node, ...]
    numbered: bool


def blocks_of(nodes: Sequence[Node]) -> list[ModelBlock]:
    """The blocks in program order."""
    groups: list[tuple[str, bool, list[Node]]] = []
    for node in nodes:
        parts = node.name.split(".")
        digits = [i for i, part in enumerate(parts) if part.isdecimal()]
        name = ".".join(parts[: digits[0] + 1]) if digits else node.name
        if not groups or groups[-1][0] != name:
            groups.append((name, bool(digits), []))
        groups[-1][2].append(node)
    return [ModelBlock(name, tuple(own), numbered) for name, numbered, own in groups]


def isomorphic(blocks: Sequence[ModelBlock]) -> dict[int, int]:
    """For each node of a block, the id of the corresponding node (the same op) of the first
    isomorphic block.
    """
    first: dict[tuple[object, ...], ModelBlock] = {}
    same: dict[int, int] = {}
    for block in blocks:
        model = first.setdefault(_signature(block), block)
        for node, like in zip(block.nodes, model.nodes, strict=True):
            same[node.id] = like.id
    return same


def _signature(block: ModelBlock) -> tuple[object, ...]:
    """A value that is equal for isomorphic blocks. It is computed from ops, sizes and
    dependencies.
    """
    place = {node.outputs[0].buffer.id: i for i, node in enumerate(block.nodes) if node.outputs}
    parts: list[object] = []
    for node in block.nodes:
        reads = tuple(
            (t.shape, t.dtype.name, t.buffer.arena, place.get(t.buffer.id, -1)) for t in node.inputs
        )
        writes = tuple((t.shape, t.dtype.name, t.buffer.arena) for t in node.outputs)
        parts.append((node.type, tuple(sorted(node.attrs.items(), key=str)), reads, writes))
    return tuple(map(repr, parts))
