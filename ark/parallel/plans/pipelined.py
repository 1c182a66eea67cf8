"""Makes a parallel plan from a pipeline's schedule: each block runs on the devices of the schedule,
in the schedule's order.

The graph contains all micro-batches. Several micro-batches are in progress at the same time in one
launch, because a rank's work on a micro-batch waits only for its data. Each rank follows the
schedule's order. Called by ark.parallel.plans and by users.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from ark.errors import ModelError
from ark.ir.graph import Node
from ark.parallel.pipeline import Schedule
from ark.parallel.transform import ParallelGraph, Piece


def pipelined(
    schedule: Schedule, block_of: Callable[[Node], tuple[str, int] | Sequence[int]]
) -> Callable[[ParallelGraph], None]:
    """A plan for `parallelize` by which each node runs on the device of its block.

    Nodes run in the order of the blocks. schedule: a schedule for as many devices as there are
    ranks (`ark.parallel.tessel`). block_of: a function that returns the block's name and the
    micro-batch of a node. For a node that belongs to no block (the update of a stage's parameters)
    it returns a list of ranks. A block on several devices is computed by each device; a node that
    was split into as many pieces has one piece on each device.

    The plan raises ModelError for a node whose block is not in the schedule, and if the order of
    the schedule contradicts the dependencies in the graph.

    Examples:
        >>> placement = ark.parallel.shape("V", devices=2, forward=1, backward=2)
        >>> schedule = ark.parallel.tessel(placement, memory=2, micro_batches=4)
        >>> plan = ark.parallel.pipelined(schedule, ark.parallel.place_of)
    """
    entries = {(e.block, e.micro_batch): e for e in schedule.entries}

    def plan(graph: ParallelGraph) -> None:
        pieces: dict[tuple[str, int], list[Piece]] = {key: [] for key in entries}
        for node in graph.nodes:
            key = block_of(node)
            if not isinstance(key[0], str):
                for piece in graph.pieces(node):
                    graph.op_assign(piece, *key)
                continue
            if key not in entries:
                raise ModelError(
                    f"{node.name} belongs to block {key[0]!r} of micro-batch {key[1]}, which is "
                    "not in the schedule; make the schedule for the graph's blocks and "
                    "micro-batches"
                )
            devices, own = entries[key].devices, graph.pieces(node)
            for number, piece in enumerate(own):
                at = devices if len(own) == 1 else (devices[number % len(devices)],)
                graph.op_assign(piece, *at)
                pieces[key].append(piece)
        in_order(graph, schedule, pieces)

    return plan


def in_order(
    graph: ParallelGraph, schedule: Schedule, pieces: Mapping[tuple[str, int], list[Piece]]
) -> None:
    """Makes the pieces on each rank run in the order in which the schedule has their blocks.

    pieces: the pieces on the block's devices, by block and micro-batch.
    """
    for device in range(graph.ranks):
        here = sorted((e for e in schedule.entries if device in e.devices), key=lambda e: e.start)
        busy = [
            [p for p in pieces.get((e.block, e.micro_batch), ()) if device in graph.ranks_of(p)]
            for e in here
        ]
        busy = [group for group in busy if group]
        for before, after in itertools.pairwise(busy):
            for first in ends(before, True):
                for then in ends(after, False):
                    graph.op_order(first, then)


def ends(pieces: list[Piece], last: bool) -> list[Piece]:
    """The last pieces of a block (if `last` is True) or its first pieces. The last pieces are those
    whose results no other piece of the block reads. The first pieces are those that read no result
    of another piece of the block.
    """
    writers: dict[int, list[Piece]] = {}
    for piece in pieces:
        for written in piece.written:
            writers.setdefault(written.buffer, []).append(piece)
    inner: set[Piece] = set()
    for piece in pieces:
        for view in piece.inputs:
            for other in writers.get(view.buffer, ()):
                if any(written.meets(view) for written in other.written):
                    inner.add(other if last else piece)
    return [piece for piece in pieces if piece not in inner]
