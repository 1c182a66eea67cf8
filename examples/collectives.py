"""Classic collective algorithms, written with ark.comm.program, for any number of ranks that the
algorithm supports.

python examples/collectives.py prints the predicted time of each on eight GPUs behind a switch.
"""

from __future__ import annotations

from collections.abc import Callable

import ark.comm
from ark.collective.programs import CollectiveProgram
from ark.collective.programs.language import Chunk, Program


def ring_all_gather(n: int) -> CollectiveProgram:
    """All-gather on a ring: each rank's shard goes around the ring in n - 1 steps. Every link is
    busy in each step.
    """

    @ark.comm.program("all_gather", n)
    def ring(p: Program) -> None:
        for rank in p.ranks:
            p.input(rank).to(p.output(rank, rank))
        for hop in range(n - 1):
            for rank in p.ranks:
                shard = (rank - hop) % n
                p.output(rank, shard).to(p.output((rank + 1) % n, shard))

    return ring


def _double(p: Program) -> None:
    """Doubles the parts that each rank has: in step i the two ranks of each pair at distance 2^i
    exchange all their parts.
    """
    distance = 1
    while distance < len(p.ranks):
        for rank in p.ranks:
            first = rank // distance * distance
            p.output(rank, first, distance).to(p.output(rank ^ distance, first, distance))
        distance *= 2


def recursive_doubling_all_gather(n: int) -> CollectiveProgram:
    """All-gather in log2 n steps: in step i the two ranks of each pair at distance 2^i exchange all
    parts that they have. n is a power of two.
    """

    @ark.comm.program("all_gather", n)
    def recursive_doubling(p: Program) -> None:
        for rank in p.ranks:
            p.input(rank).to(p.output(rank, rank))
        _double(p)

    return recursive_doubling


def direct_all_gather(n: int) -> CollectiveProgram:
    """All-gather in one step: each rank puts its part to all ranks."""

    @ark.comm.program("all_gather", n)
    def direct(p: Program) -> None:
        for rank in p.ranks:
            for step in range(n):
                p.input(rank).to(p.output((rank + step) % n, rank))

    return direct


def ring_reduce_scatter(n: int) -> CollectiveProgram:
    """Reduce-scatter on a ring: partial sums go around the ring and end at the shard's owner."""

    @ark.comm.program("reduce_scatter", n, scratch=n)
    def ring(p: Program) -> None:
        for hop in range(n - 1):
            for rank in p.ranks:
                shard, peer = (rank - hop - 1) % n, (rank + 1) % n
                carried = p.input(rank, shard) if hop == 0 else p.scratch(rank, shard)
                carried.to(p.scratch(peer, shard))
            for rank in p.ranks:
                shard, last = (rank - hop - 2) % n, hop == n - 2
                into = p.output(rank) if last else p.scratch(rank, shard)
                p.reduce(p.scratch(rank, shard), p.input(rank, shard), into=into)

    return ring


def direct_reduce_scatter(n: int) -> CollectiveProgram:
    """Reduce-scatter in one step: each rank puts to each peer the shard that the peer owns. The
    owner adds up the shards it received, in rank order.
    """

    @ark.comm.program("reduce_scatter", n, scratch=n)
    def direct(p: Program) -> None:
        for rank in p.ranks:
            for shard in p.ranks:
                p.input(rank, shard).to(p.scratch(shard, rank))
        for rank in p.ranks:
            p.reduce(*p.scratch(rank, 0, n), into=p.output(rank))

    return direct


def one_shot_all_reduce(n: int) -> CollectiveProgram:
    """All-reduce in one step: each rank puts all its data to all ranks and adds everything up. This
    sends n times the bytes.
    """

    @ark.comm.program("all_reduce", n, chunks=1, scratch=n)
    def one_shot(p: Program) -> None:
        for rank in p.ranks:
            for step in range(n):
                p.input(rank).to(p.scratch((rank + step) % n, rank))
        for rank in p.ranks:
            p.reduce(*p.scratch(rank, 0, n), into=p.output(rank))

    return one_shot


def two_shot_all_reduce(n: int) -> CollectiveProgram:
    """All-reduce in two steps: a direct reduce-scatter, after which each owner of a shard puts its
    sum to all ranks.
    """

    @ark.comm.program("all_reduce", n, scratch=n)
    def two_shot(p: Program) -> None:
        for rank in p.ranks:
            for shard in p.ranks:
                p.input(rank, shard).to(p.scratch(shard, rank))
        for rank in p.ranks:
            total = p.reduce(*p.scratch(rank, 0, n), into=p.output(rank, rank))
            for step in range(1, n):
                total.to(p.output((rank + step) % n, rank))

    return two_shot


def ring_all_reduce(n: int) -> CollectiveProgram:
    """All-reduce on a ring: a ring's reduce-scatter, then its all-gather. No other algorithm sends
    fewer bytes on a ring.
    """

    @ark.comm.program("all_reduce", n, scratch=n)
    def ring(p: Program) -> None:
        for hop in range(n - 1):
            for rank in p.ranks:
                shard, peer = (rank - hop - 1) % n, (rank + 1) % n
                carried = p.input(rank, shard) if hop == 0 else p.scratch(rank, shard)
                carried.to(p.scratch(peer, shard))
            for rank in p.ranks:
                shard, last = (rank - hop - 2) % n, hop == n - 2
                into = p.output(rank, rank) if last else p.scratch(rank, shard)
                p.reduce(p.scratch(rank, shard), p.input(rank, shard), into=into)
        for hop in range(n - 1):
            for rank in p.ranks:
                shard = (rank - hop) % n
                p.output(rank, shard).to(p.output((rank + 1) % n, shard))

    return ring


def binomial_broadcast(n: int) -> CollectiveProgram:
    """Broadcast in log2 n steps: in each step the number of ranks that have the data doubles."""

    @ark.comm.program("broadcast", n, chunks=1, root=0)
    def binomial(p: Program) -> None:
        p.input(0).to(p.output(0))
        distance = 1
        while distance < n:
            for rank in range(min(distance, n - distance)):
                p.output(rank).to(p.output(rank + distance))
            distance *= 2

    return binomial


def scatter_all_gather_broadcast(n: int) -> CollectiveProgram:
    """Broadcast of large data by van de Geijn's algorithm: the root sends a shard to each rank, and
    the shards then go around a ring.
    """

    @ark.comm.program("broadcast", n, root=0)
    def scatter_all_gather(p: Program) -> None:
        for rank in p.ranks:
            p.input(0, rank).to(p.output(rank, rank))
        for hop in range(n - 1):
            for rank in p.ranks:
                shard, peer = (rank - hop) % n, (rank + 1) % n
                p.output(rank, shard).to(p.output(peer, shard))

    return scatter_all_gather


def binomial_reduce(n: int) -> CollectiveProgram:
    """Reduction to rank 0: in each step half of the remaining ranks send to the other half, which
    adds. n is a power of two.
    """

    @ark.comm.program("reduce", n, chunks=1, scratch=2, root=0)
    def binomial(p: Program) -> None:
        held = {rank: p.input(rank) for rank in p.ranks}
        half = n // 2
        while half:
            for rank in range(half):
                held[rank + half].to(p.scratch(rank))
                into = p.output(rank) if half == 1 else p.scratch(rank, 1)
                held[rank] = p.reduce(held[rank], p.scratch(rank), into=into)
            half //= 2

    return binomial


def direct_all_to_all(n: int) -> CollectiveProgram:
    """All-to-all in one step: each part goes directly to its rank. Each rank begins with a
    different receiver.
    """

    @ark.comm.program("all_to_all", n, chunks=n)
    def direct(p: Program) -> None:
        for rank in p.ranks:
            for step in range(n):
                peer = (rank + step) % n
                p.input(rank, peer).to(p.output(peer, rank))

    return direct


def bruck_all_gather(n: int) -> CollectiveProgram:
    """All-gather for any n in about log2 n steps: the number of shards that a rank has doubles in
    each step. It receives the shards of the ranks that follow its own in one message.

    J. Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport
    Message-Passing Systems". Shards are in the order of distance until the end.
    """

    @ark.comm.program("all_gather", n, scratch=n)
    def bruck(p: Program) -> None:
        for rank in p.ranks:
            p.input(rank).to(p.scratch(rank, 0))
        had = 1
        while had < n:
            count = min(had, n - had)
            for rank in p.ranks:
                p.scratch(rank, 0, count).to(p.scratch((rank - had) % n, had, count))
            had *= 2
        for rank in p.ranks:
            for distance, shard in enumerate(p.scratch(rank, 0, n)):
                shard.to(p.output(rank, (rank + distance) % n))

    return bruck


def _halve(p: Program, home: Callable[[int], Chunk]) -> None:
    """Recursive halving: in each step, the two ranks of each pair (at distance n/2, then n/4, ...)
    exchange halves of the data that they still reduce, and add the received half to their own.
    Needs 2n chunks of scratch memory.
    """
    n = len(p.ranks)
    left, distance = p.input, n // 2
    while distance:
        for rank in p.ranks:
            first = (rank ^ distance) // distance * distance
            left(rank, first, distance).to(p.scratch(rank ^ distance, n + first, distance))
        for rank in p.ranks:
            first = rank // distance * distance
            parts = left(rank, first, distance), p.scratch(rank, n + first, distance)
            into = home(rank) if distance == 1 else p.scratch(rank, first, distance)
            p.reduce(*parts, into=into)
        left, distance = p.scratch, distance // 2


def recursive_halving_reduce_scatter(n: int) -> CollectiveProgram:
    """Reduce-scatter in log2 n steps: each step exchanges half of the bytes of the preceding step.
    n is a power of two.
    """

    @ark.comm.program("reduce_scatter", n, scratch=2 * n)
    def recursive_halving(p: Program) -> None:
        _halve(p, p.output)

    return recursive_halving


def rabenseifner_all_reduce(n: int) -> CollectiveProgram:
    """All-reduce by Rabenseifner: recursive halving, then recursive doubling. It sends a ring's
    bytes in 2 log2 n steps.
    """

    @ark.comm.program("all_reduce", n, scratch=2 * n)
    def rabenseifner(p: Program) -> None:
        _halve(p, lambda rank: p.output(rank, rank))
        _double(p)

    return rabenseifner


def recursive_doubling_all_reduce(n: int) -> CollectiveProgram:
    """All-reduce of small data in log2 n steps: pairs of ranks at distance 1, 2, 4, ... exchange
    all their data and add.

    Both ranks of a pair add the same two sums, so all ranks get the same bits.
    """

    @ark.comm.program("all_reduce", n, chunks=1, scratch=2)
    def recursive_doubling(p: Program) -> None:
        held = [p.input(rank) for rank in p.ranks]
        distance = 1
        while distance < n:
            for rank in p.ranks:
                held[rank].to(p.scratch(rank ^ distance))
            for rank in p.ranks:
                into = p.output(rank) if 2 * distance == n else p.scratch(rank, 1)
                held[rank] = p.reduce(held[rank], p.scratch(rank), into=into)
            distance *= 2

    return recursive_doubling


def _parent(node: int, n: int) -> int:
    """The parent of a node of the binary tree whose in-order numbers are 1 to n. Leaves are odd,
    the root is a power of 2.
    """
    lowest = node & -node
    above = (node ^ lowest) | 2 * lowest
    return above if above <= n else _parent(above, n)


def double_binary_tree_all_reduce(n: int) -> CollectiveProgram:
    """All-reduce over two binary trees, each of which reduces and broadcasts half of the data.
    Inner ranks of one tree are leaves of the other.

    P. Sanders, J. Speck, J. L. Traff, "Two-tree algorithms for full bandwidth broadcast, reduction
    and scan". The second tree is the first one mirrored, or shifted if n is odd.
    """

    @ark.comm.program("all_reduce", n, chunks=2, scratch=4)
    def double_binary_tree(p: Program) -> None:
        root = 1 << (n.bit_length() - 1)
        from_leaves = sorted(range(1, n + 1), key=lambda node: node & -node)
        other = [(n - node if n % 2 == 0 else node) % n for node in range(n + 1)]
        for tree, rank_of in enumerate(([node - 1 for node in range(n + 1)], other)):
            held = {node: [p.input(rank_of[node], tree)] for node in from_leaves}
            for node in from_leaves:
                mine, rank = held[node], rank_of[node]
                into = p.output(rank, tree)
                total = p.reduce(*mine, into=into) if len(mine) > 1 else mine[0]
                if node != root:
                    up = _parent(node, n)
                    place = p.scratch(rank_of[up], 2 * tree + (node > up))
                    held[up].append(total.to(place))
            for node in from_leaves[::-1]:
                if node != root:
                    above = p.output(rank_of[_parent(node, n)], tree)
                    above.to(p.output(rank_of[node], tree))

    return double_binary_tree


def hierarchical_all_reduce(n: int) -> CollectiveProgram:
    """All-reduce over two hosts of n/2 ranks each: shards are added within each host, then across
    the hosts, and then distributed within each host.

    Only a host's sums are sent to the other host, each over the link of the rank that owns it. n is
    even.
    """
    size = n // 2

    @ark.comm.program("all_reduce", n, chunks=size, scratch=size + 2)
    def hierarchical(p: Program) -> None:
        for rank in p.ranks:
            for shard in range(size):
                p.input(rank, shard).to(p.scratch(rank // size * size + shard, rank % size))
        for rank in p.ranks:
            mine = p.scratch(rank, 0)
            if size > 1:
                mine = p.reduce(*p.scratch(rank, 0, size), into=p.scratch(rank, size))
            mine.to(p.scratch((rank + size) % n, size + 1))
        for rank in p.ranks:
            box, shard = divmod(rank, size)
            sums = [p.scratch(rank, size if size > 1 else 0), p.scratch(rank, size + 1)]
            total = p.reduce(*sums, into=p.output(rank, shard))
            for step in range(1, size):
                total.to(p.output(box * size + (shard + step) % size, shard))

    return hierarchical


def bruck_all_to_all(n: int) -> CollectiveProgram:
    """All-to-all of small parts in about log2 n steps, for any n: in step i a part moves on by 2^i
    ranks if bit i of the distance to its receiver is set.

    See Bruck et al., cited at bruck_all_gather. A part that moves goes to the other half of the
    scratch memory, because its place in the same half is still being sent.
    """

    @ark.comm.program("all_to_all", n, chunks=n, scratch=2 * n)
    def bruck(p: Program) -> None:
        for rank in p.ranks:
            for distance in range(n):
                p.input(rank, (rank + distance) % n).to(p.scratch(rank, distance))
        side, bit = [0] * n, 1
        while bit < n:
            for distance in (d for d in range(n) if d & bit):
                here, there = side[distance] * n, (1 - side[distance]) * n
                for rank in p.ranks:
                    to = p.scratch((rank + bit) % n, there + distance)
                    p.scratch(rank, here + distance).to(to)
                side[distance] = 1 - side[distance]
            bit *= 2
        for rank in p.ranks:
            for distance in range(n):
                place = p.output(rank, (rank - distance) % n)
                p.scratch(rank, side[distance] * n + distance).to(place)

    return bruck


def pairwise_all_to_all(n: int) -> CollectiveProgram:
    """All-to-all in which each rank exchanges parts with one peer per step: the rank's number xor
    the step. n is a power of two.
    """

    @ark.comm.program("all_to_all", n, chunks=n)
    def pairwise(p: Program) -> None:
        for step in range(n):
            for rank in p.ranks:
                p.input(rank, rank ^ step).to(p.output(rank ^ step, rank))

    return pairwise


ALGORITHMS: tuple[Callable[[int], CollectiveProgram], ...] = (
    ring_all_gather,
    recursive_doubling_all_gather,
    direct_all_gather,
    ring_reduce_scatter,
    direct_reduce_scatter,
    one_shot_all_reduce,
    two_shot_all_reduce,
    ring_all_reduce,
    binomial_broadcast,
    scatter_all_gather_broadcast,
    binomial_reduce,
    direct_all_to_all,
    bruck_all_gather,
    recursive_halving_reduce_scatter,
    rabenseifner_all_reduce,
    recursive_doubling_all_reduce,
    double_binary_tree_all_reduce,
    hierarchical_all_reduce,
    bruck_all_to_all,
    pairwise_all_to_all,
)

if __name__ == "__main__":
    from ark.collective.simulate import simulate
    from ark.collective.topology import load

    network = load("h100:gpus=8")
    for algorithm in ALGORITHMS:
        result = simulate(algorithm(8), network, 16 << 20)
        print(f"{algorithm.__name__:32} {result.time_us:8.1f} us for 16 MB")
