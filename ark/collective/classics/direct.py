"""One-shot and two-shot collectives: every rank communicates with all others at the same time.

They have the least latency inside a box whose switch or mesh connects all pairs. Called by
`ark.collective.classics.build`.
"""

from __future__ import annotations

from ark.collective.classics.ring import own_shard, result_span
from ark.collective.programs import IN, OUT, ProgramBuilder, Span


def others(b: ProgramBuilder, rank: int) -> list[int]:
    """All ranks except `rank`, starting with rank + 1. Because every rank starts with another peer,
    the first puts of all ranks go to different peers.
    """
    return [(rank + i) % b.ranks for i in range(1, b.ranks)]


def gather_direct(b: ProgramBuilder) -> None:
    """An all-gather: every rank puts its shard of `out` to every other rank."""
    for rank in range(b.ranks):
        span = own_shard(b, rank)
        for peer in others(b, rank):
            b.put(rank, peer, span, span)


def reduce_scatter_direct(b: ProgramBuilder) -> None:
    """A reduce-scatter: every rank puts each shard of its data to the rank that owns the shard. The
    owner sums all contributions in one operation.
    """
    shard = b.chunks // b.ranks
    scratch = b.scratch(b.chunks)
    for rank in range(b.ranks):
        for peer in others(b, rank):
            b.put(rank, peer, Span(IN, peer * shard, shard), Span(scratch, rank * shard, shard))
    for rank in range(b.ranks):
        parts = [Span(scratch, source * shard, shard) for source in range(b.ranks)]
        parts[rank] = Span(IN, rank * shard, shard)
        b.reduce(rank, parts, result_span(b, rank, own_shard(b, rank)), final=True)


def all_reduce_one_shot(b: ProgramBuilder) -> None:
    """An all-reduce in one step: every rank puts all of its data to every other rank, and each rank
    computes the whole sum itself. Sums are computed in rank order, so reductions that depend on the
    order are supported too.
    """
    scratch = b.scratch(b.ranks * b.chunks)
    for rank in range(b.ranks):
        for peer in others(b, rank):
            b.put(rank, peer, Span(IN, 0, b.chunks), Span(scratch, rank * b.chunks, b.chunks))
    for rank in range(b.ranks):
        parts = [Span(scratch, source * b.chunks, b.chunks) for source in range(b.ranks)]
        parts[rank] = Span(IN, 0, b.chunks)
        b.reduce(rank, parts, Span(OUT, 0, b.chunks), final=True)


def broadcast_direct(b: ProgramBuilder, root: int) -> None:
    """A broadcast: the root puts all data to every other rank."""
    whole = Span(OUT, 0, b.chunks)
    b.copy(root, Span(IN, 0, b.chunks), whole)
    for peer in others(b, root):
        b.put(root, peer, whole, whole)


def reduce_direct(b: ProgramBuilder, root: int) -> None:
    """A reduce: every rank puts all of its data to the root. The root sums all contributions in one
    operation, in rank order.
    """
    scratch = b.scratch(b.ranks * b.chunks)
    parts = [Span(scratch, source * b.chunks, b.chunks) for source in range(b.ranks)]
    for rank in others(b, root):
        b.put(rank, root, Span(IN, 0, b.chunks), parts[rank])
    parts[root] = Span(IN, 0, b.chunks)
    b.reduce(root, parts, Span(OUT, 0, b.chunks), final=True)


def all_to_all_direct(b: ProgramBuilder) -> None:
    """An all-to-all: every rank puts to every other rank the part of its data that is for that
    rank.
    """
    for rank in range(b.ranks):
        for peer in (rank, *others(b, rank)):
            here, there = b.exchanged(rank, peer)
            if not here.count:
                continue
            if peer == rank:
                b.copy(rank, here, there)
            else:
                b.put(rank, peer, here, there)
