"""Programs for reductions that need whole tensors: Adasum and the model combiner.

Adasum has two forms. The tree combines whole tensors in pairs. In the vector-halving form of Maleki
et al. (MLSys 2021, section 4), ranks hold slices, and the three dot products of each pair are sums
of partial dot products. The combiner reduces in rank order. Called by ark.collective.classics.
"""

from __future__ import annotations

from ark.collective.programs import IN, OUT, ProgramBuilder, Span


def adasum_tree(b: ProgramBuilder) -> None:
    """An all-reduce with Adasum: whole tensors are combined in pairs along a binomial tree towards
    rank 0, which sends the result down the tree.
    """
    levels = b.ranks.bit_length() - 1
    received = b.scratch(levels * b.chunks, "receive")
    whole = Span(OUT, 0, b.chunks)
    for level in range(levels):
        held = Span(IN, 0, b.chunks) if level == 0 else whole
        for rank in range(0, b.ranks, 2 << level):
            box = Span(received, level * b.chunks, b.chunks)
            b.put(rank + (1 << level), rank, held, box)
            b.reduce(rank, [held, box], whole, final=level == levels - 1)
    for level in reversed(range(levels)):
        for rank in range(0, b.ranks, 2 << level):
            b.put(rank, rank + (1 << level), whole, whole)


def adasum_halving(b: ProgramBuilder) -> None:
    """Adasum by recursive halving. At each level, the slices of the tensor are half as long as
    before, and the partners are twice as far apart. The dot products of a level are sums of the
    partial dot products of 2**(level+1) ranks.
    """
    levels = b.ranks.bit_length() - 1
    received = b.scratch(levels * b.chunks, "receive")
    held = b.scratch(levels * b.chunks, "held")
    dots = b.dots(levels * (b.ranks + 2))
    low = [0] * b.ranks
    count = b.chunks
    for level in range(levels):
        count //= 2
        source, shift = (IN, 0) if level == 0 else (held, (level - 1) * b.chunks)
        for rank in range(b.ranks):
            sent = low[rank] + (0 if rank >> level & 1 else count)
            slot = Span(received, level * b.chunks + sent, count)
            b.put(rank, rank ^ 1 << level, Span(source, shift + sent, count), slot)
        low = [start + (count if rank >> level & 1 else 0) for rank, start in enumerate(low)]
        pairs = []
        for rank in range(b.ranks):
            mine = Span(source, shift + low[rank], count)
            theirs = Span(received, level * b.chunks + low[rank], count)
            pairs.append((theirs, mine) if rank >> level & 1 else (mine, theirs))
        total = _share_dots(b, pairs, Span(dots, level * (b.ranks + 2), b.ranks + 2), 2 << level)
        for rank, (first, second) in enumerate(pairs):
            last = level == levels - 1
            target = Span(OUT, low[rank], count)
            if not last:
                target = Span(held, level * b.chunks + low[rank], count)
            b.blend(rank, first, second, total, target)
    _gather_halves(b, low, count)


def _share_dots(b: ProgramBuilder, pairs: list[tuple[Span, Span]], slots: Span, group: int) -> Span:
    """Sums the dot products of all pairs over every group of `group` ranks. Returns the slots with
    the sums.
    """
    received, partial, total = slots.start, slots.start + b.ranks, slots.start + b.ranks + 1
    for rank, (first, second) in enumerate(pairs):
        b.dot(rank, first, second, Span(slots.buffer, partial))
    for rank in range(b.ranks):
        start = rank // group * group
        for peer in range(start, start + group):
            if peer != rank:
                b.put(rank, peer, Span(slots.buffer, partial), Span(slots.buffer, received + rank))
    for rank in range(b.ranks):
        start = rank // group * group
        parts = [
            Span(slots.buffer, partial if peer == rank else received + peer)
            for peer in range(start, start + group)
        ]
        b.reduce_dots(rank, parts, Span(slots.buffer, total))
    return Span(slots.buffer, total)


def _gather_halves(b: ProgramBuilder, low: list[int], count: int) -> None:
    """Gathers the slices that recursive halving has left on the ranks. It reverses the halving's
    steps: partners exchange the slices that they hold, the farthest partners first.
    """
    low = list(low)
    distance = b.ranks // 2
    while distance:
        for rank in range(b.ranks):
            span = Span(OUT, low[rank], count)
            b.put(rank, rank ^ distance, span, span)
        low = [min(low[rank], low[rank ^ distance]) for rank in range(b.ranks)]
        count *= 2
        distance //= 2


def combiner_chain(b: ProgramBuilder) -> None:
    """An all-reduce with the model combiner: the gradient is passed through the ranks in order, and
    each rank combines its own gradient with it. The last rank sends the result to all ranks.
    """
    received = Span(b.scratch(b.chunks, "receive"), 0, b.chunks)
    whole = Span(OUT, 0, b.chunks)
    for rank in range(1, b.ranks):
        b.put(rank - 1, rank, Span(IN, 0, b.chunks) if rank == 1 else whole, received)
        b.reduce(rank, [received, Span(IN, 0, b.chunks)], whole, final=rank == b.ranks - 1)
    for rank in range(b.ranks - 1):
        b.put(b.ranks - 1, rank, whole, whole)
