"""Hierarchical collectives for boxes, groups of ranks with fast links inside and slow links between
the groups. Ranks with the same place in their boxes form a rail. Data cross the slow links once,
along rails; inside a box, every rank sends directly to every other. Called by
`ark.collective.classics`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.collective.classics.ring import own_shard, pass_sums, result_span
from ark.collective.programs import IN, OUT, ProgramBuilder, Span

Boxes = Sequence[Sequence[int]]


def rails(boxes: Boxes) -> list[list[int]]:
    """The rails: for each place in a box, the ranks that have this place."""
    return [list(rail) for rail in zip(*boxes, strict=True)]


def gather_boxes(b: ProgramBuilder, boxes: Boxes) -> None:
    """A hierarchical all-gather. Each shard goes around its rail (the ranks with the same position
    in all boxes). Every rank forwards each shard that it receives to the other ranks of its box.
    """
    box_of = {rank: box for box in boxes for rank in box}

    def spread(rank: int, owner: int) -> None:
        span = own_shard(b, owner)
        box = box_of[rank]
        place = box.index(rank)
        for i in range(1, len(box)):
            b.put(rank, box[(place + i) % len(box)], span, span)

    held = {rank: rank for rank in range(b.ranks)}
    for hop in range(len(boxes)):
        arriving = {}
        for rail in rails(boxes) if hop < len(boxes) - 1 else ():
            for i, rank in enumerate(rail):
                span = own_shard(b, held[rank])
                peer = rail[(i + 1) % len(rail)]
                b.put(rank, peer, span, span)
                arriving[peer] = held[rank]
        for rank in range(b.ranks):
            spread(rank, held[rank])
        held = arriving


def reduce_scatter_boxes(b: ProgramBuilder, boxes: Boxes) -> None:
    """A hierarchical reduce-scatter. Inside each box, every rank sums the shards of its rail (the
    ranks with the same position in all boxes). Then the sums go around the rails.
    """
    shard = b.chunks // b.ranks
    received = b.scratch(len(boxes[0]) * b.chunks, "receive")
    sums = b.scratch(b.chunks, "sums")
    gathered = []
    for place, rail in enumerate(rails(boxes)):
        for owner in rail:
            own = Span(IN, owner * shard, shard)
            for box in boxes:
                rank = box[place]
                parts = []
                for i, peer in enumerate(box):
                    part = Span(received, i * b.chunks + owner * shard, shard)
                    if peer != rank:
                        b.put(peer, rank, own, part)
                    parts.append(own if peer == rank else part)
                gathered.append((rank, owner, parts))
    for rank, owner, parts in gathered:
        target = Span(sums, owner * shard, shard)
        if len(boxes) == 1:
            target = result_span(b, owner, own_shard(b, owner))
        if len(parts) > 1:
            b.reduce(rank, parts, target, final=len(boxes) == 1)
        else:
            b.copy(rank, parts[0], target)
    # Partial sums of every shard then go around the rail of the shard's owner.
    pass_sums(b, rails(boxes), sums, b.scratch(b.chunks, "rounds"))


def all_to_all_boxes(b: ProgramBuilder, boxes: Boxes) -> None:
    """A hierarchical all-to-all. The part for a rank goes first to the rank in the sender's box
    that is on the receiver's rail, and then along that rail to the receiver.
    """
    shard = b.chunks // b.ranks
    width = len(boxes[0])
    relay = b.scratch(width * b.chunks, "relay")
    box_of = {rank: box for box in boxes for rank in box}
    place_of = {rank: box.index(rank) for box in boxes for rank in box}
    for rank in range(b.ranks):
        mine = Span(OUT, rank * shard, shard)
        b.copy(rank, Span(IN, rank * shard, shard), mine)
        for i in range(1, b.ranks):
            peer = (rank + i) % b.ranks
            src = Span(IN, peer * shard, shard)
            via = box_of[rank][place_of[peer]]
            if via in (rank, peer):
                b.put(rank, peer, src, mine)
                continue
            stop = Span(relay, place_of[rank] * b.chunks + peer * shard, shard)
            b.put(rank, via, src, stop)
            b.put(via, peer, stop, mine)
