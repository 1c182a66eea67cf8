"""Splits puts that pass through other ranks into one put per hop.

A put may have a route through the network. Switches on the route only forward data, but a rank on
the route must receive the data and send it on. `ark.ops.communication.collectives` calls `routed`
before a program becomes tasks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict

from ark.collective.programs.order import describe, in_order
from ark.collective.programs.structure import refusal
from ark.collective.programs.types import (
    Buffer,
    CollectiveProgram,
    Kind,
    Operation,
    OpRef,
    Role,
    Span,
)


def routed(program: CollectiveProgram) -> CollectiveProgram:
    """Returns the program with each put replaced by one put per hop between ranks. Slots for the
    data on intermediate ranks are added.

    A node is recognised as a rank if the route of some put begins or ends there. Raises PlanError
    if routes give two names to one rank, or one name to two ranks.
    """
    ranks = _ranks(program)
    passing = any(
        node in ranks for ops in program.operations for op in ops for node in op.route[1:-1]
    )
    return _split(program, ranks) if passing else program


def _ranks(program: CollectiveProgram) -> dict[str, int]:
    """Returns the rank of each node at which a route begins or ends."""
    rank_of: dict[str, int] = {}
    names: dict[int, str] = {}
    for ref in program.refs():
        op = program.op(ref)
        for node, rank in zip((*op.route[:1], *op.route[-1:]), (ref.rank, op.peer), strict=False):
            assert rank is not None
            if rank_of.setdefault(node, rank) != rank or names.setdefault(rank, node) != node:
                raise refusal(
                    program,
                    f"{describe(program, ref)} has a route in which rank {rank} is the node "
                    f"{node!r}. In another route it is {names.get(rank, rank)!r}, or {node!r} is "
                    f"rank {rank_of[node]}.",
                )
    return rank_of


def _split(program: CollectiveProgram, ranks: dict[str, int]) -> CollectiveProgram:
    lists: list[list[Operation]] = [[] for _ in range(program.ranks)]
    moved: dict[OpRef, OpRef] = {}  # for each put, the position of its last hop
    used: defaultdict[tuple[bool, int], int] = defaultdict(int)
    number = len(program.buffers)
    names = (f"relay{number}", f"relay{number + 1}")

    def add(rank: int, op: Operation) -> OpRef:
        lists[rank].append(op)
        return OpRef(rank, len(lists[rank]) - 1)

    for ref in in_order(program):
        op = program.op(ref)
        op = dataclasses.replace(op, deps=tuple(sorted(moved[dep] for dep in op.deps)))
        dots = program.buffer_by_name[op.dst.buffer].role is Role.DOTS
        stops = [i for i, node in enumerate(op.route) if node in ranks]
        rank = ref.rank
        for begin, end in itertools.pairwise(stops[:-1]) if op.kind is Kind.PUT else ():
            peer = ranks[op.route[end]]
            there = Span(names[dots], used[dots, peer], op.dst.count)
            used[dots, peer] += op.dst.count
            hop = dataclasses.replace(op, dst=there, peer=peer, route=op.route[begin : end + 1])
            before = add(rank, hop)
            rank = peer
            op = dataclasses.replace(op, srcs=(there,), deps=(before,))
        if len(stops) > 2:
            op = dataclasses.replace(op, route=op.route[stops[-2] :])
        moved[ref] = add(rank, op)
    new = tuple(
        Buffer(name, Role.DOTS if dots else Role.SCRATCH, slots)
        for dots, name in enumerate(names)
        if (slots := max((n for (kind, _), n in used.items() if kind == dots), default=0))
    )
    return dataclasses.replace(
        program, buffers=(*program.buffers, *new), operations=tuple(map(tuple, lists))
    )
