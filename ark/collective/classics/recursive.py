"""Recursive doubling and halving: log2(N) steps between partners at distances 1, 2, 4, ...

Called by `ark.collective.classics`, and by the vector-halving Adasum for its all-gather.
"""

from __future__ import annotations

from ark.collective.classics.ring import own_shard, result_span
from ark.collective.programs import IN, OUT, ProgramBuilder, Span


def gather_doubling(b: ProgramBuilder) -> None:
    """An all-gather by recursive doubling, into `out`. After step i (from 0), every rank holds the
    shards of its block of 2**(i+1) consecutive ranks.
    """
    shard = b.chunks // b.ranks
    distance = 1
    while distance < b.ranks:
        for rank in range(b.ranks):
            first = rank // distance * distance
            span = Span(OUT, first * shard, distance * shard)
            b.put(rank, rank ^ distance, span, span)
        distance *= 2


def reduce_scatter_halving(b: ProgramBuilder) -> None:
    """A reduce-scatter by recursive halving. In each step, a rank sends its partner that half of
    its remaining data whose owners are on the partner's side, and sums the half that it receives.
    The first step has the most distant partners.
    """
    scratch_levels = b.ranks.bit_length() - 1
    shard = b.chunks // b.ranks
    received = b.scratch(scratch_levels * b.chunks, "receive")
    sums = b.scratch(scratch_levels * b.chunks, "sums")
    distance = b.ranks // 2
    for level in range(scratch_levels):
        for rank in range(b.ranks):
            partner = rank ^ distance
            first = partner // distance * distance * shard
            src = Span(IN, first, distance * shard)
            if level:
                src = Span(sums, (level - 1) * b.chunks + first, distance * shard)
            b.put(rank, partner, src, Span(received, level * b.chunks + first, distance * shard))
        for rank in range(b.ranks):
            first = rank // distance * distance * shard
            count = distance * shard
            mine = Span(IN, first, count)
            if level:
                mine = Span(sums, (level - 1) * b.chunks + first, count)
            theirs = Span(received, level * b.chunks + first, count)
            last = distance == 1
            total = Span(sums, level * b.chunks + first, count)
            if last:
                total = result_span(b, rank, own_shard(b, rank))
            b.reduce(
                rank, [mine, theirs] if rank < rank ^ distance else [theirs, mine], total, last
            )
        distance //= 2


def all_reduce_doubling(b: ProgramBuilder) -> None:
    """An all-reduce by recursive doubling. In each step, partners exchange everything that they
    have summed so far. This has the least latency, but sends log2(N) times the data.
    """
    levels = b.ranks.bit_length() - 1
    received = b.scratch(levels * b.chunks, "receive")
    sums = b.scratch(levels * b.chunks, "sums")

    def held(level: int) -> Span:
        if level == 0:
            return Span(IN, 0, b.chunks)
        if level == levels:
            return Span(OUT, 0, b.chunks)
        return Span(sums, level * b.chunks, b.chunks)

    for level in range(levels):
        box = Span(received, level * b.chunks, b.chunks)
        for rank in range(b.ranks):
            b.put(rank, rank ^ 1 << level, held(level), box)
        for rank in range(b.ranks):
            pair = [held(level), box] if not rank >> level & 1 else [box, held(level)]
            b.reduce(rank, pair, held(level + 1), level == levels - 1)
