"""Ring collectives, in one direction or in both: every rank communicates with its neighbours only.

They are bandwidth-optimal on a ring and take N - 1 steps. Called by
`ark.collective.classics.build`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ark.collective.programs import IN, OUT, Collective, ProgramBuilder, Span


def own_shard(b: ProgramBuilder, rank: int, part: int = 0, parts: int = 1) -> Span:
    """The slots of `out` that hold the rank's shard, or number `part` of `parts` equal parts of
    it.
    """
    shard = b.chunks // b.ranks
    return Span(OUT, rank * shard + part * shard // parts, shard // parts)


def load_shards(b: ProgramBuilder) -> None:
    """The first step of an all-gather: every rank copies its contribution from `in` to its shard of
    `out`.
    """
    shard = b.chunks // b.ranks
    for rank in range(b.ranks):
        b.copy(rank, Span(IN, 0, shard), own_shard(b, rank))


def gather_ring(b: ProgramBuilder, rings: Sequence[Sequence[int]]) -> None:
    """An all-gather by rings: every rank's shard in `out` is passed around each ring. Each ring
    carries an equal part of every shard.
    """
    for hop in range(b.ranks - 1):
        for part, ring in enumerate(rings):
            for i, rank in enumerate(ring):
                span = own_shard(b, ring[(i - hop) % len(ring)], part, len(rings))
                b.put(rank, ring[(i + 1) % len(ring)], span, span)


def reduce_scatter_ring(b: ProgramBuilder, rings: Sequence[Sequence[int]]) -> None:
    """A reduce-scatter by rings, and the first half of an all-reduce. Each ring has all ranks, and
    passes its own part of every shard.
    """
    pass_sums(b, rings, IN, b.scratch(b.chunks), len(rings))


def pass_sums(
    b: ProgramBuilder, rings: Sequence[Sequence[int]], source: str, scratch: str, parts: int = 1
) -> None:
    """Passes partial sums of the shards of a ring's ranks around the ring. They are complete when
    they reach the owner of the shard. The result is in the owner's `out`: at the shard's place for
    an all-reduce, at the start for a reduce-scatter. source: the buffer with each rank's own
    summands. parts: if above 1, ring number p passes part p of this many parts of each shard.
    """
    n = len(rings[0])
    for hop in range(n - 1):
        sums = []
        for part, ring in enumerate(rings):
            for i, rank in enumerate(ring):
                owner = ring[(i - hop - 1) % n]
                span = own_shard(b, owner, part if parts > 1 else 0, parts)
                here = Span(source, span.start, span.count)
                there = Span(scratch, span.start, span.count)
                peer = ring[(i + 1) % n]
                b.put(rank, peer, here if hop == 0 else there, there)
                last = hop == n - 2
                target = result_span(b, owner, span) if last else there
                sums.append((peer, [there, here], target, last))
        for peer, sources, target, last in sums:
            b.reduce(peer, sources, target, last)


def result_span(b: ProgramBuilder, owner: int, span: Span) -> Span:
    """The slots of `out` on `owner` that get the completely reduced sum of `span`, a part of the
    owner's shard.
    """
    if b.collective is Collective.REDUCE_SCATTER:
        return Span(OUT, span.start - owner * (b.chunks // b.ranks), span.count)
    return span


def broadcast_chain(b: ProgramBuilder, ring: Sequence[int]) -> None:
    """A broadcast along a chain: the data pass from the first rank of `ring` to its last. If the
    data are cut into pieces, the ranks work as a pipeline.
    """
    whole = Span(OUT, 0, b.chunks)
    b.copy(ring[0], Span(IN, 0, b.chunks), whole)
    for rank, peer in itertools.pairwise(ring):
        b.put(rank, peer, whole, whole)


def reduce_chain(b: ProgramBuilder, ring: Sequence[int]) -> None:
    """A reduce along a chain: partial sums pass from the last rank of `ring` to its first."""
    scratch = Span(b.scratch(b.chunks), 0, b.chunks)
    here = Span(IN, 0, b.chunks)
    back = list(reversed(ring))
    for i, (rank, peer) in enumerate(itertools.pairwise(back)):
        b.put(rank, peer, here if i == 0 else scratch, scratch)
        last = i == len(ring) - 2
        b.reduce(peer, [scratch, here], Span(OUT, 0, b.chunks) if last else scratch, last)
